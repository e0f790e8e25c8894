//! Tests of saved states and of parameters that are set.

use super::fit_tests::{bits, options, wave_model, waves};
use super::tests::{blocks, graph};
use super::*;
use crate::checkpoint::{CheckpointError, NamedTensor, Store};
use crate::{PipelineOptions, Shares};
use potluck_data::{
    Features, LoadedSamples, SampleOptions, SampleSet, Samples, Split, TargetNames, Targets,
};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Init};

/// A model with dropout, whose second parameter has a shape.
fn model(name: &str, width: usize) -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 2]);
    let y = b.input("y", &[1, 1]);
    let w = b.parameter("w", &[width, 2], Init::Normal { std: 0.5 });
    let h = b.linear(x, w, None).unwrap();
    let h = b.dropout(h, 0.25).unwrap();
    let v = b.parameter(name, &[1, width], Init::Normal { std: 0.5 });
    let z = b.linear(h, v, None).unwrap();
    b.squared_error_loss(z, y).unwrap();
    b.finish()
}

pub fn batch(step: u64) -> [(&'static str, HostTensor); 2] {
    let values = |n: u64| (0..n).map(|i| ((i + 5 * step) as f32 * 0.7).sin()).collect();
    [("x", HostTensor::Float(values(12))), ("y", HostTensor::Float(values(6)))]
}

fn train(trainer: &mut Trainer, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        trainer.step(&batch(step), 0.05).unwrap();
    }
}

#[test]
fn a_save_goes_on_to_the_bits_of_a_trainer_that_was_never_dropped() {
    for devices in ["cpu", "cpu*2"] {
        let options = options(devices);
        let mut whole = Trainer::new(model("v", 4), &options).unwrap();
        let place = tempfile::tempdir().unwrap();
        for step in 1..=6 {
            whole.step(&batch(step), 0.05).unwrap();
            if step == 3 {
                whole.save(place.path()).unwrap();
            }
        }
        let mut loaded = Trainer::load(model("v", 4), &options, place.path()).unwrap();
        assert_eq!((loaded.steps(), loaded.samples), (3, 18));
        let mut restored = Trainer::new(model("v", 4), &options).unwrap();
        restored.step(&batch(9), 0.3).unwrap();
        restored.restore(place.path()).unwrap();
        for trainer in [&mut loaded, &mut restored] {
            train(trainer, 4..=6);
            assert_eq!(bits(trainer), bits(&whole), "{devices}");
        }
        // Back to the save, once more: a round is repeated.
        loaded.restore(place.path()).unwrap();
        train(&mut loaded, 4..=6);
        assert_eq!(bits(&loaded), bits(&whole), "{devices}");
    }
}

#[test]
fn a_save_without_moments_begins_them_at_zero_also_on_a_used_trainer() {
    let place = tempfile::tempdir().unwrap();
    let plain = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    let plain = TrainerOptions { optimizer: plain, ..options("cpu") };
    Trainer::new(model("v", 4), &plain).unwrap().save(place.path()).unwrap();
    let mut fresh = Trainer::load(model("v", 4), &options("cpu"), place.path()).unwrap();
    let mut used = Trainer::new(model("v", 4), &options("cpu")).unwrap();
    used.step(&batch(1), 0.3).unwrap();
    used.restore(place.path()).unwrap();
    for trainer in [&mut fresh, &mut used] {
        trainer.step(&batch(2), 0.3).unwrap();
    }
    assert_eq!(bits(&used), bits(&fresh));
}

#[test]
fn a_save_with_running_averages_of_another_kind_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(model("v", 4), &options("cpu")).unwrap();
    trainer.step(&batch(1), 0.3).unwrap();
    trainer.save(place.path()).unwrap();
    let of = |optimizer| TrainerOptions { optimizer, ..options("cpu") };
    let rms = Optimizer::RmsProp { alpha: 0.9, eps: 1e-8, momentum: 0.5, weight_decay: 0.0 };
    let told = Trainer::load(model("v", 4), &of(rms), place.path()).err().unwrap().to_string();
    assert!(told.contains("those of adam there, and rmsprop has others"), "{told}");
    let adam = Optimizer::Adam { beta1: 0.8, beta2: 0.9, eps: 1e-8, weight_decay: 0.0 };
    Trainer::load(model("v", 4), &of(adam), place.path()).unwrap();
    // An optimizer without moments ignores the saved ones.
    let plain = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    Trainer::load(model("v", 4), &of(plain), place.path()).unwrap();
}

#[test]
fn a_save_of_another_model_is_refused_with_the_name_of_a_tensor() {
    let place = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(model("v", 4), &options("cpu")).unwrap();
    trainer.save(place.path()).unwrap();
    let refused = |graph: Graph| {
        let error = Trainer::load(graph, &options("cpu"), place.path()).err().unwrap();
        assert_eq!(error.exit_code(), crate::error::EXIT_CONFIGURATION);
        error.to_string()
    };
    assert!(refused(model("u", 4)).contains("the checkpoint has no tensor 'u'"));
    assert!(refused(model("v", 5)).contains("'w' has the shape [4, 2] instead of [5, 2]"));
    assert!(refused(graph(true)).contains("'w' has the shape [4, 2] instead of [2, 2]"));
    let mut b = Builder::new();
    let x = b.input("x", &[1, 2]);
    let w = b.parameter("w", &[4, 2], Init::Zeros);
    let h = b.linear(x, w, None).unwrap();
    b.squared_error_loss(h, h).unwrap();
    let told = refused(b.finish());
    assert!(told.contains("it has no parameter 'v'; use the model that was saved"), "{told}");
    let nowhere = tempfile::tempdir().unwrap();
    let error = trainer.restore(nowhere.path()).unwrap_err().to_string();
    assert!(error.contains("there is no checkpoint"), "{error}");
}

#[test]
fn a_later_save_of_another_course_is_set_aside_and_another_seed_is_noted() {
    let place = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(model("v", 4), &options("cpu")).unwrap();
    train(&mut trainer, 1..=2);
    trainer.save(place.path()).unwrap();
    let mut other = Trainer::new(model("v", 4), &options("cpu")).unwrap();
    other.step(&batch(1), 0.05).unwrap();
    other.save(place.path()).unwrap();
    let seeded = TrainerOptions { seed: 8, ..options("cpu") };
    let loaded = Trainer::load(model("v", 4), &seeded, place.path()).unwrap();
    assert_eq!(loaded.steps(), 1);
    assert!(place.path().join("checkpoints/step-00000002.aside").is_dir());
    let notes = loaded.notes().join("\n");
    assert!(notes.contains("seed 5, and training goes on with seed 8"), "{notes}");
    let notes = other.notes().join("\n");
    assert!(notes.contains("set aside: 1 later checkpoint as "), "{notes}");
}

#[test]
fn a_save_of_another_model_at_the_same_step_is_set_aside_with_a_note() {
    let place = tempfile::tempdir().unwrap();
    let aside = place.path().join("checkpoints/step-00000001.aside");
    let mut first = Trainer::new(model("v", 4), &options("cpu")).unwrap();
    train(&mut first, 1..=1);
    first.save(place.path()).unwrap();
    // The trainer's own save is replaced.
    first.save(place.path()).unwrap();
    assert!(!aside.exists() && first.notes().iter().all(|note| !note.contains("set aside")));

    let seeded = TrainerOptions { seed: 8, ..options("cpu") };
    let mut other = Trainer::new(model("v", 4), &seeded).unwrap();
    train(&mut other, 1..=1);
    other.save(place.path()).unwrap();
    let of_first = Checkpoint::load(&aside).unwrap();
    assert_eq!(of_first.parameters, first.parameters().unwrap());
    let of_other = Checkpoint::load_path(place.path()).unwrap().0;
    assert_eq!(of_other.parameters, other.parameters().unwrap());
    let notes = other.notes().join("\n");
    let told = format!("set aside: the checkpoint of step 1 as {}", aside.display());
    assert!(notes.contains(&told), "{notes}");
}

#[test]
fn a_directory_in_use_leaves_the_trainer_as_it_was() {
    let place = tempfile::tempdir().unwrap();
    let store = Store::open(place.path()).unwrap();
    let mut trainer = Trainer::new(point_model(), &options("cpu")).unwrap();
    let directory = Some(place.path().to_path_buf());
    let fit = FitOptions { directory, ..FitOptions::constant(FitLength::Steps(1), 0.1) };
    let error = trainer.fit(&points(), &fit).unwrap_err();
    let is_in_use = matches!(error.cause(), TrainError::Checkpoint(CheckpointError::InUse { .. }));
    assert!(is_in_use, "{error}");
    assert_eq!((trainer.description(), trainer.steps()), (None, 0));
    drop(store);
    trainer.fit(&points(), &fit).unwrap();
    assert!(trainer.description().is_some());
}

#[test]
fn what_is_not_finite_is_not_saved() {
    let place = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(model("v", 1), &options("cpu")).unwrap();
    trainer.set_parameter("v", &[f32::NAN]).unwrap();
    let error = trainer.save(place.path()).unwrap_err().to_string();
    assert!(error.contains("the parameter 'v' is not finite after step 0"), "{error}");
}

#[test]
fn parameters_are_set_by_name_on_all_devices_and_checked() {
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let piped = TrainerOptions { pipeline, shares: Shares::Even, ..options("cpu*2") };
    for options in [options("cpu"), options("cpu*3"), piped] {
        let mut trainer = Trainer::new(blocks(), &options).unwrap();
        let before = trainer.parameters().unwrap();
        let new = [0.5, -1.0, 2.0, 0.25];
        trainer.set_parameter("v", &new).unwrap();
        assert_eq!(trainer.parameter("v").unwrap().values, new);
        assert_eq!(trainer.parameter("w").unwrap(), before[0]);
        assert_eq!(trainer.session.compare(false).unwrap(), []);
        let refused = |trainer: &mut Trainer, name: &str, shape: &[usize], count: usize| {
            let (name, shape, values) = (name.into(), shape.into(), vec![1.0; count]);
            let good = NamedTensor { name: "w".into(), ..before[0].clone() };
            let bad = NamedTensor { name, shape, values };
            let error = trainer.set_parameters(&[good, bad]).unwrap_err().to_string();
            assert_eq!(trainer.parameter("v").unwrap().values, new, "{error}");
            error
        };
        assert!(refused(&mut trainer, "v", &[4], 4).contains("'v' has the shape [2, 2], and 4"));
        assert!(refused(&mut trainer, "v", &[2, 2], 3).contains("3 values"));
        let unknown = "the model has no parameter 'u'; its parameters are w, v";
        assert_eq!(refused(&mut trainer, "u", &[1], 1), unknown);
        assert_eq!(trainer.parameter("u").unwrap_err().to_string(), unknown);
        // The next step computes with them.
        trainer.set_parameters(&before).unwrap();
        let x = HostTensor::Float((0..12).map(|i| i as f32 * 0.1).collect());
        let loss = trainer.step(&[("x", x.clone())], 0.1).unwrap().loss;
        let mut fresh = Trainer::new(blocks(), &options).unwrap();
        assert_eq!(fresh.step(&[("x", x)], 0.1).unwrap().loss, loss);
        assert_eq!(bits(&trainer), bits(&fresh));
    }
}

#[test]
fn the_loss_of_given_rows_is_that_of_a_data_set_on_any_devices() {
    let data = waves();
    let rows = data.rows(Split::Validation, &[0, 1, 2, 3, 4]).unwrap();
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let piped = TrainerOptions { pipeline, shares: Shares::Even, ..options("cpu*2") };
    let mut losses = Vec::new();
    for options in [options("cpu"), options("cpu*3"), piped] {
        let mut trainer = Trainer::new(wave_model(), &options).unwrap();
        let given = trainer.evaluate_rows(5, &rows).unwrap();
        let whole = trainer.evaluate(&data, Split::Validation, 0).unwrap();
        assert_eq!((given.samples, given.targets), (whole.samples, whole.targets));
        assert!((given.loss - whole.loss).abs() <= 1e-6 * whole.loss, "{given:?} {whole:?}");
        losses.push(whole.loss);
        let more = trainer.evaluate_rows(0, &rows).unwrap_err().to_string();
        assert!(more.contains("0 rows given"), "{more}");
    }
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() <= 1e-6 * loss), "{losses:?}");
}

/// Five points with two features and two targets each, the last of them held out.
fn points() -> Arc<dyn Dataset> {
    let values = |count: usize| (0..count).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<_>>();
    let names = vec!["a".to_string(), "b".to_string()];
    let train = Samples {
        name: "points".into(),
        shape: vec![2],
        columns: Vec::new(),
        target_columns: Vec::new(),
        features: Features::Floats(values(10)),
        targets: Targets::Values { values: values(10), names },
        ids: None,
    };
    let loaded = LoadedSamples { train, validation: None, files: Vec::new() };
    let options = SampleOptions { held_out: 0.2, normalize: true, saved: None };
    Arc::new(SampleSet::new(loaded, &options).unwrap())
}

/// A model of points, with an output that has no dimension for samples.
fn point_model() -> Graph {
    let mut b = Builder::new();
    let x = b.input("inputs", &[1, 2]);
    let w = b.parameter("w", &[2, 2], Init::Normal { std: 0.5 });
    let y = b.linear(x, w, None).unwrap();
    b.output("y", y);
    b.output("w", w);
    let targets = b.input("targets", &[1, 2]);
    b.squared_error_loss(y, targets).unwrap();
    b.finish()
}

#[test]
fn a_save_hands_out_the_description_of_the_data() {
    let (data, place) = (points(), tempfile::tempdir().unwrap());
    let mut trainer = Trainer::new(point_model(), &options("cpu")).unwrap();
    assert_eq!(trainer.description(), None);
    let fit = FitOptions::constant(FitLength::Steps(1), 0.1);
    trainer.fit(&data, &fit).unwrap();
    trainer.save(place.path()).unwrap();
    let loaded = Trainer::load(point_model(), &options("cpu"), place.path()).unwrap();
    for trainer in [trainer, loaded] {
        assert!(matches!(trainer.description(), Some(DataDescription::Samples(samples))
            if samples.targets == TargetNames::Values(vec!["a".into(), "b".into()])));
        assert_eq!(trainer.description(), data.description().as_ref());
    }
}

#[test]
fn a_split_is_predicted_in_the_order_of_its_samples_a_batch_at_a_time() {
    let data = points();
    for (devices, batch) in [("cpu", 3), ("cpu", 6), ("cpu*2", 2), ("cpu*3", 3)] {
        let options = TrainerOptions { batch, ..options(devices) };
        let mut trainer = Trainer::new(point_model(), &options).unwrap();
        for (split, rows) in [(Split::Train, 4), (Split::Validation, 1)] {
            let indices: Vec<u64> = (0..rows as u64).collect();
            let given = data.rows(split, &indices).unwrap();
            let expected = trainer.predict("y", rows, &given).unwrap();
            let predicted = trainer.predict_data(&data, split, "y").unwrap();
            assert_eq!(predicted.shape(), [rows, 2]);
            assert_eq!(predicted, expected, "{devices}, {batch} at a time");
        }
        let mut refused = |data: &Arc<dyn Dataset>, output: &str| {
            trainer.predict_data(data, Split::Train, output).unwrap_err().to_string()
        };
        let unknown = "the graph has no output called z; its outputs are y, w";
        assert_eq!(refused(&data, "z"), unknown);
        assert!(refused(&data, "w").ends_with("without a dimension for samples"));
        assert_eq!(refused(&waves(), "y"), "the data have x, which the model does not take");
    }
}
