//! Sizes of a matrix product, derived from its call.

use crate::{OpCall, Operand};
use potluck_graph::Op;

/// Operands (a, b and c) of every product kernel except that of [`vector`](super::vector).
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
}

impl Sizes {
    pub fn of(call: &OpCall) -> Self {
        let Op::MatMul { transpose_a, transpose_b } = *call.op.root_op() else {
            panic!("{} is not a matrix product", call.op);
        };
        let (a, c) = (&call.inputs[0], &call.outputs[0]);
        let rank = c.len();
        Self {
            batch: c[..rank - 2].iter().product(),
            m: c[rank - 2],
            n: c[rank - 1],
            k: if transpose_a { a[rank - 2] } else { a[rank - 1] },
            transpose_a,
            transpose_b,
        }
    }

    /// Returns the number of elements to the next row of `a`, and to the next term of the sum.
    pub(crate) fn a_strides(&self) -> (usize, usize) {
        if self.transpose_a { (1, self.m) } else { (self.k, 1) }
    }

    /// Returns the number of elements to the next term of the sum in `b`, and to the next column.
    pub(crate) fn b_strides(&self) -> (usize, usize) {
        if self.transpose_b { (1, self.k) } else { (self.n, 1) }
    }
}
