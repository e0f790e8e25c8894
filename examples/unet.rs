//! Small U-Net (Ronneberger, Fischer and Brox 2015) that finds discs in noisy pictures: skip
//! connections, transposed convolutions, and averages of the weights, with which it draws masks.
//!
//!     cargo run --release --example unet -- [DEVICE]

use potluck::graph::{Builder, Conv2dOptions, Graph, LossTerm, Pool2dOptions, ShapeError};
use potluck::optim::Optimizer;
use potluck::train::{Trainer, TrainerOptions};
use potluck::{HostTensor, Key, TensorId, nn};

const SIDE: usize = 16;
const PIXELS: usize = SIDE * SIDE;
const BATCH: usize = 16;
const CHANNELS: [usize; 2] = [8, 16]; // Of the whole picture, and of half of its size.

type Built = Result<TensorId, ShapeError>;

/// Two convolutions that keep the size of `x` (b, h, w, c).
fn convolutions(b: &mut Builder, name: &str, mut x: TensorId, channels: usize) -> Built {
    for layer in ["a", "b"] {
        let name = format!("{name}.{layer}");
        let options = Conv2dOptions::default().with_padding(1);
        x = nn::conv2d(b, &format!("{name}.conv"), x, [channels, 3], options)?;
        x = nn::group_norm(b, &format!("{name}.norm"), x, 4, 1e-5)?;
        x = b.silu(x)?;
    }
    Ok(x)
}

fn unet() -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    let mut x = b.input("pictures", &[1, SIDE, SIDE, 1]);
    let masks = b.input("masks", &[1, SIDE, SIDE, 1]);
    let mut skipped = Vec::new();
    for (level, channels) in CHANNELS.into_iter().enumerate() {
        x = convolutions(&mut b, &format!("down.{level}"), x, channels)?;
        skipped.push((level, channels, x));
        x = b.max_pool2d(x, Pool2dOptions::new(2))?;
    }
    x = convolutions(&mut b, "deepest", x, 32)?;
    while let Some((level, channels, skip)) = skipped.pop() {
        let name = format!("up.{level}");
        let options = Conv2dOptions::default().with_stride(2);
        x = nn::conv_transpose2d(&mut b, &format!("{name}.grow"), x, [channels, 2], options)?;
        x = b.concat(&[skip, x], 3)?;
        x = convolutions(&mut b, &name, x, channels)?;
    }
    let logits = nn::conv2d(&mut b, "out", x, [1, 1], Conv2dOptions::default())?;
    let probabilities = b.sigmoid(logits)?;
    b.output("probabilities", probabilities);
    let errors = b.binary_cross_entropy(logits, masks)?;
    b.loss(&[LossTerm::mean("pixels", errors)])?;
    Ok(b.finish())
}

/// Returns pictures of a disc each under noise, and the masks of the discs.
fn sample(step: u64) -> [(&'static str, HostTensor); 2] {
    let (places, noise) = (Key::new(5).step(step), Key::new(6).step(step));
    let mut pictures = Vec::with_capacity(BATCH * PIXELS);
    let mut masks = Vec::with_capacity(BATCH * PIXELS);
    for picture in 0..BATCH as u64 {
        let draw = |which: u64| places.uniform(3 * picture + which);
        let radius = 2.0 + 3.0 * draw(0);
        let center = [draw(1), draw(2)].map(|place| place * SIDE as f64);
        for pixel in 0..PIXELS {
            let at = [pixel / SIDE, pixel % SIDE].map(|place| place as f64 + 0.5);
            let distance = (at[0] - center[0]).hypot(at[1] - center[1]);
            let mask = if distance < radius { 1.0 } else { 0.0 };
            masks.push(mask);
            pictures.push(mask + 0.8 * noise.normal(picture << 32 | pixel as u64) as f32);
        }
    }
    [("pictures", HostTensor::Float(pictures)), ("masks", HostTensor::Float(masks))]
}

fn main() -> anyhow::Result<()> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    let options = TrainerOptions { ema: 0.99, ..TrainerOptions::new(&device, optimizer, BATCH) };
    let mut trainer = Trainer::new(unet()?, &options)?;
    for step in 1..=600 {
        let report = trainer.step(&sample(step), 0.003)?;
        if step % 120 == 0 {
            println!("step {step}  loss {:.3}", report.loss);
        }
    }
    let samples = sample(0);
    let drawn = trainer.predict("probabilities", BATCH, &samples[..1])?.into_raw_vec_and_offset().0;
    let HostTensor::Float(masks) = &samples[1].1 else { anyhow::bail!("masks are floats") };
    let errors = masks.iter().zip(&drawn).filter(|(mask, drawn)| (*mask - *drawn).abs() > 0.5);
    println!("{} of {} pixels are wrong", errors.count(), masks.len());
    let line = |row: &[f32]| -> String {
        row.iter().map(|value| if *value > 0.5 { '#' } else { '.' }).collect()
    };
    for (mask, drawn) in masks.chunks(SIDE).zip(drawn.chunks(SIDE)).take(SIDE) {
        println!("{}  {}", line(mask), line(drawn));
    }
    Ok(())
}
