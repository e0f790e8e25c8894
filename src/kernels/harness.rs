//! Harness of certification and of the kernel tests: runs dispatches on host data, with sentinels
//! after every output that reveal out-of-bounds writes.

use std::fmt;

use super::bind::CallBuffers;
use super::dispatch::{scratch_bytes, workspace_bytes};
use super::{BoundDispatch, CpuKernel, Dispatch, Float, OpCall, Pipelines};
use crate::bf16_words::to_nearest;
use crate::device::{DeviceError, Gpu};
use potluck_core::rng::Key;
use potluck_core::{DType, HostTensor, HostTensorView, Site};
use potluck_graph::IGNORE_INDEX;

/// Maximum normalized mean squared error (NMSE) at which f32 results agree with the f64 reference
/// at all. Errors of f32 arithmetic are far below it: see `autotune::certify`.
pub(crate) const NMSE_MAX: f64 = 1e-6;

/// Initial value of the elements of outputs to which a call adds. Kernels that replace an output
/// must not read it; an initial NaN reveals that.
pub(crate) const ADDED_TO: f64 = 0.25;

/// Sentinel value after every output; any other value there was written out of bounds.
const SENTINEL: f32 = -12345.5;
const SENTINELS: usize = 64;

/// Error of a harness run.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    #[error("output {0} was written out of bounds")]
    OutOfBounds(usize),
    #[error("workspace was written out of bounds")]
    WorkspaceOutOfBounds,
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
    /// Whole numbers below a bound, as floats.
    Whole(u32),
    /// Normal floats at even places, and zeros at odd ones.
    EvenPlaces,
    /// Words of two normal floats in bfloat16, as the floats that have their bits.
    Bf16Words,
    /// Integers below a bound.
    Ids(u32),
    /// Integers below a bound, about one in five replaced by [`IGNORE_INDEX`].
    Targets(u32),
    /// Descending integers below a bound, one in five and all after 0 replaced by [`IGNORE_INDEX`].
    Places(u32),
    /// 1000, 1001, ..: sample ids.
    Samples,
}

impl InputFill {
    /// Returns the element type of the input.
    pub fn dtype(self) -> DType {
        match self {
            Self::Normal | Self::Scaled(..) | Self::Uniform(..) | Self::Whole(_) => DType::F32,
            Self::EvenPlaces | Self::Bf16Words => DType::F32,
            Self::Ids(_) | Self::Targets(_) | Self::Places(_) | Self::Samples => DType::U32,
        }
    }
}

/// Returns `count` reproducible values; `which` selects the random stream, so that the inputs of
/// a call differ.
pub fn generate(fill: InputFill, count: usize, which: usize) -> HostTensor<f64> {
    let key = Key::new(42).site(Site(which as u32));
    match fill {
        InputFill::Normal => floats(count, |i| key.normal(i as u64) as f32),
        InputFill::Scaled(factor, offset) => {
            floats(count, |i| (key.normal(i as u64) as f32).mul_add(factor, offset))
        }
        InputFill::Uniform(low, high) => {
            floats(count, |i| (key.uniform(i as u64) as f32).mul_add(high - low, low))
        }
        InputFill::EvenPlaces => {
            floats(count, |i| if i % 2 == 0 { key.normal(i as u64) as f32 } else { 0.0 })
        }
        InputFill::Bf16Words => {
            let values: Vec<f32> = (0..2 * count).map(|i| key.normal(i as u64) as f32).collect();
            let words = to_nearest(&values);
            floats(count, |i| f32::from_bits(words[i]))
        }
        InputFill::Whole(bound) => {
            HostTensor::Float((0..count).map(|i| f64::from(id_below(key, i, bound))).collect())
        }
        InputFill::Ids(bound) => ints(count, |i| id_below(key, i, bound)),
        InputFill::Targets(bound) => ints(count, |i| {
            let id = id_below(key, i, 5 * bound);
            if id.is_multiple_of(5) { IGNORE_INDEX } else { id / 5 }
        }),
        InputFill::Places(bound) => ints(count, |i| {
            let is_ignored = i % 5 == 3 || i as u32 >= bound;
            if is_ignored { IGNORE_INDEX } else { bound - 1 - i as u32 }
        }),
        InputFill::Samples => ints(count, |i| 1000 + i as u32),
    }
}

fn floats(count: usize, value: impl Fn(usize) -> f32) -> HostTensor<f64> {
    HostTensor::Float((0..count).map(|i| f64::from(value(i))).collect())
}

fn ints(count: usize, value: impl Fn(usize) -> u32) -> HostTensor<f64> {
    HostTensor::Int((0..count).map(value).collect())
}

fn id_below(key: Key, index: usize, bound: u32) -> u32 {
    key.words([index as u32, 7])[0] % bound
}

/// Returns the initial values of the outputs of a call: `added_to` in outputs to which it adds, and
/// `start` in others.
fn initial_outputs<T: Copy>(call: &OpCall, start: T, added_to: T) -> Vec<Vec<T>> {
    let mut outputs = Vec::with_capacity(call.outputs.len());
    for index in 0..call.outputs.len() {
        let initial = if call.accumulate.has(index) { added_to } else { start };
        outputs.push(vec![initial; call.output_len(index)]);
    }
    outputs
}

/// Runs a CPU kernel on the inputs and returns its outputs, whose elements are initialized to
/// `start`, or to [`ADDED_TO`] if the call adds to them.
pub fn host<T: Float>(
    call: &OpCall,
    inputs: &[&HostTensor<f64>],
    start: T,
    function: CpuKernel<T>,
) -> Vec<Vec<T>> {
    let inputs: Vec<HostTensor<T>> = inputs.iter().map(|values| values.map(T::from_f64)).collect();
    let views: Vec<HostTensorView<T>> = inputs.iter().map(HostTensor::as_view).collect();
    let mut outputs = initial_outputs(call, start, T::from_f64(ADDED_TO));
    let mut results: Vec<&mut [T]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
    function(call, &views, &mut results);
    outputs
}

/// Runs the dispatches of a call on a device and returns its outputs, whose elements are
/// initialized to `start`, or to [`ADDED_TO`] if the call adds to them.
///
/// # Errors
/// Returns the same errors as [`run`].
pub(crate) fn run_call(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    call: &OpCall,
    dispatches: &[Dispatch],
    inputs: &[&HostTensor<f64>],
    start: f32,
) -> Result<Vec<Vec<f32>>, HarnessError> {
    let inputs: Vec<HostTensor> = inputs.iter().map(|values| values.map(|v| v as f32)).collect();
    let bytes: Vec<&[u8]> = inputs.iter().map(|values| values.as_view().bytes()).collect();
    let starts = initial_outputs(call, start, ADDED_TO as f32);
    run(gpu, pipelines, dispatches, &bytes, &starts)
}

/// Runs arbitrary dispatches on the bytes of each input and returns the resulting outputs. Each
/// output is initialized to its values in `starts`, followed by sentinels; workspace to NaN,
/// which a kernel that reads before it writes carries into its results. Folded grids run in parts,
/// like long dispatches.
///
/// # Errors
/// Returns `HarnessError::OutOfBounds` or `HarnessError::WorkspaceOutOfBounds` if a sentinel was
/// overwritten, and `HarnessError::Device` if a shader does not compile or the device fails.
pub fn run(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    dispatches: &[Dispatch],
    inputs: &[&[u8]],
    starts: &[Vec<f32>],
) -> Result<Vec<Vec<f32>>, HarnessError> {
    let mut uploaded = Vec::with_capacity(inputs.len());
    for bytes in inputs {
        uploaded.push(upload_new(gpu, bytes)?);
    }
    let mut outputs = Vec::with_capacity(starts.len());
    for start in starts {
        let initial = [start, &[SENTINEL; SENTINELS][..]].concat();
        outputs.push(upload_new(gpu, bytemuck::cast_slice(&initial))?);
    }
    let workspace_words = workspace_bytes(dispatches).div_ceil(4);
    let scratch_words = scratch_bytes(dispatches).div_ceil(4);
    let between = CallBuffers {
        workspace: upload_nan(gpu, workspace_words)?,
        scratch: upload_nan(gpu, scratch_words)?,
    };
    let buffers = [&uploaded[..], &outputs[..]];
    let bound = BoundDispatch::handing_on(gpu, pipelines, dispatches, buffers, &between)?;
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for (dispatch, bound) in dispatches.iter().zip(&bound) {
            record(dispatch, bound, &mut pass);
        }
    }
    gpu.queue.submit([encoder.finish()]);
    let mut ranges = Vec::with_capacity(outputs.len() + 2);
    for (output, start) in outputs.iter().zip(starts) {
        ranges.push((output, 0, (DType::F32.bytes() * (start.len() + SENTINELS)) as u64));
    }
    let sentinel_bytes = (DType::F32.bytes() * SENTINELS) as u64;
    ranges.push((&between.workspace, 4 * workspace_words as u64, sentinel_bytes));
    ranges.push((&between.scratch, 4 * scratch_words as u64, sentinel_bytes));
    let staging = gpu.readback(ranges.iter().map(|(_, _, bytes)| bytes).sum())?;
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
    if rest.iter().any(|v| *v != SENTINEL) {
        return Err(HarnessError::WorkspaceOutOfBounds);
    }
    Ok(results)
}

/// Returns a buffer of NaNs, followed by sentinels.
fn upload_nan(gpu: &Gpu, words: usize) -> Result<wgpu::Buffer, DeviceError> {
    let nan = [vec![f32::NAN; words], vec![SENTINEL; SENTINELS]].concat();
    upload_new(gpu, bytemuck::cast_slice(&nan))
}

/// Records a dispatch; a folded one in two or more parts.
fn record(dispatch: &Dispatch, bound: &BoundDispatch, pass: &mut wgpu::ComputePass) {
    let workgroups = bound.workgroups();
    if dispatch.groups[1] == 1 || !bound.can_split() {
        return bound.record(pass);
    }
    let mut first = 0;
    while first < workgroups {
        let part = bound.part(first, workgroups / 2);
        bound.record_part(pass, &part);
        first = part.end;
    }
}

/// Creates a storage buffer of these bytes, with no more padding than its alignment needs.
pub fn upload_new(gpu: &Gpu, bytes: &[u8]) -> Result<wgpu::Buffer, DeviceError> {
    let buffer = gpu.storage("trial", bytes.len() as u64)?;
    gpu.upload(&buffer, 0, bytes);
    Ok(buffer)
}

/// Deviation of results from the results of the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Deviation {
    /// Normalized mean squared error: squared error divided by squared expectation. Not finite if a
    /// value is not.
    pub nmse: f64,
    /// The largest error of an element, over the root mean square of the expected values.
    pub element: f64,
}

impl Deviation {
    /// Deviation of wrong results that must be exact.
    pub(crate) const WRONG: Self = Self { nmse: f64::INFINITY, element: f64::INFINITY };

    /// Returns the deviation of values from the expected ones.
    pub fn of(got: impl Iterator<Item = f64>, expected: &[f64]) -> Self {
        Self::of_scale(got.zip(expected).map(|(got, expected)| (got - expected, *expected)))
    }

    /// Deviation of errors, each with the value relative to which it is measured.
    pub(crate) fn of_scale(errors: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut error = 0.0;
        let mut scale = 0.0;
        let mut largest = 0.0;
        let mut count = 0.0;
        for (difference, value) in errors {
            error += difference * difference;
            scale += value * value;
            largest = f64::max(largest, difference.abs());
            count += 1.0;
        }
        if error == 0.0 {
            return Self::default();
        }
        let scale = f64::max(scale, 1e-30);
        Self { nmse: error / scale, element: largest / (scale / count).sqrt() }
    }

    /// Returns the larger of the two values of each figure; NaN is the largest.
    pub fn worst(self, other: Self) -> Self {
        Self { nmse: larger(self.nmse, other.nmse), element: larger(self.element, other.element) }
    }
}

fn larger(a: f64, b: f64) -> f64 {
    if a >= b || a.is_nan() { a } else { b }
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { nmse, element } = self;
        write!(f, "NMSE {nmse:.2e}, largest error {element:.1e} of the root mean square")
    }
}

/// Returns [`Deviation::nmse`].
pub fn nmse(got: impl Iterator<Item = f64>, expected: &[f64]) -> f64 {
    Deviation::of(got, expected).nmse
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::for_each_gpu;
    use crate::{Operand, Shader};

    /// Doubles eight values into the workspace, then adds 1 to each on the way to the output.
    const DOUBLES_AND_ADDS: &str = "
        @group(0) @binding(0) var<storage, read> source: array<f32>;
        @group(0) @binding(1) var<storage, read_write> sink: array<f32>;
        @compute @workgroup_size(8)
        fn twice(@builtin(global_invocation_id) id: vec3u) { sink[id.x] = 2.0 * source[id.x]; }
        @compute @workgroup_size(8)
        fn add(@builtin(global_invocation_id) id: vec3u) { sink[id.x] = 1.0 + source[id.x]; }";

    /// Writes past the end of a workspace of eight values.
    const BEHIND: &str = "
        @group(0) @binding(0) var<storage, read_write> words: array<f32>;
        @compute @workgroup_size(1) fn behind() { words[8] = 0.0; }";

    fn dispatch(entry: &'static str, text: &str, operands: &[Operand]) -> Dispatch {
        let shader = Shader::emitted("handing_on", entry, text.into());
        Dispatch { shader, operands: operands.into(), params: Vec::new(), groups: [1, 1, 1] }
    }

    #[test]
    fn dispatches_hand_results_on_in_the_workspace() {
        let workspace = Operand::Workspace { bytes: 32 };
        let add = DOUBLES_AND_ADDS.replace("read> source", "read_write> source");
        let dispatches = [
            dispatch("twice", DOUBLES_AND_ADDS, &[Operand::Input(0), workspace]),
            dispatch("add", &add, &[workspace, Operand::Output(0)]),
        ];
        let input: Vec<f32> = (0..8).map(|i| i as f32).collect();
        let expected: Vec<f32> = input.iter().map(|x| 2.0 * x + 1.0).collect();
        for_each_gpu(|gpu, pipelines| {
            let (inputs, starts) = ([bytemuck::cast_slice(&input)], [vec![0.0; 8]]);
            let got = run(gpu, pipelines, &dispatches, &inputs, &starts).unwrap();
            assert_eq!(got[0], expected, "{}", gpu.name);
            // Elements that were not written are NaN.
            let got = run(gpu, pipelines, &dispatches[1..], &inputs, &starts).unwrap();
            assert!(got[0].iter().all(|x| x.is_nan()), "{}", gpu.name);
        });
    }

    #[test]
    fn writes_behind_the_workspace_are_found() {
        let dispatches = [dispatch("behind", BEHIND, &[Operand::Workspace { bytes: 32 }])];
        for_each_gpu(|gpu, pipelines| {
            let result = run(gpu, pipelines, &dispatches, &[], &[]);
            assert!(matches!(result, Err(HarnessError::WorkspaceOutOfBounds)), "{}", gpu.name);
        });
    }
}
