//! Tests of inputs that all samples of a step share.

use super::fit_tests::{options, steps, waves};
use super::*;
use crate::{PipelineOptions, Predictor, PredictorOptions, Shares};
use potluck_data::Split;
use potluck_graph::{Builder, Init, LossTerm, Recompute, nn};

const BATCH: usize = 6;
const WIDTH: usize = 4;

/// A model with a mask, a place in a table and a weight of a term, which all samples share or have
/// one each of.
fn model(are_shared: bool) -> Graph {
    let mut b = Builder::new();
    b.block("first");
    let x = b.input("x", &[1, WIDTH]);
    let y = b.input("y", &[1, 1]);
    let table = b.parameter("table", &[3, WIDTH], Init::Normal { std: 0.5 });
    let [mask, place, beta] = if are_shared {
        [
            b.shared_input("mask", &[WIDTH]),
            b.shared_input_ids("place", &[1]),
            b.shared_input("beta", &[]),
        ]
    } else {
        [b.input("mask", &[1, WIDTH]), b.input_ids("place", &[1]), b.input("beta", &[1, 1])]
    };
    let hidden = nn::linear(&mut b, "first", x, WIDTH).unwrap();
    let hidden = b.mul(hidden, mask).unwrap();
    let row = b.embedding(place, table).unwrap();
    let hidden = b.add(hidden, row).unwrap();
    let hidden = b.tanh(hidden).unwrap();
    b.block("second");
    let z = nn::linear(&mut b, "second", hidden, 1).unwrap();
    let errors = b.squared_error(z, y).unwrap();
    let size = b.mul(hidden, hidden).unwrap();
    let weighted = b.mul(size, beta).unwrap();
    b.output("z", z);
    b.loss(&[LossTerm::mean("errors", errors), LossTerm::sum("size", weighted)]).unwrap();
    b.finish()
}

/// Batch of a step, with `copies` copies of the inputs that samples share.
fn batch(step: usize, copies: usize) -> [(&'static str, HostTensor); 5] {
    let values = |n: usize| (0..n).map(|i| ((i + 5 * step) as f32 * 0.7).sin()).collect();
    let mask = [1.0, 0.0, 0.5, 1.0].repeat(copies);
    [
        ("x", HostTensor::Float(values(BATCH * WIDTH))),
        ("y", HostTensor::Float(values(BATCH))),
        ("mask", HostTensor::Float(mask)),
        ("place", HostTensor::Int(vec![(step % 3) as u32; copies])),
        ("beta", HostTensor::Float(vec![0.1 * step as f32; copies])),
    ]
}

fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 2e-6, "{what}: {found} for {expected}");
    }
}

#[test]
fn what_samples_share_counts_as_a_copy_for_each() {
    let shares = Shares::Fixed(vec![4, 2]);
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let ways = [
        TrainerOptions { recompute: Recompute::Blocks, ..options("cpu") },
        TrainerOptions { shares, ..options("cpu*2") },
        TrainerOptions { pipeline, ..options("cpu*2") },
    ];
    let mut copied = Trainer::new(model(false), &options("cpu")).unwrap();
    let mut sharing = ways.map(|options| Trainer::new(model(true), &options).unwrap());
    for step in 0..3 {
        let expected = copied.gradients(&batch(step, BATCH)).unwrap();
        let taken = copied.step(&batch(step, BATCH), 0.05).unwrap();
        let given = batch(step + 1, BATCH);
        let predicted = copied.predict("z", BATCH, &given).unwrap();
        let evaluated = copied.evaluate_rows(BATCH, &given).unwrap();
        for trainer in &mut sharing {
            let gradients = trainer.gradients(&batch(step, 1)).unwrap();
            for (found, expected) in gradients.iter().zip(&expected) {
                assert_near(&found.values, &expected.values, &found.name);
            }
            let found = trainer.step(&batch(step, 1), 0.05).unwrap();
            assert!((found.loss - taken.loss).abs() < 2e-6, "{found:?} for {taken:?}");
            let given = batch(step + 1, 1);
            let found = trainer.predict("z", BATCH, &given).unwrap();
            assert_near(found.as_slice().unwrap(), predicted.as_slice().unwrap(), "z");
            let found = trainer.evaluate_rows(BATCH, &given).unwrap();
            assert!((found.loss - evaluated.loss).abs() < 2e-6, "{found:?} for {evaluated:?}");
            assert_eq!(found.terms.len(), 2);
            let mean = found.terms[0].1 + found.terms[1].1;
            assert!((mean - found.loss).abs() < 2e-6, "{found:?}");
        }
    }
}

#[test]
fn a_predictor_takes_what_samples_share() {
    let mut trainer = Trainer::new(model(true), &options("cpu")).unwrap();
    let expected = trainer.predict("z", BATCH, &batch(2, 1)).unwrap();
    let parameters = trainer.parameters().unwrap();
    let options = PredictorOptions::new("cpu*2");
    let mut predictor = Predictor::new(model(true), &options).unwrap();
    predictor.set_parameters(&parameters).unwrap();
    assert_eq!(predictor.predict("z", BATCH, &batch(2, 1)).unwrap(), expected);
}

#[test]
fn targets_that_samples_share_are_refused() {
    let mut b = Builder::new();
    let x = b.shared_input("x", &[4, 3]);
    let targets = b.shared_input_ids("targets", &[4]);
    let told = b.cross_entropy_loss(x, targets).unwrap_err().to_string();
    assert!(told.contains("wants logits and targets of each sample"), "{told}");
}

#[test]
fn what_samples_share_is_checked_and_no_data_set_has_it() {
    let mut trainer = Trainer::new(model(true), &options("cpu")).unwrap();
    let told = trainer.step(&batch(0, BATCH), 0.1).unwrap_err().to_string();
    assert!(
        told.contains("input mask must be F32 of (4) for 6 rows, which are 4 values"),
        "{told}"
    );
    let mut out_of_table = batch(0, 1);
    out_of_table[3].1 = HostTensor::Int(vec![3]);
    let told = trainer.step(&out_of_table, 0.1).unwrap_err().to_string();
    assert!(told.contains("input place: for all samples: 3 is no row of its table"), "{told}");

    let mut b = Builder::new();
    let x = b.input("x", &[1, 2]);
    let y = b.input("y", &[1, 1]);
    let beta = b.shared_input("beta", &[]);
    let z = nn::linear(&mut b, "fc", x, 1).unwrap();
    let z = b.mul(z, beta).unwrap();
    b.output("z", z);
    b.squared_error_loss(z, y).unwrap();
    let mut trainer = Trainer::new(b.finish(), &options("cpu")).unwrap();
    let told = [
        trainer.fit(&waves(), &steps(1)).unwrap_err(),
        trainer.evaluate(&waves(), Split::Validation, 0).unwrap_err(),
        trainer.predict_data(&waves(), Split::Validation, "z").unwrap_err(),
    ];
    for told in told.map(|error| error.to_string()) {
        assert!(told.contains("'beta' is one that all samples share"), "{told}");
    }

    let mut b = Builder::new();
    let x = b.shared_input("x", &[2]);
    let y = b.input("y", &[1, 1]);
    let w = b.parameter("w", &[2], Init::Zeros);
    let z = b.mul(x, w).unwrap();
    let z = b.sum(z, &[0]).unwrap();
    let z = b.mul(z, y).unwrap();
    b.squared_error_loss(z, y).unwrap();
    let mut trainer = Trainer::new(b.finish(), &options("cpu")).unwrap();
    let told = trainer.evaluate(&waves(), Split::Validation, 0).unwrap_err().to_string();
    assert!(told.contains("the data have x of each sample"), "{told}");
}
