//! Trainers in mixed precision, on the CPU device, on every adapter, and on all of them in one run,
//! there with activations in bf16.

use crate::process::adapter_selectors;
use crate::small_gpt::{self, bits, model};
use potluck_core::HostTensor;
use potluck_graph::optim::Optimizer;
use potluck_graph::{ActivationFormat, Builder, Init, Precision};
use potluck_train::{Trainer, TrainerOptions};

const BATCH: usize = 8;
const STEPS: usize = 40;

/// Width of the model.
const WIDTH: usize = 32;
/// Learning rate.
const RATE: f64 = 0.003;

fn options(devices: &str, precision: Precision) -> TrainerOptions {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
    TrainerOptions {
        clip: 1.0,
        tune_s: 0.0,
        seed: 3,
        hash_every: 1,
        precision,
        ..TrainerOptions::new(devices, optimizer, BATCH)
    }
}

/// Options in mixed precision, with activations in bf16 too.
fn rounded(devices: &str) -> TrainerOptions {
    let activations = ActivationFormat::Bf16;
    TrainerOptions { activations, ..options(devices, Precision::Mixed) }
}

/// Runs steps up to `last`, and returns their losses.
fn train(trainer: &mut Trainer, last: usize) -> Vec<f64> {
    small_gpt::train(trainer, BATCH, RATE, last)
}

/// Asserts that losses follow the exact ones without being the same: means of ten steps within
/// half a percent.
fn assert_follows(losses: &[f64], exact: &[f64], what: &str) {
    let mean = |window: &[f64]| window.iter().sum::<f64>() / window.len() as f64;
    for (at, (window, exact)) in losses.chunks(10).zip(exact.chunks(10)).enumerate() {
        let (mean, exact) = (mean(window), mean(exact));
        let is_near = (mean - exact).abs() < 0.005 * exact;
        assert!(is_near, "{what}, steps from {}: {mean}, not {exact}", 10 * at);
    }
    assert_ne!(losses, exact, "{what} rounds nothing");
    assert!(losses[STEPS - 1] < 0.7 * losses[0], "{what}: {losses:?}");
}

#[test]
fn a_run_in_mixed_precision_follows_that_in_f32_and_goes_on_from_a_save() {
    let _turn = crate::common::turn();
    let mut devices = adapter_selectors();
    devices.push("cpu".into());
    for device in devices {
        let mut exact = Trainer::new(model(WIDTH), &options(&device, Precision::F32)).unwrap();
        let expected = train(&mut exact, STEPS);
        let mixed = options(&device, Precision::Mixed);
        let mut trainer = Trainer::new(model(WIDTH), &mixed).unwrap();
        let losses = train(&mut trainer, STEPS);
        assert_follows(&losses, &expected, &device);

        // Saved in the middle, read back, and with the same steps behind.
        let directory = tempfile::tempdir().unwrap();
        let mut first = Trainer::new(model(WIDTH), &mixed).unwrap();
        train(&mut first, STEPS / 2);
        first.save(directory.path()).unwrap();
        drop(first);
        let mut second = Trainer::load(model(WIDTH), &mixed, directory.path()).unwrap();
        assert_eq!(train(&mut second, STEPS), losses[STEPS / 2..], "{device}");
        assert!(bits(&second) == bits(&trainer), "{device}");
    }
}

/// Every replica has the same parameters after every step, on devices that round by different
/// means.
#[test]
fn unlike_devices_train_in_mixed_precision_together() {
    let _turn = crate::common::turn();
    let mut exact = Trainer::new(model(WIDTH), &options("cpu", Precision::F32)).unwrap();
    let expected = train(&mut exact, STEPS);
    let devices = [adapter_selectors(), vec!["cpu".into()]].concat().join(",");
    let together = TrainerOptions { micro_batch_size: 1, ..rounded(&devices) };
    let mut trainer = Trainer::new(model(WIDTH), &together).unwrap();
    assert_follows(&train(&mut trainer, STEPS), &expected, &devices);
}

/// A gradient that f16 has not: 2 (0 - 1e5) overflows in the products of the backward pass, the
/// steps are skipped on all devices, and the scale is halved until it fits.
#[test]
fn gradients_that_overflow_lower_the_loss_scale() {
    let _turn = crate::common::turn();
    let mut devices = adapter_selectors();
    devices.extend(["cpu".into(), "cpu*3".into()]);
    for device in devices {
        let mut b = Builder::new();
        b.block("layer");
        let x = b.input("x", &[1, 4]);
        let targets = b.input("targets", &[1, 3]);
        let weight = b.parameter("weight", &[3, 4], Init::Zeros);
        let y = b.linear(x, weight, None).unwrap();
        b.output("y", y);
        b.squared_error_loss(y, targets).unwrap();
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let mixed = TrainerOptions {
            tune_s: 0.0,
            hash_every: 1,
            precision: Precision::Mixed,
            ..TrainerOptions::new(&device, optimizer, 6)
        };
        let mut trainer = Trainer::new(b.finish(), &mixed).unwrap();
        let batch = [
            ("x", HostTensor::Float(vec![1.0; 24])),
            ("targets", HostTensor::Float(vec![1e5; 18])),
        ];
        let updated: Vec<bool> =
            (0..4).map(|_| trainer.step(&batch, 1e-3).unwrap().updated).collect();
        // 2e5 and 1e5 are too large, and 5e4 is not.
        assert_eq!(updated, [false, false, true, true], "{device}");
        // A step of 1e-3 times the mean of 2 (0 - 1e5) over the samples.
        let weight = &trainer.parameters().unwrap()[0].values;
        assert!(weight.iter().all(|value| *value > 100.0), "{device}: {weight:?}");
    }
}
