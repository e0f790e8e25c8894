//! Tests of trainers on CPU devices.

use super::*;
use crate::{PipelineOptions, Shares};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Init};

pub fn graph(with_loss: bool) -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 2]);
    let w = b.parameter("w", &[2, 2], Init::Zeros);
    let y = b.linear(x, w, None).unwrap();
    if with_loss {
        b.squared_error_loss(y, x).unwrap();
    }
    b.finish()
}

/// Two blocks with a parameter each.
pub fn blocks() -> Graph {
    let mut b = Builder::new();
    b.block("first");
    let x = b.input("x", &[1, 2]);
    let w = b.parameter("w", &[2, 2], Init::Normal { std: 0.5 });
    let y = b.linear(x, w, None).unwrap();
    b.block("second");
    let v = b.parameter("v", &[2, 2], Init::Normal { std: 0.5 });
    let z = b.linear(y, v, None).unwrap();
    b.output("y", y);
    b.output("z", z);
    b.squared_error_loss(z, x).unwrap();
    b.finish()
}

#[test]
fn a_pipeline_gives_the_bits_of_one_device_and_predicts_on_every_stage() {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let trained = |devices: &str, stages: u32| {
        let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
        let options = TrainerOptions::new(devices, optimizer, 6);
        let options = TrainerOptions { micro_batch_size: 2, clip: 0.1, pipeline, ..options };
        let mut trainer = Trainer::new(blocks(), &options).unwrap();
        let values: Vec<f32> = (0..12).map(|i| (i as f32 * 0.7).sin()).collect();
        let x = HostTensor::Float(values);
        let steps: Vec<Step> =
            (0..5).map(|_| trainer.step(&[("x", x.clone())], 0.05).unwrap()).collect();
        let steps: Vec<_> = steps.iter().map(|s| (s.loss, s.gradient_norm)).collect();
        let parameters = trainer.parameters().unwrap();
        let values: Vec<Vec<f32>> = parameters.into_iter().map(|one| one.values).collect();
        let predicted =
            ["y", "z"].map(|output| trainer.predict(output, 6, &[("x", x.clone())]).unwrap());
        (steps, values, predicted)
    };
    let alone = trained("cpu", 1);
    assert_eq!(trained("cpu*2", 2), alone);
    assert_eq!(trained("cpu*4", 2).1.len(), 2);
    let stages = |stages| {
        let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
        let options = TrainerOptions { pipeline, ..TrainerOptions::new("cpu*3", optimizer, 6) };
        Trainer::new(blocks(), &options).map_or_else(|e| e.to_string(), |_| "trains".into())
    };
    assert!(stages(3).contains("2 blocks cannot be cut into 3 stages"), "{}", stages(3));
    assert!(stages(2).contains("a multiple of 2 devices"), "{}", stages(2));
}

#[test]
fn what_cannot_be_trained_is_an_error() {
    let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    let outcome = |graph: Graph, options: TrainerOptions| {
        Trainer::new(graph, &options).map_or_else(|e| e.to_string(), |_| "trains".into())
    };
    let options = |batch| TrainerOptions::new("cpu*2", optimizer, batch);
    let refused = |graph: Graph, batch: usize, micro_batch: usize| {
        outcome(graph, TrainerOptions { micro_batch_size: micro_batch, ..options(batch) })
    };
    assert_eq!(refused(graph(true), 4, 2), "trains");
    assert!(refused(graph(false), 4, 2).contains("no loss"));
    assert!(refused(graph(true), 0, 1).contains("at least 1"));
    assert!(refused(graph(true), 1, 0).contains("at least 1"));
    assert!(refused(graph(true), (1 << 32) + 1, 1).contains("below 2^32"));
    let shared =
        outcome(graph(true), TrainerOptions { shares: Shares::Fixed(vec![4, 0]), ..options(4) });
    assert!(shared.contains("shares must each be at least 1"), "{shared}");
    for clip in [-1.0, f64::NAN, f64::INFINITY] {
        let clipped = outcome(graph(true), TrainerOptions { clip, ..options(4) });
        assert!(clipped.contains("clip must be 0 (off) or a positive number"), "{clipped}");
    }
}

#[test]
fn values_that_are_no_inputs_are_refused_by_name() {
    let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    let mut trainer = Trainer::new(graph(true), &TrainerOptions::new("cpu", optimizer, 1)).unwrap();
    let value = |name| (name, HostTensor::Float(vec![1.0, 2.0]));
    let mut refused = |batch: &[(&str, HostTensor)]| {
        let told = trainer.step(batch, 0.1).unwrap_err().to_string();
        assert_eq!(trainer.evaluate_rows(1, batch).unwrap_err().to_string(), told);
        told
    };
    assert!(refused(&[]).contains("input x is missing"));
    let told = refused(&[value("x"), value("y")]);
    assert_eq!(told, "the graph has no input 'y'; its inputs are x");
    assert_eq!(refused(&[value("x"), value("x")]), "input x is given twice");
    assert!(refused(&[value("samples")]).contains("numbered by the trainer"));
    assert_eq!(trainer.steps(), 0);
    assert!(trainer.step(&[value("x")], 0.1).unwrap().updated);
}

#[test]
fn a_device_without_a_sample_is_left_out_by_measured_shares_and_a_save_keeps_them() {
    let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    let options = TrainerOptions::new("cpu*2", optimizer, 1);
    let mut trainer = Trainer::new(graph(true), &options).unwrap();
    assert_eq!(trainer.world(), 1);
    let notes = trainer.notes().join("\n");
    assert!(notes.contains("measuring 2 devices"), "{notes}");
    assert!(notes.contains("samples per step: cpu"), "{notes}");
    assert!(!notes.contains("--"), "{notes}");
    assert_eq!(trainer.placement().candidates.len(), 2);
    let place = tempfile::tempdir().unwrap();
    trainer.save(place.path()).unwrap();
    let loaded = Trainer::load(graph(true), &options, place.path()).unwrap();
    assert_eq!(loaded.placement(), trainer.placement());
    let notes = loaded.notes().join("\n");
    assert!(!notes.contains("measuring"), "the shares are those of the save: {notes}");
    let even = TrainerOptions { shares: Shares::Even, ..options };
    let error = Trainer::new(graph(true), &even).err().unwrap();
    let (refused, debugged) = (error.to_string(), format!("{error:?}"));
    let expected = "TrainerOptions::batch = 1 has no sample for each of 2 devices; raise it, or \
                    choose fewer with TrainerOptions::devices";
    assert_eq!(refused, expected);
    assert_eq!(debugged, format!("Library({expected:?})"));
}
