//! Tests of parameter groups: frozen parameters, and rates of their own.

use super::fit_tests::bits;
use super::*;
use crate::checkpoint::NamedTensor;
use crate::{PipelineOptions, TensorOptions};
use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
use potluck_graph::optim::{GroupRule, Optimizer, ParameterGroup};
use potluck_graph::{Unary, UpdateRates};

const PLAIN: Optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
pub(super) const ADAMW: Optimizer =
    Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
const BATCH: usize = 6;

pub(super) fn model() -> Graph {
    let loss = MlpLoss::CrossEntropy;
    let widths = vec![4, 128, 128, 3];
    mlp(&MlpConfig { widths, activation: Unary::GeluTanh, dropout: 0.0, loss }).unwrap()
}

pub(super) fn options(devices: &str, optimizer: Optimizer, groups: &[&str]) -> TrainerOptions {
    let groups = groups.iter().map(|text| text.parse().unwrap()).collect();
    let options = TrainerOptions::new(devices, optimizer, BATCH);
    TrainerOptions { groups, micro_batch_size: 3, clip: 0.5, hash_every: 1, ..options }
}

pub(super) fn train(trainer: &mut Trainer, steps: usize) {
    let inputs = trainer.graph().inputs_of_samples().map(|(name, _)| name.clone());
    let [x, targets]: [String; 2] = inputs.collect::<Vec<_>>().try_into().unwrap();
    for step in 0..steps {
        let values = (0..BATCH * 4).map(|i| ((i + 7 * step) as f32 * 0.7).sin()).collect();
        let classes = (0..BATCH).map(|i| ((i + step) % 3) as u32).collect();
        let (values, classes) = (HostTensor::Float(values), HostTensor::Int(classes));
        assert!(trainer.step(&[(&x, values), (&targets, classes)], 0.05).unwrap().updated);
    }
}

fn trained(options: &TrainerOptions, steps: usize) -> Vec<NamedTensor> {
    let mut trainer = Trainer::new(model(), options).unwrap();
    train(&mut trainer, steps);
    trainer.parameters().unwrap()
}

/// Changes from one list of parameters to another, by name.
fn changes<'a>(from: &'a [NamedTensor], to: &[NamedTensor]) -> Vec<(&'a str, Vec<f32>)> {
    let mut changes = Vec::new();
    for (from, to) in from.iter().zip(to) {
        let values = from.values.iter().zip(&to.values);
        changes.push((&*from.name, values.map(|(from, to)| to - from).collect()));
    }
    changes
}

#[test]
fn groups_have_the_rates_that_they_name() {
    let groups = ["*.bias lr_scale=3", "*.1.weight lr_scale=0.5 weight_decay=0.5", "*.2.* frozen"];
    let initial = trained(&options("cpu", PLAIN, &[]), 0);
    let [plain, grouped] =
        [&[][..], &groups].map(|groups| trained(&options("cpu", PLAIN, groups), 1));
    let names: Vec<&str> = initial.iter().map(|tensor| &*tensor.name).collect();
    assert_eq!(names.len(), 6, "{names:?}");
    // A clipped gradient has another factor without its frozen part: their ratio is one number.
    let mut ratio = None;
    let before = changes(&initial, &plain);
    for ((name, own), (_, plain)) in changes(&initial, &grouped).iter().zip(&before) {
        let tensor = initial.iter().find(|tensor| tensor.name == *name).unwrap();
        let (scale, decay) = match *name {
            name if name.ends_with(".bias") => (3.0, 0.0),
            name if name.contains(".1.") => (0.5, 0.5),
            name if name.contains(".2.") => (0.0, 0.0),
            _ => (1.0, 0.0),
        };
        if scale == 0.0 {
            assert!(own.iter().all(|change| *change == 0.0), "{name}");
            continue;
        }
        for ((own, plain), value) in own.iter().zip(plain).zip(&tensor.values) {
            let from_gradient = own / scale + 0.05 * decay * value;
            let ratio = *ratio.get_or_insert(from_gradient / plain);
            let error = (from_gradient - ratio * plain).abs();
            assert!(error < 1e-6 + 1e-3 * plain.abs(), "{name}: {from_gradient} {plain} {ratio}");
        }
    }
    assert!(ratio.is_some_and(|ratio| (0.9..10.0).contains(&ratio)), "{ratio:?}");
}

/// Data, pipeline and tensor parallelism, and mixtures of them, with a frozen first block, so that
/// stages have nothing to send back, or a frozen one in the middle.
#[test]
fn frozen_parameters_keep_their_bits_however_the_model_is_divided() {
    for frozen in ["*.0.* frozen", "*.1.weight frozen"] {
        let groups = [frozen, "*.bias lr_scale=2"];
        let alone = options("cpu", ADAMW, &groups);
        let expected = trained(&alone, 4);
        let initial = trained(&alone, 0);
        let mut unchanged = 0;
        for (name, changes) in changes(&initial, &expected) {
            let is_unchanged = changes.iter().all(|change| *change == 0.0);
            assert_eq!(is_unchanged, is_frozen_by(frozen, name), "{name}");
            unchanged += usize::from(is_unchanged);
        }
        assert!(unchanged > 0);
        for (devices, stages, ranks) in
            [("cpu*2", 1, 1), ("cpu*3", 3, 1), ("cpu*2", 1, 2), ("cpu*4", 2, 1), ("cpu*4", 2, 2)]
        {
            let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
            let tensor = TensorOptions { ranks, ..TensorOptions::default() };
            let options = TrainerOptions {
                pipeline,
                tensor,
                shares: crate::Shares::Even,
                ..options(devices, ADAMW, &groups)
            };
            let found = trained(&options, 4);
            for (found, expected) in found.iter().zip(&expected) {
                let error = found.values.iter().zip(&expected.values);
                let error = error.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let of = format!("{devices}, {stages} stages, {ranks} ranks: {}", found.name);
                assert!(error < 1e-4, "{of}: {error}");
                if stages == 3 || is_frozen_by(frozen, &found.name) {
                    assert_eq!(found.values, expected.values, "{of}");
                }
            }
        }
    }
}

/// Returns true if a group `*PART* frozen` has a parameter of this name.
fn is_frozen_by(group: &str, name: &str) -> bool {
    name.contains(group.trim_end_matches(" frozen").trim_matches('*'))
}

#[test]
fn a_save_has_frozen_parameters_without_moments_and_goes_on_to_the_same_bits() {
    for devices in ["cpu", "cpu*2"] {
        let options = options(devices, ADAMW, &["*.0.* frozen"]);
        let mut whole = Trainer::new(model(), &options).unwrap();
        train(&mut whole, 2);
        let place = tempfile::tempdir().unwrap();
        whole.save(place.path()).unwrap();
        let checkpoint = crate::checkpoint::Checkpoint::load_path(place.path()).unwrap().0;
        assert_eq!((checkpoint.parameters.len(), checkpoint.moments.len()), (6, 8));
        let mut loaded = Trainer::load(model(), &options, place.path()).unwrap();
        for trainer in [&mut whole, &mut loaded] {
            train(trainer, 2);
        }
        assert_eq!(bits(&loaded), bits(&whole), "{devices}");
        // Frozen parameters have no moments to continue with.
        let thawed = TrainerOptions { groups: Vec::new(), ..options };
        let error = Trainer::load(model(), &thawed, place.path()).err().unwrap().to_string();
        assert!(error.contains(".0"), "{error}");
    }
}

#[test]
fn groups_without_parameters_and_models_without_trained_ones_are_refused() {
    let refused = |groups: &[&str]| {
        Trainer::new(model(), &options("cpu", ADAMW, groups)).err().unwrap().to_string()
    };
    let told = refused(&["nothing.* frozen"]);
    assert!(told.contains("TrainerOptions::groups: no trained parameter is called"), "{told}");
    assert!(refused(&["* frozen"]).contains("nothing to train"));
}

#[test]
fn a_rate_of_a_group_that_code_sets_out_of_its_range_is_refused() {
    let refused = |lr_scale: f32, weight_decay: Option<f32>| {
        let rule = GroupRule::Rates(UpdateRates { lr_scale, weight_decay });
        let groups = vec![ParameterGroup { names: "*.bias".into(), rule }];
        let options = TrainerOptions { groups, ..options("cpu", ADAMW, &[]) };
        Trainer::new(model(), &options).err().unwrap().to_string()
    };
    for (lr_scale, weight_decay, key) in
        [(-1.0, None, "lr_scale"), (f32::NAN, None, "lr_scale"), (1.0, Some(-0.1), "weight_decay")]
    {
        let told = refused(lr_scale, weight_decay);
        let is_of_key = told.starts_with("TrainerOptions::groups: '*.bias lr_scale=")
            && told.contains(&format!("sets {key} to"));
        assert!(is_of_key, "{told}");
    }
}
