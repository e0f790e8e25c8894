//! Tensors that the stages of a pipeline send to each other.

use std::collections::BTreeSet;

use super::{Graph, PassKind, Role};
use potluck_core::TensorId;

/// Activation, or gradient of one, that one stage computes and another one reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Crossing {
    /// The tensor that holds the elements, not an alias.
    pub tensor: TensorId,
    /// Pass that computes it.
    pub phase: PassKind,
    /// Stage that computes it.
    pub from: u32,
    /// Stage that reads it.
    pub to: u32,
}

/// Returns the tensors that cross a cut, given the stage of each block: each once per stage that
/// reads it and does not compute it, in the order of the nodes that compute them, then of the
/// stages that read them.
pub fn crossings(graph: &Graph, stage_of_block: &[u32]) -> Vec<Crossing> {
    let mut writer = vec![None; graph.tensors.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        for &output in &node.outputs {
            let known = graph.tensor(output);
            if known.role == Role::Activation && known.alias_of.is_none() {
                writer[output.index()] = Some((index, stage_of_block[node.block as usize]));
            }
        }
    }
    let mut crossings = BTreeSet::new();
    for node in &graph.nodes {
        let to = stage_of_block[node.block as usize];
        for &input in &node.inputs {
            let tensor = graph.root(input);
            if let Some((index, from)) = writer[tensor.index()].filter(|(_, from)| *from != to) {
                crossings.insert((index, to, tensor.0, from));
            }
        }
    }
    let mut ordered = Vec::with_capacity(crossings.len());
    for (writer, to, tensor, from) in crossings {
        let phase = graph.nodes[writer].phase;
        ordered.push(Crossing { tensor: TensorId(tensor), phase, from, to });
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::tests::chain;

    fn stages(crossings: &[Crossing]) -> Vec<(u32, u32)> {
        crossings.iter().map(|crossing| (crossing.from, crossing.to)).collect()
    }

    /// The skip connection goes from block 0 to block 2. Its gradient equals the sum's, and goes
    /// from block 3, which computes it, to both.
    #[test]
    fn a_tensor_travels_once_to_each_stage_that_needs_it() {
        let graph = chain();
        let found = crossings(&graph, &[0, 1, 2, 3]);
        let expected = [(0, 2), (0, 1), (1, 2), (2, 3), (3, 0), (3, 2), (2, 1), (1, 0)];
        assert_eq!(stages(&found), expected);
        assert_eq!(found[4].tensor, found[5].tensor);
        let are_forward = found.iter().map(|crossing| crossing.phase == PassKind::Forward);
        assert!(are_forward.eq((0..8).map(|index| index < 4)));
        assert!(found.iter().all(|c| graph.root(c.tensor) == c.tensor));
        assert_eq!(stages(&crossings(&graph, &[0, 0, 1, 1])), [(0, 1), (0, 1), (1, 0), (1, 0)]);
        assert_eq!(crossings(&graph, &[7; 4]), []);
    }

    /// Two chunks of a stage: what block 0 gives to block 2 stays.
    #[test]
    fn chunks_of_a_stage_do_not_send_each_other() {
        let found = crossings(&chain(), &[0, 1, 0, 1]);
        assert_eq!(stages(&found), [(0, 1), (1, 0), (0, 1), (1, 0), (0, 1), (1, 0)]);
    }
}
