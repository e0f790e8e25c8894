//! Gradient rules of gather and scatter-add: each is the gradient of the other, without a gradient
//! by the places.

use super::backward::Backward;
use crate::op::Op;
use crate::shapes::ShapeError;
use potluck_core::TensorId;

pub fn gather(
    b: &mut Backward,
    axis: usize,
    x: &[TensorId],
    dy: TensorId,
) -> Result<(), ShapeError> {
    let length = b.graph.tensor(x[0]).shape.dims()[axis];
    b.accumulate_op(x[0], Op::ScatterAdd { axis, length }, &[x[1], dy])
}

pub fn scatter_add(
    b: &mut Backward,
    axis: usize,
    x: &[TensorId],
    dy: TensorId,
) -> Result<(), ShapeError> {
    b.accumulate_op(x[1], Op::Gather { axis }, &[dy, x[0]])
}
