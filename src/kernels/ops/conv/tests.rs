//! Tests of convolutions and their gradients.

use super::*;
use crate::harness::InputFill;
use crate::testing::{check, check_mixed, reference};
use crate::{OwnedCall, RandomContext};
use potluck_core::rng::Key;
use potluck_core::{HostTensor, Shape};
use potluck_graph::{Binary, Conv2dOptions, EpilogueOp, Op, Unary};

/// A layer: options, pictures, output channels, kernel.
type Layer = (Conv2dOptions, [usize; 4], usize, [usize; 2]);

const PLAIN: Conv2dOptions =
    Conv2dOptions { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 };

/// Layers of every kind: kernels of one place, strides that skip places, paddings wider than the
/// kernel, dilations, groups, and single channels.
fn layers() -> Vec<Layer> {
    let uneven = Conv2dOptions { stride: [2, 1], padding: [0, 2], dilation: [1, 3], groups: 1 };
    vec![
        (PLAIN, [2, 7, 6, 3], 5, [3, 2]),
        (PLAIN.with_padding(2), [2, 9, 9, 1], 6, [5, 5]),
        (PLAIN, [3, 4, 5, 8], 12, [1, 1]),
        (PLAIN.with_stride(2), [2, 5, 5, 4], 4, [1, 1]),
        (PLAIN.with_stride(2).with_padding(1), [2, 8, 7, 16], 20, [3, 3]),
        (PLAIN.with_stride(3).with_padding(3), [1, 5, 9, 2], 3, [2, 3]),
        (PLAIN.with_stride(2).with_dilation(2), [1, 9, 8, 3], 4, [3, 3]),
        (PLAIN.with_stride(4), [2, 2, 3, 3], 5, [1, 2]),
        (uneven, [2, 7, 8, 5], 7, [3, 3]),
        (PLAIN.with_padding(1).with_groups(2), [2, 5, 6, 6], 8, [3, 3]),
        (PLAIN.with_groups(3).with_stride(2), [1, 6, 7, 3], 6, [2, 2]),
        (PLAIN.with_padding(1).with_groups(5), [2, 6, 5, 5], 5, [3, 3]),
        (PLAIN.with_padding(1).with_groups(40).with_stride(2), [2, 7, 6, 40], 40, [3, 3]),
    ]
}

fn calls_of((options, [b, h, w, c], o, kernel): Layer) -> [(Op, [Vec<usize>; 2]); 3] {
    let [oh, ow] = options.output_size([h, w], kernel).unwrap();
    let weight = vec![o, c / options.groups, kernel[0], kernel[1]];
    let (x, y) = (vec![b, h, w, c], vec![b, oh, ow, o]);
    [
        (Op::Conv2d(options), [x.clone(), weight.clone()]),
        (Op::Conv2dInputGrad { options, size: [h, w] }, [y.clone(), weight]),
        (Op::Conv2dWeightGrad { options, kernel }, [x, y]),
    ]
}

fn normal(dims: &[usize]) -> (Shape, InputFill) {
    (Shape::fixed(dims), InputFill::Normal)
}

fn check_layer(layer: Layer) {
    for (op, inputs) in calls_of(layer) {
        check(op, &inputs.map(|dims| normal(&dims)), 1);
    }
}

#[test]
fn layers_of_every_kind_agree() {
    layers().into_iter().for_each(check_layer);
}

/// Expected values from PyTorch 2, which check the order of weights, groups and channels.
#[test]
fn values_are_those_of_pytorch() {
    let values = |count: usize, step: usize, of: usize, offset: f64| {
        HostTensor::Float((0..count).map(|i| (i * step % of) as f64 - offset).collect())
    };
    let x = (Shape::fixed(&[1, 4, 4, 2]), values(32, 5, 11, 4.0));
    let w = (Shape::fixed(&[4, 1, 2, 2]), values(16, 3, 7, 3.0));
    let dy = (Shape::fixed(&[1, 3, 3, 4]), values(36, 7, 5, 2.0));
    let options = PLAIN.with_stride(2).with_padding(1).with_groups(2);
    let of = |op: Op, inputs: [&(Shape, HostTensor<f64>); 2]| {
        reference(&op, &inputs.map(Clone::clone), 1).remove(0)
    };
    assert_eq!(
        of(Op::Conv2d(options), [&x, &w]),
        [
            4, 12, 2, 0, 13, -9, -2, 0, 12, 4, 2, 6, 1, -3, -1, -3, -9, 9, 19, 5, -12, -4, -1, -13,
            0, -12, 0, 0, -15, 2, -6, 0, -9, 6, 0, 6
        ]
        .map(f64::from)
    );
    assert_eq!(
        of(Op::Conv2dInputGrad { options, size: [4, 4] }, [&dy, &w]),
        [
            2, 4, 1, -6, 5, 0, -2, 2, 2, 1, 4, -2, -4, -2, 6, 2, 1, 2, 2, -2, -6, -2, -6, 1, 4, 2,
            5, 0, -2, -6, -8, 4
        ]
        .map(f64::from)
    );
    assert_eq!(
        of(Op::Conv2dWeightGrad { options, kernel: [2, 2] }, [&x, &dy]),
        [1, 8, 10, 11, 6, -9, -12, -15, 13, -5, 3, 4, -3, 12, 2, -9].map(f64::from)
    );
}

/// Runs of terms of every length, channels that are no whole vector or several vectors, and both
/// kernels of the gradient by the input for few channels.
#[test]
fn layers_of_every_number_of_channels_agree() {
    for (c, o) in [(1, 6), (2, 16), (6, 17), (9, 33), (24, 40)] {
        check_layer((PLAIN.with_padding(1), [2, 6, 9, c], o, [3, 3]));
        check_layer((PLAIN.with_stride(2).with_padding(1), [1, 7, 13, c], o, [3, 2]));
    }
    check_layer((PLAIN.with_padding(2).with_dilation(2), [2, 9, 30, 4], 8, [3, 3]));
    check_layer((PLAIN.with_padding(3), [1, 28, 5, 3], 8, [7, 7]));
}

/// Blocks of several panels and tasks, taps in several slabs, and sums in several parts.
#[test]
fn layers_of_many_places_and_channels_agree() {
    check_layer((PLAIN.with_padding(1), [2, 19, 17, 16], 16, [3, 3]));
    check_layer((PLAIN.with_padding(1).with_stride(2), [2, 13, 12, 70], 33, [3, 3]));
    check_layer((PLAIN, [1, 4, 4, 2000], 34, [2, 2]));
    // Small pictures: a block of the gradient by the weight has several.
    check_layer((PLAIN.with_padding(1), [35, 3, 4, 5], 6, [3, 3]));
    check_layer((PLAIN, [35, 4, 3, 2], 6, [3, 2]));
    check_layer((PLAIN.with_stride(2), [1, 4, 3, 520], 257, [2, 1]));
    check_layer((PLAIN.with_padding(1).with_groups(72), [2, 9, 11, 72], 72, [3, 3]));
}

#[test]
fn the_batch_may_be_of_any_size() {
    for rows in [1, 2, 5] {
        let x = (Shape::batched(&[1, 6, 5, 3]), InputFill::Normal);
        let y = (Shape::batched(&[1, 3, 3, 8]), InputFill::Normal);
        let options = PLAIN.with_padding(1).with_stride(2);
        let w = normal(&[8, 3, 3, 3]);
        check(Op::Conv2d(options), &[x.clone(), w.clone()], rows);
        check(Op::Conv2dInputGrad { options, size: [6, 5] }, &[y.clone(), w], rows);
        check(Op::Conv2dWeightGrad { options, kernel: [3, 3] }, &[x, y], rows);
    }
}

/// Biases, residual streams, activations and their gradients follow convolutions and their
/// gradients by the input, as they follow matrix products.
#[test]
fn every_step_follows_a_convolution() {
    let add = EpilogueOp::Binary(Binary::Add);
    let relu = EpilogueOp::Unary(Unary::Relu);
    let steps = [
        (vec![add, EpilogueOp::Store, relu, add], vec![false, true]),
        (vec![EpilogueOp::UnaryGrad(Unary::Gelu), add], vec![true, true]),
    ];
    let layers = [
        (PLAIN.with_padding(1).with_stride(2), [2, 9, 8, 12], 20, [3, 3]),
        (PLAIN.with_padding(2), [2, 9, 9, 3], 7, [5, 5]),
        (PLAIN.with_padding(1).with_groups(12), [2, 6, 5, 12], 12, [3, 3]),
    ];
    for layer in layers {
        for (root, inputs) in calls_of(layer).into_iter().take(2) {
            let random = RandomContext { step_key: Key::new(0), training: true };
            let y =
                OwnedCall::new(root.clone(), inputs.to_vec(), random).unwrap().outputs.remove(0);
            for (epilogue, whole) in &steps {
                let op = Op::Fused { root: Box::new(root.clone()), epilogue: epilogue.clone() };
                let operands = whole.iter().map(|whole| if *whole { &y[..] } else { &y[3..] });
                let all: Vec<_> = inputs.iter().map(Vec::as_slice).chain(operands).collect();
                check(op, &all.into_iter().map(normal).collect::<Vec<_>>(), 1);
            }
        }
    }
}

#[test]
fn fast_sums_are_the_same_for_any_number_of_threads() {
    let layers = [
        (PLAIN.with_padding(1).with_stride(2), [4, 17, 16, 24], 40, [3, 3]),
        (PLAIN.with_padding(1).with_groups(24), [4, 17, 16, 24], 24, [3, 3]),
    ];
    for (op, inputs) in layers.into_iter().flat_map(calls_of) {
        let random = RandomContext { step_key: Key::new(0), training: true };
        let owned_call = OwnedCall::new(op, inputs.to_vec(), random).unwrap();
        let call = owned_call.call();
        let x = |index: usize| -> Vec<f32> {
            (0..call.input_len(index)).map(|i| ((i + index) as f32).sin()).collect()
        };
        let (a, b) = (x(0), x(1));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![0.0f32; call.output_len(0)];
            let inputs = [HostTensorView::Float(&a[..]), HostTensorView::Float(&b[..])];
            pool.install(|| fast(&call, &inputs, &mut [&mut out]));
            out
        };
        let one = run(1);
        assert!(one.iter().any(|value| *value != 0.0));
        assert!(one == run(2) && one == run(3), "{}", call.op);
    }
}

#[test]
fn all_ops_of_a_layer_cost_the_same_operations() {
    for (op, inputs) in calls_of((PLAIN.with_padding(1).with_groups(2), [2, 4, 5, 6], 8, [3, 3])) {
        let random = RandomContext { step_key: Key::new(0), training: true };
        let owned_call = OwnedCall::new(op, inputs.to_vec(), random).unwrap();
        assert_eq!(cost(&owned_call.call()).flops, (2 * 2 * 4 * 5 * 8 * 9 * 3) as f64);
    }
}

/// Plain layers, strides, groups and single channels, in every kernel.
#[test]
fn layers_in_mixed_precision_multiply_rounded_operands() {
    let layers = [
        (PLAIN.with_padding(1), [2, 9, 8, 16], 68, [3, 3]),
        (PLAIN.with_stride(2).with_padding(1).with_groups(2), [2, 7, 6, 10], 12, [3, 2]),
        (PLAIN.with_padding(1).with_groups(8), [2, 7, 6, 8], 8, [3, 3]),
    ];
    for (op, inputs) in layers.into_iter().flat_map(calls_of) {
        check_mixed(op, &inputs.map(|dims| normal(&dims)), 1);
    }
}
