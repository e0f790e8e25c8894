//! Sizes of a matrix product, derived from its call.

use crate::{OpCall, Operand};
use potluck_graph::{Op, Precision};

/// Operands (a, b and c) of every product kernel except the one in [`vector`](super::vector).
pub(crate) const OPERANDS: [Operand; 3] =
    [Operand::Input(0), Operand::Input(1), Operand::Output(0)];

/// The sizes of a call: `batch` products of `(m, k)` and `(k, n)`.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub transpose_a: bool,
    pub transpose_b: bool,
    /// True if kernels of tiles also compute the sums of `a` over the terms, as the second output:
    /// the gradient of a bias. Both outputs are then stored as vectors.
    pub row_sums: bool,
    /// Arithmetic of the product.
    pub precision: Precision,
}

impl Sizes {
    pub fn of(call: &OpCall) -> Self {
        let (transpose_a, transpose_b) = match *call.op.root_op() {
            Op::MatMul { transpose_a, transpose_b } => (transpose_a, transpose_b),
            Op::LinearWeightGrad => (true, false),
            _ => panic!("{} is not a matrix product", call.op),
        };
        let a = &call.inputs[0];
        let c = &call.outputs[0];
        let rank = c.len();
        let [m, n] = [c[rank - 2], c[rank - 1]];
        let has_sums = *call.op == Op::LinearWeightGrad;
        Self {
            batch: c[..rank - 2].iter().product(),
            m,
            n,
            k: if transpose_a { a[rank - 2] } else { a[rank - 1] },
            transpose_a,
            transpose_b,
            row_sums: has_sums && m.is_multiple_of(4) && n.is_multiple_of(4),
            precision: call.precision,
        }
    }

    /// Number of values that tiles write for each part of the sum.
    pub(crate) fn values(&self) -> usize {
        self.batch * self.m * self.n + if self.row_sums { self.m } else { 0 }
    }

    /// Number of elements to the next row of `a`, and to the next term of the sum.
    pub(crate) fn a_strides(&self) -> (usize, usize) {
        if self.transpose_a { (1, self.m) } else { (self.k, 1) }
    }

    /// Number of elements to the next term of the sum in `b`, and to the next column.
    pub(crate) fn b_strides(&self) -> (usize, usize) {
        if self.transpose_b { (1, self.k) } else { (self.n, 1) }
    }
}
