//! Training of a model of tokens by benchmarks: its plans and options, requests for devices, and
//! steps on inputs that are the same for every micro-batch.

use std::sync::Arc;
use std::time::Instant;

use crate::sample::Effort;
use potluck_core::faults::Faults;
use potluck_core::{DType, HostTensor};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Graph, ModelGraph, Precision};
use potluck_kernels::autotune::TuneOptions;
use potluck_parallel::ParallelOptions;
use potluck_parallel::planner::plans::Plans;
use potluck_train::TrainError;
use potluck_train::runtime::open::OpenOptions;
use potluck_train::runtime::placement::types::{PlacedWorkers, PlacementRequest};
use potluck_train::runtime::remote::NO_NODES;
use potluck_train::runtime::step::{Inputs, StepReport};
use potluck_train::runtime::timing::Probe;
use potluck_train::session::{Session, SessionOptions};

const LEARNING_RATE: f64 = 1e-3;

/// Factors by which the tokens of the inputs ascend, the inputs in turn.
const ASCENTS: [usize; 2] = [7, 11];

/// Model with the options that all cases of a benchmark share.
pub(crate) struct TrainingWorkload {
    pub plans: Plans,
    optimizer: Optimizer,
    tuning: TuneOptions,
    inputs: Probe,
}

impl TrainingWorkload {
    /// Returns the workload of a model with a vocabulary of this size.
    pub fn new(model: ModelGraph, vocabulary: usize, effort: Effort) -> Self {
        // With almost no measurements, the tuning would take most of the time.
        let seconds = if effort == Effort::Tiny { 0.0 } else { OpenOptions::default().tune_s };
        Self {
            inputs: inputs_of(model.whole(), vocabulary),
            plans: Plans::new(model),
            optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 },
            tuning: TuneOptions { seconds, ..TuneOptions::default() },
        }
    }

    /// Returns the request for the devices of a selector, for steps of `batch` samples in
    /// micro-batches of that size.
    pub fn request<'a>(
        &'a self,
        selector: &'a str,
        parallel: &'a ParallelOptions,
        batch: u32,
    ) -> PlacementRequest<'a> {
        PlacementRequest {
            nodes: &NO_NODES,
            selector,
            parallel,
            batch,
            micro_batch: batch,
            fits_micro_batch: false,
            optimizer: &self.optimizer,
            plans: &self.plans,
            steps: None,
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

    /// Returns the initialized session of opened devices.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    pub fn session(&self, placed: PlacedWorkers) -> Result<Session, TrainError> {
        let options = SessionOptions {
            optimizer: self.optimizer,
            ema: 0.0,
            clip: 1.0,
            precision: Precision::F32,
            seed: 0,
            follows_speed: false,
            faults: Faults::none(),
        };
        let mut session = Session::new(placed, options);
        session.initialize()?;
        Ok(session)
    }

    /// Performs a step; returns its seconds and the reports of all ranks.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails, or if the step updates no parameters.
    pub fn step(&self, session: &mut Session) -> Result<(f64, Vec<StepReport>), TrainError> {
        let mut ranks = Vec::with_capacity(session.programs.len());
        for program in &session.programs {
            let micro_batches = program.micro_batches.iter();
            ranks.push(micro_batches.map(|one| (self.inputs)(one.rows as usize)).collect());
        }
        let inputs = session.inputs(ranks, LEARNING_RATE);
        let started = Instant::now();
        let reports = session.step(&inputs)?;
        let seconds = started.elapsed().as_secs_f64();
        if !reports.iter().all(StepReport::is_updated) {
            let number = session.taken.steps;
            return Err(TrainError::Defect(format!("step {number} updated no parameters")));
        }
        Ok((seconds, reports))
    }
}

/// Returns inputs of a model of tokens, the same for every micro-batch.
fn inputs_of(graph: &Graph, vocabulary: usize) -> Probe {
    let mut wanted = Vec::with_capacity(graph.inputs.len());
    for (_, id) in &graph.inputs {
        let tensor = graph.tensor(*id);
        wanted.push((*id, tensor.dtype, tensor.shape.per_row()));
    }
    Arc::new(move |rows: usize| -> Inputs {
        let mut inputs = Vec::with_capacity(wanted.len());
        for (index, (id, dtype, per_row)) in wanted.iter().enumerate() {
            let count = rows * per_row;
            let factor = ASCENTS[index % ASCENTS.len()];
            let values = match dtype {
                DType::U32 => HostTensor::Int(
                    (0..count).map(|at| (at * factor % vocabulary) as u32).collect(),
                ),
                DType::F32 => HostTensor::Float(vec![1.0; count]),
            };
            inputs.push((*id, values));
        }
        inputs
    })
}
