//! Gradient rules of the ops between the ranks of a tensor group.

use super::backward::Backward;
use crate::op::{Op, Reduction};
use crate::shapes::ShapeError;
use crate::{Accumulation, Node};
use potluck_core::TensorId;

/// Adds the sum of the ranks' gradients `dy` to the gradient of `x`.
pub fn spread(b: &mut Backward, x: TensorId, dy: TensorId) -> Result<(), ShapeError> {
    if !b.requires_grad[x.index()] {
        return Ok(());
    }
    let shape = b.graph.tensor(dy).shape.clone();
    let sum = b.graph.add_alias(dy, shape);
    b.requires_grad.push(false);
    let op = Op::AllReduce(Reduction::Sum);
    b.graph.push_node(op, &[dy], vec![sum], Accumulation::NONE, b.phase_towards(x));
    b.accumulate_tensor(x, sum);
    Ok(())
}

pub fn all_reduce(
    b: &mut Backward,
    reduction: Reduction,
    node: &Node,
    dy: TensorId,
) -> Result<(), ShapeError> {
    match reduction {
        // The gradient of each rank's term is the gradient of the sum.
        Reduction::Sum | Reduction::SumBf16 => {
            b.accumulate_tensor(node.inputs[0], dy);
            Ok(())
        }
        Reduction::CrossEntropy { .. } => {
            let why = "the loss depends on its parts otherwise than by their sum".into();
            Err(b.refused(node, why))
        }
    }
}
