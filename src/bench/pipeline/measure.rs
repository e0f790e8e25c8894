//! Steps of pipelines on devices, timed as a run would take them.

use std::time::{Duration, Instant};

use super::price::{PredictedStep, predict};
use super::{CutChoice, PipelineBenchOptions, PipelineCase};
use crate::sample::SamplingPlan;
use crate::training::TrainingWorkload;
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::{ModelGraph, Unary};
use potluck_parallel::planner::cut::even;
use potluck_parallel::{ParallelOptions, PipelineOptions, ReduceSite, Shares};
use potluck_train::TrainError;
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::placement::assemble::assemble;
use potluck_train::runtime::placement::candidates::selections;
use potluck_train::runtime::placement::names::display_names;
use potluck_train::runtime::placement::open_one::RequestedDevices;
use potluck_train::runtime::placement::pipeline::{MeasuredBlocks, measure_blocks};
use potluck_train::runtime::placement::types::PlacementRequest;
use potluck_train::session::Session;

const VOCABULARY: usize = 65;
/// Channels of an attention head, if they divide the width.
const HEAD: usize = 32;
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
    training: TrainingWorkload,
    sampling_plan: SamplingPlan,
    samples: u32,
    cut: CutChoice,
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
        Ok(Self {
            training: TrainingWorkload::new(model, VOCABULARY, options.effort),
            sampling_plan: options.effort.sampling_plan(),
            samples: options.samples as u32,
            cut: options.cut,
        })
    }

    /// Returns the number of blocks of the model.
    pub fn blocks(&self) -> usize {
        self.training.plans.of_rows(self.samples).graph.blocks.len()
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
        let mut session = self.training.session(placed)?;
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
        let batch = case.shape.micro_batches as u32 * self.samples;
        let request = self.training.request(selector, parallel, batch);
        PlacementRequest { micro_batch: self.samples, ..request }
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
        let (seconds, reports) = self.training.step(session)?;
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

/// Times the blocks on the requested devices.
fn blocks_on(request: &PlacementRequest) -> Result<MeasuredBlocks, RuntimeError> {
    let selections = selections(request.selector)?;
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    measure_blocks(request, devices, request.micro_batch, &mut |_, _| {})
}
