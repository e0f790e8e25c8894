//! Gradients of weight and bias of a linear layer in one: the product of [`super::matmul`], whose
//! tiles in workgroup memory sum the rows of `dy` on their way there. Other kernels of products are
//! followed by a kernel of [`super::sum`].
//!
//! `dweight[o, c] = sum_k dy[k, o] x[k, c]`, `dbias[o] = sum_k dy[k, o]`.

use super::{matmul, sum};
use crate::twin::{IndependentAxis, no_forward, normal_inputs};
use crate::{CallShape, Caps, Dims, Dispatch, Float, OpCall, Operand, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::Op;

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

/// Returns the call that sums the rows of `dy`.
fn sum_call<'a>(call: &OpCall) -> OpCall<'a> {
    OpCall {
        op: &SUM,
        inputs: vec![call.inputs[0].clone()],
        outputs: vec![call.outputs[1].clone()],
        accumulate: call.accumulate,
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

/// Static choice: that of the product.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    with_sums(call, matmul::dispatch(call, caps), || sum::dispatch(&sum_call(call), caps))
}

/// Returns the GPU kernel variants of the product, each with the sums.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let mut variants = matmul::variants(call, caps);
    for (index, variant) in variants.iter_mut().enumerate() {
        let dispatches = std::mem::take(&mut variant.dispatches);
        variant.dispatches = with_sums(call, dispatches, || {
            let sum = sum_call(call);
            let baseline = || sum::variants(&sum, caps).swap_remove(0).dispatches;
            if index == 0 { baseline() } else { sum::dispatch(&sum, caps) }
        });
    }
    variants
}

/// Returns the dispatches of a product, followed by those that sum the rows unless it does.
fn with_sums(
    call: &OpCall,
    mut product: Vec<Dispatch>,
    sums: impl FnOnce() -> Vec<Dispatch>,
) -> Vec<Dispatch> {
    let of_bias = Operand::Output(call.outputs.len() - 1);
    if product.iter().any(|dispatch| dispatch.operands.contains(&of_bias)) {
        return product;
    }
    for mut dispatch in sums() {
        for operand in &mut dispatch.operands {
            if *operand == Operand::Output(0) {
                *operand = of_bias;
            }
        }
        product.push(dispatch);
    }
    product
}

/// See [`Twin::independent_axes`]: columns of `dy`.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let outputs = vec![Some(0), Some(0)];
    IndependentAxis::of(call, vec![Some(1), None], outputs).into_iter().collect()
}

/// See [`Twin::probes`]: those of the product.
fn probes(_: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let products = matmul::probes::probes(&PRODUCT, inputs).into_iter();
    products.map(|(_, inputs)| (Op::LinearWeightGrad, inputs)).collect()
}

/// See [`Twin::catalog`]: those of the product.
fn catalog() -> Vec<CallShape> {
    let products = matmul::probes::catalog().into_iter().filter(|(op, _)| *op == PRODUCT);
    products.map(|(_, inputs)| (Op::LinearWeightGrad, inputs)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::InputFill;
    use crate::testing::check;
    use crate::{DeviceClass, OwnedCall, RandomContext};
    use potluck_core::Shape;
    use potluck_core::rng::Key;

    fn check_sizes([m, k, n]: [usize; 3]) {
        let inputs = [[k, m], [k, n]].map(|dims| (Shape::fixed(&dims), InputFill::Normal));
        check(Op::LinearWeightGrad, &inputs, 1);
    }

    /// Several tiles of each kind, which overlap at the edges, and sums that end within a stage;
    /// matrices smaller than a tile; long sums, in parts.
    #[test]
    fn tiles_sum_rows_on_their_way() {
        check_sizes([132, 37, 260]);
        check_sizes([68, 33, 72]);
        check_sizes([132, 1044, 128]);
    }

    /// Rows that are no whole vectors, of which a kernel behind the product computes the sums.
    #[test]
    fn other_kernels_are_followed_by_sums() {
        check_sizes([21, 9, 19]);
        check_sizes([36, 40, 35]);
        check_sizes([1, 70, 3]);
    }

    /// The gradient of a bias costs GPUs no dispatch, and software adapters those of a sum.
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
