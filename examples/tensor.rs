//! A model whose layers are wider than a device: a tensor group divides each of them, all its
//! devices compute every sample together, and sum what they have after each pair of layers (Shoeybi
//! et al. 2019, "Megatron-LM"). The losses are those of one device, but for the order of the sums.
//!
//!     cargo run --release --example tensor -- [DEVICES] [SHARE..]
//!
//! For example `tensor 0,1`, or `tensor 0,cpu 3 1` if the first device shall have three quarters.

use ndarray::Array2;
use potluck::HostTensor;
use potluck::graph::{Builder, Graph, Init, ParameterSplit, SplitUnit, Unary};
use potluck::optim::Optimizer;
use potluck::train::{TensorOptions, Trainer, TrainerOptions};

const BATCH: usize = 32;
const HIDDEN: usize = 512;

/// A wide layer between two narrow ones. The first one is divided by its outputs: each device has
/// some of them, from all inputs. The second one is divided by its inputs, which are where they are
/// needed, and its result is a sum over the devices.
fn model() -> anyhow::Result<Graph> {
    let mut b = Builder::new();
    b.block("wide");
    let x = b.input("inputs", &[1, 2]);
    let up = b.parameter("up", &[HIDDEN, 2], Init::Normal { std: 0.5 });
    let bias = b.parameter("bias", &[HIDDEN], Init::Zeros);
    let y = b.linear(x, up, Some(bias))?;
    let y = b.unary(y, Unary::GeluTanh)?;
    let down = b.parameter("down", &[1, HIDDEN], Init::Normal { std: 0.05 });
    let y = b.linear(y, down, None)?;
    b.output("outputs", y);
    let targets = b.input("targets", &[1, 1]);
    b.squared_error_loss(y, targets)?;
    b.split_parameters(|name| match name {
        "up" | "bias" => Some(ParameterSplit::new(0, SplitUnit::Columns)),
        "down" => Some(ParameterSplit::new(1, SplitUnit::Columns)),
        _ => None,
    });
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

/// Trains the model, on a tensor group if there are shares, and returns the losses.
fn train(devices: &str, tensor: TensorOptions) -> anyhow::Result<Vec<f64>> {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let options = TrainerOptions { tensor, ..TrainerOptions::new(devices, optimizer, BATCH) };
    let mut trainer = Trainer::new(model()?, &options)?;
    trainer.notes().iter().for_each(|note| println!("{note}"));
    let (inputs, targets) = batch();
    let mut losses = Vec::new();
    for step in 1..=100 {
        let batch = [("inputs", inputs.clone()), ("targets", targets.clone())];
        losses.push(trainer.step(&batch, 0.005)?.loss);
        if step % 25 == 0 {
            println!("step {step:3}  loss {:.6}", losses[step - 1]);
        }
    }
    let product = trainer.predict("outputs", BATCH, &[("inputs", inputs)])?;
    println!("1 x 1 is about {:.2}", product[[BATCH - 1, 0]]);
    // Parameters have their names and shapes, wherever their slices are.
    let down = trainer.parameter("down")?;
    println!("{} has the shape {:?}", down.name, down.shape);
    Ok(losses)
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let devices = arguments.next().unwrap_or_else(|| "cpu*2".into());
    let mut shares = Vec::new();
    for argument in arguments {
        shares.push(argument.parse()?);
    }
    let ranks = if shares.is_empty() { 2 } else { shares.len() as u32 };
    let losses = train(&devices, TensorOptions { ranks, shares })?;
    println!("the same on one CPU device:");
    let alone = train("cpu", TensorOptions::default())?;
    let error = |(a, b): (&f64, &f64)| (a - b).abs() / b;
    let largest = losses.iter().zip(&alone).take(20).map(error).fold(0.0, f64::max);
    println!("the first 20 losses differ by {largest:.0e} of them at most");
    Ok(())
}
