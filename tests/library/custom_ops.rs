//! Ops that are defined outside the crate: what a graph accepts and prints, their gradients, and
//! training with them on CPU devices.

use potluck_core::rng::Key;
use potluck_core::{HostTensor, HostTensorView, Shape, Site, TensorId};
use potluck_graph::builder::BuildResult;
use potluck_graph::optim::Optimizer;
use potluck_graph::{
    Builder, CustomCall, CustomInput, CustomKernel, CustomNode, CustomOp, Graph, Init, Op,
    differentiate, fuse, print,
};
use potluck_kernels::{Elementwise, GradientError, check_gradient};
use potluck_train::{Trainer, TrainerOptions};

/// What a [`Mixed`] returns as its gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    Right,
    Missing,
    OtherShape,
    Parameter,
    Random,
    CarriedState,
    /// That of another row, which a sum over rows would not notice.
    OtherRow,
}

/// `x (b, c), scale (c), ids (b) of u32 below 3 -> y (b, c)`: `y = x scale ids`.
#[derive(Clone)]
struct Mixed {
    rule: Rule,
}

impl CustomOp for Mixed {
    fn name(&self) -> String {
        format!("mixed {:?}", self.rule)
    }

    fn inputs(&self) -> Vec<CustomInput> {
        vec![CustomInput::default(), CustomInput::default(), CustomInput::Ids { below: 3 }]
    }

    fn shape(&self, inputs: &[&Shape]) -> Result<Shape, String> {
        let rows = inputs[0].with_dims(&inputs[0].dims()[..1]);
        if *inputs[1] == Shape::fixed(&[inputs[0].last()]) && *inputs[2] == rows {
            Ok(inputs[0].clone())
        } else {
            Err("x is (b, c), scale (c), ids (b)".into())
        }
    }

    fn gradient(&self, b: &mut Builder, node: &CustomNode, input: usize) -> BuildResult {
        let [x, scale, ids] = [node.inputs[0], node.inputs[1], node.inputs[2]];
        let right = Self { rule: Rule::Right };
        match (self.rule, input) {
            (Rule::Missing, _) => Err(node.without_gradient(b, self.name(), input)),
            (Rule::OtherShape, 1) => Ok(x),
            (Rule::Parameter, _) => Ok(b.parameter("more", &[4], Init::Zeros)),
            (Rule::Random, _) => {
                b.apply(Op::Dropout { p: 0.5, site: Site(1), columns: None }, &[x, ids])
            }
            (Rule::CarriedState, 0) => {
                b.carry(x, node.output)?;
                b.custom(right, &[node.dy, scale, ids])
            }
            (Rule::OtherRow, 0) => {
                let (summed, c) = (b.sum(node.dy, &[0])?, b.shape(x).last());
                let wide = Op::Broadcast { first: 0, dims: vec![1], batched: true };
                let spread = b.apply(wide, &[summed])?;
                assert_eq!(b.shape(spread), &Shape::batched(&[1, c]));
                b.custom(right, &[spread, scale, ids])
            }
            (_, 0) => b.custom(right, &[node.dy, scale, ids]),
            // The output may be used, too, and any op.
            _ => {
                let ones = b.unary(scale, potluck_graph::Unary::Scale(0.0))?;
                let ones = b.custom(plus_one(), &[ones])?;
                let unscaled = b.custom(right, &[x, ones, ids])?;
                let product = b.mul(unscaled, node.dy)?;
                b.sum(product, &[0])
            }
        }
    }

    fn reference(&self, call: &CustomCall, x: &[HostTensorView<'_, f64>], y: &mut [f64]) {
        let (scale, ids, c) = (x[1].floats(), x[2].ints(), call.inputs[0][1]);
        for (at, y) in y.iter_mut().enumerate() {
            *y = x[0].floats()[at] * scale[at % c] * f64::from(ids[at / c]);
        }
    }

    fn kernel(&self, _: &CustomCall) -> CustomKernel {
        unreachable!("the CPU device runs the reference")
    }
}

fn plus_one() -> Elementwise {
    Elementwise::new("plus_one", &["x"], "x + 1.0", |v| v[0] + 1.0)
}

fn shapes() -> [Shape; 3] {
    [Shape::batched(&[1, 4]), Shape::fixed(&[4]), Shape::batched(&[1])]
}

fn snake(slope: f64) -> Elementwise {
    Elementwise::new("snake 1", &["x"], "x + sin(x) * sin(x)", |v| v[0] + v[0].sin().powi(2))
        .with_gradient("dy * (1.0 + sin(2.0 * x))", move |v| {
            v[1] * (1.0 + slope * (2.0 * v[0]).sin())
        })
}

/// Three blocks: custom ops on activations, and on a parameter and ids.
fn model() -> Graph {
    let mut b = Builder::new();
    b.block("first");
    let x = b.input("x", &[1, 4]);
    let w = b.parameter("w", &[4, 4], Init::Normal { std: 0.5 });
    let y = b.linear(x, w, None).unwrap();
    let y = b.custom(snake(1.0), &[y]).unwrap();
    b.block("second");
    let ids = b.input_ids("ids", &[1]);
    let scale = b.parameter("scale", &[4], Init::Ones);
    let y = b.custom(Mixed { rule: Rule::Right }, &[y, scale, ids]).unwrap();
    b.block("third");
    let v = b.parameter("v", &[2, 4], Init::Normal { std: 0.5 });
    let y = b.linear(y, v, None).unwrap();
    let target = b.input("target", &[1, 2]);
    b.squared_error_loss(y, target).unwrap();
    b.finish()
}

#[test]
fn custom_ops_are_checked_and_printed() {
    let mut b = Builder::new();
    let (x, ids) = (b.input("x", &[1, 4]), b.input_ids("ids", &[1]));
    let scale = b.parameter("scale", &[4], Init::Ones);
    let mut refused = |inputs: &[TensorId]| {
        b.custom(Mixed { rule: Rule::Right }, inputs).unwrap_err().to_string()
    };
    assert_eq!(refused(&[x, scale]), "mixed Right of (b, 4), (4): takes 3 to 3 inputs, not 2");
    assert!(refused(&[x, scale, x]).ends_with(": input 2 must be of U32"));
    assert!(refused(&[x, x, ids]).ends_with(": x is (b, c), scale (c), ids (b)"));
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let wide = Elementwise::new("wide", &names, "a", |v| v[0]);
    let error = b.custom(wide, &[x; 8]).unwrap_err().to_string();
    assert!(error.ends_with("takes 8 inputs, and a kernel can bind 1 to 7"), "{error}");
    let none = Elementwise::new("none", &[], "0.0", |_| 0.0);
    assert!(b.custom(none, &[]).unwrap_err().to_string().contains("takes 0 inputs"));

    let graph = differentiate(model()).unwrap();
    let table = print::graph_table(&graph);
    for line in [" snake 1 ", " mixed Right ", " snake_grad_x 1 ", " plus_one "] {
        assert!(table.contains(line), "{line} in\n{table}");
    }
    assert_eq!(graph.tensor(graph.nodes[1].outputs[0]).name, "first.snake");
    // Fusion takes the ops around them, and none of them.
    let customs =
        |graph: &Graph| graph.nodes.iter().filter(|n| matches!(n.op, Op::Custom(_))).count();
    let fused = fuse(graph.clone());
    assert_eq!(customs(&fused), customs(&graph));
    assert_eq!(Op::custom(snake(1.0)), Op::custom(snake(2.0)), "ops are equal by name");
    assert_ne!(Op::custom(snake(1.0)), Op::custom(plus_one()));
}

#[test]
fn custom_gradient_wrong_is_found() {
    check_gradient(Mixed { rule: Rule::Right }, &shapes(), 1).unwrap();
    check_gradient(snake(1.0), &[Shape::batched(&[2, 5])], 1).unwrap();
    let wrong = check_gradient(snake(1.01), &[Shape::batched(&[2, 5])], 1).unwrap_err();
    assert!(matches!(wrong, GradientError::Wrong { input: 0, .. }), "{wrong}");
    assert!(wrong.to_string().starts_with("snake 1: the gradient by element"), "{wrong}");
    assert!(check_gradient(snake(f64::NAN), &[Shape::fixed(&[3])], 1).is_err());
    let other_row = check_gradient(Mixed { rule: Rule::OtherRow }, &shapes(), 1).unwrap_err();
    assert!(matches!(other_row, GradientError::Wrong { input: 0, .. }), "{other_row}");
    let outcome = |rule| check_gradient(Mixed { rule }, &shapes(), 1).unwrap_err().to_string();
    assert!(outcome(Rule::Missing).ends_with("has no gradient by input 0"));
    let shape = outcome(Rule::OtherShape);
    assert!(
        shape.ends_with("its gradient by input 1 is of (b, 4), and the input of (4)"),
        "{shape}"
    );
    for rule in [Rule::Parameter, Rule::Random, Rule::CarriedState] {
        assert!(outcome(rule).contains("and may only add ops"), "{rule:?}");
    }
    assert!(check_gradient(plus_one(), &[Shape::fixed(&[2])], 1).is_err(), "it has no gradient");
    let few = check_gradient(snake(1.0), &[], 1).unwrap_err().to_string();
    assert!(few.contains("takes 1 to 1 inputs, not 0"), "{few}");
}

/// Losses of some steps and the final parameters.
fn trained(devices: &str, stages: u32) -> (Vec<f64>, Vec<f32>) {
    const BATCH: usize = 6;
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let mut options = TrainerOptions::new(devices, optimizer, BATCH);
    options.micro_batch_size = 2;
    options.pipeline.stages = stages;
    let mut trainer = Trainer::new(model(), &options).unwrap();
    let key = Key::new(5);
    let x: Vec<f32> = (0..BATCH as u64 * 4).map(|i| key.normal(i) as f32).collect();
    let target = x.chunks(2).map(|pair| pair[0] * pair[1]).collect::<Vec<_>>();
    let batch = [
        ("x", HostTensor::Float(x)),
        ("ids", HostTensor::Int((0..BATCH as u32).map(|i| i % 3).collect())),
        ("target", HostTensor::Float(target)),
    ];
    let losses = (0..20).map(|_| trainer.step(&batch, 0.05).unwrap().loss).collect();
    let parameters = trainer.parameters().unwrap();
    (losses, parameters.into_iter().flat_map(|one| one.values).collect())
}

#[test]
fn custom_ops_train_in_any_layout() {
    let (losses, parameters) = trained("cpu", 1);
    assert!(losses[19] < 0.7 * losses[0], "{losses:?}");
    assert_eq!(trained("cpu*2", 2), (losses.clone(), parameters));
    let (shared, _) = trained("cpu*2", 1);
    for (a, b) in losses.iter().zip(&shared) {
        assert!((a - b).abs() <= 1e-4 * a.abs(), "{a} and {b}");
    }
}
