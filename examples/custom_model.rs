//! Custom model built from the public ops: a classifier of points on two spirals, with layer
//! norm, a residual connection and dropout; and the builder's error for shapes that do not fit.
//!
//!     cargo run --release --example custom_model -- [DEVICE]

use potluck::graph::{Builder, Graph, Init, ShapeError, Unary};
use potluck::optim::Optimizer;
use potluck::train::{Trainer, TrainerOptions};
use potluck::{HostTensor, Key};

const WIDTH: usize = 32;
const BATCH: usize = 128;

/// Builds the classifier, with inputs `points` (b, 2) and `targets` (b), which are classes.
fn spirals() -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    let normal = |from: usize| Init::Normal { std: (2.0 / from as f32).sqrt() };
    b.block("in");
    let points = b.input("points", &[1, 2]);
    let targets = b.input_ids("targets", &[1]);
    let weight = b.parameter("in.weight", &[WIDTH, 2], normal(2));
    let bias = b.parameter("in.bias", &[WIDTH], Init::Normal { std: 1.0 });
    let mut x = b.linear(points, weight, Some(bias))?;
    x = b.unary(x, Unary::Gelu)?;
    for layer in 0..2 {
        b.block(&format!("layer {layer}"));
        let scale = b.parameter(&format!("{layer}.norm"), &[WIDTH], Init::Ones);
        let weight = b.parameter(&format!("{layer}.weight"), &[WIDTH, WIDTH], normal(WIDTH));
        let y = b.layer_norm(x, scale, None)?;
        let y = b.linear(y, weight, None)?;
        let y = b.unary(y, Unary::Gelu)?;
        let y = b.dropout(y, 0.05)?;
        x = b.add(x, y)?;
    }
    b.block("out");
    let head = b.parameter("out.weight", &[2, WIDTH], normal(WIDTH));
    let logits = b.linear(x, head, None)?;
    b.output("logits", logits);
    b.cross_entropy_loss(logits, targets)?;
    Ok(b.finish())
}

/// Returns points on two arms that wind around each other, and the arm of each point.
fn sample(step: u64) -> (Vec<f32>, Vec<u32>) {
    let key = Key::new(7).step(step);
    let point = |i: u64| {
        let (arm, r) = ((i % 2) as u32, key.uniform(i));
        let angle = 5.0 * r + std::f64::consts::PI * f64::from(arm);
        ([(2.0 * r * angle.cos()) as f32, (2.0 * r * angle.sin()) as f32], arm)
    };
    let (points, arms): (Vec<_>, Vec<_>) = (0..BATCH as u64).map(point).unzip();
    (points.concat(), arms)
}

fn main() -> anyhow::Result<()> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    let options = TrainerOptions::new(&device, optimizer, BATCH);
    let mut trainer = Trainer::new(spirals()?, &options)?;
    trainer.notes().iter().for_each(|note| println!("{note}"));
    for step in 1..=400 {
        let (points, arms) = sample(step);
        let batch = [("points", HostTensor::Float(points)), ("targets", HostTensor::Int(arms))];
        let report = trainer.step(&batch, 0.01)?;
        if step % 100 == 0 {
            println!("step {step}  loss {:.4}", report.loss);
        }
    }
    let (points, arms) = sample(0);
    let logits = trainer.predict("logits", BATCH, &[("points", HostTensor::Float(points))])?;
    let right = logits.outer_iter().zip(&arms).filter(|(l, arm)| (l[1] > l[0]) == (**arm == 1));
    println!("accuracy {:.1} %", 100.0 * right.count() as f64 / BATCH as f64);

    let mut b = Builder::new();
    let (x, y) = (b.input("x", &[1, 3]), b.input("y", &[1, 4]));
    if let Err(error) = b.add(x, y) {
        println!("and shapes that do not fit are told: {error}");
    }
    Ok(())
}
