//! Training run: start or resume, steps, evaluation, checkpoints.

mod evaluation;
mod host;
mod measure;
mod outcome;
mod recovery;
mod report;
mod restoring;
mod saving;
mod skipped;
mod starting;
mod startup;
mod stopping;

use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::checkpoint::{Checkpoint, Store};
use crate::error::TrainError;
use crate::evaluate::extent_of;
use crate::hugging_face::ModelFiles;
use crate::nodes::RunNodes;
use crate::run_data::{RunData, SavedData};
use crate::runtime::memory;
use crate::signals::SignalFlags;
use crate::spec::RunSpec;
use crate::state::{self, StateTensors};
use crate::task::{EvalContext, Task};
use crate::trainer::steps::Fit;
use crate::trainer::{FitEnd, Trainer};
use crate::{carried, loader};
use potluck_core::faults::Faults;
use potluck_core::metrics::{Event, Sink, Sinks};
use potluck_core::{DType, files};
use potluck_data::{DataFile, Split};
use potluck_parallel::planner::plans::Plans;

use host::RunHost;
pub use outcome::RunOutcome;
pub use saving::OWN_FILES;
pub use starting::StartingModel;
pub use startup::event_of_tuning;

/// Options of a run that are not in its specification.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The run's directory.
    pub out: PathBuf,
    /// Newest step of the run in `out` at the time when the checkpoint to resume was loaded, if the
    /// run continues there; `None` for a new run.
    pub continued: Option<u64>,
    /// Keys whose values differ from the resumed checkpoint, with their values in TOML: a command
    /// that continues the run before its next checkpoint sets them again.
    pub unsaved: Vec<(&'static str, String)>,
    /// File for the trace, if any.
    pub trace: Option<PathBuf>,
    /// True to time the kernels again, ignoring recorded timings.
    pub retune: bool,
    /// Faults to inject, for tests.
    pub faults: Faults,
    /// Other participating nodes.
    pub nodes: Option<Arc<RunNodes>>,
    pub signals: RunSignals,
    /// Model whose parameters a new run starts from, instead of random ones.
    pub init: Option<StartingModel>,
    /// Number of tokens of that model, if further tokens are added.
    pub add_tokens: Option<usize>,
    /// Files of the model kept by a run in a new directory, unless it has another tokenizer.
    pub files: ModelFiles,
}

/// Signals to a run, from this process and other nodes, caught by the caller.
#[derive(Clone, Debug, Default)]
pub struct RunSignals {
    pub flags: SignalFlags,
    /// Set once the run saves its state when a signal to end arrives. Before, the run ignores
    /// signals, and has nothing to save.
    pub has_begun: Arc<AtomicBool>,
}

/// Running training: a trainer, its steps, and the directory, record and signals around them.
pub struct Run {
    spec: RunSpec,
    data: RunData,
    trainer: Trainer,
    fit: Fit,
    host: RunHost,
    /// True if the step from which the run resumes was the best one, and was not saved as such.
    repeats_evaluation: bool,
}

/// Runs until the configured number of steps or a signal.
///
/// # Errors
/// Returns the `TrainError` that ends the run early: `TrainError::Stopped` with the command that
/// continues the run, if it can be continued.
pub fn train(run: &mut Run) -> Result<RunOutcome, TrainError> {
    let mut ended = steps(run);
    // Each recovery removes a device, so the loop ends.
    while let Err(error) = ended {
        ended = match run.recover(error) {
            Ok(checkpoint) => run.go_on(checkpoint),
            Err(error) => {
                ended = Err(error);
                break;
            }
        };
    }
    let shown = run.emit(Event::Ended);
    // Written even after an error, since the end of the trace of a failed run is of interest.
    let traced = run.finish_trace();
    let ending = ended.map_err(|error| run.stopped(error))?;
    shown?;
    traced?;
    Ok(ending)
}

/// Runs the remaining steps, and measures the model as defined by its task.
fn steps(run: &mut Run) -> Result<RunOutcome, TrainError> {
    run.evaluate_dropped()?;
    let end = run.trainer.run_steps(&mut run.fit, &mut run.host)?;
    if end == FitEnd::NoImprovement {
        run.tell_lost_patience()?;
    }
    run.tell_share_changes()?;
    let measure = run.measure()?;
    if let Some(signal) = run.fit.signals.pending() {
        return Ok(RunOutcome::Interrupted(signal));
    }
    let val_loss = match run.fit.evaluated {
        Some((step, loss)) if step == run.step() => Some(loss),
        _ => None,
    };
    Ok(RunOutcome::Done { val_loss, measure })
}

impl Run {
    /// Opens the devices and the run's directory, and starts from new parameters or from `resumed`.
    /// Events go to the record `metrics.jsonl` and to `sink`.
    ///
    /// # Errors
    /// Returns `TrainError` if the data, the checkpoint, the devices or the directory do not fit
    /// the specification, or if a device or a sink fails.
    pub fn start(
        spec: RunSpec,
        options: RunOptions,
        resumed: Option<Checkpoint>,
        sink: Box<dyn Sink>,
    ) -> Result<Self, TrainError> {
        let mut sinks = Sinks::from(sink);
        let saved = match (&resumed, &options.init) {
            (Some(checkpoint), _) => SavedData::of(&checkpoint.meta),
            (None, Some(model)) => spec.known_data(model.saved()),
            (None, None) => SavedData::default(),
        };
        let data = spec.load_data(&saved)?;
        let training = spec.training_graph(&data.shape)?;
        let (steps, samples) = match &resumed {
            Some(checkpoint) => (checkpoint.meta.step, checkpoint.meta.samples),
            None => (0, 0),
        };
        let source = spec.batch_source(training.whole(), &data, steps, samples)?;
        // Before anything is opened: the files may belong to another model.
        let initial = match &options.init {
            Some(model) if resumed.is_none() => {
                Some(model.parameters(training.whole(), &*spec.model, options.add_tokens)?)
            }
            _ => None,
        };
        let task = data.task(training.whole())?;
        let epoch = spec.epoch(&source.sampler, task.unit());
        let spec = spec.with_epochs(epoch, steps, samples)?;
        if spec.patience > 0
            && extent_of(&source, Split::Validation, spec.eval_samples).samples == 0
        {
            return Err(TrainError::InvalidRequest(format!(
                "train.patience = {} counts evaluations, and the data hold no sample out to \
                 evaluate on; set data.held_out above 0, or leave it out",
                spec.patience
            )));
        }
        let plans = Plans::new(training);
        if let Some(nodes) = &options.nodes {
            nodes.begin(&spec, &data, (steps, samples))?;
        }
        check(&spec, &plans, source.data.row_bytes(), resumed.as_ref())?;
        require_room(&spec, &plans, &options, steps)?;
        Store::open_to_read(&options.out).wait_until_free()?;
        // Devices are opened first: if that fails, nothing is written.
        let opened = startup::open(&spec, &options, resumed.as_ref(), &plans, &source, &mut sinks);
        let mut trainer = match opened {
            Ok(trainer) => trainer,
            Err(error) => {
                return Err(stopping::at_start(error, &spec, &options, resumed.as_ref()));
            }
        };
        let loader = trainer.loader(&source, spec.steps)?;
        let store = startup::open_store(&options)?;
        let tokenizer = data.saved().tokenizer;
        if let Some(model) = &options.init
            && resumed.is_none()
            && let Some(warning) = model.other_characters(tokenizer.as_ref(), &*spec.model)
        {
            sinks.event(&Event::Warning(warning))?;
        }
        let is_of_model = match &options.init {
            // A tokenizer with more tokens counts as the model's own.
            Some(_) if options.add_tokens.is_some() => true,
            Some(model) if resumed.is_none() => model.has_tokenizer(tokenizer.as_ref())?,
            _ => true,
        };
        if options.continued.is_none() {
            let files = if is_of_model { options.files.clone() } else { ModelFiles::default() };
            files.keep(&options.out)?;
        }
        sinks.event(&Event::Started {
            done: trainer.steps(),
            steps: spec.steps,
            device: trainer.device().to_string(),
        })?;
        // Earlier there was nothing to save.
        let _ = options.signals.flags.take_save_request();
        options.signals.has_begun.store(true, Ordering::SeqCst);
        trainer.data = source.data.fingerprint();
        trainer.description = data.saved().description;
        trainer.files = DataFile::recorded(source.data.files());
        trainer.of_run = spec.saved_run(&data);
        let nodes = options.nodes.as_ref().map_or(1, |nodes| nodes.count());
        let fit_options = spec.fit_options(task, &options.out, nodes);
        let mut fit = Fit::new(fit_options, source, loader, spec.steps);
        fit.signals = options.signals.flags.clone();
        let host = RunHost { options, store, sinks, began: String::new() };
        let mut run = Self { spec, data, trainer, fit, host, repeats_evaluation: false };
        run.tell_notes()?;
        match run.begin(resumed, initial) {
            Ok(()) => Ok(run),
            Err(error) => Err(run.stopped(error)),
        }
    }

    /// Compares the parameters of all devices. If they differ, makes them equal with a warning, or
    /// ends the run, as configured by faults.on_mismatch.
    fn compare_parameters(&mut self) -> Result<(), TrainError> {
        let compared = self.trainer.compare_parameters();
        for text in mem::take(&mut self.trainer.notes) {
            self.warn(text)?;
        }
        compared
    }

    /// Emits the trainer's notes about its devices and its state.
    fn tell_notes(&mut self) -> Result<(), TrainError> {
        for text in mem::take(&mut self.trainer.notes) {
            self.note(text)?;
        }
        Ok(())
    }

    fn emit(&mut self, event: Event) -> Result<(), TrainError> {
        Ok(self.host.sinks.event(&event)?)
    }

    fn note(&mut self, text: String) -> Result<(), TrainError> {
        self.host.note(text)
    }

    fn warn(&mut self, text: String) -> Result<(), TrainError> {
        self.host.warn(text)
    }

    fn finish_trace(&self) -> Result<(), TrainError> {
        if let Some(nodes) = &self.host.options.nodes {
            nodes.flush_traces();
        }
        if let Some(trace) = &self.trainer.trace {
            trace.finish()?;
        }
        Ok(())
    }

    fn step(&self) -> u64 {
        self.trainer.steps()
    }

    /// Generates `train.sample_tokens` tokens of text, if the model generates text.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    pub fn sample(&mut self) -> Result<String, TrainError> {
        let tokens = self.spec.sample_tokens;
        self.at_end(|task, ending| task.sample(ending, tokens))
    }

    /// Calls a function with the run's task and the context for the end of a run.
    fn at_end<R>(
        &mut self,
        function: impl FnOnce(&dyn Task, &EvalContext) -> Result<R, TrainError>,
    ) -> Result<R, TrainError> {
        let told = self.trainer.notes.len();
        let held = self.trainer.hold_evaluated();
        self.trainer.warn_of_notes(told, &mut self.fit, &mut self.host)?;
        held?;
        let units = self.trainer.session.placement.units();
        let rows: Vec<u32> = units.map(|rank| rank.micro_batch.min(rank.share)).collect();
        let ending = EvalContext {
            units: self.trainer.session.units(),
            rows: &rows,
            step: self.step(),
            seed: self.spec.seed,
            stop: &|| self.fit.signals.pending().is_some(),
        };
        function(&*self.fit.options.task, &ending)
    }
}

/// Checks that the disk has room for the checkpoints of the first steps: two for a new run, one
/// more for a continued one. The disk may fill up later, but must not be full from the start.
///
/// # Errors
/// Returns `TrainError::DiskFull` if there is too little room.
fn require_room(
    spec: &RunSpec,
    plans: &Plans,
    options: &RunOptions,
    done: u64,
) -> Result<(), TrainError> {
    if options.continued.is_some() && spec.steps <= done {
        return Ok(());
    }
    let parameters = plans.of_rows(1).graph.parameter_count() as u64;
    let copies = 1 + spec.optimizer.moments() as u64 + u64::from(spec.ema > 0.0);
    let checkpoint = parameters * copies * DType::F32.bytes() as u64;
    let count = if options.continued.is_some() || spec.steps == 0 { 1 } else { 2 };
    let needed = checkpoint.saturating_mul(count);
    // Systems that do not report their free space are not checked.
    let Some(free) = files::free_space(&options.out) else { return Ok(()) };
    // A path that can never be written has its own error, since freeing space does not help. Some
    // such file systems report no free space.
    if free >= needed || !files::may_create(&options.out) {
        return Ok(());
    }
    Err(TrainError::DiskFull { path: options.out.clone(), count, needed, free })
}

/// Checks, before the run's directory is touched, that a checkpoint fits the model and that the run
/// fits the host's memory.
fn check(
    spec: &RunSpec,
    plans: &Plans,
    row_bytes: usize,
    resumed: Option<&Checkpoint>,
) -> Result<(), TrainError> {
    let plan = plans.of_rows(spec.micro_batch);
    let batch = spec.batch as usize;
    let rows = spec.micro_batch as usize;
    if let Some(checkpoint) = resumed {
        state::check(&plan, StateTensors::of(checkpoint), spec.optimizer.moments())?;
    }
    let loaded = loader::bytes(batch, row_bytes).saturating_add(carried::bytes(&plan.graph, batch));
    Ok(memory::require(memory::run_bytes(&plan, batch, rows, loaded))?)
}
