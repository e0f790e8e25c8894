//! Losses over the CPU device and an adapter with uneven shares, and over a pipeline of the two:
//! gradients and reported terms are those of the CPU device alone.

use potluck_core::{HostTensor, TensorId};
use potluck_graph::builder::BuildResult;
use potluck_graph::{Builder, CrossEntropyOptions, Graph, LossTerm, nn};
use potluck_train::checkpoint::NamedTensor;
use potluck_train::{PipelineOptions, Shares, Step, Trainer, TrainerOptions};

use crate::golden::{options_on, three_devices};

const BATCH: usize = 10;
const CLASSES: usize = 3;

/// Loss of logits `(b, 3)`, integer targets and float targets of the same shape.
type LossOf = fn(&mut Builder, [TensorId; 3]) -> BuildResult;

const LOSSES: [(&str, LossOf); 3] = [
    ("weighted cross-entropy", |b, [x, classes, _]| {
        let weights = vec![0.5, 2.0, 1.25];
        let options = CrossEntropyOptions { weights, smoothing: 0.1, ignored: Some(1) };
        b.cross_entropy_loss_with(x, classes, &options)
    }),
    ("elementwise terms", |b, [x, _, values]| {
        let [huber, absolute] = [b.huber(x, values, 0.5)?, b.absolute_error(x, values)?];
        let binary = b.binary_cross_entropy(x, values)?;
        b.loss(&[
            LossTerm::mean("huber", huber),
            LossTerm::mean("absolute", absolute).weighted(0.3),
            LossTerm::sum("binary", binary).weighted(0.1),
        ])
    }),
    ("terms by row", |b, [x, classes, values]| {
        let surprise = b.cross_entropy(x, classes, &CrossEntropyOptions::default())?;
        let logarithms = b.log_softmax(x)?;
        let probabilities = b.softmax(values)?;
        let divergence = b.kl_divergence(logarithms, probabilities)?;
        b.loss(&[LossTerm::mean("surprise", surprise), LossTerm::sum("kl", divergence)])
    }),
];

fn model(loss: LossOf) -> Graph {
    let mut b = Builder::new();
    b.block("first");
    let x = b.input("x", &[1, 4]);
    let hidden = nn::linear(&mut b, "first", x, 8).unwrap();
    let hidden = b.tanh(hidden).unwrap();
    b.block("second");
    let logits = nn::linear(&mut b, "second", hidden, CLASSES).unwrap();
    let classes = b.input_ids("classes", &[1]);
    let values = b.input("values", &[1, CLASSES]);
    loss(&mut b, [logits, classes, values]).unwrap();
    b.finish()
}

/// Returns the gradients of a batch, and the step on it.
fn taken(loss: LossOf, options: &TrainerOptions) -> (Vec<NamedTensor>, Step) {
    let floats = |count: usize, rate: f32| {
        HostTensor::Float((0..count).map(|i| (i as f32 * rate).sin().abs()).collect())
    };
    let classes = (0..BATCH as u32).map(|i| (i * i + 1) % 3).collect();
    let batch = [
        ("x", floats(BATCH * 4, 0.7)),
        ("classes", HostTensor::Int(classes)),
        ("values", floats(BATCH * CLASSES, 1.3)),
    ];
    let mut trainer = Trainer::new(model(loss), options).unwrap();
    let gradients = trainer.gradients(&batch).unwrap();
    (gradients, trainer.step(&batch, 0.1).unwrap())
}

#[test]
fn losses_over_unlike_devices_have_the_gradients_of_one() {
    let _turn = crate::common::turn();
    let devices = three_devices();
    let both = format!("{},cpu", devices[0].trim_end_matches("*3"));
    let options = TrainerOptions { micro_batch_size: 3, ..options_on(&both, BATCH) };
    let shares = Shares::Fixed(vec![7, 3]);
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let cases =
        [TrainerOptions { shares, ..options.clone() }, TrainerOptions { pipeline, ..options }];
    for (name, loss) in LOSSES {
        let (expected, alone) = taken(loss, &options_on("cpu", BATCH));
        for options in &cases {
            let (found, step) = taken(loss, options);
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.name, expected.name);
                let error = crate::common::nmse(&found.values, &expected.values);
                assert!(error <= 1e-9, "{name}, {}: {error:e}", found.name);
            }
            assert!((step.loss - alone.loss).abs() < 5e-6, "{name}: {step:?}, not {alone:?}");
            for (term, alone) in step.terms.iter().zip(&alone.terms) {
                assert_eq!(term.0, alone.0);
                assert!((term.1 - alone.1).abs() < 5e-6, "{name}: {term:?}, not {alone:?}");
            }
            assert_eq!(step.terms.len(), alone.terms.len());
        }
    }
}
