//! Gradient rules of normalizations.

use super::backward::Backward;
use crate::elements::Unary;
use crate::op::Op;
use crate::shapes::ShapeError;
use crate::{Accumulation, Node, PassKind, Role};
use potluck_core::TensorId;

pub fn layer_norm(b: &mut Backward, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
    let x = &node.inputs;
    let stats = node.outputs[1];
    b.accumulate_op(x[0], Op::LayerNormGrad, &[x[0], x[1], stats, dy])?;
    affine(b, x[1], x.get(2).copied(), &[x[0], stats, dy])
}

/// Adds to the gradients of weight and bias of a normalization, given its `x, stats, dy`: from
/// one reading of `dy` if both are parameters, so that the kernel adds to both in place.
fn affine(
    b: &mut Backward,
    weight: TensorId,
    bias: Option<TensorId>,
    inputs: &[TensorId; 3],
) -> Result<(), ShapeError> {
    if let Some(bias) = bias
        && b.both_gradients([weight, bias]).is_some()
    {
        return b.accumulate_pair([weight, bias], Op::LayerNormAffineGrad, inputs);
    }
    b.accumulate_op(weight, Op::LayerNormWeightGrad, inputs)?;
    if let Some(bias) = bias {
        b.accumulate_reduced(bias, inputs[2])?;
    }
    Ok(())
}

pub fn rms_norm(b: &mut Backward, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
    let x = &node.inputs;
    let stats = node.outputs[1];
    b.accumulate_op(x[0], Op::RmsNormGrad, &[x[0], x[1], stats, dy])?;
    b.accumulate_op(x[1], Op::LayerNormWeightGrad, &[x[0], stats, dy])
}

pub fn group_norm(
    b: &mut Backward,
    groups: usize,
    node: &Node,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let x = &node.inputs;
    let stats = node.outputs[1];
    b.accumulate_op(x[0], Op::GroupNormGrad { groups }, &[x[0], x[1], stats, dy])?;
    b.accumulate_pair([x[1], x[2]], Op::GroupNormAffineGrad { groups }, &[x[0], stats, dy])
}

pub fn softmax(b: &mut Backward, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
    b.accumulate_op(node.inputs[0], Op::SoftmaxGrad, &[node.outputs[0], dy])
}

/// Adds the gradients of a batch normalization. The sums for weight and bias are computed in the
/// pass of activations, because `dx` needs them.
pub fn batch_norm(b: &mut Backward, node: &Node, dy: TensorId) -> Result<(), ShapeError> {
    let x = &node.inputs;
    let stats = node.outputs[1];
    let sums = [x[0], stats, dy];
    let sums = b.apply_all(Op::BatchNormAffineGrad, &sums, PassKind::BackwardInput)?;
    let inputs = [x[0], x[1], stats, dy, sums[0], sums[1]];
    b.accumulate_op(x[0], Op::BatchNormGrad, &inputs)?;
    b.accumulate_tensor(x[1], sums[0]);
    b.accumulate_tensor(x[2], sums[1]);
    Ok(())
}

/// Adds the statistics of a batch normalization to the gradients of its running averages, as
/// [`crate::ParameterKind::State`] defines these: also without a gradient by its output.
pub fn running_averages(b: &mut Backward, node: &Node) {
    for (running, sum) in node.inputs[3..].iter().zip(&node.outputs[2..]) {
        if !is_state(b, *running) {
            continue;
        }
        if let Some(gradient) = b.parameter_gradient(*running) {
            b.graph.push_node(
                Op::Unary(Unary::Scale(-1.0)),
                &[*sum],
                vec![gradient],
                Accumulation::all(1),
                PassKind::BackwardWeight,
            );
        }
    }
}

fn is_state(b: &Backward, tensor: TensorId) -> bool {
    match b.graph.tensor(tensor).role {
        Role::Parameter(id) => b.graph.parameters[id.index()].kind.is_state(),
        _ => false,
    }
}
