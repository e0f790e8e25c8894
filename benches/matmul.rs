//! Benchmark of every variant of the matrix product, in GFLOP/s, on every adapter found or on
//! those named: medians of rounds in which the variants take turns, so that a load on the machine
//! affects all of them.
//!
//!     cargo bench --bench matmul -- [ADAPTER ..] [--shapes gpt,square,gpt2,step,narrow] [--mixed]
//!         [--variants PART,..] [--rounds N] [--checked]

use std::error::Error;
use std::time::Instant;

use potluck_core::DType;
use potluck_core::rng::Key;
use potluck_graph::{Accumulation, Op, Precision};
use potluck_kernels::device::{Adapter, Gpu, ShaderChecks, list_adapters};
use potluck_kernels::ops::matmul;
use potluck_kernels::{BoundDispatch, Caps, Dispatch, OpCall, Pipelines, RandomContext, Variant};

/// Shortest duration that is timed at once, in seconds: far more than the overhead of a
/// submission.
const SECONDS_MIN: f64 = 0.02;
/// Largest number of dispatches that are timed at once.
const REPEATS_MAX: u32 = 4096;

/// Sizes (m, k, n) of a product, and the operands that are given transposed.
type Product = (usize, usize, usize, &'static str);

/// Products `(m, k, n, transposed)` by the name of their set: the step of a small GPT (benches/
/// step.rs), squares, the blocks of GPT-2 124M for 256 tokens, and generation of one token.
const SETS: [(&str, &[Product]); 5] = [
    (
        "gpt",
        &[
            (768, 128, 384, "b"),
            (768, 128, 512, "b"),
            (768, 512, 128, "b"),
            (768, 128, 65, "b"),
            (768, 384, 128, ""),
            (768, 65, 128, ""),
            (128, 768, 128, "a"),
            (512, 768, 128, "a"),
            (65, 768, 128, "a"),
        ],
    ),
    ("square", &[(64, 64, 64, ""), (256, 256, 256, ""), (512, 512, 512, "")]),
    (
        "gpt2",
        &[
            (256, 768, 2304, "b"),
            (256, 3072, 768, "b"),
            (256, 2304, 768, ""),
            (2304, 256, 768, "a"),
            (64, 768, 50257, "b"),
        ],
    ),
    (
        "step",
        &[
            (8192, 768, 2304, "b"),
            (8192, 768, 3072, "b"),
            (8192, 3072, 768, ""),
            (3072, 8192, 768, "a"),
            (768, 8192, 768, "a"),
            (2048, 2048, 2048, "b"),
            (4096, 4096, 4096, "b"),
        ],
    ),
    (
        "narrow",
        &[
            (1, 128, 384, "b"),
            (1, 768, 2304, "b"),
            (1, 3072, 768, "b"),
            (1, 768, 2304, ""),
            (4, 768, 2304, "b"),
            (768, 2304, 1, ""),
        ],
    ),
];

struct Options {
    adapters: Vec<String>,
    sets: Vec<String>,
    variants: Vec<String>,
    rounds: usize,
    checks: ShaderChecks,
    precision: Precision,
}

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let (adapters, sets, variants) = (Vec::new(), vec!["gpt".into(), "square".into()], vec![]);
        let (checks, precision) = (ShaderChecks::Disabled, Precision::F32);
        let mut options = Self { adapters, sets, variants, rounds: 5, checks, precision };
        // Cargo passes --bench to every benchmark.
        let mut args = args.filter(|arg| arg != "--bench");
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            let split = |list: String| list.split(',').map(str::to_string).collect();
            match arg.as_str() {
                "--shapes" => options.sets = split(value()?),
                "--variants" => options.variants = split(value()?),
                "--rounds" => options.rounds = value()?.parse::<usize>()?.max(1),
                "--checked" => options.checks = ShaderChecks::Enabled,
                "--mixed" => options.precision = Precision::Mixed,
                _ => options.adapters.push(arg.to_lowercase()),
            }
        }
        Ok(options)
    }

    fn wants(&self, adapter: &Adapter) -> bool {
        let name = adapter.name.to_lowercase();
        if self.adapters.is_empty() {
            adapter.merged_into.is_none() && adapter.usable().is_ok()
        } else {
            self.adapters.iter().any(|part| name.contains(part)) && adapter.api != "gl"
        }
    }

    fn times(&self, variant: &Variant) -> bool {
        self.variants.is_empty() || self.variants.iter().any(|part| variant.name.contains(part))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    let mut products = Vec::new();
    for set in &options.sets {
        let found = SETS.iter().find(|(name, _)| name == set);
        products.extend(found.ok_or(format!("no set of shapes is called {set}"))?.1);
    }
    for adapter in list_adapters().iter().filter(|adapter| options.wants(adapter)) {
        let gpu = Gpu::open(adapter, options.checks, options.precision)?;
        println!("{} ({}), GFLOP/s", gpu.name, gpu.api);
        let mut pipelines = Pipelines::default();
        for product in &products {
            let rates = rates(&gpu, &mut pipelines, product, &options)?;
            let best = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
            println!("  {}", shown(product));
            for (name, rate) in rates {
                let mark = if rate == best { "  <" } else { "" };
                println!("    {name:<28}{rate:>10.2}{mark}");
            }
        }
    }
    Ok(())
}

/// Formats a product as `(768, 128) (384, 128)^T`.
fn shown(&(m, k, n, transposed): &Product) -> String {
    let matrix = |rows: usize, columns: usize, transposed: bool| {
        if transposed { format!("({columns}, {rows})^T") } else { format!("({rows}, {columns})") }
    };
    let [a, b] = ["a", "b"].map(|operand| transposed.contains(operand));
    format!("{} {}", matrix(m, k, a), matrix(k, n, b))
}

/// Returns the requested variants of a product, each with the median of its GFLOP/s.
fn rates(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    &(m, k, n, transposed): &Product,
    options: &Options,
) -> Result<Vec<(String, f64)>, Box<dyn Error>> {
    let [transpose_a, transpose_b] = ["a", "b"].map(|operand| transposed.contains(operand));
    let pair = |first, second, swapped| if swapped { [second, first] } else { [first, second] };
    let call = OpCall {
        op: &Op::MatMul { transpose_a, transpose_b },
        inputs: vec![pair(m, k, transpose_a).to_vec(), pair(k, n, transpose_b).to_vec()],
        outputs: vec![vec![m, n]],
        accumulate: Accumulation::NONE,
        precision: options.precision,
        loss_scale: 1.0,
        random: RandomContext { step_key: Key::new(0), training: true },
    };
    let inputs = [filled(gpu, m * k)?, filled(gpu, k * n)?];
    let output = gpu.storage("c", 4 * (m * n) as u64)?;
    let mut timed = Vec::new();
    for variant in
        matmul::variants(&call, &Caps::of(gpu)).into_iter().filter(|variant| options.times(variant))
    {
        let mut run =
            |repeats| seconds(gpu, pipelines, &variant.dispatches, &inputs, &output, repeats);
        run(1)?;
        let mut repeats = 1;
        while repeats < REPEATS_MAX && run(repeats)? * f64::from(repeats) < SECONDS_MIN {
            repeats *= 2;
        }
        timed.push((variant, repeats, Vec::new()));
    }
    for _ in 0..options.rounds {
        for (variant, repeats, taken) in &mut timed {
            let one = &variant.dispatches;
            taken.push(seconds(gpu, pipelines, one, &inputs, &output, *repeats)?);
        }
    }
    let flops = matmul::cost(&call).flops;
    let rate = |(variant, _, mut taken): (Variant, u32, Vec<f64>)| {
        taken.sort_by(f64::total_cmp);
        (variant.name, flops / taken[taken.len() / 2] / 1e9)
    };
    Ok(timed.into_iter().map(rate).collect())
}

/// Returns a buffer of random numbers in -1 .. 1.
fn filled(gpu: &Gpu, count: usize) -> Result<wgpu::Buffer, Box<dyn Error>> {
    let key = Key::new(count as u64);
    let number = |i| key.words([i as u32, 0])[0] as f32 / 2f32.powi(31) - 1.0;
    let numbers: Vec<f32> = (0..count).map(number).collect();
    let buffer = gpu.storage("operand", (DType::F32.bytes() * count) as u64)?;
    gpu.upload(&buffer, 0, bytemuck::cast_slice(&numbers));
    Ok(buffer)
}

/// Runs the dispatches `repeats` times in one submission and returns the seconds of one
/// repetition.
fn seconds(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    dispatches: &[Dispatch],
    inputs: &[wgpu::Buffer; 2],
    output: &wgpu::Buffer,
    repeats: u32,
) -> Result<f64, Box<dyn Error>> {
    let bound = BoundDispatch::of_buffers(
        gpu,
        pipelines,
        dispatches,
        inputs,
        std::slice::from_ref(output),
    )?;
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&Default::default());
    for dispatch in (0..repeats).flat_map(|_| &bound) {
        dispatch.record(&mut pass);
    }
    drop(pass);
    let started = Instant::now();
    gpu.submit_and_wait(encoder)?;
    Ok(started.elapsed().as_secs_f64() / f64::from(repeats))
}
