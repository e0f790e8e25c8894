//! The GPT step (4 layers, 4 heads, width 128, context 64, batch 12, vocabulary 65, AdamW) and a
//! matrix product of 512 on the CPU device and on every adapter found: medians, with the step's
//! share of the FLOP/s that the product reaches in the same run.
//!
//!     cargo bench --bench step -- [DEVICE ..] [--steps N] [--no-fuse]

use std::time::Instant;

use potluck::base::TensorId;
use potluck::device::list_adapters;
use potluck::graph::{Builder, Graph, Init, Unary};
use potluck::model::{GptConfig, gpt};
use potluck::optim::Optimizer;
use potluck::train::{TrainError, Trainer, TrainerOptions, Values};

const BATCH: usize = 12;
const CONTEXT: usize = 64;
const VOCABULARY: usize = 65;
const PRODUCT: usize = 512;
/// Products per step: so many that the rest of a step is small beside them.
const PRODUCTS: usize = 8;

fn main() -> Result<(), TrainError> {
    // Cargo passes --bench to every benchmark.
    let mut args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let fuse = !args.iter().any(|arg| arg == "--no-fuse");
    args.retain(|arg| arg != "--no-fuse");
    let mut steps = 10;
    if let Some(at) = args.iter().position(|arg| arg == "--steps") {
        steps = args.get(at + 1).and_then(|n| n.parse().ok()).unwrap_or(steps);
        args.drain(at..(at + 2).min(args.len()));
    }
    if args.is_empty() {
        args.push("cpu".into());
        let adapters = list_adapters();
        let shown = (0..adapters.len()).filter(|&index| adapters[index].merged_into.is_none());
        args.extend(shown.map(|index| index.to_string()));
    }
    println!(
        "{:<38}{:>10}{:>12}{:>12}{:>16}",
        "device", "ms/step", "tokens/s", "GFLOP/s", "512^3 GFLOP/s"
    );
    for device in &args {
        let (name, seconds) = step(device, steps, fuse)?;
        let tokens = (BATCH * CONTEXT) as f64;
        let (rate, peak) = (flops() / seconds / 1e9, product(device, steps)?);
        let (ms, speed) = (1e3 * seconds, tokens / seconds);
        println!("{name:<38}{ms:>10.1}{speed:>12.0}{rate:>12.1}{peak:>16.1}");
    }
    Ok(())
}

/// The matrix products of a step, forward and backward, without attention.
fn flops() -> f64 {
    let tokens = (BATCH * CONTEXT) as f64;
    let width = 128.0;
    let weights = 4.0 * 12.0 * width * width + VOCABULARY as f64 * width;
    6.0 * tokens * weights
}

/// The median seconds of a step, after three to warm up, and the device's name.
fn step(device: &str, steps: usize, fuse: bool) -> Result<(String, f64), TrainError> {
    let config = GptConfig {
        vocabulary: VOCABULARY,
        context: CONTEXT,
        layers: 4,
        heads: 4,
        width: 128,
        bias: false,
        dropout: 0.0,
        tie: true,
        activation: Unary::Gelu,
    };
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let options =
        TrainerOptions { clip: 1.0, fuse, ..TrainerOptions::new(device, optimizer, BATCH) };
    let mut trainer = Trainer::new(gpt(&config)?, &options)?;
    let ids = |factor: u32| {
        let token = |i: u32| i.wrapping_mul(factor) % VOCABULARY as u32;
        Values::Int((0..(BATCH * CONTEXT) as u32).map(token).collect())
    };
    let batch = [("tokens", ids(7)), ("targets", ids(11))];
    let seconds = median(steps, || trainer.step(&batch, 1e-3).map(|_| ()))?;
    Ok((trainer.device().to_string(), seconds))
}

/// GFLOP/s of square products in a forward pass.
fn product(device: &str, steps: usize) -> Result<f64, TrainError> {
    let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    let mut trainer = Trainer::new(chain(), &TrainerOptions::new(device, optimizer, 1))?;
    let zeros = Values::Float(vec![0.0; PRODUCT]);
    let seconds = median(steps, || trainer.predict("y", 1, &[("x", zeros.clone())]).map(|_| ()))?;
    Ok(2.0 * (PRODUCT as f64).powi(3) * PRODUCTS as f64 / seconds / 1e9)
}

/// A chain of products of parameters, of which one row meets the batch.
fn chain() -> Graph {
    let mut b = Builder::new();
    let square = |b: &mut Builder, name: &str| -> TensorId {
        b.parameter(name, &[PRODUCT, PRODUCT], Init::Normal { deviation: 0.04 })
    };
    let mut product = square(&mut b, "first");
    let other = square(&mut b, "other");
    let mut build = || {
        for _ in 0..PRODUCTS {
            product = b.matmul(product, other, false, false)?;
        }
        let x = b.input("x", &[1, PRODUCT]);
        let y = b.matmul(x, product, false, false)?;
        b.output("y", y);
        let target = b.input("target", &[1, PRODUCT]);
        b.squared_error_loss(y, target)
    };
    build().unwrap_or_else(|error| panic!("the benchmark's shapes fit: {error}"));
    b.finish()
}

fn median(
    steps: usize,
    mut body: impl FnMut() -> Result<(), TrainError>,
) -> Result<f64, TrainError> {
    for _ in 0..3 {
        body()?;
    }
    let mut seconds = Vec::with_capacity(steps);
    for _ in 0..steps.max(1) {
        let started = Instant::now();
        body()?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}
