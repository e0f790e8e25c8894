//! Training of a [`Trainer`] on a data set: many steps, with evaluations, saves and an early end.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::Trainer;
use super::fit_end::FitEnd;
use super::fit_options::{FitLength, FitOptions};
use super::opening::source;
use super::steps::{Fit, FitHooks, SkippedStep};
use crate::best::incomparable;
use crate::checkpoint::{Best, NamedTensor, Store};
use crate::error::TrainError;
use crate::evaluate::extent_of;
use crate::loader::BatchSource;
use potluck_core::metrics::Event;
use potluck_core::setting::as_fields;
use potluck_data::{DataFile, Dataset, Split};
use potluck_parallel::DeviceLoss;

/// Size of an epoch, in samples or tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EpochSize {
    pub units: u64,
    /// Units of a sample.
    pub per_sample: u64,
}

impl EpochSize {
    /// Returns the last step of `epochs` epochs, after `steps` steps with `samples` samples in all,
    /// for `batch` samples in each further step.
    pub fn last_step(self, epochs: u64, steps: u64, samples: u64, batch: u64) -> u64 {
        let whole = epochs.saturating_mul(self.units);
        let left = whole.saturating_sub(samples.saturating_mul(self.per_sample));
        steps + left.div_ceil(batch * self.per_sample)
    }
}

/// Report of [`Trainer::fit`].
#[derive(Clone, Debug, PartialEq)]
pub struct FitReport {
    pub end: FitEnd,
    /// Steps taken by the trainer.
    pub steps: u64,
    /// Mean loss of the last step of this call with a target that counts, before its update; `None`
    /// if there was no such step.
    pub loss: Option<f64>,
    /// Mean loss of the last evaluation of this call.
    pub val_loss: Option<f64>,
    /// Best evaluation on these data, including earlier calls and evaluations before a save.
    pub best: Option<Best>,
    /// Its parameters, if it was in this call and `FitOptions::keep_best` is set; for
    /// [`Trainer::set_parameters`].
    pub best_parameters: Option<Vec<NamedTensor>>,
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

/// Parameters that were kept at a step, if that is the best one still: after the loss of a device,
/// a call may have gone back behind it.
fn of_step(kept: Option<(u64, Vec<NamedTensor>)>, best: Option<Best>) -> Option<Vec<NamedTensor>> {
    let (step, tensors) = kept?;
    if best?.step == step { Some(tensors) } else { None }
}

impl Trainer {
    /// Trains on a data set: each step draws its samples by the trainer's seed, its number and the
    /// samples consumed before it, without replacement in each epoch. If the graph carries states
    /// from step to step, each slot of the batch reads a part of the data in order, and its states
    /// are zeros at the start and after a change of the data. Two calls, also with a save between
    /// them, have the same bits as one call, and as `potluck train` with the same graph, data,
    /// seed, batch and devices.
    ///
    /// With `TrainerOptions::on_loss` set to [`DeviceLoss::Continue`], the loss of one of several
    /// devices is a warning, and training continues as after [`Trainer::recover`].
    ///
    /// # Errors
    /// Returns `TrainError` if the data do not fit the graph, if the options do not fit each other
    /// or the data, if too many steps in a row are not finite, if the directory cannot be written
    /// or another process writes there, or if a device fails.
    pub fn fit(
        &mut self,
        data: &Arc<dyn Dataset>,
        options: &FitOptions,
    ) -> Result<FitReport, TrainError> {
        self.fit_with(data, options, &mut |_| ControlFlow::Continue(()))
    }

    /// Trains like [`Trainer::fit`]; `watch` receives each event, and ends the call after the
    /// current step if it returns [`ControlFlow::Break`].
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
        self.best_parameters = None;
        options.check(data)?;
        let source = self.source_of(data, options)?;
        let last = match options.length {
            FitLength::Steps(last) => last,
            FitLength::Epochs(epochs) => {
                let epoch = EpochSize { units: source.sampler.epoch_samples(), per_sample: 1 };
                epoch.last_step(epochs, self.steps(), self.samples, self.options.batch as u64)
            }
        };
        let mut store = None;
        if let Some(path) = &options.directory {
            store = Some(self.open_store(path)?);
        }
        // After the last refusal, so that a refused call leaves the trainer as it was.
        self.begin_on(&source, options);
        let loader = self.loader(&source, last)?;
        let mut fit = Fit::new(options.clone(), source, loader, last);
        let mut hooks = CallHooks { watch, store };
        let end = self.run_fit(&mut fit, &mut hooks);
        let shown = fit.emit(&mut hooks, Event::Ended);
        self.best_parameters = of_step(fit.best_parameters, self.best);
        let end = end?;
        shown?;
        Ok(FitReport {
            end,
            steps: self.steps(),
            loss: fit.loss,
            val_loss: fit.evaluated.map(|(_, loss)| loss),
            best: self.best,
            best_parameters: self.best_parameters.take(),
        })
    }

    /// Returns the parameters of the best evaluation in the last call of [`Trainer::fit`], if that
    /// had `FitOptions::keep_best` and ended with an error after it, also behind a
    /// [`Trainer::recover`]; those of other calls are in their [`FitReport`].
    pub fn take_best_parameters(&mut self) -> Option<Vec<NamedTensor>> {
        self.best_parameters.take()
    }

    fn source_of(
        &self,
        data: &Arc<dyn Dataset>,
        options: &FitOptions,
    ) -> Result<BatchSource, TrainError> {
        let steps = self.steps();
        let mut source = source(self.graph(), data.clone(), &self.options, steps, self.samples)?;
        let seed = self.options.seed;
        source.augmentation = options.augmentation.clone().map(|changes| (changes, seed));
        Ok(source)
    }

    /// Records the data of this call. Discards the best evaluation if it was on other data or of
    /// another number of samples, and carried states of other data.
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

    /// Runs the steps, and continues after the loss of a device if the options request it.
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
                        "continuing from step {step} on {}, without the failed device: {error}",
                        self.options.devices
                    );
                    fit.warn(hooks, text)?;
                }
                Err(why) => {
                    fit.warn(hooks, format!("automatic recovery failed: {why}"))?;
                    return Err(error);
                }
            }
        }
    }

    /// Copies the initial state to memory if a recovery may need it and there is no other copy.
    fn keep_start(&mut self) -> Result<(), TrainError> {
        self.take_snapshot_if_due()?;
        let is_kept = self.saved.is_some() || self.snapshot.is_some();
        if self.options.on_loss == DeviceLoss::Continue && self.world() > 1 && !is_kept {
            self.snapshot = Some(Arc::new(self.checkpoint()?));
        }
        Ok(())
    }
}
