//! Products on which the kernels are certified.

use super::split_k::CACHED_TERMS_MIN;
use crate::call_shapes::{C, N, calls};
use crate::{CallShape, Dims};
use potluck_graph::Op;

/// `(m, k, n)` of probes, the cheapest first: large enough for ever larger tiles, and longer sums
/// for the variants that split them.
pub(crate) const PRODUCTS: [[usize; 3]; 9] = [
    [19, 7, 21],
    [37, 18, 35],
    [67, 35, 69],
    [131, 33, 133],
    [19, 1031, 21],
    [67, 519, 69],
    [259, 37, 261],
    [19, CACHED_TERMS_MIN + 7, 21],
    [131, 1031, 133],
];

/// Numbers of rows or columns of a product up to this are kept, because kernels for few of them
/// depend on the number.
const FEW: usize = 8;

/// Terms of the stages of kernels, and terms of a vector. Kernels test for the end of a sum whose
/// number of terms is no multiple.
const STAGES: [usize; 3] = [64, 16, 4];

/// See [`crate::Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    probes_with_columns(op, inputs, None)
}

/// Probes of a product, with `columns` columns if given.
pub(crate) fn probes_with_columns(
    op: &Op,
    inputs: &[Dims],
    columns: Option<usize>,
) -> Vec<CallShape> {
    calls(op, operands(op, inputs, columns, &PRODUCTS))
}

/// Both operands of products `(m, k, n)` like a call's, as three products if the call is batched,
/// and with `columns` columns if given.
pub(crate) fn operands(
    op: &Op,
    inputs: &[Dims],
    columns: Option<usize>,
    products: &[[usize; 3]],
) -> Vec<Vec<Dims>> {
    let Op::MatMul { transpose_a, transpose_b } = *op else {
        panic!("{op} is not a matrix product")
    };
    let front: &[usize] = if inputs[0].len() > 2 { &[3] } else { &[] };
    let [m, k] = last_two(&inputs[0], transpose_a);
    let [_, n] = last_two(&inputs[1], transpose_b);
    let mut operands = Vec::new();
    for sizes in products {
        let m = like(sizes[0], m, &[4]);
        let k = like(sizes[1], k, &STAGES);
        let n = columns.unwrap_or(like(sizes[2], n, &[4]));
        let a = [front, &pair(m, k, transpose_a)].concat();
        let b = [front, &pair(k, n, transpose_b)].concat();
        operands.push(vec![a, b]);
    }
    operands
}

/// Rows and columns of a matrix that is stored transposed if `swapped`.
fn last_two(dims: &Dims, swapped: bool) -> [usize; 2] {
    match dims[dims.len() - 2..] {
        [first, second] => pair(first, second, swapped),
        _ => [1, 1],
    }
}

/// Returns `of` if it is small, because kernels for a few rows or columns have no tiles to fill. Or
/// else returns about `size`: a multiple of the first of these numbers that divides `of`, because
/// kernels then have fewer tests.
fn like(size: usize, of: usize, multiples: &[usize]) -> usize {
    let multiple = multiples.iter().find(|multiple| of.is_multiple_of(**multiple));
    match of {
        0..=FEW => of,
        _ => size.next_multiple_of(*multiple.unwrap_or(&1)),
    }
}

/// Returns a size for which kernels have the same text as for `size`: itself, or if it is more than
/// `near`, that or a little more.
pub(crate) fn near(size: usize, near: usize) -> usize {
    if size <= near { size } else { like(near, size, &STAGES) }
}

fn pair(first: usize, second: usize, swapped: bool) -> [usize; 2] {
    if swapped { [second, first] } else { [first, second] }
}

/// See [`crate::Twin::catalog`].
pub fn catalog() -> Vec<CallShape> {
    let mut calls = Vec::new();
    for transpose_a in [false, true] {
        for transpose_b in [false, true] {
            let a = pair(2 * N, C, transpose_a).to_vec();
            let b = pair(C, 3 * C, transpose_b).to_vec();
            calls.push((Op::MatMul { transpose_a, transpose_b }, vec![a, b]));
        }
    }
    // A long sum, as in the gradient of a weight.
    let op = Op::MatMul { transpose_a: true, transpose_b: false };
    calls.push((op, vec![vec![8 * N, C], vec![8 * N, 3 * C]]));
    // A few rows, as in generation; and one output row, or one column.
    for m in [1, 4] {
        let op = Op::MatMul { transpose_a: false, transpose_b: true };
        calls.push((op, vec![vec![m, C], vec![3 * C, C]]));
        let op = Op::MatMul { transpose_a: false, transpose_b: false };
        calls.push((op, vec![vec![3 * C, C], vec![C, m]]));
    }
    calls
}
