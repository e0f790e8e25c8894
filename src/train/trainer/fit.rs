//! Training of a [`Trainer`] on a data set: many steps, with evaluations, saves and an early end.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use super::Trainer;
use super::opening::source;
use super::options::refused;
use super::steps::{Fit, FitHooks, SkippedStep};
use crate::best::incomparable;
use crate::checkpoint::{Best, NamedTensor, Store};
use crate::error::TrainError;
use crate::evaluate::extent_of;
use crate::loader::BatchSource;
use crate::task::{LossTask, Task};
use potluck_core::DType;
use potluck_core::metrics::Event;
use potluck_core::setting::as_fields;
use potluck_data::{Augmentation, DataFile, Dataset, Split};
use potluck_graph::optim::{Decay, Schedule};
use potluck_parallel::DeviceLoss;

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
    /// [`task_of_samples`](crate::task::task_of_samples) gives it; steps count its unit.
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
    /// the last of them. The samples of a text are its windows, one per token, which overlap;
    /// `train.epochs` of the program counts their tokens, and so ends earlier by the context's
    /// length.
    Epochs(u64),
}

/// Size of an epoch, in samples or tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EpochSize {
    pub units: u64,
    /// Units of a sample.
    pub per_sample: u64,
}

impl EpochSize {
    /// Returns the last step of so many epochs, after `steps` steps in which `samples` samples were
    /// trained on, with `batch` samples per step to come.
    pub fn last_step(self, epochs: u64, steps: u64, samples: u64, batch: u64) -> u64 {
        let whole = epochs.saturating_mul(self.units);
        let left = whole.saturating_sub(samples.saturating_mul(self.per_sample));
        steps + left.div_ceil(batch * self.per_sample)
    }
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
        if self.skipped_steps_max == 0 {
            return refused("skipped_steps_max must be at least 1");
        }
        if self.eval_every > 0 && data.evaluation_samples(Split::Validation).is_empty() {
            return refused("the data hold no sample out to evaluate on; set eval_every to 0");
        }
        if self.eval_every == 0 && self.patience > 0 {
            return refused("patience counts evaluations, of which there are none; set eval_every");
        }
        if self.eval_every == 0 && self.keep_best {
            return refused("keep_best needs evaluations, of which there are none; set eval_every");
        }
        if let Some(changes) = &self.augmentation {
            check_pictures(changes, data)?;
        }
        Ok(())
    }
}

/// Checks that the samples are pictures of the size that is changed.
fn check_pictures(changes: &Augmentation, data: &Arc<dyn Dataset>) -> Result<(), TrainError> {
    let [channels, height, width] = changes.shape();
    // The input that the loader changes.
    let input = match data.inputs().first() {
        Some(input) if input.dtype == DType::F32 => *input,
        _ => return refused("the data have no pictures for an augmentation to change"),
    };
    if input.elements != channels * height * width {
        return Err(TrainError::InvalidRequest(format!(
            "the augmentation is one of pictures of {channels} x {height} x {width} values, and \
             the data have {} values of '{}' per sample",
            input.elements, input.name
        )));
    }
    Ok(())
}

/// Hooks of a call of [`Trainer::fit`].
struct CallHooks<'a> {
    watch: &'a mut dyn FnMut(&Event) -> ControlFlow<()>,
    store: Option<Store>,
}

impl FitHooks for CallHooks<'_> {
    fn event(&mut self, event: Event) -> Result<ControlFlow<()>, TrainError> {
        Ok((self.watch)(&event))
    }

    fn skipped(
        &mut self,
        trainer: &Trainer,
        _: &Fit,
        SkippedStep { reason, count, limit, .. }: SkippedStep,
    ) -> Result<ControlFlow<()>, TrainError> {
        let told = self.event(Event::Warning(format!(
            "step {} was skipped ({count} in a row, training ends at {limit}): {reason}",
            trainer.steps()
        )))?;
        if count < limit { Ok(told) } else { Err(TrainError::NotFinite { count, reason }) }
    }

    fn store(&mut self) -> Option<&mut Store> {
        self.store.as_mut()
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
        let fitted = as_fields(|| self.fit_data(data, options, watch));
        self.noting_failure(fitted)
    }

    fn fit_data(
        &mut self,
        data: &Arc<dyn Dataset>,
        options: &FitOptions,
        watch: &mut dyn FnMut(&Event) -> ControlFlow<()>,
    ) -> Result<FitReport, TrainError> {
        options.check(data)?;
        let source = self.source_of(data, options)?;
        let last = match options.length {
            FitLength::Steps(last) => last,
            FitLength::Epochs(epochs) => {
                let epoch = EpochSize { units: source.sampler.epoch_samples(), per_sample: 1 };
                epoch.last_step(epochs, self.steps(), self.samples, self.options.batch as u64)
            }
        };
        self.begin_on(&source, options);
        let mut store = None;
        if let Some(path) = &options.directory {
            store = Some(self.open_store(path)?);
        }
        let loader = self.loader(&source, last)?;
        let mut fit = Fit::new(options.clone(), source, loader, last);
        let mut hooks = CallHooks { watch, store };
        let end = self.run_fit(&mut fit, &mut hooks);
        fit.emit(&mut hooks, Event::Ended)?;
        Ok(FitReport {
            end: end?,
            steps: self.steps(),
            loss: fit.loss,
            val_loss: fit.evaluated.map(|(_, loss)| loss),
            best: self.best,
            best_parameters: fit.best_parameters,
        })
    }

    fn source_of(
        &self,
        data: &Arc<dyn Dataset>,
        options: &FitOptions,
    ) -> Result<BatchSource, TrainError> {
        let steps = self.steps();
        let mut source = source(&self.graph, data.clone(), &self.options, steps, self.samples)?;
        let seed = self.options.seed;
        source.augmentation = options.augmentation.clone().map(|changes| (changes, seed));
        Ok(source)
    }

    /// Notes the data of this call. Forgets the best evaluation if it was one of other data, or of
    /// another extent than those of this call, and states that were carried through other data.
    fn begin_on(&mut self, source: &BatchSource, options: &FitOptions) {
        let data = source.data.fingerprint();
        let mut extent = None;
        if options.eval_every > 0 {
            extent = Some(extent_of(source, Split::Validation, options.eval_samples));
        }
        if incomparable(self.best, (&self.data, &data), extent).is_some() {
            self.best = None;
            self.evaluations_since_best = 0;
        }
        if self.data != data {
            self.session.reset_states();
        }
        self.data = data;
        self.description = source.data.description();
        self.files = DataFile::recorded(source.data.files());
    }

    /// Runs the steps, and goes on after the loss of a device if that is requested.
    fn run_fit(&mut self, fit: &mut Fit, hooks: &mut CallHooks) -> Result<FitEnd, TrainError> {
        if self.steps() < fit.last {
            self.save_fit(fit, hooks)?;
            self.keep_start()?;
        } else {
            let text = format!(
                "nothing is left to train: lengths count from the trainer's first step, this one \
                 ends with step {}, and {} are taken already",
                fit.last,
                self.steps()
            );
            fit.emit(hooks, Event::Note(text))?;
        }
        loop {
            let done = self.steps();
            let device = self.device().to_string();
            fit.emit(hooks, Event::Started { done, steps: fit.last, device })?;
            let error = match self.run_steps(fit, hooks) {
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
                    let source = self.source_of(&data, &fit.options)?;
                    self.begin_on(&source, &fit.options);
                    let loader = self.loader(&source, fit.last)?;
                    fit.go_on(source, loader);
                    let text = format!(
                        "training goes on from step {step} on {}, without a device that failed: \
                         {error}",
                        self.options.devices
                    );
                    fit.warn(hooks, text)?;
                }
                Err(why) => {
                    fit.warn(hooks, format!("training does not go on by itself: {why}"))?;
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
}
