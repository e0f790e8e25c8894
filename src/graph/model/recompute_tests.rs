//! Recomputation in the models: what is computed again, what is kept, what ranks of a tensor group
//! sum again, and what memory it takes.

use std::cmp::Reverse;

use super::{AttentionBias, GptConfig, LlamaConfig, RnnConfig, gpt, llama, rnn};
use crate::passes::recompute::tests::{again, assert_planned, sums, trained};
use crate::print::MemoryUsage;
use crate::{
    Cell, Graph, ModelGraph, Node, PassKind, Plan, PlanOptions, Recompute, RotaryAngles,
    RotaryScaling, Unary,
};
use potluck_core::{DType, TensorId};

const BOTH: [Recompute; 2] = [Recompute::Blocks, Recompute::Selective];

fn tiny() -> GptConfig {
    GptConfig {
        vocabulary: 70,
        context: 4,
        positions: 4,
        layers: 2,
        heads: 4,
        width: 32,
        bias: true,
        dropout: 0.1,
        tie: true,
        activation: Unary::Gelu,
    }
}

fn tiny_gpt(dropout: f32, layers: usize) -> Graph {
    gpt(&GptConfig { dropout, layers, ..tiny() }).unwrap()
}

fn tiny_llama() -> Graph {
    let config = LlamaConfig {
        vocabulary: 70,
        context: 4,
        layers: 2,
        heads: 6,
        kv_heads: 3,
        head_width: 4,
        width: 24,
        mlp_width: 96,
        norm_eps: 1e-5,
        rotary: RotaryAngles { theta: 100.0, scaling: RotaryScaling::Linear { factor: 2.0 } },
        attention_bias: AttentionBias::Qkv,
        qk_norm: true,
        no_rope_every: 0,
        tie: true,
    };
    llama(&config).unwrap()
}

fn is_copy(graph: &Graph, node: &Node) -> bool {
    graph.tensor(node.outputs[0]).repeats.is_some()
}

/// The copies stand before the backward nodes of their block, which all read the copies.
#[test]
fn copies_are_their_originals_on_tensors_of_their_own() {
    for forward in [tiny_gpt(0.1, 2), tiny_llama()] {
        for recompute in BOTH {
            let before = trained(forward.clone(), true, Recompute::None);
            let graph = trained(forward.clone(), true, recompute);
            assert_planned(&graph);
            assert!(graph.repeated_nodes().count() > 0);
            assert!(graph.forward_nodes().eq(before.forward_nodes()));
            assert_eq!(graph.read_by_caller().count(), before.read_by_caller().count());
            let original = |id: &TensorId| graph.tensor(*id).repeats.unwrap_or(*id);
            let copies = graph.nodes.iter().filter(|node| is_copy(&graph, node));
            for node in copies {
                let outputs: Vec<TensorId> = node.outputs.iter().map(original).collect();
                let same = graph.nodes.iter().find(|node| node.outputs == outputs).unwrap();
                let inputs: Vec<TensorId> = node.inputs.iter().map(original).collect();
                assert_eq!((&node.op, &inputs), (&same.op, &same.inputs));
                assert_eq!((same.phase, same.block), (PassKind::Forward, node.block));
                assert_eq!(node.phase, PassKind::BackwardInput);
            }
            // All other nodes are unchanged.
            let others = graph.nodes.iter().filter(|node| !is_copy(&graph, node));
            let others = others.map(|node| Node {
                inputs: node.inputs.iter().map(original).collect(),
                ..node.clone()
            });
            assert_eq!(others.collect::<Vec<_>>(), before.nodes);
            let backward = graph.nodes.iter().filter(|node| node.phase != PassKind::Forward);
            let order = |node: &Node| (Reverse(node.block), !is_copy(&graph, node), node.phase);
            assert!(backward.is_sorted_by_key(order));
        }
    }
}

/// But for the block with the loss, and results of products if these are kept.
#[test]
fn a_backward_pass_reads_nothing_that_its_block_has_kept() {
    for forward in [tiny_gpt(0.1, 3), tiny_llama()] {
        for recompute in BOTH {
            let graph = trained(forward.clone(), true, recompute);
            let loss_block = graph.blocks.len() as u32 - 1;
            let mut kept = 0;
            for node in graph.nodes.iter().filter(|node| node.phase != PassKind::Forward) {
                for input in &node.inputs {
                    let root = graph.root(*input);
                    let mut writers = graph.forward_nodes();
                    let Some(writer) = writers.find(|node| node.outputs.contains(&root)) else {
                        continue;
                    };
                    let is_kept = recompute == Recompute::Selective
                        && writer.op.root_op().is_costly()
                        && writer.block == node.block;
                    kept += usize::from(is_kept);
                    let is_other = writer.block != node.block;
                    assert!(is_other || is_kept || node.block == loss_block, "{}", writer.op);
                }
            }
            assert_eq!(kept > 0, recompute == Recompute::Selective);
        }
    }
}

/// The state that passes to the next step is a slice of a recomputed tensor.
#[test]
fn a_recurrent_layer_carries_the_state_of_its_forward_pass() {
    let config = RnnConfig {
        vocabulary: 9,
        context: 3,
        layers: 2,
        width: 8,
        cell: Cell::Lstm,
        dropout: 0.0,
        stateful: true,
    };
    let forward = rnn(&config).unwrap();
    let graph = trained(forward.clone(), true, Recompute::Blocks);
    assert_eq!(graph.carried, forward.carried);
    assert_planned(&graph);
    assert!(again(&graph, 1).contains(&"lstm".to_string()));
    for carried in &graph.carried {
        let computes = |node: &&Node| node.outputs.contains(&graph.root(carried.output));
        let writers = graph.nodes.iter().filter(computes);
        assert_eq!(writers.map(|node| node.phase).collect::<Vec<_>>(), [PassKind::Forward]);
    }
    let kept = trained(forward, true, Recompute::Selective);
    assert!(!kept.repeated_nodes().any(|node| node.op.to_string() == "lstm"));
}

/// A layer has two sums in the forward pass; the next layer reads the second one. So it is where
/// weights are cut, by a limit that not all shares need.
#[test]
fn ranks_of_a_tensor_group_sum_again_what_they_compute_again() {
    for (forward, bytes_max) in [
        (tiny_gpt(0.1, 3), None),
        (tiny_gpt(0.1, 3), Some(4096)),
        (tiny_llama(), None),
        (tiny_llama(), Some(4096)),
    ] {
        let layers = forward.blocks.len() - 2;
        for shares in [vec![1, 1], vec![2, 1, 1]] {
            for (recompute, more) in
                [(Recompute::None, 0), (Recompute::Blocks, layers), (Recompute::Selective, 0)]
            {
                let model = ModelGraph::training(forward.clone(), true).unwrap();
                let model = model.with_recompute(recompute);
                let model = model.with_parameter_bytes_max(bytes_max).unwrap();
                let is_cut = model.whole().parameters.iter().any(|one| !one.slice.is_whole());
                assert_eq!(is_cut, bytes_max.is_some());
                let of_rank = |rank| model.of_rank(&shares, rank).unwrap().graph;
                let first = of_rank(0);
                let backward = sums(&first, PassKind::BackwardInput);
                assert_eq!(backward.len(), 2 * layers + 1 + more);
                for rank in 1..shares.len() {
                    let graph = of_rank(rank);
                    assert_planned(&graph);
                    let blocks = |sums: &[(u32, TensorId)]| -> Vec<u32> {
                        sums.iter().map(|(block, _)| *block).collect()
                    };
                    let own = sums(&graph, PassKind::BackwardInput);
                    assert_eq!(blocks(&own), blocks(&backward));
                    assert_eq!(graph.parameters, first.parameters);
                }
            }
        }
    }
}

/// GPT-2 at 8 samples of 1,024 tokens. Logits are in no memory as a whole.
#[test]
fn activations_of_twelve_layers_take_a_fifth() {
    let (context, width) = (1024, 768);
    let config = GptConfig {
        vocabulary: 50_257,
        context,
        positions: context,
        layers: 12,
        heads: 12,
        width,
        dropout: 0.0,
        activation: Unary::GeluTanh,
        ..tiny()
    };
    let rows = 8;
    let memory = |recompute| {
        let graph = trained(gpt(&config).unwrap(), true, recompute);
        MemoryUsage::of(&Plan::new(graph, PlanOptions::new(rows)), 2)
    };
    let activations = |recompute| {
        let memory = memory(recompute);
        memory.stash + memory.scratch
    };
    let [none, blocks, selective] =
        [Recompute::None, Recompute::Blocks, Recompute::Selective].map(activations);
    // Besides the inputs of the layers, the tensors of one layer.
    let unit = rows * context * width * DType::F32.bytes();
    assert!(blocks <= 13 * unit + 24 * unit, "{blocks}, in units {}", blocks / unit);
    assert!(5 * blocks <= none, "{blocks} of {none}");
    assert!(blocks < selective && 8 * selective <= 7 * none, "{selective} of {none}");
}
