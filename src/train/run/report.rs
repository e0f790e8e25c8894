//! Messages of a run about itself and its devices.

use super::Run;
use crate::error::TrainError;
use crate::runtime::placement::repeat::changes_note;
use potluck_core::format::{counted, counted_large, gibibytes, thousands};
use potluck_core::metrics::Unit;
use potluck_data::{FileRole, HELD_OUT_MAX, Split};

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
        self.emit_data_notes()?;
        self.emit_end_notes()
    }

    /// Emits warnings about the data, and at the start of a run what is to be said about few
    /// samples.
    fn emit_data_notes(&mut self) -> Result<(), TrainError> {
        let data = self.fit.source.data.clone();
        for warning in data.warnings() {
            self.warn(warning)?;
        }
        // Windows of a text have many targets each, and training draws them from anywhere.
        if self.fit.options.task.unit() != Unit::Samples || self.step() > 0 {
            return Ok(());
        }
        if !self.spec.chooses_targets()
            && let Some(note) = data.note_on_values()
        {
            self.note(note)?;
        }
        if self.spec.every.evaluation > 0 {
            let held_out = HeldOutSamples {
                count: data.len(Split::Validation),
                evaluated: self.spec.eval_samples,
                share: self.spec.data.held_out,
                is_own_set: data.files().iter().any(|file| file.role == Some(FileRole::HeldOut)),
            };
            if let Some(note) = held_out.note() {
                self.note(note)?;
            }
        }
        match large_batch(self.spec.batch.into(), data.len(Split::Train)) {
            Some(warning) => self.warn(warning),
            None => Ok(()),
        }
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

    /// Emits a note with the flags that repeat the changes of shares of the run, if there were any,
    /// and records them.
    pub(super) fn tell_share_changes(&mut self) -> Result<(), TrainError> {
        let session = &self.trainer.session;
        let note = changes_note(&session.placement, &session.plan, self.spec.micro_batch);
        let Some(note) = note else { return Ok(()) };
        self.write_files()?;
        self.note(note)
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

/// Held-out samples below which a loss is noisy.
const HELD_OUT_MIN: u64 = 30;

/// Samples on which a run is evaluated.
struct HeldOutSamples {
    /// Held-out samples.
    count: u64,
    /// Value of `train.eval_samples`; 0: all.
    evaluated: u64,
    /// Value of `data.held_out`.
    share: f64,
    /// True if they are a set of their own, and not a share of the samples.
    is_own_set: bool,
}

impl HeldOutSamples {
    /// Returns a note on few samples, with the key that makes them more, if there is one.
    fn note(&self) -> Option<String> {
        let is_limited = self.evaluated > 0 && self.evaluated < self.count;
        let samples = if is_limited { self.evaluated } else { self.count };
        if samples == 0 || samples >= HELD_OUT_MIN {
            return None;
        }
        let advice = if is_limited {
            "; raise train.eval_samples"
        } else if !self.is_own_set && self.share < HELD_OUT_MAX {
            "; raise data.held_out"
        } else {
            ""
        };
        let samples = counted_large(samples, "sample", "samples");
        Some(format!("val_loss is measured on only {samples} and will be noisy{advice}"))
    }
}

/// Returns a warning about a batch with more samples than there are.
fn large_batch(batch: u64, training: u64) -> Option<String> {
    if training == 0 || batch <= training {
        return None;
    }
    if training == 1 {
        return Some(format!("a batch of {batch} takes the only training sample {batch} times"));
    }
    let samples = counted_large(training, "training sample", "training samples");
    let at_least = if batch.is_multiple_of(training) { "" } else { "at least " };
    Some(match batch / training {
        1 => format!("a batch of {batch} takes some of the {samples} twice"),
        2 => format!("a batch of {batch} takes each of the {samples} {at_least}twice"),
        times => format!("a batch of {batch} takes each of the {samples} {at_least}{times} times"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_held_out_samples_are_told_with_the_key_that_makes_them_more() {
        let few = || HeldOutSamples { count: 15, evaluated: 0, share: 0.1, is_own_set: false };
        let noisy = "val_loss is measured on only 15 samples and will be noisy";
        assert_eq!(few().note().unwrap(), format!("{noisy}; raise data.held_out"));
        let most = HeldOutSamples { share: HELD_OUT_MAX, ..few() };
        assert_eq!(most.note().unwrap(), noisy);
        let own = HeldOutSamples { is_own_set: true, ..few() };
        assert_eq!(own.note().unwrap(), noisy);
        let limited = HeldOutSamples { count: 1000, evaluated: 15, ..few() };
        assert_eq!(limited.note().unwrap(), format!("{noisy}; raise train.eval_samples"));
        let above = HeldOutSamples { evaluated: 15, ..few() };
        assert_eq!(above.note().unwrap(), format!("{noisy}; raise data.held_out"));
        for count in [0, 30] {
            assert_eq!(HeldOutSamples { count, ..few() }.note(), None);
        }
    }

    #[test]
    fn a_batch_of_more_samples_than_there_are_is_told() {
        let told = |batch, training| large_batch(batch, training).unwrap();
        assert_eq!(
            told(128, 60),
            "a batch of 128 takes each of the 60 training samples at least twice"
        );
        assert_eq!(told(120, 60), "a batch of 120 takes each of the 60 training samples twice");
        assert_eq!(
            told(128, 9),
            "a batch of 128 takes each of the 9 training samples at least 14 times"
        );
        assert_eq!(told(12, 9), "a batch of 12 takes some of the 9 training samples twice");
        assert_eq!(told(128, 1), "a batch of 128 takes the only training sample 128 times");
        for (batch, training) in [(9, 9), (8, 9), (8, 0)] {
            assert_eq!(large_batch(batch, training), None);
        }
    }
}
