//! Trainers on unlike devices, one of which fails: they go on on the others, to the bits of loading
//! a save by hand there.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use crate::several_devices::unlike;
use potluck_core::metrics::Event;
use potluck_core::{DType, HostTensor};
use potluck_data::{DataError, Dataset, DatasetInput, NamedInputs, Split};
use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Graph, Init, Unary};
use potluck_train::{
    DeviceLoss, FitLength, FitOptions, PipelineOptions, Shares, TrainError, Trainer, TrainerOptions,
};

/// Points of a wave.
struct Wave;

impl Dataset for Wave {
    fn inputs(&self) -> Vec<DatasetInput> {
        let input = |name, elements| DatasetInput { name, dtype: DType::F32, elements };
        vec![input("inputs", 2), input("targets", 1)]
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 23 } else { 5 }
    }

    fn evaluation_samples(&self, split: Split) -> Vec<u64> {
        (0..self.len(split)).collect()
    }

    fn fingerprint(&self) -> String {
        "a wave".into()
    }

    fn rows(&self, _: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        let at = |index: &u64| *index as f32 * 0.3;
        let inputs = indices.iter().flat_map(|index| [at(index), 1.0]).collect();
        let targets = indices.iter().map(|index| at(index).sin()).collect();
        Ok(vec![("inputs", HostTensor::Float(inputs)), ("targets", HostTensor::Float(targets))])
    }
}

fn data() -> Arc<dyn Dataset> {
    Arc::new(Wave)
}

fn model() -> Graph {
    let widths = vec![2, 16, 1];
    mlp(&MlpConfig {
        widths,
        activation: Unary::GeluTanh,
        dropout: 0.0,
        loss: MlpLoss::SquaredError,
    })
    .unwrap()
}

fn options(devices: &str, faults: &str) -> TrainerOptions {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    TrainerOptions {
        shares: Shares::Even,
        reduce_site: Some(potluck_parallel::ReduceSite::Host),
        micro_batch_size: 2,
        tune_s: 0.0,
        seed: 3,
        faults: faults.parse().unwrap(),
        ..TrainerOptions::new(devices, optimizer, 6)
    }
}

fn steps(count: u64) -> FitOptions {
    FitOptions { eval_every: 4, ..FitOptions::constant(FitLength::Steps(count), 0.05) }
}

fn bits(trainer: &Trainer) -> Vec<u32> {
    let tensors = trainer.parameters().unwrap();
    tensors.iter().flat_map(|tensor| &tensor.values).map(|value| value.to_bits()).collect()
}

/// Parameters of all steps from a save on devices that are named by hand.
fn by_hand(devices: &str, place: &Path) -> Vec<u32> {
    let mut trainer = Trainer::load(model(), &options(devices, ""), place).unwrap();
    assert_eq!(trainer.steps(), 4);
    trainer.fit(&data(), &steps(9)).unwrap();
    bits(&trainer)
}

/// A fault of the second device, in the sixth step.
const FAULT: &str = "lost@backward:6/1";

#[test]
fn recovery_goes_on_to_the_bits_of_loading_by_hand() {
    let _turn = crate::common::turn();
    let place = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::new(model(), &options(&unlike(), FAULT)).unwrap();
    let world = trainer.world();
    trainer.fit(&data(), &steps(4)).unwrap();
    trainer.save(place.path()).unwrap();
    trainer.fit(&data(), &steps(5)).unwrap();
    let (completed, lost) = (bits(&trainer), trainer.placement().ranks[1].identity.clone());
    let error = trainer.fit(&data(), &steps(9)).unwrap_err();
    assert!(matches!(error, TrainError::Library(_)) && error.to_string().starts_with("rank 1: "));
    assert_eq!((trainer.steps(), bits(&trainer)), (5, completed));

    assert_eq!(trainer.recover().unwrap(), 4);
    assert!(trainer.world() < world && trainer.steps() == 4);
    assert!(trainer.placement().ranks.iter().all(|rank| rank.identity != lost));
    trainer.fit(&data(), &steps(9)).unwrap();
    assert_eq!(bits(&trainer), by_hand(&trainer.options().devices, place.path()));
}

#[test]
fn a_call_goes_on_by_itself_from_a_directory_or_from_memory() {
    let _turn = crate::common::turn();
    let place = tempfile::tempdir().unwrap();
    let mut undisturbed = Trainer::new(model(), &options(&unlike(), "")).unwrap();
    undisturbed.fit(&data(), &steps(4)).unwrap();
    undisturbed.save(place.path()).unwrap();
    drop(undisturbed);

    let other = tempfile::tempdir().unwrap();
    let directory = Some(other.path().to_path_buf());
    let saving = FitOptions { directory, save_every: 4, ..steps(9) };
    let continuing =
        || TrainerOptions { on_loss: DeviceLoss::Continue, ..options(&unlike(), FAULT) };
    let in_memory = TrainerOptions { snapshot_every: 4, ..continuing() };
    for (options, fit) in [(continuing(), saving), (in_memory, steps(9))] {
        let mut trainer = Trainer::new(model(), &options).unwrap();
        let mut warnings = Vec::new();
        let report = trainer.fit_with(&data(), &fit, &mut |event| {
            if let Event::Warning(text) = event {
                warnings.push(text.clone());
            }
            ControlFlow::Continue(())
        });
        assert_eq!(report.unwrap().steps, 9);
        let devices = &trainer.options().devices;
        let begins = format!("continuing from step 4 on {devices}, without the failed device");
        assert!(warnings.len() == 1 && warnings[0].starts_with(&begins), "{warnings:?}");
        assert!(warnings[0].contains("rank 1: ") && !warnings[0].contains("--"), "{warnings:?}");
        assert_eq!(bits(&trainer), by_hand(devices, place.path()));
    }
}

#[test]
fn without_a_save_a_call_goes_on_from_its_start_and_one_after_another_may_fail() {
    let _turn = crate::common::turn();
    let devices = unlike();
    if devices.contains('*') {
        return crate::process::skip("two adapters and the processor are needed");
    }
    // After the first loss, the second device is another one.
    let faults = "lost@backward:6/1,lost@forward:7/1";
    let continuing = TrainerOptions { on_loss: DeviceLoss::Continue, ..options(&devices, faults) };
    let mut trainer = Trainer::new(model(), &continuing).unwrap();
    trainer.fit(&data(), &steps(9)).unwrap();
    assert_eq!(trainer.world(), 1);
    let mut alone = Trainer::new(model(), &options(&trainer.options().devices, "")).unwrap();
    alone.fit(&data(), &steps(9)).unwrap();
    assert_eq!(bits(&trainer), bits(&alone));
}

#[test]
fn a_device_that_fails_while_the_state_is_brought_back_is_left_out_too() {
    let _turn = crate::common::turn();
    let devices = unlike();
    if devices.contains('*') {
        return crate::process::skip("two adapters and the processor are needed");
    }
    // After the first loss, the second device is another one.
    let faults = "lost@backward:6/1,lost@restore:4/1";
    let options = TrainerOptions { snapshot_every: 4, ..options(&devices, faults) };
    let mut trainer = Trainer::new(model(), &options).unwrap();
    trainer.fit(&data(), &steps(9)).unwrap_err();
    assert_eq!(trainer.recover().unwrap(), 4);
    assert_eq!(trainer.world(), 1);
    trainer.fit(&data(), &steps(9)).unwrap();

    let place = tempfile::tempdir().unwrap();
    let mut undisturbed = Trainer::new(model(), &self::options(&devices, "")).unwrap();
    undisturbed.fit(&data(), &steps(4)).unwrap();
    undisturbed.save(place.path()).unwrap();
    assert_eq!(bits(&trainer), by_hand(&trainer.options().devices, place.path()));
}

/// A model of one block per layer.
fn layers() -> Graph {
    let mut b = Builder::new();
    let (mut x, mut width) = (b.input("inputs", &[1, 2]), 2);
    for layer in 0..4 {
        b.block(&format!("layer {layer}"));
        let w = b.parameter(&format!("w{layer}"), &[8, width], Init::Normal { std: 0.4 });
        let y = b.linear(x, w, None).unwrap();
        (x, width) = (b.unary(y, Unary::GeluTanh).unwrap(), 8);
    }
    let w = b.parameter("w", &[1, width], Init::Normal { std: 0.4 });
    let y = b.linear(x, w, None).unwrap();
    let targets = b.input("targets", &[1, 1]);
    b.squared_error_loss(y, targets).unwrap();
    b.finish()
}

#[test]
fn a_pipeline_goes_on_with_fewer_stages() {
    let _turn = crate::common::turn();
    let devices = unlike();
    if devices.contains('*') {
        return crate::process::skip("two adapters and the processor are needed");
    }
    let of = |stages, options: TrainerOptions| {
        let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
        TrainerOptions { pipeline, on_loss: DeviceLoss::Continue, ..options }
    };
    let place = tempfile::tempdir().unwrap();
    let directory = Some(place.path().to_path_buf());
    let mut trainer = Trainer::new(layers(), &of(3, options(&devices, FAULT))).unwrap();
    trainer.fit(&data(), &FitOptions { directory, ..steps(4) }).unwrap();
    let by_hand = tempfile::tempdir().unwrap();
    trainer.save(by_hand.path()).unwrap();
    trainer.fit(&data(), &steps(9)).unwrap();
    let now = trainer.options().clone();
    assert_eq!((trainer.world(), now.pipeline.stages), (2, 2));

    let again = of(2, options(&now.devices, ""));
    let mut loaded = Trainer::load(layers(), &again, by_hand.path()).unwrap();
    loaded.fit(&data(), &steps(9)).unwrap();
    assert_eq!(bits(&trainer), bits(&loaded));
}
