//! Evaluations of a run: one that a signal dropped, and those with which later ones cannot be
//! compared.

use super::Run;
use crate::best::{EvalExtent, Incomparable, incomparable};
use crate::checkpoint::Meta;
use crate::error::TrainError;
use crate::evaluate::extent_of;
use potluck_data::Split;

impl Run {
    /// Repeats the evaluation that was due at the step from which the run resumes, if the record
    /// does not have it: a signal dropped it.
    pub(super) fn evaluate_dropped(&mut self) -> Result<(), TrainError> {
        let is_between = self.step() > 0 && self.step() < self.spec.steps;
        if is_between && self.trainer.is_due(self.spec.every.evaluation) {
            self.trainer.evaluate_fit(&mut self.fit, &mut self.host)?;
        }
        Ok(())
    }

    /// Returns the reason for which later evaluations cannot be compared with those of a
    /// checkpoint, if there is one: other data, or another extent.
    pub(super) fn incomparable(&self, meta: &Meta) -> Option<String> {
        // The fingerprint covers the data and their split.
        let data = (&*meta.data, &*self.trainer.data);
        Some(match incomparable(meta.best, data, Some(self.eval_extent()))? {
            Incomparable::Data => {
                "the data are not those that the checkpoint was trained on".into()
            }
            Incomparable::Samples { was, is } => {
                format!("evaluations now take {is} samples instead of {was} (train.eval_samples)")
            }
            Incomparable::Runs { was, is } => format!(
                "evaluations now carry states through {is} parts of the data instead of {was} \
                 (model.stateful, train.batch)"
            ),
        })
    }

    /// Returns the extent of an evaluation; no samples if nothing is held out.
    fn eval_extent(&self) -> EvalExtent {
        extent_of(&self.fit.source, Split::Validation, self.spec.eval_samples)
    }
}
