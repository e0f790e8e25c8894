//! Skipped steps: a step that is not finite updates nothing, and many in a row end the run.

use std::sync::Arc;

use super::Run;
use crate::runtime::step::StepInput;
use crate::train::error::TrainError;
use crate::train::nonfinite::{NotFinite, OVERFLOW_CAUSE, first_not_finite};

/// Steps in a row that were skipped.
#[derive(Debug, Default)]
pub(super) struct SkippedSteps {
    pub(super) count: u64,
    /// Tensor in which the first of them was not finite.
    began: String,
}

impl Run {
    /// Reports a skipped step, the first of a row with the tensor in which the non-finite value
    /// arose, and ends the run after too many in a row.
    pub(super) fn handle_skipped(
        &mut self,
        inputs: &[Arc<StepInput>],
        reason: String,
    ) -> Result<(), TrainError> {
        self.skipped.count += 1;
        let (step, count, limit) = (self.step, self.skipped.count, self.spec.skipped_steps_max);
        let mut text = format!(
            "step {step} was skipped ({count} in a row, the run ends at {limit}): {reason}"
        );
        if count == 1 {
            self.note(format!(
                "step {step} is not finite: it runs again, operation by operation, to find the \
                 first tensor that is not; that may take a while"
            ))?;
            self.skipped.began = self.diagnose(inputs)?;
            text += &format!("; it began at {}", self.skipped.began);
        }
        self.warn(text)?;
        if count < limit {
            return Ok(());
        }
        let checkpoint = self.store.path(self.saved.unwrap_or(0));
        let began = self.skipped.began.clone();
        Err(TrainError::Diverged { count, reason, began, checkpoint })
    }

    /// Runs a skipped step again on all devices. Returns the first non-finite tensor in the order
    /// of a step, and of equal ones that of the lowest rank; names the device if there are several.
    fn diagnose(&self, inputs: &[Arc<StepInput>]) -> Result<String, TrainError> {
        let inputs = inputs.to_vec();
        let began = self.group.run_on_all("a diagnosis", move |rank, device| {
            first_not_finite(device, &inputs[rank.index()])
        })?;
        let known = began.into_iter().enumerate();
        let first: Option<(NotFinite, usize)> =
            known.filter_map(|(rank, what)| Some((what?, rank))).min();
        Ok(match first {
            Some((what, _)) if self.placement.ranks.len() == 1 => what.to_string(),
            Some((what, rank)) => {
                format!("{what} on rank {rank}, {}", self.placement.ranks[rank].name)
            }
            None => OVERFLOW_CAUSE.into(),
        })
    }
}
