//! Activation recomputation as a graph transformation (Chen et al. 2016; in spirit, selective as in
//! Korthikanti et al. 2022): activations that the backward pass of a block reads from the block's
//! forward pass are recomputed, and not kept in between.
//!
//! Copies of the forward nodes are in pass B, before the block's other nodes, and write new
//! tensors, which the block's B and W nodes read. The originals are then read in their segment
//! only. The pass runs after fusion, so that a copy is the same call as its original, runs in the
//! same kernel and has the same bits: with different fusions, the two would round in different
//! places. Dropout repeats exactly, because its random numbers are a function of step, sample and
//! site.
//!
//! Nothing is counted twice: a node that accumulates, writes anything but activations, normalizes
//! over the batch, or computes a state for the next step runs once, and its results are kept. Every
//! graph can therefore be transformed.

use std::collections::{BTreeSet, HashMap};

use super::large_parameters::joins_of_slices;
use crate::{Graph, Node, PassKind, Role, Tensor};
use potluck_core::TensorId;

/// Parts of the forward pass that are recomputed for the backward pass, instead of being kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// None: all activations that the backward pass reads are kept.
    #[default]
    None,
    /// All activations of a block that its backward pass reads. The results of other blocks, such
    /// as the input of a layer, are kept.
    Blocks,
    /// The same, except that the results of products, convolutions, embeddings and recurrent layers
    /// are kept.
    Selective,
}

impl Recompute {
    /// Returns the name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Blocks => "blocks",
            Self::Selective => "selective",
        }
    }
}

/// Recomputation in a graph and in graphs derived from it: the same on all ranks of a tensor group,
/// which must all-reduce the same tensors in the same order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recomputation {
    recompute: Recompute,
    /// Block that computes the loss.
    loss_block: Option<u32>,
    /// Results of the forward pass's all-reduces that are recomputed.
    sums: BTreeSet<TensorId>,
}

impl Recomputation {
    /// Plans the recomputation in a differentiated graph. For a rank of a tensor group, this is the
    /// graph before [`reported_once`](crate::reported_once), after which the ranks' graphs differ.
    pub fn of(graph: &Graph, recompute: Recompute) -> Self {
        let mut loss_block = None;
        if let Some(loss) = graph.loss
            && let Some(node) = graph.nodes.iter().find(|node| node.outputs.contains(&loss))
        {
            loss_block = Some(node.block);
        }
        let mut all = BTreeSet::new();
        for node in forward(graph).iter().filter(|node| node.op.reduction().is_some()) {
            all.extend(node.outputs.iter().copied());
        }

        let mut recomputation = Self { recompute, loss_block, sums: all };
        let mut sums = BTreeSet::new();
        for index in recomputation.repeated(graph, &BTreeSet::new()).into_iter().flatten() {
            let node = &graph.nodes[index];
            if node.op.reduction().is_some() {
                sums.extend(node.outputs.iter().copied());
            }
        }
        recomputation.sums = sums;
        recomputation
    }

    /// Returns the block that computes the loss, on all ranks of a tensor group.
    pub(crate) fn loss_block(&self) -> Option<u32> {
        self.loss_block
    }

    /// Returns the graph with recomputed activations. It is the graph for which the recomputation
    /// was planned, fused or not.
    pub fn apply(&self, mut graph: Graph) -> Graph {
        if self.recompute == Recompute::None {
            return graph;
        }
        // All ranks repeat the all-reduces that any of them needs.
        let repeated = self.repeated(&graph, &self.sums);
        let nodes = std::mem::take(&mut graph.nodes);
        let forward = forward_length(&nodes);
        graph.nodes.extend_from_slice(&nodes[..forward]);
        for block in (0..graph.blocks.len() as u32).rev() {
            let mut again = HashMap::new();
            for index in &repeated[block as usize] {
                let copy = copy_of(&mut graph, &nodes[*index], &mut again);
                graph.nodes.push(copy);
            }
            for node in nodes[forward..].iter().filter(|node| node.block == block) {
                let node = reading(&mut graph, node, &again);
                graph.nodes.push(node);
            }
        }
        graph
    }

    /// Returns, for each block, the forward nodes that run again, in order: those on which the
    /// block's backward pass and the `wanted` tensors depend.
    fn repeated(&self, graph: &Graph, wanted: &BTreeSet<TensorId>) -> Vec<Vec<usize>> {
        let writers = self.writers(graph);
        let mut repeated = Vec::new();
        for block in 0..graph.blocks.len() as u32 {
            let mut open: Vec<TensorId> = Vec::new();
            for node in graph.nodes.iter().filter(|node| node.block == block) {
                if node.phase == PassKind::Forward {
                    open.extend(node.outputs.iter().filter(|id| wanted.contains(id)));
                } else {
                    open.extend(&node.inputs);
                }
            }
            let mut of_block = BTreeSet::new();
            while let Some(tensor) = open.pop() {
                let Some(index) = writers[tensor.index()] else { continue };
                let node = &graph.nodes[index];
                if node.block == block && of_block.insert(index) {
                    open.extend(&node.inputs);
                }
            }
            repeated.push(of_block.into_iter().collect());
        }
        repeated
    }

    /// Returns, for each tensor, the forward node that computes it, if that may run twice.
    fn writers(&self, graph: &Graph) -> Vec<Option<usize>> {
        let once = self.computed_once(graph);
        // The join of the results of slices is kept, and not each of these.
        let joins = joins_of_slices(graph);
        let mut writers: Vec<Option<usize>> = vec![None; graph.tensors.len()];
        for (index, node) in forward(graph).iter().enumerate() {
            // An alias is repeated together with its elements, in the same block.
            let is_kept = self.recompute == Recompute::Selective
                && (node.op.root_op().is_costly() || joins[index]);
            let is_repeated = match aliased(graph, node) {
                Some(base) => {
                    writers[base.index()].is_some_and(|at| graph.nodes[at].block == node.block)
                }
                None => !is_kept && self.may_repeat(graph, node, &once),
            };
            if is_repeated {
                for output in &node.outputs {
                    writers[output.index()] = Some(index);
                }
            }
        }
        writers
    }

    /// Returns the tensors whose nodes run once: those that are kept anyway, and those that nodes
    /// change in place.
    fn computed_once(&self, graph: &Graph) -> BTreeSet<TensorId> {
        let mut once = BTreeSet::new();
        // Carried states stay in memory until the end of the micro-batch.
        once.extend(graph.carried.iter().map(|carried| graph.root(carried.output)));
        for node in forward(graph) {
            let is_sum = node.op.reduction().is_some();
            if is_sum && !node.outputs.iter().all(|id| self.sums.contains(id)) {
                once.extend(node.inputs.iter().map(|id| graph.root(*id)));
            }
        }
        // Aliases are activations, including aliases of inputs, which no node changes.
        for node in &graph.nodes {
            for output in &node.outputs {
                if graph.tensor(*output).role != Role::Activation {
                    once.insert(*output);
                }
            }
        }
        once
    }

    fn may_repeat(&self, graph: &Graph, node: &Node, once: &BTreeSet<TensorId>) -> bool {
        // Between the forward and the backward pass of the last block, which has the loss, no other
        // block runs on the micro-batch: its results are alive at the peak in any case. Only
        // `gpipe` runs other micro-batches in between.
        let is_late = self.loss_block == Some(node.block);
        let normalizes = node.op.root_op().normalizes_over_batch();
        if is_late || node.accumulate.any() || normalizes {
            return false;
        }
        let mut inputs = node.inputs.iter().map(|id| graph.root(*id));
        let reads_changing =
            inputs.any(|id| once.contains(&id) && graph.tensor(id).role != Role::Activation);
        !reads_changing && !node.outputs.iter().any(|id| once.contains(&graph.root(*id)))
    }
}

/// Nodes of the forward pass, which come first.
fn forward(graph: &Graph) -> &[Node] {
    &graph.nodes[..forward_length(&graph.nodes)]
}

fn forward_length(nodes: &[Node]) -> usize {
    nodes.iter().take_while(|node| node.phase == PassKind::Forward).count()
}

/// Tensor that has the elements of a node's outputs, if these are aliases.
fn aliased(graph: &Graph, node: &Node) -> Option<TensorId> {
    let first = node.outputs[0];
    graph.tensor(first).alias_of?;
    Some(graph.root(first))
}

/// Returns the copy of a forward node, with new outputs, which it adds to `again`, the map from
/// original to recomputed tensors of the block.
fn copy_of(graph: &mut Graph, node: &Node, again: &mut HashMap<TensorId, TensorId>) -> Node {
    let inputs = renamed(&node.inputs, again);
    let mut outputs = Vec::new();
    for output in &node.outputs {
        let original = graph.tensor(*output);
        let alias_of = original.alias_of.map(|base| name_in(again, base));
        let copy = Tensor { alias_of, repeats: Some(*output), ..original.clone() };
        let id = TensorId(graph.tensors.len() as u32);
        graph.tensors.push(copy);
        again.insert(*output, id);
        outputs.push(id);
    }
    Node { inputs, outputs, phase: PassKind::BackwardInput, ..node.clone() }
}

/// Returns a backward node that reads the recomputed tensors in `again` instead of the originals.
fn reading(graph: &mut Graph, node: &Node, again: &HashMap<TensorId, TensorId>) -> Node {
    for output in &node.outputs {
        let alias_of = &mut graph.tensors[output.index()].alias_of;
        *alias_of = alias_of.map(|base| name_in(again, base));
    }
    Node { inputs: renamed(&node.inputs, again), ..node.clone() }
}

fn renamed(tensors: &[TensorId], again: &HashMap<TensorId, TensorId>) -> Vec<TensorId> {
    tensors.iter().map(|id| name_in(again, *id)).collect()
}

fn name_in(again: &HashMap<TensorId, TensorId>, tensor: TensorId) -> TensorId {
    again.get(&tensor).copied().unwrap_or(tensor)
}

#[cfg(test)]
pub mod tests;
