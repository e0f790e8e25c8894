//! Language model: a graph whose inputs and outputs have known names.

use crate::builder::{BuildResult, Builder};
use crate::{Graph, ShapeError};
use potluck_core::TensorId;

/// Rows of logits that are computed at a time for the loss: enough for products at full speed.
const LOSS_ROWS: usize = 1024;

/// Ends the graph of a model of the residual stream `x (b, t, c)` with the loss of the targets
/// `(b, t)` under the logits `x head^T`, and with those of the position that a sample selects as
/// the output `logits (b, 1, v)`, outside of training.
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
    let logits = b.linear(row, head, None)?;
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

/// Tensors and sizes of a language model that text generation uses.
#[derive(Clone, Copy, Debug)]
pub struct LanguageModel {
    pub tokens: TensorId,
    /// Targets of the loss; `None` if the graph has none.
    pub targets: Option<TensorId>,
    /// One-hot selection of the position whose logits are computed; `None` if all are.
    pub position: Option<TensorId>,
    pub logits: TensorId,
    pub context: usize,
    /// True if a pass takes one token and carries the states that come of it to the next.
    pub goes_by_token: bool,
    pub vocabulary: usize,
}

impl LanguageModel {
    /// Finds the tensors in a plan's graph by the names that [`gpt`](crate::model::gpt()) and
    /// [`next_token_gpt`](crate::model::gpt::next_token_gpt) give; returns `None` if tokens or
    /// logits are missing.
    pub fn of(graph: &Graph) -> Option<Self> {
        let logits = graph.output("logits")?;
        let tokens = graph.input("tokens")?;
        let context = graph.tensor(tokens).shape.last();
        Some(Self {
            tokens,
            goes_by_token: context == 1 && !graph.carried.is_empty(),
            targets: graph.input("targets"),
            position: graph.input("position"),
            logits,
            context,
            vocabulary: graph.tensor(logits).shape.last(),
        })
    }
}
