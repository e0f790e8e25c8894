//! A model in the stages of a pipeline: each device holds some of its layers, and micro-batches
//! travel from stage to stage. With the same seed it has the parameters of one device, to the bit.
//!
//!     cargo run --release --example pipeline -- [DEVICES] [STAGES]
//!
//! For example `pipeline 0,1 2`, or `pipeline cpu*4 2` for two pipelines of two stages each.

use ndarray::Array2;
use potluck::HostTensor;
use potluck::graph::{Builder, Graph, Init, Unary};
use potluck::optim::Optimizer;
use potluck::train::{PipelineOptions, PipelineSchedule, Trainer, TrainerOptions};

const BATCH: usize = 32;
const LAYERS: usize = 4;

/// Layers of one block each: a pipeline is cut between blocks.
fn model() -> anyhow::Result<Graph> {
    let mut b = Builder::new();
    b.block("first");
    let mut x = b.input("inputs", &[1, 2]);
    let mut width = 2;
    for layer in 0..LAYERS {
        b.block(&format!("layer {layer}"));
        let w = b.parameter(&format!("w{layer}"), &[16, width], Init::Normal { std: 0.4 });
        let bias = b.parameter(&format!("b{layer}"), &[16], Init::Zeros);
        let y = b.linear(x, w, Some(bias))?;
        x = b.unary(y, Unary::GeluTanh)?;
        width = 16;
    }
    b.block("last");
    let w = b.parameter("w", &[1, 16], Init::Normal { std: 0.2 });
    let y = b.linear(x, w, None)?;
    b.output("outputs", y);
    let targets = b.input("targets", &[1, 1]);
    b.squared_error_loss(y, targets)?;
    Ok(b.finish())
}

/// Points of the unit square, and the product of their coordinates.
fn batch() -> (HostTensor, HostTensor) {
    let at = |index: usize| ((index % 8) as f32 / 7.0, (index / 8) as f32 / 3.0);
    let inputs = Array2::from_shape_fn((BATCH, 2), |(index, axis)| {
        let (x, y) = at(index);
        if axis == 0 { x } else { y }
    });
    let targets = Array2::from_shape_fn((BATCH, 1), |(index, _)| at(index).0 * at(index).1);
    (HostTensor::from(inputs), HostTensor::from(targets))
}

/// Trains the model and returns its last loss and its parameters.
fn train(devices: &str, stages: u32) -> anyhow::Result<(f64, Vec<f32>)> {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let pipeline =
        PipelineOptions { stages, schedule: PipelineSchedule::OneFOneB, ..Default::default() };
    let options = TrainerOptions {
        micro_batch_size: 4,
        pipeline,
        ..TrainerOptions::new(devices, optimizer, BATCH)
    };
    let mut trainer = Trainer::new(model()?, &options)?;
    trainer.notes().iter().for_each(|note| println!("{note}"));
    let (inputs, targets) = batch();
    let mut loss = f64::NAN;
    for step in 1..=200 {
        let batch = [("inputs", inputs.clone()), ("targets", targets.clone())];
        loss = trainer.step(&batch, 0.01)?.loss;
        if step % 50 == 0 {
            println!("step {step:3}  loss {loss:.6}");
        }
    }
    let product = trainer.predict("outputs", BATCH, &[("inputs", inputs)])?;
    println!("1 x 1 is about {:.2}", product[[BATCH - 1, 0]]);
    let parameters = trainer.parameters()?;
    Ok((loss, parameters.into_iter().flat_map(|tensor| tensor.values).collect()))
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let devices = arguments.next().unwrap_or_else(|| "cpu*2".into());
    let stages = arguments.next().map_or(Ok(2), |stages| stages.parse())?;
    let (loss, parameters) = train(&devices, stages)?;
    if devices == format!("cpu*{stages}") {
        println!("the same on one device:");
        let (alone, expected) = train("cpu", 1)?;
        let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        let are_equal = loss == alone && parameters.iter().zip(&expected).all(is_same);
        println!("{}", if are_equal { "equal to the bit" } else { "not equal" });
    }
    Ok(())
}
