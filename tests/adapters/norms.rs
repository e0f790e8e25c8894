//! Normalizations, full attention and elementwise functions in whole plans, with any number of
//! rows: every adapter against the CPU device, and a pipeline against one device.

use potluck_core::rng::Key;
use potluck_core::{BucketId, HostTensor, TensorId};
use potluck_graph::builder::BuildResult;
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Graph, Init, Plan, PlanOptions, differentiate, fuse};
use potluck_kernels::exec::BucketTensor;
use potluck_train::{Trainer, TrainerOptions};

use crate::common::{devices, fill_inputs, fill_parameters, nmse, parameter, pass, run_step, turn};

const ROWS: usize = 5;
const SIZE: usize = 4;
const CHANNELS: usize = 8;

fn weights(b: &mut Builder, name: &str, dims: &[usize]) -> TensorId {
    b.parameter(name, dims, Init::Normal { std: 0.4 })
}

/// Normalizes a picture by groups, lets its positions see each other, and mixes their channels.
fn body(b: &mut Builder) -> BuildResult {
    b.block("picture");
    let x = b.input("x", &[1, SIZE, SIZE, CHANNELS]);
    let sides = ["group.weight", "group.bias"].map(|name| weights(b, name, &[CHANNELS]));
    let y = b.group_norm(x, 2, sides[0], sides[1])?;
    let y = b.silu(y)?;
    let y = b.reshape(y, &[1, SIZE * SIZE, CHANNELS])?;
    b.block("attention");
    let w = weights(b, "qkv", &[3 * CHANNELS, CHANNELS]);
    let qkv = b.linear(y, w, None)?;
    let seen = b.full_attention(qkv, 2, 0.1)?;
    let y = b.add(y, seen)?;
    let gain = weights(b, "rms", &[CHANNELS]);
    let z = b.rms_norm(y, gain, 1e-5)?;
    let y = b.add(z, y)?;
    let sides = ["layer.weight", "layer.bias"].map(|name| weights(b, name, &[CHANNELS]));
    let y = b.layer_norm(y, sides[0], Some(sides[1]))?;
    b.block("mix");
    let share = b.softmax(y)?;
    let bounded = b.tanh(y)?;
    let larger = b.maximum(share, bounded)?;
    let scale = weights(b, "scale", &[CHANNELS]);
    let divisor = b.exp(scale)?;
    let y = b.div(larger, divisor)?;
    let y = b.sub(y, scale)?;
    let y = b.sigmoid(y)?;
    let root = b.sqrt(y)?;
    let y = b.log(root)?;
    let y = b.mean(y, &[1])?;
    let w = weights(b, "head", &[3, CHANNELS]);
    b.linear(y, w, None)
}

fn model() -> Graph {
    let mut b = Builder::new();
    let y = body(&mut b).unwrap();
    let target = b.input("target", &[1, 3]);
    b.squared_error_loss(y, target).unwrap();
    b.finish()
}

#[test]
fn gradients_are_those_of_the_cpu_with_any_number_of_rows() {
    let graph = fuse(differentiate(model()).unwrap());
    let names: Vec<String> = graph.parameters.iter().map(|p| p.name.clone()).collect();
    let plan = Plan::new(graph, PlanOptions::new(ROWS));
    let mut expected: Vec<(f64, Vec<Vec<f32>>)> = Vec::new();
    for mut device in devices(&plan, 0) {
        let device = device.as_mut();
        fill_parameters(device, 0.5);
        let results = [ROWS, 2, 1, ROWS].map(|rows| {
            fill_inputs(device, 0, rows, 3, 2);
            let loss = run_step(device, &pass(0, rows)).loss.loss;
            let gradient = |name: &String| parameter(device, BucketTensor::Gradients, name);
            (loss, names.iter().map(gradient).collect::<Vec<_>>())
        });
        assert_eq!(results[0], results[3], "{}", device.name());
        if expected.is_empty() {
            expected = results.into();
            continue;
        }
        for ((loss, gradients), (known, wanted)) in results.iter().zip(&expected) {
            let who = device.name();
            assert!((loss - known).abs() <= 1e-5 * known, "{who}: {loss} and {known}");
            for ((name, gradient), wanted) in names.iter().zip(gradients).zip(wanted) {
                let error = nmse(gradient, wanted);
                assert!(error <= 1e-6, "{who}: gradient of {name}, NMSE {error:.1e}");
            }
        }
    }
    assert!(!expected.is_empty());
}

/// Without gradients, too, a pass of training normalizes by the statistics of the batch.
#[test]
fn batch_norm_without_gradients_runs_as_in_training_and_as_in_evaluations() {
    let mut b = Builder::new();
    let x = b.input("x", &[1, SIZE, SIZE, CHANNELS]);
    let y = b.batch_norm("norm", x).unwrap();
    b.output("y", y);
    let plan = Plan::new(b.finish(), PlanOptions::new(ROWS));
    let mut expected: Vec<Vec<f32>> = Vec::new();
    for mut device in devices(&plan, 0) {
        let device = device.as_mut();
        for (bucket, id) in plan.buckets.iter().zip((0..).map(BucketId)) {
            let ones = vec![1.0; bucket.length];
            device.write_bucket(BucketTensor::Parameters, id, &ones).unwrap();
        }
        let results = [(true, ROWS), (false, ROWS), (true, 2)].map(|(training, rows)| {
            fill_inputs(device, 0, rows, 3, 2);
            let mut pass = pass(0, rows);
            pass.random.training = training;
            device.run(0..plan.graph.nodes.len(), &pass).unwrap();
            device.read(y, &pass).unwrap()
        });
        if expected.is_empty() {
            assert!(nmse(&results[0], &results[1]) > 1e-3, "the statistics differ");
            expected = results.into();
            continue;
        }
        for (got, wanted) in results.iter().zip(&expected) {
            assert!(nmse(got, wanted) <= 1e-6, "{}", device.name());
        }
    }
}

#[test]
fn a_pipeline_has_the_losses_of_one_device() {
    let _turn = turn();
    let batch = |step: u64| {
        let key = Key::new(4).step(step);
        let draw = |count: usize| (0..count as u64).map(|i| key.normal(i) as f32).collect();
        let x = HostTensor::Float(draw(8 * SIZE * SIZE * CHANNELS));
        [("x", x), ("target", HostTensor::Float(draw(8 * 3)))]
    };
    let trained = |stages: u32| -> Vec<f64> {
        let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };
        let devices = if stages > 1 { "cpu*2" } else { "cpu" };
        let mut options = TrainerOptions::new(devices, optimizer, 8);
        (options.micro_batch_size, options.tune_s, options.pipeline.stages) = (2, 0.0, stages);
        let mut trainer = Trainer::new(model(), &options).unwrap();
        (0..6).map(|step| trainer.step(&batch(step % 2), 0.05).unwrap().loss).collect()
    };
    let expected = trained(1);
    assert!(expected[4] < expected[0], "{expected:?}");
    assert_eq!(trained(2), expected);
}
