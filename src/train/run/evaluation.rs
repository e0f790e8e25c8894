//! Evaluations of a run: repetition of one interrupted by a signal, and comparability with earlier
//! ones.

use super::Run;
use crate::best::{EvalExtent, Incomparable, incomparable};
use crate::checkpoint::Meta;
use crate::error::TrainError;
use crate::evaluate::extent_of;
use potluck_data::Split;

impl Run {
    /// Repeats the evaluation of the step from which the run resumes, if it was due and is missing
    /// in the record because a signal interrupted it, or if it was the best and was not saved.
    pub(super) fn evaluate_dropped(&mut self) -> Result<(), TrainError> {
        let is_between = self.step() > 0 && self.step() < self.spec.steps;
        let is_due = self.trainer.is_due(self.spec.every.evaluation);
        let repeats = std::mem::take(&mut self.repeats_evaluation);
        let repeats = repeats && self.spec.every.evaluation > 0;
        if is_between && (is_due || repeats) {
            self.trainer.evaluate_fit(&mut self.fit, &mut self.host)?;
        }
        Ok(())
    }

    /// Reason why later evaluations are not comparable with a checkpoint's: other data, or another
    /// extent; `None` if they are comparable.
    pub(super) fn incomparable(&self, meta: &Meta) -> Option<String> {
        if meta.best.is_some() && has_other_loss(&meta.run, &self.trainer.of_run.config) {
            return Some("the loss is not the one that the checkpoint was evaluated by".into());
        }
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

    /// Extent of an evaluation; 0 samples if nothing is held out.
    fn eval_extent(&self) -> EvalExtent {
        extent_of(&self.fit.source, Split::Validation, self.spec.eval_samples)
    }
}

/// Returns true if two configurations, as TOML, have another value of a key on which the loss of an
/// evaluation depends. A key that an earlier version has not is the same.
fn has_other_loss(saved: &str, now: &str) -> bool {
    const KEYS: [(&str, &str); 4] = [
        ("train", "loss"),
        ("train", "huber_delta"),
        ("train", "class_weights"),
        ("optim", "label_smoothing"),
    ];
    let [saved, now]: [toml::Table; 2] =
        [saved, now].map(|text| toml::from_str(text).unwrap_or_default());
    for (section, key) in KEYS {
        let value = |table: &toml::Table| Some(table.get(section)?.get(key)?.to_string());
        if let (Some(saved), Some(now)) = (value(&saved), value(&now))
            && saved != now
        {
            return true;
        }
    }
    false
}
