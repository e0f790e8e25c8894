//! Gradient rule of ops that are defined outside the crate.

use super::backward::Backward;
use crate::shapes::ShapeError;
use crate::{Builder, CustomNode, Graph, Node, SharedCustomOp};
use potluck_core::TensorId;

/// Adds the custom op's gradient by each input to the gradient of that input.
pub fn custom(
    b: &mut Backward,
    op: &SharedCustomOp,
    node: &Node,
    dy: TensorId,
) -> Result<(), ShapeError> {
    for (index, &target) in node.inputs.iter().enumerate() {
        if b.requires_grad[target.index()] {
            let gradient = gradient_by(b, op, node, dy, index)?;
            b.accumulate_tensor(target, gradient);
        }
    }
    Ok(())
}

/// Custom op's gradient by the input `index`, after a check.
fn gradient_by(
    b: &mut Backward,
    op: &SharedCustomOp,
    node: &Node,
    dy: TensorId,
    index: usize,
) -> Result<TensorId, ShapeError> {
    let first = b.graph.nodes.len();
    let before = fixed_parts(&b.graph);
    let target = node.inputs[index];
    let scope = b.scope_of(node.outputs[0]);
    let phase = b.phase_towards(target);
    let custom_node = CustomNode { inputs: &node.inputs, output: node.outputs[0], dy };
    let mut builder = Builder::resume(std::mem::take(&mut b.graph), phase, &scope);
    let gradient = op.gradient(&mut builder, &custom_node, index);
    b.graph = builder.finish();
    b.requires_grad.resize(b.graph.tensors.len(), false);
    let gradient = gradient?;
    let is_random = b.graph.nodes[first..].iter().any(|node| node.op.is_random());
    let is_more = fixed_parts(&b.graph) != before || is_random;
    match wrong_gradient(&b.graph, target, gradient, is_more) {
        Some(why) => Err(b.refused(node, format!("its gradient by input {index} {why}"))),
        None => Ok(gradient),
    }
}

/// Returns the reason why a custom op's gradient by `target` cannot be used, if there is one;
/// `is_more` is true if the op has added more to the graph than ops without random numbers.
fn wrong_gradient(graph: &Graph, target: TensorId, got: TensorId, is_more: bool) -> Option<String> {
    let got = graph.tensor(got);
    let wanted = graph.tensor(target);
    if is_more {
        return Some(
            "adds an input, a parameter, a block, an output, a carried state, a loss or random \
             numbers, and may only add ops"
                .into(),
        );
    }
    if got.shape == wanted.shape && got.dtype == wanted.dtype {
        return None;
    }
    Some(format!("is of {}, and the input of {}", got.shape, wanted.shape))
}

/// Sizes of those parts of a graph that a gradient must not change.
fn fixed_parts(graph: &Graph) -> [usize; 6] {
    [
        graph.inputs.len(),
        graph.parameters.len(),
        graph.blocks.len(),
        graph.outputs.len(),
        graph.carried.len(),
        usize::from(graph.loss.is_some()),
    ]
}
