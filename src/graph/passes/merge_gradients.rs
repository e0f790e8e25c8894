//! Gradients of two parameters that read the same tensors, in one node: the kernel reads the
//! tensors once for both.

use super::fuse::Fusion;
use crate::op::{NormBackward, Op};
use crate::{Accumulation, Graph, Node, Role};
use potluck_core::TensorId;

/// Names and reasons of the rules of this pass.
pub(super) const RULES: [(&str, &str); 2] = [BIAS, NORM];
const BIAS: (&str, &str) = (
    "weight + bias gradient",
    "the sums of a bias are over rows that the product of the weight reads",
);
const NORM: (&str, &str) = (
    "norm + parameter gradients",
    "the gradient of a norm by its input reads what those of its parameters sum",
);

/// Merges the gradient of the bias of each linear layer into its weight's gradient; returns the
/// fusions. The merged node has the position of the product, and adds to both gradients.
pub(super) fn merge_bias_sums(graph: &mut Graph) -> Vec<Fusion> {
    let mut merged = Vec::new();
    for at in 0..graph.nodes.len() {
        let Some(sum) = bias_sum(graph, at) else { continue };
        let bias = graph.nodes[sum].outputs[0];
        let product = &mut graph.nodes[at];
        product.op = Op::LinearWeightGrad;
        product.outputs.push(bias);
        product.accumulate = product.op.accumulates();
        let dy = product.inputs[0];
        // The emptied node stays in the list until the end, so that positions stay valid.
        graph.nodes[sum].outputs.clear();
        let value = graph.tensor(dy).shape.clone();
        merged.push(Fusion { rule: BIAS.0, value, moves: 1 });
    }
    graph.nodes.retain(|node| !node.outputs.is_empty());
    merged
}

/// Merges the gradients of the parameters of each layer or RMS norm into the gradient of its input,
/// to which another gradient may have been added; returns the fusions. The merged node has the
/// position of the gradient of the input, in pass B.
pub(super) fn merge_norm_gradients(graph: &mut Graph) -> Vec<Fusion> {
    let mut merged = Vec::new();
    for at in 0..graph.nodes.len() {
        let Some(options) = norm_gradient(&graph.nodes[at].op) else { continue };
        let Some(sums) = norm_sums(graph, at) else { continue };
        let parameters = std::mem::take(&mut graph.nodes[sums].outputs);
        let op = Op::NormBackward(NormBackward { bias: parameters.len() == 2, ..options });
        let node = &mut graph.nodes[at];
        node.accumulate = op.accumulates();
        node.op = op;
        node.outputs.extend(parameters);
        let value = graph.tensor(graph.nodes[at].inputs[3]).shape.clone();
        // x and dy are read once less.
        merged.push(Fusion { rule: NORM.0, value, moves: 2 });
    }
    graph.nodes.retain(|node| !node.outputs.is_empty());
    merged
}

/// Attributes of the merged op of a gradient of a norm by its input, without a bias.
fn norm_gradient(op: &Op) -> Option<NormBackward> {
    let centered = match op.root_op() {
        Op::LayerNormGrad => true,
        Op::RmsNormGrad => false,
        _ => return None,
    };
    Some(NormBackward { centered, bias: false, adds: op.root_op() != op })
}

/// Returns the position of the node with the gradients of the parameters of the norm whose gradient
/// by its input the node `at` computes, if it only adds to gradients of parameters.
fn norm_sums(graph: &Graph, at: usize) -> Option<usize> {
    let norm = &graph.nodes[at];
    let [x, _, stats, dy] = *norm.inputs.first_chunk()?;
    let read = [x, stats, dy].map(|id| graph.root(id));
    graph.nodes.iter().position(|node| {
        let sums = matches!(node.op, Op::LayerNormAffineGrad | Op::LayerNormWeightGrad);
        sums && adds_to_parameters(graph, node)
            && node.inputs.iter().map(|id| graph.root(*id)).eq(read)
            && (node.block, node.when) == (norm.block, norm.when)
    })
}

/// Returns the position of the node with the gradient of the bias of the linear layer whose weight
/// gradient the node `at` computes: it sums the rows of the same `dy`.
fn bias_sum(graph: &Graph, at: usize) -> Option<usize> {
    let product = &graph.nodes[at];
    let is_product = product.op == Op::MatMul { transpose_a: true, transpose_b: false };
    if !is_product || !adds_to_parameters(graph, product) {
        return None;
    }
    let dy = product.inputs[0];
    let rows = graph.root(dy);
    let columns = graph.tensor(dy).shape.last();
    if graph.tensor(dy).shape.rank() != 2 {
        return None;
    }
    graph.nodes.iter().position(|node| {
        matches!(node.op, Op::Sum { first: 0, .. })
            && node.outputs.first().is_some_and(|id| sums_to(graph, *id, columns))
            && graph.root(node.inputs[0]) == rows
            && adds_to_parameters(graph, node)
            && node.phase == product.phase
            && node.block == product.block
            && node.when == product.when
    })
}

/// Returns true if a tensor is a row of this number of columns.
fn sums_to(graph: &Graph, id: TensorId, columns: usize) -> bool {
    graph.tensor(id).shape.dims() == [columns]
}

/// Returns true if a node has outputs, and adds all of them to gradients of parameters.
fn adds_to_parameters(graph: &Graph, node: &Node) -> bool {
    let count = node.outputs.len();
    let mut outputs = node.outputs.iter();
    count > 0
        && node.accumulate == Accumulation::all(count)
        && outputs.all(|id| matches!(graph.tensor(*id).role, Role::Gradient(_)))
}
