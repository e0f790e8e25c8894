//! Exclusive or, the smallest problem that needs a hidden layer.
//!
//!     cargo run --release --example xor -- [DEVICE]

use ndarray::array;
use potluck::HostTensor;
use potluck::graph::Unary;
use potluck::model::{MlpConfig, MlpLoss, mlp};
use potluck::optim::Optimizer;
use potluck::train::{Trainer, TrainerOptions};

fn main() -> anyhow::Result<()> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let config = MlpConfig {
        widths: vec![2, 8, 1],
        activation: Unary::GeluTanh,
        dropout: 0.0,
        loss: MlpLoss::SquaredError,
    };
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
    let mut trainer = Trainer::new(mlp(&config)?, &TrainerOptions::new(&device, optimizer, 4))?;
    trainer.notes().iter().for_each(|note| println!("{note}"));
    println!("training on {}", trainer.device());

    let inputs = HostTensor::from(array![[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]);
    let targets = HostTensor::from(array![[0.0], [1.0], [1.0], [0.0]]);
    let batch = [("inputs", inputs.clone()), ("targets", targets)];
    for step in 1..=300 {
        let report = trainer.step(&batch, 0.02)?;
        if step % 50 == 0 {
            println!("step {step:3}  loss {:.6}", report.loss);
        }
    }
    let outputs = trainer.predict("outputs", 4, &[("inputs", inputs)])?;
    for (pair, output) in ["0 0", "0 1", "1 0", "1 1"].iter().zip(&outputs) {
        println!("{pair} -> {output:.3}");
    }
    let right = outputs.iter().zip([0.0, 1.0, 1.0, 0.0]).all(|(y, t)| (y - t).abs() < 0.2);
    println!("{}", if right { "learned" } else { "not learned" });
    Ok(())
}
