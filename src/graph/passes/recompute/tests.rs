//! Tests of recomputation: what is computed again, what is kept, and what runs once.

use super::*;
use crate::Precision;
use crate::{
    Accumulation, Builder, Init, ModelGraph, ParameterSplit, Plan, PlanOptions, RunsIn, SplitUnit,
    StateInit, Unary, differentiate, fuse, replay,
};
use potluck_core::SegmentId;

/// Two blocks in front of the one with the loss.
fn chain() -> Graph {
    let mut b = Builder::new();
    let weight = |b: &mut Builder, name: &str| b.parameter(name, &[8, 8], Init::Zeros);
    b.block("one");
    let x = b.input("x", &[1, 8]);
    let (w, v) = (weight(&mut b, "w"), weight(&mut b, "v"));
    let bias = b.parameter("bias", &[8], Init::Zeros);
    let y = b.linear(x, w, Some(bias)).unwrap();
    let y = b.unary(y, Unary::Gelu).unwrap();
    let y = b.dropout(y, 0.5).unwrap();
    let y = b.linear(y, v, None).unwrap();
    b.block("two");
    let norm = b.parameter("norm", &[8], Init::Ones);
    let y = b.rms_norm(y, norm, 1e-5).unwrap();
    let u = weight(&mut b, "u");
    let y = b.linear(y, u, None).unwrap();
    let y = b.unary(y, Unary::Relu).unwrap();
    b.block("last");
    let last = weight(&mut b, "last");
    let y = b.linear(y, last, None).unwrap();
    let y = b.unary(y, Unary::Gelu).unwrap();
    b.output("y", y);
    let target = b.input("target", &[1, 8]);
    b.squared_error_loss(y, target).unwrap();
    b.finish()
}

pub fn trained(forward: Graph, is_fused: bool, recompute: Recompute) -> Graph {
    let model = ModelGraph::training(forward, is_fused).unwrap();
    model.with_recompute(recompute).whole().clone()
}

/// Ops that a block computes again, in order.
pub fn again(graph: &Graph, block: u32) -> Vec<String> {
    let repeated = graph.repeated_nodes().filter(|node| node.block == block);
    repeated.map(|node| node.op.to_string()).collect()
}

/// Replays the plan of a graph in its own order.
pub fn assert_planned(graph: &Graph) {
    let plan = Plan::new(graph.clone(), PlanOptions::new(3));
    let all = (0..plan.segments.len() as u32).map(|id| (SegmentId(id), 0));
    assert_eq!(replay(&plan, &all.collect::<Vec<_>>()), Ok(()));
}

#[test]
fn a_block_computes_again_what_its_gradients_read_of_it() {
    let graph = trained(chain(), false, Recompute::Blocks);
    assert_eq!(again(&graph, 0), ["matmul a b^T", "add", "gelu", "dropout 0.5"]);
    // No gradient reads the values of the ReLU, and none the product in front of the next block.
    assert_eq!(again(&graph, 1), ["rms_norm", "matmul a b^T"]);
    assert_eq!(again(&graph, 2), [""; 0], "the block with the loss");
    assert_planned(&graph);

    let graph = trained(chain(), false, Recompute::Selective);
    assert_eq!(again(&graph, 0), ["add", "gelu", "dropout 0.5"]);
    assert_eq!(again(&graph, 1), ["rms_norm"]);
    assert_planned(&graph);

    // A product and the nodes fused with it are one node.
    let graph = trained(chain(), true, Recompute::Blocks);
    assert_eq!(again(&graph, 0), ["matmul a b^T + add + store + gelu", "dropout 0.5"]);
    let graph = trained(chain(), true, Recompute::Selective);
    assert_eq!(again(&graph, 0), ["dropout 0.5"]);
    assert_eq!(trained(chain(), true, Recompute::None), fuse(differentiate(chain()).unwrap()));
}

/// Statistics of the batch, sums of the loss, carried states, and states that a node changes.
#[test]
fn what_counts_or_is_carried_runs_once() {
    let mut b = Builder::new();
    b.block("one");
    let x = b.input("x", &[1, 8]);
    let table = b.device_state("table", &[8], StateInit::Zeros);
    let before = b.input("before", &[1, 8]);
    let y = b.add(x, before).unwrap();
    let y = b.mul(y, table).unwrap();
    let y = b.unary(y, Unary::Tanh).unwrap();
    let norm = b.batch_norm("norm", y).unwrap();
    let y = b.unary(norm, Unary::Tanh).unwrap();
    let carried = b.unary(y, Unary::Sigmoid).unwrap();
    b.carry(before, carried).unwrap();
    let w = b.parameter("w", &[8, 8], Init::Zeros);
    let y = b.linear(carried, w, None).unwrap();
    b.block("last");
    let target = b.input("target", &[1, 8]);
    b.squared_error_loss(y, target).unwrap();
    let forward = b.finish();
    let graph = trained(forward.clone(), false, Recompute::Blocks);
    assert_eq!(again(&graph, 0), ["add", "mul", "tanh", "tanh"]);
    assert_eq!(graph.carried, forward.carried);
    assert_planned(&graph);
    // What is kept is read by the gradients as before.
    let reads = |id: TensorId| {
        graph.nodes.iter().any(|node| node.phase != PassKind::Forward && node.inputs.contains(&id))
    };
    assert!(reads(carried) && reads(norm));
    let of_graph = |graph: &Graph, is_counted: fn(&Node) -> bool| {
        graph.nodes.iter().filter(|node| is_counted(node)).count()
    };
    let plain = differentiate(forward.clone()).unwrap();
    let counted: [fn(&Node) -> bool; 2] =
        [|node| node.op.normalizes_over_batch(), |node| node.accumulate.any()];
    for is_counted in counted {
        assert_eq!(of_graph(&graph, is_counted), of_graph(&plain, is_counted));
    }

    // A node that counts in the state is not repeated, nor a node that reads the state.
    let mut counting = plain;
    let node = Node {
        op: counting.nodes[2].op.clone(),
        inputs: vec![x],
        outputs: vec![table],
        accumulate: Accumulation::all(1),
        precision: Precision::F32,
        is_loss_gradient: false,
        when: RunsIn::AllPasses,
        phase: PassKind::Forward,
        block: 0,
    };
    counting.nodes.insert(3, node);
    let graph = Recomputation::of(&counting, Recompute::Blocks).apply(counting);
    assert_eq!(again(&graph, 0), ["tanh", "tanh"]);
}

/// All-reduces of the passes of a graph.
pub fn sums(graph: &Graph, phase: PassKind) -> Vec<(u32, TensorId)> {
    let sums = graph.nodes.iter().filter(|node| node.op.reduction().is_some());
    let of_pass = sums.filter(|node| node.phase == phase);
    of_pass.map(|node| (node.block, graph.root(node.outputs[0]))).collect()
}

/// Only the gradient of the whole parameter reads the sum, and only the first rank reports it.
#[test]
fn a_sum_that_one_rank_needs_is_repeated_by_all() {
    let mut b = Builder::new();
    b.block("one");
    let x = b.input("x", &[1, 64]);
    let [up, down] = ["up", "down"].map(|name| b.parameter(name, &[64, 64], Init::Zeros));
    let whole = b.parameter("whole", &[8, 64], Init::Zeros);
    let mut y = x;
    for weight in [up, down, whole] {
        y = b.linear(y, weight, None).unwrap();
    }
    b.block("last");
    let target = b.input("target", &[1, 8]);
    b.squared_error_loss(y, target).unwrap();
    b.split_parameters(|name| match name {
        "up" => Some(ParameterSplit::new(0, SplitUnit::Columns)),
        "down" => Some(ParameterSplit::new(1, SplitUnit::Columns)),
        _ => None,
    });
    let model = ModelGraph::training(b.finish(), true).unwrap().with_recompute(Recompute::Blocks);
    let ranks = [0, 1].map(|rank| model.of_rank(&[1, 1], rank).unwrap().graph);
    for (graph, needs_it) in ranks.iter().zip([true, false]) {
        let repeated = sums(graph, PassKind::BackwardInput);
        assert_eq!(repeated.len(), 1);
        let (_, sum) = repeated[0];
        let reads = |node: &&Node| node.inputs.iter().any(|id| graph.root(*id) == sum);
        let readers = graph.nodes.iter().filter(|node| node.op.reduction().is_none()).filter(reads);
        assert_eq!(readers.count() > 0, needs_it);
        assert_planned(graph);
    }
}
