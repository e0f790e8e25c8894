//! Tests of values that are not finite: every implementation passes a NaN on, because the verdict
//! on a step sees only the loss and the gradients. All comparisons are of bits, because a driver
//! may compile a shader as if no float were NaN.

use super::{InputFill, for_each_result, generate, reference};
use potluck_core::{HostTensor, Shape};
use potluck_graph::{
    AttentionOptions, Binary, BinarySide, Conv2dOptions, EpilogueOp, IGNORE_INDEX, LossClasses, Op,
    Pool2dOptions, Unary,
};

fn loss(classes: usize) -> Op {
    Op::CrossEntropy(LossClasses::whole(classes))
}

type Input = (Shape, HostTensor<f64>);

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

fn is_nan(value: f32) -> bool {
    value.to_bits() & 0x7FFF_FFFF > 0x7F80_0000
}

fn is_finite(value: f32) -> bool {
    value.to_bits() & 0x7F80_0000 != 0x7F80_0000
}

fn normal(shape: Shape, rows: usize, which: usize) -> Input {
    let values = generate(InputFill::Normal, shape.elements(rows), which);
    (shape, values)
}

fn with(mut input: Input, values: &[(usize, f64)]) -> Input {
    let HostTensor::Float(elements) = &mut input.1 else { panic!("integers have no NaN") };
    for (at, value) in values {
        elements[*at] = *value;
    }
    input
}

/// Asserts that every implementation returns NaN where the f64 reference does, and nowhere else.
fn assert_same_nans(op: &Op, inputs: &[Input], rows: usize) {
    let expected = reference(op, inputs, rows);
    assert!(expected.iter().flatten().any(|v| v.is_nan()), "{op}: the test has no NaN");
    for_each_result(op, inputs, rows, |who, outputs| {
        for (output, (got, expected)) in outputs.iter().zip(&expected).enumerate() {
            for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
                let place = format!("{op} by {who}: element {at} of output {output}");
                assert_eq!(is_nan(*got), expected.is_nan(), "{place}: {got} for {expected}");
            }
        }
    });
}

/// Returns a tensor of two rows with NaN of both signs, infinities and zeros in it.
fn extreme(which: usize) -> Input {
    let values = [(1, NAN), (5, -NAN), (9, INF), (14, -INF), (20, 0.0), (27, -0.0)];
    with(normal(Shape::batched(&[1, 16]), 2, which), &values)
}

/// All others are tested together, with their formulas.
const FUNCTIONS: [Unary; 8] = [
    Unary::Relu,
    Unary::Gelu,
    Unary::GeluTanh,
    Unary::Sigmoid,
    Unary::Tanh,
    Unary::Silu,
    Unary::Exp,
    Unary::Scale(-0.5),
];

#[test]
fn elementwise_functions_pass_nan_on() {
    let odd = with(normal(Shape::batched(&[1, 15]), 1, 0), &[(2, NAN), (7, -NAN)]);
    for function in FUNCTIONS {
        assert_same_nans(&Op::Unary(function), std::slice::from_ref(&odd), 1);
        assert_same_nans(&Op::Unary(function), &[with(extreme(0), &[(14, -1.0)])], 2);
    }
    for function in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Maximum] {
        let b = normal(Shape::batched(&[1, 16]), 2, 1);
        assert_same_nans(&Op::Binary(function), &[extreme(0), b], 2);
    }
}

#[test]
fn elementwise_gradients_pass_nan_on() {
    let shape = || Shape::batched(&[1, 16]);
    for function in FUNCTIONS.into_iter().filter(|f| !matches!(f, Unary::Scale(_))) {
        let op = Op::UnaryGrad(function);
        let x = with(normal(shape(), 2, 0), &[(1, NAN), (5, -NAN), (9, 2.0), (12, 3.0)]);
        let dy = with(normal(shape(), 2, 1), &[(9, NAN), (12, -NAN)]);
        assert_same_nans(&op, &[x, dy], 2);
    }
    let [a, b] = [0, 1].map(|which| with(normal(shape(), 2, which), &[(which + 3, NAN)]));
    let dy = with(normal(shape(), 2, 2), &[(9, 2.0)]);
    let function = Binary::Maximum;
    assert_same_nans(&Op::BinaryGrad { function, by: BinarySide::First }, &[a, b, dy], 2);
}

/// Differences and quotients in fused ops depend on the order of their operands.
#[test]
fn functions_of_two_pass_nan_on_in_chains() {
    let b = with(normal(Shape::batched(&[1, 16]), 2, 1), &[(3, NAN)]);
    for function in [Binary::Sub, Binary::Div, Binary::Maximum] {
        let root = Box::new(Op::Unary(Unary::Tanh));
        let op = Op::Fused { root, epilogue: vec![EpilogueOp::Binary(function)] };
        assert_same_nans(&op, &[extreme(0), b.clone()], 2);
    }
}

/// The gradient of a ReLU is zero if its argument is not positive, for any incoming gradient.
#[test]
fn relu_gradient_of_inactive_elements_is_zero() {
    let shape = || Shape::batched(&[1, 8]);
    let x = with(normal(shape(), 1, 0), &[(1, -1.0), (2, 0.0), (3, -0.0), (4, -INF)]);
    let dy = with(normal(shape(), 1, 1), &[(1, NAN), (2, INF), (3, NAN), (4, 1.0)]);
    for_each_result(&Op::UnaryGrad(Unary::Relu), &[x, dy], 1, |who, outputs| {
        assert_eq!(outputs[0][1..5], [0.0; 4], "by {who}");
    });
}

#[test]
fn gelu_gradients_of_huge_arguments_are_the_limits() {
    let huge = [1e19, -1e19, 1e25, -1e25, 3e38, -3e38, 30.0, -30.0];
    let x: Vec<(usize, f64)> = huge.into_iter().enumerate().collect();
    let x = with(normal(Shape::batched(&[1, 8]), 1, 0), &x);
    let dy = (Shape::batched(&[1, 8]), HostTensor::Float(vec![1.0; 8]));
    for function in [Unary::Gelu, Unary::GeluTanh] {
        let inputs = [x.clone(), dy.clone()];
        for_each_result(&Op::UnaryGrad(function), &inputs, 1, |who, outputs| {
            for (dx, x) in outputs[0].iter().zip(huge) {
                let limit = if x > 0.0 { 1.0 } else { 0.0 };
                let error = (f64::from(*dx) - limit).abs();
                assert!(error < 1e-4, "{function:?} by {who}: {dx} at {x}");
            }
        });
    }
}

#[test]
fn epilogues_pass_nan_on() {
    let fused = |root: Op, epilogue: Vec<EpilogueOp>| Op::Fused { root: Box::new(root), epilogue };
    let product = Op::MatMul { transpose_a: false, transpose_b: false };
    for function in [Unary::Relu, Unary::Gelu, Unary::GeluTanh] {
        let x = with(normal(Shape::batched(&[3, 8]), 2, 0), &[(3, NAN), (35, -NAN)]);
        let w = normal(Shape::fixed(&[8, 12]), 1, 1);
        let op = fused(product.clone(), vec![EpilogueOp::Unary(function)]);
        assert_same_nans(&op, &[x.clone(), w.clone()], 2);
        let op = fused(product.clone(), vec![EpilogueOp::UnaryGrad(function)]);
        let slope = with(normal(Shape::batched(&[3, 12]), 2, 2), &[(5, NAN), (40, 1.0)]);
        let whole = with(x.clone(), &[(3, 0.5), (35, 0.5)]);
        assert_same_nans(&op, &[whole, w, slope], 2);
        let op = fused(Op::Unary(Unary::Scale(2.0)), vec![EpilogueOp::Unary(function)]);
        assert_same_nans(&op, &[x], 2);
    }
}

#[test]
fn norms_and_losses_pass_nan_on() {
    for c in [7, 12, 300] {
        let x = with(normal(Shape::batched(&[3, c]), 2, 0), &[(c + 2, NAN), (4 * c, -NAN)]);
        let weight = normal(Shape::fixed(&[c]), 1, 1);
        assert_same_nans(&Op::LayerNorm { eps: 1e-5 }, &[x.clone(), weight], 2);
        let targets = vec![1, 2, 3, 4, IGNORE_INDEX, 6];
        let targets = (Shape::batched(&[3]), HostTensor::Int(targets));
        let inputs = [x.clone(), targets];
        assert_same_nans(&loss(c), &inputs, 2);
        let lse = reference(&loss(c), &inputs, 2).remove(1);
        let [logits, targets] = inputs;
        let lse = (Shape::batched(&[3]), HostTensor::Float(lse));
        let gradient = Op::CrossEntropyGrad(LossClasses::whole(c));
        assert_same_nans(&gradient, &[logits, targets, lse], 2);
        let y = normal(x.0.clone(), 2, 1);
        assert_same_nans(&Op::SquaredError, &[x.clone(), y.clone()], 2);
        assert_same_nans(&Op::SquaredErrorGrad, &[x, y], 2);
    }
}

/// A NaN is the maximum of its windows, and part of the sums of the windows and kernels over it; of
/// convolutions of every kind of kernel: products, with few channels and many, and single channels.
#[test]
fn pictures_pass_nan_on() {
    let conv = Conv2dOptions::default().with_padding(1);
    for (c, o, groups) in [(3, 5, 1), (16, 20, 1), (8, 8, 8)] {
        let x = normal(Shape::batched(&[1, 5, 6, c]), 2, 0);
        let x = with(x, &[(c + 2, NAN), (50 * c, -NAN)]);
        let w = normal(Shape::fixed(&[o, c / groups, 3, 3]), 1, 1);
        let op = Op::Conv2d(conv.with_groups(groups));
        assert_same_nans(&op, &[x.clone(), w.clone()], 2);
        let dy = normal(Shape::batched(&[1, 5, 6, o]), 2, 0);
        let dy = with(dy, &[(o + 2, NAN), (50 * o, -NAN)]);
        let options = conv.with_groups(groups);
        assert_same_nans(&Op::Conv2dInputGrad { options, size: [5, 6] }, &[dy, w], 2);
        let pool = Pool2dOptions::new(3).with_stride(2).with_padding(1);
        assert_same_nans(&Op::AvgPool2d(pool), std::slice::from_ref(&x), 2);
        let y = reference(&Op::MaxPool2d(pool), std::slice::from_ref(&x), 2).remove(0);
        for_each_result(&Op::MaxPool2d(pool), std::slice::from_ref(&x), 2, |who, outputs| {
            let same = outputs[0].iter().zip(&y).all(|(got, y)| is_nan(*got) == y.is_nan());
            assert!(same && y.iter().any(|y| y.is_nan()), "by {who}");
        });
    }
}

/// Padded classes, whose logits are minus infinity, may be all that a rank has: it adds nothing to
/// the sum over all classes.
#[test]
fn a_shard_of_logits_of_minus_infinity_has_no_sum() {
    for v in [4, 300] {
        let mut logits = vec![-INF; v];
        logits.extend((0..v).map(|class| class as f64 * 0.01));
        let logits = (Shape::batched(&[2, v]), HostTensor::Float(logits));
        let targets = (Shape::batched(&[2]), HostTensor::Int(vec![0, v as u32]));
        let op = Op::CrossEntropy(LossClasses { first: v, ..LossClasses::whole(2 * v) });
        let inputs = [logits, targets];
        let expected = reference(&op, &inputs, 1);
        assert_eq!((&expected[0][..2], expected[1][0]), (&[0.0; 2][..], -INF));
        for_each_result(&op, &inputs, 1, |who, outputs| {
            let [parts, lse] = outputs else { panic!("parts and sums") };
            assert_eq!(parts[..2], [0.0; 2], "{who}, {v}");
            // On SwiftShader, exp(-inf) is not quite 0.
            assert!(lse[0] <= f32::MIN, "{who}, {v}: {lse:?}");
            assert!((f64::from(lse[1]) - expected[1][1]).abs() < 1e-4, "{who}, {v}: {lse:?}");
        });
    }
}

/// An infinite logit makes the loss of its row NaN, as `inf - inf` does.
#[test]
fn infinite_logits_make_the_loss_nan() {
    for v in [7, 300, 700] {
        let x = with(normal(Shape::batched(&[3, v]), 1, 0), &[(v + 2, INF)]);
        let targets = (Shape::batched(&[3]), HostTensor::Int(vec![1, 2, 3]));
        assert_same_nans(&loss(v), &[x, targets], 1);
    }
}

/// A logit of minus infinity masks its class: the loss equals the loss without the class.
#[test]
fn masked_logits_leave_the_loss_of_the_others() {
    for v in [7, 300, 1000] {
        // Pairs that one invocation of a workgroup reads, and all that a subgroup reads.
        let masked: Vec<(usize, f64)> = (0..3 * v)
            .filter(|at| at % v % 256 < 130 && at % v != 2)
            .map(|at| (at, -INF))
            .collect();
        let x = with(normal(Shape::batched(&[3, v]), 1, 0), &masked);
        let targets = (Shape::batched(&[3]), HostTensor::Int(vec![2; 3]));
        let inputs = [x, targets];
        let expected = reference(&loss(v), &inputs, 1);
        assert!(expected.iter().flatten().all(|v| v.is_finite()));
        for_each_result(&loss(v), &inputs, 1, |who, outputs| {
            for (got, expected) in outputs.iter().flatten().zip(expected.iter().flatten()) {
                let error = (f64::from(*got) - expected).abs();
                assert!(is_finite(*got) && error < 1e-4, "{v} by {who}: {got} for {expected}");
            }
        });
    }
}

const T: usize = 11;
const HEADS: usize = 2;
const D: usize = 4;
const C: usize = HEADS * D;

/// Element of `qkv` of sample 0: query (0), key (1) or value (2) `i`, column `column`.
fn at(which: usize, i: usize, column: usize) -> usize {
    i * 3 * C + which * C + column
}

/// Returns `qkv` of two samples whose first columns are positive, with these values in it.
fn packed(values: &[(usize, f64)]) -> Input {
    let mut qkv = normal(Shape::batched(&[1, T, 3 * C]), 2, 0);
    let HostTensor::Float(elements) = &mut qkv.1 else { panic!("floats") };
    for row in 0..2 * T {
        for which in 0..2 {
            let first = row * 3 * C + which * C;
            elements[first] = elements[first].abs() + 0.1;
        }
    }
    with(qkv, values)
}

fn options(causal: bool) -> AttentionOptions {
    AttentionOptions { causal, ..AttentionOptions::packed(HEADS, C / HEADS) }
}

fn attention() -> Op {
    Op::Attention(options(true))
}

/// Values that make scores NaN or infinite, in a query, a key, or both.
fn bad_scores() -> Vec<Vec<(usize, f64)>> {
    vec![
        vec![(at(0, 5, 1), NAN)],
        vec![(at(1, 6, 2), -NAN)],
        vec![(at(0, 10, 4), NAN), (at(1, 0, 0), NAN)],
        vec![(at(1, 7, 0), INF)],
        vec![(at(0, 3, 0), INF)],
        vec![(at(0, 0, 0), -INF)],
        vec![(at(0, 9, 0), -INF)],
    ]
}

#[test]
fn attention_passes_scores_on_that_are_not_finite() {
    for values in bad_scores() {
        assert_same_nans(&attention(), &[packed(&values)], 2);
        let op = Op::Attention(options(false));
        assert_same_nans(&op, &[packed(&values)], 2);
    }
}

/// A key with infinitely low scores is an ordinary key.
#[test]
fn attention_gives_no_weight_to_infinitely_low_scores() {
    let inputs = [packed(&[(at(1, 7, 0), -INF)])];
    let expected = reference(&attention(), &inputs, 2);
    for_each_result(&attention(), &inputs, 2, |who, outputs| {
        for (got, expected) in outputs.iter().flatten().zip(expected.iter().flatten()) {
            let error = (f64::from(*got) - expected).abs();
            assert!(is_finite(*got) && error < 1e-4, "by {who}: {got} for {expected}");
        }
    });
}

/// The gradient of a sample is NaN where the reference's is. Other values of the sample may be NaN
/// too, because kernels multiply by weights of zero; other samples are not touched.
#[test]
fn attention_gradient_passes_nan_on() {
    let mut cases = bad_scores();
    cases.push(vec![(at(2, 4, 1), NAN)]);
    let op = Op::AttentionGrad(options(true));
    for values in cases {
        let qkv = packed(&values);
        let [y, lse] = reference(&attention(), std::slice::from_ref(&qkv), 2).try_into().unwrap();
        let inputs = [
            qkv,
            (Shape::batched(&[1, T, C]), HostTensor::Float(y)),
            (Shape::batched(&[1, HEADS, T]), HostTensor::Float(lse)),
            normal(Shape::batched(&[1, T, C]), 2, 1),
        ];
        let expected = reference(&op, &inputs, 2).remove(0);
        for_each_result(&op, &inputs, 2, |who, outputs| {
            let (first, second) = outputs[0].split_at(outputs[0].len() / 2);
            assert!(second.iter().all(|v| is_finite(*v)), "{values:?} by {who}: other sample");
            for (at, (got, expected)) in first.iter().zip(&expected).enumerate() {
                assert!(!expected.is_nan() || is_nan(*got), "{values:?} by {who}: {got} at {at}");
            }
        });
    }
}
