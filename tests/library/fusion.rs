//! Fusion keeps what a graph computes: fused and unfused, the same gradients in f64. Each rule
//! applies to the graph that it is for, and not where a value is needed elsewhere.

use potluck_core::{BucketId, TensorId};
use potluck_graph::builder::BuildResult;
use potluck_graph::model::{GptConfig, MlpConfig, MlpLoss, gpt, mlp};
use potluck_graph::passes::fuse::{Fusion, PERIOD_MAX, fuse_listed, rules};
use potluck_graph::print::{MemoryUsage, fusion_table, graph_table};
use potluck_graph::{
    Builder, Conv2dOptions, EpilogueOp, Graph, Init, Op, PassKind, Plan, PlanOptions, Unary,
    differentiate, fuse,
};
use potluck_kernels::exec::{BucketTensor, Cpu, Executor};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

const ROWS: usize = 3;
const IDS: u32 = 11;

fn gpt_of(bias: bool, dropout: f32, activation: Unary) -> Graph {
    let config = GptConfig {
        vocabulary: IDS as usize,
        context: 6,
        positions: 6,
        layers: 2,
        heads: 2,
        width: 8,
        bias,
        dropout,
        tie: true,
        activation,
    };
    differentiate(gpt(&config).unwrap()).unwrap()
}

fn mlp_of(activation: Unary, loss: MlpLoss) -> Graph {
    let widths = vec![5, 16, 16, 4];
    differentiate(mlp(&MlpConfig { widths, activation, dropout: 0.0, loss }).unwrap()).unwrap()
}

/// The loss and every gradient of one step in f64.
fn results(graph: Graph) -> Vec<f64> {
    let mut device = Cpu::oracle(Plan::new(graph, PlanOptions::new(ROWS)), 0);
    crate::common::fill_parameters(&mut device, 0.5);
    crate::common::fill_inputs(&mut device, 0, ROWS, 3, 4);
    crate::common::run_step(&mut device, &crate::common::pass(0, ROWS));
    let mut results = vec![device.loss().unwrap().loss];
    for bucket in 0..device.plan().buckets.len() as u32 {
        results.extend(device.bucket_values(BucketTensor::Gradients, BucketId(bucket)));
    }
    results
}

fn assert_equal(what: &str, got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs() / expected.abs().max(1.0);
        assert!(error <= 1e-12, "{what}: value {i} is {got}, unfused {expected}");
    }
    assert!(expected.iter().any(|v| *v != 0.0), "{what}: all is zero");
}

/// Fuses, checks that results are the same and memory does not grow, and returns what was fused.
fn check(what: &str, graph: Graph) -> (Graph, Vec<Fusion>) {
    let (fused, done) = check_results(what, graph.clone());
    let bytes = |graph: &Graph| {
        let memory = MemoryUsage::of(&Plan::new(graph.clone(), PlanOptions::new(ROWS)), 0);
        memory.stash + memory.scratch
    };
    let (after, before) = (bytes(&fused), bytes(&graph));
    assert!(after <= before, "{what}: memory grows from {before} to {after} bytes");
    (fused, done)
}

fn check_results(what: &str, graph: Graph) -> (Graph, Vec<Fusion>) {
    let (fused, done) = fuse_listed(graph.clone());
    assert_equal(what, &results(fused.clone()), &results(graph));
    assert_in_order(&fused);
    (fused, done)
}

/// Every node comes after those that give its inputs, and kernels bind 8 tensors at most.
fn assert_in_order(graph: &Graph) {
    let mut made = vec![false; graph.tensors.len()];
    let computed: Vec<TensorId> = graph.nodes.iter().flat_map(|n| n.outputs.clone()).collect();
    for node in &graph.nodes {
        for input in &node.inputs {
            let known = made[input.index()] || !computed.contains(input);
            assert!(known, "{} reads {input} before it is there", node.op);
        }
        node.outputs.iter().for_each(|id| made[id.index()] = true);
        let is_fused = matches!(node.op, Op::Fused { .. });
        assert!(!is_fused || node.inputs.len() + node.outputs.len() <= 8, "{}", node.op);
    }
}

fn count(done: &[Fusion], rule: &str) -> usize {
    assert!(rules().any(|(known, _)| known == rule), "there is no rule {rule}");
    done.iter().filter(|fusion| fusion.rule == rule).count()
}

#[test]
fn models_fused_same_gradients() {
    for activation in [Unary::Gelu, Unary::GeluTanh, Unary::Relu] {
        for bias in [false, true] {
            let (_, done) = check("a GPT", gpt_of(bias, 0.0, activation));
            // Two layers with four products each, of which two end a residual branch.
            assert_eq!(count(&done, "matmul + bias"), if bias { 8 } else { 0 });
            assert_eq!(count(&done, "weight + bias gradient"), if bias { 8 } else { 0 });
            assert_eq!(count(&done, "matmul + sum"), 4);
            assert_eq!(count(&done, "matmul + activation"), 2);
            assert_eq!(count(&done, "matmul + activation gradient"), 2);
            // Each layer normalizes its residual stream twice.
            assert_eq!(count(&done, "layer norm gradient + sum"), 4);
            assert_eq!(count(&done, "norm + parameter gradients"), 5);
        }
        let (_, done) = check("an MLP", mlp_of(activation, MlpLoss::SquaredError));
        assert_eq!(count(&done, "matmul + bias"), 3);
        assert_eq!(count(&done, "weight + bias gradient"), 3);
        assert_eq!(count(&done, "matmul + activation"), 2);
        // Each layer is a block: the gradient of an activation belongs to the block before.
        assert_eq!(count(&done, "matmul + activation gradient"), 0);
        check("a classifier", mlp_of(activation, MlpLoss::CrossEntropy));
    }
}

#[test]
fn dropout_keeps_its_random_numbers() {
    let (fused, done) = check("a GPT with dropout", gpt_of(true, 0.3, Unary::Gelu));
    let dropouts = |graph: &Graph| {
        graph.nodes.iter().filter(|node| matches!(node.op, Op::Dropout { .. })).count()
    };
    assert_eq!(dropouts(&fused), dropouts(&gpt_of(true, 0.3, Unary::Gelu)));
    // It stands between each product and its residual.
    assert_eq!(count(&done, "matmul + sum"), 0);
}

/// Nothing is left to fuse, and the same graph comes out every time.
#[test]
fn fusion_is_complete_and_deterministic() {
    let graph = gpt_of(true, 0.0, Unary::Gelu);
    let fused = fuse(graph.clone());
    assert!(fused == fuse(graph.clone()));
    let (again, done) = fuse_listed(fused.clone());
    assert!(again == fused && done.is_empty());
    let is_product = |op: &Op| matches!(op, Op::MatMul { .. } | Op::LinearWeightGrad);
    let products =
        |graph: &Graph| graph.nodes.iter().filter(|node| is_product(node.op.root_op())).count();
    assert_eq!(products(&fused), products(&graph));
}

#[test]
fn forward_keeps_no_activation_inputs() {
    let config = MlpConfig {
        widths: vec![4, 8, 2],
        activation: Unary::Gelu,
        dropout: 0.0,
        loss: MlpLoss::SquaredError,
    };
    let (fused, done) = fuse_listed(mlp(&config).unwrap());
    assert!(done.iter().all(|fusion| fusion.moves == 2));
    let epilogue = fused.nodes.iter().filter_map(|node| match &node.op {
        Op::Fused { epilogue, .. } => Some(epilogue.clone()),
        _ => None,
    });
    let add = EpilogueOp::Binary(potluck_graph::Binary::Add);
    assert_eq!(
        epilogue.collect::<Vec<_>>(),
        [vec![add, EpilogueOp::Unary(Unary::Gelu)], vec![add]]
    );
}

#[test]
fn tables_show_what_was_fused() {
    let (fused, done) = fuse_listed(gpt_of(true, 0.0, Unary::Gelu));
    let table = graph_table(&fused);
    assert!(table.contains("matmul a b^T + add + store + gelu"), "{table}");
    let table = fusion_table(&done, 3);
    let line = table.lines().find(|line| line.contains("matmul + activation ")).unwrap();
    // Two layers; the value between is read once less: 3 samples of 6 tokens of 32 values.
    assert!(line.contains("2 times") && line.contains("4.50 KiB"), "{line}");
    assert!(table.lines().last().unwrap().contains("33 times"), "{table}");
}

/// A graph with a squared error behind `body`, which gets `x (b, 2, 6)` behind a parameter.
fn built(body: impl Fn(&mut Builder, TensorId) -> BuildResult) -> Graph {
    let mut b = Builder::new();
    b.block("test");
    let input = b.input("x", &[1, 2, 6]);
    let shift = b.parameter("shift", &[6], Init::Zeros);
    let x = b.add(input, shift).unwrap();
    let y = body(&mut b, x).unwrap();
    let dims = b.shape(y).dims().to_vec();
    let target = b.input("target", &dims);
    b.squared_error_loss(y, target).unwrap();
    b.finish()
}

/// A product of `x` and a parameter.
fn product(b: &mut Builder, x: TensorId, name: &str) -> TensorId {
    let w = b.parameter(name, &[6, 6], Init::Zeros);
    b.linear(x, w, None).unwrap()
}

/// What is fused in a trained graph, checked.
fn fused_in(
    what: &str,
    body: impl Fn(&mut Builder, TensorId) -> BuildResult,
) -> (Graph, Vec<Fusion>) {
    check(what, differentiate(built(body)).unwrap())
}

#[test]
fn rules_apply_to_their_graphs() {
    let applies = |rule: &str, body: &dyn Fn(&mut Builder, TensorId) -> BuildResult| {
        let (_, done) = fused_in(rule, body);
        assert!(count(&done, rule) > 0, "{rule} does not apply: {done:?}");
    };
    applies("matmul + bias", &|b, x| {
        let bias = b.parameter("bias", &[6], Init::Zeros);
        let y = product(b, x, "w");
        b.add(y, bias)
    });
    // Of two dimensions behind a reshape, where the rows of the product do not show them.
    applies("matmul + bias", &|b, x| {
        let positions = b.parameter("positions", &[2, 6], Init::Zeros);
        let y = product(b, x, "w");
        b.add(y, positions)
    });
    applies("matmul + sum", &|b, x| {
        let y = product(b, x, "w");
        b.add(x, y)
    });
    applies("matmul + factor", &|b, x| {
        let y = product(b, x, "w");
        b.mul(y, x)
    });
    applies("matmul + scale", &|b, x| {
        let y = product(b, x, "w");
        b.scale(y, -0.3)
    });
    applies("matmul + activation", &|b, x| {
        let y = product(b, x, "w");
        b.unary(y, Unary::Relu)
    });
    applies("matmul + activation gradient", &|b, x| {
        let y = b.unary(x, Unary::GeluTanh)?;
        Ok(product(b, y, "w"))
    });
    applies("elementwise chain", &|b, x| {
        let gain = b.parameter("gain", &[6], Init::Zeros);
        let y = b.mul(x, gain)?;
        let y = b.unary(y, Unary::Gelu)?;
        b.add(y, x)
    });
}

/// Sums for parameters are computed with a product or a norm that reads the same rows, however
/// often a parameter is used, and nothing else is.
#[test]
fn gradients_over_same_rows_are_merged() {
    let merged = |what: &str, body: &dyn Fn(&mut Builder, TensorId) -> BuildResult| {
        let (_, done) = fused_in(what, body);
        [count(&done, "weight + bias gradient"), count(&done, "norm + parameter gradients")]
    };
    let shared = merged("a layer twice", &|b, x| {
        let w = b.parameter("w", &[6, 6], Init::Zeros);
        let bias = b.parameter("bias", &[6], Init::Zeros);
        let y = b.linear(x, w, Some(bias))?;
        let y = b.unary(y, Unary::Gelu)?;
        b.linear(y, w, Some(bias))
    });
    assert_eq!(shared, [2, 0]);
    let positions = merged("a table of positions", &|b, x| {
        let positions = b.parameter("positions", &[2, 6], Init::Zeros);
        let y = product(b, x, "w");
        b.add(y, positions)
    });
    assert_eq!(positions, [0, 0]);
    let behind = merged("a bias behind an activation", &|b, x| {
        let bias = b.parameter("bias", &[6], Init::Zeros);
        let y = product(b, x, "w");
        let y = b.unary(y, Unary::Gelu)?;
        b.add(y, bias)
    });
    assert_eq!(behind, [0, 0]);
    let two = merged("two biases", &|b, x| {
        let [one, other] = ["one", "other"].map(|name| b.parameter(name, &[6], Init::Zeros));
        let y = product(b, x, "w");
        let y = b.add(y, one)?;
        b.add(y, other)
    });
    assert_eq!(two, [1, 0]);
    let norms = merged("norms with the same weight", &|b, x| {
        let gain = b.parameter("gain", &[6], Init::Ones);
        let bias = b.parameter("bias", &[6], Init::Zeros);
        let y = b.layer_norm(x, gain, Some(bias))?;
        let y = b.unary(y, Unary::Gelu)?;
        let y = b.rms_norm(y, gain, 1e-5)?;
        b.add(y, x)
    });
    assert_eq!(norms, [0, 2]);
}

/// Two branches of the same tensor: the sum of their gradients is fused with a product.
#[test]
fn gradients_meeting_added_by_product() {
    let (fused, done) = fused_in("branches", |b, x| {
        let (left, right) = (product(b, x, "left"), product(b, x, "right"));
        b.mul(left, right)
    });
    let of_backward: Vec<_> = fused
        .nodes
        .iter()
        .filter(|node| {
            node.phase == PassKind::BackwardInput && matches!(node.op.root_op(), Op::MatMul { .. })
        })
        .map(|node| node.op.to_string())
        .collect();
    assert_eq!(of_backward.len(), 2, "{}", graph_table(&fused));
    assert!(of_backward[1].ends_with("+ add"), "{of_backward:?}");
    assert!(count(&done, "matmul + sum") >= 1);
}

/// A convolution is a product: its bias, activation and residual sum are computed with it, and so
/// is the gradient of the activation in front of it.
#[test]
fn convolutions_fuse_as_products() {
    let mut b = Builder::new();
    b.block("pictures");
    let x = b.input("x", &[1, 4, 5, 3]);
    let same = Conv2dOptions::default().with_padding(1);
    let layer = |b: &mut Builder, x: TensorId, name: &str, c: usize| {
        let weight = b.parameter(&format!("{name}.weight"), &[4, c, 3, 3], Init::Zeros);
        let bias = b.parameter(&format!("{name}.bias"), &[4], Init::Zeros);
        b.conv2d(x, weight, Some(bias), same)
    };
    let y = layer(&mut b, x, "first", 3).unwrap();
    let y = b.unary(y, Unary::Relu).unwrap();
    let z = layer(&mut b, y, "second", 4).unwrap();
    let z = b.add(z, y).unwrap();
    let target = b.input("target", &[1, 4, 5, 4]);
    b.squared_error_loss(z, target).unwrap();
    let (fused, _) = check("convolutions", differentiate(b.finish()).unwrap());
    let ops: Vec<String> = fused.nodes.iter().map(|node| node.op.to_string()).collect();
    for wanted in ["conv2d padding 1x1 + add + store + relu", "conv2d padding 1x1 + add + add"] {
        assert!(ops.iter().any(|op| op == wanted), "no {wanted} in {ops:?}");
    }
    let grad = ops.iter().find(|op| op.starts_with("conv2d_input_grad"));
    assert!(grad.is_some_and(|op| op.ends_with("+ add + relu_grad")), "{ops:?}");
}

/// What must stay apart: forward graphs in which nothing may be fused behind the product.
#[test]
fn values_needed_elsewhere_stay_apart() {
    let apart = |what: &str, body: &dyn Fn(&mut Builder, TensorId) -> BuildResult| {
        let (fused, _) = check(what, differentiate(built(body)).unwrap());
        let behind = fused.nodes.iter().filter(|node| node.phase == PassKind::Forward);
        let behind = behind.filter(|n| {
            matches!(&n.op, Op::Fused { root, .. }
            if matches!(**root, Op::MatMul { .. }))
        });
        assert_eq!(behind.count(), 0, "{what}:\n{}", graph_table(&fused));
    };
    apart("a second reader before the consumer", &|b, x| {
        let y = product(b, x, "w");
        let first = b.sum(y, &[1])?;
        let second = b.unary(y, Unary::Gelu)?;
        let second = b.sum(second, &[1])?;
        b.add(first, second)
    });
    apart("a named output", &|b, x| {
        let y = product(b, x, "w");
        b.output("y", y);
        b.unary(y, Unary::Gelu)
    });
    apart("another block", &|b, x| {
        let y = product(b, x, "w");
        b.block("next");
        b.unary(y, Unary::Gelu)
    });
    apart("a value that is both operands", &|b, x| {
        let y = product(b, x, "w");
        b.mul(y, y)
    });
    apart("a value that repeats", &|b, x| {
        let v = b.parameter("v", &[2, 6], Init::Zeros);
        let w = b.parameter("w", &[6, 6], Init::Zeros);
        let small = b.matmul(v, w, false, false)?;
        b.add(x, small)
    });
    apart("a factor that is not finite", &|b, x| {
        let y = product(b, x, "w");
        let y = b.scale(y, f32::MAX * 2.0)?;
        let zeros = b.sum(y, &[1])?;
        let _ = zeros;
        Ok(x)
    });
    apart("an op that reduces", &|b, x| {
        let gain = b.parameter("gain", &[6], Init::Ones);
        let y = product(b, x, "w");
        b.layer_norm(y, gain, None)
    });
}

/// Kernels are certified on products with whole periods of an operand, which would be large.
#[test]
fn operand_repeating_late_stays_apart() {
    let fused_with = |rows: usize| {
        let mut b = Builder::new();
        let x = b.input("x", &[1, rows, 8]);
        let (w, table) =
            (b.parameter("w", &[8, 8], Init::Zeros), b.parameter("table", &[rows, 8], Init::Zeros));
        let y = b.linear(x, w, None).unwrap();
        let y = b.add(y, table).unwrap();
        b.output("y", y);
        fuse_listed(b.finish()).1
    };
    assert_eq!(count(&fused_with(PERIOD_MAX / 8), "matmul + bias"), 1);
    assert_eq!(fused_with(PERIOD_MAX / 8 + 1), []);
}

/// The second reader of a value in between, an operand that the same kernel would compute, and
/// more bindings than there are: the rest of the graph is still fused.
#[test]
fn chains_end_where_they_must() {
    // gelu(y) y needs y, which the kernel of the gelu has kept.
    let (fused, _) = fused_in("a gate of itself", |b, x| {
        let y = product(b, x, "w");
        let gate = b.unary(y, Unary::Gelu)?;
        b.mul(gate, y)
    });
    let forward: Vec<String> = fused
        .nodes
        .iter()
        .filter(|node| node.phase == PassKind::Forward)
        .map(|node| node.op.to_string())
        .collect();
    assert!(forward.contains(&"matmul a b^T + store + gelu".into()), "{forward:?}");
    assert!(forward.contains(&"mul".into()), "{forward:?}");

    let (fused, _) = fused_in("nine operands", |b, x| {
        let mut y = product(b, x, "w");
        for i in 0..9 {
            let bias = b.parameter(&format!("bias {i}"), &[6], Init::Zeros);
            y = b.add(y, bias)?;
        }
        Ok(y)
    });
    let longest = fused.nodes.iter().map(|node| node.inputs.len() + node.outputs.len()).max();
    assert_eq!(longest, Some(8));
}

/// Gradients of parameters accumulate, and stay as they are.
#[test]
fn accumulating_ops_are_not_fused() {
    let (fused, _) = fused_in("a scaled parameter", |b, x| {
        let w = b.parameter("w", &[6, 6], Init::Zeros);
        let scaled = b.scale(w, 0.5)?;
        b.linear(x, scaled, None)
    });
    let accumulating: Vec<_> = fused.nodes.iter().filter(|node| node.accumulate.any()).collect();
    assert!(accumulating.iter().any(|node| node.op == Op::Unary(Unary::Scale(0.5))));
    assert!(accumulating.iter().all(|node| !matches!(node.op, Op::Fused { .. })));
}

/// A step of a random graph: what to do, and with which of the tensors so far.
type Draw = (u8, usize, usize);

fn random_graph(draws: &[Draw]) -> Graph {
    built(|b, x| {
        let mut tensors = vec![x];
        for (i, (what, first, second)) in draws.iter().enumerate() {
            let (x, y) = (tensors[first % tensors.len()], tensors[second % tensors.len()]);
            let parameter =
                |b: &mut Builder, dims: &[usize]| b.parameter(&format!("p{i}"), dims, Init::Zeros);
            let made = match what % 15 {
                0 => b.add(x, y)?,
                1 => b.mul(x, y)?,
                2 => b.unary(x, Unary::Gelu)?,
                3 => b.unary(x, Unary::GeluTanh)?,
                4 => b.scale(x, 0.7)?,
                5 => {
                    let bias = parameter(b, &[6]);
                    b.add(x, bias)?
                }
                6 => {
                    let gain = parameter(b, &[2, 6]);
                    b.mul(x, gain)?
                }
                7 => {
                    let flat = b.reshape(x, &[1, 12])?;
                    let w = parameter(b, &[12, 12]);
                    let y = b.linear(flat, w, None)?;
                    b.reshape(y, &[1, 2, 6])?
                }
                8 => b.sub(x, y)?,
                9 => b.maximum(x, y)?,
                10 => b.silu(x)?,
                11 => {
                    let offset = parameter(b, &[6]);
                    b.sub(x, offset)?
                }
                12 => {
                    let positive = b.sigmoid(y)?;
                    b.div(x, positive)?
                }
                _ => product(b, x, &format!("p{i}")),
            };
            // Half of what is made goes on from what was made last.
            tensors.push(made);
            if what % 2 == 0 {
                tensors.swap_remove(0);
            }
        }
        let mut y = tensors[0];
        for other in &tensors[1..] {
            y = b.add(y, *other)?;
        }
        b.scale(y, 0.1)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/fusion.txt",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_graphs_fused_same_values(
        draws in prop::collection::vec((0u8..15, 0usize..8, 0usize..8), 1..14),
    ) {
        let graph = differentiate(random_graph(&draws)).unwrap();
        prop_assume!(results(graph.clone()).iter().all(|v| v.is_finite()));
        check_results("a random graph", graph);
    }
}
