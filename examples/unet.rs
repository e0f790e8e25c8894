//! Small U-Net (Ronneberger, Fischer and Brox 2015) that finds discs in noisy pictures: skip
//! connections, transposed convolutions, a loss of two terms, and averages of the weights, with
//! which it draws masks in the end.
//!
//!     cargo run --release --example unet -- [DEVICE]

use potluck::graph::{Builder, Conv2dOptions, Graph, LossTerm, Pool2dOptions, ShapeError};
use potluck::optim::Optimizer;
use potluck::train::{Trainer, TrainerOptions};
use potluck::{HostTensor, Key, TensorId, nn};

const SIDE: usize = 16;
const PIXELS: usize = SIDE * SIDE;
const BATCH: usize = 16;
/// Channels of each level, from the whole picture to a quarter of its height and width.
const CHANNELS: [usize; 3] = [8, 16, 32];
const EPS: f32 = 1e-5;

type Built = Result<TensorId, ShapeError>;

/// Two convolutions that keep the size of `x` (b, h, w, c).
fn convolutions(b: &mut Builder, name: &str, mut x: TensorId, channels: usize) -> Built {
    for layer in ["a", "b"] {
        let name = format!("{name}.{layer}");
        let options = Conv2dOptions::default().with_padding(1);
        x = nn::conv2d(b, &format!("{name}.conv"), x, [channels, 3], options)?;
        x = nn::group_norm(b, &format!("{name}.norm"), x, 4, EPS)?;
        x = b.silu(x)?;
    }
    Ok(x)
}

/// One minus the overlap of probabilities and masks, both (b, h, w, 1), by picture: (b).
fn dice(b: &mut Builder, probabilities: TensorId, masks: TensorId) -> Built {
    let both = b.mul(probabilities, masks)?;
    let both = b.sum(both, &[1, 2, 3])?;
    let all = b.add(probabilities, masks)?;
    let all = b.sum(all, &[1, 2, 3])?;
    let twice = b.scale(both, -2.0)?;
    let all = b.offset(all, 1.0)?;
    let overlap = b.div(twice, all)?;
    b.offset(overlap, 1.0)
}

fn unet() -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    let mut x = b.input("pictures", &[1, SIDE, SIDE, 1]);
    let masks = b.input("masks", &[1, SIDE, SIDE, 1]);
    let [first, second, deepest] = CHANNELS;
    let mut skipped = Vec::new();
    for (level, channels) in [first, second].into_iter().enumerate() {
        x = convolutions(&mut b, &format!("down.{level}"), x, channels)?;
        skipped.push((level, channels, x));
        x = b.max_pool2d(x, Pool2dOptions::new(2))?;
    }
    x = convolutions(&mut b, "deepest", x, deepest)?;
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
    let apart = dice(&mut b, probabilities, masks)?;
    b.loss(&[LossTerm::mean("pixels", errors), LossTerm::mean("dice", apart)])?;
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
            let is_inside = (at[0] - center[0]).hypot(at[1] - center[1]) < radius;
            let mask = f32::from(u8::from(is_inside));
            masks.push(mask);
            let number = picture * PIXELS as u64 + pixel as u64;
            pictures.push(mask + 0.8 * noise.normal(number) as f32);
        }
    }
    [("pictures", HostTensor::Float(pictures)), ("masks", HostTensor::Float(masks))]
}

/// Returns the pixels that two masks share over those that one of them has.
fn intersection_over_union(masks: [&[f32]; 2]) -> f64 {
    let mut pixels = [0.0; 2];
    for (one, other) in masks[0].iter().zip(masks[1]) {
        let are_inside = [*one > 0.5, *other > 0.5];
        pixels[0] += f64::from(u8::from(are_inside == [true; 2]));
        pixels[1] += f64::from(u8::from(are_inside != [false; 2]));
    }
    pixels[0] / pixels[1]
}

fn main() -> anyhow::Result<()> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    let options = TrainerOptions { ema: 0.99, ..TrainerOptions::new(&device, optimizer, BATCH) };
    let mut trainer = Trainer::new(unet()?, &options)?;
    for step in 1..=600 {
        let report = trainer.step(&sample(step), 0.003)?;
        if step % 120 == 0 {
            let [(_, pixels), (_, dice)] = &report.terms[..] else { continue };
            println!("step {step}  pixels {pixels:.3}  dice {dice:.3}");
        }
    }
    let samples = sample(0);
    let drawn = trainer.predict("probabilities", BATCH, &samples[..1])?;
    let drawn: Vec<f32> = drawn.into_iter().collect();
    let HostTensor::Float(masks) = &samples[1].1 else { anyhow::bail!("masks are floats") };
    println!("intersection over union {:.3}", intersection_over_union([masks, &drawn]));
    let line = |row: &[f32]| -> String {
        row.iter().map(|value| if *value > 0.5 { '#' } else { '.' }).collect()
    };
    for (mask, drawn) in masks.chunks(SIDE).zip(drawn.chunks(SIDE)).take(SIDE) {
        println!("{}  {}", line(mask), line(drawn));
    }
    Ok(())
}
