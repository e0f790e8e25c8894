//! Gradient rules of ops that alias, move, cut, join, sum or repeat elements.

use super::backward::Backward;
use crate::op::Op;
use crate::shapes::ShapeError;
use potluck_core::TensorId;

pub fn reshape(b: &mut Backward, x: TensorId, dy: TensorId) -> Result<(), ShapeError> {
    if b.requires_grad[x.index()] {
        let dx = b.alias(dy, b.graph.tensor(x).shape.clone(), b.phase_towards(x));
        b.accumulate_tensor(x, dx);
    }
    Ok(())
}

pub fn permute(
    b: &mut Backward,
    axes: &[usize],
    x: TensorId,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let mut inverse = vec![0; axes.len()];
    for (to, &from) in axes.iter().enumerate() {
        inverse[from] = to;
    }
    b.accumulate_op(x, Op::Permute { axes: inverse }, &[dy])
}

pub fn slice(
    b: &mut Backward,
    axis: usize,
    start: usize,
    x: TensorId,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let after = length(b, axis, x) - start - length(b, axis, dy);
    b.accumulate_op(x, Op::Pad { axis, before: start, after }, &[dy])
}

pub fn pad(
    b: &mut Backward,
    axis: usize,
    before: usize,
    x: TensorId,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let length = length(b, axis, x);
    b.accumulate_op(x, Op::Slice { axis, start: before, length }, &[dy])
}

pub fn concat(
    b: &mut Backward,
    axis: usize,
    parts: &[TensorId],
    dy: TensorId,
) -> Result<(), ShapeError> {
    let mut start = 0;
    for &part in parts {
        let length = length(b, axis, part);
        b.accumulate_op(part, Op::Slice { axis, start, length }, &[dy])?;
        start += length;
    }
    Ok(())
}

fn length(b: &Backward, axis: usize, x: TensorId) -> usize {
    b.graph.tensor(x).shape.dims()[axis]
}

pub fn sum(
    b: &mut Backward,
    first: usize,
    last: usize,
    x: TensorId,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let shape = &b.graph.tensor(x).shape;
    let dims = shape.dims()[first..=last].to_vec();
    let batched = shape.is_batched() && first == 0;
    b.accumulate_op(x, Op::Broadcast { first, dims, batched }, &[dy])
}

/// Adds the gradient of a broadcast over `axes` new axes in front of dimension `first`.
pub fn broadcast(
    b: &mut Backward,
    first: usize,
    axes: usize,
    x: TensorId,
    dy: TensorId,
) -> Result<(), ShapeError> {
    if axes == 0 {
        b.accumulate_tensor(x, dy);
        return Ok(());
    }
    b.accumulate_op(x, Op::Sum { first, last: first + axes - 1 }, &[dy])
}
