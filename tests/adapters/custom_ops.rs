//! Ops that are defined outside the crate, in whole plans: the kernels on every adapter against the
//! references on the CPU device, and training on each.

use potluck_core::rng::Key;
use potluck_core::{HostTensor, Shape};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Graph, Init, Plan, PlanOptions, Precision, differentiate, fuse};
use potluck_kernels::Elementwise;
use potluck_kernels::autotune::check_kernel;
use potluck_kernels::device::{Gpu, ShaderChecks};
use potluck_train::{Trainer, TrainerOptions};

use crate::common::{
    adapters, devices, fill_inputs, fill_parameters, nmse, parameter, pass, run_step, turn,
};

const ROWS: usize = 9;
const WIDTH: usize = 21;

/// `x g / (1 + exp(-g))`
fn gate() -> Elementwise {
    let sigmoid = |g: f64| 1.0 / (1.0 + (-g).exp());
    Elementwise::new("gate", &["x", "g"], "x * g / (1.0 + exp(-g))", move |v| {
        v[0] * v[1] * sigmoid(v[1])
    })
    .with_gradient("dy * g / (1.0 + exp(-g))", move |v| v[2] * v[1] * sigmoid(v[1]))
    .with_gradient("dy * x / (1.0 + exp(-g)) * (1.0 + g / (1.0 + exp(g)))", move |v| {
        v[2] * v[0] * sigmoid(v[1]) * (1.0 + v[1] * sigmoid(-v[1]))
    })
}

fn model() -> Graph {
    let mut b = Builder::new();
    b.block("gated");
    let x = b.input("x", &[1, WIDTH]);
    let std = 0.3;
    let [up, side] = ["up", "gate"].map(|name| {
        let w = b.parameter(name, &[WIDTH, WIDTH], Init::Normal { std });
        b.linear(x, w, None).unwrap()
    });
    let y = b.custom(gate(), &[up, side]).unwrap();
    b.block("down");
    let w = b.parameter("down", &[3, WIDTH], Init::Normal { std });
    let y = b.linear(y, w, None).unwrap();
    let target = b.input("target", &[1, 3]);
    b.squared_error_loss(y, target).unwrap();
    b.finish()
}

#[test]
fn losses_and_gradients_are_those_of_the_references_with_any_number_of_rows() {
    use potluck_kernels::exec::BucketTensor;
    let plan = Plan::new(fuse(differentiate(model()).unwrap()), PlanOptions::new(ROWS));
    let mut expected: Vec<(f64, Vec<f32>)> = Vec::new();
    for mut device in devices(&plan, 0) {
        let device = device.as_mut();
        fill_parameters(device, 0.5);
        let results = [ROWS, 4, 1, ROWS].map(|rows| {
            fill_inputs(device, 0, rows, 3, 2);
            let loss = run_step(device, &pass(0, rows)).loss.loss;
            (loss, parameter(device, BucketTensor::Gradients, "gate"))
        });
        assert_eq!(results[0], results[3], "{}", device.name());
        if expected.is_empty() {
            expected = results.into();
            continue;
        }
        for ((loss, gradient), (known, wanted)) in results.iter().zip(&expected) {
            let name = device.name();
            assert!((loss - known).abs() <= 1e-5 * known, "{name}: {loss} and {known}");
            assert!(nmse(gradient, wanted) <= 1e-6, "{name}");
        }
    }
    assert!(!expected.is_empty());
}

#[test]
fn kernels_are_checked_without_a_model_and_those_of_the_gradient_too() {
    let _turn = turn();
    let shape = Shape::batched(&[1, WIDTH]);
    for adapter in adapters() {
        let gpu = Gpu::open(&adapter, ShaderChecks::Disabled, Precision::F32).unwrap();
        for rows in [1, 7, 4000] {
            check_kernel(&gpu, gate(), &[shape.clone(), shape.clone()], rows).unwrap();
        }
        let twice = |value: &str, slope: &str| {
            let op = Elementwise::new("twice", &["x"], value, |v| 2.0 * v[0]);
            let op = op.with_gradient(slope, |v| 2.0 * v[1]);
            check_kernel(&gpu, op, std::slice::from_ref(&shape), 3).map_err(|e| e.to_string())
        };
        assert_eq!(twice("2.0 * x", "2.0 * dy"), Ok(()));
        assert!(twice("2.1 * x", "2.0 * dy").unwrap_err().contains("custom op twice cannot"));
        assert!(twice("2.0 * x", "2.1 * dy").unwrap_err().contains("op twice_grad_x cannot"));
        let half = || Elementwise::new("half", &["x"], "0.5 * x", |v| 0.5 * v[0]);
        check_kernel(&gpu, half(), std::slice::from_ref(&shape), 3).unwrap();
        let none = check_kernel(&gpu, half(), &[], 3).unwrap_err().to_string();
        assert!(none.contains("takes 1 to 1 inputs, not 0"), "{none}");
    }
}

#[test]
fn training_on_adapters_alone_and_beside_the_cpu_has_the_losses_of_the_cpu() {
    let _turn = turn();
    let batch = |step: u64| {
        let key = Key::new(4).step(step);
        let draw = |count: usize| (0..count as u64).map(|i| key.normal(i) as f32).collect();
        [("x", HostTensor::Float(draw(12 * WIDTH))), ("target", HostTensor::Float(draw(12 * 3)))]
    };
    let trained = |selector: &str, stages: u32| -> Vec<f64> {
        let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };
        let mut options = TrainerOptions::new(selector, optimizer, 12);
        (options.micro_batch_size, options.tune_s, options.pipeline.stages) = (4, 0.0, stages);
        let mut trainer = Trainer::new(model(), &options).unwrap();
        (0..10).map(|step| trainer.step(&batch(step % 2), 0.05).unwrap().loss).collect()
    };
    let expected = trained("cpu", 1);
    assert!(expected[8] < expected[0], "{expected:?}");
    let found = adapters();
    let first = format!("{}:{}", found[0].api, found[0].name);
    let selector = first.split(',').next().unwrap_or(&first);
    for (devices, stages) in
        [(selector.to_string(), 1), (format!("{selector},cpu"), 1), (format!("cpu,{selector}"), 2)]
    {
        for (a, b) in expected.iter().zip(trained(&devices, stages)) {
            assert!((a - b).abs() <= 1e-4 * a, "{devices}: {a} and {b}");
        }
    }
}
