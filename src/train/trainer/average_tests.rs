//! Tests of exponential averages of the parameters.

use std::ops::ControlFlow;

use super::fit_tests::{bits, options, steps, wave_model, waves};
use super::group_tests;
use super::state_tests::batch;
use super::*;
use crate::left_devices::LeftDevices;
use crate::{FitOptions, MismatchAction, PipelineOptions, Shares, TensorOptions};
use potluck_core::metrics::Event;
use potluck_data::Split;
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Init, MomentFormat};

const EMA: f64 = 0.75;

fn averaged(devices: &str) -> TrainerOptions {
    TrainerOptions { ema: EMA, ..options(devices) }
}

fn bits_of(tensors: &[NamedTensor]) -> Vec<u32> {
    tensors.iter().flat_map(|tensor| &tensor.values).map(|value| value.to_bits()).collect()
}

/// Asserts that the trainer's averages after `count` steps are the averages of its parameters.
fn check_averages(options: &TrainerOptions, graph: Graph, count: usize) {
    let mut trainer = Trainer::new(graph, options).unwrap();
    assert_eq!(trainer.averaged_parameters().unwrap(), trainer.parameters().unwrap());
    let mut expected: Vec<Vec<f64>> = Vec::new();
    for step in 0..count {
        group_tests::train(&mut trainer, 1);
        for (index, tensor) in trainer.parameters().unwrap().into_iter().enumerate() {
            let values = tensor.values.iter().map(|value| f64::from(*value));
            if step == 0 {
                expected.push(values.collect());
                continue;
            }
            for (average, value) in expected[index].iter_mut().zip(values) {
                *average = EMA * *average + (1.0 - EMA) * value;
            }
        }
    }
    let found = trainer.averaged_parameters().unwrap();
    assert_ne!(found, trainer.parameters().unwrap());
    for (tensor, expected) in found.iter().zip(&expected) {
        for (value, expected) in tensor.values.iter().zip(expected) {
            let error = (f64::from(*value) - expected).abs();
            assert!(error <= 2e-7 * expected.abs().max(0.1), "{}: {error:.1e}", tensor.name);
        }
    }
}

#[test]
fn averages_follow_the_parameters_however_these_are_spread() {
    let plain = group_tests::options("cpu", group_tests::ADAMW, &[]);
    let alone = TrainerOptions { ema: EMA, ..plain };
    let uneven = Shares::Fixed(vec![4, 2]);
    let rounded = TrainerOptions { moments: MomentFormat::Bf16, ..alone.clone() };
    let tensor = TensorOptions { ranks: 2, shares: vec![2, 1] };
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let of =
        |options: &TrainerOptions| TrainerOptions { devices: "cpu*2".into(), ..options.clone() };
    let ways = [
        TrainerOptions { shares: uneven.clone(), ..of(&alone) },
        TrainerOptions { shares: uneven, ..of(&rounded) },
        TrainerOptions { tensor, ..of(&alone) },
        TrainerOptions { pipeline, ..of(&alone) },
        rounded,
        alone,
    ];
    for options in ways {
        check_averages(&options, group_tests::model(), 4);
    }
}

#[test]
fn evaluations_take_the_averages_and_leave_training_as_it_is() {
    let mut plain = Trainer::new(wave_model(), &options("cpu*2")).unwrap();
    plain.fit(&waves(), &steps(7)).unwrap();
    let mut trainer = Trainer::new(wave_model(), &averaged("cpu*2")).unwrap();
    let report = trainer.fit(&waves(), &FitOptions { keep_best: true, ..steps(7) }).unwrap();
    assert_eq!(bits(&trainer), bits(&plain));

    let averages = trainer.averaged_parameters().unwrap();
    let mut other = Trainer::new(wave_model(), &options("cpu*2")).unwrap();
    other.set_parameters(&averages).unwrap();
    let evaluated = other.evaluate(&waves(), Split::Validation, 0).unwrap();
    assert_eq!(trainer.evaluate(&waves(), Split::Validation, 0).unwrap(), evaluated);
    assert_eq!(report.val_loss, Some(evaluated.loss));
    assert_ne!(plain.evaluate(&waves(), Split::Validation, 0).unwrap().loss, evaluated.loss);
    let best = report.best_parameters.unwrap();
    let mut at_best = Trainer::new(wave_model(), &options("cpu*2")).unwrap();
    at_best.set_parameters(&best).unwrap();
    let loss = at_best.evaluate(&waves(), Split::Validation, 0).unwrap().loss;
    assert_eq!(loss, report.best.unwrap().val_loss);

    let rows = [
        ("x", HostTensor::Float(vec![0.5, 1.0, 0.25, 1.0])),
        ("y", HostTensor::Float(vec![0.5, 0.25])),
    ];
    let given = other.evaluate_rows(2, &rows).unwrap();
    assert_eq!(trainer.evaluate_rows(2, &rows).unwrap(), given);
    assert_eq!(bits(&trainer), bits(&plain));
}

#[test]
fn a_save_has_the_averages_and_goes_on_with_them() {
    let place = tempfile::tempdir().unwrap();
    let mut whole = Trainer::new(wave_model(), &averaged("cpu*2")).unwrap();
    whole.fit(&waves(), &steps(3)).unwrap();
    whole.save(place.path()).unwrap();
    let saved = whole.averaged_parameters().unwrap();
    whole.fit(&waves(), &steps(6)).unwrap();
    // On other devices, which own other parts.
    for devices in ["cpu*2", "cpu"] {
        let mut loaded = Trainer::load(wave_model(), &averaged(devices), place.path()).unwrap();
        assert_eq!(loaded.averaged_parameters().unwrap(), saved);
        assert_eq!(loaded.notes().iter().filter(|note| note.contains("averages")).count(), 0);
        if devices == "cpu*2" {
            loaded.fit(&waves(), &steps(6)).unwrap();
            let found = bits_of(&loaded.averaged_parameters().unwrap());
            assert_eq!(found, bits_of(&whole.averaged_parameters().unwrap()));
        }
    }
    // What only computes takes the averages.
    let (found, _) = Checkpoint::parameters_of_path(place.path()).unwrap();
    assert_eq!(found.parameters, saved);
    let with_all = Checkpoint::load(&place.path().join("checkpoints/step-00000003")).unwrap();
    assert_ne!(with_all.parameters, saved);
}

#[test]
fn averages_that_a_save_lacks_begin_as_its_parameters() {
    let place = tempfile::tempdir().unwrap();
    let mut plain = Trainer::new(wave_model(), &options("cpu")).unwrap();
    plain.fit(&waves(), &steps(2)).unwrap();
    plain.save(place.path()).unwrap();
    let mut trainer = Trainer::load(wave_model(), &averaged("cpu"), place.path()).unwrap();
    let told = "the checkpoint has no averages of the parameters: they begin at step 2";
    assert!(trainer.notes().iter().any(|note| note == told), "{:?}", trainer.notes());
    assert_eq!(trainer.averaged_parameters().unwrap(), plain.parameters().unwrap());
    trainer.fit(&waves(), &steps(3)).unwrap();
    let before = plain.parameters().unwrap();
    let after = trainer.parameters().unwrap();
    for (index, average) in trainer.averaged_parameters().unwrap().iter().enumerate() {
        for (at, value) in average.values.iter().enumerate() {
            let mean = 0.75 * before[index].values[at] + 0.25 * after[index].values[at];
            assert!((value - mean).abs() < 1e-6, "{value} for {mean}");
        }
    }
}

#[test]
fn what_is_not_trained_has_no_average() {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 4]);
    let y = b.input("y", &[1, 1]);
    let w = b.parameter("w", &[4, 4], Init::Normal { std: 0.5 });
    let h = b.linear(x, w, None).unwrap();
    let h = b.batch_norm("norm", h).unwrap();
    let v = b.parameter("frozen", &[1, 4], Init::Normal { std: 0.5 });
    let z = b.linear(h, v, None).unwrap();
    b.squared_error_loss(z, y).unwrap();
    let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };
    let groups = vec!["frozen frozen".parse().unwrap()];
    let options = TrainerOptions { ema: EMA, groups, ..TrainerOptions::new("cpu", optimizer, 4) };
    let mut trainer = Trainer::new(b.finish(), &options).unwrap();
    for step in 0..3 {
        let values = |n: usize| (0..n).map(|i| ((i + 5 * step) as f32 * 0.7).sin()).collect();
        let batch = [("x", HostTensor::Float(values(16))), ("y", HostTensor::Float(values(4)))];
        trainer.step(&batch, 0.1).unwrap();
    }
    let raw = trainer.parameters().unwrap();
    for (average, raw) in trainer.averaged_parameters().unwrap().iter().zip(&raw) {
        let is_averaged = ["w", "norm.weight", "norm.bias"].contains(&&*raw.name);
        assert_eq!(average.values != raw.values, is_averaged, "{}", raw.name);
    }
}

#[test]
fn a_device_lost_behind_an_evaluation_leaves_the_parameters() {
    let faults = "lost@backward:4/1".parse().unwrap();
    let options = TrainerOptions { faults, snapshot_every: 2, ..averaged("cpu*2") };
    let mut trainer = Trainer::new(wave_model(), &options).unwrap();
    trainer.fit(&waves(), &steps(3)).unwrap();
    let mut plain = Trainer::new(wave_model(), &self::options("cpu*2")).unwrap();
    plain.fit(&waves(), &steps(3)).unwrap();
    // The devices hold averages.
    trainer.evaluate(&waves(), Split::Validation, 0).unwrap();
    assert_eq!(bits(&trainer), bits(&plain));
    trainer.step(&batch(3), 0.05).unwrap_err();
    assert_eq!(bits(&trainer), bits(&plain));

    let devices = "cpu*2".into();
    let left = LeftDevices { devices, stages: None, tensor: None, spare: 0, are_as_typed: false };
    let state = trainer.last_state().unwrap();
    assert_eq!(trainer.reopen_on(left, state).unwrap(), 2);
    let mut undisturbed = Trainer::new(wave_model(), &averaged("cpu*2")).unwrap();
    undisturbed.fit(&waves(), &steps(2)).unwrap();
    let found = trainer.averaged_parameters().unwrap();
    assert_eq!(found, undisturbed.averaged_parameters().unwrap());
    assert_ne!(found, trainer.parameters().unwrap());
}

#[test]
fn devices_that_differ_are_found_before_an_evaluation_makes_them_equal() {
    for on_mismatch in [MismatchAction::Stop, MismatchAction::Repair] {
        let faults = "flip@gather:3/1".parse().unwrap();
        let options = TrainerOptions { faults, on_mismatch, ..averaged("cpu*3") };
        let mut trainer = Trainer::new(wave_model(), &options).unwrap();
        for step in 1..=3 {
            trainer.step(&batch(step), 0.05).unwrap();
        }
        let evaluated = trainer.evaluate(&waves(), Split::Validation, 0);
        if on_mismatch == MismatchAction::Repair {
            evaluated.unwrap();
            assert!(trainer.notes().iter().any(|note| note.contains("they were repaired")));
        } else {
            let told = evaluated.unwrap_err().to_string();
            assert!(told.contains("step 3"), "{told}");
        }
    }
}

#[test]
fn repairs_before_an_evaluation_are_told() {
    let faults = "flip@gather:4/1".parse().unwrap();
    let on_mismatch = MismatchAction::Repair;
    let options = TrainerOptions { faults, on_mismatch, ..averaged("cpu*3") };
    let mut trainer = Trainer::new(wave_model(), &options).unwrap();
    let mut warnings = Vec::new();
    let fitted = trainer.fit_with(&waves(), &steps(4), &mut |event| {
        if let Event::Warning(text) = event {
            warnings.push(text.clone());
        }
        ControlFlow::Continue(())
    });
    fitted.unwrap();
    assert!(matches!(&warnings[..], [one] if one.contains("they were repaired")), "{warnings:?}");
}

#[test]
fn a_save_behind_an_evaluation_has_the_parameters() {
    let place = tempfile::tempdir().unwrap();
    let mut undisturbed = Trainer::new(wave_model(), &averaged("cpu*2")).unwrap();
    let mut trainer = Trainer::new(wave_model(), &averaged("cpu*2")).unwrap();
    for step in 1..=4 {
        undisturbed.step(&batch(step), 0.05).unwrap();
        trainer.step(&batch(step), 0.05).unwrap();
        // The second pass finds the averages in place.
        for _ in 0..2 {
            trainer.evaluate(&waves(), Split::Validation, 0).unwrap();
        }
        if step == 2 {
            trainer.save(place.path()).unwrap();
            trainer.gradients(&batch(step)).unwrap();
        }
    }
    let mut loaded = Trainer::load(wave_model(), &averaged("cpu*2"), place.path()).unwrap();
    for step in 3..=4 {
        loaded.step(&batch(step), 0.05).unwrap();
    }
    for trainer in [&trainer, &loaded] {
        assert_eq!(bits(trainer), bits(&undisturbed));
        let averages = undisturbed.averaged_parameters().unwrap();
        assert_eq!(trainer.averaged_parameters().unwrap(), averages);
    }
}

#[test]
fn parameters_that_are_set_are_their_averages() {
    for devices in ["cpu", "cpu*2"] {
        let mut trainer = Trainer::new(wave_model(), &averaged(devices)).unwrap();
        let fit = FitOptions { keep_best: true, ..steps(5) };
        let best = trainer.fit(&waves(), &fit).unwrap().best_parameters.unwrap();
        trainer.evaluate(&waves(), Split::Validation, 0).unwrap();
        trainer.set_parameters(&best).unwrap();
        assert_eq!(trainer.parameters().unwrap(), best);
        assert_eq!(trainer.averaged_parameters().unwrap(), best);
        let loss = trainer.evaluate(&waves(), Split::Validation, 0).unwrap().loss;
        let mut other = Trainer::new(wave_model(), &options(devices)).unwrap();
        other.set_parameters(&best).unwrap();
        assert_eq!(other.evaluate(&waves(), Split::Validation, 0).unwrap().loss, loss);
    }
}

#[test]
fn a_skipped_step_moves_no_average_and_the_first_update_begins_them() {
    let mut trainer = Trainer::new(wave_model(), &averaged("cpu*2")).unwrap();
    let poisoned =
        [("x", HostTensor::Float(vec![f32::NAN; 12])), ("y", HostTensor::Float(vec![0.0; 6]))];
    assert!(!trainer.step(&poisoned, 0.05).unwrap().updated);
    trainer.step(&batch(1), 0.05).unwrap();
    let first = trainer.averaged_parameters().unwrap();
    assert_eq!(first, trainer.parameters().unwrap());
    assert!(!trainer.step(&poisoned, 0.05).unwrap().updated);
    assert_eq!(trainer.averaged_parameters().unwrap(), first);
}

#[test]
fn averages_have_the_same_bits_from_a_save_before_the_first_update() {
    let place = tempfile::tempdir().unwrap();
    let mut whole = Trainer::new(wave_model(), &averaged("cpu*2")).unwrap();
    whole.save(place.path()).unwrap();
    whole.fit(&waves(), &steps(4)).unwrap();
    let expected = bits_of(&whole.averaged_parameters().unwrap());
    // Also on a trainer whose averages have begun.
    whole.restore(place.path()).unwrap();
    let mut loaded = Trainer::load(wave_model(), &averaged("cpu*2"), place.path()).unwrap();
    for trainer in [&mut whole, &mut loaded] {
        trainer.fit(&waves(), &steps(4)).unwrap();
        assert_eq!(bits_of(&trainer.averaged_parameters().unwrap()), expected);
    }
}

#[test]
fn decays_outside_their_range_are_refused() {
    for ema in [-0.1, 1.0, f64::NAN] {
        let options = TrainerOptions { ema, ..options("cpu") };
        let told = Trainer::new(wave_model(), &options).err().unwrap().to_string();
        assert!(told.contains("ema must be at least 0 (off) and below 1"), "{told}");
    }
}
