//! Executors of plans on devices: [`gpu`] lowers nodes to dispatches, [`cpu`] calls the twins' CPU
//! functions. Both implement [`Executor`], the interface that a worker calls; the worker decides
//! the order of the calls.

mod block_timing;
pub mod cpu;
mod fault;
pub mod gpu;
mod loss_count;
mod shards;
mod staging;
pub mod timing;
mod work_timing;

use std::borrow::Cow;
use std::io;
use std::ops::Range;

use crate::call::resolved_dims;
use crate::device::{DeviceError, Heartbeat};
use crate::{Cost, OpCall, RandomContext, bf16_words, twin};
use potluck_core::faults::InjectedFault;
use potluck_core::{BucketId, DType, HostTensor, HostTensorView, SlotId, TensorId};
use potluck_graph::{
    Graph, MomentFormat, Node, Plan, Region, TensorLocation, Update, UpdateRange, init,
};

pub use block_timing::BlockTiming;
pub use cpu::Cpu;
pub use gpu::GpuExecutor;
pub use potluck_graph::BucketTensor;
pub use shards::Shards;
pub use staging::{RING_BYTES, host_staging_bytes, staging_bytes};
pub use timing::{KernelProfile, ProfileTarget};

/// Default for the most elements of one readback: 1 MiB.
const READBACK_ELEMENTS_MAX: usize = 1 << 18;

/// Context in which nodes run: micro-batch, rows, loss scale and random state.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub struct PassContext {
    /// Number of the micro-batch in the step, which uses copy `micro_batch % copies` of each slot.
    pub micro_batch: usize,
    /// Valid rows, at most the plan's capacity.
    pub rows: usize,
    /// Factor of the gradient of the graph's loss, and so of all gradients: a power of two, 1 in
    /// f32.
    pub loss_scale: f32,
    pub random: RandomContext,
}

impl PassContext {
    /// Returns the op call of a node of a graph, with its shapes resolved for the rows of this
    /// pass.
    pub fn call<'a>(&self, graph: &Graph, node: &'a Node) -> OpCall<'a> {
        OpCall {
            op: &node.op,
            inputs: resolved_dims(graph, &node.inputs, self.rows),
            outputs: resolved_dims(graph, &node.outputs, self.rows),
            accumulate: node.accumulate,
            precision: node.precision,
            loss_scale: if node.is_loss_gradient { self.loss_scale } else { 1.0 },
            random: self.random,
        }
    }

    /// Returns the cost of a node of a graph in this pass; `None` if it moves no data or does not
    /// run.
    pub fn cost(&self, graph: &Graph, node: &Node) -> Option<Cost> {
        if !node.when.includes(self.random.training) {
            return None;
        }
        Some((twin(&node.op)?.cost)(&self.call(graph, node)))
    }
}

/// Number of copies of a tensor's slot; 0 if it is in no slot.
fn copies(plan: &Plan, tensor: TensorId) -> usize {
    match plan.place(tensor) {
        TensorLocation::Slot(slot) => plan.slots[slot.index()].copies,
        _ => 0,
    }
}

/// Returns the slot of a tensor in which a transfer reads or writes `range`.
///
/// # Panics
/// If the tensor does not hold floats in a slot, or has fewer elements at the plan's capacity.
fn slot_of(plan: &Plan, tensor: TensorId, range: &Range<usize>) -> SlotId {
    let found = plan.graph.tensor(tensor);
    let TensorLocation::Slot(slot) = plan.place(tensor) else { panic!("{tensor} is in no slot") };
    assert_eq!(found.dtype, DType::F32, "{tensor} is not of floats");
    let count = found.shape.elements(plan.options.rows);
    assert!(range.end <= count, "{range:?} of {tensor}, which has {count} elements");
    slot
}

/// Optimizer state of a device: number of moments, and the shard of each bucket that it covers.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Moments {
    /// Running averages per parameter.
    pub count: usize,
    /// Shard of each bucket: the elements that this device updates and for which it keeps moments;
    /// `None`: whole buckets. A shard starts at a multiple of 64 elements, ends at a multiple or at
    /// the end of its bucket, and may be empty.
    pub owned: Option<Vec<Range<usize>>>,
}

impl From<usize> for Moments {
    fn from(count: usize) -> Self {
        Self { count, owned: None }
    }
}

/// Checks that a range rounds moments exactly if a device with this plan keeps them in bf16.
///
/// # Panics
/// If the range and the plan disagree.
fn check_rounding(plan: &Plan, update: &Update, range: &UpdateRange) {
    let rounds = plan.options.moments == MomentFormat::Bf16 && update.moments() > 0;
    assert_eq!(range.rounding.is_some(), rounds, "ranges come from Plan::update_ranges");
}

/// Checks that a bucket tensor is in f32 on a device with this plan, so that its parts can be read
/// and written.
///
/// # Panics
/// If it is in bf16.
fn check_parts(plan: &Plan, bucket_tensor: BucketTensor) {
    let format = plan.options.moments.of_bucket_tensor(bucket_tensor);
    assert_eq!(
        format,
        MomentFormat::F32,
        "{bucket_tensor} is read by read_bucket, written by write_bucket"
    );
}

/// Returns the words from which a device with this plan has read values of a bucket tensor; `None`
/// if there are no such words.
pub fn bucket_words<'a>(
    plan: &Plan,
    bucket_tensor: BucketTensor,
    values: &'a [f32],
) -> Option<Cow<'a, [u32]>> {
    match plan.options.moments.of_bucket_tensor(bucket_tensor) {
        MomentFormat::F32 => Some(Cow::Borrowed(bytemuck::cast_slice(values))),
        MomentFormat::Bf16 => bf16_words::words_of(values).map(Cow::Owned),
    }
}

/// Completed readback of a place: read-only values in host memory, not copied where
/// the device's memory can be mapped. Dropping it frees its slot on the device.
pub struct Readback {
    pub place: Region,
    values: Box<dyn AsRef<[f32]> + Send + Sync>,
}

impl Readback {
    /// Creates the readback of a place from its values.
    pub fn new(place: Region, values: Vec<f32>) -> Self {
        Self { place, values: Box::new(values) }
    }

    pub fn values(&self) -> &[f32] {
        (*self.values).as_ref()
    }
}

impl AsRef<[f32]> for Readback {
    fn as_ref(&self) -> &[f32] {
        self.values()
    }
}

/// Sums of the loss of a device over micro-batches.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LossSums {
    pub loss: f64,
    /// Elements (squared error) or targets (cross-entropy) that the loss sums: exact.
    pub count: f64,
    /// Sums of the terms of the loss that are reported by name.
    pub terms: Vec<f64>,
}

impl LossSums {
    /// Adds other sums, which have as many terms; sums over nothing may have none.
    pub fn add(&mut self, other: &Self) {
        self.loss += other.loss;
        self.count += other.count;
        self.terms.resize(self.terms.len().max(other.terms.len()), 0.0);
        for (term, more) in self.terms.iter_mut().zip(&other.terms) {
            *term += more;
        }
    }

    /// Returns the means of the terms over the count.
    pub fn means_of_terms(&self) -> Vec<f64> {
        self.terms.iter().map(|term| term / self.count).collect()
    }
}

/// Report of a device after the backward passes of a step: sums over its micro-batches.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct StepSums {
    pub loss: LossSums,
    /// Per requested bucket: the sum of squares of the gradient sums, and the number of gradient
    /// sums that are not finite.
    pub gradients: Vec<(f64, u64)>,
    /// Fraction of the time since the last report (or since the step began, if another read came
    /// in between) in which the device was busy, by its own clock; `None` without a clock.
    pub busy: Option<f64>,
}

/// Memory that a device has allocated, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AllocatedBytes {
    /// All tensors: parameters, gradients, moments, activations, inputs and the loss.
    pub tensors: usize,
    /// The most that readbacks have taken at once so far.
    pub staging_peak: usize,
}

/// Writes the inputs of a micro-batch, by its number in the step.
///
/// # Errors
/// Returns [`DeviceError`] if the device fails.
pub fn load(
    device: &mut (impl Executor + ?Sized),
    inputs: &[(TensorId, HostTensor)],
    micro_batch: usize,
) -> Result<(), DeviceError> {
    for (tensor, values) in inputs {
        device.set_input(*tensor, micro_batch, values.as_view())?;
    }
    Ok(())
}

/// Executor of a plan on one device, which holds the parameters, gradients, moments and
/// activations.
///
/// Calls are queued in order; calls that return values wait for the device.
///
/// A bucket that the plan does not hold ([`Plan::holds`]) is empty on the device, and no elements
/// of it are owned. Requests for some of its elements or for their norm are defects, and panic.
pub trait Executor: Send {
    /// Returns the display name of the device.
    fn name(&self) -> &str;

    fn plan(&self) -> &Plan;

    /// Returns the device's own thread pool, if it computes on one: all other calls come from one
    /// of its threads.
    ///
    /// # Errors
    /// Returns the system's error if it has no more threads.
    fn thread_pool(&self) -> io::Result<Option<rayon::ThreadPool>> {
        Ok(None)
    }

    /// Returns the heartbeat of the device, for a watchdog in another thread.
    fn heartbeat(&self) -> Heartbeat;

    /// Injects a fault into the device, for tests.
    fn inject_fault(&mut self, fault: InjectedFault) -> Result<(), DeviceError>;

    /// Returns the memory that the device has allocated; `None` if it does not count it.
    fn allocated(&self) -> Option<AllocatedBytes> {
        None
    }

    /// Returns the seconds of the longest submission in the steps that were finished, by the
    /// device's clock; `None` without one.
    fn longest_submission(&self) -> Option<f64> {
        None
    }

    /// Writes the first rows of an input tensor, in the copy of a micro-batch. An input without a
    /// place is ignored.
    fn set_input(
        &mut self,
        tensor: TensorId,
        micro_batch: usize,
        values: HostTensorView,
    ) -> Result<(), DeviceError>;

    /// Zeroes gradients and the loss.
    fn begin_step(&mut self) -> Result<(), DeviceError>;

    /// Runs a range of the plan's nodes.
    fn run(&mut self, nodes: Range<usize>, pass: &PassContext) -> Result<(), DeviceError>;

    /// Returns the sums of the step so far, with the sums of the gradients of the buckets `norms`,
    /// in this order, which are of no use for gradients that are summed over ranks. Waits for the
    /// device.
    ///
    /// # Panics
    /// If the device does not hold the gradients of one of the buckets.
    fn finish_step(&mut self, norms: &[BucketId]) -> Result<StepSums, DeviceError>;

    /// Returns the sums of the loss so far; the count is exact. Waits for the device.
    fn loss(&mut self) -> Result<LossSums, DeviceError>;

    /// Applies an optimizer update to a range of a bucket from its gradients, within the shard
    /// that the device owns. The range is one of [`Plan::update_ranges`].
    fn update(
        &mut self,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<(), DeviceError>;

    /// Moves the averages of elements of a bucket, within the shard that the device owns, by
    /// `weight` of their distance to the parameters (see [`Update::of_average`]).
    ///
    /// # Panics
    /// If the plan keeps no averages.
    fn average(
        &mut self,
        bucket: BucketId,
        elements: Range<usize>,
        weight: f32,
    ) -> Result<(), DeviceError>;

    /// Submits the commands that are recorded and not submitted. Calls that wait do this
    /// themselves; at the end of a step it lets the device work while the host prepares the next
    /// step.
    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Returns the float values of an activation as the last node left them. Waits for the device.
    fn read(&mut self, tensor: TensorId, pass: &PassContext) -> Result<Vec<f32>, DeviceError> {
        let count = self.plan().graph.tensor(tensor).shape.elements(pass.rows);
        self.read_parts(tensor, std::slice::from_ref(&(0..count)), pass)
    }

    /// Returns parts of an activation, ranges of its elements, one after the other; see
    /// [`Executor::read`]. Only these elements are copied from the device.
    ///
    /// # Panics
    /// If a range ends past the elements of the pass.
    fn read_parts(
        &mut self,
        tensor: TensorId,
        parts: &[Range<usize>],
        pass: &PassContext,
    ) -> Result<Vec<f32>, DeviceError>;

    /// Returns a whole bucket; for moments and averages, the elements that the device
    /// [owns](Executor::owned), in f32 for every [`potluck_graph::MomentFormat`] of the plan. Waits
    /// for the device.
    fn read_bucket(
        &mut self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
    ) -> Result<Vec<f32>, DeviceError>;

    /// Returns the hash of a whole bucket as the device holds it (see [`crate::ops::hash`], from
    /// position 0), over the words of the values that [`Executor::read_bucket`] returns (see
    /// [`bucket_words`]): for moments, the owned elements only. Waits for the device.
    fn hash(&mut self, bucket_tensor: BucketTensor, bucket: BucketId) -> Result<u64, DeviceError>;

    /// Replaces a whole bucket; for moments and averages, the owned elements. Moments are rounded
    /// to nearest if the plan keeps them in bf16.
    fn write_bucket(
        &mut self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError>;

    /// Replaces the optimizer state, with the averages, by `moments`, initialized to zero. Must be
    /// called before the first step, once the devices that take part are known.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory; no method may be called after that.
    fn set_moments(&mut self, moments: Moments) -> Result<(), DeviceError>;

    /// Returns the elements of a bucket that this device updates and for which it keeps moments.
    fn owned(&self, bucket: BucketId) -> Range<usize>;

    /// Starts an asynchronous readback of a place, with the values that it has after all queued
    /// commands. Never waits. Readbacks are returned in the order in which they were
    /// started ([`Executor::next_readback`]); each has at most [`Executor::readback_elements_max`]
    /// elements. A readback that still waits for a slot when its elements are about to change
    /// takes additional memory.
    ///
    /// # Panics
    /// If the device does not hold the place, or holds it in bf16.
    fn start_readback(&mut self, place: Region) -> Result<(), DeviceError>;

    /// Returns the next completed readback, if there is one; with `wait`, waits for it while its
    /// copy is in flight on the device. A device with few free slots records the copies that wait
    /// for a slot here.
    ///
    /// Deadlock avoidance: this method never waits for a [`Readback`] to be dropped. If readbacks
    /// that are not dropped yet take all slots, it returns `None` at once even though
    /// `has_readbacks` returns true, because the caller may have to act before one can be dropped;
    /// the caller calls again when one may have been dropped. It also returns `None` if no
    /// readback was started, or if none has completed and `wait` is not set.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails or misses its deadline.
    fn next_readback(&mut self, wait: bool) -> Result<Option<Readback>, DeviceError>;

    /// Returns true if a readback was started and has not been taken yet.
    fn has_readbacks(&self) -> bool;

    /// Returns the most elements that one readback may have.
    fn readback_elements_max(&self) -> usize;

    /// Replaces the elements of a place.
    ///
    /// # Panics
    /// If the device does not hold the place, or holds it in bf16, or if the numbers of values and
    /// elements differ.
    fn write_place(&mut self, place: &Region, values: &[f32]) -> Result<(), DeviceError>;

    /// Prepares [`Executor::add`] for chunks of these lengths, so that it allocates nothing in a
    /// step.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if a kernel fails certification
    /// on the device's driver.
    fn prepare_add(&mut self, _lengths: &[usize]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Computes `partial += gradients[start..]` on the device. Waits for the device.
    fn add(
        &mut self,
        bucket: BucketId,
        start: usize,
        partial: &mut [f32],
    ) -> Result<(), DeviceError>;

    /// Submits the recorded commands and registers the callback `then`, which runs when the device
    /// has completed everything queued so far, at the latest in the next call that waits.
    fn on_queue_done(&mut self, then: Box<dyn FnOnce() + Send>) -> Result<(), DeviceError>;

    /// Profiles one part of a step by itself: times it by the device's clock or, without one, by
    /// repeating it. Gradients and moments are invalid afterwards. `None` for nodes that move no
    /// data. Waits for the device.
    fn profile(
        &mut self,
        work: &ProfileTarget,
        pass: &PassContext,
    ) -> Result<Option<KernelProfile>, DeviceError>;

    // ---- Work of many calls, performed in the process of the device ----

    /// Writes the initial parameters of a seed; moments start as zeros.
    fn initialize(&mut self, seed: u64) -> Result<(), DeviceError> {
        for bucket in 0..self.plan().buckets.len() {
            let plan = self.plan();
            if !plan.held[bucket] {
                continue;
            }
            let mut values = vec![0.0; plan.buckets[bucket].length];
            for &(id, start) in &plan.buckets[bucket].parameters {
                let initial = init::values(&plan.graph, id, seed);
                values[start..start + initial.len()].copy_from_slice(&initial);
            }
            self.write_bucket(BucketTensor::Parameters, BucketId(bucket as u32), &values)?;
        }
        Ok(())
    }

    /// Returns the seconds of the fastest of `repeats` repetitions of forward and backward on
    /// these inputs of `rows` samples, including the wait for their end. If there are several, one
    /// more comes before as a warm-up.
    fn time_micro_batch(
        &mut self,
        inputs: &[(TensorId, HostTensor)],
        rows: u32,
        repeats: u32,
    ) -> Result<f64, DeviceError> {
        work_timing::fastest(self, inputs, rows, repeats)
    }

    /// Returns the seconds to read all gradients back to the host, and to upload all parameters;
    /// their values do not change.
    fn time_exchange(&mut self) -> Result<(f64, f64), DeviceError> {
        work_timing::exchange(self)
    }

    /// Returns the seconds to update one parameter of the device's shard; zero without any.
    /// Gradients are zero and moments are invalid afterwards.
    fn time_update(&mut self, update: &Update) -> Result<f64, DeviceError> {
        work_timing::update(self, update)
    }

    /// Times the passes of each block that the device holds for a micro-batch of these inputs of
    /// `rows` samples, and the transfers of the tensors from other blocks: the fastest of `repeats`
    /// repetitions after one warm-up. The duration of a wait for an idle device is subtracted.
    /// Returns an entry per block of the model; those of other blocks are zero.
    fn time_blocks(
        &mut self,
        inputs: &[(TensorId, HostTensor)],
        rows: usize,
        repeats: u32,
    ) -> Result<Vec<BlockTiming>, DeviceError> {
        block_timing::time_blocks(self, inputs, rows, repeats)
    }

    /// Returns the seconds to add gradients of a bucket to partial sums on the host and on the
    /// device, for which [`Executor::prepare_add`] has prepared it.
    fn time_addition(
        &mut self,
        bucket: BucketId,
        range: Range<usize>,
    ) -> Result<(f64, f64), DeviceError> {
        work_timing::addition(self, bucket, range)
    }
}
