//! Products on which the kernels are certified.

use super::split_k::CACHED_TERMS_MIN;
use crate::call_shapes::{C, N, calls};
use crate::{CallShape, Dims};
use potluck_graph::Op;

/// `(m, k, n)` of probes, the cheapest first: large enough for one tile size after the other, and
/// longer sums for variants that split them.
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

/// Numbers of terms that kernels stage at a time, and of those that they read at a time. A sum of
/// another number is tested for its end.
const STAGES: [usize; 3] = [64, 16, 4];

/// See [`crate::Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    probes_with_columns(op, inputs, None)
}

/// Returns the probes of a product, with so many columns if a number is given.
pub(crate) fn probes_with_columns(
    op: &Op,
    inputs: &[Dims],
    columns: Option<usize>,
) -> Vec<CallShape> {
    calls(op, operands(op, inputs, columns, &PRODUCTS))
}

/// Returns both operands of products `(m, k, n)` like those of a call, as three products if the
/// call is batched, and with `columns` columns if given.
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
    let last_two = |dims: &Dims, swapped| match dims[dims.len() - 2..] {
        [first, second] => pair(first, second, swapped),
        _ => [1, 1],
    };
    let [m, k] = last_two(&inputs[0], transpose_a);
    let [_, n] = last_two(&inputs[1], transpose_b);
    let operands = |sizes: &[usize; 3]| {
        let [m, k, n] = [
            like(sizes[0], m, &[4]),
            like(sizes[1], k, &STAGES),
            columns.unwrap_or(like(sizes[2], n, &[4])),
        ];
        let matrices = [pair(m, k, transpose_a), pair(k, n, transpose_b)];
        matrices.map(|matrix| [front, &matrix].concat()).to_vec()
    };
    products.iter().map(operands).collect()
}

/// Returns about `size`, and a multiple of the first of these numbers of which `of` is one, as
/// kernels then test less; `of` itself if it is a few. Tiles need more room than a small call has;
/// kernels for a few rows or columns do not.
fn like(size: usize, of: usize, multiples: &[usize]) -> usize {
    let multiple = multiples.iter().find(|multiple| of.is_multiple_of(**multiple));
    match of {
        0..=FEW => of,
        _ => size.next_multiple_of(*multiple.unwrap_or(&1)),
    }
}

/// Returns a size with which kernels have the text that they have with `size`: itself, or if it is
/// more than `near`, that or a little more.
pub(crate) fn near(size: usize, near: usize) -> usize {
    if size <= near { size } else { like(near, size, &STAGES) }
}

fn pair(first: usize, second: usize, swapped: bool) -> [usize; 2] {
    if swapped { [second, first] } else { [first, second] }
}

/// See [`crate::Twin::catalog`].
pub fn catalog() -> Vec<CallShape> {
    let product = |(transpose_a, transpose_b)| {
        let (a, b) = (pair(2 * N, C, transpose_a), pair(C, 3 * C, transpose_b));
        (Op::MatMul { transpose_a, transpose_b }, vec![a.to_vec(), b.to_vec()])
    };
    let mut calls: Vec<CallShape> =
        [(false, false), (false, true), (true, false), (true, true)].map(product).to_vec();
    // A long sum, as in the gradient of a weight.
    let op = Op::MatMul { transpose_a: true, transpose_b: false };
    calls.push((op, vec![vec![8 * N, C], vec![8 * N, 3 * C]]));
    // A few rows, as in generation; and one output row, or one column.
    for m in [1, 4] {
        let op = |transpose_b| Op::MatMul { transpose_a: false, transpose_b };
        calls.push((op(true), vec![vec![m, C], vec![3 * C, C]]));
        calls.push((op(false), vec![vec![3 * C, C], vec![C, m]]));
    }
    calls
}
