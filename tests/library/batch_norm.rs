//! Batch normalization in training: its running averages over micro-batches, devices and stages of
//! a pipeline, their place in checkpoints, and evaluations that use them.

use potluck_core::HostTensor;
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Graph, Init};
use potluck_train::{PipelineOptions, Shares, Trainer, TrainerOptions};

const BATCH: usize = 12;
const WIDTH: usize = 3;
const STEPS: usize = 3;

/// A normalization of the inputs, and one of what is computed of them, in two blocks.
fn model() -> Graph {
    let mut b = Builder::new();
    b.block("first");
    let x = b.input("x", &[1, WIDTH]);
    let y = b.batch_norm("first.norm", x).unwrap();
    let w = b.parameter("first.weight", &[4, WIDTH], Init::Normal { std: 0.5 });
    let y = b.linear(y, w, None).unwrap();
    b.block("second");
    let y = b.batch_norm("second.norm", y).unwrap();
    let v = b.parameter("second.weight", &[WIDTH, 4], Init::Normal { std: 0.5 });
    let y = b.linear(y, v, None).unwrap();
    b.output("y", y);
    b.squared_error_loss(y, x).unwrap();
    b.finish()
}

/// Returns the inputs of a step.
fn inputs(step: usize) -> Vec<f32> {
    (0..BATCH * WIDTH).map(|i| ((i + 36 * step) as f32 * 0.7).sin() * 2.0 + 1.0).collect()
}

fn trainer(devices: &str, shares: Shares, micro_batch_size: usize, stages: u32) -> Trainer {
    let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.1 };
    let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
    let options = TrainerOptions::new(devices, optimizer, BATCH);
    let options =
        TrainerOptions { micro_batch_size, shares, pipeline, clip: 0.5, seed: 2, ..options };
    Trainer::new(model(), &options).unwrap()
}

/// Takes the steps; returns their losses and gradient norms.
fn train(trainer: &mut Trainer) -> Vec<(f64, f64)> {
    let step = |step| {
        let taken = trainer.step(&[("x", HostTensor::Float(inputs(step)))], 0.05).unwrap();
        (taken.loss, taken.gradient_norm)
    };
    (0..STEPS).map(step).collect()
}

fn values(trainer: &Trainer, name: &str) -> Vec<f32> {
    trainer.parameter(name).unwrap().values
}

fn assert_close(what: &str, got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        let error = (f64::from(*got) - expected).abs();
        assert!(error < 2e-6 * (1.0 + expected.abs()), "{what}: {got}, not {expected}");
    }
}

/// Returns the running mean and variance of the inputs after the steps, as PyTorch's `BatchNorm1d`
/// has them, with the mean of the statistics of micro-batches of `rows` rows in each step.
fn expected(rows: usize) -> [Vec<f64>; 2] {
    let (mut mean, mut variance) = (vec![0.0; WIDTH], vec![1.0; WIDTH]);
    for step in 0..STEPS {
        let x: Vec<f64> = inputs(step).into_iter().map(f64::from).collect();
        for k in 0..WIDTH {
            let column: Vec<f64> = x.iter().skip(k).step_by(WIDTH).copied().collect();
            let parts = column.chunks(rows).map(|part| {
                let mean = part.iter().sum::<f64>() / rows as f64;
                let squares: f64 = part.iter().map(|x| (x - mean).powi(2)).sum();
                (mean, squares / (rows - 1) as f64)
            });
            let count = (BATCH / rows) as f64;
            let (m, v) = parts.fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
            mean[k] = 0.9 * mean[k] + 0.1 * m / count;
            variance[k] = 0.9 * variance[k] + 0.1 * v / count;
        }
    }
    [mean, variance]
}

#[test]
fn averages_shared_are_of_micro_batches() {
    let fixed = |counts: &[usize]| Shares::Fixed(counts.to_vec());
    for rows in [3, 6, 12] {
        let mut alone = trainer("cpu", Shares::Even, rows, 1);
        let steps = train(&mut alone);
        let [mean, variance] = expected(rows);
        assert_close("the mean", &values(&alone, "first.norm.running_mean"), &mean);
        assert_close("the variance", &values(&alone, "first.norm.running_var"), &variance);
        let mut others = vec![trainer("cpu*2", Shares::Even, rows, 2)];
        if rows == 3 {
            others.push(trainer("cpu*3", fixed(&[6, 3, 3]), rows, 1));
            others.push(trainer("cpu*2", fixed(&[3, 9]), rows, 1));
        }
        for mut other in others {
            let what = format!("{} devices, {rows} rows", other.world());
            for ((loss, norm), (of_loss, of_norm)) in train(&mut other).iter().zip(&steps) {
                assert!((loss - of_loss).abs() < 1e-6 * of_loss, "{what}: {loss}, not {of_loss}");
                assert!((norm - of_norm).abs() < 1e-5 * of_norm, "{what}: {norm}, not {of_norm}");
            }
            for tensor in alone.parameters().unwrap() {
                let wide: Vec<f64> = tensor.values.iter().map(|v| f64::from(*v)).collect();
                assert_close(
                    &format!("{what}: {}", tensor.name),
                    &values(&other, &tensor.name),
                    &wide,
                );
            }
        }
    }
}

/// The norm of a gradient and its clipping must not see running averages, whose sums are large.
#[test]
fn averages_have_no_part_in_norm() {
    let mut shifted = trainer("cpu", Shares::Even, 12, 1);
    let mut plain = trainer("cpu", Shares::Even, 12, 1);
    let far: Vec<f32> = vec![1e6; WIDTH];
    shifted.set_parameter("first.norm.running_mean", &far).unwrap();
    assert_eq!(train(&mut shifted), train(&mut plain));
    let mean = values(&shifted, "first.norm.running_mean");
    assert!(mean.iter().all(|mean| (7.2e5..7.4e5).contains(mean)), "{mean:?}");
}

#[test]
fn predictions_use_running_averages() {
    let mut trainer = trainer("cpu", Shares::Even, 6, 1);
    train(&mut trainer);
    let x = inputs(1);
    let mut predict = |rows, values: &[f32]| -> Vec<f32> {
        let inputs = [("x", HostTensor::Float(values.to_vec()))];
        trainer.predict("y", rows, &inputs).unwrap().into_iter().collect()
    };
    let whole = predict(BATCH, &x);
    for (x, y) in x.chunks(WIDTH).zip(whole.chunks(WIDTH)) {
        let y: Vec<f64> = y.iter().map(|y| f64::from(*y)).collect();
        assert_close("a row by itself", &predict(1, x), &y);
    }
}

#[test]
fn averages_saved_go_on_same_bits() {
    let place = tempfile::tempdir().unwrap();
    let mut first = trainer("cpu", Shares::Even, 6, 1);
    train(&mut first);
    first.save(place.path()).unwrap();
    let steps = std::fs::read_dir(place.path().join("checkpoints")).unwrap();
    let saved = steps.flatten().map(|entry| entry.path()).find(|path| path.is_dir()).unwrap();
    let moments = std::fs::read(saved.join("moments.safetensors")).unwrap();
    let moments = String::from_utf8_lossy(&moments).into_owned();
    assert!(moments.contains("first.weight.0") && !moments.contains("running"), "{moments}");
    let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.1 };
    let options = TrainerOptions::new("cpu", optimizer, BATCH);
    let options = TrainerOptions { micro_batch_size: 6, clip: 0.5, seed: 2, ..options };
    let mut loaded = Trainer::load(model(), &options, place.path()).unwrap();
    assert_eq!(train(&mut loaded), train(&mut first));
    for name in ["first.norm.running_mean", "second.norm.running_var"] {
        assert_eq!(values(&loaded, name), values(&first, name), "{name}");
    }
}
