//! Tasks that are performed where the device is: work whose time is measured, or whose data need
//! not cross a link to another node. Everything else that a device does is a call of its
//! [`Executor`], whichever node it is on.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::block_timing::{BlockTiming, time_block};
use super::open::initialize;
use super::step::Inputs;
use super::timing;
use crate::base::decode;
use crate::collective::Chunk;
use crate::device::DeviceError;
use crate::exec::Executor;
use crate::parallel::ReduceSite;

/// Task of one device, with its reply.
pub trait DeviceTask: Serialize + DeserializeOwned {
    /// Name on the wire.
    const NAME: &'static str;
    type Reply: Serialize + DeserializeOwned;

    /// Performs the task on a device of this process.
    ///
    /// # Errors
    /// Returns `DeviceError` if the device fails.
    fn perform(self, device: &mut dyn Executor) -> Result<Self::Reply, DeviceError>;
}

/// Performs a task on a device, in the process that has it.
///
/// # Errors
/// Returns `DeviceError` if the device or its node fails.
pub fn perform<T: DeviceTask>(device: &mut dyn Executor, task: T) -> Result<T::Reply, DeviceError> {
    let Some(remote) = device.remote() else { return task.perform(device) };
    let task = postcard::to_allocvec(&task).map_err(|why| unknown(T::NAME, &why))?;
    let reply = remote.perform(T::NAME, task)?;
    decode(&reply).map_err(|why| unknown(T::NAME, &why))
}

/// Performs a task that another node has sent.
///
/// # Errors
/// Returns `DeviceError` if the device fails, or for a task that this program does not know.
pub fn perform_named(
    device: &mut dyn Executor,
    name: &str,
    task: &[u8],
) -> Result<Vec<u8>, DeviceError> {
    fn one<T: DeviceTask>(device: &mut dyn Executor, task: &[u8]) -> Result<Vec<u8>, DeviceError> {
        let task: T = decode(task).map_err(|why| unknown(T::NAME, &why))?;
        let reply = task.perform(device)?;
        postcard::to_allocvec(&reply).map_err(|why| unknown(T::NAME, &why))
    }
    match name {
        Initialize::NAME => one::<Initialize>(device, task),
        TimeMicroBatch::NAME => one::<TimeMicroBatch>(device, task),
        TimeExchange::NAME => one::<TimeExchange>(device, task),
        TimeBlock::NAME => one::<TimeBlock>(device, task),
        FasterReduceSite::NAME => one::<FasterReduceSite>(device, task),
        _ => Err(unknown(name, &"there is no such task")),
    }
}

fn unknown(name: &str, why: &dyn std::fmt::Display) -> DeviceError {
    let (adapter, what) = ("the device".into(), format!("the task {name}"));
    DeviceError::Refused { adapter, what, why: why.to_string() }
}

/// Writes the initial parameters of a seed to the device.
#[derive(Clone, Copy, Debug, Serialize, serde::Deserialize)]
pub struct Initialize {
    pub seed: u64,
}

impl DeviceTask for Initialize {
    const NAME: &'static str = "initialize";
    type Reply = ();

    fn perform(self, device: &mut dyn Executor) -> Result<(), DeviceError> {
        initialize(device, self.seed)
    }
}

/// Times forward and backward passes of one micro-batch: returns the seconds of the fastest of
/// `repeats` repetitions, before which there is a warm-up if there are several.
#[derive(Clone, Debug, Serialize, serde::Deserialize)]
pub struct TimeMicroBatch {
    inputs: Inputs,
    rows: u32,
    repeats: u32,
}

impl TimeMicroBatch {
    /// Creates the task for these inputs of `rows` samples.
    pub fn new(inputs: Inputs, rows: u32, repeats: u32) -> Self {
        Self { inputs, rows, repeats }
    }
}

impl DeviceTask for TimeMicroBatch {
    const NAME: &'static str = "time a micro-batch";
    type Reply = f64;

    fn perform(self, device: &mut dyn Executor) -> Result<f64, DeviceError> {
        timing::fastest(device, &self.inputs, self.rows, self.repeats)
    }
}

/// Times the readback of all gradients and the upload of all parameters; returns seconds.
#[derive(Clone, Copy, Debug, Serialize, serde::Deserialize)]
pub struct TimeExchange;

impl DeviceTask for TimeExchange {
    const NAME: &'static str = "time an exchange";
    type Reply = f64;

    fn perform(self, device: &mut dyn Executor) -> Result<f64, DeviceError> {
        timing::exchange(device)
    }
}

/// Times the block that the device holds.
#[derive(Clone, Debug, Serialize, serde::Deserialize)]
pub struct TimeBlock {
    inputs: Inputs,
    rows: usize,
}

impl TimeBlock {
    /// Creates the task for these inputs of `rows` samples.
    pub fn new(inputs: Inputs, rows: usize) -> Self {
        Self { inputs, rows }
    }
}

impl DeviceTask for TimeBlock {
    const NAME: &'static str = "time a block";
    type Reply = BlockTiming;

    fn perform(self, device: &mut dyn Executor) -> Result<BlockTiming, DeviceError> {
        time_block(device, &self.inputs, self.rows)
    }
}

/// Prepares the device to add gradients to partial sums of these chunks, and returns where that is
/// faster.
#[derive(Clone, Debug, Serialize, serde::Deserialize)]
pub struct FasterReduceSite {
    pub chunks: Vec<Chunk>,
    /// Lengths that chunks have, in elements.
    pub lengths: Vec<usize>,
}

impl DeviceTask for FasterReduceSite {
    const NAME: &'static str = "time the addition of gradients";
    type Reply = ReduceSite;

    fn perform(self, device: &mut dyn Executor) -> Result<ReduceSite, DeviceError> {
        device.prepare_add(&self.lengths)?;
        timing::faster_reduce_site(device, &self.chunks)
    }
}
