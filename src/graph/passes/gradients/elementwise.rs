//! Gradient rules of elementwise ops: functions of one tensor and of two, and dropout.

use super::backward::Backward;
use crate::Node;
use crate::elements::{Binary, BinarySide, Slope, Unary};
use crate::op::Op;
use crate::shapes::ShapeError;
use potluck_core::TensorId;

pub fn unary(
    b: &mut Backward,
    function: Unary,
    x: TensorId,
    dy: TensorId,
) -> Result<(), ShapeError> {
    match function {
        Unary::Scale(_) => b.accumulate_op(x, Op::Unary(function), &[dy]),
        Unary::Offset(_) => {
            b.accumulate_tensor(x, dy);
            Ok(())
        }
        _ if function.slope() == Slope::Flat => Ok(()),
        _ => b.accumulate_op(x, Op::UnaryGrad(function), &[x, dy]),
    }
}

pub fn binary(
    b: &mut Backward,
    function: Binary,
    node: &Node,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let x = [node.inputs[0], node.inputs[1]];
    match function {
        Binary::Add => add(b, x, dy),
        Binary::Sub => sub(b, x, dy),
        Binary::Mul => mul(b, x, dy),
        Binary::Div => div(b, x, node.outputs[0], dy),
        _ => by_formula(b, function, x, dy),
    }
}

fn add(b: &mut Backward, x: [TensorId; 2], dy: TensorId) -> Result<(), ShapeError> {
    b.accumulate_tensor(x[0], dy);
    b.accumulate_reduced(x[1], dy)
}

fn sub(b: &mut Backward, x: [TensorId; 2], dy: TensorId) -> Result<(), ShapeError> {
    b.accumulate_tensor(x[0], dy);
    b.accumulate_negated(x[1], dy)
}

fn mul(b: &mut Backward, x: [TensorId; 2], dy: TensorId) -> Result<(), ShapeError> {
    b.accumulate_op(x[0], Op::Binary(Binary::Mul), &[dy, x[1]])?;
    if !b.requires_grad[x[1].index()] {
        return Ok(());
    }
    let phase = b.phase_towards(x[1]);
    let product = b.apply(Op::Binary(Binary::Mul), &[dy, x[0]], phase)?;
    b.accumulate_reduced(x[1], product)
}

fn div(b: &mut Backward, x: [TensorId; 2], y: TensorId, dy: TensorId) -> Result<(), ShapeError> {
    b.accumulate_op(x[0], Op::Binary(Binary::Div), &[dy, x[1]])?;
    if !b.requires_grad[x[1].index()] {
        return Ok(());
    }
    // -(sum of dy y) / divisor: the divisor is constant over the summed axes.
    let phase = b.phase_towards(x[1]);
    let product = b.apply(Op::Binary(Binary::Mul), &[dy, y], phase)?;
    let sum = b.reduced(x[1], product, phase)?;
    let quotient = b.apply(Op::Binary(Binary::Div), &[sum, x[1]], phase)?;
    b.accumulate_op(x[1], Op::Unary(Unary::Scale(-1.0)), &[quotient])
}

/// Adds the gradients by the function's formulas.
fn by_formula(
    b: &mut Backward,
    function: Binary,
    x: [TensorId; 2],
    dy: TensorId,
) -> Result<(), ShapeError> {
    for (side, by) in x.into_iter().zip([BinarySide::First, BinarySide::Second]) {
        if !b.requires_grad[side.index()] || function.slope(by) == Slope::Flat {
            continue;
        }
        let phase = b.phase_towards(side);
        let gradient = b.apply(Op::BinaryGrad { function, by }, &[x[0], x[1], dy], phase)?;
        b.accumulate_reduced(side, gradient)?;
    }
    Ok(())
}

/// Adds the gradient of a dropout: the same dropout, since the site draws the same random numbers.
pub fn dropout(b: &mut Backward, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
    b.accumulate_op(node.inputs[0], node.op.clone(), &[dy, node.inputs[1]])
}
