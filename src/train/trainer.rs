//! Training from code: any graph, one device, batches of your own.
//!
//! ```
//! use ndarray::array;
//! use potluck::graph::Unary;
//! use potluck::model::{MlpConfig, MlpLoss, mlp};
//! use potluck::optim::Optimizer;
//! use potluck::train::{Trainer, TrainerOptions, Values};
//!
//! let config = MlpConfig {
//!     widths: vec![2, 8, 1],
//!     activation: Unary::GeluTanh,
//!     loss: MlpLoss::SquaredError,
//! };
//! let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };
//! let mut trainer = Trainer::new(mlp(&config)?, &TrainerOptions::new("cpu", optimizer, 2))?;
//! let batch = [
//!     ("inputs", Values::from(array![[0.0, 1.0], [1.0, 0.0]])),
//!     ("targets", Values::from(array![[1.0], [-1.0]])),
//! ];
//! let before = trainer.step(&batch, 0.1)?.loss;
//! let after = trainer.step(&batch, 0.1)?.loss;
//! assert!(after < before);
//! # Ok::<(), potluck::train::TrainError>(())
//! ```

use std::sync::Arc;

use ndarray::ArrayD;

use crate::base::rng::Key;
use crate::base::{DType, TensorId};
use crate::exec::Bank;
use crate::graph::{Graph, Plan, PlanOptions, differentiate, fuse};
use crate::optim::Optimizer;
use crate::parallel::{MicroBatch, Program, Verdict, one_rank};

use super::checkpoint::NamedTensor;
use super::driver::Driver;
use super::error::TrainError;
use super::evaluate::forward;
use super::fault::Faults;
use super::step::{Inputs, StepInput, Values, load, run_step};
use super::{setup, state};

/// How a [`Trainer`] trains.
#[derive(Clone, Debug)]
pub struct TrainerOptions {
    /// The selector of the device, as for `potluck train --devices`.
    pub devices: String,
    pub optimizer: Optimizer,
    /// Samples per step.
    pub batch: usize,
    /// Samples that the device runs at a time.
    pub micro_batch: usize,
    /// The norm to which longer gradients are scaled down; 0: off.
    pub clip: f64,
    pub seed: u64,
    /// Whether neighbouring operations become one kernel.
    pub fuse: bool,
    /// The most seconds to time kernels in that were not timed before on this machine; 0: none.
    /// Which run can change the last bits of results.
    pub tune_seconds: f64,
}

impl TrainerOptions {
    /// Whole batches, no clipping, seed 0, fused, kernels timed for up to 5 seconds.
    pub fn new(devices: &str, optimizer: Optimizer, batch: usize) -> Self {
        Self {
            devices: devices.to_string(),
            optimizer,
            batch,
            micro_batch: batch,
            clip: 0.0,
            seed: 0,
            fuse: true,
            tune_seconds: 5.0,
        }
    }
}

/// What a step reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Mean over the targets that count, before the update.
    pub loss: f64,
    /// Norm of the gradient of the mean loss, before clipping.
    pub gradient_norm: f64,
    /// Whether parameters were updated: not if a value was not finite.
    pub updated: bool,
    /// The share of the step (from the end of the last one's gradients to the end of this one's)
    /// in which the device was busy, by its own clock; `None` without one.
    pub busy: Option<f64>,
}

fn check(forward: &Graph, options: &TrainerOptions) -> Result<(), TrainError> {
    let fail = |why: &str| Err(TrainError::Unusable(why.into()));
    let fits = |samples: usize| samples > 0 && u32::try_from(samples).is_ok();
    if forward.loss.is_none() {
        return fail("the graph has no loss; end it with one of the builder's losses");
    }
    if !fits(options.batch) || !fits(options.micro_batch) {
        return fail("batch and micro_batch must be at least 1, and below 2^32");
    }
    Ok(())
}

/// A graph in training on one device.
pub struct Trainer {
    driver: Driver,
    graph: Graph,
    program: Arc<Program>,
    options: TrainerOptions,
    step: u64,
    updates: u64,
}

impl Trainer {
    /// Plans the training of a forward graph with a loss, opens the device and initialises the
    /// parameters.
    ///
    /// # Errors
    /// A graph without a loss; batches of no samples, or of 2^32 and more; no such device, or one
    /// that the plan does not fit.
    pub fn new(forward: Graph, options: &TrainerOptions) -> Result<Self, TrainError> {
        check(&forward, options)?;
        let training = differentiate(forward)?;
        let training = if options.fuse { fuse(training) } else { training };
        let plan = Plan::new(training, PlanOptions::new(options.micro_batch));
        let graph = plan.graph.clone();
        let program = one_rank(&plan, options.batch as u32, options.micro_batch as u32);
        let moments = options.optimizer.moments();
        let tune_seconds = options.tune_seconds;
        let opening = setup::OpenOptions { tune_seconds, ..Default::default() };
        let driver = setup::open(&options.devices, plan, moments, &opening)?.driver;
        let seed = options.seed;
        driver.run("initialization", move |device| state::initialize(device, seed))?;
        let (program, options) = (Arc::new(program), options.clone());
        Ok(Self { driver, graph, program, options, step: 0, updates: 0 })
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        self.driver.name()
    }

    /// One step at this learning rate on a whole batch: the values of every input of the graph
    /// by name, except `samples`, which numbers the batch.
    ///
    /// # Errors
    /// An input that is missing or has another type or length; a device that fails.
    pub fn step(&mut self, batch: &[(&str, Values)], lr: f64) -> Result<Step, TrainError> {
        let micro_batches = self.program.micro_batches.iter();
        let inputs: Result<Vec<Inputs>, TrainError> =
            micro_batches.map(|part| self.cut(batch, self.options.batch, part)).collect();
        let input = StepInput {
            step: self.step + 1,
            program: self.program.clone(),
            micro_batches: inputs?,
            run_key: Key::new(self.options.seed),
            update: self.options.optimizer.update(lr, self.updates + 1),
            clip: self.options.clip,
            faults: Faults::none(),
        };
        let report = self.driver.run("a step", move |device| run_step(device, &input))?;
        self.step += 1;
        self.updates += u64::from(report.updated);
        let (Verdict::Commit(totals) | Verdict::Skip { totals, .. }) = report.verdict;
        let (gradient_norm, busy) = (totals.gradient_norm, report.busy);
        Ok(Step { loss: totals.loss, gradient_norm, updated: report.updated, busy })
    }

    /// An output of the graph for `rows` samples (at most a micro-batch), without dropout, in the
    /// output's shape. Inputs that the output does not depend on (targets) may be left out.
    ///
    /// # Errors
    /// No such output; rows that do not fit; an input of another type or length; a device that
    /// fails.
    pub fn predict(
        &mut self,
        output: &str,
        rows: usize,
        inputs: &[(&str, Values)],
    ) -> Result<ArrayD<f32>, TrainError> {
        let unknown = || TrainError::Unusable(format!("the graph has no output called {output}"));
        let tensor = self.graph.output(output).ok_or_else(unknown)?;
        if rows == 0 || rows > self.options.micro_batch {
            let most = self.options.micro_batch;
            return Err(TrainError::Unusable(format!("{rows} rows asked for, 1 to {most} fit")));
        }
        let part = MicroBatch { first: 0, rows: rows as u32 };
        let mut given = inputs.to_vec();
        for (name, id) in &self.graph.inputs {
            if !given.iter().any(|(known, _)| known == name) {
                given.push((name, self.zeros(*id, rows)));
            }
        }
        let values = self.cut(&given, rows, &part)?;
        let read = self.driver.run("a prediction", move |device| {
            load(device, &values, 0)?;
            let pass = forward(device, rows)?;
            device.read(tensor, &pass)
        })?;
        let shape = self.graph.tensor(tensor).shape.resolve(rows);
        let why = |error| TrainError::Defect(format!("an output has another shape: {error}"));
        ArrayD::from_shape_vec(shape, read).map_err(why)
    }

    /// The parameters by name, in the model's order.
    pub fn parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        let read = |device: &mut dyn crate::exec::Executor| state::read(device, Bank::Parameters);
        Ok(self.driver.run("reading parameters", read)?)
    }

    fn zeros(&self, input: TensorId, rows: usize) -> Values {
        let tensor = self.graph.tensor(input);
        let count = tensor.shape.elements(rows);
        match tensor.dtype {
            DType::F32 => Values::Float(vec![0.0; count]),
            DType::U32 => Values::Int(vec![0; count]),
        }
    }

    /// The rows of a micro-batch out of the values for `rows` samples.
    fn cut(
        &self,
        values: &[(&str, Values)],
        rows: usize,
        part: &MicroBatch,
    ) -> Result<Inputs, TrainError> {
        let slots = part.first..part.first + part.rows;
        let mut inputs = Inputs::new();
        for (name, id) in &self.graph.inputs {
            let given = values.iter().find(|(known, _)| known == name);
            if name == "samples" {
                inputs.push((*id, Values::Int(slots.clone().collect())));
                continue;
            }
            let tensor = self.graph.tensor(*id);
            let per_row = tensor.shape.per_row();
            let range = slots.start as usize * per_row..slots.end as usize * per_row;
            let fits = |length: usize| length == rows * per_row;
            let wrong = |why: String| Err(TrainError::Unusable(format!("input {name} {why}")));
            match (given.map(|(_, values)| values), tensor.dtype) {
                (Some(Values::Float(v)), DType::F32) if fits(v.len()) => {
                    inputs.push((*id, Values::Float(v[range].to_vec())));
                }
                (Some(Values::Int(v)), DType::U32) if fits(v.len()) => {
                    inputs.push((*id, Values::Int(v[range].to_vec())));
                }
                (None, _) => return wrong("is missing".into()),
                (Some(_), dtype) => {
                    let shape = &tensor.shape;
                    return wrong(format!("must be {dtype:?} of {shape} for {rows} rows"));
                }
            }
        }
        Ok(inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Init};

    fn graph(with_loss: bool) -> Graph {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 2]);
        let w = b.parameter("w", &[2, 2], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        if with_loss {
            b.squared_error_loss(y, x).unwrap();
        }
        b.finish()
    }

    #[test]
    fn what_cannot_be_trained_is_an_error() {
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let refused = |graph: Graph, batch: usize, micro_batch: usize| {
            let options =
                TrainerOptions { micro_batch, ..TrainerOptions::new("cpu", optimizer, batch) };
            Trainer::new(graph, &options).map_or_else(|e| e.to_string(), |_| "trains".into())
        };
        assert_eq!(refused(graph(true), 4, 2), "trains");
        assert!(refused(graph(false), 4, 2).contains("no loss"));
        assert!(refused(graph(true), 0, 1).contains("at least 1"));
        assert!(refused(graph(true), 1, 0).contains("at least 1"));
        assert!(refused(graph(true), (1 << 32) + 1, 1).contains("below 2^32"));
    }
}
