//! Gradient rules of losses.

use super::backward::Backward;
use crate::elements::{Binary, Unary};
use crate::op::{LossClasses, Op, Reduction};
use crate::shapes::ShapeError;
use crate::{Accumulation, Graph, Node, PassKind, RunsIn};
use potluck_core::TensorId;

/// Adds the gradients of the op whose parts the loss sums.
pub fn root(b: &mut Backward, node: &Node) -> Result<(), ShapeError> {
    if let Op::LinearCrossEntropy { rows, classes } = node.op {
        let by_weight = b.requires_grad[node.inputs[1].index()];
        let op = Op::LinearCrossEntropyPass { rows, classes, by_weight };
        return linear_pass(b, op, node);
    }
    if let (Op::Concat { .. }, &[losses, counts, ..]) = (&node.op, &node.inputs[..]) {
        return rows(b, losses, counts);
    }
    let joined = joined_linear(&b.graph, node);
    if !joined.is_empty() {
        for LinearPart { inputs, rows, classes } in joined {
            let by_weight = b.requires_grad[inputs[1].index()];
            let op = Op::LinearCrossEntropyGrad { rows, classes, by_weight };
            linear_gradients(b, op, &[&inputs[..], &node.outputs[1..]].concat())?;
        }
        return Ok(());
    }
    for (target, op, inputs) in gradients_of_sum(&b.graph, node) {
        b.accumulate_op(target, op, &inputs)?;
    }
    Ok(())
}

/// Adds the gradient of the sum of losses `(n, 1)`, which is 1. It is computed as the gradient
/// 2 (1 - 1/2) of a squared error, because only gradients of losses get the loss scale of mixed
/// precision. `counts (n, 1)` are the counts of the losses.
fn rows(b: &mut Backward, losses: TensorId, counts: TensorId) -> Result<(), ShapeError> {
    if !b.requires_grad[losses.index()] {
        return Ok(());
    }
    let phase = b.phase_towards(losses);
    let ones = if b.graph.losses_of_samples() == Some(losses) {
        counts
    } else {
        let zeros = b.apply(Op::Unary(Unary::Scale(0.0)), &[counts], phase)?;
        b.apply(Op::Unary(Unary::Offset(1.0)), &[zeros], phase)?
    };
    let halves = b.apply(Op::Unary(Unary::Scale(0.5)), &[ones], phase)?;
    b.accumulate_op(losses, Op::SquaredErrorGrad, &[ones, halves])
}

/// Adds the node that computes a linear cross-entropy, the loss of the graph, together with its
/// gradient, and its sum. The nodes of the forward pass run outside of training only.
fn linear_pass(b: &mut Backward, pass: Op, node: &Node) -> Result<(), ShapeError> {
    let parts = node.outputs[0];
    for of_loss in &mut b.graph.nodes {
        if of_loss.outputs == node.outputs || of_loss.inputs.contains(&parts) {
            of_loss.when = RunsIn::Evaluation;
        }
    }
    let new = linear_gradients(b, pass, &node.inputs)?;
    if let Some(loss) = b.graph.loss {
        let sum = Op::Sum { first: 0, last: 0 };
        let accumulate = Accumulation::all(1);
        b.graph.push_node(sum, &[new[1]], vec![loss], accumulate, PassKind::BackwardInput);
    }
    Ok(())
}

/// Adds an op with the outputs `dx, ..` and, if the weight has a gradient, `dweight`, and returns
/// them. The gradient of a weight that is a parameter is accumulated in place.
fn linear_gradients(
    b: &mut Backward,
    op: Op,
    inputs: &[TensorId],
) -> Result<Vec<TensorId>, ShapeError> {
    let x = inputs[0];
    let weight = inputs[1];
    let accumulates = op.accumulates();
    let mut outputs = b.apply_all(op, inputs, PassKind::BackwardInput)?;
    if let Some(dweight) = (0..outputs.len()).find(|output| accumulates.has(*output)) {
        if let Some(gradient) = b.parameter_gradient(weight)
            && let Some(node) = b.graph.nodes.last_mut()
        {
            outputs[dweight] = gradient;
            node.outputs[dweight] = gradient;
            node.accumulate = accumulates;
        } else {
            b.accumulate_tensor(weight, outputs[dweight]);
        }
    }
    b.accumulate_tensor(x, outputs[0]);
    Ok(outputs)
}

/// Linear cross-entropy over a range of classes: `x, weight, targets`, its rows per chunk, and its
/// classes.
struct LinearPart {
    inputs: Vec<TensorId>,
    rows: usize,
    classes: LossClasses,
}

/// Returns the linear cross-entropies of this rank that a node joins to the loss over all classes:
/// by a reduction over the ranks of a tensor group, or a join over slices of a table; none if the
/// node is neither.
fn joined_linear(graph: &Graph, node: &Node) -> Vec<LinearPart> {
    let mut parts = Vec::new();
    let mut joins = vec![node];
    while let Some(join) = joins.pop() {
        if !join.op.joins_losses() {
            continue;
        }
        for outputs in join.inputs.chunks(2) {
            let Some(part) = graph.nodes.iter().find(|part| part.outputs == outputs) else {
                continue;
            };
            if let Op::LinearCrossEntropy { rows, classes } = part.op {
                parts.push(LinearPart { inputs: part.inputs.clone(), rows, classes });
            } else {
                joins.push(part);
            }
        }
    }
    parts
}

/// Refuses a linear cross-entropy on which the loss does not only depend by its sum.
pub fn linear_parts(b: &Backward, node: &Node) -> Result<(), ShapeError> {
    let why = "the loss depends on its parts otherwise than by their sum".into();
    Err(b.refused(node, why))
}

/// Adds the gradients of an op with the outputs of a loss whose parts `(n, 2)` are not only summed:
/// the gradients of the sum, times the gradient `dparts` of each part. The counts are constant.
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
        Op::CrossEntropy(classes) => {
            let op = Op::CrossEntropyGrad(classes);
            vec![(x[0], op, vec![x[0], x[1], node.outputs[1]])]
        }
        Op::AllReduce(Reduction::CrossEntropy { .. }) => {
            let of_rank = graph.nodes.iter().find(|of_rank| of_rank.outputs == *x);
            let Some(Node { op: Op::CrossEntropy(classes), inputs, .. }) = of_rank else {
                return Vec::new();
            };
            let op = Op::CrossEntropyGrad(*classes);
            vec![(inputs[0], op, vec![inputs[0], inputs[1], node.outputs[1]])]
        }
        Op::SquaredError => vec![
            (x[0], Op::SquaredErrorGrad, vec![x[0], x[1]]),
            (x[1], Op::SquaredErrorGrad, vec![x[1], x[0]]),
        ],
        _ => Vec::new(),
    }
}
