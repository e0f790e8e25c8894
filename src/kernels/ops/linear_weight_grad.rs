//! Gradients of weight and bias of a linear layer in one op: the product of [`super::matmul`],
//! whose kernels with tiles in workgroup memory sum the rows of `dy` as they load them. Other
//! kernels of products are followed by a kernel of [`super::sum`].
//!
//! `dweight[o, c] = sum_k dy[k, o] x[k, c]`, `dbias[o] = sum_k dy[k, o]`.

use super::matmul::probes::{PRODUCTS, operands};
use super::matmul::split_k::CACHED_TERMS_MIN;
use super::{joint, matmul, sum};
use crate::call_shapes::calls;
use crate::twin::{IndependentAxis, no_forward, normal_inputs};
use crate::{CallShape, Caps, Dims, Dispatch, Float, OpCall, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::{Op, Precision};

/// Twin of [`Op::LinearWeightGrad`].
pub static TWIN: Twin = Twin {
    name: "linear_weight_grad",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost: matmul::cost,
    counts_as_model_flops: true,
    iterations: matmul::iterations,
    inputs: normal_inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

const PRODUCT: Op = Op::MatMul { transpose_a: true, transpose_b: false };
const SUM: Op = Op::Sum { first: 0, last: 0 };

/// Call that sums the rows of `dy`.
fn sum_call<'a>(call: &OpCall) -> OpCall<'a> {
    OpCall {
        op: &SUM,
        inputs: vec![call.inputs[0].clone()],
        outputs: vec![call.outputs[1].clone()],
        accumulate: call.accumulate,
        precision: Precision::F32,
        loss_scale: call.loss_scale,
        random: call.random,
    }
}

/// Reference: the product, and the sums.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let (of_weight, of_bias) = outputs.split_at_mut(1);
    matmul::reference(call, inputs, of_weight);
    sum::reference(&sum_call(call), &inputs[..1], of_bias);
}

/// CPU kernel: the kernels of the product and of the sum.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let (of_weight, of_bias) = outputs.split_at_mut(1);
    matmul::fast(call, inputs, of_weight);
    sum::fast(&sum_call(call), &inputs[..1], of_bias);
}

/// Bytes into which the product of a call packs its first operand; 0 for another op.
pub(crate) fn host_bytes(call: &OpCall) -> usize {
    if *call.op == Op::LinearWeightGrad { matmul::product_bytes(call) } else { 0 }
}

/// The input that the sums read.
const SUMMED: [usize; 1] = [0];

/// Static choice: the static choice of the product, with the sums.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    joint::dispatch(matmul::dispatch(call, caps), &sum_call(call), &SUMMED, caps)
}

/// Returns the GPU kernel variants of the product, each with the sums.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    joint::variants(matmul::variants(call, caps), &sum_call(call), &SUMMED, caps)
}

/// See [`Twin::independent_axes`]: columns of `dy`.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let outputs = vec![Some(0), Some(0)];
    IndependentAxis::of(call, vec![Some(1), None], outputs).into_iter().collect()
}

/// `(m, k, n)` of more probes: sums of many columns, or of many rows, have other kernels than in
/// the probes of a product.
const WIDE: [[usize; 3]; 7] = [
    [524, 40, 21],
    [524, 40, 69],
    [524, 263, 21],
    [524, 519, 69],
    [524, 1031, 133],
    [524, CACHED_TERMS_MIN + 7, 21],
    [131, CACHED_TERMS_MIN + 7, 69],
];

/// See [`Twin::probes`]: the probes of a product, and wide ones.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let products = [&PRODUCTS[..], &WIDE].concat();
    calls(op, operands(&PRODUCT, inputs, None, &products))
}

/// See [`Twin::catalog`]: the calls of the product.
fn catalog() -> Vec<CallShape> {
    let mut calls = Vec::new();
    for (op, inputs) in matmul::probes::catalog() {
        if op == PRODUCT {
            calls.push((Op::LinearWeightGrad, inputs));
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::InputFill;
    use crate::testing::{check, check_mixed};
    use crate::{DeviceClass, OwnedCall, RandomContext};
    use potluck_core::Shape;
    use potluck_core::rng::Key;

    fn check_sizes([m, k, n]: [usize; 3]) {
        let inputs = [[k, m], [k, n]].map(|dims| (Shape::fixed(&dims), InputFill::Normal));
        check(Op::LinearWeightGrad, &inputs, 1);
    }

    /// Matrices smaller than a tile, and several tiles of each kind, which overlap at the edges;
    /// sums that end within a stage, and long ones in parts.
    #[test]
    fn tiles_sum_rows_on_their_way() {
        check_sizes([68, 33, 72]);
        check_sizes([132, 1044, 128]);
    }

    /// Operands are rounded, and the sums over rows are not.
    #[test]
    fn sums_over_rows_stay_exact_in_mixed_precision() {
        for [m, k, n] in [[68, 33, 72], [21, 9, 19]] {
            let inputs = [[k, m], [k, n]].map(|dims| (Shape::fixed(&dims), InputFill::Normal));
            check_mixed(Op::LinearWeightGrad, &inputs, 1);
        }
    }

    /// Rows that are no whole vectors: a kernel behind the product computes their sums.
    #[test]
    fn other_kernels_are_followed_by_sums() {
        check_sizes([21, 9, 19]);
        check_sizes([36, 40, 35]);
        check_sizes([1, 70, 3]);
    }

    /// The gradient of a bias costs GPUs no dispatch, and software adapters the dispatches of a
    /// sum.
    #[test]
    fn a_bias_costs_gpus_no_dispatch() {
        let inputs = vec![vec![8192, 768], vec![8192, 3072]];
        let random = RandomContext { step_key: Key::new(1), training: true };
        let owned = OwnedCall::new(Op::LinearWeightGrad, inputs.clone(), random).unwrap();
        let product = OwnedCall::new(PRODUCT, inputs, random).unwrap();
        for class in [DeviceClass::Hardware, DeviceClass::Software] {
            let caps = Caps { class, ..Caps::EVERY };
            let more = dispatch(&owned.call(), &caps).len()
                - matmul::dispatch(&product.call(), &caps).len();
            assert_eq!(more > 0, class == DeviceClass::Software, "{class:?}: {more}");
        }
    }
}
