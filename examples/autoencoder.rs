//! Variational autoencoder (Kingma and Welling 2013) of small pictures with two bars: layers with
//! their parameters, noise as an input, a loss of two terms that are reported by name, and pictures
//! beside what the model makes of them.
//!
//!     cargo run --release --example autoencoder -- [DEVICE]

use potluck::graph::{Builder, Graph, LossTerm, ShapeError, Unary};
use potluck::optim::Optimizer;
use potluck::train::{Trainer, TrainerOptions};
use potluck::{HostTensor, Key, nn};

const SIDE: usize = 8;
const PIXELS: usize = SIDE * SIDE;
const HIDDEN: usize = 96;
const CODE: usize = 6;
const BATCH: usize = 64;

/// Builds the model of `pictures` (b, pixels) and standard normal `noise` (b, code).
fn autoencoder() -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    let pictures = b.input("pictures", &[1, PIXELS]);
    let noise = b.input("noise", &[1, CODE]);
    let hidden = nn::linear(&mut b, "encoder", pictures, HIDDEN)?;
    let hidden = b.silu(hidden)?;
    let mean = nn::linear(&mut b, "mean", hidden, CODE)?;
    let log_variance = nn::linear(&mut b, "log_variance", hidden, CODE)?;

    let half = b.scale(log_variance, 0.5)?;
    let deviation = b.exp(half)?;
    let apart = b.mul(deviation, noise)?;
    let code = b.add(mean, apart)?;
    let hidden = nn::linear(&mut b, "decoder", code, HIDDEN)?;
    let hidden = b.silu(hidden)?;
    let logits = nn::linear(&mut b, "pixels", hidden, PIXELS)?;
    let drawn = b.sigmoid(logits)?;
    b.output("drawn", drawn);

    let errors = b.binary_cross_entropy(logits, pictures)?;
    // Divergence of the code from the noise, doubled: m^2 + s^2 - 1 - ln s^2.
    let squares = b.unary(mean, Unary::Square)?;
    let variance = b.exp(log_variance)?;
    let size = b.add(squares, variance)?;
    let size = b.sub(size, log_variance)?;
    let divergence = b.offset(size, -1.0)?;
    b.loss(&[
        LossTerm::sum("reconstruction", errors),
        LossTerm::sum("divergence", divergence).weighted(0.5),
    ])?;
    Ok(b.finish())
}

/// Returns pictures of one horizontal and one vertical bar, and as many normal numbers.
fn sample(step: u64) -> [(&'static str, HostTensor); 2] {
    let key = Key::new(3).step(step);
    let bar = |i: usize| (key.uniform(i as u64) * SIDE as f64) as usize;
    let pixel = |i: usize| {
        let (picture, row, column) = (i / PIXELS, i % PIXELS / SIDE, i % SIDE);
        f32::from(u8::from(row == bar(2 * picture) || column == bar(2 * picture + 1)))
    };
    let pictures = (0..BATCH * PIXELS).map(pixel).collect();
    let noise = (0..BATCH * CODE).map(|i| key.normal(i as u64) as f32).collect();
    [("pictures", HostTensor::Float(pictures)), ("noise", HostTensor::Float(noise))]
}

fn main() -> anyhow::Result<()> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let mut trainer =
        Trainer::new(autoencoder()?, &TrainerOptions::new(&device, optimizer, BATCH))?;
    for step in 1..=1500 {
        let report = trainer.step(&sample(step), 0.004)?;
        if step % 300 == 0 {
            let [(_, reconstruction), (_, divergence)] = &report.terms[..] else { continue };
            println!("step {step}  pixels {reconstruction:.2}  divergence {divergence:.2}");
        }
    }
    let samples = sample(0);
    let drawn = trainer.predict("drawn", BATCH, &samples)?;
    let HostTensor::Float(given) = &samples[0].1 else { anyhow::bail!("pictures are floats") };
    let line = |row: &[f32]| -> String {
        row.iter().map(|value| if *value > 0.5 { '#' } else { '.' }).collect()
    };
    let drawn: Vec<f32> = drawn.into_iter().collect();
    for (given, drawn) in given.chunks(SIDE).zip(drawn.chunks(SIDE)).take(2 * SIDE) {
        println!("{}  {}", line(given), line(drawn));
    }
    Ok(())
}
