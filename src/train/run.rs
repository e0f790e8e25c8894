//! A training run: started or resumed, stepped, evaluated, saved.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::base::rng::Key;
use crate::data::{Part, TextData};
use crate::device::DeviceError;
use crate::exec::Bank;
use crate::files;
use crate::graph::Plan;
use crate::kernels::{Choices, Tuning};
use crate::metrics::{EvalRecord, Recorder, StepRecord};
use crate::optim::{Decay, Optimizer, Schedule};
use crate::parallel::{Program, Verdict, one_rank};

use super::checkpoint::{Best, Checkpoint, Meta, NamedTensor, Store};
use super::config::RunConfig;
use super::diagnose::first_not_finite;
use super::driver::Driver;
use super::error::TrainError;
use super::evaluate::{BATCHES_PER_JOB, evaluate};
use super::fault::{Faults, Point};
use super::generate::{LanguageModel, Sampling};
use super::loader::{Loader, Source};
use super::memory;
use super::progress::{Progress, Shown, kernels_note};
use super::setup::Opened;
use super::signals::{Interruption, Signals};
use super::step::{StepInput, StepReport, run_step};
use super::{setup, state, text};

/// What stands before a call's signature among what a checkpoint says was resolved.
const KERNEL: &str = "kernels.";

/// What was asked for besides the configuration.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The run's directory.
    pub out: PathBuf,
    /// The selector of the device.
    pub devices: String,
    pub quiet: bool,
    /// Time the kernels again, whatever is recorded.
    pub retune: bool,
    /// For tests.
    pub faults: Faults,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ending {
    /// All steps are done; the last loss on held-out data, if there is any.
    Done { val_loss: Option<f64> },
    /// A signal came; the state is saved.
    Interrupted(Interruption),
}

/// A run under way.
pub struct Run {
    config: RunConfig,
    options: RunOptions,
    store: Store,
    recorder: Recorder,
    progress: Progress,
    signals: Signals,
    driver: Driver,
    source: Source,
    loader: Loader,
    program: Arc<Program>,
    optimizer: Optimizer,
    schedule: Schedule,
    identity: String,
    /// Which kernels run, where there is a choice.
    choices: Choices,
    /// Of the data: a hash of all tokens, so it is made once.
    fingerprint: String,
    /// Steps done, and updates made (skipped steps make none).
    step: u64,
    updates: u64,
    skipped_in_row: u64,
    best: Option<Best>,
    /// The step and loss of the last evaluation, and the last step saved.
    evaluated: Option<(u64, f64)>,
    saved: Option<u64>,
}

/// Runs until the configured number of steps or a signal. This is the whole loop.
pub fn train(run: &mut Run) -> Result<Ending, TrainError> {
    while run.step < run.config.train.steps {
        let started = Instant::now();
        let input = run.next_step()?;
        let report = run.perform(&input)?;
        run.record(&input, &report, started)?;
        if run.due(run.config.train.eval_every) {
            run.evaluate()?;
        }
        if run.due(run.config.train.checkpoint_every) {
            run.save_or_warn();
        }
        if let Some(signal) = run.signals.pending() {
            run.save()?;
            run.progress.finish();
            return Ok(Ending::Interrupted(signal));
        }
    }
    let val_loss = run.evaluate()?;
    run.save()?;
    run.progress.finish();
    Ok(Ending::Done { val_loss })
}

impl Run {
    /// Opens the device and the run's directory, and starts from new parameters or `resumed`.
    pub fn start(
        config: RunConfig,
        options: RunOptions,
        resumed: Option<Checkpoint>,
    ) -> Result<Self, TrainError> {
        let tokenizer = resumed.as_ref().and_then(|checkpoint| checkpoint.meta.tokenizer.clone());
        let data = Arc::new(setup::data(&config, tokenizer)?);
        let plan = setup::plan(&config, data.tokenizer().vocabulary())?;
        let optimizer = setup::optimizer(&config);
        if let Some(Checkpoint { parameters, moments, .. }) = &resumed {
            // Before anything in the run's directory is touched.
            state::check(&plan, parameters, moments, optimizer.moments())?;
        }
        let (batch, rows) = (config.train.batch, config.train.micro_batch);
        memory::require(memory::of_run(&plan, batch, rows, config.model.context))?;
        let program = one_rank(&plan, batch as u32, rows as u32);
        let done = resumed.as_ref().map_or((0, 0), |c| (c.meta.step, c.meta.samples));
        let source = source(&config, &plan, &data, done)?;
        // The device comes first: without one, nothing is written.
        let opened = open(&config, &options, resumed.as_ref(), plan)?;
        let mut store = Store::open(&options.out)?.with_faults(options.faults.clone());
        let step = resumed.as_ref().map_or(0, |checkpoint| checkpoint.meta.step);
        let metrics = options.out.join("metrics.jsonl");
        let (recorder, evaluated) = match resumed {
            Some(_) => {
                store.set_aside_after(step)?;
                let (recorder, truncated) = Recorder::resume(&metrics, step)?;
                (recorder, truncated.val_loss.map(|val_loss| (step, val_loss)))
            }
            None => (Recorder::create(&metrics)?, None),
        };
        let (log_every, steps) = (config.train.log_every, config.train.steps);
        let progress = Progress::new(options.quiet, log_every, step, steps, opened.driver.name());
        let program = Arc::new(program);
        let loader = Loader::start(source.clone(), program.clone(), step + 1, steps)
            .map_err(|why| io(&options.out, why))?;
        let mut run = Self {
            schedule: setup::schedule(&config),
            signals: Signals::install().map_err(|why| io(&options.out, why))?,
            driver: opened.driver,
            identity: opened.identity,
            choices: opened.choices,
            fingerprint: data.fingerprint(),
            updates: 0,
            skipped_in_row: 0,
            best: None,
            evaluated,
            saved: None,
            config,
            options,
            store,
            recorder,
            progress,
            source,
            loader,
            program,
            optimizer,
            step,
        };
        opened.notes.iter().for_each(|note| run.progress.note(note));
        match resumed {
            Some(checkpoint) => run.restore(checkpoint)?,
            None => run.initialize()?,
        }
        run.write_files()?;
        Ok(run)
    }

    /// Says what runs, where, and in which directory.
    pub fn announce(&self) {
        let model = &self.config.model;
        let data = &self.source.data;
        let micro_batches = match self.program.micro_batches.len() {
            1 => String::new(),
            count => format!(" in {count} micro-batches"),
        };
        self.progress.note(&format!(
            "{} layers, {} heads, width {}, context {}; {} training tokens, vocabulary {}; \
             batch {}{micro_batches}; on {}; in {}",
            model.layers,
            model.heads,
            model.width,
            model.context,
            data.tokens(Part::Training).len(),
            data.tokenizer().vocabulary(),
            self.config.train.batch,
            self.identity,
            self.options.out.display()
        ));
        self.announce_the_end();
    }

    /// Says what a user who resumes with another number of steps may not expect: that nothing is
    /// left to do, or that the learning rate falls no further.
    fn announce_the_end(&self) {
        let (steps, decay_steps) = (self.config.train.steps, self.config.schedule.decay_steps);
        if self.step > 0 && self.step >= steps {
            let step = self.step;
            self.progress.note(&format!(
                "step {step} of {steps} is done already: nothing is left to train; to go on, give \
                 --steps a larger number"
            ));
        } else if self.step > 0 && steps > decay_steps && self.schedule.decay != Decay::Constant {
            let lr = self.schedule.min_lr;
            self.progress.note(&format!(
                "the learning rate stays at {lr} from step {decay_steps} on, where its schedule \
                 ends; to stretch it, add --set schedule.decay_steps={steps}"
            ));
        }
    }

    fn initialize(&mut self) -> Result<(), TrainError> {
        let seed = self.config.train.seed;
        self.driver.run("initialization", move |device| state::initialize(device, seed))?;
        self.save()
    }

    fn restore(&mut self, checkpoint: Checkpoint) -> Result<(), TrainError> {
        let Checkpoint { meta, parameters, moments } = checkpoint;
        self.updates = meta.optimizer_step;
        self.saved = Some(meta.step).filter(|step| self.store.path(*step).is_dir());
        // A best one that is gone (pruned after a later one, or of another directory) must not
        // keep the next from being marked; one that is there may not have been marked yet.
        self.best = meta.best.filter(|best| self.store.path(best.step).is_dir());
        if let Some(best) = self.best {
            self.store.mark_best(best.step)?;
        }
        if let Some(before) = meta.resolved.get("device")
            && *before != self.identity
        {
            self.progress.note(&format!(
                "the run was on {before} and continues on {}: its bits will differ from those \
                 of an uninterrupted run",
                self.identity
            ));
        }
        if meta.resolved.get("data") != Some(&self.fingerprint) {
            self.progress.warn("the data are not those that the checkpoint was trained on");
        }
        state::restore(&self.driver, parameters, moments, self.optimizer.moments())
    }

    /// `run.toml` and `resolved.toml`: what was asked for, and what was decided.
    fn write_files(&self) -> Result<(), TrainError> {
        let mut resolved = String::from("# What this run decided before its first step.\n");
        for (key, value) in self.resolved().iter().filter(|(key, _)| !key.starts_with(KERNEL)) {
            resolved += &format!("{key} = {}\n", toml::Value::String(value.clone()));
        }
        if self.choices.iter().next().is_some() {
            resolved += "\n# The variant of each call that has several.\n[kernels]\n";
        }
        for (signature, name) in self.choices.iter() {
            let [signature, name] = [signature, name].map(|s| toml::Value::String(s.into()));
            resolved += &format!("{signature} = {name}\n");
        }
        let files = [("run.toml", self.config.to_toml()), ("resolved.toml", resolved)];
        for (name, text) in files {
            let path = self.options.out.join(name);
            files::replace(&path, text.as_bytes()).map_err(|why| TrainError::Io { path, why })?;
        }
        Ok(())
    }

    fn resolved(&self) -> BTreeMap<String, String> {
        let rows: Vec<String> =
            self.program.micro_batches.iter().map(|m| m.rows.to_string()).collect();
        [
            ("device", self.identity.clone()),
            ("data", self.fingerprint.clone()),
            ("micro_batches", rows.join(" ")),
            ("version", env!("CARGO_PKG_VERSION").to_string()),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into_iter()
        .chain(self.choices.iter().map(|(call, name)| (format!("{KERNEL}{call}"), name.into())))
        .collect()
    }

    fn next_step(&mut self) -> Result<Arc<StepInput>, TrainError> {
        let ended = || TrainError::Defect("the loader ended before the last step".into());
        let micro_batches = self.loader.next_step().ok_or_else(ended)?;
        let step = self.step + 1;
        let lr = self.schedule.lr(step);
        Ok(Arc::new(StepInput {
            step,
            program: self.program.clone(),
            micro_batches,
            run_key: Key::new(self.config.train.seed),
            update: self.optimizer.update(lr, self.updates + 1),
            clip: self.config.optim.clip,
            faults: self.options.faults.clone(),
        }))
    }

    fn perform(&mut self, input: &Arc<StepInput>) -> Result<StepReport, TrainError> {
        let input = Arc::clone(input);
        Ok(self.driver.run("a step", move |device| run_step(device, &input))?)
    }

    fn record(
        &mut self,
        input: &Arc<StepInput>,
        report: &StepReport,
        started: Instant,
    ) -> Result<(), TrainError> {
        self.step = input.step;
        let totals = *report.verdict.totals();
        let seconds = started.elapsed().as_secs_f64();
        let tokens_per_s = totals.count / seconds;
        let skipped = match &report.verdict {
            Verdict::Skip { reason, .. } => Some(reason.to_string()),
            Verdict::Commit(_) => None,
        };
        let record = StepRecord {
            step: input.step,
            loss: totals.loss,
            lr: self.schedule.lr(input.step),
            grad_norm: totals.gradient_norm,
            tokens: totals.count as u64,
            ms: 1e3 * seconds,
            tokens_per_s,
            busy: report.busy,
            skipped: skipped.clone(),
        };
        self.options
            .faults
            .at_write(Point::Metrics, input.step)
            .map_err(|why| io(&self.options.out, why))?;
        self.recorder.record(record)?;
        self.progress.step(&Shown { step: input.step, loss: totals.loss, tokens_per_s });
        match skipped {
            None => {
                self.updates += 1;
                self.skipped_in_row = 0;
                Ok(())
            }
            Some(reason) => self.skip(input, reason),
        }
    }

    /// A step that was not finite: says where that began, and ends the run after too many.
    fn skip(&mut self, input: &Arc<StepInput>, reason: String) -> Result<(), TrainError> {
        self.skipped_in_row += 1;
        let again = Arc::clone(input);
        let began =
            self.driver.run("a diagnosis", move |device| first_not_finite(device, &again))?;
        let step = input.step;
        let limit = self.config.train.skip_limit;
        self.progress.warn(&format!(
            "step {step} was skipped ({} in a row, the run ends at {limit}): {reason}; it began \
             at {began}",
            self.skipped_in_row
        ));
        if self.skipped_in_row < limit {
            return Ok(());
        }
        self.progress.finish();
        let checkpoint = self.store.path(self.saved.unwrap_or(0));
        Err(TrainError::Diverged { count: limit, reason, began, checkpoint })
    }

    fn due(&self, every: u64) -> bool {
        every > 0 && self.step.is_multiple_of(every)
    }

    /// The loss on the whole held-out part; `None` if there is none. A new best is saved.
    fn evaluate(&mut self) -> Result<Option<f64>, TrainError> {
        if let Some((step, loss)) = self.evaluated
            && step == self.step
        {
            return Ok(Some(loss));
        }
        if self.source.data.starts(Part::HeldOut, self.source.model.context) == 0 {
            return Ok(None);
        }
        let val_loss = evaluate_part(&self.driver, &self.source, &self.config, Part::HeldOut)?;
        self.evaluated = Some((self.step, val_loss));
        self.recorder.record(EvalRecord { step: self.step, val_loss })?;
        let is_best = val_loss.is_finite() && self.best.is_none_or(|best| val_loss < best.val_loss);
        let mark = if is_best { ", the best so far" } else { "" };
        self.progress.note(&format!("step {}  val_loss {val_loss:.4}{mark}", self.step));
        if is_best {
            self.best = Some(Best { step: self.step, val_loss });
            // Saved again if it was saved without knowing that it is the best.
            self.saved = self.saved.filter(|step| *step != self.step);
            self.save_or_warn();
        }
        Ok(Some(val_loss))
    }

    /// Saves; a failure is told, and the run goes on from memory: earlier checkpoints are
    /// untouched, and the next save may succeed.
    fn save_or_warn(&mut self) {
        if let Err(error) = self.save() {
            self.progress.warn(&format!("step {} was not saved: {error}", self.step));
        }
    }

    fn save(&mut self) -> Result<(), TrainError> {
        if self.saved == Some(self.step) {
            return Ok(());
        }
        let moments = self.optimizer.moments();
        let (parameters, moments) = self.driver.run("reading the state", move |device| {
            let parameters = state::read(device, Bank::Parameters)?;
            let moments: Result<Vec<_>, DeviceError> =
                (0..moments).map(|moment| state::read(device, Bank::Moment(moment))).collect();
            Ok((parameters, state::join_moments(moments?)))
        })?;
        self.check_finite(&parameters)?;
        let meta = Meta {
            step: self.step,
            optimizer_step: self.updates,
            seed: self.config.train.seed,
            model: self.config.section_toml("model"),
            samples: self.source.sampler.consumed(self.step),
            run: self.config.to_toml(),
            tokenizer: Some(self.source.data.tokenizer().clone()),
            best: self.best,
            resolved: self.resolved(),
        };
        self.store.save(&Checkpoint { meta, parameters, moments })?;
        if self.best.is_some_and(|best| best.step == self.step) {
            self.store.mark_best(self.step)?;
        }
        self.saved = Some(self.step);
        if let Err(error) = self.store.prune(self.config.train.checkpoint_keep) {
            // This one is saved; the next save tries again.
            self.progress.warn(&format!("old checkpoints were not removed: {error}"));
        }
        Ok(())
    }

    /// Parameters that are not finite cannot be trained any further: saving them would push the
    /// good checkpoints out.
    fn check_finite(&self, parameters: &[NamedTensor]) -> Result<(), TrainError> {
        let bad = parameters.iter().find(|tensor| !tensor.is_finite());
        let Some(bad) = bad else { return Ok(()) };
        let (step, name) = (self.step, &bad.name);
        let last = self.store.path(self.saved.unwrap_or(0));
        Err(TrainError::Unusable(format!(
            "the parameter {name} is not finite after step {step}, which is not worth saving; \
             lower optim.lr or set optim.clip, then resume from {}",
            last.display()
        )))
    }

    /// Text that the model writes from a line break on, as `train.sample_tokens` asks for.
    pub fn sample(&self) -> Result<String, TrainError> {
        let count = self.config.train.sample_tokens as u64;
        let sampling = Sampling { temperature: 0.8, top_k: 0, seed: self.config.train.seed };
        let (data, model) = (&self.source.data, self.source.model);
        let tokenizer = data.tokenizer();
        let prompt = text::opening(tokenizer);
        text::generate(&self.driver, tokenizer, model, &prompt, &sampling, count, |_| true)
    }
}

/// Opens the device of a run.
fn open(
    config: &RunConfig,
    options: &RunOptions,
    resumed: Option<&Checkpoint>,
    plan: Plan,
) -> Result<Opened, TrainError> {
    let saved = resumed.map(|checkpoint| &checkpoint.meta.resolved);
    let tuning = |identity: &str| tuning(config, options, saved, identity);
    let moments = setup::optimizer(config).moments();
    let mut report = kernels_note(options.quiet);
    let opening = setup::OpenOptions::of(config);
    setup::open_tuned(&options.devices, plan, moments, &opening, tuning, &mut report)
}

/// How kernels are chosen: a run that goes on keeps its own on the same device.
fn tuning(
    config: &RunConfig,
    options: &RunOptions,
    saved: Option<&BTreeMap<String, String>>,
    identity: &str,
) -> Tuning {
    let same = saved.filter(|saved| saved.get("device").is_some_and(|was| was == identity));
    let choice = |(key, name): (&String, &String)| {
        Some((key.strip_prefix(KERNEL)?.to_string(), name.clone()))
    };
    Tuning {
        seconds: config.train.tune_seconds,
        again: options.retune,
        saved: same.into_iter().flatten().filter_map(choice).collect(),
        update: Some(setup::optimizer(config).update(config.optim.lr, 1)),
        planted: options.faults.wrong_kernels().to_vec(),
        ..Tuning::default()
    }
}

/// Finds what the loader fills in the plan's graph; `done` are the steps and samples of the run
/// so far.
pub fn source(
    config: &RunConfig,
    plan: &Plan,
    data: &Arc<TextData>,
    done: (u64, u64),
) -> Result<Source, TrainError> {
    let missing = || TrainError::Defect("the model has no tokens or no logits".into());
    Ok(Source {
        data: data.clone(),
        sampler: setup::sampler(config, data, done),
        model: LanguageModel::of(&plan.graph).ok_or_else(missing)?,
        samples: plan.graph.input("samples"),
    })
}

/// The mean loss over the windows of a part that do not overlap.
pub fn evaluate_part(
    driver: &Driver,
    source: &Source,
    config: &RunConfig,
    part: Part,
) -> Result<f64, TrainError> {
    let starts = source.data.windows(part, source.model.context);
    let rows = config.train.micro_batch;
    let (mut sum, mut count) = (0.0, 0.0);
    // Several jobs, so that the deadline of each does not depend on how long the text is.
    for job in starts.chunks(rows * BATCHES_PER_JOB) {
        let (source, job) = (source.clone(), job.to_vec());
        let (loss, targets) = driver.run("an evaluation", move |device| {
            let batches =
                job.chunks(rows).map(|c| (c.len(), source.windows(part, c.iter().copied())));
            evaluate(device, batches)
        })?;
        sum += loss;
        count += targets;
    }
    Ok(sum / count)
}

fn io(out: &std::path::Path, why: std::io::Error) -> TrainError {
    TrainError::Io { path: out.to_path_buf(), why }
}
