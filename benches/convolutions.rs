//! Benchmark of convolutions and their gradients at the layers of small networks, batch 64: the CPU
//! device, and every kernel variant on every adapter found or named; milliseconds and GFLOP/s.
//!
//!     cargo bench --bench convolutions -- [ADAPTER ..] [--only TEXT] [--rounds N]
//!
//! Calls of a layer are timed in turns, and the table has the fastest one of each, because other
//! processes can only make a call slower. A star marks the static choice.

use std::time::Instant;

use potluck_core::rng::Key;
use potluck_core::{DType, HostTensorView};
use potluck_graph::{Conv2dOptions, Op, Precision};
use potluck_kernels::device::{DeviceError, Gpu, ShaderChecks, list_adapters};
use potluck_kernels::{
    BoundDispatch, Caps, OpCall, OwnedCall, Pipelines, RandomContext, Variant, harness, twin,
};

const BATCH: usize = 64;

/// A layer: height and width of its pictures, channels, output channels, side of the kernel,
/// options.
type Layer = (usize, usize, usize, usize, Conv2dOptions);

fn layers() -> Vec<Layer> {
    let conv = Conv2dOptions::default();
    let same = conv.with_padding(1);
    vec![
        (28, 1, 6, 5, conv.with_padding(2)),
        (14, 6, 16, 5, conv),
        (32, 16, 16, 3, same),
        (16, 32, 32, 3, same),
        (32, 16, 32, 3, same.with_stride(2)),
        (16, 32, 32, 3, same.with_stride(2)),
        (8, 64, 64, 3, same),
        (16, 64, 64, 3, same.with_groups(64)),
    ]
}

/// Returns the forward pass and both gradients of a layer, each with its name.
fn calls((side, c, o, k, options): Layer) -> Vec<(String, OwnedCall)> {
    let out = options.output_size([side; 2], [k; 2]).expect("the layers exist")[0];
    let x = vec![BATCH, side, side, c];
    let (w, y) = (vec![o, c / options.groups, k, k], vec![BATCH, out, out, o]);
    let (size, kernel) = ([side; 2], [k; 2]);
    let ops = [
        ("forward", Op::Conv2d(options), [x.clone(), w.clone()]),
        ("dx", Op::Conv2dInputGrad { options, size }, [y.clone(), w]),
        ("dw", Op::Conv2dWeightGrad { options, kernel }, [x, y]),
    ];
    let random = RandomContext { step_key: Key::new(1), training: true };
    let named = |(what, op, inputs): (&str, Op, [Vec<usize>; 2])| {
        let owned_call = OwnedCall::new(op, inputs.to_vec(), random).expect("the shapes fit");
        (format!("{side}x{side}x{c} to {o}, {k}x{k}{options}: {what}"), owned_call)
    };
    ops.map(named).to_vec()
}

fn main() -> Result<(), DeviceError> {
    let mut words = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let (mut adapters, mut only, mut rounds) = (Vec::new(), String::new(), 10);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--only" => only = words.next().unwrap_or_default(),
            "--rounds" => rounds = words.next().and_then(|n| n.parse().ok()).unwrap_or(rounds),
            index => adapters.extend(index.parse::<usize>()),
        }
    }
    let all: Vec<_> = layers().into_iter().flat_map(calls).collect();
    let all: Vec<_> = all.into_iter().filter(|(name, _)| name.contains(&only)).collect();
    let found = list_adapters();
    if adapters.is_empty() {
        on_cpu(&all, rounds);
        let is_shown = |index: &usize| found[*index].merged_into.is_none();
        adapters = (0..found.len()).filter(is_shown).collect();
    }
    for adapter in adapters.into_iter().filter_map(|index| found.get(index)) {
        let gpu = Gpu::open(adapter, ShaderChecks::Disabled, Precision::F32)?;
        println!("\n{} ({})", gpu.name, gpu.api);
        let mut pipelines = Pipelines::default();
        for (name, owned_call) in &all {
            on_gpu(&gpu, &mut pipelines, name, &owned_call.call(), rounds)?;
        }
    }
    Ok(())
}

/// Returns values for the inputs of a call.
fn inputs(call: &OpCall) -> Vec<Vec<f32>> {
    let value = |i: usize| ((i * 7919) % 1000) as f32 / 500.0 - 1.0;
    (0..2).map(|index| (0..call.input_len(index)).map(value).collect()).collect()
}

fn report(name: &str, way: &str, call: &OpCall, seconds: f64) {
    let flops = twin(call.op).map_or(0.0, |twin| (twin.cost)(call).flops);
    println!("{name:<52}{way:<28}{:>10.3} ms{:>9.1}", 1e3 * seconds, flops / seconds / 1e9);
}

fn on_cpu(all: &[(String, OwnedCall)], rounds: usize) {
    println!("the CPU device");
    for (name, owned_call) in all {
        let call = owned_call.call();
        let (values, mut out) = (inputs(&call), vec![0.0; call.output_len(0)]);
        let views = [0, 1].map(|index| HostTensorView::Float(&values[index]));
        let fast = twin(call.op).map(|twin| twin.fast).expect("convolutions have kernels");
        let mut run = || {
            let start = Instant::now();
            fast(&call, &views, &mut [&mut out]);
            start.elapsed().as_secs_f64()
        };
        report(name, "", &call, (0..rounds + 1).map(|_| run()).fold(f64::MAX, f64::min));
    }
}

fn on_gpu(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    name: &str,
    call: &OpCall,
    rounds: usize,
) -> Result<(), DeviceError> {
    let Some(twin) = twin(call.op) else { return Ok(()) };
    let caps = Caps::of(gpu);
    let chosen = (twin.dispatch)(call, &caps);
    let upload = |values: &Vec<f32>| harness::upload_new(gpu, bytemuck::cast_slice(values));
    let inputs = inputs(call).iter().map(upload).collect::<Result<Vec<_>, _>>()?;
    let outputs = [gpu.storage("output", (DType::F32.bytes() * call.output_len(0)) as u64)?];
    for Variant { name: way, dispatches } in (twin.variants)(call, &caps) {
        let star = if dispatches == chosen { "*" } else { "" };
        let ready = BoundDispatch::of_buffers(gpu, pipelines, &dispatches, &inputs, &outputs)?;
        // The first run compiles.
        time(gpu, &ready)?;
        let mut best = f64::MAX;
        for _ in 0..rounds {
            best = best.min(time(gpu, &ready)?);
        }
        report(name, &format!("{way}{star}"), call, best);
    }
    Ok(())
}

/// Returns the seconds of one run, from the submission to its end.
fn time(gpu: &Gpu, ready: &[BoundDispatch]) -> Result<f64, DeviceError> {
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for dispatch in ready {
            dispatch.record(&mut pass);
        }
    }
    let start = Instant::now();
    gpu.submit_and_wait(encoder)?;
    Ok(start.elapsed().as_secs_f64())
}
