//! Task of a run: the unit counted in steps, the metrics of evaluations, and the measure and the
//! sample at the end. Evaluations add up sums over rows, which a task converts to metrics, so that
//! metrics do not depend on the division of rows among devices.

mod classification;
mod regression;
mod text;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::error::TrainError;
use crate::runtime::pipelines::ForwardUnits;
use potluck_core::metrics::{MeasureRecord, Unit};
use potluck_core::{DType, HostTensor};
use potluck_data::{SampleDescription, TargetNames};

pub use classification::{Classification, ClassificationReport, chosen};
pub use regression::Regression;
pub use text::{TextTask, TokenTask};

/// Names of the measures of all tasks: a run that continues with data of another task may have
/// files of any task.
pub(crate) const MEASURES: [&str; 1] = [text::MEASURE];

/// Context at the end of a run, or of a checkpoint that is evaluated.
pub struct EvalContext<'a> {
    pub units: ForwardUnits<'a>,
    /// Largest number of samples in a pass of each unit.
    pub rows: &'a [u32],
    /// Step of the model.
    pub step: u64,
    pub seed: u64,
    /// Returns true to end early.
    pub stop: &'a dyn Fn() -> bool,
}

/// Measure of a model at the end of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct FinalMeasure {
    /// Sentence for the user.
    pub summary: String,
    /// Values for the record, under one of the names of [`MEASURES`].
    pub record: MeasureRecord,
    /// Text that a run stores in the file `NAME-STEP.txt`, if any.
    pub text: Option<String>,
}

/// Task of a run.
pub trait Task: fmt::Debug + Send + Sync {
    /// Returns the unit that steps count.
    fn unit(&self) -> Unit;

    /// Returns the sizes of the data for the user: `vocabulary 65`.
    fn summary(&self) -> String;

    /// Returns the name of the output that [`Task::score`] compares with the input `targets`;
    /// `None` if the loss is the only metric.
    fn scored_output(&self) -> Option<&'static str> {
        None
    }

    /// Returns the number of values of that output per sample, and the type of the targets.
    fn scored_type(&self) -> (usize, DType) {
        (0, DType::F32)
    }

    /// Returns the number of sums that [`Task::score`] adds to.
    fn sum_count(&self) -> usize {
        0
    }

    /// Adds the scores of rows to sums, from their outputs and from their targets as in the data
    /// set.
    fn score(&self, _outputs: &[f32], _targets: &HostTensor, _sums: &mut [f64]) {}

    /// Returns metrics by name, from the sums over the rows of a validation split; none of other
    /// sums than [`Task::sum_count`] of them.
    fn metrics(&self, _sums: &[f64]) -> Vec<(Cow<'static, str>, f64)> {
        Vec::new()
    }

    /// Returns tables for the user, from the same sums; empty if the task has none.
    fn tables(&self, _sums: &[f64]) -> String {
        String::new()
    }

    /// Returns these tables as JSON, by name.
    fn tables_json(&self, _sums: &[f64]) -> Vec<(&'static str, serde_json::Value)> {
        Vec::new()
    }

    /// Measures properties of a model other than its loss and metrics; `None` if the task has no
    /// measure, or if it was stopped.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    fn measure(&self, _ending: &EvalContext) -> Result<Option<FinalMeasure>, TrainError> {
        Ok(None)
    }

    /// Returns a sample of this number of tokens from a model of text; empty for any other model.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    fn sample(&self, _ending: &EvalContext, _tokens: u64) -> Result<String, TrainError> {
        Ok(String::new())
    }
}

/// Returns the task of samples: choosing a class, or predicting values.
pub fn task_of_samples(samples: &SampleDescription) -> Arc<dyn Task> {
    match &samples.targets {
        TargetNames::Classes(names) => Arc::new(Classification::new(samples, names)),
        TargetNames::Values(names) => Arc::new(Regression::new(samples, names)),
    }
}

/// Task whose only metric is the loss.
#[derive(Clone, Copy, Debug)]
pub struct LossTask;

impl Task for LossTask {
    fn unit(&self) -> Unit {
        Unit::Samples
    }

    fn summary(&self) -> String {
        String::new()
    }
}
