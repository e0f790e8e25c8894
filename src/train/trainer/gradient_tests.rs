//! Tests of the gradients that a trainer returns, and of losses over several devices: each equals
//! the result of one device.

use super::*;
use crate::{PipelineOptions, Shares, TensorOptions};
use potluck_core::TensorId;
use potluck_graph::builder::BuildResult;
use potluck_graph::optim::Optimizer;
use potluck_graph::{
    Builder, CrossEntropyOptions, Init, LossTerm, ParameterSplit, Precision, SplitUnit, Unary,
};

const BATCH: usize = 10;
const CLASSES: usize = 3;

/// Losses of logits `(b, 3)`, integer targets and float targets of the same shape.
type LossOf = fn(&mut Builder, [TensorId; 3]) -> BuildResult;

const LOSSES: [(&str, LossOf); 8] = [
    ("cross-entropy", |b, [x, classes, _]| b.cross_entropy_loss(x, classes)),
    ("weighted cross-entropy", |b, [x, classes, _]| {
        let weights = vec![0.5, 2.0, 1.25];
        let options = CrossEntropyOptions { weights, smoothing: 0.1, ignored: Some(1) };
        b.cross_entropy_loss_with(x, classes, &options)
    }),
    ("squared error", |b, [x, _, values]| b.squared_error_loss(x, values)),
    ("l1", |b, [x, _, values]| {
        let errors = b.absolute_error(x, values)?;
        b.loss(&[LossTerm::mean("l1", errors)])
    }),
    ("huber", |b, [x, _, values]| {
        let errors = b.huber(x, values, 0.5)?;
        b.loss(&[LossTerm::mean("huber", errors)])
    }),
    ("binary cross-entropy", |b, [x, _, values]| {
        let errors = b.binary_cross_entropy(x, values)?;
        b.loss(&[LossTerm::sum("bce", errors)])
    }),
    ("divergence", |b, [x, _, values]| {
        let logarithms = b.log_softmax(x)?;
        let probabilities = b.softmax(values)?;
        let divergence = b.kl_divergence(logarithms, probabilities)?;
        b.loss(&[LossTerm::sum("kl", divergence)])
    }),
    ("terms", |b, [x, classes, values]| {
        let surprise = b.cross_entropy(x, classes, &CrossEntropyOptions::default())?;
        let errors = b.squared_error(x, values)?;
        b.loss(&[
            LossTerm::mean("surprise", surprise),
            LossTerm::mean("errors", errors).weighted(0.3),
        ])
    }),
];

/// Two blocks; a tensor group divides the hidden columns.
fn model(loss: LossOf, dropout: f32) -> Graph {
    let mut b = Builder::new();
    b.block("first");
    let x = b.input("x", &[1, 4]);
    let normal = Init::Normal { std: 0.5 };
    let w = b.parameter("w", &[64, 4], normal);
    let hidden = b.linear(x, w, None).unwrap();
    let hidden = b.unary(hidden, Unary::Tanh).unwrap();
    let hidden = b.dropout(hidden, dropout).unwrap();
    b.block("second");
    let v = b.parameter("v", &[CLASSES, 64], normal);
    let bias = b.parameter("bias", &[CLASSES], normal);
    let logits = b.linear(hidden, v, Some(bias)).unwrap();
    let classes = b.input_ids("classes", &[1]);
    let values = b.input("values", &[1, CLASSES]);
    loss(&mut b, [logits, classes, values]).unwrap();
    b.split_parameters(|name| match name {
        "w" => Some(ParameterSplit::new(0, SplitUnit::Columns)),
        "v" => Some(ParameterSplit::new(1, SplitUnit::Columns)),
        _ => None,
    });
    b.finish()
}

fn batch(graph: &Graph) -> Vec<(&'static str, HostTensor)> {
    let floats = |count: usize, rate: f32| {
        HostTensor::Float((0..count).map(|i| (i as f32 * rate).sin().abs()).collect())
    };
    let classes = HostTensor::Int((0..BATCH as u32).map(|i| (i * i + 1) % 3).collect());
    let all = [
        ("x", floats(BATCH * 4, 0.7)),
        ("classes", classes),
        ("values", floats(BATCH * CLASSES, 1.3)),
    ];
    all.into_iter().filter(|(name, _)| graph.input(name).is_some()).collect()
}

fn options(devices: &str) -> TrainerOptions {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let options = TrainerOptions::new(devices, optimizer, BATCH);
    TrainerOptions { micro_batch_size: 3, clip: 0.05, shares: Shares::Even, ..options }
}

/// Layouts beside one device: uneven shares, stages of a pipeline, a tensor group.
fn layouts() -> [(&'static str, TrainerOptions); 3] {
    let shares = Shares::Fixed(vec![7, 3]);
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let tensor = TensorOptions { ranks: 2, ..TensorOptions::default() };
    [
        ("uneven shares", TrainerOptions { shares, ..options("cpu*2") }),
        ("a pipeline", TrainerOptions { pipeline, ..options("cpu*2") }),
        ("a tensor group", TrainerOptions { tensor, ..options("cpu*2") }),
    ]
}

fn nmse(found: &[NamedTensor], expected: &[NamedTensor]) -> f64 {
    let values = |tensors: &[NamedTensor]| -> Vec<f64> {
        tensors.iter().flat_map(|tensor| &tensor.values).map(|value| f64::from(*value)).collect()
    };
    let (found, expected) = (values(found), values(expected));
    assert_eq!(found.len(), expected.len());
    let errors = found.iter().zip(&expected).map(|(found, expected)| (found - expected).powi(2));
    errors.sum::<f64>() / expected.iter().map(|value| value * value).sum::<f64>()
}

#[test]
fn gradients_of_every_loss_are_those_of_one_device() {
    for (name, loss) in LOSSES {
        let graph = model(loss, 0.0);
        let batch = batch(&graph);
        let mut alone = Trainer::new(graph.clone(), &options("cpu")).unwrap();
        let expected = alone.gradients(&batch).unwrap();
        let names: Vec<&str> = expected.iter().map(|tensor| &*tensor.name).collect();
        assert_eq!(names, ["w", "v", "bias"]);
        let step = alone.step(&batch, 0.1).unwrap();
        let squares = expected.iter().flat_map(|tensor| &tensor.values);
        let norm = squares.map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        assert!((norm / step.gradient_norm - 1.0).abs() < 1e-5, "{name}: {norm} of {step:?}");
        for (layout, options) in layouts() {
            let mut trainer = Trainer::new(graph.clone(), &options).unwrap();
            let found = trainer.gradients(&batch).unwrap();
            let error = nmse(&found, &expected);
            assert!(error <= 1e-9, "{name} over {layout}: {error:e}");
            let over = trainer.step(&batch, 0.1).unwrap();
            assert!((over.loss - step.loss).abs() <= 1e-5, "{name} over {layout}");
            assert_eq!(over.terms.len(), step.terms.len());
            for (over, alone) in over.terms.iter().zip(&step.terms) {
                assert_eq!(over.0, alone.0);
                assert!((over.1 - alone.1).abs() <= 1e-5, "{name} over {layout}: {over:?}");
            }
        }
    }
}

/// The loss scale of mixed precision is taken out, whether it was halved or not.
#[test]
fn gradients_in_mixed_precision_are_those_of_f32_rounded() {
    for (name, loss) in LOSSES {
        let graph = model(loss, 0.0);
        let batch = batch(&graph);
        let gradients = |precision| {
            let options = TrainerOptions { precision, ..options("cpu") };
            Trainer::new(graph.clone(), &options).unwrap().gradients(&batch).unwrap()
        };
        let error = nmse(&gradients(Precision::Mixed), &gradients(Precision::F32));
        assert!(error > 0.0 && error < 1e-5, "{name}: {error:e}");
    }
}

/// The gradient is the difference quotient of the loss.
#[test]
fn gradients_are_those_of_the_mean_loss() {
    let graph = model(LOSSES[7].1, 0.0);
    let batch = batch(&graph);
    let mut trainer = Trainer::new(graph, &options("cpu")).unwrap();
    let mut v = trainer.parameter("v").unwrap();
    let mut loss_at = |value: f32| {
        v.values[4] = value;
        trainer.set_parameter("v", &v.values).unwrap();
        trainer.evaluate_rows(BATCH, &batch).unwrap().loss
    };
    let quotient = (loss_at(0.51) - loss_at(0.49)) / 0.02;
    loss_at(0.5);
    let gradient = f64::from(trainer.gradients(&batch).unwrap()[1].values[4]);
    let apart = (gradient - quotient).abs();
    assert!(apart < 1e-3 * quotient.abs().max(0.1), "{gradient} for {quotient}");
}

#[test]
fn reading_gradients_changes_no_later_step() {
    let graph = model(LOSSES[0].1, 0.25);
    let batch = batch(&graph);
    let layouts = layouts().map(|(_, options)| options);
    for options in [options("cpu")].into_iter().chain(layouts) {
        let trained = |reads: bool| {
            let mut trainer = Trainer::new(graph.clone(), &options).unwrap();
            let mut steps = Vec::new();
            for _ in 0..3 {
                if reads {
                    trainer.gradients(&batch).unwrap();
                }
                steps.push(trainer.step(&batch, 0.1).unwrap().loss);
            }
            (steps, trainer.parameters().unwrap(), trainer.steps())
        };
        assert!(trained(true) == trained(false));
    }
}

/// Running averages of a batch norm stay.
#[test]
fn reading_gradients_changes_no_running_average() {
    let mut b = Builder::new();
    let (x, target) = (b.input("x", &[1, 4]), b.input("target", &[1, 4]));
    let y = b.batch_norm("norm", x).unwrap();
    b.squared_error_loss(y, target).unwrap();
    let mut trainer = Trainer::new(b.finish(), &options("cpu")).unwrap();
    let values: Vec<f32> = (0..BATCH * 4).map(|i| (i as f32 * 0.7).sin()).collect();
    let batch = [("x", HostTensor::Float(values.clone())), ("target", HostTensor::Float(values))];
    let before = trainer.parameters().unwrap();
    let gradients = trainer.gradients(&batch).unwrap();
    let names: Vec<&str> = gradients.iter().map(|tensor| &*tensor.name).collect();
    assert_eq!(names, ["norm.weight", "norm.bias"]);
    assert!(trainer.parameters().unwrap() == before);
    trainer.step(&batch, 0.1).unwrap();
    assert!(trainer.parameters().unwrap()[2] != before[2], "the running mean moves in a step");
}

#[test]
fn a_batch_without_targets_has_no_gradient() {
    let graph = model(LOSSES[0].1, 0.0);
    let mut batch = batch(&graph);
    batch[1].1 = HostTensor::Int(vec![potluck_graph::IGNORE_INDEX; BATCH]);
    let mut trainer = Trainer::new(graph, &options("cpu")).unwrap();
    let error = trainer.gradients(&batch).unwrap_err().to_string();
    assert!(error.contains("no target of the batch is a class"), "{error}");
}
