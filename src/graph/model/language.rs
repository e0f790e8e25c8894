//! Language model: a graph whose inputs and outputs have known names.

use crate::Graph;
use crate::builder::{BuildResult, Builder};
use potluck_core::TensorId;

/// Returns the row (b, 1, c) of `x (b, t, c)` at the position of each sample, which it adds as the
/// input `position` (b, 1, t): 1 there and 0 elsewhere.
pub(super) fn row_at_position(b: &mut Builder, x: TensorId) -> BuildResult {
    let t = b.shape(x).dims().get(1).copied().unwrap_or(1);
    let position = b.input("position", &[1, 1, t]);
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
