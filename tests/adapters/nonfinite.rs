//! A parameter that is NaN makes the step of a model with a ReLU behind it one that is skipped.

use potluck_core::HostTensor;
use potluck_graph::optim::Optimizer;
use potluck_graph::{
    Builder, Graph, Init, Plan, PlanOptions, Region, TensorLocation, Unary, differentiate, fuse,
};
use potluck_kernels::exec::{BucketTensor, Executor};
use potluck_train::{Trainer, TrainerOptions};

use crate::common::{devices, fill_inputs, fill_parameters, pass, run_step};

const ROWS: usize = 2;

/// Two layers with a ReLU between them, the first with a NaN in every bias.
fn graph() -> Graph {
    let mut b = Builder::new();
    let x = b.input("inputs", &[1, 4]);
    let weight = b.parameter("first.weight", &[8, 4], Init::Uniform { bound: 0.5 });
    let bias = b.parameter("first.bias", &[8], Init::Uniform { bound: f32::NAN });
    let hidden = b.linear(x, weight, Some(bias)).unwrap();
    let hidden = b.unary(hidden, Unary::Relu).unwrap();
    let weight = b.parameter("second.weight", &[3, 8], Init::Uniform { bound: 0.5 });
    let y = b.linear(hidden, weight, None).unwrap();
    let targets = b.input("targets", &[1, 3]);
    b.squared_error_loss(y, targets).unwrap();
    b.finish()
}

#[test]
fn nan_before_a_relu_reaches_the_loss_on_every_device() {
    for fused in [false, true] {
        let graph = differentiate(graph()).unwrap();
        let graph = if fused { fuse(graph) } else { graph };
        let plan = Plan::new(graph, PlanOptions::new(ROWS));
        for mut device in devices(&plan, 0) {
            let device: &mut dyn Executor = device.as_mut();
            fill_parameters(device, 0.3);
            let (plan, bias) = (device.plan(), &plan.graph.parameters[1]);
            let TensorLocation::Parameter { bucket, start } = plan.place(bias.tensor) else {
                panic!("{} is a parameter", bias.name)
            };
            let place = Region::bucket(BucketTensor::Parameters, bucket, start..start + 8);
            device.write_place(&place, &[f32::NAN; 8]).unwrap();
            let pass = pass(0, ROWS);
            fill_inputs(device, 0, ROWS, 1, 3);
            let sums = run_step(device, &pass);
            let bad: u64 = sums.gradients.iter().map(|(_, bad)| bad).sum();
            let name = device.name();
            assert!(!sums.loss.loss.is_finite() && bad > 0, "{name}, fused {fused}: {sums:?}");
        }
    }
}

#[test]
fn nan_before_a_relu_skips_the_step() {
    let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    let options = TrainerOptions::new("cpu", optimizer, ROWS);
    let mut trainer = Trainer::new(graph(), &options).unwrap();
    let batch = [
        ("inputs", HostTensor::from(ndarray::array![[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 1.0, 0.0]])),
        ("targets", HostTensor::from(ndarray::array![[1.0, 0.0, 0.0], [-1.0, 0.0, 1.0]])),
    ];
    let step = trainer.step(&batch, 0.1).unwrap();
    assert!(!step.updated && !step.loss.is_finite(), "{step:?}");
}
