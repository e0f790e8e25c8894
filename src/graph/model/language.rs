//! Language models: graphs whose inputs and outputs have known names.

use crate::builder::{BuildResult, Builder, CacheSpec};
use crate::{Graph, ShapeError};
use potluck_core::TensorId;

/// Rows of logits in a chunk of the loss: enough for products at full speed.
const LOSS_ROWS: usize = 1024;

/// Ends the graph of a model of the residual stream `x (b, t, c)` with the loss of the targets
/// `(b, t)` under the logits `x head^T`, and outside of training with the output `logits (b, 1,
/// v)`: the logits of the position that a sample selects.
pub(super) fn end_with_loss(
    b: &mut Builder,
    x: TensorId,
    head: TensorId,
    targets: TensorId,
) -> Result<(), ShapeError> {
    b.outside_of_training(|b| end_with_logits(b, x, head))?;
    b.linear_cross_entropy_loss(x, head, targets, LOSS_ROWS)?;
    Ok(())
}

/// Ends the graph of a model of the residual stream `x (b, t, c)` with the logits of the position
/// that a sample selects: the output `logits (b, 1, v)`. The head, the largest matrix of a small
/// model, is computed for one row.
pub(super) fn end_with_logits(
    b: &mut Builder,
    x: TensorId,
    head: TensorId,
) -> Result<(), ShapeError> {
    let row = row_at_position(b, x)?;
    output_logits(b, row, head)
}

/// Makes the logits `x head^T` of rows `x (b, n, c)` the output `logits` (b, n, v).
pub(super) fn output_logits(
    b: &mut Builder,
    x: TensorId,
    head: TensorId,
) -> Result<(), ShapeError> {
    let logits = b.linear(x, head, None)?;
    b.output("logits", logits);
    Ok(())
}

/// Returns the row (b, 1, c) of `x (b, t, c)` at the position of each sample, which it adds as the
/// input `position` (b, 1, t): 1 there and 0 elsewhere.
pub(super) fn row_at_position(b: &mut Builder, x: TensorId) -> BuildResult {
    let t = b.shape(x).dims().get(1).copied().unwrap_or(1);
    let position = b.selector("position", &[1, 1, t]);
    // A product with a one-hot row is a gather: all other terms are 0 (or NaN, where a position
    // of an overflowed model is not finite).
    b.matmul(position, x, false, false)
}

/// Inputs of a graph whose rows are tokens of sequences. Each token is computed once: attention
/// reads the keys and values of previous tokens from a cache.
pub(super) struct CachedRows {
    pub tokens: TensorId,
    positions: TensorId,
    places: TensorId,
    sequences: usize,
    context: usize,
}

impl CachedRows {
    /// Adds the inputs `tokens`, `positions` and `places`, all (b, 1).
    pub fn new(b: &mut Builder, sequences: usize, context: usize) -> Self {
        let [tokens, positions, places] =
            [TOKENS, POSITIONS, PLACES].map(|name| b.input_ids(name, &[1, 1]));
        Self { tokens, positions, places, sequences, context }
    }

    /// Returns the rows (b, 1, c) of a table (t, c) at the positions of the tokens.
    pub fn at_positions(&self, b: &mut Builder, table: TensorId) -> BuildResult {
        b.embedding(self.positions, table)
    }

    /// Returns the cache of a layer.
    pub fn cache(&self, layer: &str) -> CacheSpec {
        let &Self { sequences, context, places, .. } = self;
        CacheSpec { name: format!("{layer} keys and values"), sequences, context, places }
    }
}

const TOKENS: &str = "tokens";
const POSITIONS: &str = "positions";
const PLACES: &str = "places";

/// Inputs and sizes of a graph that keeps keys and values on the device.
#[derive(Clone, Copy, Debug)]
pub struct CacheInputs {
    /// Position of each token in its sequence, (b, 1).
    pub positions: TensorId,
    /// Place of each token in the cache, (b, 1): `sequence * context + position`.
    pub places: TensorId,
    /// Number of sequences in the cache.
    pub sequences: usize,
}

/// Tensors and sizes of a language model that text generation uses.
#[derive(Clone, Copy, Debug)]
pub struct LanguageModel {
    pub tokens: TensorId,
    /// Targets of the loss; `None` if the graph has none.
    pub targets: Option<TensorId>,
    /// One-hot selection of the position whose logits are computed; `None` if all logits are.
    pub position: Option<TensorId>,
    pub logits: TensorId,
    /// Context length in tokens.
    pub context: usize,
    /// Inputs of a graph whose rows are single tokens; `None` if a row is a whole text.
    pub cache: Option<CacheInputs>,
    /// True if a pass takes one token and carries its state to the next pass.
    pub goes_by_token: bool,
    pub vocabulary: usize,
}

impl LanguageModel {
    /// Finds the tensors in a plan's graph by the names that [`gpt`](crate::model::gpt()) and
    /// [`next_token_gpt`](crate::model::gpt::next_token_gpt) give; returns `None` if tokens or
    /// logits are missing.
    pub fn of(graph: &Graph) -> Option<Self> {
        let logits = graph.output("logits")?;
        let tokens = graph.input(TOKENS)?;
        let (cache, context) = match cache_inputs(graph) {
            Some((cache, context)) => (Some(cache), context),
            None => (None, graph.tensor(tokens).shape.last()),
        };
        Some(Self {
            tokens,
            cache,
            goes_by_token: context == 1 && !graph.carried.is_empty(),
            targets: graph.input("targets"),
            position: graph.input("position"),
            logits,
            context,
            vocabulary: graph.tensor(logits).shape.last(),
        })
    }
}

/// Returns the inputs of a cache of keys and values, and the positions of a sequence in it, if the
/// graph has one.
fn cache_inputs(graph: &Graph) -> Option<(CacheInputs, usize)> {
    let node = graph.nodes.iter().find(|node| node.op.changes_in_place().any())?;
    let [sequences, _, context, _] = *graph.tensor(node.outputs[0]).shape.dims() else {
        return None;
    };
    let positions = graph.input(POSITIONS)?;
    let places = graph.input(PLACES)?;
    Some((CacheInputs { positions, places, sequences }, context))
}
