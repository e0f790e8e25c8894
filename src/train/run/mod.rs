//! Training run: start or resume, steps, evaluation, checkpoints.

mod evaluation;
mod recovery;
mod report;
mod restoring;
mod saving;
mod sentences;
mod skipped;
mod startup;
mod stopping;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::base::Rank;
use crate::checkpoint::{Best, Checkpoint, Store};
use crate::data::DataFile;
use crate::faults::{Faults, Point};
use crate::metrics::{Event, SentenceRecord, Sink, Sinks, Trace};
use crate::runtime::memory;
use crate::runtime::placement::plans::Plans;
use crate::runtime::step::{StepInput, StepReport};
use crate::train::carried;
use crate::train::error::TrainError;
use crate::train::loader::{self, BatchSource, Loader};
use crate::train::nodes::RunNodes;
use crate::train::run_data::{RunData, SavedData};
use crate::train::session::{Session, StepTiming};
use crate::train::signals::{Interruption, Signals};
use crate::train::spec::RunSpec;
use crate::train::state;
use crate::train::task::{Ending, Task};

use skipped::SkippedSteps;
use startup::OpenedRun;

/// Options of a run besides its specification.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The run's directory.
    pub out: PathBuf,
    /// Newest step of the run in `out` when the checkpoint to resume was loaded, if the run goes on
    /// there; `None` for a new run.
    pub continued: Option<u64>,
    /// Keys that the resumed checkpoint has otherwise, with their values in TOML: a command that
    /// continues the run before its next checkpoint sets them again.
    pub unsaved: Vec<(&'static str, String)>,
    /// File of the trace, if one is to be written.
    pub trace: Option<PathBuf>,
    /// True to time the kernels again, ignoring recorded timings.
    pub retune: bool,
    /// Faults to inject, for tests.
    pub faults: Faults,
    /// Other nodes that take part.
    pub nodes: Option<Arc<RunNodes>>,
}

/// Result of a run that ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum RunOutcome {
    /// All steps are done.
    Done {
        /// Last loss on the validation split, if there is one.
        val_loss: Option<f64>,
        /// Measure of the sentences, if the run is on the built-in corpus.
        sentences: Option<SentenceRecord>,
    },
    /// A signal arrived; the state is saved.
    Interrupted(Interruption),
}

/// State of a run in progress.
pub struct Run {
    spec: RunSpec,
    options: RunOptions,
    store: Store,
    /// The record on disk first, then what the caller gave.
    sinks: Sinks,
    signals: Signals,
    session: Session,
    data: RunData,
    task: Arc<dyn Task>,
    source: BatchSource,
    loader: Loader,
    trace: Option<Trace>,
    /// Hash of all the data, computed once.
    fingerprint: String,
    /// Files of the data.
    files: Vec<DataFile>,
    skipped: SkippedSteps,
    best: Option<Best>,
    /// Step and loss of the last evaluation; `saved` is the last step saved.
    evaluated: Option<(u64, f64)>,
    saved: Option<u64>,
    /// Step of this start whose checkpoint was in the directory before.
    found: Option<u64>,
    /// Fields of the resumed checkpoint that this version does not know.
    unknown: BTreeMap<String, serde_json::Value>,
}

/// Runs until the configured number of steps or a signal.
///
/// # Errors
/// Returns the `TrainError` that ends the run early: `TrainError::Stopped` with the command that
/// continues the run if it can be continued.
pub fn train(run: &mut Run) -> Result<RunOutcome, TrainError> {
    let mut ended = steps(run);
    // Each recovery leaves a device out.
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
    // Written also after an error: the trace of a failed run is read for its end.
    let traced = run.finish_trace();
    let ending = ended.map_err(|error| run.stopped(error))?;
    shown.and(traced).map(|()| ending)
}

/// Complete training loop.
fn steps(run: &mut Run) -> Result<RunOutcome, TrainError> {
    run.evaluate_dropped()?;
    while run.step() < run.spec.steps && run.signals.pending().is_none() {
        let started = Instant::now();
        let inputs = run.next_step()?;
        let reports = run.session.step(&inputs)?;
        run.record(&inputs, &reports, started)?;
        if run.due(run.spec.every.replica_check) {
            run.compare_parameters()?;
        }
        if run.due(run.spec.every.evaluation) {
            run.evaluate()?;
        }
        if run.due(run.spec.every.checkpoint) {
            run.save_or_warn()?;
        }
    }
    // A signal drops it.
    let val_loss = run.evaluate()?;
    run.save()?;
    let sentences = run.measure_sentences()?;
    Ok(match run.signals.pending() {
        Some(signal) => RunOutcome::Interrupted(signal),
        None => RunOutcome::Done { val_loss, sentences },
    })
}

impl Run {
    /// Opens the devices and the run's directory, and starts from new parameters or from
    /// `resumed`. Events go to the record `metrics.jsonl` and to `sink`.
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
        let saved = resumed.as_ref().map(|checkpoint| SavedData::of(&checkpoint.meta));
        let data = spec.load_data(&saved.unwrap_or_default())?;
        let (training, _) = spec.training_graph(&data.shape)?;
        let done = resumed.as_ref().map_or((0, 0), |c| (c.meta.step, c.meta.samples));
        let source = spec.batch_source(&training, &data, done)?;
        let task = data.task(&training)?;
        let plans = Plans::new(training);
        options.nodes.as_ref().map_or(Ok(()), |nodes| nodes.begin(&spec, &data, done))?;
        check(&spec, (&plans, source.data.row_bytes()), resumed.as_ref())?;
        Store::open_to_read(&options.out).wait_until_free()?;
        // Devices are opened first: if that fails, nothing is written.
        let opened = startup::open(&spec, &options, resumed.as_ref(), (&plans, source), &mut sinks);
        let OpenedRun { session, source, loader, notes, trace } =
            opened.map_err(|error| stopping::at_start(error, &spec, &options, resumed.as_ref()))?;
        let store = startup::open_store(&options)?;
        let (done, device) = (session.taken.steps, session.group.name(Rank(0)).to_string());
        sinks.event(&Event::Started { done, steps: spec.steps, device })?;
        let signals = Signals::caught()?;
        let signals = match &options.nodes {
            Some(nodes) => {
                nodes.begun();
                signals.with(nodes.signals())
            }
            None => signals,
        };
        let mut run = Self {
            signals,
            session,
            trace,
            fingerprint: source.data.fingerprint(),
            files: DataFile::recorded(source.data.files()),
            skipped: SkippedSteps::default(),
            best: None,
            evaluated: None,
            saved: None,
            found: None,
            unknown: BTreeMap::new(),
            spec,
            options,
            store,
            sinks,
            data,
            task,
            source,
            loader,
        };
        notes.into_iter().try_for_each(|note| run.note(note))?;
        match run.begin(resumed) {
            Ok(()) => Ok(run),
            Err(error) => Err(run.stopped(error)),
        }
    }

    /// Returns each rank's input for the next step.
    fn next_step(&mut self) -> Result<Vec<Arc<StepInput>>, TrainError> {
        let ended = || TrainError::Defect("the loader ended before the last step".into());
        let ranks = self.loader.next_step().ok_or_else(ended)??;
        self.session.reset_states_at_beginnings(&self.source.sampler);
        Ok(self.session.inputs(ranks, self.spec.schedule.lr(self.step() + 1)))
    }

    fn record(
        &mut self,
        inputs: &[Arc<StepInput>],
        reports: &[StepReport],
        started: Instant,
    ) -> Result<(), TrainError> {
        let (step, batch) = (self.step(), u64::from(self.spec.batch));
        let (lr, unit) = (self.spec.schedule.lr(step), self.task.unit());
        let record = self.session.step_record(reports, &StepTiming { lr, unit, batch, started });
        let skipped = record.skipped.clone();
        self.options
            .faults
            .at_write(Point::Metrics, step)
            .map_err(|why| io(&self.options.out, why))?;
        self.emit(Event::Step(record))?;
        match skipped {
            None => {
                self.skipped.count = 0;
                Ok(())
            }
            Some(reason) => self.handle_skipped(inputs, reason),
        }
    }

    /// Compares the parameters of all devices, and makes them equal again or ends the run, as
    /// faults.on_mismatch requires.
    fn compare_parameters(&mut self) -> Result<(), TrainError> {
        let (session, sinks) = (&self.session, &mut self.sinks);
        session.require_equal(self.spec.repairs_replicas, &mut |text| {
            Ok(sinks.event(&Event::Warning(text))?)
        })
    }

    fn emit(&mut self, event: Event) -> Result<(), TrainError> {
        Ok(self.sinks.event(&event)?)
    }

    fn note(&mut self, text: String) -> Result<(), TrainError> {
        self.emit(Event::Note(text))
    }

    fn warn(&mut self, text: String) -> Result<(), TrainError> {
        self.emit(Event::Warning(text))
    }

    fn finish_trace(&self) -> Result<(), TrainError> {
        if let Some(nodes) = &self.options.nodes {
            nodes.flush_traces();
        }
        self.trace.as_ref().map_or(Ok(()), |trace| Ok(trace.finish()?))
    }

    fn due(&self, every: u64) -> bool {
        every > 0 && self.step().is_multiple_of(every)
    }

    /// Returns the number of steps done.
    fn step(&self) -> u64 {
        self.session.taken.steps
    }

    /// Generates `train.sample_tokens` tokens of text, if the model is one of text.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    pub fn sample(&self) -> Result<String, TrainError> {
        self.at_end(|ending| self.task.sample(ending, self.spec.sample_tokens))
    }

    /// Calls a function with what a task needs at the end of a run.
    fn at_end<R>(&self, function: impl FnOnce(&Ending) -> R) -> R {
        let units = self.session.placement.units();
        let rows: Vec<u32> = units.map(|rank| rank.micro_batch.min(rank.share)).collect();
        function(&Ending {
            units: self.session.units(),
            rows: &rows,
            step: self.step(),
            seed: self.spec.seed,
            stop: &|| self.signals.pending().is_some(),
        })
    }
}

/// Checks, before anything in the run's directory is touched, that a checkpoint fits the model
/// and that the run fits the host's memory.
fn check(
    spec: &RunSpec,
    (plans, row_bytes): (&Plans, usize),
    resumed: Option<&Checkpoint>,
) -> Result<(), TrainError> {
    let plan = plans.of_rows(spec.micro_batch);
    let (batch, rows) = (spec.batch as usize, spec.micro_batch as usize);
    if let Some(Checkpoint { parameters, moments, .. }) = resumed {
        state::check(&plan, parameters, moments, spec.optimizer.moments())?;
    }
    let loaded = loader::bytes(batch, row_bytes).saturating_add(carried::bytes(&plan.graph, batch));
    Ok(memory::require(memory::run_bytes(&plan, batch, rows, loaded))?)
}

fn io(out: &std::path::Path, why: std::io::Error) -> TrainError {
    TrainError::Io { path: out.to_path_buf(), why }
}
