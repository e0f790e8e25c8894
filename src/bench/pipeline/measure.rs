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
use potluck_parallel::{ParallelOptions, PipelineOptions, Program, ReduceSite, Shares};
use potluck_train::TrainError;
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::open::OpenOptions;
use potluck_train::runtime::placement::assemble::assemble;
use potluck_train::runtime::placement::candidates::selections;
use potluck_train::runtime::placement::names::display_names;
use potluck_train::runtime::placement::open_one::RequestedDevices;
use potluck_train::runtime::placement::pipeline::{MeasuredBlocks, measure_blocks};
use potluck_train::runtime::placement::plans::Plans;
use potluck_train::runtime::placement::types::PlacementRequest;
use potluck_train::runtime::remote::NO_NODES;
use potluck_train::runtime::step::Inputs;
use potluck_train::runtime::timing::Probe;
use potluck_train::session::{Session, SessionOptions};

const VOCABULARY: usize = 65;
/// Channels of an attention head, if they divide the width.
const HEAD: usize = 32;
const LEARNING_RATE: f64 = 1e-3;
/// Steps before those that are measured.
const WARM_UP: usize = 1;
/// Fewest measured steps, however long they take.
const STEPS_MIN: usize = 2;

/// Times of blocks, with the selector of the devices that they were measured on.
pub(super) type BlocksOfDevices = Option<(String, MeasuredBlocks)>;

/// Measured steps of a case, with what was predicted for them.
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
        let heads = options.width.checked_div(HEAD).filter(|_| options.width.is_multiple_of(HEAD));
        // An untied head, so that no parameters belong to two stages.
        let config = GptConfig {
            vocabulary: VOCABULARY,
            context: options.context,
            positions: options.context,
            layers: options.layers,
            heads: heads.unwrap_or(1),
            width: options.width,
            bias: false,
            dropout: 0.0,
            tie: false,
            activation: Unary::Gelu,
        };
        let model = ModelGraph::training(gpt(&config)?, true)?;
        // With next to nothing measured, the tuning would take the most time of all.
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

    /// Opens the pipeline of a case, predicts its step, and times some. `measured` keeps the times
    /// of blocks for the next case on the same devices.
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
        let chunks = placed.pipelines.stages.iter().take(1).flat_map(|of| &of.chunks);
        let blocks = chunks.map(|chunk| chunk.end - chunk.start).collect();
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
        let blocks = match self.cut {
            CutChoice::Even => {
                let chunks = even(self.blocks() as u32, parts).into_iter();
                chunks.map(|chunk| chunk.end - chunk.start).collect()
            }
            CutChoice::Measured => Vec::new(),
        };
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

    /// Takes steps; returns the seconds of each measured one, and its idle share.
    fn steps(&self, session: &mut Session) -> Result<(Vec<f64>, Vec<f64>), TrainError> {
        let (mut steps, mut bubbles) = (Vec::new(), Vec::new());
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

    /// Takes a step; returns its seconds and its idle share.
    fn step(&self, session: &mut Session) -> Result<(f64, f64), TrainError> {
        let of_rank = |program: &Arc<Program>| {
            program.micro_batches.iter().map(|one| (self.inputs)(one.rows as usize)).collect()
        };
        let ranks = session.programs.iter().map(of_rank).collect();
        let inputs = session.inputs(ranks, LEARNING_RATE);
        let started = Instant::now();
        let reports = session.step(&inputs)?;
        let seconds = started.elapsed().as_secs_f64();
        if !reports.iter().all(|report| report.is_updated()) {
            let number = session.taken.steps;
            return Err(TrainError::Defect(format!("step {number} updated no parameters")));
        }
        let times = || reports.iter().map(|report| (report.time.as_secs_f64(), report.idle()));
        let idle: f64 = times().map(|(time, idle)| time * idle).sum();
        Ok((seconds, idle / times().map(|(time, _)| time).sum::<f64>()))
    }
}

/// Returns inputs of a model of tokens, the same for every micro-batch.
fn inputs_of(graph: &Graph) -> Probe {
    let wanted = graph.inputs.iter().map(|(_, id)| {
        let tensor = graph.tensor(*id);
        (*id, tensor.dtype, tensor.shape.per_row())
    });
    let wanted: Vec<_> = wanted.collect();
    Arc::new(move |rows: usize| -> Inputs {
        let values = |(index, (id, dtype, per_row)): (usize, &(_, DType, usize))| {
            let count = rows * per_row;
            let factor = [7, 11][index % 2];
            let token = |at: usize| (at * factor % VOCABULARY) as u32;
            let values = match dtype {
                DType::U32 => HostTensor::Int((0..count).map(token).collect()),
                DType::F32 => HostTensor::Float(vec![1.0; count]),
            };
            (*id, values)
        };
        wanted.iter().enumerate().map(values).collect()
    })
}

/// Times the blocks on the requested devices.
fn blocks_on(request: &PlacementRequest) -> Result<MeasuredBlocks, RuntimeError> {
    let selections = selections(request.selector)?;
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    measure_blocks(request, devices, request.micro_batch, &mut |_, _| {})
}
