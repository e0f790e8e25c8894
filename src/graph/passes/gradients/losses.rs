//! Gradient rules of losses.

use super::backward::Backward;
use crate::op::{Binary, Op, Reduction};
use crate::shapes::ShapeError;
use crate::{Graph, Node, PassKind};
use potluck_core::TensorId;

/// Adds the gradients of the op whose parts are the loss, which is their sum.
pub fn root(b: &mut Backward, node: &Node) -> Result<(), ShapeError> {
    for (target, op, inputs) in gradients_of_sum(&b.graph, node) {
        b.accumulate_op(target, op, &inputs)?;
    }
    Ok(())
}

/// Adds the gradients of an op with the outputs of a loss, of whose parts `(n, 2)` the loss
/// depends otherwise than by their sum: those of the sum, times the gradient of each part. The
/// counts are constant.
pub fn parts(b: &mut Backward, node: &Node, dparts: TensorId) -> Result<(), ShapeError> {
    for (target, op, inputs) in gradients_of_sum(&b.graph, node) {
        if !b.requires_grad[target.index()] {
            continue;
        }
        let phase = b.phase_towards(target);
        let of_sum = b.apply(op, &inputs, phase)?;
        let factors = factors(b, dparts, target, phase)?;
        let product = b.apply(Op::Binary(Binary::Mul), &[of_sum, factors], phase)?;
        b.accumulate_tensor(target, product);
    }
    Ok(())
}

/// Returns the gradient of each row's loss, the first column of `dparts`, repeated over the row of
/// `target`.
fn factors(
    b: &mut Backward,
    dparts: TensorId,
    target: TensorId,
    phase: PassKind,
) -> Result<TensorId, ShapeError> {
    let shape = b.graph.tensor(target).shape.clone();
    let (rows, of_row) = shape.dims().split_at(1);
    let losses = b.apply(Op::Slice { axis: 1, start: 0, length: 1 }, &[dparts], phase)?;
    let losses = b.alias(losses, shape.with_dims(rows), phase);
    if of_row.is_empty() {
        return Ok(losses);
    }
    let wide = Op::Broadcast { first: 1, dims: of_row.to_vec(), batched: false };
    b.apply(wide, &[losses], phase)
}

/// Returns, for each input of floats of an op with the outputs of a loss, the op and the inputs
/// that give the gradient of the sum of the op's parts by it.
fn gradients_of_sum(graph: &Graph, node: &Node) -> Vec<(TensorId, Op, Vec<TensorId>)> {
    let x = &node.inputs;
    match node.op {
        Op::CrossEntropy { first } => {
            let classes = first + graph.tensor(x[0]).shape.last();
            let op = Op::CrossEntropyGrad { first, classes };
            vec![(x[0], op, vec![x[0], x[1], node.outputs[1]])]
        }
        Op::AllReduce(Reduction::CrossEntropy { classes }) => {
            let of_rank = graph.nodes.iter().find(|of_rank| of_rank.outputs == *x);
            let Some(Node { op: Op::CrossEntropy { first }, inputs, .. }) = of_rank else {
                return Vec::new();
            };
            let op = Op::CrossEntropyGrad { first: *first, classes };
            vec![(inputs[0], op, vec![inputs[0], inputs[1], node.outputs[1]])]
        }
        Op::SquaredError => vec![
            (x[0], Op::SquaredErrorGrad, vec![x[0], x[1]]),
            (x[1], Op::SquaredErrorGrad, vec![x[1], x[0]]),
        ],
        _ => Vec::new(),
    }
}
