//! Evaluations of a run: on a bounded part of the validation split, interruptible by signals.

use std::time::Instant;

use super::Run;
use crate::checkpoint::{Best, Meta};
use crate::data::Split;
use crate::metrics::{EvalRecord, Event, Sink};
use crate::train::best::{EvalExtent, Incomparable, incomparable, is_better};
use crate::train::error::TrainError;
use crate::train::evaluate::{EvalRequest, Evaluation, evaluate_split, extent_of};

impl Run {
    /// Returns the loss on the validation split; `None` if there is none or a signal is pending,
    /// which drops an evaluation in progress. Saves a new best.
    pub(super) fn evaluate(&mut self) -> Result<Option<f64>, TrainError> {
        if let Some((step, loss)) = self.evaluated
            && step == self.step()
        {
            return Ok(Some(loss));
        }
        let extent = self.eval_extent();
        if extent.samples == 0 {
            return Ok(None);
        }
        let Some(evaluation) = self.measure()? else { return Ok(None) };
        let Evaluation { loss: val_loss, samples, targets, sums } = evaluation;
        let step = self.step();
        self.evaluated = Some((step, val_loss));
        let is_best = is_better(val_loss, self.best);
        let metrics = self.task.metrics(&sums);
        let record = EvalRecord { step, val_loss, metrics, samples, targets, is_best };
        self.emit(Event::Evaluation(record))?;
        if is_best {
            self.best = Some(Best { step, val_loss, samples, runs: extent.runs });
            // Saved again if it was saved before it was known to be the best.
            self.saved = self.saved.filter(|saved| *saved != step);
            self.save_or_warn()?;
        }
        Ok(Some(val_loss))
    }

    /// Repeats the evaluation that was due at the step from which the run resumes, if the record
    /// does not have it: a signal dropped it.
    pub(super) fn evaluate_dropped(&mut self) -> Result<(), TrainError> {
        if self.step() > 0 && self.step() < self.spec.steps && self.due(self.spec.every.evaluation)
        {
            self.evaluate()?;
        }
        Ok(())
    }

    /// Returns the reason for which later evaluations cannot be compared with those of a
    /// checkpoint, if there is one: other data, or another extent.
    pub(super) fn incomparable(&self, meta: &Meta) -> Option<String> {
        // The fingerprint covers the data and their split.
        let data = (&*meta.data, &*self.fingerprint);
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
        extent_of(&self.source, Split::Validation, self.spec.eval_samples)
    }

    fn measure(&mut self) -> Result<Option<Evaluation>, TrainError> {
        let units = self.session.placement.units();
        let (rows, weights): (Vec<u32>, Vec<u32>) =
            units.map(|rank| (rank.micro_batch, rank.share)).unzip();
        let request = EvalRequest {
            source: &self.source,
            graph: &self.session.plan.graph,
            task: &self.task,
            pipelines: &self.session.pipelines,
            split: Split::Validation,
            samples: self.spec.eval_samples,
            rows: &rows,
            weights: &weights,
            signals: &self.signals.flags(),
        };
        let (sinks, started) = (&mut self.sinks, Instant::now());
        evaluate_split(&mut self.session.group, &request, &mut |done, total| {
            Ok(sinks.event(&Event::Evaluating { done, total, elapsed: started.elapsed() })?)
        })
    }
}
