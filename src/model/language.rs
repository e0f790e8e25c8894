//! Language model: a graph whose inputs and outputs have known names.

use crate::base::TensorId;
use crate::graph::Graph;

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
    pub vocabulary: usize,
}

impl LanguageModel {
    /// Finds the tensors in a plan's graph by the names that [`gpt`](crate::model::gpt()) and
    /// [`next_token_gpt`](crate::model::gpt::next_token_gpt) give; returns `None` if tokens or
    /// logits are missing.
    pub fn of(graph: &Graph) -> Option<Self> {
        let logits = graph.output("logits")?;
        let tokens = graph.input("tokens")?;
        Some(Self {
            tokens,
            targets: graph.input("targets"),
            position: graph.input("position"),
            logits,
            context: graph.tensor(tokens).shape.last(),
            vocabulary: graph.tensor(logits).shape.last(),
        })
    }
}
