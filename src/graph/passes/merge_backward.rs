//! The gradients of a block's parameters in pass B instead of pass W: each is computed as soon as
//! its inputs are, so that these need not be kept until the end of the block.

use std::collections::HashSet;

use crate::{Graph, Node, PassKind};
use potluck_core::TensorId;

/// Moves the nodes of pass W into pass B of their blocks: each after the last node whose results it
/// reads, in their present order, in which they add to gradients. The results have the same bits.
///
/// For devices that run the two passes one after the other. The stages of a pipeline send the
/// gradient of their input before pass W, and do not merge the passes.
pub fn merge_backward(mut graph: Graph) -> Graph {
    let mut nodes = Vec::with_capacity(graph.nodes.len());
    // Within the backward pass, the nodes of a block stand together, nodes of B before nodes of W.
    for pass in graph.nodes.chunk_by(|a, b| block_of(a) == block_of(b)) {
        if block_of(&pass[0]).is_none() {
            nodes.extend_from_slice(pass);
            continue;
        }
        let weights = pass.iter().position(|node| node.phase == PassKind::BackwardWeight);
        let (inputs, weights) = pass.split_at(weights.unwrap_or(pass.len()));
        let mut missing = HashSet::new();
        for node in inputs {
            missing.extend(node.outputs.iter().copied());
        }
        let mut waiting = weights;
        move_ready(&mut waiting, &missing, &mut nodes);
        for node in inputs {
            nodes.push(node.clone());
            for output in &node.outputs {
                missing.remove(output);
            }
            move_ready(&mut waiting, &missing, &mut nodes);
        }
    }
    graph.nodes = nodes;
    graph
}

/// Moves waiting nodes to pass B, up to the first that reads a tensor that is still missing.
fn move_ready(waiting: &mut &[Node], missing: &HashSet<TensorId>, nodes: &mut Vec<Node>) {
    while let [node, rest @ ..] = *waiting
        && !node.inputs.iter().any(|id| missing.contains(id))
    {
        nodes.push(Node { phase: PassKind::BackwardInput, ..node.clone() });
        *waiting = rest;
    }
}

/// Block of a backward node; `None` for a forward node.
fn block_of(node: &Node) -> Option<u32> {
    match node.phase {
        PassKind::Forward => None,
        PassKind::BackwardInput | PassKind::BackwardWeight => Some(node.block),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init, Plan, PlanOptions, Unary, differentiate, fuse};

    /// Three layers in two blocks; both blocks use one of the parameters.
    fn graph() -> Graph {
        let mut b = Builder::new();
        let shared = b.parameter("shared", &[8, 8], Init::Ones);
        b.block("one");
        let x = b.input("x", &[1, 8]);
        let w = b.parameter("w", &[8, 8], Init::Ones);
        let bias = b.parameter("bias", &[8], Init::Ones);
        let y = b.linear(x, w, Some(bias)).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        let y = b.linear(y, shared, None).unwrap();
        b.block("two");
        let y = b.unary(y, Unary::Gelu).unwrap();
        let y = b.linear(y, shared, None).unwrap();
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(y, target).unwrap();
        differentiate(b.finish()).unwrap()
    }

    #[test]
    fn gradients_of_parameters_come_as_soon_as_they_can() {
        for apart in [graph(), fuse(graph())] {
            let merged = merge_backward(apart.clone());
            assert_eq!(merged.nodes.len(), apart.nodes.len());
            assert!(merged.nodes.iter().all(|node| node.phase != PassKind::BackwardWeight));
            // The same nodes; nodes of W keep their order, and so do the others.
            let weights: Vec<&Node> =
                apart.nodes.iter().filter(|n| n.phase == PassKind::BackwardWeight).collect();
            let is_weight = |node: &Node| weights.iter().any(|w| w.outputs == node.outputs);
            let order = |graph: &Graph, of_weights: bool| -> Vec<Vec<TensorId>> {
                let nodes = graph.nodes.iter().filter(|node| is_weight(node) == of_weights);
                nodes.map(|node| node.outputs.clone()).collect()
            };
            for of_weights in [false, true] {
                assert_eq!(order(&merged, of_weights), order(&apart, of_weights));
            }
            // The inputs of each node are computed before it. A gradient of a parameter stands
            // directly behind the last node that it waits for, or behind another gradient of a
            // parameter.
            for (at, node) in merged.nodes.iter().enumerate() {
                for input in &node.inputs {
                    let by = merged.nodes.iter().position(|other| other.outputs.contains(input));
                    assert!(by.is_none_or(|by| by < at), "{}", node.op);
                }
                if is_weight(node) && block_of(&merged.nodes[at - 1]) == block_of(node) {
                    let before = &merged.nodes[at - 1];
                    let reads = before.outputs.iter().any(|output| node.inputs.contains(output));
                    assert!(reads || is_weight(before), "{}", node.op);
                }
            }
        }
    }

    #[test]
    fn a_block_is_one_segment_of_the_backward_pass() {
        let plan = Plan::new(merge_backward(graph()), PlanOptions::new(4));
        let order: Vec<String> =
            plan.segments.iter().map(|s| format!("{}{}", s.phase, s.block)).collect();
        assert_eq!(order, ["F0", "F1", "B1", "B0"]);
        let apart = Plan::new(graph(), PlanOptions::new(4));
        let completed = |plan: &Plan| -> Vec<Vec<_>> {
            plan.segments.iter().map(|s| s.completes.clone()).filter(|c| !c.is_empty()).collect()
        };
        assert_eq!(completed(&plan), completed(&apart));
    }
}
