//! Harness of certification and of the kernel tests: runs dispatches on host data, with sentinels
//! after every output that reveal out-of-bounds writes.

use super::{BoundDispatch, CpuKernel, Dispatch, Float, OpCall, Pipelines};
use crate::base::rng::Key;
use crate::base::{DType, HostTensor, HostTensorView, Site};
use crate::device::{DeviceError, Gpu};
use crate::graph::IGNORE_INDEX;

/// Maximum normalized mean squared error (NMSE) at which f32 results agree with the f64
/// reference.
pub const NMSE_MAX: f64 = 1e-6;

/// Sentinel value after every output; any other value there was written out of bounds.
const SENTINEL: f32 = -12345.5;
const SENTINELS: usize = 64;

/// Error of a harness run.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    #[error("output {0} was written out of bounds")]
    OutOfBounds(usize),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Distribution of the values of an input.
#[derive(Clone, Copy, Debug)]
pub enum InputFill {
    /// Standard normal floats.
    Normal,
    /// Normal floats times a factor, plus an offset.
    Scaled(f32, f32),
    /// Uniform floats from the first number to the second.
    Uniform(f32, f32),
    /// Integers below a bound.
    Ids(u32),
    /// Integers below a bound, about one in five replaced by [`IGNORE_INDEX`].
    Targets(u32),
    /// 1000, 1001, ..: sample ids.
    Samples,
}

impl InputFill {
    /// Returns the element type of the input.
    pub fn dtype(self) -> DType {
        match self {
            Self::Normal | Self::Scaled(..) | Self::Uniform(..) => DType::F32,
            Self::Ids(_) | Self::Targets(_) | Self::Samples => DType::U32,
        }
    }
}

/// Returns `count` reproducible values; `which` selects the random stream, so that the inputs of
/// a call differ.
pub fn generate(fill: InputFill, count: usize, which: usize) -> HostTensor<f64> {
    let key = Key::new(42).site(Site(which as u32));
    let ids = |bound: u32| (0..count).map(move |i| key.words([i as u32, 7])[0] % bound);
    let normal = |i: usize| f64::from(key.normal(i as u64) as f32);
    match fill {
        InputFill::Normal => HostTensor::Float((0..count).map(normal).collect()),
        InputFill::Scaled(factor, offset) => HostTensor::Float(
            (0..count).map(|i| f64::from((normal(i) as f32).mul_add(factor, offset))).collect(),
        ),
        InputFill::Uniform(low, high) => HostTensor::Float(
            (0..count)
                .map(|i| f64::from((key.uniform(i as u64) as f32).mul_add(high - low, low)))
                .collect(),
        ),
        InputFill::Ids(bound) => HostTensor::Int(ids(bound).collect()),
        InputFill::Targets(bound) => HostTensor::Int(
            ids(5 * bound).map(|id| if id % 5 == 0 { IGNORE_INDEX } else { id / 5 }).collect(),
        ),
        InputFill::Samples => HostTensor::Int((0..count).map(|i| 1000 + i as u32).collect()),
    }
}

/// Runs a CPU kernel on the inputs and returns its outputs, whose elements are initialized to
/// `start`.
pub fn host<T: Float>(
    call: &OpCall,
    inputs: &[&HostTensor<f64>],
    start: T,
    function: CpuKernel<T>,
) -> Vec<Vec<T>> {
    let inputs: Vec<HostTensor<T>> = inputs.iter().map(|values| values.map(T::from_f64)).collect();
    let views: Vec<HostTensorView<T>> = inputs.iter().map(HostTensor::as_view).collect();
    let mut outputs: Vec<Vec<T>> =
        (0..call.outputs.len()).map(|i| vec![start; call.output_len(i)]).collect();
    let mut results: Vec<&mut [T]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
    function(call, &views, &mut results);
    outputs
}

/// Runs the dispatches of a call on a device and returns its outputs, whose elements are
/// initialized to `start`.
///
/// # Errors
/// Returns the same errors as [`run`].
pub fn run_call(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    call: &OpCall,
    dispatches: &[Dispatch],
    inputs: &[&HostTensor<f64>],
    start: f32,
) -> Result<Vec<Vec<f32>>, HarnessError> {
    let inputs: Vec<HostTensor> = inputs.iter().map(|values| values.map(|v| v as f32)).collect();
    let bytes: Vec<&[u8]> = inputs.iter().map(|values| values.as_view().bytes()).collect();
    let starts: Vec<Vec<f32>> =
        (0..call.outputs.len()).map(|i| vec![start; call.output_len(i)]).collect();
    run(gpu, pipelines, dispatches, &bytes, &starts)
}

/// Runs arbitrary dispatches on the bytes of each input and returns the resulting outputs. Each
/// output is initialized to its values in `starts`, followed by sentinels.
///
/// # Errors
/// Returns `HarnessError::OutOfBounds` if a sentinel was overwritten, and `HarnessError::Device`
/// if a shader does not compile or the device fails.
pub fn run(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    dispatches: &[Dispatch],
    inputs: &[&[u8]],
    starts: &[Vec<f32>],
) -> Result<Vec<Vec<f32>>, HarnessError> {
    let bytes = |start: &Vec<f32>| 4 * (start.len() + SENTINELS) as u64;
    let upload = |bytes: &&[u8]| upload_new(gpu, bytes);
    let inputs = inputs.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
    let mut outputs = Vec::with_capacity(starts.len());
    for start in starts {
        let initial = [start, &[SENTINEL; SENTINELS][..]].concat();
        outputs.push(upload_new(gpu, bytemuck::cast_slice(&initial))?);
    }
    let bound = BoundDispatch::of_buffers(gpu, pipelines, dispatches, &inputs, &outputs)?;
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for dispatch in &bound {
            dispatch.record(&mut pass);
        }
    }
    gpu.queue.submit([encoder.finish()]);
    let staging = gpu.readback(starts.iter().map(bytes).sum())?;
    let ranges: Vec<_> =
        outputs.iter().zip(starts).map(|(o, start)| (o, 0, bytes(start))).collect();
    let read: Vec<f32> = bytemuck::pod_collect_to_vec(&gpu.read(&staging, &ranges)?);
    let mut rest = &read[..];
    let mut results = Vec::with_capacity(starts.len());
    for (index, start) in starts.iter().enumerate() {
        let (values, behind) = rest.split_at(start.len());
        let (sentinels, others) = behind.split_at(SENTINELS);
        if sentinels.iter().any(|v| *v != SENTINEL) {
            return Err(HarnessError::OutOfBounds(index));
        }
        results.push(values.to_vec());
        rest = others;
    }
    Ok(results)
}

/// Creates a storage buffer of these bytes, with no more padding than its alignment needs.
pub fn upload_new(gpu: &Gpu, bytes: &[u8]) -> Result<wgpu::Buffer, DeviceError> {
    let buffer = gpu.storage("trial", bytes.len() as u64)?;
    gpu.upload(&buffer, 0, bytes);
    Ok(buffer)
}

/// Returns the normalized mean squared error: squared error divided by squared expectation. The
/// result is not finite if a value is not.
pub fn nmse(got: impl Iterator<Item = f64>, expected: &[f64]) -> f64 {
    let error: f64 = got.zip(expected).map(|(g, e)| (g - e).powi(2)).sum();
    let scale: f64 = expected.iter().map(|e| e * e).sum();
    if error == 0.0 { 0.0 } else { error / scale.max(1e-30) }
}
