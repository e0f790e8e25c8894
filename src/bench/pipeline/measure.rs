//! Steps of pipelines on devices, timed as a run would take them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::price::{PredictedStep, predict};
use super::{CutChoice, PipelineBenchOptions, PipelineCase};
use crate::sample::{Effort, SamplingPlan};
use potluck_core::faults::Faults;
use potluck_core::{DType, HostTensor};
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Graph, ModelGraph, Precision, Unary};
use potluck_kernels::autotune::TuneOptions;
use potluck_parallel::planner::cut::even;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{ParallelOptions, PipelineOptions, ReduceSite, Shares};
use potluck_train::TrainError;
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::open::OpenOptions;
use potluck_train::runtime::placement::assemble::assemble;
use potluck_train::runtime::placement::candidates::selections;
use potluck_train::runtime::placement::names::display_names;
use potluck_train::runtime::placement::open_one::RequestedDevices;
use potluck_train::runtime::placement::pipeline::{MeasuredBlocks, measure_blocks};
use potluck_train::runtime::placement::types::PlacementRequest;
use potluck_train::runtime::remote::NO_NODES;
use potluck_train::runtime::step::Inputs;
use potluck_train::runtime::timing::Probe;
use potluck_train::session::{Session, SessionOptions};

const VOCABULARY: usize = 65;
/// Channels of an attention head, if they divide the width.
const HEAD: usize = 32;
const LEARNING_RATE: f64 = 1e-3;
/// Steps before the measured ones.
const WARM_UP: usize = 1;
/// Fewest measured steps, regardless of their duration.
const STEPS_MIN: usize = 2;

/// Times of blocks, with the selector of the devices on which they were measured.
pub(super) type BlocksOfDevices = Option<(String, MeasuredBlocks)>;

/// Measured steps of a case, with the prediction.
pub(super) struct TimedSteps {
    /// Seconds of each step.
    pub steps: Vec<f64>,
    /// Idle share of all ranks in each step.
    pub(crate) bubbles: Vec<f64>,
    /// Blocks of each model chunk.
    pub blocks: Vec<u32>,
    pub predicted: PredictedStep,
}

/// Model and options that all cases share.
pub(super) struct PipelineWorkload {
    plans: Plans,
    optimizer: Optimizer,
    tuning: TuneOptions,
    sampling_plan: SamplingPlan,
    samples: u32,
    cut: CutChoice,
    inputs: Probe,
}

impl PipelineWorkload {
    /// Builds the model.
    pub fn new(options: &PipelineBenchOptions) -> Result<Self, TrainError> {
        let heads = if options.width.is_multiple_of(HEAD) { options.width / HEAD } else { 1 };
        // An untied head, so that no parameters belong to two stages.
        let config = GptConfig {
            vocabulary: VOCABULARY,
            context: options.context,
            positions: options.context,
            layers: options.layers,
            heads,
            width: options.width,
            bias: false,
            dropout: 0.0,
            tie: false,
            activation: Unary::Gelu,
        };
        let model = ModelGraph::training(gpt(&config)?, true)?;
        // With almost no measurements, the tuning would take most of the time.
        let seconds =
            if options.effort == Effort::Tiny { 0.0 } else { OpenOptions::default().tune_s };
        Ok(Self {
            inputs: inputs_of(model.whole()),
            plans: Plans::new(model),
            optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 },
            tuning: TuneOptions { seconds, ..TuneOptions::default() },
            sampling_plan: options.effort.sampling_plan(),
            samples: options.samples as u32,
            cut: options.cut,
        })
    }

    /// Returns the number of blocks of the model.
    pub fn blocks(&self) -> usize {
        self.plans.of_rows(self.samples).graph.blocks.len()
    }

    /// Opens the pipeline of a case, predicts its step, and times some steps. `measured` keeps the
    /// times of blocks for the next case on the same devices.
    pub fn measure(
        &self,
        case: &PipelineCase,
        selector: &str,
        measured: &mut BlocksOfDevices,
    ) -> Result<TimedSteps, TrainError> {
        let parallel = self.parallel(case);
        let request = self.request(case, selector, &parallel);
        if measured.as_ref().is_none_or(|(of, _)| of != selector) {
            *measured = Some((selector.into(), blocks_on(&request)?));
        }
        let Some((_, times)) = measured else {
            return Err(TrainError::Defect("blocks were measured and have no times".into()));
        };
        let placed = assemble(&request, &mut |_, _| {})?;
        let predicted = predict(&request, &placed, times, case)?;
        let mut blocks = Vec::new();
        if let Some(stages) = placed.pipelines.stages.first() {
            for chunk in &stages.chunks {
                blocks.push(chunk.end - chunk.start);
            }
        }
        let options = SessionOptions {
            optimizer: self.optimizer,
            ema: 0.0,
            clip: 1.0,
            precision: Precision::F32,
            seed: 0,
            faults: Faults::none(),
        };
        let mut session = Session::new(placed, options);
        session.initialize()?;
        let (steps, bubbles) = self.steps(&mut session)?;
        Ok(TimedSteps { steps, bubbles, blocks, predicted })
    }

    fn parallel(&self, case: &PipelineCase) -> ParallelOptions {
        let parts = case.shape.stages * case.shape.chunks;
        let mut blocks = Vec::new();
        if self.cut == CutChoice::Even {
            for chunk in even(self.blocks() as u32, parts) {
                blocks.push(chunk.end - chunk.start);
            }
        }
        ParallelOptions {
            shares: Shares::Even,
            reduce_site: Some(ReduceSite::Host),
            pipeline: PipelineOptions {
                stages: case.shape.stages as u32,
                schedule: case.schedule,
                virtual_stages: case.shape.chunks as u32,
                blocks_per_stage: blocks,
            },
            ..ParallelOptions::default()
        }
    }

    fn request<'a>(
        &'a self,
        case: &PipelineCase,
        selector: &'a str,
        parallel: &'a ParallelOptions,
    ) -> PlacementRequest<'a> {
        PlacementRequest {
            nodes: &NO_NODES,
            selector,
            parallel,
            batch: case.shape.micro_batches as u32 * self.samples,
            micro_batch: self.samples,
            fits_micro_batch: false,
            optimizer: &self.optimizer,
            plans: &self.plans,
            probe: Some(self.inputs.clone()),
            seed: 0,
            opening: OpenOptions { tune_s: self.tuning.seconds, ..OpenOptions::default() },
            tuning: &self.tuning,
            saved: None,
            retune: false,
            notify: &|_| {},
            trace: None,
            faults: Faults::none(),
        }
    }

    /// Performs steps; returns the seconds and the idle shares of the measured ones.
    fn steps(&self, session: &mut Session) -> Result<(Vec<f64>, Vec<f64>), TrainError> {
        let mut steps = Vec::new();
        let mut bubbles = Vec::new();
        for _ in 0..WARM_UP {
            self.step(session)?;
        }
        let longest = Duration::from_secs_f64(self.sampling_plan.steps_seconds_max);
        let begun = Instant::now();
        while steps.len() < STEPS_MIN
            || (steps.len() < self.sampling_plan.steps && begun.elapsed() < longest)
        {
            let (seconds, bubble) = self.step(session)?;
            steps.push(seconds);
            bubbles.push(bubble);
        }
        Ok((steps, bubbles))
    }

    /// Performs a step; returns its seconds and its idle share.
    fn step(&self, session: &mut Session) -> Result<(f64, f64), TrainError> {
        let mut ranks = Vec::with_capacity(session.programs.len());
        for program in &session.programs {
            let micro_batches = program.micro_batches.iter();
            ranks.push(micro_batches.map(|one| (self.inputs)(one.rows as usize)).collect());
        }
        let inputs = session.inputs(ranks, LEARNING_RATE);
        let started = Instant::now();
        let reports = session.step(&inputs)?;
        let seconds = started.elapsed().as_secs_f64();
        if !reports.iter().all(|report| report.is_updated()) {
            let number = session.taken.steps;
            return Err(TrainError::Defect(format!("step {number} updated no parameters")));
        }
        let mut idle = 0.0;
        let mut total = 0.0;
        for report in &reports {
            let time = report.time.as_secs_f64();
            idle += time * report.idle();
            total += time;
        }
        Ok((seconds, idle / total))
    }
}

/// Returns inputs of a model of tokens, the same for every micro-batch.
fn inputs_of(graph: &Graph) -> Probe {
    let mut wanted = Vec::with_capacity(graph.inputs.len());
    for (_, id) in &graph.inputs {
        let tensor = graph.tensor(*id);
        wanted.push((*id, tensor.dtype, tensor.shape.per_row()));
    }
    Arc::new(move |rows: usize| -> Inputs {
        let mut inputs = Vec::with_capacity(wanted.len());
        for (index, (id, dtype, per_row)) in wanted.iter().enumerate() {
            let count = rows * per_row;
            let factor = [7, 11][index % 2];
            let values = match dtype {
                DType::U32 => HostTensor::Int(
                    (0..count).map(|at| (at * factor % VOCABULARY) as u32).collect(),
                ),
                DType::F32 => HostTensor::Float(vec![1.0; count]),
            };
            inputs.push((*id, values));
        }
        inputs
    })
}

/// Times the blocks on the requested devices.
fn blocks_on(request: &PlacementRequest) -> Result<MeasuredBlocks, RuntimeError> {
    let selections = selections(request.selector)?;
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    measure_blocks(request, devices, request.micro_batch, &mut |_, _| {})
}
