//! Training API for Rust code: any graph, one or several devices, batches provided by the caller.

#[cfg(test)]
mod average_tests;
#[cfg(test)]
mod failure_tests;
pub(crate) mod fit;
mod fit_end;
mod fit_options;
#[cfg(test)]
mod fit_tests;
#[cfg(test)]
mod gradient_tests;
#[cfg(test)]
mod group_tests;
#[cfg(test)]
mod loss_scale_tests;
pub(super) mod opening;
mod options;
mod parameters;
pub(super) mod recovery;
mod saving;
#[cfg(test)]
mod shared_input_tests;
#[cfg(test)]
mod state_tests;
pub(super) mod steps;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

pub use fit::FitReport;
pub use fit_end::FitEnd;
pub use fit_options::{FitLength, FitOptions};
pub use options::TrainerOptions;

use super::error::TrainError;
use super::given_inputs::GivenInputs;
use super::session::Session;
use crate::checkpoint::{Best, Checkpoint, NamedTensor};
use crate::runtime::step::{Inputs, StepInput, StepReport};
use fit_options::check_rate;
use opening::{OpenedSession, open_on};
use potluck_core::HostTensor;
use potluck_core::metrics::{RunCost, Trace};
use potluck_core::setting::as_fields;
use potluck_data::{DataDescription, DataFile, Dataset, Tokenizer};
use potluck_graph::{Graph, ModelGraph};
use potluck_parallel::{MismatchAction, Outcome, Placement};

/// Report of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Mean loss over the targets that count, before the update; NaN if none counts.
    pub loss: f64,
    /// Means of the terms of a loss of several terms, by name and without their weights.
    pub terms: Vec<(String, f64)>,
    /// Norm of the gradient of the mean loss, before clipping; NaN if no target counts.
    pub gradient_norm: f64,
    /// True if parameters were updated; false if a value was not finite, or if no target counts.
    pub updated: bool,
    /// Fraction of the step (from the end of the previous step's gradients to the end of this
    /// one's) in which the device was busy, by its own clock; `None` without one.
    pub busy: Option<f64>,
}

/// Trainer of one graph. Its errors are [`TrainError::Library`], worded for these options;
/// [`TrainError::cause`] is the error itself.
///
/// After the failure of one of several devices no step is possible. [`Trainer::parameters`] still
/// returns the parameters of the last completed step, from the devices that are left, and
/// [`Trainer::recover`] continues on those devices from the last saved state.
pub struct Trainer {
    pub(super) session: Session,
    /// Graph that is trained; each rank runs its own part.
    pub(super) model: ModelGraph,
    pub(super) options: TrainerOptions,
    pub(super) notes: Vec<String>,
    pub(super) trace: Option<Trace>,
    /// Samples that all steps so far have consumed.
    samples: u64,
    /// Best evaluation so far, and the fingerprint of its data.
    pub(super) best: Option<Best>,
    /// Parameters of the best evaluation in a call of [`Trainer::fit`] that ended with an error.
    best_parameters: Option<Vec<NamedTensor>>,
    /// Evaluations since the best one, including earlier calls and those before a save.
    pub(super) evaluations_since_best: u64,
    pub(super) data: String,
    /// Description and files of the data, for saves.
    pub(super) description: Option<DataDescription>,
    pub(super) files: Vec<DataFile>,
    /// Values of a run of the program, for saves.
    pub(super) of_run: SavedRun,
    failed: Option<usize>,
    /// Last state in host memory, and the step and directory of the last save.
    snapshot: Option<Arc<Checkpoint>>,
    pub(super) saved: Option<(u64, PathBuf)>,
}

/// Values of a run of the program, for saves; empty for a trainer of the library, whose model and
/// options are code.
#[derive(Clone, Debug, Default)]
pub(super) struct SavedRun {
    /// Configuration of the model, as TOML.
    pub model: String,
    /// Complete configuration, as TOML.
    pub config: String,
    /// Names of the keys that the user has set.
    pub typed: Vec<String>,
    pub tokenizer: Option<Tokenizer>,
    /// Fields of a resumed checkpoint that are unknown to this version.
    pub unknown: BTreeMap<String, serde_json::Value>,
}

impl Trainer {
    /// Plans the training of a forward graph with a loss, opens the devices and initialises the
    /// parameters. If shares are measured, devices are timed on zeros.
    ///
    /// # Errors
    /// Returns `TrainError` if the graph has no loss, if an option is out of its range, if no
    /// device matches, if there are fewer samples than shares, or if the plan does not fit a
    /// device.
    pub fn new(forward: Graph, options: &TrainerOptions) -> Result<Self, TrainError> {
        Self::start(forward, options, None).map_err(TrainError::of_library)
    }

    /// Creates a trainer like [`Trainer::new`], whose devices are timed on samples of a data set.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::new`], and `TrainError` if the data do not fit the graph.
    pub fn on_data(
        forward: Graph,
        options: &TrainerOptions,
        data: &Arc<dyn Dataset>,
    ) -> Result<Self, TrainError> {
        Self::start(forward, options, Some(data)).map_err(TrainError::of_library)
    }

    fn start(
        forward: Graph,
        options: &TrainerOptions,
        data: Option<&Arc<dyn Dataset>>,
    ) -> Result<Self, TrainError> {
        options.check(&forward)?;
        let model = options.training_graph(forward)?;
        let opened = open_on(model.clone(), options, None, data)?;
        let mut trainer = Self::of(opened, model, options.clone());
        trainer.session.initialize()?;
        Ok(trainer)
    }

    pub(super) fn of(
        OpenedSession { session, notes, trace }: OpenedSession,
        model: ModelGraph,
        options: TrainerOptions,
    ) -> Self {
        Self {
            model,
            session,
            options,
            notes,
            trace,
            samples: 0,
            best: None,
            best_parameters: None,
            evaluations_since_best: 0,
            data: String::new(),
            description: None,
            files: Vec::new(),
            of_run: SavedRun::default(),
            failed: None,
            snapshot: None,
            saved: None,
        }
    }

    pub(super) fn graph(&self) -> &Graph {
        self.model.whole()
    }

    /// Returns the name of the first device.
    pub fn device(&self) -> &str {
        &self.placement().ranks[0].name
    }

    /// Returns sentences for the user about the devices: for example, which were left out and why.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the number of devices.
    pub fn world(&self) -> usize {
        self.placement().ranks.len()
    }

    /// Returns the decisions about the devices: shares, kernels, and places of addition.
    pub fn placement(&self) -> &Placement {
        &self.session.placement
    }

    /// Returns the current options: after the loss of a device they name the devices that are left.
    pub fn options(&self) -> &TrainerOptions {
        &self.options
    }

    /// Returns the description of the training data, including data before a loaded save: how
    /// samples are prepared, and the names of predicted values. `None` before the first
    /// [`Trainer::fit`], and for data without a description.
    pub fn description(&self) -> Option<&DataDescription> {
        self.description.as_ref()
    }

    /// Returns the number of steps taken, including those before a loaded save.
    pub fn steps(&self) -> u64 {
        self.session.taken.steps
    }

    /// Returns the cost of the steps on several devices since they were opened, or since their
    /// shares or the counted unit ([`Trainer::step`] counts samples) last changed: how long they
    /// compute and wait, compared with the timings before the first step, and a sentence on the
    /// change that would help the most. `None` for one device, and before 6 such steps.
    pub fn cost(&self) -> Option<RunCost> {
        as_fields(|| self.session.cost())
    }

    /// Completes the file of the trace; later steps are not in it. Dropping a trainer also
    /// completes it, but ignores errors.
    ///
    /// # Errors
    /// Returns `TrainError` if the file could not be written.
    pub fn finish_trace(&self) -> Result<(), TrainError> {
        let Some(trace) = &self.trace else { return Ok(()) };
        trace.finish().map_err(|error| TrainError::from(error).of_library())
    }

    /// Sets carried states to zeros: the next batch begins new sequences.
    pub fn reset_states(&mut self) {
        self.session.reset_states();
    }

    /// Runs one step at this learning rate on a whole batch: the values of every input of the graph
    /// by name, except `samples`, which numbers the batch, and states carried from step to step
    /// ([`Builder::carry`](potluck_graph::Builder::carry)).
    ///
    /// # Errors
    /// Returns `TrainError` if an input is missing, unknown, or has another type or length, if the
    /// learning rate is negative or not finite, if an id is not a row of its table, if a target is
    /// neither a class nor [`IGNORE_INDEX`](potluck_graph::IGNORE_INDEX), if a device fails, or if
    /// parameters differ between devices.
    pub fn step(&mut self, batch: &[(&str, HostTensor)], lr: f64) -> Result<Step, TrainError> {
        self.noting_failure(check_rate(lr))?;
        self.session.take_given_shares();
        let started = Instant::now();
        let reports = self.cut_batch(batch).and_then(|ranks| self.advance(ranks, lr));
        let mut reports = self.noting_failure(reports)?;
        let seconds = started.elapsed().as_secs_f64();
        self.session.measure_samples(self.options.batch as u64, seconds, &reports);
        let report = reports.swap_remove(0);
        let totals = report.verdict.totals();
        Ok(Step {
            loss: totals.loss,
            terms: self.session.named_terms(&totals.terms),
            gradient_norm: totals.gradient_norm,
            updated: report.outcome == Outcome::Updated,
            busy: if self.world() == 1 { report.busy } else { None },
        })
    }

    /// Computes the gradient of the mean loss of a whole batch, given as for [`Trainer::step`],
    /// with respect to every trained parameter, before clipping: PyTorch's `p.grad` after
    /// `loss.backward()`. Dropout draws the random numbers of the next step. The state is
    /// unchanged, and so is the next step.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::step`], and an error if no target of the batch counts.
    pub fn gradients(
        &mut self,
        batch: &[(&str, HostTensor)],
    ) -> Result<Vec<NamedTensor>, TrainError> {
        self.session.take_given_shares();
        let gradients = self.cut_batch(batch).and_then(|ranks| self.session.gradients(ranks));
        self.noting_failure(gradients)
    }

    fn advance(&mut self, ranks: Vec<Vec<Inputs>>, lr: f64) -> Result<Vec<StepReport>, TrainError> {
        self.take_snapshot_if_due()?;
        let inputs = self.session.inputs(ranks, lr);
        let reports = self.take_step(&inputs)?;
        if self.is_due(self.options.hash_every) {
            self.compare_parameters()?;
        }
        Ok(reports)
    }

    fn take_step(&mut self, inputs: &[Arc<StepInput>]) -> Result<Vec<StepReport>, TrainError> {
        let reports = self.session.step(inputs)?;
        self.samples += self.options.batch as u64;
        Ok(reports)
    }

    /// Compares the parameters of all devices; repairs them with a note, if configured.
    pub(super) fn compare_parameters(&mut self) -> Result<(), TrainError> {
        let repair = self.options.on_mismatch == MismatchAction::Repair;
        let notes = &mut self.notes;
        self.session.require_equal(repair, &mut |text| {
            notes.push(text);
            Ok(())
        })
    }

    /// Converts a result for the user: records which device failed, if any, and words its error for
    /// the library.
    pub(super) fn noting_failure<T>(
        &mut self,
        result: Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        result.map_err(|error| self.note_failure(error))
    }

    fn note_failure(&mut self, error: TrainError) -> TrainError {
        self.failed = self.failed_position(&error).or(self.failed);
        error.of_library()
    }

    /// Index of the device that failed, if the error is the failure of one of several devices.
    fn failed_position(&self, error: &TrainError) -> Option<usize> {
        let rank = self.placement().ranks.get(error.failed_rank()?.index())?;
        Some(rank.position)
    }

    /// Cuts the values of a batch into the inputs of each rank's micro-batches.
    fn cut_batch(&self, batch: &[(&str, HostTensor)]) -> Result<Vec<Vec<Inputs>>, TrainError> {
        let given = GivenInputs::new(self.graph(), batch, self.options.batch)?;
        let mut ranks = Vec::with_capacity(self.session.programs.len());
        for program in &self.session.programs {
            let mut inputs = Vec::with_capacity(program.micro_batches.len());
            for part in &program.micro_batches {
                inputs.push(given.cut(part)?);
            }
            ranks.push(inputs);
        }
        Ok(ranks)
    }
}
