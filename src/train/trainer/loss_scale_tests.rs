//! Tests of steps with a loss scale.

use std::ops::ControlFlow;

use super::fit_tests::{bits, options, steps, wave_model, waves};
use super::*;
use crate::checkpoint::LossScale;
use crate::loss_scale::DynamicLossScale;
use crate::{PipelineOptions, TensorOptions};
use potluck_core::metrics::Event;
use potluck_graph::Precision;

/// Options in mixed precision, with a fault of the second of three devices.
fn mixed(faults: &str) -> TrainerOptions {
    let precision = Precision::Mixed;
    TrainerOptions { precision, faults: faults.parse().unwrap(), ..options("cpu*3") }
}

/// Fits `count` steps; returns the loss scale of each, with true if it was skipped, and the notes.
fn fit(trainer: &mut Trainer, count: u64) -> (Vec<(f64, bool)>, Vec<String>) {
    let (mut scales, mut notes) = (Vec::new(), Vec::new());
    trainer
        .fit_with(&waves(), &steps(count), &mut |event| {
            match event {
                Event::Step(record) => {
                    scales.push((record.loss_scale.unwrap(), record.skipped.is_some()));
                }
                Event::Note(text) | Event::Warning(text) => notes.push(text.clone()),
                _ => {}
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    (scales, notes)
}

#[test]
fn an_overflow_on_one_device_is_skipped_on_all_and_halves_the_scale() {
    // Each fault happens once.
    let options = || mixed("nan@backward:3/1");
    let mut whole = Trainer::new(wave_model(), &options()).unwrap();
    let (scales, notes) = fit(&mut whole, 6);
    let (one, half) = ((1.0, false), (0.5, false));
    assert_eq!(scales, [one, one, (1.0, true), half, half, half]);
    let told = "step 3: gradients overflowed in mixed precision; skipped, loss scale 0.5";
    assert_eq!(notes, [told]);
    assert_eq!(whole.session.compare(false).unwrap(), []);
    assert_eq!(whole.session.taken.updates, 5);
    let saved = whole.session.loss_scale.saved();
    assert_eq!(saved, Some(LossScale { log2: -1, clean_steps: 3 }));

    let mut again = Trainer::new(wave_model(), &options()).unwrap();
    fit(&mut again, 6);
    assert_eq!(bits(&again), bits(&whole));
    // Saved before the overflow, and after it.
    for step in [2, 4] {
        let place = tempfile::tempdir().unwrap();
        let mut first = Trainer::new(wave_model(), &options()).unwrap();
        fit(&mut first, step);
        first.save(place.path()).unwrap();
        let mut resumed = Trainer::load(wave_model(), &options(), place.path()).unwrap();
        let notes = resumed.notes().join("; ");
        assert!(!notes.contains("precision"), "{notes}");
        assert_eq!(fit(&mut resumed, 6).0, scales[step as usize..]);
        assert_eq!(bits(&resumed), bits(&whole), "saved at {step}");
        assert_eq!(resumed.session.loss_scale.saved(), saved);
    }
}

#[test]
fn overflows_end_training_if_the_smallest_scale_does_not_help() {
    let steps_max = 24 + 2;
    let faults: Vec<String> =
        (1..=steps_max).map(|step| format!("nan@backward:{step}/1")).collect();
    let mut trainer = Trainer::new(wave_model(), &mixed(&faults.join(","))).unwrap();
    let fit = FitOptions { skipped_steps_max: 2, ..steps(40) };
    let error = trainer.fit(&waves(), &fit).unwrap_err().to_string();
    assert!(error.starts_with("2 steps in a row were not finite"), "{error}");
    assert_eq!(trainer.steps(), steps_max);
}

/// The scale, a power of two, enters and leaves exactly: also by clipping, which uses the norm of
/// the unscaled gradients.
#[test]
fn steps_with_a_loss_scale_have_the_bits_of_steps_without() {
    for (devices, stages, ranks) in
        [("cpu", 1, 1), ("cpu*3", 1, 1), ("cpu*2", 2, 1), ("cpu*2", 1, 2)]
    {
        let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
        let tensor = TensorOptions { ranks, ..TensorOptions::default() };
        let plain = group_tests::options(devices, group_tests::ADAMW, &[]);
        let shares = crate::Shares::Even;
        let options = TrainerOptions { pipeline, tensor, shares, clip: 0.01, ..plain };
        let trained = |log2: i32| {
            let mut trainer = Trainer::new(group_tests::model(), &options).unwrap();
            let mut scale = DynamicLossScale::new(Precision::Mixed, 6);
            scale.restore(Some(LossScale { log2, clean_steps: 0 }));
            trainer.session.loss_scale = scale;
            group_tests::train(&mut trainer, 4);
            assert_eq!(trainer.session.loss_scale.saved().unwrap().clean_steps, 4);
            bits(&trainer)
        };
        let unscaled = trained(0);
        for log2 in [5, -7] {
            assert!(trained(log2) == unscaled, "{devices}, {stages} stages, {ranks} ranks");
        }
    }
}

#[test]
fn another_precision_than_that_of_a_save_is_told_and_begins_with_a_scale_of_one() {
    let place = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
    trainer.fit(&waves(), &steps(2)).unwrap();
    trainer.save(place.path()).unwrap();
    let manifest = place.path().join("checkpoints/step-00000002/manifest.json");
    let text = std::fs::read_to_string(manifest).unwrap();
    assert!(!text.contains("loss_scale"), "{text}");
    let mut loaded = Trainer::load(wave_model(), &mixed(""), place.path()).unwrap();
    let told = "precision changes from f32 to mixed; the loss scale starts at 1";
    assert!(loaded.notes().iter().any(|note| note == told), "{:?}", loaded.notes());
    assert_eq!(fit(&mut loaded, 3).0, [(1.0, false)]);
    loaded.save(place.path()).unwrap();
    let back = Trainer::load(wave_model(), &options("cpu"), place.path()).unwrap();
    let told = "precision changes from mixed to f32";
    assert!(back.notes().iter().any(|note| note == told), "{:?}", back.notes());
}
