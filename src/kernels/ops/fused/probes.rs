//! Fused calls on which the kernels are certified.

use super::epilogue;
use crate::call_shapes::{C, N, T, calls};
use crate::ops::{conv, matmul};
use crate::{CallShape, Dims, OwnedCall, RandomContext, twin};
use potluck_core::arithmetic::gcd;
use potluck_core::rng::Key;
use potluck_graph::{Binary, Conv2dOptions, EpilogueOp, Op, Unary};

/// See [`crate::Twin::probes`]: calls of the root op, with operands of the epilogue that
/// fit the root's output. The length of an operand that repeats is a constant in the kernel's text,
/// so it is kept. There must be as many inputs as the root and the epilogue take.
///
/// # Panics
/// Panics if the op is not fused, or if there are fewer inputs than the epilogue has operands.
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let Op::Fused { root, epilogue } = op else { panic!("{op} is not fused") };
    let operands = epilogue.iter().filter(|step| step.has_operand()).count();
    let (own, behind) = inputs.split_at(inputs.len() - operands);
    let random = RandomContext { step_key: Key::new(0), training: true };
    let count = |dims: &Dims| dims.iter().product::<usize>();
    let Some(was) = OwnedCall::new((**root).clone(), own.to_vec(), random) else {
        return Vec::new();
    };
    let whole = count(&was.outputs[0]);
    // The inputs of an elementwise chain's first op repeat as operands do.
    let chained = if epilogue::as_step(root).is_some() { own } else { &[] };
    let period = chained.iter().chain(behind).map(count);
    let period = period.filter(|count| *count < whole).max();
    let mut probes = Vec::new();
    for (small, mut dims) in roots(root, own, &was.outputs[0], period) {
        let Some(is) = OwnedCall::new(small.clone(), dims.clone(), random) else { continue };
        for operand in behind {
            let repeats = count(operand) < whole;
            dims.push(if repeats { vec![count(operand)] } else { is.outputs[0].clone() });
        }
        probes.push((Op::Fused { root: Box::new(small), epilogue: epilogue.to_vec() }, dims));
    }
    probes
}

/// Returns small calls of the root op, with an output over which `period` elements repeat.
fn roots(root: &Op, own: &[Dims], output: &Dims, period: Option<usize>) -> Vec<CallShape> {
    let is_chain = epilogue::as_step(root).is_some();
    let of_twin = || twin(root).map_or_else(Vec::new, |twin| (twin.probes)(root, own));
    match period {
        None => of_twin(),
        Some(1) if !is_chain => of_twin(),
        Some(period) if is_chain => {
            let short = own.iter().filter(|x| *x != output).map(|x| x.iter().product());
            let width = short.chain([period]).max().unwrap_or(period);
            let sized = |rows| {
                let small = |x: &Dims| if x == output { vec![rows, width] } else { x.clone() };
                own.iter().map(small).collect()
            };
            // Of whole vectors of 4, more than a workgroup processes in one round.
            let many = 1100_usize.div_ceil(width).next_multiple_of(4);
            calls(root, [3, 9, many].map(sized))
        }
        Some(period) if output.last() == Some(&period) => match root {
            Op::Conv2d(_) | Op::Conv2dInputGrad { .. } => {
                conv::probes_with_channels(root, own, Some(period))
            }
            _ => matmul::probes_with_columns(root, own, Some(period)),
        },
        Some(period) => products_of_periods(root, own, period),
    }
}

/// Returns small products with as many columns as the call, and as many rows as make whole periods
/// of an operand that repeats over several rows, such as a table of positions.
fn products_of_periods(root: &Op, own: &[Dims], period: usize) -> Vec<CallShape> {
    let Op::MatMul { transpose_a, transpose_b } = *root else { return Vec::new() };
    let row_axis = own[0].len() - if transpose_a { 1 } else { 2 };
    let columns = own[1][own[1].len() - if transpose_b { 2 } else { 1 }];
    let unit = period / gcd(period, columns);
    let (is_vector, is_batched) = (own[0][row_axis].is_multiple_of(4), own[0].len() > 2);
    let step = if is_vector { 4 * unit / gcd(4, unit) } else { unit };
    let mut products = matmul::probes_with_columns(root, own, Some(columns));
    for (_, dims) in &mut products {
        // Two periods at least, so that the operand repeats.
        let repeats = is_batched || unit * columns > period;
        let rows = dims[0][row_axis].max(if repeats { unit } else { 2 * unit });
        let rows = rows.next_multiple_of(step);
        // Kernels test less where rows are a multiple of four.
        let is_right = rows.is_multiple_of(4) == is_vector;
        dims[0][row_axis] = if is_right { rows } else { rows + unit };
    }
    products
}

/// See [`crate::Twin::catalog`]: products with the epilogues that they have in a GPT, a
/// gain of one value and a table of positions, the gradient of layer norm with a sum, and
/// elementwise chains without a product.
pub fn catalog() -> Vec<CallShape> {
    let gelu = Unary::Gelu;
    let (bias, sum) = (EpilogueOp::Binary(Binary::Add), EpilogueOp::Binary(Binary::Add));
    let (x, y, wide) = (vec![2 * N, C], vec![2 * N, 3 * C], vec![3 * C]);
    let fused = |root, epilogue: &[EpilogueOp], inputs: Vec<Dims>| {
        (Op::Fused { root: Box::new(root), epilogue: epilogue.to_vec() }, inputs)
    };
    let product = |transpose_b, epilogue: &[EpilogueOp], operand: &Dims| {
        let w = if transpose_b { vec![3 * C, C] } else { vec![C, 3 * C] };
        let root = Op::MatMul { transpose_a: false, transpose_b };
        fused(root, epilogue, vec![x.clone(), w, operand.clone()])
    };
    let convolution = |epilogue: &[EpilogueOp], operand: &[usize]| {
        let (x, w) = (vec![4, 16, 16, 32], vec![64, 32, 3, 3]);
        let root = Op::Conv2d(Conv2dOptions::default().with_padding(1).with_stride(2));
        fused(root, epilogue, vec![x, w, operand.to_vec()])
    };
    let add = Op::Binary(Binary::Add);
    let of_norm = |grad: Op| {
        fused(grad, &[sum], vec![x.clone(), vec![C], vec![2 * N, 2], x.clone(), x.clone()])
    };
    vec![
        product(true, &[sum], &y),
        product(true, &[bias, EpilogueOp::Store, EpilogueOp::Unary(gelu)], &wide),
        product(false, &[EpilogueOp::UnaryGrad(gelu)], &y),
        product(false, &[EpilogueOp::Binary(Binary::Mul)], &vec![1]),
        product(false, &[bias], &vec![T, 3 * C]),
        of_norm(Op::LayerNormGrad),
        of_norm(Op::RmsNormGrad),
        convolution(&[bias, EpilogueOp::Store, EpilogueOp::Unary(gelu)], &[64]),
        convolution(&[EpilogueOp::UnaryGrad(gelu)], &[4, 8, 8, 64]),
        fused(add, &[EpilogueOp::Unary(gelu)], vec![y.clone(), wide.clone()]),
        fused(Op::Unary(gelu), &[bias, sum], vec![y.clone(), wide, y]),
    ]
}
