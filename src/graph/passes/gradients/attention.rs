//! Gradient rule of attention.

use super::backward::Backward;
use crate::op::Op;
use crate::shapes::ShapeError;
use crate::{AttentionOptions, Node};
use potluck_core::TensorId;

/// Adds the gradients by the tensors with queries, keys and values, which one op computes.
pub fn attention(
    b: &mut Backward,
    options: AttentionOptions,
    node: &Node,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let (tensors, samples) = node.inputs.split_at(options.tensors());
    let Some(phase) = b.first_phase_towards(tensors) else { return Ok(()) };
    let inputs = [tensors, &node.outputs, &[dy], samples].concat();
    let gradients = b.apply_all(Op::AttentionGrad(options), &inputs, phase)?;
    for (tensor, gradient) in tensors.iter().zip(gradients) {
        b.accumulate_tensor(*tensor, gradient);
    }
    Ok(())
}

pub fn rotary(
    b: &mut Backward,
    inverse: bool,
    node: &Node,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let x = &node.inputs;
    if b.requires_grad[x[1].index()] {
        let why = "its table of cosines and sines has no gradient; stop the table's";
        return Err(b.refused(node, why.into()));
    }
    b.accumulate_op(x[0], Op::Rotary { inverse: !inverse }, &[dy, x[1]])
}
