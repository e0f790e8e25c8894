//! Training of a [`Trainer`] on a data set: many steps, with evaluations, saves and an early end.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::opening::source;
use super::{DeviceLoss, Trainer};
use crate::base::DType;
use crate::checkpoint::{Best, CheckpointError, NamedTensor, Store};
use crate::data::{Augmentation, DataFile, Dataset, Split};
use crate::metrics::{EvalRecord, Event};
use crate::optim::{Decay, Schedule};
use crate::train::best::{incomparable, is_better};
use crate::train::error::TrainError;
use crate::train::evaluate::{Evaluation, extent_of};
use crate::train::loader::{BatchSource, LoadedRanks, Loader};
use crate::train::session::StepTiming;
use crate::train::task::{LossTask, Task};
use crate::train::words::in_library_words;

/// Options of [`Trainer::fit`].
#[derive(Clone, Debug)]
pub struct FitOptions {
    pub length: FitLength,
    /// Learning rate of each step of the trainer.
    pub schedule: Schedule,
    /// Steps between evaluations on the validation split, of which there is one at the end, too; 0:
    /// none.
    pub eval_every: u64,
    /// Samples per evaluation, spread over the split; 0: all.
    pub eval_samples: u64,
    /// Task whose metrics evaluations compute, as
    /// [`task_of_samples`](crate::train::task::task_of_samples) gives it; steps count its unit.
    pub task: Arc<dyn Task>,
    /// Random changes of the pictures that are trained on: of the first input of the data.
    pub augmentation: Option<Augmentation>,
    /// Evaluations after the best one that may pass without a better one; 0: any number. Needs
    /// `eval_every`.
    pub patience: u64,
    /// True to keep the parameters of the best evaluation of this call, in host memory. Needs
    /// `eval_every`.
    pub keep_best: bool,
    /// Directory that is saved to at the start, at the best evaluations and at the end.
    pub directory: Option<PathBuf>,
    /// Steps between further saves; 0: none.
    pub save_every: u64,
    /// Newest saves to keep, at least 2, besides the best.
    pub saves_kept: usize,
    /// Steps in a row that are not finite, and so update nothing, at which the call ends with an
    /// error; at least 1.
    pub skipped_steps_max: u64,
}

/// End of the steps of [`Trainer::fit`], counted from the first step of the trainer, also over
/// saves and on other data: a call that goes on has the length of the whole. If that is reached
/// already, the call takes no step, and says so with an [`Event::Note`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitLength {
    Steps(u64),
    /// Passes through the samples of the training split; ends with the first step that completes
    /// the last of them.
    Epochs(u64),
}

/// Reason for which [`Trainer::fit`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitEnd {
    /// All steps are done.
    Done,
    /// The callback asked for it.
    Stopped,
    /// No evaluation was better for `FitOptions::patience` of them.
    NoImprovement,
}

/// Report of [`Trainer::fit`].
#[derive(Clone, Debug, PartialEq)]
pub struct FitReport {
    pub end: FitEnd,
    /// Steps taken by the trainer.
    pub steps: u64,
    /// Mean loss of the last step of this call, before its update; `None` if there was no step.
    pub loss: Option<f64>,
    /// Mean loss of the last evaluation of this call.
    pub val_loss: Option<f64>,
    /// Best evaluation on these data, also of earlier calls and those before a save.
    pub best: Option<Best>,
    /// Its parameters, if it was in this call and `FitOptions::keep_best` is set; for
    /// [`Trainer::set_parameters`].
    pub best_parameters: Option<Vec<NamedTensor>>,
}

impl FitOptions {
    /// Returns options for steps at one learning rate, without evaluations and saves.
    pub fn constant(length: FitLength, lr: f64) -> Self {
        let decay = Decay::Constant;
        let schedule = Schedule { decay, lr, min_lr: lr, warmup: 0, decay_steps: 0 };
        Self::new(length, schedule)
    }

    /// Returns options for steps by a schedule, without evaluations and saves; 100 skipped steps in
    /// a row are an error.
    pub fn new(length: FitLength, schedule: Schedule) -> Self {
        Self {
            length,
            schedule,
            eval_every: 0,
            eval_samples: 0,
            task: Arc::new(LossTask),
            augmentation: None,
            patience: 0,
            keep_best: false,
            directory: None,
            save_every: 0,
            saves_kept: 2,
            skipped_steps_max: 100,
        }
    }
}

impl FitOptions {
    /// Checks that the options make sense together and on the data.
    fn check(&self, data: &Arc<dyn Dataset>) -> Result<(), TrainError> {
        let fail = |why: &str| Err(TrainError::InvalidRequest(why.into()));
        if self.skipped_steps_max == 0 {
            return fail("skipped_steps_max must be at least 1");
        }
        if self.eval_every > 0 && data.evaluation_samples(Split::Validation).is_empty() {
            return fail("the data hold no sample out to evaluate on; set eval_every to 0");
        }
        if self.eval_every == 0 && self.patience > 0 {
            return fail("patience counts evaluations, of which there are none; set eval_every");
        }
        if self.eval_every == 0 && self.keep_best {
            return fail("keep_best needs evaluations, of which there are none; set eval_every");
        }
        self.augmentation.as_ref().map_or(Ok(()), |changes| check_pictures(changes, data))
    }
}

/// Checks that the samples are pictures of the size that is changed.
fn check_pictures(changes: &Augmentation, data: &Arc<dyn Dataset>) -> Result<(), TrainError> {
    let fail = |why: String| Err(TrainError::InvalidRequest(why));
    let [channels, height, width] = changes.shape();
    // The input that the loader changes.
    let Some(input) = data.inputs().into_iter().next().filter(|input| input.dtype == DType::F32)
    else {
        return fail("the data have no pictures for an augmentation to change".into());
    };
    if input.elements != channels * height * width {
        return fail(format!(
            "the augmentation is one of pictures of {channels} x {height} x {width} values, and \
             the data have {} values of '{}' per sample",
            input.elements, input.name
        ));
    }
    Ok(())
}

/// State of a call of [`Trainer::fit`].
struct Fit<'a> {
    options: &'a FitOptions,
    source: BatchSource,
    watch: &'a mut dyn FnMut(&Event) -> ControlFlow<()>,
    store: Option<Store>,
    /// Step after which the call ends.
    last: u64,
    is_stopped: bool,
    skipped: u64,
    loss: Option<f64>,
    /// Step and loss of the last evaluation.
    evaluated: Option<(u64, f64)>,
    best_parameters: Option<Vec<NamedTensor>>,
}

impl Fit<'_> {
    fn emit(&mut self, event: Event) {
        self.is_stopped |= (self.watch)(&event).is_break();
    }

    fn warn(&mut self, text: &str) {
        self.emit(Event::Warning(in_library_words(text)));
    }
}

impl Trainer {
    /// Trains on a data set: each step draws its samples by the trainer's seed, its number and the
    /// samples consumed before it, without replacement in each epoch; if the graph carries states
    /// from step to step, each slot of the batch goes through a part of the data in order, and
    /// begins with zeros on other data than those before. So a call in two parts, also
    /// over a save, ends in the bits of one call, which are those of `potluck train` with the same
    /// graph, data, seed, batch and devices.
    ///
    /// With `TrainerOptions::on_loss` set to [`DeviceLoss::Continue`], the loss of one of several
    /// devices is a warning, and training goes on as by [`Trainer::recover`].
    ///
    /// # Errors
    /// Returns `TrainError` if the data do not fit the graph, if the options do not fit each other
    /// or the data, if too many steps in a row are not finite, if the directory cannot be written,
    /// or if a device fails.
    pub fn fit(
        &mut self,
        data: &Arc<dyn Dataset>,
        options: &FitOptions,
    ) -> Result<FitReport, TrainError> {
        self.fit_with(data, options, &mut |_| ControlFlow::Continue(()))
    }

    /// Trains like [`Trainer::fit`]; `watch` gets the events as they happen, and ends the call
    /// after the present step if it returns [`ControlFlow::Break`].
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::fit`].
    pub fn fit_with(
        &mut self,
        data: &Arc<dyn Dataset>,
        options: &FitOptions,
        watch: &mut dyn FnMut(&Event) -> ControlFlow<()>,
    ) -> Result<FitReport, TrainError> {
        let fitted = self.begin_fit(data, options, watch).and_then(|mut fit| {
            let end = self.run_fit(&mut fit);
            fit.emit(Event::Ended);
            Ok(FitReport {
                end: end?,
                steps: self.steps(),
                loss: fit.loss,
                val_loss: fit.evaluated.map(|(_, loss)| loss),
                best: self.best,
                best_parameters: fit.best_parameters,
            })
        });
        self.noting_failure(fitted)
    }

    fn begin_fit<'a>(
        &mut self,
        data: &Arc<dyn Dataset>,
        options: &'a FitOptions,
        watch: &'a mut dyn FnMut(&Event) -> ControlFlow<()>,
    ) -> Result<Fit<'a>, TrainError> {
        options.check(data)?;
        let source = self.source_of(data, options)?;
        let batch = self.options.batch as u64;
        let last = match options.length {
            FitLength::Steps(steps) => steps,
            FitLength::Epochs(epochs) => {
                let samples = source.sampler.epoch_samples();
                let left = epochs.saturating_mul(samples).saturating_sub(self.samples);
                self.steps() + left.div_ceil(batch)
            }
        };
        self.begin_on(&source, options);
        let store = options.directory.as_deref().map(|path| self.open_store(path)).transpose()?;
        Ok(Fit {
            options,
            source,
            watch,
            store,
            last,
            is_stopped: false,
            skipped: 0,
            loss: None,
            evaluated: None,
            best_parameters: None,
        })
    }

    fn source_of(
        &self,
        data: &Arc<dyn Dataset>,
        options: &FitOptions,
    ) -> Result<BatchSource, TrainError> {
        let done = (self.steps(), self.samples);
        let mut source = source(&self.graph, data.clone(), &self.options, done)?;
        let seed = self.options.seed;
        source.augmentation = options.augmentation.clone().map(|changes| (changes, seed));
        Ok(source)
    }

    /// Notes the data of this call. Forgets the best evaluation if it was one of other data, or of
    /// another extent than those of this call, and states that were carried through other data.
    fn begin_on(&mut self, source: &BatchSource, options: &FitOptions) {
        let data = source.data.fingerprint();
        let extent = || extent_of(source, Split::Validation, options.eval_samples);
        let extent = (options.eval_every > 0).then(extent);
        let is_comparable = incomparable(self.best, (&self.data, &data), extent).is_none();
        self.best = self.best.filter(|_| is_comparable);
        if self.data != data {
            self.session.reset_states();
        }
        self.data = data;
        self.description = source.data.description();
        self.files = DataFile::recorded(source.data.files());
    }

    /// Runs the steps, and goes on after the loss of a device if that is requested.
    fn run_fit(&mut self, fit: &mut Fit) -> Result<FitEnd, TrainError> {
        if self.steps() < fit.last {
            self.save_fit(fit, false)?;
            self.keep_start()?;
        } else {
            fit.emit(Event::Note(format!(
                "nothing is left to train: lengths count from the trainer's first step, this one \
                 ends with step {}, and {} are taken already",
                fit.last,
                self.steps()
            )));
        }
        loop {
            let error = match self.run_steps(fit) {
                Ok(end) => return Ok(end),
                Err(error) => error,
            };
            let goes_on = self.options.on_loss == DeviceLoss::Continue;
            if !goes_on || error.lost_rank().is_none() {
                return Err(error);
            }
            let error = self.note_failure(error);
            match self.reopen() {
                Ok(step) => {
                    let data = fit.source.data.clone();
                    fit.source = self.source_of(&data, fit.options)?;
                    self.begin_on(&fit.source, fit.options);
                    (fit.skipped, fit.evaluated) = (0, None);
                    fit.warn(&format!(
                        "training goes on from step {step} on {}, without a device that failed: \
                         {error}",
                        self.options.devices
                    ));
                }
                Err(why) => {
                    fit.warn(&format!("training does not go on by itself: {why}"));
                    return Err(error);
                }
            }
        }
    }

    /// Keeps the state of the start in memory if it may be needed and none is kept elsewhere.
    fn keep_start(&mut self) -> Result<(), TrainError> {
        self.take_snapshot_if_due()?;
        let is_kept = self.saved.is_some() || self.snapshot.is_some();
        if self.options.on_loss == DeviceLoss::Continue && self.world() > 1 && !is_kept {
            self.snapshot = Some(Arc::new(self.checkpoint()?));
        }
        Ok(())
    }

    fn run_steps(&mut self, fit: &mut Fit) -> Result<FitEnd, TrainError> {
        let ranks = LoadedRanks::of(&self.session.programs, &self.session.rank_plans);
        let loader = Loader::start(fit.source.clone(), ranks, self.steps() + 1, fit.last)
            .map_err(|why| TrainError::System { what: "the loader's thread", why })?;
        let (done, device) = (self.steps(), self.device().to_string());
        fit.emit(Event::Started { done, steps: fit.last, device });
        let due = |every: u64, step: u64| every > 0 && step.is_multiple_of(every);
        let mut end = FitEnd::Done;
        while self.steps() < fit.last {
            self.take_fit_step(fit, &loader)?;
            if due(fit.options.eval_every, self.steps()) {
                self.evaluate_fit(fit)?;
            }
            if due(fit.options.save_every, self.steps()) {
                self.save_fit_or_warn(fit, false)?;
            }
            if fit.is_stopped {
                end = FitEnd::Stopped;
                break;
            }
            if self.has_lost_patience(fit) {
                end = FitEnd::NoImprovement;
                break;
            }
        }
        if fit.options.eval_every > 0 {
            self.evaluate_fit(fit)?;
        }
        self.save_fit(fit, false)?;
        Ok(end)
    }

    fn take_fit_step(&mut self, fit: &mut Fit, loader: &Loader) -> Result<(), TrainError> {
        self.take_snapshot_if_due()?;
        let (lr, started) = (fit.options.schedule.lr(self.steps() + 1), Instant::now());
        let ended = || TrainError::Defect("the loader ended before the last step".into());
        let ranks = loader.next_step().ok_or_else(ended)??;
        self.session.reset_states_at_beginnings(&fit.source.sampler);
        let reports = self.take_step(ranks, lr)?;
        let (unit, batch) = (fit.options.task.unit(), self.options.batch as u64);
        let record = self.session.step_record(&reports, &StepTiming { lr, unit, batch, started });
        let skipped = record.skipped.clone();
        fit.loss = Some(record.loss);
        fit.emit(Event::Step(record));
        match skipped {
            None => fit.skipped = 0,
            Some(reason) => self.count_skipped(fit, reason)?,
        }
        let notes = self.notes.len();
        let compared = self.compare_parameters_if_due();
        // Repairs of differing parameters are told as they happen.
        self.notes[notes..].iter().for_each(|note| fit.warn(note));
        compared
    }

    /// Counts a step that updated nothing; too many in a row are an error.
    fn count_skipped(&self, fit: &mut Fit, reason: String) -> Result<(), TrainError> {
        fit.skipped += 1;
        let (count, limit) = (fit.skipped, fit.options.skipped_steps_max);
        fit.warn(&format!(
            "step {} was skipped ({count} in a row, training ends at {limit}): {reason}",
            self.steps()
        ));
        if count < limit { Ok(()) } else { Err(TrainError::NotFinite { count, reason }) }
    }

    /// Evaluates on the validation split, unless that was done after this step; keeps and saves the
    /// best.
    fn evaluate_fit(&mut self, fit: &mut Fit) -> Result<(), TrainError> {
        let step = self.steps();
        if fit.evaluated.is_some_and(|(at, _)| at == step) {
            return Ok(());
        }
        let (source, samples) = (fit.source.clone(), fit.options.eval_samples);
        let task = fit.options.task.clone();
        let started = Instant::now();
        let evaluation =
            self.evaluate_source((&source, &task), Split::Validation, samples, &mut |d, t| {
                fit.emit(Event::Evaluating { done: d, total: t, elapsed: started.elapsed() });
            })?;
        let Evaluation { loss: val_loss, samples, targets, sums } = evaluation;
        fit.evaluated = Some((step, val_loss));
        let is_best = is_better(val_loss, self.best);
        let metrics = fit.options.task.metrics(&sums);
        let record = EvalRecord { step, val_loss, metrics, samples, targets, is_best };
        fit.emit(Event::Evaluation(record));
        if is_best {
            let runs = extent_of(&source, Split::Validation, samples).runs;
            self.best = Some(Best { step, val_loss, samples, runs });
            if fit.options.keep_best {
                fit.best_parameters = Some(self.parameters()?);
            }
            // Saved again if it was saved before it was known to be the best.
            self.save_fit_or_warn(fit, true)?;
        }
        Ok(())
    }

    /// Returns true if as many evaluations as the patience have passed since the best one: by the
    /// numbers of steps alone, so that a call that goes on ends where one in a piece does.
    fn has_lost_patience(&self, fit: &Fit) -> bool {
        let FitOptions { patience, eval_every, .. } = *fit.options;
        let evaluations = |step: u64| step.checked_div(eval_every).unwrap_or(0);
        let best = self.best.map_or(0, |best| evaluations(best.step));
        let is_fresh = fit.evaluated.is_some_and(|(step, _)| step == self.steps());
        patience > 0 && is_fresh && evaluations(self.steps()).saturating_sub(best) >= patience
    }

    /// Saves to the directory of the call, unless this step is saved there and not to be saved
    /// `again`.
    fn save_fit(&mut self, fit: &mut Fit, again: bool) -> Result<(), TrainError> {
        let (Some(directory), Some(mut store)) = (&fit.options.directory, fit.store.take()) else {
            return Ok(());
        };
        let is_there = |(step, place): &(u64, PathBuf)| *step == self.steps() && place == directory;
        let saved = match self.saved.as_ref().is_some_and(is_there) && !again {
            true => Ok(()),
            false => self.save_fit_to(fit, &mut store, directory),
        };
        fit.store = Some(store);
        saved
    }

    fn save_fit_to(
        &mut self,
        fit: &mut Fit,
        store: &mut Store,
        directory: &Path,
    ) -> Result<(), TrainError> {
        let checkpoint = self.saveable()?;
        self.save_to(store, directory, &checkpoint)?;
        if let Err(error) = store.prune(fit.options.saves_kept) {
            // This state is saved; the next save tries again.
            fit.warn(&format!("old saves were not removed: {error}"));
        }
        fit.emit(Event::Checkpoint { step: self.steps() });
        Ok(())
    }

    /// Saves like [`Trainer::save_fit`]; a failing disk and parameters that are not finite are only
    /// warned of: earlier saves are unchanged, and the next one may succeed.
    fn save_fit_or_warn(&mut self, fit: &mut Fit, again: bool) -> Result<(), TrainError> {
        use TrainError::{Checkpoint, InvalidRequest};
        match self.save_fit(fit, again) {
            Err(error @ (Checkpoint(CheckpointError::Write { .. }) | InvalidRequest(_))) => {
                fit.warn(&format!("step {} was not saved: {error}", self.steps()));
                Ok(())
            }
            saved => saved,
        }
    }
}
