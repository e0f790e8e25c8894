//! Test fixture of all kernel tests: one call runs the f64 reference of an op on random input and
//! compares with it the f32 reference, the CPU kernel, and the shaders on every adapter found, in
//! checked and trusted modules, with sentinels after every output.

pub mod gradient;
#[cfg(test)]
mod grids;
#[cfg(test)]
mod nonfinite;
pub mod update;

use std::collections::BTreeSet;
use std::sync::OnceLock;

use super::dispatch::folded;
use super::{
    Caps, CpuKernel, Dispatch, Float, OpCall, Pipelines, RandomContext, Twin, Variant, harness,
    twin,
};
use crate::device::{
    Adapter, AdapterKind, Gpu, Selection, ShaderChecks, list_adapters, select_all,
    skip_exit_handlers,
};
use potluck_core::rng::Key;
use potluck_core::{HostTensor, Lock, Shape};
use potluck_graph::{Accumulation, Op, Precision, shapes};

pub(crate) use super::harness::NMSE_MAX;
pub use super::harness::{InputFill, generate};

/// Checks every implementation of `op` on random inputs of these shapes, with `rows` rows in
/// batched ones, and again in accumulating mode if the op supports it.
pub fn check(op: Op, inputs: &[(Shape, InputFill)], rows: usize) {
    check_with(op, &filled(inputs, rows), rows);
}

fn filled(inputs: &[(Shape, InputFill)], rows: usize) -> Vec<(Shape, HostTensor<f64>)> {
    let mut filled = Vec::with_capacity(inputs.len());
    for (index, (shape, fill)) in inputs.iter().enumerate() {
        filled.push((shape.clone(), generate(*fill, shape.elements(rows), index)));
    }
    filled
}

/// Does the same as [`check`] on the given input values.
pub(crate) fn check_with(op: Op, inputs: &[(Shape, HostTensor<f64>)], rows: usize) {
    let call = call(&op, inputs, rows, op.changes_in_place());
    run_both(&call, inputs, NMSE_MAX);
}

/// Does the same as [`check`] in mixed precision, within an error that f32 operands would exceed.
pub(crate) fn check_mixed(op: Op, inputs: &[(Shape, InputFill)], rows: usize) {
    let filled = filled(inputs, rows);
    let of_f32 = call(&op, &filled, rows, op.changes_in_place());
    let call = OpCall { precision: Precision::Mixed, ..of_f32.clone() };
    let oracle = known(&op).reference_f64;
    let exact = host(&of_f32, &filled, f64::NAN, oracle);
    let rounded = host(&call, &filled, f64::NAN, oracle);
    let rounding = harness::nmse(exact[0].iter().copied(), &rounded[0]);
    assert!(rounding > 10.0 * MIXED_NMSE_MAX, "{op}: f32 operands are off by {rounding:.2e} only");
    run_both(&call, &filled, MIXED_NMSE_MAX);
}

/// Does the same as [`check_with`] in mixed precision, for ops that round intermediate results: a
/// small error may round them the other way.
pub(crate) fn check_mixed_with(
    op: &Op,
    inputs: &[(Shape, HostTensor<f64>)],
    rows: usize,
    nmse_max: f64,
) {
    let of_f32 = call(op, inputs, rows, op.changes_in_place());
    let call = OpCall { precision: Precision::Mixed, ..of_f32 };
    run_both(&call, inputs, nmse_max);
}

/// Maximum NMSE at which results in mixed precision agree with the f64 reference, which rounds the
/// same operands.
const MIXED_NMSE_MAX: f64 = 3e-9;

/// Checks a call, and again in accumulating mode if the op supports it.
fn run_both(call: &OpCall, inputs: &[(Shape, HostTensor<f64>)], nmse_max: f64) {
    run_all(call, inputs, nmse_max);
    let accumulate = call.op.accumulates();
    if accumulate.any() {
        run_all(&OpCall { accumulate, ..call.clone() }, inputs, nmse_max);
    }
}

/// Returns the outputs of the f64 reference of `op`, such as the statistics that its gradient takes
/// as input.
pub fn reference(op: &Op, inputs: &[(Shape, HostTensor<f64>)], rows: usize) -> Vec<Vec<f64>> {
    let call = call(op, inputs, rows, op.changes_in_place());
    host(&call, inputs, 0.0, known(op).reference_f64)
}

fn known(op: &Op) -> &'static Twin {
    twin(op).expect("reshapes have no kernel to test")
}

fn call<'a>(
    op: &'a Op,
    inputs: &[(Shape, HostTensor<f64>)],
    rows: usize,
    accumulate: Accumulation,
) -> OpCall<'a> {
    use potluck_core::DType;
    let typed: Vec<(Shape, DType)> =
        inputs.iter().map(|(shape, values)| (shape.clone(), values.as_view().dtype())).collect();
    let outputs = shapes::outputs(op, &typed).expect("the test's shapes fit the op");
    OpCall {
        op,
        inputs: inputs.iter().map(|(shape, _)| shape.resolve(rows)).collect(),
        outputs: outputs.iter().map(|(shape, _)| shape.resolve(rows)).collect(),
        accumulate,
        precision: Precision::F32,
        loss_scale: 1.0,
        random: RandomContext { step_key: Key::new(3).step(5), training: true },
    }
}

fn run_all(call: &OpCall, inputs: &[(Shape, HostTensor<f64>)], nmse_max: f64) {
    let op = call.op;
    let start = f32::NAN;
    let twin = known(op);
    let expected = host::<f64>(call, inputs, f64::from(start), twin.reference_f64);
    let same = |who: &str, got: Vec<Vec<f32>>| {
        let what = format!(
            "{op} of {:?} in {} by {who}, accumulate {}",
            call.inputs,
            call.precision.name(),
            call.accumulates()
        );
        let mut wide = Vec::with_capacity(got.len());
        for output in got {
            wide.push(output.into_iter().map(f64::from).collect());
        }
        compare_within(&what, &wide, &expected, nmse_max);
    };
    if tests_host() {
        same("the reference in f32", host(call, inputs, start, twin.reference_f32));
        same("the fast version", host(call, inputs, start, twin.fast));
    }
    for_each_gpu(|gpu, pipelines| {
        for Variant { name, dispatches } in every_way(twin, call, gpu) {
            let who = format!("{}:{} ({:?}) with {name}", gpu.api, gpu.name, gpu.checks);
            same(&who, on_gpu(gpu, pipelines, call, &dispatches, inputs, start));
            if is_unchecked(gpu)
                && let Some(folded) = folded(&dispatches)
            {
                let who = format!("{who} in a folded grid");
                same(&who, on_gpu(gpu, pipelines, call, &folded, inputs, start));
            }
        }
    });
}

/// Returns true if the tests of this process are about the CPU device too: they are not if adapters
/// are named, as `./x test` does beside a process with `none`.
fn tests_host() -> bool {
    matches!(adapters_under_test().as_str(), "" | "none")
}

/// Returns true if shader checks are off, as in one mode of every adapter.
fn is_unchecked(gpu: &Gpu) -> bool {
    gpu.checks == ShaderChecks::Disabled
}

/// Calls `body` with the name and the outputs of every f32 implementation of a call on the inputs:
/// the reference, the CPU kernel, and every kernel variant on every adapter.
pub(crate) fn for_each_result(
    op: &Op,
    inputs: &[(Shape, HostTensor<f64>)],
    rows: usize,
    body: impl FnMut(&str, &[Vec<f32>]),
) {
    for_each_result_of(&call(op, inputs, rows, op.changes_in_place()), inputs, body);
}

/// Does the same in mixed precision, and passes the outputs of the f64 reference as well.
pub(crate) fn for_each_mixed_result(
    op: &Op,
    inputs: &[(Shape, HostTensor<f64>)],
    rows: usize,
    mut body: impl FnMut(&str, &[Vec<f32>], &[Vec<f64>]),
) {
    let of_f32 = call(op, inputs, rows, op.changes_in_place());
    let call = OpCall { precision: Precision::Mixed, ..of_f32 };
    let expected = host(&call, inputs, 0.0, known(op).reference_f64);
    for_each_result_of(&call, inputs, |who, outputs| body(who, outputs, &expected));
}

fn for_each_result_of(
    call: &OpCall,
    inputs: &[(Shape, HostTensor<f64>)],
    mut body: impl FnMut(&str, &[Vec<f32>]),
) {
    let twin = known(call.op);
    let start = 0.25;
    body("the reference in f32", &host(call, inputs, start, twin.reference_f32));
    body("the fast version", &host(call, inputs, start, twin.fast));
    for_each_gpu(|gpu, pipelines| {
        for Variant { name, dispatches } in every_way(twin, call, gpu) {
            let who = format!("{}:{} ({:?}) with {name}", gpu.api, gpu.name, gpu.checks);
            body(&who, &on_gpu(gpu, pipelines, call, &dispatches, inputs, start));
        }
    });
}

/// Checks that a loss scale of 4 multiplies these outputs by 4, to the bit, and changes no others,
/// in every implementation of `op`.
pub(crate) fn check_loss_scale(
    op: &Op,
    inputs: &[(Shape, HostTensor<f64>)],
    rows: usize,
    scaled: &[usize],
) {
    let plain = call(op, inputs, rows, op.changes_in_place());
    let mut expected = Vec::new();
    for_each_result_of(&plain, inputs, |_, outputs| {
        let mut outputs = outputs.to_vec();
        for index in scaled {
            assert!(outputs[*index].iter().any(|value| *value != 0.0), "{op}: output {index}");
            for value in &mut outputs[*index] {
                *value *= 4.0;
            }
        }
        expected.push(outputs);
    });
    let mut expected = expected.into_iter();
    for_each_result_of(&OpCall { loss_scale: 4.0, ..plain }, inputs, |who, outputs| {
        assert_eq!(Some(outputs), expected.next().as_deref(), "{op} of {rows} rows by {who}");
    });
}

/// Kernel variants of a call, and its static choice if it is not among them. Variants that are no
/// candidates on the device are compiled without checks only, because that takes long; with checks,
/// the tests of certification run them. In mixed precision the texts differ from the f32 texts only
/// by the function that rounds, so SwiftShader, which takes the longest to compile them, runs only
/// its candidates.
fn every_way(twin: &Twin, call: &OpCall, gpu: &Gpu) -> Vec<Variant> {
    let own = Caps::of(gpu);
    let is_slow = gpu.name.contains("SwiftShader") && call.precision == Precision::Mixed;
    let caps = if is_unchecked(gpu) && !is_slow { own.with_all_that_run() } else { own };
    let mut ways = (twin.variants)(call, &caps);
    let chosen = (twin.dispatch)(call, &own);
    let names: BTreeSet<&String> = ways.iter().map(|way| &way.name).collect();
    assert_eq!(names.len(), ways.len(), "{}: the names of variants differ", twin.name);
    if ways.iter().all(|way| way.dispatches != chosen) {
        ways.push(Variant::new("the static choice", chosen));
    }
    ways
}

/// Runs a CPU kernel on the inputs and returns its outputs, whose elements are initialized to
/// `start`.
fn host<T: Float>(
    call: &OpCall,
    inputs: &[(Shape, HostTensor<f64>)],
    start: T,
    function: CpuKernel<T>,
) -> Vec<Vec<T>> {
    harness::host(call, &values_of(inputs), start, function)
}

fn values_of(inputs: &[(Shape, HostTensor<f64>)]) -> Vec<&HostTensor<f64>> {
    inputs.iter().map(|(_, values)| values).collect()
}

/// Runs the dispatches of a call on a device and returns its outputs, whose elements are
/// initialized to `start` and followed by sentinels.
pub fn on_gpu(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    call: &OpCall,
    dispatches: &[Dispatch],
    inputs: &[(Shape, HostTensor<f64>)],
    start: f32,
) -> Vec<Vec<f32>> {
    let ran = harness::run_call(gpu, pipelines, call, dispatches, &values_of(inputs), start);
    ran.unwrap_or_else(|error| panic!("{} on {}: {error}", call.op, gpu.name))
}

/// Runs arbitrary dispatches on the bytes of each input and returns the resulting outputs. Each
/// output is initialized to its values in `starts`, followed by sentinels.
pub(crate) fn run_dispatches(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    what: &str,
    dispatches: &[Dispatch],
    inputs: &[&[u8]],
    starts: &[Vec<f32>],
) -> Vec<Vec<f32>> {
    let ran = harness::run(gpu, pipelines, dispatches, inputs, starts);
    ran.unwrap_or_else(|error| panic!("{what} on {}: {error}", gpu.name))
}

/// Asserts that each output agrees with its expectation: NMSE of at most `NMSE_MAX`.
pub fn compare(what: &str, got: &[Vec<f64>], expected: &[Vec<f64>]) {
    compare_within(what, got, expected, NMSE_MAX);
}

fn compare_within(what: &str, got: &[Vec<f64>], expected: &[Vec<f64>], nmse_max: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: number of outputs");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.len(), expected.len(), "{what}: length of output {i}");
        let nmse = harness::nmse(got.iter().copied(), expected);
        assert!(nmse <= nmse_max, "{what}: output {i} differs, NMSE {nmse:.2e}");
    }
}

/// Calls `body` for every adapter under test, opened with the portable limits, in each of its
/// [`modes`]: with checked and with trusted shader modules. An adapter that two APIs list is tested
/// through both.
pub(crate) fn for_each_gpu(mut body: impl FnMut(&Gpu, &mut Pipelines)) {
    for opened in gpus() {
        let mut opened = opened.lock();
        let (gpu, pipelines) = &mut *opened;
        body(gpu, pipelines);
    }
    skip_exit_handlers();
}

/// One opened device with the pipelines compiled on it so far, shared by all tests of the process.
type Opened = Lock<(Gpu, Pipelines)>;

/// Adapters to test on: those that `POTLUCK_TEST_ADAPTERS` selects, none if it is `none`, and all
/// that are found if it is empty or not set.
///
/// # Panics
/// Panics if a named adapter is not found, or if none is named and none is found.
pub fn adapters() -> Vec<Adapter> {
    let named = adapters_under_test();
    let adapters: Vec<Adapter> = match named.as_str() {
        "none" => return Vec::new(),
        "" => list_adapters().into_iter().filter(|a| a.kind != AdapterKind::Other).collect(),
        named => {
            let selected = select_all(named, &list_adapters()).unwrap_or_else(|e| panic!("{e}"));
            let mut adapters = Vec::new();
            for selection in selected {
                let Selection::Adapter(adapter) = selection else {
                    panic!("{named} names the CPU device")
                };
                adapters.push(*adapter);
            }
            adapters
        }
    };
    assert!(!adapters.is_empty(), "no adapter to test on: ./x test installs software ones");
    // The drivers are loaded already, even if the test does not use them.
    skip_exit_handlers();
    adapters
}

/// What `POTLUCK_TEST_ADAPTERS` says, or nothing.
fn adapters_under_test() -> String {
    std::env::var("POTLUCK_TEST_ADAPTERS").unwrap_or_default()
}

fn gpus() -> &'static [Opened] {
    static GPUS: OnceLock<Vec<Opened>> = OnceLock::new();
    GPUS.get_or_init(|| {
        let mut opened = Vec::new();
        for adapter in &adapters() {
            for checks in modes(adapter) {
                let gpu = Gpu::open_portable(adapter, *checks).unwrap_or_else(|e| panic!("{e}"));
                opened.push(Lock::new((gpu, Pipelines::default())));
            }
        }
        opened
    })
}

/// Shader checks with which kernels are tested through an API. On GL they are off, as in runs:
/// wgpu's GL backend bounds neither indices nor loops in any case, and with checks it only zeroes
/// workgroup memory (wgpu-hal 30, `gles/device.rs`), while GL compiles each text for seconds. Whole
/// plans run on GL with checks on in `tests/adapters`. On SwiftShader, which compiles each text in
/// every process, they are off too: in runs only foreign kernels have checks, and their tests check
/// them on every adapter.
fn modes(adapter: &Adapter) -> &'static [ShaderChecks] {
    match adapter.api {
        "gl" => &[ShaderChecks::Disabled],
        _ if adapter.name.contains("SwiftShader") => &[ShaderChecks::Disabled],
        _ => &[ShaderChecks::Enabled, ShaderChecks::Disabled],
    }
}
