//! Schedules of a pipeline: the order in which each stage runs the passes of its micro-batches.

use std::fmt;

/// Order in which the stages of a pipeline run their micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// All forward passes, then all backward passes.
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward pass, one backward pass, by turns.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B with several model chunks per stage.
    Interleaved,
    /// 1F1B with the gradients of parameters computed when a stage would otherwise be idle.
    ZeroBubble,
}

impl Schedule {
    /// Returns all schedules.
    pub const ALL: [Self; 4] = [Self::GPipe, Self::OneFOneB, Self::Interleaved, Self::ZeroBubble];

    /// Returns the name in configurations and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZeroBubble => "zero-bubble",
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Number of stages, of model chunks per stage, and of micro-batches of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineShape {
    pub stages: usize,
    pub chunks: usize,
    pub micro_batches: usize,
}

/// Passes of a micro-batch through a model chunk that a stage runs as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StagePass {
    Forward,
    /// Gradients of activations and of parameters, block by block.
    Backward,
    /// Gradients of activations only.
    BackwardInput,
    /// Gradients of parameters only.
    BackwardWeight,
}

/// Unit of work of a stage. `chunk` counts the model chunks of the stage, in forward order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageWork {
    pub pass: StagePass,
    pub chunk: usize,
    pub micro_batch: usize,
}
