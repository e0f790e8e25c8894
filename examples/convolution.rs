//! Convolutional network built from the public ops: a classifier of pictures made here, bars that
//! are horizontal, vertical or diagonal, under noise.
//!
//!     cargo run --release --example convolution -- [DEVICE]

use potluck::graph::{Builder, Conv2dOptions, Graph, Init, Pool2dOptions, ShapeError};
use potluck::optim::Optimizer;
use potluck::train::{Trainer, TrainerOptions};
use potluck::{HostTensor, Key};

/// Height and width of a picture.
const SIZE: usize = 12;
const CLASSES: usize = 3;
const BATCH: usize = 48;

/// Builds the classifier, with inputs `pictures` (b, h, w, c), channels last, and `targets` (b).
fn bars() -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    b.block("inputs");
    let mut x = b.input("pictures", &[1, SIZE, SIZE, 1]);
    let targets = b.input_ids("targets", &[1]);
    for (layer, [from, to]) in [[1, 8], [8, 16]].into_iter().enumerate() {
        let name = format!("conv{}", layer + 1);
        b.block(&name);
        let init = Init::Normal { std: (2.0 / (from * 3 * 3) as f32).sqrt() };
        let weight = b.parameter(&format!("{name}.weight"), &[to, from, 3, 3], init);
        // No bias, because the normalization would subtract it.
        x = b.conv2d(x, weight, None, Conv2dOptions::default().with_padding(1))?;
        x = b.batch_norm(&format!("{name}.norm"), x)?;
        x = b.relu(x)?;
        x = b.max_pool2d(x, Pool2dOptions::new(2))?;
    }
    b.block("out");
    let features = SIZE / 4 * (SIZE / 4) * 16;
    let flat = b.reshape(x, &[1, features])?;
    let init = Init::Normal { std: (features as f32).sqrt().recip() };
    let weight = b.parameter("out.weight", &[CLASSES, features], init);
    let bias = b.parameter("out.bias", &[CLASSES], Init::Zeros);
    let logits = b.linear(flat, weight, Some(bias))?;
    b.output("logits", logits);
    b.cross_entropy_loss(logits, targets)?;
    Ok(b.finish())
}

/// Returns pictures with a bar each at a random place, and the direction of each bar.
fn sample(step: u64) -> (Vec<f32>, Vec<u32>) {
    let (places, noise) = (Key::new(7).step(step), Key::new(8).step(step));
    let picture = |i: usize| {
        let (class, place) = (i % CLASSES, (places.uniform(i as u64) * SIZE as f64) as usize);
        let pixel = move |at: usize| {
            let (row, column) = (at / SIZE, at % SIZE);
            let line = [row, column, (row + column) % SIZE][class];
            let bar = if line == place { 2.0 } else { 0.0 };
            bar + 0.7 * noise.normal((i * SIZE * SIZE + at) as u64) as f32
        };
        ((0..SIZE * SIZE).map(pixel).collect::<Vec<f32>>(), class as u32)
    };
    let (pictures, classes): (Vec<_>, Vec<_>) = (0..BATCH).map(picture).unzip();
    (pictures.concat(), classes)
}

fn main() -> anyhow::Result<()> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    let options = TrainerOptions::new(&device, optimizer, BATCH);
    let mut trainer = Trainer::new(bars()?, &options)?;
    trainer.notes().iter().for_each(|note| println!("{note}"));
    for step in 1..=45 {
        let (pictures, classes) = sample(step);
        let batch =
            [("pictures", HostTensor::Float(pictures)), ("targets", HostTensor::Int(classes))];
        let report = trainer.step(&batch, 0.01)?;
        if step % 15 == 0 {
            println!("step {step}  loss {:.4}", report.loss);
        }
    }
    // Pictures of steps that are not trained on.
    let mut right = 0;
    for step in 1000..1003 {
        let (pictures, classes) = sample(step);
        let inputs = [("pictures", HostTensor::Float(pictures))];
        let logits = trainer.predict("logits", BATCH, &inputs)?;
        for (logits, class) in logits.outer_iter().zip(classes) {
            right += usize::from((0..CLASSES).all(|other| logits[other] <= logits[class as usize]));
        }
    }
    println!("accuracy {:.1} %", 100.0 * right as f64 / (3 * BATCH) as f64);
    Ok(())
}
