//! Runs plans: [`gpu`] lowers them to dispatches, [`cpu`] calls the twins' CPU functions. Both
//! stand behind [`Executor`], which is what a worker drives; neither decides what comes next.

pub mod cpu;
mod fault;
pub mod gpu;
mod shards;
mod staging;
pub mod timing;

use std::ops::Range;

use crate::base::{BucketId, TensorId};
use crate::device::{DeviceError, Heartbeat, InjectedFault};
use crate::graph::{Graph, Node, Plan, Update, UpdateRange};
use crate::kernels::{OpCall, RandomContext};

pub use cpu::Cpu;
pub use gpu::GpuExecutor;
pub use staging::staging_bytes;
pub use timing::{KernelProfile, ProfileTarget};

/// Elements of a piece unless a run says otherwise: 1 MiB.
const READBACK_ELEMENTS_MAX: usize = 1 << 18;

/// Values for an input tensor.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    Float(&'a [f32]),
    Int(&'a [u32]),
}

/// What nodes run with.
#[derive(Clone, Copy, Debug)]
pub struct PassContext {
    /// Which copy of the stash: `micro_batch % in_flight`.
    pub stash_index: usize,
    /// Valid rows, at most the plan's capacity.
    pub rows: usize,
    pub random: RandomContext,
}

impl PassContext {
    /// A node of a graph as this pass runs it: with its rows put in.
    fn call<'a>(&self, graph: &Graph, node: &'a Node) -> OpCall<'a> {
        let dims = |ids: &[TensorId]| {
            ids.iter().map(|id| graph.tensor(*id).shape.resolve(self.rows)).collect()
        };
        OpCall {
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
pub enum BucketTensor {
    Parameters,
    Gradients,
    /// A running average of the optimizer.
    Moment(usize),
}

/// What the optimizer keeps on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moments {
    /// Running averages per parameter.
    pub count: usize,
    /// Per bucket: the elements that this device updates and keeps moments of; `None`: all. They
    /// start at multiples of 64 elements, end at one or with the bucket, and may be none.
    pub owned: Option<Vec<Range<usize>>>,
}

impl From<usize> for Moments {
    fn from(count: usize) -> Self {
        Self { count, owned: None }
    }
}

/// Values on their way from a device that have come: read-only, and where the device's memory can
/// be mapped, not copied. Dropping it frees its place in the device's ring.
pub struct Readback {
    pub bank: BucketTensor,
    pub bucket: BucketId,
    /// Elements of the bucket.
    pub range: Range<usize>,
    values: Box<dyn AsRef<[f32]> + Send + Sync>,
}

impl Readback {
    pub fn values(&self) -> &[f32] {
        (*self.values).as_ref()
    }
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
    fn heartbeat(&self) -> Heartbeat;

    /// Has a fault now: for tests.
    fn inject_fault(&mut self, fault: InjectedFault) -> Result<(), DeviceError>;

    /// Sets the first rows of an input, for one copy of the stash.
    fn set_input(
        &mut self,
        tensor: TensorId,
        stash_index: usize,
        values: Input,
    ) -> Result<(), DeviceError>;

    /// Zeroes gradients and the loss.
    fn begin_step(&mut self) -> Result<(), DeviceError>;

    /// Runs a range of the plan's nodes.
    fn run(&mut self, nodes: Range<usize>, pass: &PassContext) -> Result<(), DeviceError>;

    /// The sums of the step so far; `norms`: also those of the gradients, per bucket, which are
    /// of no use where gradients are summed over ranks. Waits.
    fn finish_step(&mut self, norms: bool) -> Result<StepSums, DeviceError>;

    /// The (sum, count) of the loss so far. Waits.
    fn loss(&mut self) -> Result<(f64, f64), DeviceError>;

    /// Updates a range of a bucket from its gradients, within what the device owns.
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
    fn read(&mut self, tensor: TensorId, pass: &PassContext) -> Result<Vec<f32>, DeviceError>;

    /// A whole bucket; of moments, the elements that the device [owns](Executor::owned). Waits.
    fn read_bank(&mut self, bank: BucketTensor, bucket: BucketId) -> Result<Vec<f32>, DeviceError>;

    /// The hash of a whole bucket as the device holds it (see [`crate::kernels::ops::hash`], from
    /// position 0), over the words of its floats as [`Executor::read_bank`] gives them: of moments,
    /// those of the owned elements. Waits.
    fn hash(&mut self, bank: BucketTensor, bucket: BucketId) -> Result<u64, DeviceError>;

    /// Replaces a whole bucket, as far as the bank holds it.
    fn write_bank(
        &mut self,
        bank: BucketTensor,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError>;

    /// Makes room for other moments, which start as zeros: before the first step, when it is known
    /// which devices take part.
    ///
    /// # Errors
    /// Too little memory; the device is of no use then.
    fn set_moments(&mut self, moments: Moments) -> Result<(), DeviceError>;

    /// The elements of a bucket that this device updates and keeps moments of.
    fn owned(&self, bucket: BucketId) -> Range<usize>;

    /// Begins to bring a range of a bucket to the host as it will be after what is queued. Never
    /// waits. Pieces come in the order in which they were begun ([`Executor::next_readback`]); a range
    /// comes in one piece, so it must be at most [`Executor::readback_elements_max`] long. What waits for
    /// a slot when its elements are about to change takes more memory.
    fn start_readback(
        &mut self,
        bank: BucketTensor,
        bucket: BucketId,
        range: Range<usize>,
    ) -> Result<(), DeviceError>;

    /// The next piece, if it has come; `wait`: or else waits for it, as long as its copy is under
    /// way on the device. A device with few free slots begins the copies that wait for one here.
    ///
    /// It never waits for whoever holds pieces: if all slots are taken by those, it gives `None`
    /// at once, though [something is wanted](Executor::is_reading). The caller may be the one who
    /// has to act before a piece is dropped; it asks again when one may have been. `None` also if
    /// nothing is wanted, or nothing has come and `wait` is not set.
    ///
    /// # Errors
    /// A device that fails, or does not get there within its deadline.
    fn next_readback(&mut self, wait: bool) -> Result<Option<Readback>, DeviceError>;

    /// Whether a read that was begun has not been taken yet.
    fn has_readbacks(&self) -> bool;

    /// The most elements of a piece.
    fn readback_elements_max(&self) -> usize;

    /// Replaces elements of a bucket from `start` on.
    fn write_range(
        &mut self,
        bank: BucketTensor,
        bucket: BucketId,
        start: usize,
        values: &[f32],
    ) -> Result<(), DeviceError>;

    /// Makes what [`Executor::add`] needs for chunks of these lengths, so that it makes nothing
    /// in a step.
    ///
    /// # Errors
    /// Too little memory; a kernel that is wrong on the device's driver.
    fn prepare_add(&mut self, _lengths: &[usize]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// `partial += gradients[start..]`, computed on the device. Waits.
    fn add(
        &mut self,
        bucket: BucketId,
        start: usize,
        partial: &mut [f32],
    ) -> Result<(), DeviceError>;

    /// Calls `then` when the device has done what is queued so far; at the latest in the next
    /// call that waits. Submits what is recorded.
    fn on_queue_done(&mut self, then: Box<dyn FnOnce() + Send>) -> Result<(), DeviceError>;

    /// Runs a part of a step alone and times it: by the device's clock, or where it has none, by
    /// repeating it, so that gradients and moments are worth nothing afterwards. `None` for nodes
    /// that move nothing. Waits.
    fn profile(
        &mut self,
        work: &ProfileTarget,
        pass: &PassContext,
    ) -> Result<Option<KernelProfile>, DeviceError>;
}
