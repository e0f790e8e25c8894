//! Runs plans: [`gpu`] lowers them to dispatches, [`cpu`] calls the twins' CPU functions. Both
//! stand behind [`Executor`], which is what a worker drives; neither decides what comes next.

pub mod cpu;
mod fault;
pub mod gpu;
pub mod timing;

use std::ops::Range;

use crate::base::{BucketId, TensorId};
use crate::device::{DeviceError, Injected, Pulse};
use crate::graph::{Graph, Node, Plan, Update, UpdateRange};
use crate::kernels::{Call, Random};

pub use cpu::Cpu;
pub use gpu::GpuExecutor;
pub use timing::{Timing, Work};

/// Values for an input tensor.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    Float(&'a [f32]),
    Int(&'a [u32]),
}

/// What nodes run with.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Which copy of the stash: `micro_batch % in_flight`.
    pub copy: usize,
    /// Valid rows, at most the plan's capacity.
    pub rows: usize,
    pub random: Random,
}

impl Pass {
    /// A node of a graph as this pass runs it: with its rows put in.
    fn call<'a>(&self, graph: &Graph, node: &'a Node) -> Call<'a> {
        let dims = |ids: &[TensorId]| {
            ids.iter().map(|id| graph.tensor(*id).shape.resolve(self.rows)).collect()
        };
        Call {
            op: &node.op,
            inputs: dims(&node.inputs),
            outputs: dims(&node.outputs),
            accumulate: node.accumulate,
            random: self.random,
        }
    }
}

/// The buffers that a bucket has on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bank {
    Parameters,
    Gradients,
    /// A running average of the optimizer.
    Moment(usize),
}

/// What a device reports after the backward passes of a step: sums over its micro-batches.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSums {
    pub loss: f64,
    /// Rows (targets) that the loss counts.
    pub count: f64,
    /// Per bucket: the sum of squares of the gradient sums, and how many are not finite.
    pub gradients: Vec<(f64, u64)>,
    /// The share of the time since the last report (or since the step began, if something else
    /// was read in between) in which the device was busy, by its own clock; `None` without one.
    pub busy: Option<f64>,
}

/// A device that holds a plan: its parameters, gradients, moments and activations.
///
/// Calls are queued in order; those that return values wait for the device.
pub trait Executor: Send {
    /// The device's name, for people.
    fn name(&self) -> &str;

    fn plan(&self) -> &Plan;

    /// Its signs of life, for whoever waits for it.
    fn pulse(&self) -> Pulse;

    /// Has a fault now: for tests.
    fn fault(&mut self, fault: Injected) -> Result<(), DeviceError>;

    /// Sets the first rows of an input, for one copy of the stash.
    fn set_input(
        &mut self,
        tensor: TensorId,
        copy: usize,
        values: Input,
    ) -> Result<(), DeviceError>;

    /// Zeroes gradients and the loss.
    fn begin_step(&mut self) -> Result<(), DeviceError>;

    /// Runs a range of the plan's nodes.
    fn run(&mut self, nodes: Range<usize>, pass: &Pass) -> Result<(), DeviceError>;

    /// The sums of the step so far. Waits.
    fn finish_step(&mut self) -> Result<StepSums, DeviceError>;

    /// The (sum, count) of the loss so far. Waits.
    fn loss(&mut self) -> Result<(f64, f64), DeviceError>;

    /// Updates a range of a bucket from its gradients.
    fn update(
        &mut self,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<(), DeviceError>;

    /// Starts whatever is queued and not started. Waits are not needed for that: this is for the
    /// end of a step, so that the device works while the host prepares the next.
    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The float values of an activation as the last node left it. Waits.
    fn read(&mut self, tensor: TensorId, pass: &Pass) -> Result<Vec<f32>, DeviceError>;

    /// A whole bucket. Waits.
    fn read_bank(&mut self, bank: Bank, bucket: BucketId) -> Result<Vec<f32>, DeviceError>;

    /// The hash of a whole bucket as the device holds it (see [`crate::kernels::hash`], from
    /// position 0), over the words of its floats as [`Executor::read_bank`] gives them. Waits.
    fn hash(&mut self, bank: Bank, bucket: BucketId) -> Result<u64, DeviceError>;

    /// Replaces a whole bucket.
    fn write_bank(
        &mut self,
        bank: Bank,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError>;

    /// Runs a part of a step alone and times it: by the device's clock, or where it has none, by
    /// repeating it, so that gradients and moments are worth nothing afterwards. `None` for nodes
    /// that move nothing. Waits.
    fn time(&mut self, work: &Work, pass: &Pass) -> Result<Option<Timing>, DeviceError>;
}
