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
use crate::cost_meter::MeteredStep;
use crate::error::TrainError;
use crate::evaluate::{Evaluation, extent_of};
use crate::evaluated_part::EvaluatedPart;
use crate::loader::{BatchSource, Loader};
use crate::runtime::step::StepInput;
use crate::session::StepTiming;
use crate::signals::SignalFlags;
use potluck_core::metrics::{EvalRecord, Event, StepRecord};
use potluck_data::Split;

/// Hooks of the steps, for a call of the library or a run of the program.
pub(crate) trait FitHooks {
    /// Reports an event; [`ControlFlow::Break`] ends the steps after the current one.
    ///
    /// # Errors
    /// Returns the error that ends the steps.
    fn event(&mut self, event: Event) -> Result<ControlFlow<()>, TrainError>;

    /// Reports a skipped step, like [`FitHooks::event`].
    ///
    /// # Errors
    /// Returns the error that ends the steps, for too many consecutive ones.
    fn skipped(
        &mut self,
        trainer: &Trainer,
        fit: &Fit,
        step: SkippedStep,
    ) -> Result<ControlFlow<()>, TrainError>;

    /// Returns the saves of the directory, if there is one.
    fn store(&mut self) -> Option<&mut Store>;

    /// Called after each save.
    fn saved(&mut self) {}
}

/// Step without an update, because a value was not finite.
pub(crate) struct SkippedStep<'a> {
    /// Inputs of the ranks.
    pub inputs: &'a [Arc<StepInput>],
    pub reason: String,
    /// Number of consecutive skipped steps, including this one.
    pub count: u64,
    /// Number of consecutive skipped steps that is an error.
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
    /// Signals that end the steps before the next one and an evaluation in progress, or request a
    /// save.
    pub signals: SignalFlags,
    /// Step of an earlier save in the directory.
    pub found: Option<u64>,
    /// Mean loss of the last step.
    pub loss: Option<f64>,
    /// Step and loss of the last evaluation.
    pub evaluated: Option<(u64, f64)>,
    /// Step and parameters of the best evaluation, if they are kept: the averages, if there are
    /// any.
    pub(crate) best_parameters: Option<(u64, Vec<NamedTensor>)>,
    /// True if the save of the current step, if any, lacks its evaluation.
    is_unsaved_evaluation: bool,
    /// True if a hook requested the end.
    is_stopped: bool,
    /// Number of consecutive skipped steps.
    skipped: u64,
    /// Steps in a row of which no target counted.
    uncounted: u64,
    /// End of the last save or attempt, or the start, and the duration of the save.
    last_save: (Instant, Duration),
    /// End of the last save requested by a signal.
    asked: Option<Instant>,
}

/// Steps in a row of which no target counts, at which training ends.
const UNCOUNTED_MAX: u64 = 100;

/// Time in which requests of several nodes count as one request of a job manager to all nodes.
const ASKED_AT_ONCE: Duration = Duration::from_secs(2);

/// Time between saves of this duration, such that they take at most 5 % of the time.
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
            is_unsaved_evaluation: false,
            is_stopped: false,
            skipped: 0,
            uncounted: 0,
            last_save: (Instant::now(), Duration::ZERO),
            asked: None,
        }
    }

    fn is_save_due_by_time(&self) -> bool {
        let Some(interval) = self.options.save_interval else { return false };
        let (ended, took) = self.last_save;
        ended.elapsed() >= time_between_saves(interval, took)
    }

    /// Continues with other inputs, after the loss of a device.
    pub fn go_on(&mut self, source: BatchSource, loader: Loader) {
        self.source = source;
        self.loader = loader;
        self.skipped = 0;
        self.uncounted = 0;
        self.evaluated = None;
        self.is_unsaved_evaluation = false;
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
    /// Starts to load the inputs of the next steps up to `last`, except for inputs that other nodes
    /// read.
    pub(crate) fn loader(&self, source: &BatchSource, last: u64) -> Result<Loader, TrainError> {
        let ranks = self.session.loaded_ranks();
        Loader::start(source.clone(), ranks, self.steps() + 1, last)
            .map_err(|why| TrainError::System { what: "the loader's thread", why })
    }

    /// Returns true if the current step is a multiple of `every`; false if that is 0.
    pub(crate) fn is_due(&self, every: u64) -> bool {
        every > 0 && self.steps().is_multiple_of(every)
    }

    /// Takes the remaining steps, evaluates, and saves. Steps may leave their all-gathers to the
    /// next one: readers of parameters between two steps complete these first.
    pub(crate) fn run_steps(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<FitEnd, TrainError> {
        self.session.leaves_gathers = true;
        let end = self.steps_until_end(fit, hooks);
        self.session.leaves_gathers = false;
        if end.is_err() {
            // Its error is ignored: the result is the error that ended the steps.
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
        self.follow_speed(fit, hooks)?;
        while self.steps() < fit.last {
            if fit.signals.pending().is_some() {
                end = FitEnd::Stopped;
                break;
            }
            // Also if earlier steps have ended for this reason.
            if self.has_lost_patience(fit) {
                end = FitEnd::NoImprovement;
                break;
            }
            self.take_fit_step(fit, hooks)?;
            self.follow_speed(fit, hooks)?;
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
            // A signal ends it.
            self.evaluate_fit(fit, hooks)?;
        }
        self.save_fit(fit, hooks)?;
        if let Some(cost) = self.session.cost() {
            fit.emit(hooks, Event::Cost(cost))?;
        }
        Ok(end)
    }

    fn take_fit_step(&mut self, fit: &mut Fit, hooks: &mut dyn FitHooks) -> Result<(), TrainError> {
        self.take_snapshot_if_due()?;
        let lr = fit.options.schedule.lr(self.steps() + 1);
        // After an evaluation; outside of the measured time of the step.
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
        let is_uncounted = reports.first().is_some_and(|report| report.verdict.counts_nothing());
        if !is_uncounted {
            fit.loss = Some(record.loss);
            fit.uncounted = 0;
        }
        let StepRecord { step: number, ms, unit, count, .. } = record;
        self.session.measure(MeteredStep { number, seconds: ms / 1e3, unit, count }, &reports);
        fit.emit(hooks, Event::Step(record))?;
        let Some(reason) = skipped else {
            fit.skipped = 0;
            return Ok(());
        };
        if is_uncounted {
            return self.note_uncounted(fit, hooks);
        }
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

    /// Notes the first of the steps in a row of which no target counted; too many of them are an
    /// error in the data.
    fn note_uncounted(&self, fit: &mut Fit, hooks: &mut dyn FitHooks) -> Result<(), TrainError> {
        fit.uncounted += 1;
        if fit.uncounted == UNCOUNTED_MAX {
            return Err(TrainError::InvalidRequest(format!(
                "no target of the last {UNCOUNTED_MAX} batches counts: all are masked, or are of \
                 classes without a weight"
            )));
        }
        if fit.uncounted > 1 {
            return Ok(());
        }
        let step = self.steps();
        let note = format!("step {step} was skipped: no target of its batch counts");
        fit.emit(hooks, Event::Note(note))
    }

    /// Changes the samples of the devices from the next step on, if that is due. Before a save of
    /// this step, which then has the shares with which training continues.
    fn follow_speed(&mut self, fit: &mut Fit, hooks: &mut dyn FitHooks) -> Result<(), TrainError> {
        if self.steps() >= fit.last {
            return Ok(());
        }
        let given = self.session.take_given_shares();
        let Some(change) = given.or_else(|| self.session.change_shares_by_speed()) else {
            return Ok(());
        };
        fit.loader = self.loader(&fit.source, fit.last)?;
        fit.emit(hooks, Event::Shares(change))
    }

    /// Emits the notes on repairs of differing parameters as warnings.
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

    /// Evaluates on the validation split, unless this step was evaluated; keeps and saves the best
    /// parameters. Returns the loss; `None` if there is no held-out data, or if a pending signal
    /// ended the evaluation.
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
                // The save must not wait for the evaluation, which starts again after it.
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
        // A run that goes on from the best step in another directory evaluates that step again.
        let is_best_again = self.best.is_some_and(|best| best.step == step);
        self.evaluations_since_best += u64::from(!is_best_again);
        if is_best {
            self.evaluations_since_best = 0;
            self.best = Some(Best { step, val_loss, samples, runs: extent.runs });
            if fit.options.keep_best {
                fit.best_parameters = Some((step, self.session.evaluated_parameters()?));
            }
        }
        // If it has a save already, that must be marked as the best, or have the count.
        let is_counted = fit.options.patience > 0 && self.has_save_of(step);
        if is_best || is_counted {
            fit.is_unsaved_evaluation = true;
            self.save_fit_or_warn(fit, hooks)?;
        }
        Ok(Some(val_loss))
    }

    fn has_save_of(&self, step: u64) -> bool {
        self.saved.as_ref().is_some_and(|(saved, _)| *saved == step)
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

    /// Returns true if the current step was evaluated, and none of the last evaluations, as many as
    /// the patience, was better than an earlier one.
    fn has_lost_patience(&self, fit: &Fit) -> bool {
        let patience = fit.options.patience;
        let is_evaluated = fit.evaluated.is_some_and(|(step, _)| step == self.steps());
        is_evaluated && patience > 0 && self.evaluations_since_best >= patience
    }

    /// Saves to the directory if a signal requested it.
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

    /// Saves to the directory, unless it has a current save of this step.
    pub(crate) fn save_fit(
        &mut self,
        fit: &mut Fit,
        hooks: &mut dyn FitHooks,
    ) -> Result<(), TrainError> {
        let Some(directory) = fit.options.directory.clone() else { return Ok(()) };
        let step = self.steps();
        let is_there =
            self.saved.as_ref().is_some_and(|(saved, place)| *saved == step && *place == directory);
        if is_there && !fit.is_unsaved_evaluation {
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
        let has_warnings = self.notes.len() > told;
        self.warn_of_notes(told, fit, hooks)?;
        // A warning is also the end of a save that failed.
        if has_warnings && hooks.store().is_some() {
            fit.emit(hooks, Event::Saving { step })?;
        }
        let checkpoint = checkpoint?;
        let Some(store) = hooks.store() else { return Ok(()) };
        let found = fit.found.take_if(|found| *found == step);
        let told = self.notes.len();
        let saved = self.save_to(store, directory, &checkpoint, found);
        let pruned = saved.map(|()| store.prune(fit.options.saves_kept));
        for note in &self.notes[told..] {
            fit.emit(hooks, Event::Note(note.clone()))?;
        }
        let pruned = pruned?;
        fit.is_unsaved_evaluation = false;
        hooks.saved();
        if let Err(error) = pruned {
            // This state is saved; the next save tries the removal again.
            fit.warn(hooks, format!("cannot remove old checkpoints: {error}"))?;
        }
        fit.emit(hooks, Event::Checkpoint { step })
    }

    /// Saves like [`Trainer::save_fit`]; a failing disk and parameters that are not finite are only
    /// warnings, and training continues from memory: earlier saves are unchanged, and the next one
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
