//! Tests of trainers whose devices fail.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use super::fit_tests::{bits, options, steps, wave_model, waves};
use super::*;
use crate::checkpoint::NamedTensor;
use crate::left_devices::LeftDevices;
use crate::{DeviceLoss, PipelineOptions};
use potluck_core::metrics::Event;

fn faulty(devices: &str, faults: &str) -> TrainerOptions {
    TrainerOptions { faults: faults.parse().unwrap(), ..options(devices) }
}

#[test]
fn without_a_failure_there_is_nothing_to_recover_from() {
    let mut trainer = Trainer::new(wave_model(), &options("cpu*2")).unwrap();
    let told = trainer.recover().unwrap_err().to_string();
    assert!(told.contains("there is nothing to recover from"), "{told}");
    trainer.fit(&waves(), &steps(1)).unwrap();
}

#[test]
fn what_was_kept_before_parameters_were_set_or_restored_is_not_gone_back_to() {
    let options = TrainerOptions { snapshot_every: 2, ..options("cpu*2") };
    let mut trainer = Trainer::new(wave_model(), &options).unwrap();
    let place = tempfile::tempdir().unwrap();
    let directory = Some(place.path().to_path_buf());
    let fit = FitOptions { directory: directory.clone(), ..steps(2) };
    trainer.fit(&waves(), &fit).unwrap();
    let fitted = bits(&trainer);
    // A refused call sets nothing.
    let wrong = NamedTensor { name: "v".into(), shape: vec![1], values: vec![1.0] };
    trainer.set_parameters(&[wrong]).unwrap_err();
    assert!(trainer.saved.is_some());
    trainer.set_parameter("v", &[0.5; 8]).unwrap();
    let set = bits(&trainer);
    assert!(trainer.saved.is_none() && trainer.snapshot.is_none() && set != fitted);
    // The directory has a save of that step with other parameters.
    trainer.fit(&waves(), &fit).unwrap();
    let loaded = Trainer::load(wave_model(), &options, place.path()).unwrap();
    assert_eq!(bits(&loaded), set);

    let earlier = tempfile::tempdir().unwrap();
    trainer.save(earlier.path()).unwrap();
    trainer.fit(&waves(), &FitOptions { directory, ..steps(6) }).unwrap();
    assert_eq!(trainer.saved, Some((6, place.path().to_path_buf())));
    trainer.restore(earlier.path()).unwrap();
    let told = trainer.last_state().unwrap_err().to_string();
    assert!(told.starts_with("no state was kept to recover from"), "{told}");
}

#[test]
fn a_state_that_cannot_be_brought_back_is_kept_to_try_again() {
    let faults = "lost@backward:4/1,lost@restore:3/0";
    let place = tempfile::tempdir().unwrap();
    let trace = place.path().join("trace.json");
    let faulty =
        TrainerOptions { snapshot_every: 3, trace: Some(trace.clone()), ..faulty("cpu*2", faults) };
    let mut trainer = Trainer::new(wave_model(), &faulty).unwrap();
    trainer.fit(&waves(), &steps(6)).unwrap_err();
    let left = || LeftDevices {
        devices: "cpu*2".into(),
        stages: None,
        tensor: None,
        spare: 0,
        are_as_typed: false,
    };
    let state = trainer.last_state().unwrap();
    assert_eq!((state.meta.step, Arc::strong_count(&state)), (3, 2), "there is no second copy");
    let error = trainer.reopen_on(left(), state).unwrap_err();
    assert_eq!(error.lost_rank().unwrap().0, 0);
    assert!(trainer.failed.is_some() && trainer.options().devices == "cpu*2");
    let state = trainer.last_state().unwrap();
    assert_eq!(trainer.reopen_on(left(), state).unwrap(), 3);
    assert_eq!(Arc::strong_count(trainer.snapshot.as_ref().unwrap()), 1);
    trainer.fit(&waves(), &steps(6)).unwrap();
    assert_eq!(bits(&trainer), undisturbed("cpu*2", 6));
    // Later traces are named by the first.
    assert_eq!(trainer.options().trace, Some(trace));
}

#[test]
fn one_device_keeps_no_state_that_only_another_could_use() {
    let alone =
        TrainerOptions { snapshot_every: 1, on_loss: DeviceLoss::Continue, ..options("cpu") };
    let mut trainer = Trainer::new(wave_model(), &alone).unwrap();
    trainer.fit(&waves(), &steps(2)).unwrap();
    assert!(trainer.snapshot.is_none());
    let several = TrainerOptions { devices: "cpu*2".into(), ..alone };
    let mut trainer = Trainer::new(wave_model(), &several).unwrap();
    trainer.fit(&waves(), &steps(2)).unwrap();
    assert!(trainer.snapshot.is_some());
}

#[test]
fn a_damaged_save_that_is_passed_over_is_noted() {
    let mut trainer = Trainer::new(wave_model(), &options("cpu*2")).unwrap();
    let place = tempfile::tempdir().unwrap();
    for count in [1, 2] {
        trainer.fit(&waves(), &steps(count)).unwrap();
        trainer.save(place.path()).unwrap();
    }
    let newest = place.path().join("checkpoints/step-00000002/parameters.safetensors");
    std::fs::write(newest, b"damaged").unwrap();
    assert_eq!(trainer.last_state().unwrap().meta.step, 1);
    // Step 2 is not taken as saved when it is reached again.
    assert_eq!(trainer.saved, Some((1, place.path().to_path_buf())));
    assert!(trainer.notes().join("\n").contains("step-00000002"), "{:?}", trainer.notes());

    // A later copy in memory is better than an earlier save, or none.
    trainer.snapshot = Some(Arc::new(trainer.checkpoint().unwrap()));
    for step in ["step-00000002", "step-00000001"] {
        trainer.saved = Some((3, place.path().to_path_buf()));
        assert_eq!(trainer.last_state().unwrap().meta.step, 2);
        std::fs::remove_dir_all(place.path().join("checkpoints").join(step)).unwrap();
    }
    trainer.saved = Some((3, place.path().to_path_buf()));
    assert_eq!(trainer.last_state().unwrap().meta.step, 2);
    // Step 3 is saved again when it is reached.
    assert_eq!(trainer.saved, None);
}

/// Parameters after `count` steps without a fault.
fn undisturbed(devices: &str, count: u64) -> Vec<u32> {
    let mut trainer = Trainer::new(wave_model(), &options(devices)).unwrap();
    trainer.fit(&waves(), &steps(count)).unwrap();
    bits(&trainer)
}

#[test]
fn parameters_of_the_last_completed_step_are_read_from_the_devices_that_are_left() {
    for fault in ["lost@backward:4/1", "lost@forward:4/0", "out-of-memory@reduce:4/2"] {
        let mut trainer = Trainer::new(wave_model(), &faulty("cpu*3", fault)).unwrap();
        let error = trainer.fit(&waves(), &steps(12)).unwrap_err();
        assert_eq!(error.lost_rank().unwrap().0, fault.as_bytes()[fault.len() - 1] as u32 - 48);
        assert_eq!(trainer.steps(), 3);
        assert_eq!(bits(&trainer), undisturbed("cpu*3", 3), "{fault}");
        // Nothing that writes can continue.
        let again = trainer.fit(&waves(), &steps(12)).unwrap_err().to_string();
        assert_eq!(again, error.to_string());
        // All three ranks are on the processor.
        let left = trainer.recover().unwrap_err().to_string();
        assert_eq!(left, "no other device is left to recover on");
    }
}

#[test]
fn parameters_that_may_be_of_two_steps_are_not_returned() {
    let mut trainer = Trainer::new(wave_model(), &faulty("cpu*3", "lost@update:4/1")).unwrap();
    let error = trainer.fit(&waves(), &steps(12)).unwrap_err().to_string();
    let told = trainer.parameters().unwrap_err().to_string();
    assert!(told.starts_with(&error) && told.contains("may be those of two steps"), "{told}");
}

#[test]
fn a_stage_that_is_lost_takes_its_parameters_along() {
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let faulty = TrainerOptions { pipeline, ..faulty("cpu*2", "lost@backward:2/1") };
    let mut trainer = Trainer::new(wave_model(), &faulty).unwrap();
    let error = trainer.fit(&waves(), &steps(4)).unwrap_err().to_string();
    assert_eq!(trainer.parameters().unwrap_err().to_string(), error);
}

#[test]
fn a_device_that_hangs_is_given_up_after_the_deadline() {
    let device_timeout = Duration::from_secs(3);
    let hanging =
        TrainerOptions { device_timeout, snapshot_every: 1, ..faulty("cpu*2", "hang@forward:2/1") };
    let mut trainer = Trainer::new(wave_model(), &hanging).unwrap();
    let started = Instant::now();
    let error = trainer.fit(&waves(), &steps(4)).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(30));
    let text = error.to_string();
    assert!(text.contains("did not finish within 3 s"), "{text}");
    assert!(text.contains("a larger TrainerOptions::device_timeout"), "{text}");
    assert!(matches!(error.cause(), TrainError::Runtime(_)));
    assert_eq!(bits(&trainer), undisturbed("cpu*2", 1));
}

#[test]
fn parameters_that_differ_end_training_or_are_repaired() {
    let checked = |on_mismatch| TrainerOptions {
        hash_every: 1,
        on_mismatch,
        ..faulty("cpu*3", "flip@gather:3/2")
    };
    let stopping = checked(MismatchAction::Stop);
    let mut trainer = Trainer::new(wave_model(), &stopping).unwrap();
    let error = trainer.fit(&waves(), &steps(6)).unwrap_err().to_string();
    assert!(error.contains("(rank 2) does not hold the same parameters"), "{error}");
    assert!(error.ends_with("to MismatchAction::Repair to repair them"), "{error}");
    let mut trainer = Trainer::new(wave_model(), &checked(MismatchAction::Repair)).unwrap();
    trainer.fit(&waves(), &steps(6)).unwrap();
    assert_eq!(bits(&trainer), undisturbed("cpu*3", 6));
    assert!(trainer.notes().join("\n").contains("after step 3: 1 of"), "{:?}", trainer.notes());
}

#[test]
fn steps_that_are_not_finite_end_training() {
    let mut trainer = Trainer::new(wave_model(), &faulty("cpu", "nan@backward:2")).unwrap();
    let fit = FitOptions { skipped_steps_max: 2, ..steps(4) };
    let mut skipped = 0;
    trainer
        .fit_with(&waves(), &fit, &mut |event| {
            skipped += u32::from(matches!(event, Event::Warning(_)));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(skipped, 1);
    let faults = "nan@backward:2,nan@backward:3";
    let mut trainer = Trainer::new(wave_model(), &faulty("cpu", faults)).unwrap();
    let error = trainer.fit(&waves(), &fit).unwrap_err().to_string();
    assert!(error.starts_with("2 steps in a row were not finite"), "{error}");
    assert!(error.ends_with("or set TrainerOptions::clip"), "{error}");
}

#[test]
fn a_trace_is_written() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("trace.json");
    let traced = TrainerOptions { trace: Some(path.clone()), ..options("cpu*2") };
    let mut trainer = Trainer::new(wave_model(), &traced).unwrap();
    trainer.fit(&waves(), &steps(2)).unwrap();
    trainer.finish_trace().unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(trace.as_array().unwrap().len() > 10);
}
