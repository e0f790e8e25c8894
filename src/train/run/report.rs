//! Messages of a run about itself and its devices.

use super::Run;
use crate::error::TrainError;
use potluck_core::format::{counted, counted_large, gibibytes, thousands};
use potluck_core::metrics::Unit;
use potluck_data::Split;

impl Run {
    /// Emits notes on the model, the data, the devices and the directory of the run.
    ///
    /// # Errors
    /// Returns `TrainError::Metrics` if a sink fails.
    pub fn emit_summary(&mut self) -> Result<(), TrainError> {
        let micro_batches = match self.trainer.session.programs[0].micro_batches.len() {
            count if count > 1 && self.trainer.session.placement.ranks.len() == 1 => {
                format!(" in {count} micro-batches")
            }
            _ => String::new(),
        };
        let names: Vec<&str> =
            self.trainer.session.placement.ranks.iter().map(|rank| &*rank.name).collect();
        let graph = &self.trainer.session.plan.graph;
        let frozen = match graph.frozen_count() {
            0 => String::new(),
            count => format!(", {} of them frozen", thousands(count as f64)),
        };
        let summary = format!(
            "{}; {} parameters{frozen}; {}; batch {}{micro_batches}; on {}; in {}",
            self.spec.model.summary(),
            thousands(graph.parameter_count() as f64),
            self.fit.options.task.summary(),
            self.spec.batch,
            names.join(", "),
            self.host.options.out.display()
        );
        let mut figures = format!("{}; {}", self.epoch_text(), self.memory_text());
        if self.spec.epochs > 0 {
            let steps = thousands(self.spec.steps as f64);
            let epochs = counted(self.spec.epochs as usize, "epoch", "epochs");
            figures.push_str(&format!("; ends after {epochs}, at step {steps}"));
        }
        self.note(summary)?;
        self.note(figures)?;
        for warning in self.data_warnings() {
            self.warn(warning)?;
        }
        self.emit_end_notes()
    }

    /// Warnings about the data: the data's own, and about too few samples.
    fn data_warnings(&self) -> Vec<String> {
        let data = &self.fit.source.data;
        let mut warnings = data.warnings();
        // Each window of a text has many targets, and training draws windows from anywhere.
        if self.fit.options.task.unit() == Unit::Samples {
            let held_out = match self.spec.every.evaluation {
                0 => None,
                _ => Some(data.len(Split::Validation)),
            };
            let batch = u64::from(self.spec.batch);
            warnings.extend(few_samples(data.len(Split::Train), held_out, batch));
        }
        warnings
    }

    /// Formats the size of an epoch, which trains on as many tokens or samples as the data have.
    fn epoch_text(&self) -> String {
        let unit = self.fit.options.task.unit();
        let epoch = self.spec.epoch(&self.fit.source.sampler, unit);
        let per_step = u64::from(self.spec.batch) * epoch.per_sample;
        let (one, several) = match unit {
            Unit::Tokens => ("token", "tokens"),
            Unit::Samples => ("sample", "samples"),
        };
        format!(
            "an epoch is {}, {} of {}",
            counted_large(epoch.units, one, several),
            counted_large(epoch.units.div_ceil(per_step), "step", "steps"),
            thousands(per_step as f64)
        )
    }

    fn memory_text(&self) -> String {
        let placed = &self.trainer.session.placement.ranks;
        let mut ranks = Vec::with_capacity(placed.len());
        for (rank, bytes) in placed.iter().zip(self.trainer.session.device_bytes()) {
            if placed.len() == 1 {
                ranks.push(gibibytes(bytes));
            } else {
                ranks.push(format!("{} on {}", gibibytes(bytes), rank.name));
            }
        }
        format!("device memory {}", ranks.join(", "))
    }

    /// Emits a note that training ends before its last step, because evaluations did not improve.
    pub(super) fn tell_lost_patience(&mut self) -> Result<(), TrainError> {
        let (step, patience) = (self.step(), self.spec.patience);
        let count = counted_large(patience, "evaluation", "evaluations");
        self.note(match self.trainer.best {
            Some(best) => format!(
                "stopping early at step {step}: no improvement over step {} in {count} \
                 (train.patience)",
                best.step
            ),
            None => format!(
                "stopping early at step {step}: no finite val_loss in {count} (train.patience)"
            ),
        })
    }

    /// Emits notes for a user who resumes with another number of steps: no step is left, or the
    /// learning rate does not decrease further.
    fn emit_end_notes(&mut self) -> Result<(), TrainError> {
        let steps = self.spec.steps;
        let schedule = self.spec.schedule;
        let decay_steps = schedule.decay_steps;
        if self.step() > 0 && self.step() >= steps {
            let step = self.step();
            // A warning, so that a quiet script does not mistake this for training.
            self.warn(format!(
                "step {step} of {steps} is already done: nothing is left to train; to continue, \
                 raise --steps or --epochs"
            ))?;
        } else if self.step() > 0
            && steps > decay_steps
            && let Some(lr) = schedule.last_lr()
        {
            self.note(format!(
                "the learning rate stays at {lr:.2e} from step {decay_steps} on, the end of its \
                 schedule; to stretch it, add --set schedule.decay_steps={steps}"
            ))?;
        }
        Ok(())
    }
}

/// Number of held-out samples below which a loss is unreliable.
const HELD_OUT_MIN: u64 = 30;

/// Warnings about a training part smaller than a batch, and about few held-out samples if the run
/// evaluates.
fn few_samples(training: u64, held_out: Option<u64>, batch: u64) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(held_out @ 1..HELD_OUT_MIN) = held_out {
        warnings.push(format!(
            "val_loss is measured on {}, which says little: hold out more",
            counted_large(held_out, "sample", "samples")
        ));
    }
    if batch > training && training > 0 {
        let samples = counted_large(training, "training sample", "training samples");
        warnings.push(match batch / training {
            1 => format!("a batch of {batch} takes some of the {samples} twice"),
            times => format!("a batch of {batch} takes each of the {samples} {times} times"),
        });
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_samples_are_told() {
        assert_eq!(
            few_samples(9, Some(1), 128),
            [
                "val_loss is measured on 1 sample, which says little: hold out more",
                "a batch of 128 takes each of the 9 training samples 14 times"
            ]
        );
        let twice = "a batch of 12 takes some of the 9 training samples twice";
        assert_eq!(few_samples(9, None, 12), [twice]);
        assert!(few_samples(9, Some(30), 9).is_empty());
    }
}
