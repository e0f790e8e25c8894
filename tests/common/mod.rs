//! Shared by several integration tests: devices to run a plan on, and values to run it with.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::sync::{Mutex, MutexGuard};

use potluck_core::{BucketId, DType, HostTensorView, ParamId, rng::Key};
use potluck_graph::{PassKind, Plan, Precision};
use potluck_kernels::RandomContext;
use potluck_kernels::autotune::{KernelCache, KernelSelector};
use potluck_kernels::device::{
    Adapter, Gpu, Selection, ShaderChecks, list_adapters, select_all, skip_exit_handlers,
};
use potluck_kernels::exec::{
    BucketTensor, Cpu, Executor, GpuExecutor, Moments, PassContext, StepSums,
};

/// Held by a test while it uses adapters. Software adapters use every core, so that one test at
/// a time is as fast as several; and GL's context is on one thread at a time.
pub fn turn() -> Turn {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed leaves nothing behind that the next one relies on.
    Turn { _lock: TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) }
}

/// Turn of a test, behind which the process may end: without the exit handlers of drivers.
pub struct Turn {
    _lock: MutexGuard<'static, ()>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        skip_exit_handlers();
    }
}

/// Devices for one test, which has its turn until they are dropped.
pub struct Devices {
    devices: std::vec::IntoIter<Box<dyn Executor>>,
    _turn: Turn,
}

impl Iterator for Devices {
    type Item = Box<dyn Executor>;

    fn next(&mut self) -> Option<Self::Item> {
        self.devices.next()
    }
}

/// The CPU device and the adapters of [`adapters`], each with `plan`.
pub fn devices(plan: &Plan, moments: impl Into<Moments>) -> Devices {
    devices_with(plan, moments, None)
}

/// [`devices`] whose pieces have at most so many elements.
pub fn devices_with(
    plan: &Plan,
    moments: impl Into<Moments>,
    readback_elements_max: Option<usize>,
) -> Devices {
    let (turn, moments) = (turn(), moments.into());
    let mut cpu = Cpu::fast(plan.clone(), moments.clone());
    if let Some(elements) = readback_elements_max {
        cpu.set_readback_elements_max(elements);
    }
    let mut devices: Vec<Box<dyn Executor>> = vec![Box::new(cpu)];
    for adapter in adapters() {
        let mut gpu = open(&adapter, plan.clone(), moments.clone());
        if let Some(elements) = readback_elements_max {
            gpu.set_readback_elements_max(elements).unwrap();
        }
        devices.push(Box::new(gpu));
    }
    Devices { devices: devices.into_iter(), _turn: turn }
}

/// Opens an adapter with a plan.
pub fn open(adapter: &Adapter, plan: Plan, moments: impl Into<Moments>) -> GpuExecutor {
    let gpu = Gpu::open(adapter, checks(adapter), Precision::F32).unwrap_or_else(|e| panic!("{e}"));
    let kernels = KernelSelector::new(KernelCache::in_memory());
    GpuExecutor::new(gpu, plan, moments, kernels).unwrap()
}

/// Shader checks with which an adapter is tested: on, but for SwiftShader, which compiles each text
/// in every process. There they are off, as in runs.
pub fn checks(adapter: &Adapter) -> ShaderChecks {
    if adapter.name.contains("SwiftShader") {
        ShaderChecks::Disabled
    } else {
        ShaderChecks::Enabled
    }
}

/// Adapters to test on: those that `POTLUCK_TEST_ADAPTERS` selects, or all that are found if it is
/// empty or not set; at least one.
pub fn adapters() -> Vec<Adapter> {
    let named = std::env::var("POTLUCK_TEST_ADAPTERS").unwrap_or_default();
    let adapter = |selection| match selection {
        Selection::Adapter(adapter) => *adapter,
        Selection::Cpu { .. } | Selection::Offered(_) => panic!("{named} names the CPU device"),
    };
    let adapters: Vec<Adapter> = match named.as_str() {
        "" => list_adapters(),
        named => {
            let selected = select_all(named, &list_adapters()).unwrap_or_else(|e| panic!("{e}"));
            selected.into_iter().map(adapter).collect()
        }
    };
    assert!(!adapters.is_empty(), "no adapter to test on: ./x test installs software ones");
    adapters
}

/// Runs without dropout count as training all the same.
pub fn pass(micro_batch: usize, rows: usize) -> PassContext {
    let step_key = Key::new(5).step(2);
    let random = RandomContext { step_key, training: true };
    PassContext { micro_batch, rows, loss_scale: 1.0, random }
}

/// Returns the same pass outside of training.
pub fn evaluation(micro_batch: usize, rows: usize) -> PassContext {
    let mut pass = pass(micro_batch, rows);
    pass.random.training = false;
    pass
}

/// Fills every input of the plan for micro-batch `seed`: floats are standard normal, integers
/// below `bound`.
pub fn fill_inputs(
    device: &mut dyn Executor,
    micro_batch: usize,
    rows: usize,
    seed: u64,
    bound: u32,
) {
    let graph = device.plan().graph.clone();
    for (name, id) in &graph.inputs {
        let tensor = graph.tensor(*id);
        let key = Key::new(seed).step(u64::from(id.0) + 1);
        let count = tensor.shape.elements(rows);
        match tensor.dtype {
            DType::F32 => {
                let values: Vec<f32> = (0..count).map(|i| key.normal(i as u64) as f32).collect();
                device.set_input(*id, micro_batch, HostTensorView::Float(&values)).unwrap();
            }
            DType::U32 => {
                let bound = if name == "samples" { 1 << 20 } else { bound };
                let draw = |i: usize| key.words([i as u32, 0])[0] % bound;
                let values: Vec<u32> = (0..count).map(draw).collect();
                device.set_input(*id, micro_batch, HostTensorView::Int(&values)).unwrap();
            }
        }
    }
}

/// Sets every parameter to small normal numbers, the same on every device.
pub fn fill_parameters(device: &mut dyn Executor, std: f64) {
    let graph = device.plan().graph.clone();
    set_parameters(device, |id| {
        let count = graph.tensor(graph.parameters[id.index()].tensor).shape.per_row();
        let key = Key::new(77).step(u64::from(id.0) + 1);
        (0..count).map(|i| (std * key.normal(i as u64)) as f32).collect()
    });
}

/// Sets every parameter to values by its number.
pub fn set_parameters(device: &mut dyn Executor, values_of: impl Fn(ParamId) -> Vec<f32>) {
    for bucket in 0..device.plan().buckets.len() {
        let layout = device.plan().buckets[bucket].clone();
        let mut values = vec![0.0; layout.length];
        for (id, start) in layout.parameters {
            let own = values_of(id);
            values[start..start + own.len()].copy_from_slice(&own);
        }
        device.write_bucket(BucketTensor::Parameters, BucketId(bucket as u32), &values).unwrap();
    }
}

/// Runs all segments of the forward pass, or all others.
pub fn run_phase(device: &mut dyn Executor, forward: bool, pass: &PassContext) {
    let segments = device.plan().segments.clone();
    for segment in segments.iter().filter(|s| (s.phase == PassKind::Forward) == forward) {
        device.run(segment.nodes.clone(), pass).unwrap();
    }
}

/// One step on one micro-batch; the sums.
pub fn run_step(device: &mut dyn Executor, pass: &PassContext) -> StepSums {
    device.begin_step().unwrap();
    run_phase(device, true, pass);
    run_phase(device, false, pass);
    let buckets: Vec<_> = (0..device.plan().buckets.len() as u32).map(BucketId).collect();
    device.finish_step(&buckets).unwrap()
}

/// The values of one parameter in a bucket tensor.
pub fn parameter(device: &mut dyn Executor, bucket_tensor: BucketTensor, name: &str) -> Vec<f32> {
    let plan = device.plan();
    let index = plan.graph.parameters.iter().position(|p| p.name == name);
    let index = index.unwrap_or_else(|| panic!("no parameter is called {name}"));
    let count = plan.graph.tensor(plan.graph.parameters[index].tensor).shape.per_row();
    let (bucket, start) = plan
        .buckets
        .iter()
        .enumerate()
        .find_map(|(bucket, layout)| {
            let found = layout.parameters.iter().find(|(id, _)| id.index() == index);
            found.map(|(_, start)| (bucket, *start))
        })
        .unwrap();
    device.read_bucket(bucket_tensor, BucketId(bucket as u32)).unwrap()[start..start + count]
        .to_vec()
}

/// Norm of a tensor's gradient, as a part of that of the model, below which its error is judged by
/// the model's: such a gradient, as that of a key's bias, is what others leave of each other.
const GRADIENT_NORM_MIN: f64 = 1e-6;

/// The squared error of a tensor's gradient over the squared expectation, or over `model`, the
/// [`squares`] of all gradients of the model, if the expectation is next to nothing.
pub fn gradient_nmse<T: Copy + Into<f64>>(got: &[T], expected: &[T], model: f64) -> f64 {
    assert_eq!(got.len(), expected.len());
    let errors: Vec<f64> =
        got.iter().zip(expected).map(|(a, b)| (*a).into() - (*b).into()).collect();
    let own = squares(expected);
    let is_small = own < GRADIENT_NORM_MIN * GRADIENT_NORM_MIN * model;
    squares(&errors) / if is_small { model } else { own }
}

/// The sum of the squares of values.
pub fn squares<T: Copy + Into<f64>>(values: &[T]) -> f64 {
    values.iter().map(|value| (*value).into().powi(2)).sum()
}

/// The squared error over the squared expectation.
pub fn nmse(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let square = |v: f64| v * v;
    let error: f64 =
        got.iter().zip(expected).map(|(g, e)| square(f64::from(*g) - f64::from(*e))).sum();
    let scale: f64 = expected.iter().map(|e| square(f64::from(*e))).sum();
    error / scale.max(1e-30)
}
