//! Fused calls on which the kernels are certified.

use super::epilogue;
use crate::call_shapes::{C, N, T, calls};
use crate::ops::{conv, matmul};
use crate::{CallShape, Dims, OwnedCall, RandomContext, twin};
use potluck_core::arithmetic::gcd;
use potluck_core::rng::Key;
use potluck_graph::{Binary, Conv2dOptions, EpilogueOp, Op, Unary};

/// See [`crate::Twin::probes`]: calls of the root op, with operands of the epilogue that fit the
/// root's output. The length of an operand that repeats is a constant in the kernel's text, so it
/// is kept. There must be as many inputs as the root and the epilogue have.
///
/// # Panics
/// Panics if the op is not fused, or if there are fewer inputs than the epilogue has operands.
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let Op::Fused { root, epilogue } = op else { panic!("{op} is not fused") };
    let operands = epilogue.iter().filter(|step| step.has_operand()).count();
    let (own, behind) = inputs.split_at(inputs.len() - operands);
    let random = RandomContext { step_key: Key::new(0), training: true };
    let Some(given) = OwnedCall::new((**root).clone(), own.to_vec(), random) else {
        return Vec::new();
    };
    let output = &given.outputs[0];
    let whole = elements(output);
    // The inputs of an elementwise chain's first op repeat as operands do.
    let repeatable = if epilogue::as_step(root).is_some() { inputs } else { behind };
    let period = repeatable.iter().map(elements).filter(|count| *count < whole).max();
    let mut probes = Vec::new();
    for (small, mut dims) in roots(root, own, output, period) {
        let Some(probe) = OwnedCall::new(small.clone(), dims.clone(), random) else { continue };
        for operand in behind {
            let count = elements(operand);
            dims.push(if count < whole { vec![count] } else { probe.outputs[0].clone() });
        }
        probes.push((Op::Fused { root: Box::new(small), epilogue: epilogue.to_vec() }, dims));
    }
    probes
}

fn elements(dims: &Dims) -> usize {
    dims.iter().product()
}

/// Returns small calls of the root op, with an output over which `period` elements repeat.
fn roots(root: &Op, own: &[Dims], output: &Dims, period: Option<usize>) -> Vec<CallShape> {
    let is_chain = epilogue::as_step(root).is_some();
    match period {
        Some(period) if is_chain => chain_starts(root, own, output, period),
        None | Some(1) => match twin(root) {
            Some(twin) => (twin.probes)(root, own),
            None => Vec::new(),
        },
        Some(period) if output.last() == Some(&period) => match root {
            Op::Conv2d(_) | Op::Conv2dInputGrad { .. } => {
                conv::probes_with_channels(root, own, Some(period))
            }
            _ => matmul::probes_with_columns(root, own, Some(period)),
        },
        Some(period) => products_of_periods(root, own, period),
    }
}

/// Returns small calls of the first op of an elementwise chain, with rows in which each input that
/// repeats fits.
fn chain_starts(root: &Op, own: &[Dims], output: &Dims, period: usize) -> Vec<CallShape> {
    let mut width = period;
    for dims in own {
        if dims != output {
            width = width.max(elements(dims));
        }
    }
    // Whole vectors of 4, and more of them than a workgroup processes in one round.
    let many = 1100_usize.div_ceil(width).next_multiple_of(4);
    let mut sizes = Vec::new();
    for rows in [3, 9, many] {
        let mut inputs = own.to_vec();
        for dims in &mut inputs {
            if dims == output {
                *dims = vec![rows, width];
            }
        }
        sizes.push(inputs);
    }
    calls(root, sizes)
}

/// Returns small products with as many columns as the call, and with rows for whole periods of an
/// operand that repeats over several rows, such as a table of positions.
fn products_of_periods(root: &Op, own: &[Dims], period: usize) -> Vec<CallShape> {
    let Op::MatMul { transpose_a, transpose_b } = *root else { return Vec::new() };
    let row_axis = own[0].len() - if transpose_a { 1 } else { 2 };
    let columns = own[1][own[1].len() - if transpose_b { 2 } else { 1 }];
    let unit = period / gcd(period, columns);
    let is_vector = own[0][row_axis].is_multiple_of(4);
    let is_batched = own[0].len() > 2;
    let step = if is_vector { 4 * unit / gcd(4, unit) } else { unit };
    let mut products = matmul::probes_with_columns(root, own, Some(columns));
    for (_, dims) in &mut products {
        // Two periods at least, so that the operand repeats.
        let repeats = is_batched || unit * columns > period;
        let rows = dims[0][row_axis].max(if repeats { unit } else { 2 * unit });
        let rows = rows.next_multiple_of(step);
        // Kernels test less if the number of rows is a multiple of four.
        let is_right = rows.is_multiple_of(4) == is_vector;
        dims[0][row_axis] = if is_right { rows } else { rows + unit };
    }
    products
}

/// See [`crate::Twin::catalog`]: products with the epilogues that they have in a GPT, a
/// gain of one value and a table of positions, the gradient of layer norm with a sum, and
/// elementwise chains without a product.
pub fn catalog() -> Vec<CallShape> {
    let add = EpilogueOp::Binary(Binary::Add);
    let gelu = EpilogueOp::Unary(Unary::Gelu);
    let gelu_grad = EpilogueOp::UnaryGrad(Unary::Gelu);
    let y = vec![2 * N, 3 * C];
    let wide = vec![3 * C];
    vec![
        product(true, &[add], &y),
        product(true, &[add, EpilogueOp::Store, gelu], &wide),
        product(false, &[gelu_grad], &y),
        product(false, &[EpilogueOp::Binary(Binary::Mul)], &[1]),
        product(false, &[add], &[T, 3 * C]),
        norm_grad(Op::LayerNormGrad, add),
        norm_grad(Op::RmsNormGrad, add),
        convolution(&[add, EpilogueOp::Store, gelu], &[64]),
        convolution(&[gelu_grad], &[4, 8, 8, 64]),
        fused(Op::Binary(Binary::Add), &[gelu], vec![y.clone(), wide.clone()]),
        fused(Op::Unary(Unary::Gelu), &[add, add], vec![y.clone(), wide, y]),
    ]
}

fn fused(root: Op, epilogue: &[EpilogueOp], inputs: Vec<Dims>) -> CallShape {
    (Op::Fused { root: Box::new(root), epilogue: epilogue.to_vec() }, inputs)
}

/// Returns a product of (2 N, C) and (C, 3 C).
fn product(transpose_b: bool, epilogue: &[EpilogueOp], operand: &[usize]) -> CallShape {
    let root = Op::MatMul { transpose_a: false, transpose_b };
    let w = if transpose_b { vec![3 * C, C] } else { vec![C, 3 * C] };
    fused(root, epilogue, vec![vec![2 * N, C], w, operand.to_vec()])
}

/// Returns a convolution with 64 channels of pictures of 8 x 8 as its result.
fn convolution(epilogue: &[EpilogueOp], operand: &[usize]) -> CallShape {
    let root = Op::Conv2d(Conv2dOptions::default().with_padding(1).with_stride(2));
    fused(root, epilogue, vec![vec![4, 16, 16, 32], vec![64, 32, 3, 3], operand.to_vec()])
}

/// Gradient of a normalization of (2 N, C), with one step.
fn norm_grad(root: Op, step: EpilogueOp) -> CallShape {
    let x = vec![2 * N, C];
    fused(root, &[step], vec![x.clone(), vec![C], vec![2 * N, 2], x.clone(), x])
}
