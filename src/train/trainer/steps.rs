//! Steps of a [`Trainer`] on a data set, with comparisons, evaluations and saves: the loop of
//! [`Trainer::fit`] and of a run of the program.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Trainer;
use super::fit_end::FitEnd;
use super::fit_options::FitOptions;
use crate::best::is_better;
use crate::checkpoint::{Best, CheckpointError, NamedTensor, Store};
use crate::error::TrainError;
use crate::evaluate::{Evaluation, extent_of};
use crate::evaluated_part::EvaluatedPart;
use crate::loader::{BatchSource, Loader};
use crate::runtime::step::StepInput;
use crate::session::StepTiming;
use crate::signals::SignalFlags;
use potluck_core::metrics::{EvalRecord, Event};
use potluck_data::Split;

/// Hooks of a call of the library or of a run of the program in the steps.
pub(crate) trait FitHooks {
    /// Tells of an event; [`ControlFlow::Break`] ends the steps after the present one.
    ///
    /// # Errors
    /// Returns the error that ends the steps.
    fn event(&mut self, event: Event) -> Result<ControlFlow<()>, TrainError>;

    /// Tells of a step that updated nothing, like [`FitHooks::event`].
    ///
    /// # Errors
    /// Returns the error that ends the steps, if there were too many in a row.
    fn skipped(
        &mut self,
        trainer: &Trainer,
        fit: &Fit,
        step: SkippedStep,
    ) -> Result<ControlFlow<()>, TrainError>;

    /// Returns the saves of the directory, if there is one.
    fn store(&mut self) -> Option<&mut Store>;

    /// Takes note that the state was saved.
    fn saved(&mut self) {}
}

/// Step that updated nothing, because a value was not finite.
pub(crate) struct SkippedStep<'a> {
    /// Inputs of the ranks.
    pub inputs: &'a [Arc<StepInput>],
    pub reason: String,
    /// Number of skipped steps in a row, with this one.
    pub count: u64,
    /// Number of them at which the steps end with an error.
    pub limit: u64,
}

/// Steps in progress.
pub(crate) struct Fit {
    pub options: FitOptions,
    pub source: BatchSource,
    /// Inputs of the next steps.
    pub loader: Loader,
    /// Step after which the steps end.
    pub last: u64,
    /// Signals that end the steps before the next one, and an evaluation in progress, or ask for a
    /// save.
    pub signals: SignalFlags,
    /// Step of this start whose save was in the directory before.
    pub found: Option<u64>,
    /// Mean loss of the last step.
    pub loss: Option<f64>,
    /// Step and loss of the last evaluation.
    pub evaluated: Option<(u64, f64)>,
    /// Parameters of the best evaluation, if they are kept: the averages, where these exist.
    pub(crate) best_parameters: Option<Vec<NamedTensor>>,
    /// True if the present step became the best one, which its save, if it has one, does not know.
    is_unsaved_best: bool,
    /// True if a hook asked for the end.
    is_stopped: bool,
    /// Steps in a row that were skipped.
    skipped: u64,
    /// End of the last save or of the attempt, or the start, and the time that it took.
    last_save: (Instant, Duration),
    /// End of the last save that a signal asked for.
    asked: Option<Instant>,
}

/// Time in which the requests of several nodes are those of one job manager, which sends them to
/// all.
const ASKED_AT_ONCE: Duration = Duration::from_secs(2);

/// Returns the time between saves of this duration, so that they take at most 5 % of the whole.
fn time_between_saves(wanted: Duration, took: Duration) -> Duration {
    wanted.max(took * 19)
}

impl Fit {
    pub fn new(options: FitOptions, source: BatchSource, loader: Loader, last: u64) -> Self {
        Self {
            options,
            source,
            loader,
            last,
            signals: SignalFlags::default(),
            found: None,
            loss: None,
            evaluated: None,
            best_parameters: None,
            is_unsaved_best: false,
            is_stopped: false,
            skipped: 0,
            last_save: (Instant::now(), Duration::ZERO),
            asked: None,
        }
    }

    /// Returns true if it is time for a save, by the clock.
    fn is_save_due_by_time(&self) -> bool {
        let Some(interval) = self.options.save_interval else { return false };
        let (ended, took) = self.last_save;
        ended.elapsed() >= time_between_saves(interval, took)
    }

    /// Goes on with other inputs, after the loss of a device.
    pub fn go_on(&mut self, source: BatchSource, loader: Loader) {
        self.source = source;
        self.loader = loader;
        self.skipped = 0;
        self.evaluated = None;
        self.is_unsaved_best = false;
        self.last_save = (Instant::now(), Duration::ZERO);
    }

    pub(crate) fn emit(
        &mut self,
        hooks: &mut dyn FitHooks,
        event: Event,
    ) -> Result<(), TrainError> {
        self.is_stopped |= hooks.event(event)?.is_break();
        Ok(())
    }

    pub(crate) fn warn(
        &mut self,
        hooks: &mut dyn FitHooks,
        text: String,
    ) -> Result<(), TrainError> {
        self.emit(hooks, Event::Warning(text))
    }
}

impl Trainer {
    /// Starts to load the inputs of the next steps up to `last`, except for those that other nodes
    /// read.
    pub(crate) fn loader(&self, source: &BatchSource, last: u64) -> Result<Loader, TrainError> {
        let ranks = self.session.loaded_ranks();
        Loader::start(source.clone(), ranks, self.steps() + 1, last)
            .map_err(|why| TrainError::System { what: "the loader's thread", why })
    }

    /// Returns true if the present step is one of those with this interval; 0: none.
    pub(crate) fn is_due(&self, every: u64) -> bool {
        every > 0 && self.steps().is_multiple_of(every)
    }

    /// Takes the steps that are left, evaluates, and saves. Steps leave their all-gathers, if they
    /// can: what reads parameters between two of them settles that before.
    pub(crate) fn run_steps(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<FitEnd, TrainError> {
        self.session.leaves_gathers = true;
        let end = self.steps_until_end(fit, hooks);
        self.session.leaves_gathers = false;
        if end.is_err() {
            // What ended the steps is the error, also if a device has failed.
            let _ = self.session.settle();
        }
        end
    }

    fn steps_until_end(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<FitEnd, TrainError> {
        let mut end = FitEnd::Done;
        while self.steps() < fit.last {
            if fit.signals.pending().is_some() {
                end = FitEnd::Stopped;
                break;
            }
            // Also where earlier steps have ended so.
            if self.has_lost_patience(fit) {
                end = FitEnd::NoImprovement;
                break;
            }
            self.take_fit_step(fit, hooks)?;
            if self.is_due(self.options.hash_every) {
                self.session.settle()?;
                let told = self.notes.len();
                let compared = self.compare_parameters();
                self.warn_of_notes(told, fit, hooks)?;
                compared?;
            }
            if self.is_due(fit.options.eval_every) {
                self.evaluate_fit(fit, hooks)?;
            }
            self.save_if_requested(fit, hooks)?;
            if self.is_due(fit.options.save_every) || fit.is_save_due_by_time() {
                self.save_fit_or_warn(fit, hooks)?;
            }
            if fit.is_stopped {
                end = FitEnd::Stopped;
                break;
            }
        }
        self.session.settle()?;
        if self.has_lost_patience(fit) && end == FitEnd::Done {
            end = FitEnd::NoImprovement;
        }
        if fit.options.eval_every > 0 {
            // A signal drops it.
            self.evaluate_fit(fit, hooks)?;
        }
        self.save_fit(fit, hooks)?;
        Ok(end)
    }

    fn take_fit_step(&mut self, fit: &mut Fit, hooks: &mut dyn FitHooks) -> Result<(), TrainError> {
        self.take_snapshot_if_due()?;
        let lr = fit.options.schedule.lr(self.steps() + 1);
        // Behind an evaluation; no part of the step's time.
        self.session.put_parameters_back()?;
        let started = Instant::now();
        let Some(ranks) = fit.loader.next_step() else {
            return Err(TrainError::Defect("the loader ended before the last step".into()));
        };
        let ranks = ranks?;
        self.session.reset_states_at_beginnings(&fit.source.sampler);
        let loss_scale = self.session.loss_scale.factor();
        let inputs = self.session.inputs(ranks, lr);
        let reports = self.take_step(&inputs)?;
        let timing = StepTiming {
            lr,
            unit: fit.options.task.unit(),
            batch: self.options.batch as u64,
            loss_scale,
            started,
        };
        let record = self.session.step_record(&reports, &timing);
        let skipped = record.skipped.clone();
        fit.loss = Some(record.loss);
        fit.emit(hooks, Event::Step(record))?;
        let Some(reason) = skipped else {
            fit.skipped = 0;
            return Ok(());
        };
        let next = self.session.loss_scale.factor();
        if next < loss_scale {
            let step = self.steps();
            return fit.emit(
                hooks,
                Event::Note(format!(
                    "step {step}: gradients overflowed in mixed precision; skipped, loss scale \
                     {next}"
                )),
            );
        }
        fit.skipped += 1;
        let step = SkippedStep {
            inputs: &inputs,
            reason,
            count: fit.skipped,
            limit: fit.options.skipped_steps_max,
        };
        fit.is_stopped |= hooks.skipped(self, fit, step)?.is_break();
        Ok(())
    }

    /// Warns of repairs of differing parameters, of which there are notes, as they happen.
    pub(crate) fn warn_of_notes(
        &self,
        told: usize,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<(), TrainError> {
        for note in &self.notes[told..] {
            fit.warn(hooks, note.clone())?;
        }
        Ok(())
    }

    /// Evaluates on the validation split, unless that was done after this step; keeps and saves the
    /// best. Returns the loss; `None` if nothing is held out, or if a signal is pending, which
    /// drops an evaluation in progress.
    pub(crate) fn evaluate_fit(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<Option<f64>, TrainError> {
        let step = self.steps();
        if let Some((evaluated, loss)) = fit.evaluated
            && evaluated == step
        {
            return Ok(Some(loss));
        }
        let extent = extent_of(&fit.source, Split::Validation, fit.options.eval_samples);
        if extent.samples == 0 {
            return Ok(None);
        }
        self.session.settle()?;
        let evaluation = loop {
            match self.measure_fit(fit, hooks)? {
                Some(evaluation) => break evaluation,
                // It may take longer than there is time to save: it begins anew behind that.
                None if fit.signals.pending().is_some() => return Ok(None),
                None => {
                    self.save_if_requested(fit, hooks)?;
                }
            }
        };
        let Evaluation { loss: val_loss, samples, targets, terms, sums } = evaluation;
        fit.evaluated = Some((step, val_loss));
        let is_best = is_better(val_loss, self.best);
        let metrics = fit.options.task.metrics(&sums);
        let terms = terms.into_iter().map(|(name, mean)| (Cow::Owned(name), mean)).collect();
        let record = EvalRecord { step, val_loss, metrics, terms, samples, targets, is_best };
        fit.emit(hooks, Event::Evaluation(record))?;
        self.evaluations_since_best += 1;
        if is_best {
            self.evaluations_since_best = 0;
            self.best = Some(Best { step, val_loss, samples, runs: extent.runs });
            if fit.options.keep_best {
                fit.best_parameters = Some(self.session.evaluated_parameters()?);
            }
            // Saved again if it was saved before it was known to be the best.
            fit.is_unsaved_best = true;
            self.save_fit_or_warn(fit, hooks)?;
        }
        Ok(Some(val_loss))
    }

    fn measure_fit(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<Option<Evaluation>, TrainError> {
        let started = Instant::now();
        let part = EvaluatedPart {
            source: &fit.source,
            task: &fit.options.task,
            split: Split::Validation,
            samples: fit.options.eval_samples,
            signals: &fit.signals.clone().stopping_on_usr1(),
        };
        let is_stopped = &mut fit.is_stopped;
        let told = self.notes.len();
        let evaluated = self.evaluate_part(&part, &mut |done, total| {
            let elapsed = started.elapsed();
            *is_stopped |= hooks.event(Event::Evaluating { done, total, elapsed })?.is_break();
            Ok(())
        });
        self.warn_of_notes(told, fit, hooks)?;
        evaluated
    }

    /// Returns true if the present step was evaluated, and none of the last evaluations, as many as
    /// the patience, was better than one before.
    fn has_lost_patience(&self, fit: &Fit) -> bool {
        let patience = fit.options.patience;
        let is_evaluated = fit.evaluated.is_some_and(|(step, _)| step == self.steps());
        is_evaluated && patience > 0 && self.evaluations_since_best >= patience
    }

    /// Saves to the directory if a signal asked for that.
    fn save_if_requested(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<(), TrainError> {
        let is_asked = fit.signals.take_save_request();
        let is_requested = is_asked && fit.asked.is_none_or(|at| at.elapsed() > ASKED_AT_ONCE);
        if is_requested {
            self.save_fit_or_warn(fit, hooks)?;
            fit.asked = Some(Instant::now());
            let step = self.steps();
            if self.saved.as_ref().is_some_and(|(saved, _)| *saved == step) {
                let text = format!("saved at step {step} on SIGUSR1; training continues");
                fit.emit(hooks, Event::Note(text))?;
            }
        }
        Ok(())
    }

    /// Saves to the directory, unless this step is saved there as it is now.
    pub(crate) fn save_fit(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<(), TrainError> {
        let Some(directory) = fit.options.directory.clone() else { return Ok(()) };
        let step = self.steps();
        let is_there =
            self.saved.as_ref().is_some_and(|(saved, place)| *saved == step && *place == directory);
        if is_there && !fit.is_unsaved_best {
            return Ok(());
        }
        let started = Instant::now();
        let written = self.write_save(&directory, fit, hooks);
        fit.last_save = (Instant::now(), started.elapsed());
        written
    }

    fn write_save(
        &mut self,
        directory: &Path,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<(), TrainError> {
        let step = self.steps();
        if hooks.store().is_some() {
            fit.emit(hooks, Event::Saving { step })?;
        }
        self.session.settle()?;
        let told = self.notes.len();
        let checkpoint = self.saveable();
        self.warn_of_notes(told, fit, hooks)?;
        let checkpoint = checkpoint?;
        let Some(store) = hooks.store() else { return Ok(()) };
        let found = fit.found.take_if(|found| *found == step);
        let kept = self.save_to(store, directory, &checkpoint, found)?;
        let pruned = store.prune(fit.options.saves_kept);
        fit.is_unsaved_best = false;
        hooks.saved();
        if let Err(error) = pruned {
            // This state is saved; the next save tries again.
            fit.warn(hooks, format!("cannot remove old checkpoints: {error}"))?;
        }
        if let Some(path) = kept {
            let path = path.display();
            let text = format!("set aside: the checkpoint of step {step} as {path}");
            fit.emit(hooks, Event::Note(text))?;
        }
        fit.emit(hooks, Event::Checkpoint { step })
    }

    /// Saves like [`Trainer::save_fit`]; a failing disk and parameters that are not finite are only
    /// warned of, and training goes on from memory: earlier saves are unchanged, and the next one
    /// may succeed.
    fn save_fit_or_warn(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<(), TrainError> {
        use TrainError::{Checkpoint, Io, WorthlessSave};
        match self.save_fit(fit, hooks) {
            Err(
                error @ (Checkpoint(CheckpointError::Write { .. })
                | Io { .. }
                | WorthlessSave { .. }),
            ) => fit.warn(hooks, format!("step {} was not saved: {error}", self.steps())),
            saved => saved,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saves_by_time_take_one_twentieth_of_it_at_most() {
        let (minute, second) = (Duration::from_secs(60), Duration::from_secs(1));
        assert_eq!(time_between_saves(minute, second), minute);
        let apart = time_between_saves(minute, 10 * second);
        assert_eq!(10 * second, (apart + 10 * second) / 20);
    }
}
