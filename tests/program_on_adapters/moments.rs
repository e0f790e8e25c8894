//! Trainers that keep the moments of the optimizer in bf16: on the CPU device, on every adapter,
//! and on several devices.

use crate::process::adapter_selectors;
use crate::small_gpt::{self, bits, model};
use potluck_graph::MomentFormat;
use potluck_graph::optim::Optimizer;
use potluck_parallel::{PipelineOptions, TensorOptions};
use potluck_train::{Trainer, TrainerOptions};

const BATCH: usize = 4;
const STEPS: usize = 20;

/// Width of the model.
const WIDTH: usize = 16;
/// Learning rate.
const RATE: f64 = 0.01;

fn options(devices: &str, moments: MomentFormat) -> TrainerOptions {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
    TrainerOptions {
        clip: 1.0,
        tune_s: 0.0,
        seed: 3,
        hash_every: 1,
        moments,
        ..TrainerOptions::new(devices, optimizer, BATCH)
    }
}

/// Runs steps up to `last`, and returns their losses.
fn train(trainer: &mut Trainer, last: usize) -> Vec<f64> {
    small_gpt::train(trainer, BATCH, RATE, last)
}

fn assert_near(losses: &[f64], expected: &[f64], what: &str) {
    for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
        let difference = (loss - expected).abs();
        assert!(difference < 0.02 * expected, "{what}, step {step}: {loss}, not {expected}");
    }
}

#[test]
fn a_run_with_moments_in_bf16_follows_that_in_f32_and_goes_on_from_a_save() {
    let _turn = crate::common::turn();
    let mut devices = adapter_selectors();
    devices.push("cpu".into());
    for device in devices {
        let mut exact = Trainer::new(model(WIDTH), &options(&device, MomentFormat::F32)).unwrap();
        let expected = train(&mut exact, STEPS);
        let rounded = options(&device, MomentFormat::Bf16);
        let mut trainer = Trainer::new(model(WIDTH), &rounded).unwrap();
        let losses = train(&mut trainer, STEPS);
        assert_near(&losses, &expected, &device);
        assert_ne!(losses, expected, "{device}");
        assert!(losses[STEPS - 1] < 0.5 * losses[0], "{device}: {losses:?}");

        // Saved in the middle, read back, and with the same steps behind.
        let directory = tempfile::tempdir().unwrap();
        let mut first = Trainer::new(model(WIDTH), &rounded).unwrap();
        train(&mut first, STEPS / 2);
        first.save(directory.path()).unwrap();
        drop(first);
        let mut second = Trainer::load(model(WIDTH), &rounded, directory.path()).unwrap();
        assert_eq!(train(&mut second, STEPS), losses[STEPS / 2..], "{device}");
        assert!(bits(&second) == bits(&trainer), "{device}");
    }
}

/// Moments of f32 that a save has are rounded when they are read, and those of bf16 are exact in
/// f32.
#[test]
fn a_save_is_read_in_the_other_format() {
    let _turn = crate::common::turn();
    for (saved, read) in
        [(MomentFormat::F32, MomentFormat::Bf16), (MomentFormat::Bf16, MomentFormat::F32)]
    {
        let directory = tempfile::tempdir().unwrap();
        let mut first = Trainer::new(model(WIDTH), &options("cpu", saved)).unwrap();
        train(&mut first, STEPS / 2);
        first.save(directory.path()).unwrap();
        let expected = train(&mut first, STEPS);
        let mut second =
            Trainer::load(model(WIDTH), &options("cpu", read), directory.path()).unwrap();
        assert_near(&train(&mut second, STEPS), &expected, &format!("{saved:?} as {read:?}"));
    }
}

/// Shards of moments, stages and slices of tensors: every replica has the same parameters after
/// every step, and the losses of one device.
#[test]
fn several_devices_round_their_parts() {
    let _turn = crate::common::turn();
    let one = options("cpu", MomentFormat::Bf16);
    let expected = train(&mut Trainer::new(model(WIDTH), &one).unwrap(), STEPS);
    let stages = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let tensor = TensorOptions { ranks: 2, shares: Vec::new() };
    let two = |devices: &str| options(devices, MomentFormat::Bf16);
    let mut layouts = vec![
        two("cpu*3"),
        TrainerOptions { pipeline: stages.clone(), ..two("cpu*2") },
        TrainerOptions { tensor: tensor.clone(), ..two("cpu*2") },
        TrainerOptions { tensor, pipeline: stages, ..two("cpu*4") },
    ];
    layouts.extend(adapter_selectors().first().map(|adapter| two(&format!("cpu,{adapter}"))));
    for layout in layouts {
        let what = format!("{} {:?}", layout.devices, layout.pipeline.stages);
        let layout = TrainerOptions { micro_batch_size: 1, ..layout };
        let mut trainer = Trainer::new(model(WIDTH), &layout).unwrap();
        assert_near(&train(&mut trainer, STEPS), &expected, &what);
    }
}
