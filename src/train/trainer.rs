//! Training API for Rust code: any graph, one device or several, batches of your own.
//!
//! ```
//! use ndarray::array;
//! use potluck::base::HostTensor;
//! use potluck::graph::Unary;
//! use potluck::model::{MlpConfig, MlpLoss, mlp};
//! use potluck::optim::Optimizer;
//! use potluck::train::{Trainer, TrainerOptions};
//!
//! let config = MlpConfig {
//!     widths: vec![2, 8, 1],
//!     activation: Unary::GeluTanh,
//!     dropout: 0.0, loss: MlpLoss::SquaredError,
//! };
//! let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };
//! let mut trainer = Trainer::new(mlp(&config)?, &TrainerOptions::new("cpu", optimizer, 2))?;
//! let batch = [
//!     ("inputs", HostTensor::from(array![[0.0, 1.0], [1.0, 0.0]])),
//!     ("targets", HostTensor::from(array![[1.0], [-1.0]])),
//! ];
//! let before = trainer.step(&batch, 0.1)?.loss;
//! let after = trainer.step(&batch, 0.1)?.loss;
//! assert!(after < before);
//! # Ok::<(), potluck::train::TrainError>(())
//! ```

use std::mem;
use std::sync::Arc;

use super::error::TrainError;
use super::session::{Session, SessionOptions};
use super::state;
use crate::autotune::TuneOptions;
use crate::base::{DType, HostTensor, Rank, TensorId};
use crate::checkpoint::NamedTensor;
use crate::faults::Faults;
use crate::graph::{Graph, differentiate, fuse};
use crate::optim::Optimizer;
use crate::parallel::{MicroBatch, Outcome, Program, ReduceSite, Verdict};
use crate::runtime::open;
use crate::runtime::placement::assemble::assemble;
use crate::runtime::placement::plans::Plans;
use crate::runtime::placement::types::{ParallelOptions, PipelineOptions, PlacementRequest};
use crate::runtime::step::Inputs;

/// Options of a [`Trainer`].
#[derive(Clone, Debug)]
pub struct TrainerOptions {
    /// Device selector, as for `potluck train --devices`.
    pub devices: String,
    /// Samples per device, or per pipeline, if there are several, each at least 1; empty: evenly.
    pub shares: Vec<usize>,
    /// Pipelines: the stages of each (1: none), their schedule, and the blocks of each model chunk
    /// (empty: nearly equal numbers of blocks).
    pub pipeline: PipelineOptions,
    pub optimizer: Optimizer,
    /// Samples per step, over all devices.
    pub batch: usize,
    /// The most samples that a device runs at a time.
    pub micro_batch: usize,
    /// Gradient norm above which gradients are scaled down to it; 0: off. Finite, not negative.
    pub clip: f64,
    pub seed: u64,
    /// True to fuse neighbouring operations into one kernel.
    pub fuse: bool,
    /// Time budget in seconds for autotuning kernels that were not timed before on this machine;
    /// 0: none. The selected kernels can change the last bits of results.
    pub tune_s: f64,
}

impl TrainerOptions {
    /// Returns options with whole batches, no clipping, seed 0, fused, kernels timed for up to 5
    /// seconds.
    pub fn new(devices: &str, optimizer: Optimizer, batch: usize) -> Self {
        Self {
            devices: devices.to_string(),
            shares: Vec::new(),
            pipeline: PipelineOptions::default(),
            optimizer,
            batch,
            micro_batch: batch,
            clip: 0.0,
            seed: 0,
            fuse: true,
            tune_s: 5.0,
        }
    }
}

/// Report of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Mean loss over the targets that count, before the update.
    pub loss: f64,
    /// Norm of the gradient of the mean loss, before clipping.
    pub gradient_norm: f64,
    /// True if parameters were updated; false if a value was not finite.
    pub updated: bool,
    /// Fraction of the step (from the end of the previous step's gradients to the end of this
    /// one's) in which the device was busy, by its own clock; `None` without one.
    pub busy: Option<f64>,
}

fn check(forward: &Graph, options: &TrainerOptions) -> Result<(), TrainError> {
    let fail = |why: &str| Err(TrainError::InvalidRequest(why.into()));
    let fits = |samples: usize| samples > 0 && u32::try_from(samples).is_ok();
    if forward.loss.is_none() {
        return fail("the graph has no loss; end it with one of the builder's losses");
    }
    if !fits(options.batch) || !fits(options.micro_batch) {
        return fail("batch and micro_batch must be at least 1, and below 2^32");
    }
    if options.shares.contains(&0) {
        return fail("shares must each be at least 1: name only the devices that take part");
    }
    if !(options.clip.is_finite() && options.clip >= 0.0) {
        let why = format!("clip must be 0 (off) or a positive number, and is {}", options.clip);
        return fail(&why);
    }
    Ok(())
}

/// Trainer of one graph.
pub struct Trainer {
    pub(super) session: Session,
    pub(super) graph: Graph,
    notes: Vec<String>,
    options: TrainerOptions,
}

impl Trainer {
    /// Plans the training of a forward graph with a loss, opens the devices and initialises the
    /// parameters.
    ///
    /// # Errors
    /// Returns `TrainError` if the graph has no loss, if a batch has no samples or 2^32 and more,
    /// if a share is 0, if `clip` is negative or not finite, if no device matches, if there are
    /// fewer samples than devices named, or if the plan does not fit a device.
    pub fn new(forward: Graph, options: &TrainerOptions) -> Result<Self, TrainError> {
        check(&forward, options)?;
        let training = differentiate(forward)?;
        let training = if options.fuse { fuse(training) } else { training };
        let tune_s = options.tune_s;
        let tuning = TuneOptions { seconds: tune_s, ..TuneOptions::default() };
        let parallel = ParallelOptions {
            shares: Some(options.shares.iter().map(|share| *share as u64).collect()),
            // A measured choice is recorded with a run, and a trainer has no run.
            reduce_site: Some(ReduceSite::Host),
            pipeline: options.pipeline.clone(),
            ..ParallelOptions::default()
        };
        let request = PlacementRequest {
            selector: &options.devices,
            parallel: &parallel,
            batch: options.batch as u32,
            micro_batch: options.micro_batch as u32,
            optimizer: &options.optimizer,
            plans: &Plans::new(training),
            probe: None,
            seed: options.seed,
            opening: open::OpenOptions { tune_s, ..Default::default() },
            tuning: &tuning,
            saved: None,
            retune: false,
            notify: &|_| {},
            trace: None,
            faults: Faults::none(),
        };
        let mut placed = assemble(&request, &mut |_, _| {})?;
        let notes = mem::take(&mut placed.notes);
        let TrainerOptions { optimizer, clip, seed, .. } = *options;
        let session =
            Session::new(placed, SessionOptions { optimizer, clip, seed, faults: Faults::none() });
        session.initialize()?;
        let graph = session.plan.graph.clone();
        Ok(Self { session, graph, notes, options: options.clone() })
    }

    /// Returns the name of the first device.
    pub fn device(&self) -> &str {
        self.session.group.name(Rank(0))
    }

    /// Returns sentences for the user about the devices: for example, which were left out and why.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the number of devices.
    pub fn world(&self) -> usize {
        self.session.group.world()
    }

    /// Runs one step at this learning rate on a whole batch: the values of every input of the
    /// graph by name, except `samples`, which numbers the batch.
    ///
    /// # Errors
    /// Returns `TrainError` if an input is missing or has another type or length, or if a device
    /// fails.
    pub fn step(&mut self, batch: &[(&str, HostTensor)], lr: f64) -> Result<Step, TrainError> {
        let size = self.options.batch;
        let of_rank = |program: &Arc<Program>| -> Result<Vec<Inputs>, TrainError> {
            let parts = program.micro_batches.iter();
            parts.map(|part| self.cut(&self.graph.inputs, batch, size, part)).collect()
        };
        let ranks: Result<_, _> = self.session.programs.iter().map(of_rank).collect();
        let inputs = self.session.inputs(ranks?, lr);
        let mut reports = self.session.step(&inputs)?;
        let report = reports.swap_remove(0);
        let (Verdict::Commit(totals) | Verdict::Skip { totals, .. }) = report.verdict;
        let (gradient_norm, updated) = (totals.gradient_norm, report.outcome == Outcome::Updated);
        let busy = report.busy.filter(|_| self.world() == 1);
        Ok(Step { loss: totals.loss, gradient_norm, updated, busy })
    }

    /// Returns the parameters by name, in the model's order.
    pub fn parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        state::parameters(&self.session.group, &self.session.plan)
    }

    /// Returns a micro-batch's rows of the values for `rows` samples, of these inputs.
    pub(super) fn cut(
        &self,
        wanted: &[(String, TensorId)],
        values: &[(&str, HostTensor)],
        rows: usize,
        part: &MicroBatch,
    ) -> Result<Inputs, TrainError> {
        let slots = part.first..part.first + part.rows;
        let mut inputs = Inputs::new();
        for (name, id) in wanted {
            let given = values.iter().find(|(known, _)| known == name);
            if name == "samples" {
                inputs.push((*id, HostTensor::Int(slots.clone().collect())));
                continue;
            }
            let tensor = self.graph.tensor(*id);
            let per_row = tensor.shape.per_row();
            let range = slots.start as usize * per_row..slots.end as usize * per_row;
            let fits = |length: usize| length == rows * per_row;
            let wrong =
                |why: String| Err(TrainError::InvalidRequest(format!("input {name} {why}")));
            match (given.map(|(_, values)| values), tensor.dtype) {
                (Some(HostTensor::Float(v)), DType::F32) if fits(v.len()) => {
                    inputs.push((*id, HostTensor::Float(v[range].to_vec())));
                }
                (Some(HostTensor::Int(v)), DType::U32) if fits(v.len()) => {
                    inputs.push((*id, HostTensor::Int(v[range].to_vec())));
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

    /// Two blocks with a parameter each.
    fn blocks() -> Graph {
        let mut b = Builder::new();
        b.block("first");
        let x = b.input("x", &[1, 2]);
        let w = b.parameter("w", &[2, 2], Init::Normal { std: 0.5 });
        let y = b.linear(x, w, None).unwrap();
        b.block("second");
        let v = b.parameter("v", &[2, 2], Init::Normal { std: 0.5 });
        let z = b.linear(y, v, None).unwrap();
        b.output("y", y);
        b.output("z", z);
        b.squared_error_loss(z, x).unwrap();
        b.finish()
    }

    #[test]
    fn a_pipeline_gives_the_bits_of_one_device_and_predicts_on_every_stage() {
        let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
        let trained = |devices: &str, stages: u32| {
            let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
            let options = TrainerOptions::new(devices, optimizer, 6);
            let options = TrainerOptions { micro_batch: 2, clip: 0.1, pipeline, ..options };
            let mut trainer = Trainer::new(blocks(), &options).unwrap();
            let values: Vec<f32> = (0..12).map(|i| (i as f32 * 0.7).sin()).collect();
            let x = HostTensor::Float(values);
            let steps: Vec<Step> =
                (0..5).map(|_| trainer.step(&[("x", x.clone())], 0.05).unwrap()).collect();
            let steps: Vec<_> = steps.iter().map(|s| (s.loss, s.gradient_norm)).collect();
            let parameters = trainer.parameters().unwrap();
            let values: Vec<Vec<f32>> = parameters.into_iter().map(|one| one.values).collect();
            let predicted =
                ["y", "z"].map(|output| trainer.predict(output, 6, &[("x", x.clone())]).unwrap());
            (steps, values, predicted)
        };
        let alone = trained("cpu", 1);
        assert_eq!(trained("cpu*2", 2), alone);
        assert_eq!(trained("cpu*4", 2).1.len(), 2);
        let stages = |stages| {
            let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
            let options = TrainerOptions { pipeline, ..TrainerOptions::new("cpu*3", optimizer, 6) };
            Trainer::new(blocks(), &options).map_or_else(|e| e.to_string(), |_| "trains".into())
        };
        assert!(stages(3).contains("2 blocks cannot be cut into 3 stages"), "{}", stages(3));
        assert!(stages(2).contains("a multiple of 2 devices"), "{}", stages(2));
    }

    #[test]
    fn what_cannot_be_trained_is_an_error() {
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let outcome = |graph: Graph, options: TrainerOptions| {
            Trainer::new(graph, &options).map_or_else(|e| e.to_string(), |_| "trains".into())
        };
        let options = |batch| TrainerOptions::new("cpu*2", optimizer, batch);
        let refused = |graph: Graph, batch: usize, micro_batch: usize| {
            outcome(graph, TrainerOptions { micro_batch, ..options(batch) })
        };
        assert_eq!(refused(graph(true), 4, 2), "trains");
        assert!(refused(graph(false), 4, 2).contains("no loss"));
        assert!(refused(graph(true), 0, 1).contains("at least 1"));
        assert!(refused(graph(true), 1, 0).contains("at least 1"));
        assert!(refused(graph(true), (1 << 32) + 1, 1).contains("below 2^32"));
        let shared = outcome(graph(true), TrainerOptions { shares: vec![4, 0], ..options(4) });
        assert!(shared.contains("shares must each be at least 1"), "{shared}");
        for clip in [-1.0, f64::NAN, f64::INFINITY] {
            let clipped = outcome(graph(true), TrainerOptions { clip, ..options(4) });
            assert!(clipped.contains("clip must be 0 (off) or a positive number"), "{clipped}");
        }
    }
}
