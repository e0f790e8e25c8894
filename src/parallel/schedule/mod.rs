//! Schedules of a pipeline: the order in which each stage runs the passes of its micro-batches.
//!
//! | schedule | file | stashes in flight on stage `s` | idle share of equal stages |
//! |---|---|---|---|
//! | GPipe | `gpipe` | `M` | `(K-1) / (M+K-1)` |
//! | 1F1B | `one_f_one_b` | `min(M, K-s)` | `(K-1) / (M+K-1)` |
//! | interleaved 1F1B | `interleaved` | `min(vM, 2(K-s-1)+(v-1)K+1)` | `(K-1) / (vM+K-1)` |
//! | ZB-H1 | `zero_bubble` | `min(M, K)` | `(K-1)(f+b-w) / (M(f+b+w)+(K-1)(f+b-w))` |
//!
//! `K` stages of `v` model chunks run `M` micro-batches; `f`, `b` and `w` are [`StageTimes`]. Every
//! schedule runs each pass of a chunk in the order of micro-batches. So gradients of parameters are
//! added in one order, and all schedules have results of the same bits.

mod fit;
mod formulas;
mod gpipe;
mod interleaved;
mod one_f_one_b;
#[cfg(test)]
mod tests;
mod zero_bubble;

use std::fmt;

pub use fit::{ScheduleError, require_fit};
pub use formulas::{StageTimes, ideal_bubble, in_flight};

/// Order in which the stages of a pipeline run their micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PipelineSchedule {
    /// All forward passes, then all backward passes.
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward pass, one backward pass, by turns.
    #[default]
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B with several model chunks per stage.
    Interleaved,
    /// 1F1B with the gradients of parameters computed when a stage would otherwise be idle.
    ZeroBubble,
}

impl PipelineSchedule {
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

    /// Returns the schedule of a name in configurations and tables, if there is one.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|schedule| schedule.name() == name)
    }

    /// Returns true if gradients of parameters and of activations are computed separately.
    pub const fn is_split(self) -> bool {
        matches!(self, Self::ZeroBubble)
    }
}

impl fmt::Display for PipelineSchedule {
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
pub(crate) enum StagePass {
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
pub(crate) struct StageWork {
    pub pass: StagePass,
    pub chunk: usize,
    pub micro_batch: usize,
}

impl StageWork {
    /// Creates the work of a stage with one model chunk.
    const fn whole(pass: StagePass, micro_batch: usize) -> Self {
        Self { pass, chunk: 0, micro_batch }
    }
}

/// Returns the work of a stage in a step, in order: every pass of every chunk and micro-batch once.
/// The shape must fit the schedule ([`require_fit`]) and have the stage.
pub(crate) fn stage_work(
    schedule: PipelineSchedule,
    shape: PipelineShape,
    stage: usize,
) -> Vec<StageWork> {
    debug_assert_eq!(require_fit(schedule, shape), Ok(()));
    debug_assert!(stage < shape.stages);
    match schedule {
        PipelineSchedule::GPipe => gpipe::work(shape),
        PipelineSchedule::OneFOneB => one_f_one_b::work(shape, stage),
        PipelineSchedule::Interleaved => interleaved::work(shape, stage),
        PipelineSchedule::ZeroBubble => zero_bubble::work(shape, stage),
    }
}
