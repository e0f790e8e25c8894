//! Language model: a graph whose inputs and outputs have known names.

use crate::Graph;
use potluck_core::TensorId;

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
