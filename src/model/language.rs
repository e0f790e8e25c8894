//! A language model by the names of its inputs and outputs.

use crate::base::TensorId;
use crate::graph::Graph;

/// The tensors of a language model that generation touches.
#[derive(Clone, Copy, Debug)]
pub struct LanguageModel {
    pub tokens: TensorId,
    pub targets: TensorId,
    pub logits: TensorId,
    pub context: usize,
    pub vocabulary: usize,
}

impl LanguageModel {
    /// Finds them in a plan's graph, by the names that [`gpt`](crate::model::gpt()) gives.
    pub fn of(graph: &Graph) -> Option<Self> {
        let logits = graph.output("logits")?;
        let tokens = graph.input("tokens")?;
        Some(Self {
            tokens,
            targets: graph.input("targets")?,
            logits,
            context: graph.tensor(tokens).shape.last(),
            vocabulary: graph.tensor(logits).shape.last(),
        })
    }
}
