//! Equal blocks of a model: the same ops on the same shapes, which take the same time.

use std::collections::HashMap;

use potluck_core::{DType, Shape, TensorId};
use potluck_graph::{Accumulation, Graph, Op, PassKind, Role, RunsIn};

/// Kinds of a model's blocks: blocks of one kind are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockKinds {
    /// By block: its kind, numbered in the order of the model.
    pub of_block: Vec<usize>,
    /// By kind: its first block.
    pub first: Vec<u32>,
}

/// Node of a block without the names of its tensors.
#[derive(PartialEq)]
struct NodeForm {
    op: Op,
    phase: PassKind,
    accumulate: Accumulation,
    when: RunsIn,
    inputs: Vec<TensorForm>,
    outputs: Vec<TensorForm>,
}

/// Tensor that a node of a block uses.
#[derive(PartialEq)]
struct TensorForm {
    /// Number in the block of the tensor that owns the elements, in the order of first use.
    number: usize,
    shape: Shape,
    dtype: DType,
    role: std::mem::Discriminant<Role>,
}

impl BlockKinds {
    /// Returns the kinds of a graph's blocks. Blocks are equal if their nodes are the same ops in
    /// the same order, on the same pattern of tensors with the same shapes and roles. Sites of
    /// random numbers may differ: they do not change times.
    pub fn of(graph: &Graph) -> Self {
        let mut forms: Vec<Vec<NodeForm>> = Vec::new();
        let mut kinds = Self { of_block: Vec::new(), first: Vec::new() };
        for block in 0..graph.blocks.len() as u32 {
            let form = block_form(graph, block);
            let known = forms.iter().position(|known| *known == form);
            kinds.of_block.push(known.unwrap_or(forms.len()));
            if known.is_none() {
                forms.push(form);
                kinds.first.push(block);
            }
        }
        kinds
    }
}

fn block_form(graph: &Graph, block: u32) -> Vec<NodeForm> {
    let mut numbers: HashMap<TensorId, usize> = HashMap::new();
    let mut nodes = Vec::new();
    for node in &graph.nodes {
        if node.block == block {
            nodes.push(NodeForm {
                op: node.op.without_site(),
                phase: node.phase,
                accumulate: node.accumulate,
                when: node.when,
                inputs: tensor_forms(graph, &node.inputs, &mut numbers),
                outputs: tensor_forms(graph, &node.outputs, &mut numbers),
            });
        }
    }
    nodes
}

/// Forms of a node's tensors; `numbers` numbers the tensors of the block so far.
fn tensor_forms(
    graph: &Graph,
    tensors: &[TensorId],
    numbers: &mut HashMap<TensorId, usize>,
) -> Vec<TensorForm> {
    let mut forms = Vec::with_capacity(tensors.len());
    for id in tensors {
        let tensor = graph.tensor(*id);
        let root = graph.root(*id);
        let next = numbers.len();
        forms.push(TensorForm {
            number: *numbers.entry(root).or_insert(next),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            role: std::mem::discriminant(&graph.tensor(root).role),
        });
    }
    forms
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::model::gpt::{GptConfig, gpt};
    use potluck_graph::{Unary, differentiate, fuse};

    fn graph(layers: usize) -> Graph {
        let config = GptConfig {
            vocabulary: 65,
            context: 8,
            positions: 8,
            layers,
            heads: 2,
            width: 16,
            bias: true,
            dropout: 0.1,
            tie: false,
            activation: Unary::Gelu,
        };
        differentiate(gpt(&config).unwrap()).unwrap()
    }

    #[test]
    fn a_gpt_of_four_layers_has_three_kinds_of_blocks() {
        let kinds = BlockKinds { of_block: vec![0, 1, 1, 1, 1, 2], first: vec![0, 1, 5] };
        assert_eq!(BlockKinds::of(&graph(4)), kinds);
        assert_eq!(BlockKinds::of(&fuse(graph(4))).of_block[1..4], [1, 1, 1]);
    }

    #[test]
    fn a_block_with_another_attribute_shape_or_use_is_of_another_kind() {
        let edits: [fn(&mut Graph, usize); 3] = [
            |graph, node| graph.nodes[node].accumulate = Accumulation::only(1),
            |graph, node| {
                let output = graph.nodes[node].outputs[0];
                graph.tensors[output.index()].shape = Shape::batched(&[3, 5]);
            },
            |graph, node| {
                let first = graph.nodes[node].inputs[0];
                graph.nodes[node].inputs[1] = first;
            },
        ];
        for (index, edit) in edits.into_iter().enumerate() {
            let mut graph = graph(4);
            let of_third = |node: &potluck_graph::Node| {
                node.block == 3 && matches!(node.op, Op::MatMul { .. })
            };
            let node = graph.nodes.iter().position(of_third).unwrap();
            edit(&mut graph, node);
            let kinds = BlockKinds::of(&graph);
            assert_ne!(kinds.of_block[3], kinds.of_block[2], "edit {index}");
            assert_eq!(kinds.of_block[1], kinds.of_block[2], "edit {index}");
        }
    }
}
