//! Handwritten digits with a multilayer perceptron, as `examples/configs/mnist-mlp.toml` trains it:
//! run again, it goes on from its last save; if one of several devices is lost, it goes on without.
//!
//!     cargo run --release --example digits -- DIR [DEVICES] [SAVES]
//!
//! DIR has images and labels of MNIST, SAVES is the directory of the saves.

use std::{env, error::Error, ops::ControlFlow, path::Path, sync::Arc};

use potluck::checkpoint::Store;
use potluck::data::{Dataset, ReadOptions, SampleFormat, SampleOptions, SampleSet, load};
use potluck::graph::Unary;
use potluck::metrics::Event;
use potluck::model::{MlpConfig, MlpLoss, mlp};
use potluck::optim::{Decay, Optimizer, Schedule};
use potluck::train::{DeviceLoss, FitLength, FitOptions, Trainer, TrainerOptions, task_of_samples};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let images = args.first().ok_or("give the directory of the images and labels")?;
    let devices = args.get(1).map_or("auto", String::as_str);
    let saves = Path::new(args.get(2).map_or("runs/digits", String::as_str));

    let found = load(SampleFormat::Idx, Path::new(images), None, &ReadOptions::default())?;
    let split = SampleOptions { held_out: 0.2, normalize: true, saved: None };
    let digits = SampleSet::new(found, &split)?;
    let task = task_of_samples(&digits.description);
    let widths = vec![digits.description.inputs(), 256, digits.description.outputs()];
    let data: Arc<dyn Dataset> = Arc::new(digits);

    let loss = MlpLoss::CrossEntropy;
    let graph = mlp(&MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss })?;
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    let on_loss = DeviceLoss::Continue;
    let options =
        TrainerOptions { seed: 1337, on_loss, ..TrainerOptions::new(devices, optimizer, 128) };
    let (decay, lr, min_lr) = (Decay::Cosine, 2e-3, 2e-4);
    let schedule =
        Schedule { decay, lr, min_lr, warmup: 100, decay_steps: 1000, cooldown_steps: 0 };
    let (directory, save_every) = (Some(saves.to_path_buf()), 250);
    let fit = FitOptions {
        eval_every: 250,
        task,
        directory,
        save_every,
        ..FitOptions::new(FitLength::Steps(1000), schedule)
    };

    let mut trainer = if !Store::open_to_read(saves).steps()?.is_empty() {
        Trainer::load(graph, &options, saves)?
    } else {
        Trainer::on_data(graph, &options, &data)?
    };
    trainer.fit_with(&data, &fit, &mut |event| {
        match event {
            Event::Evaluation(record) => println!("step {}: {:?}", record.step, record.metrics),
            Event::Warning(text) => println!("{text}"),
            _ => {}
        }
        ControlFlow::Continue(())
    })?;
    Ok(())
}
