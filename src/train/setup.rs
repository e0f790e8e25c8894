//! From a configuration to what runs: model, plan, device, data.

use std::sync::Arc;
use std::time::Duration;

use super::config::{Activation, DataKind, OptimKind, RunConfig, ScheduleKind};
use super::driver::Driver;
use super::error::TrainError;
use super::{config, memory};
use crate::autotune::{self, Choices, Kernels, Record, Tuning, cache};
use crate::data::corpus::CORPUS;
use crate::data::{Part, Sampler, TextData, Tokenizer, TokenizerChoice, TokenizerKind};
use crate::device::{AdapterKind, Checks, DeviceError, Gpu, Selection, list_adapters, select};
use crate::exec::{Cpu, Executor, GpuExecutor, Moments};
use crate::graph::fuse::{Fusion, fuse_listed};
use crate::graph::{Graph, Plan, PlanOptions, Unary, differentiate, fuse};
use crate::model::{GptConfig, gpt};
use crate::optim::{Decay, Optimizer, Schedule};

/// The text of a configuration, with the tokenizer that a checkpoint gives, or its own.
pub fn data(config: &RunConfig, tokenizer: Option<Tokenizer>) -> Result<TextData, TrainError> {
    let tokenizer = match tokenizer {
        Some(tokenizer) => TokenizerChoice::Given(tokenizer),
        None => TokenizerChoice::Derived(match config.data.tokenizer {
            config::Tokenizer::Char => TokenizerKind::Char,
            config::Tokenizer::Byte => TokenizerKind::Byte,
        }),
    };
    let (held_out, context) = (config.data.held_out, config.model.context);
    Ok(match (config.data.kind, &config.data.path) {
        (DataKind::Text, Some(path)) => TextData::load(path, tokenizer, held_out, context)?,
        _ => {
            let name = "the built-in corpus";
            TextData::from_bytes(name, CORPUS.as_bytes(), tokenizer, held_out, context)?
        }
    })
}

/// The forward graph of the configured model, with its loss.
pub fn graph(config: &RunConfig, vocabulary: usize) -> Result<Graph, TrainError> {
    let model = &config.model;
    Ok(gpt(&GptConfig {
        vocabulary,
        context: model.context,
        layers: model.layers,
        heads: model.heads,
        width: model.width,
        bias: model.bias,
        dropout: model.dropout as f32,
        tie: model.tie,
        activation: match model.activation {
            Activation::Gelu => Unary::Gelu,
            Activation::GeluTanh => Unary::GeluTanh,
            Activation::Relu => Unary::Relu,
        },
    })?)
}

/// The training plan for micro-batches of the configured size.
pub fn plan(config: &RunConfig, vocabulary: usize) -> Result<Plan, TrainError> {
    let training = training(config, vocabulary)?;
    Ok(Plan::new(training, PlanOptions::new(config.train.micro_batch)))
}

/// The training graph, fused if that is configured.
pub fn training(config: &RunConfig, vocabulary: usize) -> Result<Graph, TrainError> {
    Ok(fused(config, differentiate(graph(config, vocabulary)?)?))
}

/// What is fused in the training plan.
pub fn fusions(config: &RunConfig, vocabulary: usize) -> Result<Vec<Fusion>, TrainError> {
    let training = differentiate(graph(config, vocabulary)?)?;
    Ok(if config.train.fuse { fuse_listed(training).1 } else { Vec::new() })
}

fn fused(config: &RunConfig, graph: Graph) -> Graph {
    if config.train.fuse { fuse(graph) } else { graph }
}

/// The plan of the forward pass alone, for up to `rows` samples at a time.
pub fn forward_plan(
    config: &RunConfig,
    vocabulary: usize,
    rows: usize,
) -> Result<Plan, TrainError> {
    let forward = fused(config, graph(config, vocabulary)?);
    Ok(Plan::new(forward, PlanOptions::new(rows)))
}

/// The configured update rule.
pub fn optimizer(config: &RunConfig) -> Optimizer {
    let optim = &config.optim;
    let weight_decay = optim.weight_decay as f32;
    match optim.kind {
        OptimKind::AdamW => Optimizer::AdamW {
            beta1: optim.beta1 as f32,
            beta2: optim.beta2 as f32,
            eps: optim.eps as f32,
            weight_decay,
        },
        OptimKind::Sgd => Optimizer::Sgd { momentum: optim.momentum as f32, weight_decay },
    }
}

/// The configured learning rate over the steps.
pub fn schedule(config: &RunConfig) -> Schedule {
    Schedule {
        decay: match config.schedule.kind {
            ScheduleKind::Constant => Decay::Constant,
            ScheduleKind::Linear => Decay::Linear,
            ScheduleKind::Cosine => Decay::Cosine,
        },
        lr: config.optim.lr,
        min_lr: config.schedule.min_lr,
        warmup: config.schedule.warmup,
        decay_steps: config.schedule.decay_steps,
    }
}

/// Where each slot of each step draws its window from.
pub fn sampler(config: &RunConfig, data: &Arc<TextData>, done: (u64, u64)) -> Sampler {
    let population = data.starts(Part::Training, config.model.context);
    let (steps, samples) = done;
    Sampler::new(config.train.seed, population, config.train.batch as u32).after(steps, samples)
}

/// A device that was chosen and opened, on its own thread.
pub struct Opened {
    pub driver: Driver,
    /// What a person should know: why this device, and about its kernels.
    pub notes: Vec<String>,
    /// What decides about bits: recorded, and compared on resume.
    pub identity: String,
    pub is_cpu: bool,
    /// Its place among the devices that were asked for.
    pub position: usize,
    /// The most rows of its plan.
    pub rows: u32,
    /// Which kernels run, where there is a choice.
    pub choices: Choices,
}

/// How a device is opened, besides its plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpenOptions {
    /// How long a device may give no sign of life (`train.deadline_s`).
    pub deadline: Duration,
    /// The device's memory in MiB; 0: what it tells (`train.memory_mib`).
    pub memory_mib: u64,
    /// The most seconds to time kernels in that are not recorded (`train.tune_seconds`).
    pub tune_seconds: f64,
}

impl OpenOptions {
    /// As a configuration says.
    pub fn of(config: &RunConfig) -> Self {
        let train = &config.train;
        Self {
            deadline: Duration::from_secs_f64(train.deadline_s),
            memory_mib: train.memory_mib,
            tune_seconds: train.tune_seconds,
        }
    }
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::of(&RunConfig::default())
    }
}

/// Opens the device that `selector` names, with `plan` and room for the optimizer's moments. Its
/// kernels are chosen by what is recorded of the adapter, or else timed.
///
/// # Errors
/// No such device; one that the plan does not fit, or whose memory it does not; one with a driver
/// that runs a kernel wrong.
pub fn open(
    selector: &str,
    plan: Plan,
    moments: usize,
    options: &OpenOptions,
) -> Result<Opened, TrainError> {
    let tuning = Tuning { seconds: options.tune_seconds, ..Tuning::default() };
    let selection = if selector.trim().eq_ignore_ascii_case("cpu") {
        Selection::Cpu { because: None }
    } else {
        select(selector, &list_adapters())?
    };
    memory::require_of_host(&selection, &plan, &moments.into())?;
    open_selected(selection, plan, moments.into(), options, |_| tuning, &mut |_, _| {})
}

/// Like [`open`] for a device that is chosen, with kernels chosen as `tuning` says for the device
/// of an identity; `report` is told its name and how far that is.
///
/// # Errors
/// As [`open`].
pub fn open_selected(
    selection: Selection,
    plan: Plan,
    moments: Moments,
    options: &OpenOptions,
    tuning: impl FnOnce(&str) -> Tuning,
    report: &mut dyn FnMut(&str, autotune::Progress),
) -> Result<Opened, TrainError> {
    let is_cpu = matches!(selection, Selection::Cpu { .. });
    let rows = plan.options.rows as u32;
    let (executor, notes, identity, choices): (Box<dyn Executor>, _, _, _) = match selection {
        Selection::Cpu { because } => {
            let note = because.map(|why| format!("training on the CPU: {why}"));
            let device = Cpu::fast(plan, moments);
            let identity = device.name().to_string();
            (Box::new(device), Vec::from_iter(note), identity, Choices::default())
        }
        Selection::Adapter(adapter) => {
            let mut notes =
                Vec::from_iter(memory::require_on(&adapter, options.memory_mib, &plan, &moments)?);
            let identity = cache::identity(&adapter);
            let is_software = adapter.kind == AdapterKind::Software;
            let tuning = Tuning { is_software, ..tuning(&identity) };
            let mut gpu = Gpu::open(&adapter, Checks::Trusted)?;
            gpu.deadline = options.deadline;
            let mut kernels = Kernels::new(Record::of(&adapter));
            let mut report = |progress| report(&adapter.name, progress);
            notes.extend(kernels.prepare(&gpu, &plan, &tuning, &mut report)?);
            let choices = kernels.choices().clone();
            let device = allocate(gpu, plan, moments, kernels)?;
            (Box::new(device), notes, identity, choices)
        }
    };
    let driver = Driver::start(executor, options.deadline)
        .map_err(|error| TrainError::Defect(format!("no thread could be started: {error}")))?;
    Ok(Opened { driver, notes, identity, is_cpu, position: 0, rows, choices })
}

/// An adapter with everything of a plan on it. That it has no room now is a matter of the
/// configuration, unlike in the middle of a run.
fn allocate(
    gpu: Gpu,
    plan: Plan,
    moments: Moments,
    kernels: Kernels,
) -> Result<GpuExecutor, TrainError> {
    let needed = memory::gibibytes(memory::memory(&plan, &moments).peak() as u64);
    GpuExecutor::new(gpu, plan, moments, kernels).map_err(|error| match error {
        DeviceError::OutOfMemory { adapter, what } => TrainError::NoRoom { adapter, what, needed },
        other => other.into(),
    })
}
