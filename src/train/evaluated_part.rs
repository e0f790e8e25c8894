//! Part of a split to be evaluated, with its task.

use std::sync::Arc;

use super::loader::BatchSource;
use super::signals::SignalFlags;
use super::task::Task;
use potluck_data::Split;

pub(super) struct EvaluatedPart<'a> {
    pub source: &'a BatchSource,
    /// Task that computes the metrics.
    pub task: &'a Arc<dyn Task>,
    pub split: Split,
    /// Number of samples, spread over the split; 0: all.
    pub samples: u64,
    /// Signals that end the evaluation early.
    pub signals: &'a SignalFlags,
}
