//! Op of your own: the activation Snake, x + sin^2(a x) / a (Ziyin, Hartwig and Ueda 2020), in a
//! small network that learns a periodic function. The op is a WGSL expression and the same function
//! in f64: its gradient is checked, and a device runs it once the two agree there.
//!
//! Ops that are not elementwise implement `potluck::custom_op::CustomOp`, whose page has an
//! example.
//!
//!     cargo run --release --example custom_op -- [DEVICE]

use potluck::custom_op::{Elementwise, check_gradient};
use potluck::graph::{Builder, Graph, Init, ShapeError};
use potluck::optim::Optimizer;
use potluck::train::{Trainer, TrainerOptions};
use potluck::{HostTensor, Key, Shape};

const BATCH: usize = 64;
const WIDTH: usize = 32;

/// Returns the op; its parameter is in its name and in its text.
fn snake(a: f64) -> Elementwise {
    let value = format!("x + sin({a:?} * x) * sin({a:?} * x) / {a:?}");
    let slope = format!("dy * (1.0 + sin(2.0 * {a:?} * x))");
    Elementwise::new(format!("snake {a}"), &["x"], value, move |v| {
        v[0] + (a * v[0]).sin().powi(2) / a
    })
    .with_gradient(slope, move |v| v[1] * (1.0 + (2.0 * a * v[0]).sin()))
}

/// Builds a network with inputs `x` (b, 1) and `target` (b, 1).
fn network() -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    let (input, target) = (b.input("x", &[1, 1]), b.input("target", &[1, 1]));
    let (mut x, mut width) = (input, 1);
    for layer in 0..2 {
        b.block(&format!("layer {layer}"));
        let std = (1.0 / width as f32).sqrt();
        let weight = b.parameter(&format!("{layer}.w"), &[WIDTH, width], Init::Normal { std });
        let bias = b.parameter(&format!("{layer}.b"), &[WIDTH], Init::Uniform { bound: 1.0 });
        x = b.linear(x, weight, Some(bias))?;
        x = b.custom(snake(2.0), &[x])?;
        width = WIDTH;
    }
    b.block("out");
    let head = b.parameter("head", &[1, WIDTH], Init::Normal { std: 0.1 });
    let y = b.linear(x, head, None)?;
    b.output("y", y);
    b.squared_error_loss(y, target)?;
    Ok(b.finish())
}

/// Returns points of a periodic function.
fn sample(step: u64) -> [(&'static str, HostTensor); 2] {
    let draw = |i| (8.0 * Key::new(3).step(step).uniform(i) - 4.0) as f32;
    let x: Vec<f32> = (0..BATCH as u64).map(draw).collect();
    let target = x.iter().map(|x| (3.0 * x).sin() + 0.5 * x.cos()).collect();
    [("x", HostTensor::Float(x)), ("target", HostTensor::Float(target))]
}

fn main() -> anyhow::Result<()> {
    check_gradient(snake(2.0), &[Shape::batched(&[1, 8])], 1)?;
    println!("the gradient agrees with differences of the reference");
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let mut trainer = Trainer::new(network()?, &TrainerOptions::new(&device, optimizer, BATCH))?;
    println!("training on {}", trainer.device());
    for step in 1..=300 {
        let report = trainer.step(&sample(step), 0.01)?;
        if step % 100 == 0 {
            println!("step {step}  loss {:.5}", report.loss);
        }
    }
    Ok(())
}
