//! Gradient rule of recurrent layers.

use super::backward::Backward;
use crate::op::{Cell, Op};
use crate::shapes::ShapeError;
use crate::{Node, PassKind};
use potluck_core::TensorId;

/// Adds the gradients of a recurrent layer.
pub fn recurrent(
    b: &mut Backward,
    cell: Cell,
    node: &Node,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let x = &node.inputs;
    let (hidden, state) = match cell {
        Cell::Lstm => (node.outputs[2], x.get(4)),
        Cell::Gru => (node.outputs[0], x.get(3)),
    };
    let mut inputs = vec![node.outputs[1], x[1], hidden, dy];
    inputs.extend(state);
    let op = Op::RecurrentGrad { cell };
    let gradients = b.apply_all(op, &inputs, PassKind::BackwardInput)?;
    let (dproduct, states) = match cell {
        Cell::Lstm => (gradients[0], &gradients[1..]),
        Cell::Gru => (gradients[1], &gradients[2..]),
    };
    b.accumulate_tensor(x[0], gradients[0]);
    for (state, gradient) in x[3..].iter().zip(states) {
        b.accumulate_tensor(*state, *gradient);
    }
    b.accumulate_reduced(x[2], dproduct)?;
    hidden_weight(b, node, dproduct)
}

/// Adds the gradient of the weight of the hidden values: one product over all time steps, of the
/// gradient of each step's product with the hidden values of the step before.
fn hidden_weight(b: &mut Backward, node: &Node, dproduct: TensorId) -> Result<(), ShapeError> {
    let x = &node.inputs;
    if !b.requires_grad[x[1].index()] {
        return Ok(());
    }
    let phase = b.phase_towards(x[1]);
    let Some(before) = hidden_before(b, node.outputs[0], x.get(3).copied(), phase)? else {
        return Ok(());
    };
    let dproduct = steps(b, dproduct, phase);
    let before = steps(b, before, phase);
    let product = Op::MatMul { transpose_a: true, transpose_b: false };
    b.accumulate_op(x[1], product, &[dproduct, before])
}

/// Rows of all time steps of `(b, t, width)` as a matrix.
fn steps(b: &mut Backward, tensor: TensorId, phase: PassKind) -> TensorId {
    let shape = b.graph.tensor(tensor).shape.clone();
    let [rows, t, width] = *shape.dims() else { return tensor };
    b.alias(tensor, shape.with_dims(&[rows * t, width]), phase)
}

/// Returns the hidden values before each time step of `y (b, t, h)`; `None` if there is one step
/// and they are zero.
fn hidden_before(
    b: &mut Backward,
    y: TensorId,
    h0: Option<TensorId>,
    phase: PassKind,
) -> Result<Option<TensorId>, ShapeError> {
    let shape = b.graph.tensor(y).shape.clone();
    let [rows, t, h] = *shape.dims() else { return Ok(None) };
    let first = h0.map(|h0| b.alias(h0, shape.with_dims(&[rows, 1, h]), phase));
    if t == 1 {
        return Ok(first);
    }
    let all_but_last = Op::Slice { axis: 1, start: 0, length: t - 1 };
    let rest = b.apply(all_but_last, &[y], phase)?;
    let before = match first {
        Some(first) => b.apply(Op::Concat { axis: 1 }, &[first, rest], phase)?,
        None => b.apply(Op::Pad { axis: 1, before: 1, after: 0 }, &[rest], phase)?,
    };
    Ok(Some(before))
}
