//! The bench that every kernel test stands on: one call runs an op's reference in f64 on random
//! input and compares with it the reference in f32, the fast version, and the shaders on every
//! adapter found, checked and trusted, with sentinels behind every buffer.

pub mod gradient;
pub mod update;

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, OnceLock};

use super::{Arg, Call, Dispatch, Operand, Pipelines, Random, Twin, Variant, twin};
use crate::base::rng::Key;
use crate::base::{Shape, Site};
use crate::device::{Adapter, AdapterKind, Checks, Gpu, list_adapters};
use crate::graph::{IGNORED, Op, shapes};

/// The normalized mean squared error up to which f32 agrees with f64.
pub const NMSE_MAX: f64 = 1e-6;

/// What stands behind every output; any other value there was written out of bounds.
const SENTINEL: f32 = -12345.5;
const SENTINELS: usize = 64;

/// What an input is filled with.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// Standard normal floats.
    Normal,
    /// Normal floats times a factor, plus an offset.
    Scaled(f32, f32),
    /// Integers below a bound.
    Ids(u32),
    /// Integers below a bound, about one in five replaced by [`IGNORED`].
    Targets(u32),
    /// 1000, 1001, ..: sample ids.
    Samples,
}

/// A host tensor of either type.
#[derive(Clone, Debug)]
pub enum Values {
    Float(Vec<f64>),
    Int(Vec<u32>),
}

/// Random values for `count` elements; `which` makes inputs differ.
pub fn values(fill: Fill, count: usize, which: usize) -> Values {
    let key = Key::new(42).site(Site(which as u32));
    let ids = |bound: u32| (0..count).map(move |i| key.words([i as u32, 7])[0] % bound);
    let normal = |i: usize| f64::from(key.normal(i as u64) as f32);
    match fill {
        Fill::Normal => Values::Float((0..count).map(normal).collect()),
        Fill::Scaled(factor, offset) => Values::Float(
            (0..count).map(|i| f64::from((normal(i) as f32).mul_add(factor, offset))).collect(),
        ),
        Fill::Ids(bound) => Values::Int(ids(bound).collect()),
        Fill::Targets(bound) => Values::Int(
            ids(5 * bound).map(|id| if id % 5 == 0 { IGNORED } else { id / 5 }).collect(),
        ),
        Fill::Samples => Values::Int((0..count).map(|i| 1000 + i as u32).collect()),
    }
}

/// Checks `op` on random inputs of these shapes, with `rows` rows in batched ones, in every
/// implementation; and once more accumulating, if the op can.
pub fn check(op: Op, inputs: &[(Shape, Fill)], rows: usize) {
    let filled: Vec<(Shape, Values)> = inputs
        .iter()
        .enumerate()
        .map(|(i, (shape, fill))| (shape.clone(), values(*fill, shape.elements(rows), i)))
        .collect();
    check_with(op, &filled, rows);
}

/// [`check`] on given values.
pub fn check_with(op: Op, inputs: &[(Shape, Values)], rows: usize) {
    run_all(&op, inputs, rows, false);
    if op.accumulates() {
        run_all(&op, inputs, rows, true);
    }
}

/// What the f64 reference gives for `op`: to feed an op's statistics to its gradient.
pub fn reference(op: &Op, inputs: &[(Shape, Values)], rows: usize) -> Vec<Vec<f64>> {
    let call = call(op, inputs, rows, false);
    host(&call, inputs, 0.0, known(op).reference_f64)
}

fn known(op: &Op) -> &'static Twin {
    twin(op).expect("reshapes have no kernel to test")
}

fn call<'a>(op: &'a Op, inputs: &[(Shape, Values)], rows: usize, accumulate: bool) -> Call<'a> {
    use crate::base::DType;
    let typed: Vec<(Shape, DType)> = inputs
        .iter()
        .map(|(shape, values)| match values {
            Values::Float(_) => (shape.clone(), DType::F32),
            Values::Int(_) => (shape.clone(), DType::U32),
        })
        .collect();
    let outputs = shapes::outputs(op, &typed).expect("the test's shapes fit the op");
    Call {
        op,
        inputs: inputs.iter().map(|(shape, _)| shape.resolve(rows)).collect(),
        outputs: outputs.iter().map(|(shape, _)| shape.resolve(rows)).collect(),
        accumulate,
        random: Random { step_key: Key::new(3).step(5), training: true },
    }
}

fn run_all(op: &Op, inputs: &[(Shape, Values)], rows: usize, accumulate: bool) {
    let call = call(op, inputs, rows, accumulate);
    let start = if accumulate { 0.25 } else { f32::NAN };
    let twin = known(op);
    let expected = host::<f64>(&call, inputs, f64::from(start), twin.reference_f64);
    let what = |who: &str| format!("{op} of {:?} by {who}, accumulate {accumulate}", call.inputs);
    let wide = |outputs: Vec<Vec<f32>>| -> Vec<Vec<f64>> {
        outputs.into_iter().map(|o| o.into_iter().map(f64::from).collect()).collect()
    };
    let same = |who: &str, got: Vec<Vec<f32>>| compare(&what(who), &wide(got), &expected);
    same("the reference in f32", host(&call, inputs, start, twin.reference_f32));
    same("the fast version", host(&call, inputs, start, twin.fast));
    for_each_gpu(|gpu, pipelines| {
        for Variant { name, dispatches } in every_way(twin, &call) {
            let who = format!("{}:{} ({:?}) with {name}", gpu.api, gpu.name, gpu.checks);
            same(&who, on_gpu(gpu, pipelines, &call, &dispatches, inputs, start));
        }
    });
}

/// The variants of a call, and its static choice where that is none of them.
fn every_way(twin: &Twin, call: &Call) -> Vec<Variant> {
    let mut ways = (twin.variants)(call);
    let chosen = (twin.dispatch)(call);
    let names: BTreeSet<&String> = ways.iter().map(|way| &way.name).collect();
    assert_eq!(names.len(), ways.len(), "{}: the names of variants differ", twin.name);
    if ways.iter().all(|way| way.dispatches != chosen) {
        ways.push(Variant::new("the static choice", chosen));
    }
    ways
}

/// Runs a host function on the inputs, in outputs that start as `start`.
fn host<T: super::Real>(
    call: &Call,
    inputs: &[(Shape, Values)],
    start: T,
    function: super::Host<T>,
) -> Vec<Vec<T>> {
    let floats: Vec<Vec<T>> = inputs
        .iter()
        .map(|(_, values)| match values {
            Values::Float(v) => v.iter().map(|&v| T::real(v)).collect(),
            Values::Int(_) => Vec::new(),
        })
        .collect();
    let args: Vec<Arg<T>> = inputs
        .iter()
        .zip(&floats)
        .map(|((_, values), floats)| match values {
            Values::Float(_) => Arg::Float(floats),
            Values::Int(ids) => Arg::Int(ids),
        })
        .collect();
    let mut outputs: Vec<Vec<T>> =
        (0..call.outputs.len()).map(|i| vec![start; call.output_len(i)]).collect();
    let mut views: Vec<&mut [T]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
    function(call, &args, &mut views);
    outputs
}

/// Runs dispatches on a device, in outputs that start as `start` with sentinels behind.
pub fn on_gpu(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    call: &Call,
    dispatches: &[Dispatch],
    inputs: &[(Shape, Values)],
    start: f32,
) -> Vec<Vec<f32>> {
    let narrow: Vec<Vec<f32>> = inputs
        .iter()
        .map(|(_, values)| match values {
            Values::Float(v) => v.iter().map(|&v| v as f32).collect(),
            Values::Int(_) => Vec::new(),
        })
        .collect();
    let bytes: Vec<&[u8]> = inputs
        .iter()
        .zip(&narrow)
        .map(|((_, values), narrow)| match values {
            Values::Float(_) => bytemuck::cast_slice(narrow),
            Values::Int(ids) => bytemuck::cast_slice(ids),
        })
        .collect();
    let starts: Vec<Vec<f32>> =
        (0..call.outputs.len()).map(|i| vec![start; call.output_len(i)]).collect();
    run_dispatches(gpu, pipelines, &call.op.to_string(), dispatches, &bytes, &starts)
}

/// Runs dispatches that need not belong to an op, on the bytes of each input and on outputs that
/// start with the given values, with sentinels behind; what the outputs then hold.
pub fn run_dispatches(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    what: &str,
    dispatches: &[Dispatch],
    inputs: &[&[u8]],
    starts: &[Vec<f32>],
) -> Vec<Vec<f32>> {
    let inputs: Vec<wgpu::Buffer> = inputs.iter().map(|bytes| filled(gpu, bytes)).collect();
    let outputs: Vec<wgpu::Buffer> = starts
        .iter()
        .map(|start| {
            let mut initial = start.clone();
            initial.extend([SENTINEL; SENTINELS]);
            filled(gpu, bytemuck::cast_slice(&initial))
        })
        .collect();
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for dispatch in dispatches {
            record(gpu, pipelines, &mut pass, dispatch, &inputs, &outputs);
        }
    }
    gpu.submit_and_wait(encoder).expect("the dispatches run");
    let read = |(i, start): (usize, &Vec<f32>)| {
        let bytes = 4 * (start.len() + SENTINELS) as u64;
        let staging = gpu.readback(bytes).expect("a staging buffer");
        let read = gpu.read(&staging, &[(&outputs[i], 0, bytes)]).expect("a readback");
        let values: &[f32] = bytemuck::cast_slice(&read);
        let (values, behind) = values.split_at(start.len());
        let intact = behind.iter().all(|v| *v == SENTINEL);
        assert!(intact, "{what} on {}: output {i} was written out of bounds", gpu.name);
        values.to_vec()
    };
    starts.iter().enumerate().map(read).collect()
}

fn record(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    pass: &mut wgpu::ComputePass,
    dispatch: &Dispatch,
    inputs: &[wgpu::Buffer],
    outputs: &[wgpu::Buffer],
) {
    let pipeline = pipelines.get(gpu, dispatch).unwrap_or_else(|error| panic!("{error}"));
    let entries: Vec<wgpu::BindGroupEntry> = dispatch
        .operands
        .iter()
        .enumerate()
        .map(|(binding, operand)| wgpu::BindGroupEntry {
            binding: binding as u32,
            resource: match operand {
                Operand::Input(i) => inputs[*i].as_entire_binding(),
                Operand::Output(i) => outputs[*i].as_entire_binding(),
            },
        })
        .collect();
    let group = gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.bindings,
        entries: &entries,
    });
    pass.set_pipeline(&pipeline.pipeline);
    pass.set_bind_group(0, &group, &[]);
    pass.set_immediates(0, bytemuck::cast_slice(&dispatch.params));
    let [x, y, z] = dispatch.groups;
    pass.dispatch_workgroups(x, y, z);
}

/// A buffer with these bytes, and nothing behind them but what its alignment needs.
fn filled(gpu: &Gpu, bytes: &[u8]) -> wgpu::Buffer {
    let buffer = gpu.storage("test", bytes.len() as u64).expect("a buffer");
    gpu.upload(&buffer, 0, bytes);
    buffer
}

/// Asserts that each output agrees: the squared error over the squared expectation.
pub fn compare(what: &str, got: &[Vec<f64>], expected: &[Vec<f64>]) {
    assert_eq!(got.len(), expected.len(), "{what}: number of outputs");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.len(), expected.len(), "{what}: length of output {i}");
        let error: f64 = got.iter().zip(expected).map(|(g, e)| (g - e).powi(2)).sum();
        let scale: f64 = expected.iter().map(|e| e * e).sum();
        let nmse = error / scale.max(1e-30);
        let within = nmse <= NMSE_MAX || error == 0.0;
        assert!(within, "{what}: output {i} differs, NMSE {nmse:.2e}");
    }
}

/// Every adapter that tests use, opened with the portable limits, checked and trusted. One that
/// two APIs show is tested through both.
pub fn for_each_gpu(mut body: impl FnMut(&Gpu, &mut Pipelines)) {
    for opened in gpus() {
        for (gpu, pipelines) in lock(opened).iter_mut() {
            body(gpu, pipelines);
        }
    }
}

/// Devices that must not be used at the same time. Those of a GL adapter share a context, which
/// is on one thread at a time; every other is alone.
type Opened = Mutex<Vec<(Gpu, Pipelines)>>;

/// A test that failed on a device leaves it usable: each test makes its own buffers.
fn lock(opened: &Opened) -> MutexGuard<'_, Vec<(Gpu, Pipelines)>> {
    opened.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn gpus() -> &'static [Opened] {
    static GPUS: OnceLock<Vec<Opened>> = OnceLock::new();
    GPUS.get_or_init(|| {
        let is_tested = |adapter: &Adapter| adapter.kind != AdapterKind::Other;
        let adapters: Vec<_> = list_adapters().into_iter().filter(is_tested).collect();
        assert!(!adapters.is_empty(), "no adapter to test on: ./x test installs software ones");
        let mut groups = Vec::new();
        for adapter in &adapters {
            let open = |checks| {
                let gpu = Gpu::open_portable(adapter, checks).unwrap_or_else(|e| panic!("{e}"));
                (gpu, Pipelines::default())
            };
            let both = [Checks::Checked, Checks::Trusted].map(open);
            match adapter.api {
                "gl" => groups.push(Mutex::new(both.into())),
                _ => groups.extend(both.map(|one| Mutex::new(vec![one]))),
            }
        }
        groups
    })
}

/// `./x test` names the adapters it installed, GL's with `gl:` in front: each must be among those
/// tested.
#[test]
fn every_adapter_that_should_be_here_is_tested() {
    let wanted = std::env::var("POTLUCK_TEST_ADAPTERS").unwrap_or_default();
    let named = |(gpu, _): &(Gpu, Pipelines)| format!("{}:{}", gpu.api, gpu.name);
    let named = |opened| lock(opened).iter().map(named).collect::<Vec<_>>();
    let found: Vec<String> = gpus().iter().flat_map(named).collect();
    for name in wanted.split(',').filter(|name| !name.is_empty()) {
        assert!(found.iter().any(|f| f.contains(name)), "{name} is not among {found:?}");
    }
}
