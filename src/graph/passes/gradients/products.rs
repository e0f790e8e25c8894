//! Gradient rules of matrix products, and of embeddings, which are products with one-hot rows.

use super::backward::Backward;
use crate::op::Op;
use crate::shapes::ShapeError;
use potluck_core::TensorId;

/// Adds the gradients of a product whose sides are given transposed if `ta` and `tb`.
pub fn matmul(
    b: &mut Backward,
    ta: bool,
    tb: bool,
    x: &[TensorId],
    dy: TensorId,
) -> Result<(), ShapeError> {
    let matmul = |transpose_a, transpose_b| Op::MatMul { transpose_a, transpose_b };
    if ta {
        b.accumulate_op(x[0], matmul(tb, true), &[x[1], dy])?;
    } else {
        b.accumulate_op(x[0], matmul(false, !tb), &[dy, x[1]])?;
    }
    if tb {
        b.accumulate_op(x[1], matmul(true, ta), &[dy, x[0]])
    } else {
        b.accumulate_op(x[1], matmul(!ta, false), &[x[0], dy])
    }
}

pub fn embedding(
    b: &mut Backward,
    first: usize,
    x: &[TensorId],
    dy: TensorId,
) -> Result<(), ShapeError> {
    let rows = b.graph.tensor(x[1]).shape.dims()[0];
    b.accumulate_op(x[1], Op::EmbeddingGrad { first, rows }, &[x[0], dy])
}
