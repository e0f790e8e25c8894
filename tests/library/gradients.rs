//! Every gradient rule against finite differences in f64, through whole graphs: what is proven
//! here is the rule, the reference kernels it calls, and the plan that places them.

use potluck_core::{BucketId, TensorId};
use potluck_graph::builder::BuildResult;
use potluck_graph::{
    Binary, BinarySide, Builder, Cell, Conv2dOptions, Domain, Graph, Init, Interpolation,
    LossClasses, NormBackward, Op, ParameterKind, PassKind, Plan, PlanOptions, Pool2dOptions,
    PoolDivisor, Slope, Unary, differentiate, fuse,
};
use potluck_kernels::exec::{BucketTensor, Cpu, Executor};

const ROWS: usize = 3;
/// Token ids and class numbers are below this.
const IDS: u32 = 5;
const STEP: f64 = 1e-5;

/// A batched tensor of per-row dimensions `dims` (`dims[0]` entries per sample) that depends on a
/// parameter: an input plus a suffix-shaped parameter.
pub fn source(b: &mut Builder, name: &str, dims: &[usize]) -> TensorId {
    let input = b.input(&format!("{name}.input"), dims);
    let parameter = b.parameter(name, &dims[1..], Init::Zeros);
    b.add(input, parameter).unwrap()
}

/// Builds `body`'s graph with a squared-error loss on its output, and compares the gradient of
/// every element of every parameter with central differences.
fn check(body: impl Fn(&mut Builder) -> BuildResult) {
    let mut b = Builder::new();
    b.block("test");
    let y = body(&mut b).unwrap();
    let dims = b.shape(y).dims().to_vec();
    let target = b.input("target", &dims);
    b.squared_error_loss(y, target).unwrap();
    check_graph(b);
}

/// Checks the graph as the rules give it, and fused; and with every second parameter frozen.
pub fn check_graph(b: Builder) {
    let forward = b.finish();
    let graph = differentiate(forward.clone()).unwrap();
    assert!(check_gradients(fuse(graph.clone())) > 0, "no gradient was other than 0");
    check_gradients(graph);
    for first in 0..forward.parameters.len().min(2) {
        let mut partly = forward.clone();
        for frozen in partly.parameters.iter_mut().skip(first).step_by(2) {
            if frozen.kind == ParameterKind::Trained {
                frozen.kind = ParameterKind::Frozen;
            }
        }
        if partly.parameters.iter().all(|of| of.kind != ParameterKind::Trained) {
            continue;
        }
        let graph = differentiate(partly).unwrap();
        for parameter in &graph.parameters {
            let is_frozen = parameter.kind == ParameterKind::Frozen;
            assert_eq!(parameter.gradient.is_none(), is_frozen, "{}", parameter.name);
        }
        check_gradients(fuse(graph));
    }
}

/// Returns the number of gradients that were checked and are not 0.
fn check_gradients(graph: Graph) -> usize {
    let mut device = Cpu::oracle(Plan::new(graph, PlanOptions::new(ROWS)), 0);
    crate::common::fill_parameters(&mut device, 0.7);
    crate::common::fill_inputs(&mut device, 0, ROWS, 11, IDS);
    let pass = crate::common::pass(0, ROWS);
    crate::common::run_step(&mut device, &pass);
    let buckets = device.plan().buckets.clone();
    let mut checked = 0;
    for (index, bucket) in buckets.iter().enumerate() {
        let id = BucketId(index as u32);
        let gradients = device.bucket_values(BucketTensor::Gradients, id).to_vec();
        let parameters = device.bucket_values(BucketTensor::Parameters, id).to_vec();
        for &(parameter, start) in &bucket.parameters {
            let graph = &device.plan().graph;
            let known = &graph.parameters[parameter.index()];
            let count = graph.tensor(known.tensor).shape.per_row();
            let name = known.name.clone();
            // A running average accumulates statistics, which are no gradient.
            if known.kind != ParameterKind::Trained {
                continue;
            }
            for at in start..start + count {
                let mut loss = |offset: f64| {
                    let value = parameters[at] + offset;
                    device.set_element(BucketTensor::Parameters, id, at, value);
                    device.begin_step().unwrap();
                    // Slots are shared: the last pass has used those of the inputs for others.
                    crate::common::fill_inputs(&mut device, 0, ROWS, 11, IDS);
                    crate::common::run_phase(&mut device, true, &pass);
                    device.loss().unwrap().loss
                };
                let slope = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
                loss(0.0);
                let error = (gradients[at] - slope).abs() / slope.abs().max(1e-2);
                let (got, at) = (gradients[at], at - start);
                assert!(error < 1e-5, "{name}[{at}]: gradient {got}, difference {slope}");
                checked += usize::from(slope != 0.0);
            }
        }
    }
    checked
}

#[test]
fn matmul_in_every_transposition() {
    for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
        check(|b| {
            let left = source(b, "left", if ta { &[2, 4, 3] } else { &[2, 3, 4] });
            let right = source(b, "right", if tb { &[2, 5, 4] } else { &[2, 4, 5] });
            b.matmul(left, right, ta, tb)
        });
    }
    for tb in [false, true] {
        check(|b| {
            let x = source(b, "x", &[1, 2, 4]);
            let w = b.parameter("w", if tb { &[3, 4] } else { &[4, 3] }, Init::Zeros);
            b.matmul(x, w, false, tb)
        });
    }
}

/// A product of parameters alone, and a sum over the batch by a matmul.
#[test]
fn matmul_without_and_over_the_batch() {
    check(|b| {
        let v = b.parameter("v", &[4, 2], Init::Zeros);
        let w = b.parameter("w", &[4, 3], Init::Zeros);
        let product = b.matmul(v, w, true, false)?;
        let x = source(b, "x", &[1, 2]);
        b.matmul(x, product, false, false)
    });
    check(|b| {
        let left = source(b, "left", &[2, 2]);
        let right = source(b, "right", &[2, 3]);
        let over_batch = Op::MatMul { transpose_a: true, transpose_b: false };
        let summed = b.apply(over_batch, &[left, right])?;
        let x = source(b, "x", &[1, 2]);
        b.matmul(x, summed, false, false)
    });
}

#[test]
fn elementwise_of_one_tensor() {
    for &function in Unary::SAMPLES.iter().filter(|function| function.slope() == Slope::Sloped) {
        check(|b| {
            let x = source(b, "x", &[1, 7]);
            let argument = match function.domain() {
                Domain::All | Domain::Steep => x,
                Domain::Positive | Domain::Apart => b.exp(x)?,
                Domain::Unit => b.tanh(x)?,
                Domain::AboveOne => {
                    let positive = b.exp(x)?;
                    b.offset(positive, 1.0)?
                }
            };
            b.unary(argument, function)
        });
    }
}

#[test]
fn elementwise_of_two_tensors() {
    // Of all that have a gradient; what is dropped is all that there is here.
    let has_gradient = |function: &&Binary| {
        function.slope(BinarySide::First) == Slope::Sloped && **function != Binary::Drop
    };
    for (batched, function) in Binary::ALL
        .iter()
        .filter(has_gradient)
        .flat_map(|function| [(true, *function), (false, *function)])
    {
        check(|b| {
            let x = source(b, "x", &[1, 2, 3]);
            let x = if function == Binary::Pow { b.sigmoid(x)? } else { x };
            let other = if batched {
                source(b, "other", &[1, 2, 3])
            } else {
                b.parameter("other", &[3], Init::Zeros)
            };
            // Away from 0, where a quotient would have no difference to compare with.
            let other = b.exp(other)?;
            let y = b.apply(Op::Binary(function), &[x, other])?;
            b.mul(y, x)
        });
        // The sides are parameters themselves, of equal rank and not, and of both signs.
        if function == Binary::Pow {
            continue;
        }
        check(|b| {
            let whole = b.parameter("whole", &[2, 3], Init::Ones);
            let part = b.parameter("part", &[3], Init::Ones);
            let y = b.apply(Op::Binary(function), &[whole, part])?;
            let y = b.apply(Op::Binary(function), &[y, whole])?;
            let x = source(b, "x", &[1, 3]);
            b.matmul(x, y, false, true)
        });
    }
}

#[test]
fn broadcasting_as_numpy() {
    // A reduction is subtracted, of whose axis one entry is left.
    check(|b| {
        let x = source(b, "x", &[1, 2, 3]);
        let mean = b.mean(x, &[2])?;
        let mean = b.unsqueeze(mean, &[2])?;
        b.sub(x, mean)
    });
    // Both sides repeat, and the result gets the batch of what comes later.
    check(|b| {
        let row = b.parameter("row", &[3], Init::Zeros);
        let column = b.parameter("column", &[2, 1], Init::Zeros);
        let table = b.mul(column, row)?;
        let x = source(b, "x", &[1, 2, 3]);
        b.sub(table, x)
    });
    // In the middle, with the batch on the other side.
    check(|b| {
        let x = source(b, "x", &[1, 1, 3]);
        let y = b.parameter("y", &[1, 4, 1], Init::Zeros);
        b.div(x, y)
    });
    check(|b| {
        let x = source(b, "x", &[1, 4]);
        let mask = b.constant("mask", &[4], vec![1.0, 0.0, 0.0, 1.0])?;
        let other = b.parameter("other", &[1], Init::Zeros);
        b.select(mask, x, other)
    });
}

/// Checks a reduction over every kind of axes: one run of them and two, in front and behind.
fn check_over_axes(reduce: impl Fn(&mut Builder, TensorId, &[usize]) -> BuildResult) {
    for axes in [&[1][..], &[2], &[1, 2], &[1, 3], &[3]] {
        check(|b| {
            let x = source(b, "x", &[1, 2, 3, 2]);
            reduce(b, x, axes)
        });
    }
}

#[test]
fn reductions_over_any_axes() {
    check_over_axes(|b, x, axes| b.max(x, axes));
    check_over_axes(|b, x, axes| {
        let low = b.min(x, axes)?;
        let sum = b.logsumexp(x, axes)?;
        b.mul(low, sum)
    });
    check_over_axes(|b, x, axes| b.variance(x, axes, 1));
    for axis in 1..4 {
        check(|b| {
            let x = source(b, "x", &[1, 2, 3, 2]);
            b.cumsum(x, axis)
        });
    }
}

#[test]
fn stopped_gradient_is_a_constant() {
    let mut b = Builder::new();
    let w = b.parameter("w", &[3], Init::Ones);
    let frozen = b.stop_gradient(w).unwrap();
    let x = b.input("x", &[1, 3]);
    let y = b.mul(x, frozen).unwrap();
    let target = b.input("target", &[1, 3]);
    b.squared_error_loss(y, target).unwrap();
    let graph = differentiate(b.finish()).unwrap();
    let backward = graph.nodes.iter().filter(|node| node.phase != PassKind::Forward).count();
    assert_eq!(backward, 0, "nothing that is trained leads to the loss");
}

#[test]
fn batch_norm_of_both_modes() {
    for dims in [&[1, 4][..], &[1, 3, 2, 5]] {
        check(|b| {
            let x = source(b, "x", dims);
            let y = b.batch_norm("norm", x)?;
            b.unary(y, Unary::Gelu)
        });
    }
}

#[test]
fn recurrent_layers_of_kernels() {
    for cell in [Cell::Lstm, Cell::Gru] {
        for (t, has_state) in [(4, false), (4, true), (1, false), (1, true)] {
            check(|b| {
                let x = source(b, "x", &[1, t, 2]);
                let parameters = recurrent_parameters(b, cell);
                let states = if has_state { cell.states() } else { 0 };
                let state: Vec<TensorId> =
                    (0..states).map(|i| source(b, &format!("state{i}"), &[1, 3])).collect();
                Ok(b.recurrent(cell, x, parameters, &state)?.0)
            });
        }
    }
}

/// Parameters of a recurrent layer of 3 hidden values over 2 inputs.
fn recurrent_parameters(b: &mut Builder, cell: Cell) -> [TensorId; 4] {
    let (h, columns) = (3, cell.gates() * 3);
    let mut add = |name: &str, dims: &[usize]| b.parameter(name, dims, Init::Zeros);
    let weights = [add("ih", &[columns, 2]), add("hh", &[columns, h])];
    [weights[0], weights[1], add("bias_ih", &[columns]), add("bias_hh", &[columns])]
}

#[test]
fn recurrent_layers_over_sequences_of_all_samples() {
    for cell in [Cell::Lstm, Cell::Gru] {
        check(|b| {
            let sequences = b.parameter("sequences", &[2, 4, 2], Init::Zeros);
            let parameters = recurrent_parameters(b, cell);
            let (y, _) = b.recurrent(cell, sequences, parameters, &[])?;
            let x = source(b, "x", &[1, 2, 4, 3]);
            b.mul(x, y)
        });
    }
}

#[test]
fn sums_and_products_reused() {
    check(|b| {
        let x = source(b, "x", &[1, 2, 3]);
        let bias = b.parameter("bias", &[3], Init::Zeros);
        let gain = b.parameter("gain", &[2, 3], Init::Zeros);
        let y = b.add(x, bias)?;
        let y = b.mul(y, gain)?;
        // x is used three times, once with itself.
        let y = b.mul(y, x)?;
        b.add(y, x)
    });
}

#[test]
fn moving_elements_of_tensors() {
    check(|b| {
        let x = source(b, "x", &[1, 2, 3, 4]);
        let y = b.permute(x, &[0, 3, 1, 2])?;
        let y = b.reshape(y, &[4, 6])?;
        let left = b.slice(y, 1, 0, 2)?;
        let right = b.slice(y, 1, 3, 3)?;
        let y = b.concat(&[right, left, right], 1)?;
        b.permute(y, &[0, 1])
    });
    check(|b| {
        let x = source(b, "x", &[1, 2, 3]);
        b.apply(Op::Pad { axis: 1, before: 1, after: 2 }, &[x])
    });
}

#[test]
fn sums_over_any_axes() {
    check_over_axes(|b, x, axes| b.sum(x, axes));
    // Over the batch, as gradients of parameters are summed, and then used by every row.
    check(|b| {
        let x = source(b, "x", &[1, 3]);
        let sum = b.apply(Op::Sum { first: 0, last: 0 }, &[x])?;
        b.mul(x, sum)
    });
}

/// Per-row losses in the loss of the graph: each has a gradient of its own.
#[test]
fn losses_of_rows_as_ops() {
    for dims in [&[2][..], &[2, 3], &[1, 2, 3]] {
        check(|b| {
            let x = source(b, "x", dims);
            let y = source(b, "y", dims);
            let parts = b.apply(Op::SquaredError, &[x, y])?;
            b.mul(parts, parts)
        });
    }
    check(|b| {
        let logits = source(b, "logits", &[2, IDS as usize]);
        let targets = b.input_ids("classes", &[2]);
        let parts =
            b.apply(Op::CrossEntropy(LossClasses::whole(IDS as usize)), &[logits, targets])?;
        b.mul(parts, parts)
    });
}

/// Beside the loss, a loss op whose parts are a mere output adds nothing to a gradient.
#[test]
fn gradient_of_unused_is_left_out() {
    let gradients = |with: Option<Op>| {
        let mut b = Builder::new();
        let (x, w) = (b.input("x", &[1, 3]), b.parameter("w", &[4, 3], Init::Zeros));
        let logits = b.linear(x, w, None).unwrap();
        let target = b.input("target", &[1, 4]);
        let classes = b.input_ids("classes", &[1]);
        match &with {
            Some(Op::SquaredError) => {
                let parts = b.apply(Op::SquaredError, &[logits, target]).unwrap();
                b.output("parts", parts);
            }
            Some(op) => {
                let parts = b.apply(op.clone(), &[logits, classes]).unwrap();
                b.output("parts", parts);
            }
            None => {}
        }
        b.squared_error_loss(logits, target).unwrap();
        let graph = differentiate(b.finish()).unwrap();
        let mut device = Cpu::oracle(Plan::new(graph, PlanOptions::new(ROWS)), 0);
        crate::common::fill_parameters(&mut device, 0.7);
        crate::common::fill_inputs(&mut device, 0, ROWS, 11, IDS - 1);
        crate::common::run_step(&mut device, &crate::common::pass(0, ROWS));
        device.bucket_values(BucketTensor::Gradients, BucketId(0)).to_vec()
    };
    let alone = gradients(None);
    assert_eq!(gradients(Some(Op::CrossEntropy(LossClasses::whole(4)))), alone);
    assert_eq!(gradients(Some(Op::SquaredError)), alone);
}

/// Gradients as ops of the forward pass: they are computed, and refused where the loss depends on
/// a parameter by them.
#[test]
fn gradient_in_forward_has_none_itself() {
    let options = Conv2dOptions::default();
    let pool = Pool2dOptions::new(2);
    let rms = NormBackward { centered: false, bias: false, adds: false };
    let cases: [(Op, &[&[usize]]); 14] = [
        (Op::UnaryGrad(Unary::Gelu), &[&[1, 4], &[1, 4]]),
        (
            Op::BinaryGrad { function: Binary::Maximum, by: BinarySide::First },
            &[&[1, 4], &[1, 4], &[1, 4]],
        ),
        (Op::LayerNormGrad, &[&[1, 4], &[4], &[1, 2], &[1, 4]]),
        (Op::LayerNormWeightGrad, &[&[1, 4], &[1, 2], &[1, 4]]),
        (Op::LayerNormAffineGrad, &[&[1, 4], &[1, 2], &[1, 4]]),
        (Op::RmsNormGrad, &[&[1, 4], &[4], &[1, 2], &[1, 4]]),
        (Op::LinearWeightGrad, &[&[1, 4], &[1, 5]]),
        (Op::NormBackward(rms), &[&[1, 4], &[4], &[1, 2], &[1, 4]]),
        (Op::SoftmaxGrad, &[&[1, 4], &[1, 4]]),
        (Op::SquaredErrorGrad, &[&[1, 4], &[1, 4]]),
        (Op::Conv2dWeightGrad { options, kernel: [3, 3] }, &[&[1, 4, 4, 3], &[1, 2, 2, 5]]),
        (Op::AvgPool2dGrad { options: pool, size: [4, 4] }, &[&[1, 2, 2, 5]]),
        (Op::MaxPool2dGrad { options: pool, size: [4, 4] }, &[&[1, 2, 2, 5], &[1, 2, 2, 5]]),
        (Op::GroupNormAffineGrad { groups: 2 }, &[&[1, 4], &[1, 2, 2], &[1, 4]]),
    ];
    for (op, inputs) in cases {
        let differentiated = |in_loss: bool| {
            let mut b = Builder::new();
            let scale = b.parameter("scale", &[1], Init::Ones);
            let inputs: Vec<TensorId> = inputs
                .iter()
                .enumerate()
                .map(|(index, dims)| {
                    if dims[0] != 1 {
                        return b.parameter(&format!("p{index}"), dims, Init::Ones);
                    }
                    let count = dims.iter().product();
                    let x = b.input(&format!("x{index}"), &[count, 1]);
                    let x = b.mul(x, scale).unwrap();
                    b.reshape(x, dims).unwrap()
                })
                .collect();
            let y = b.apply(op.clone(), &inputs).unwrap();
            b.output("y", y);
            let of_loss = if in_loss { y } else { inputs[0] };
            b.squared_error_loss(of_loss, of_loss).unwrap();
            differentiate(b.finish()).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(differentiated(false), Ok(()), "{op}");
        let error = differentiated(true).unwrap_err();
        assert!(error.starts_with(&op.to_string()), "{error}");
        assert!(error.contains("has no gradient, being one itself"), "{error}");
        assert!(error.contains("node "), "{error}");
    }
}

#[test]
fn layer_norm_with_and_without_bias() {
    for bias in [false, true] {
        check(|b| {
            let x = source(b, "x", &[1, 2, 5]);
            let gain = b.parameter("gain", &[5], Init::Zeros);
            let bias = bias.then(|| b.parameter("bias", &[5], Init::Zeros));
            b.layer_norm(x, gain, bias)
        });
    }
}

/// Weight and bias of which one is no parameter, or that are the same one: no kernel adds to both
/// gradients at once.
#[test]
fn layer_norm_computed_or_shared() {
    for (weight, bias) in [(0, 0), (0, 2), (2, 0), (2, 1), (2, 3)] {
        check(|b| {
            let x = source(b, "x", &[1, 2, 5]);
            let shared = b.parameter("shared", &[5], Init::Zeros);
            let other = b.parameter("other", &[5], Init::Zeros);
            let computed = [0.5, -2.0].map(|factor| b.scale(other, factor));
            let sides = [shared, other, computed[0].clone()?, computed[1].clone()?];
            b.layer_norm(x, sides[weight], Some(sides[bias]))
        });
    }
    let mut b = Builder::new();
    let x = source(&mut b, "x", &[1, 2, 5]);
    let [weight, bias] = ["w", "b"].map(|name| b.parameter(name, &[5], Init::Ones));
    let y = b.layer_norm(x, weight, Some(bias)).unwrap();
    b.squared_error_loss(y, x).unwrap();
    let graph = differentiate(b.finish()).unwrap();
    let is_affine = |op: &Op| *op == Op::LayerNormAffineGrad;
    assert_eq!(graph.nodes.iter().filter(|node| is_affine(&node.op)).count(), 1);
}

#[test]
fn rms_norm_and_softmax() {
    check(|b| {
        let x = source(b, "x", &[1, 2, 5]);
        let gain = b.parameter("gain", &[5], Init::Zeros);
        b.rms_norm(x, gain, f32::EPSILON)
    });
    // Added to what was normalized, which fuses.
    check(|b| {
        let x = source(b, "x", &[1, 2, 5]);
        let gain = b.parameter("gain", &[5], Init::Zeros);
        let y = b.rms_norm(x, gain, 1e-5)?;
        b.add(y, x)
    });
    check(|b| {
        let x = source(b, "x", &[1, 3, 4]);
        let y = b.softmax(x)?;
        b.mul(y, x)
    });
}

#[test]
fn group_norm_computed_or_shared() {
    for (weight, bias) in [(0, 1), (0, 0), (0, 2), (2, 1), (2, 3)] {
        check(|b| {
            let x = source(b, "x", &[1, 2, 3, 4]);
            let parameters = ["w", "b"].map(|name| b.parameter(name, &[4], Init::Zeros));
            let computed = [0.5, -2.0].map(|factor| b.scale(parameters[1], factor));
            let computed = [computed[0].clone()?, computed[1].clone()?];
            let sides = [parameters, computed].concat();
            b.group_norm(x, 2, sides[weight], sides[bias])
        });
    }
}

#[test]
fn means_over_any_axes_but_the_batch() {
    for axes in [&[1][..], &[2, 3], &[1, 3]] {
        check(|b| {
            let x = source(b, "x", &[1, 2, 3, 2]);
            b.mean(x, axes)
        });
    }
    let mut b = Builder::new();
    let x = b.input("x", &[2, 3]);
    assert!(b.mean(x, &[0]).unwrap_err().to_string().contains("no fixed size"));
    let y = b.parameter("y", &[2, 6], Init::Ones);
    let mean = b.mean(y, &[0, 1]).unwrap();
    assert_eq!(b.shape(mean).rank(), 0);
}

#[test]
fn attention_with_and_without_dropout() {
    for dropout in [0.0, 0.3] {
        check(|b| {
            let qkv = source(b, "qkv", &[1, 4, 12]);
            b.attention(qkv, 2, dropout)
        });
        check(|b| {
            let qkv = source(b, "qkv", &[1, 4, 12]);
            b.full_attention(qkv, 2, dropout)
        });
    }
}

/// V reaches the attention through reshapes and a concatenation, whose gradients must not be
/// lost on the way.
#[test]
fn attention_on_reshaped_parts() {
    check(|b| {
        let q = source(b, "q", &[1, 4, 4]);
        let k = source(b, "k", &[1, 4, 4]);
        let v = source(b, "v", &[1, 2, 8]);
        let v = b.reshape(v, &[1, 4, 4])?;
        let qkv = b.concat(&[q, k, v], 2)?;
        b.attention(qkv, 2, 0.0)
    });
}

#[test]
fn dropout_same_mask_both_ways() {
    check(|b| {
        let x = source(b, "x", &[1, 6]);
        b.dropout(x, 0.4)
    });
}

#[test]
fn embedding_tied_gets_both_gradients() {
    let mut b = Builder::new();
    b.block("test");
    let table = b.parameter("table", &[IDS as usize, 4], Init::Zeros);
    let ids = b.input_ids("tokens", &[1, 3]);
    let x = b.embedding(ids, table).unwrap();
    let logits = b.linear(x, table, None).unwrap();
    let targets = b.input_ids("targets", &[1, 3]);
    b.cross_entropy_loss(logits, targets).unwrap();
    check_graph(b);
}

#[test]
fn convolutions_with_every_option() {
    let conv = Conv2dOptions::default();
    let layers = [
        (conv, 2, [2, 2]),
        (conv.with_padding(1).with_stride(2), 3, [3, 3]),
        (conv.with_dilation(2).with_padding(2), 2, [3, 2]),
        (conv.with_groups(2).with_stride(2), 4, [1, 3]),
        (conv.with_groups(4).with_padding(1), 4, [3, 3]),
    ];
    for (options, o, [kh, kw]) in layers {
        check(|b| {
            let x = source(b, "x", &[1, 4, 3, 4]);
            let weight = b.parameter("weight", &[o, 4 / options.groups, kh, kw], Init::Zeros);
            let bias = b.parameter("bias", &[o], Init::Zeros);
            let y = b.conv2d(x, weight, Some(bias), options)?;
            b.unary(y, Unary::Gelu)
        });
    }
}

#[test]
fn poolings_with_overlapping_windows() {
    let pool = Pool2dOptions::new(3).with_stride(2).with_padding(1);
    for options in [Pool2dOptions::new(2), pool] {
        check(|b| {
            let x = source(b, "x", &[1, 4, 5, 3]);
            b.max_pool2d(x, options)
        });
        check(|b| {
            let x = source(b, "x", &[1, 4, 5, 3]);
            b.avg_pool2d(x, options)
        });
    }
    let apart = Pool2dOptions { dilation: [2, 1], ..Pool2dOptions::new(2) };
    for options in [apart.with_stride(1), pool.with_ceil_mode(true)] {
        check(|b| {
            let x = source(b, "x", &[1, 4, 6, 2]);
            b.max_pool2d(x, options)
        });
        check(|b| {
            let x = source(b, "x", &[1, 4, 6, 2]);
            b.avg_pool2d_over(x, options, PoolDivisor::Inside)
        });
    }
    check(|b| {
        let x = source(b, "x", &[1, 7, 3]);
        b.avg_pool1d(x, pool.with_ceil_mode(true), PoolDivisor::Number(5.0))
    });
    check(|b| {
        let x = source(b, "x", &[1, 4, 5, 3]);
        b.global_avg_pool(x)
    });
    check(|b| {
        let x = source(b, "x", &[1, 2, 3, 2]);
        let x = b.upsample_nearest(x, [2, 3])?;
        b.adaptive_avg_pool2d(x, [1, 3])
    });
    let align_corners = false;
    for by in [Interpolation::Nearest, Interpolation::Cubic { align_corners }, Interpolation::Area]
    {
        check(|b| {
            let x = source(b, "x", &[1, 3, 5, 2]);
            b.interpolate(x, &[1, 2], &[5, 3], by)
        });
    }
}

#[test]
fn convolutions_transposed_and_1d() {
    let plain = Conv2dOptions::default();
    let strided = Conv2dOptions { stride: [2, 3], padding: [1, 0], ..plain };
    let cases = [
        (plain, [0, 0]),
        (strided.with_groups(2), [1, 2]),
        (plain.with_dilation(3).with_padding(1), [2, 1]),
    ];
    for (options, output_padding) in cases {
        check(|b| {
            let x = source(b, "x", &[1, 3, 2, 4]);
            let weight = b.parameter("weight", &[4, 3, 2, 3], Init::Zeros);
            let bias = b.parameter("bias", &[3 * options.groups], Init::Zeros);
            let y = b.conv_transpose2d(x, weight, Some(bias), options, output_padding)?;
            b.unary(y, Unary::Gelu)
        });
        check(|b| {
            let x = source(b, "x", &[1, 5, 4]);
            let weight = b.parameter("weight", &[4, 3, 2], Init::Zeros);
            b.conv_transpose1d(x, weight, None, options, output_padding[1])
        });
    }
    check(|b| {
        let x = source(b, "x", &[1, 7, 4]);
        let weight = b.parameter("weight", &[6, 2, 3], Init::Zeros);
        let y = b.conv1d(x, weight, None, strided.with_groups(2))?;
        let y = b.pad(y, 1, [1, 2], 0.5)?;
        let weight = b.parameter("same", &[3, 6, 2], Init::Zeros);
        b.conv1d_same(y, weight, None, plain)
    });
    check(|b| {
        let x = source(b, "x", &[1, 3, 4, 2]);
        let weight = b.parameter("weight", &[2, 2, 2, 3], Init::Zeros);
        b.conv2d_same(x, weight, None, plain.with_dilation(2))
    });
}

#[test]
fn recurrent_layers_of_nodes() {
    for gates in [1, 3] {
        check(|b| {
            let x = source(b, "x", &[1, 3, 2]);
            let state = source(b, "state", &[1, 2]);
            let mut add = |name: &str, dims: &[usize]| b.parameter(name, dims, Init::Zeros);
            let rows = gates * 2;
            let (ih, hh) = (add("ih", &[rows, 2]), add("hh", &[rows, 2]));
            let parameters = [ih, hh, add("bias_ih", &[rows]), add("bias_hh", &[rows])];
            b.bidirectional(x, |b, x, is_reversed| {
                let h0 = is_reversed.then_some(state);
                match gates {
                    1 => b.rnn(x, parameters, h0, Unary::Tanh),
                    _ => b.gru_reset_before(x, parameters, h0),
                }
            })
        });
    }
}

#[test]
fn entries_by_their_places() {
    let places = |b: &mut Builder, dims: &[usize], below: usize| {
        let count: usize = dims.iter().product();
        let numbers = (0..count).map(|at| (at * 5 % below) as f32).collect();
        b.constant("places", dims, numbers)
    };
    check(|b| {
        let x = source(b, "x", &[1, 4, 3]);
        let index = places(b, &[6], 4)?;
        b.gather(x, 1, index)
    });
    check(|b| {
        let x = source(b, "x", &[1, 4, 3]);
        let index = places(b, &[5, 3], 5)?;
        let each = b.input("zeros", &[1, 5, 3]);
        let zeros = b.scale(each, 0.0)?;
        let index = b.add(zeros, index)?;
        b.gather(x, 1, index)
    });
    check(|b| {
        let table = b.parameter("table", &[5, 3], Init::Zeros);
        let ids = b.input_ids("ids", &[1, 4]);
        let x = source(b, "x", &[1, 6, 2]);
        let rows = b.floats_of(ids, 5)?;
        let flat = b.reshape(rows, &[4])?;
        let entries = b.gather(table, 0, flat)?;
        let entries = b.reshape(entries, &[1, 4, 3])?;
        let x = b.gather(x, 1, ids)?;
        b.concat(&[entries, x], 2)
    });
    check(|b| {
        let x = source(b, "x", &[1, 4, 3]);
        let y = source(b, "y", &[1, 6, 3]);
        let index = places(b, &[6], 4)?;
        b.scatter_add(x, 1, index, y)
    });
    check(|b| {
        let x = source(b, "x", &[1, 4, 3]);
        b.flip(x, &[1, 2])
    });
    check(|b| {
        let x = source(b, "x", &[1, 4, 9]);
        Ok(b.top_k(x, 8)?[0])
    });
}

/// A parameter that is reshaped before use, and one that is used by an op that cannot add to a
/// gradient in place.
#[test]
fn parameters_behind_aliases_and_slices() {
    check(|b| {
        let w = b.parameter("w", &[2, 6], Init::Zeros);
        let w = b.reshape(w, &[4, 3])?;
        let x = source(b, "x", &[1, 3]);
        b.matmul(x, w, false, true)
    });
    check(|b| {
        let w = b.parameter("w", &[4, 6], Init::Zeros);
        let part = b.slice(w, 1, 1, 3)?;
        let x = source(b, "x", &[1, 3]);
        b.matmul(x, part, false, true)
    });
}
