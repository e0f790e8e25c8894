//! Names of the stages, tensor groups, edges and all-reduces of pipelines in a trace.

use std::sync::Arc;

use potluck_core::{EdgeId, Rank, ReductionId};
use potluck_graph::{Graph, Node, PassKind, Plan};
use potluck_parallel::{Edge, EdgeLayout, Operation, PipelineRanks, Token};

/// Names of ranks, edges and all-reduces; empty if every rank has the whole model.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct TraceLabels {
    /// By rank: `stage 1`, or `stage 1 of pipeline 0` if there are several, and in a tensor group
    /// `tensor rank 0 of stage 1`.
    ranks: Arc<[String]>,
    /// By edge: `edge 1 (h.1 -> stage 1)`, the block that computes the tensor and its receiver.
    edges: Arc<[String]>,
    /// By all-reduce: `all-reduce 3 (h.1)`, the block that computes the tensor.
    reductions: Arc<[String]>,
}

impl TraceLabels {
    /// Creates the names of these pipelines; `plans` are those of all ranks.
    pub fn of(plans: &[Arc<Plan>], pipelines: &[PipelineRanks], edges: &EdgeLayout) -> Self {
        if pipelines.iter().all(|pipeline| pipeline.ranks().count() == 1) {
            return Self::default();
        }
        let several = pipelines.len() > 1;
        let mut ranks = Vec::new();
        for (pipeline, of_pipeline) in pipelines.iter().enumerate() {
            for (stage, group) in of_pipeline.groups.iter().enumerate() {
                let stage = if several {
                    format!("stage {stage} of pipeline {pipeline}")
                } else {
                    format!("stage {stage}")
                };
                for member in 0..group.len() {
                    ranks.push(if group.len() > 1 {
                        format!("tensor rank {member} of {stage}")
                    } else {
                        stage.clone()
                    });
                }
            }
        }
        let mut names = Vec::with_capacity(edges.edges.len());
        for (index, edge) in edges.edges.iter().enumerate() {
            let id = EdgeId(index as u32);
            let source = edge_source(plans, edge);
            names.push(match edge.to[..] {
                [to] => format!("{id} ({source} -> stage {})", stage_of(pipelines, to)),
                _ => format!("{id} ({source} -> tensor group)"),
            });
        }
        let mut reductions = Vec::with_capacity(edges.reductions.len());
        for (index, reduction) in edges.reductions.iter().enumerate() {
            let id = ReductionId(index as u32);
            let first = reduction.edges().next().map(|edge| edges.edge(edge));
            let source = first.map(|edge| edge_source(plans, edge));
            reductions.push(format!("{id} ({})", source.unwrap_or_default()));
        }
        Self { ranks: ranks.into(), edges: names.into(), reductions: reductions.into() }
    }

    /// Returns the name of a rank's device, with its place if it has a part of the model.
    pub fn device(&self, rank: Rank, name: &str) -> String {
        match self.ranks.get(rank.index()) {
            Some(place) => format!("{name}, {place}"),
            None => name.into(),
        }
    }

    /// Returns the name of an edge.
    pub fn edge(&self, edge: EdgeId) -> String {
        self.edges.get(edge.index()).cloned().unwrap_or_else(|| edge.to_string())
    }

    /// Returns the name of an all-reduce.
    pub fn reduction(&self, id: ReductionId) -> String {
        self.reductions.get(id.index()).cloned().unwrap_or_else(|| id.to_string())
    }

    /// Returns the name of an awaited operation.
    pub fn awaited(&self, token: &Token) -> String {
        match (token.operation, token.micro_batch) {
            (Operation::Receive(edge), Some(micro_batch)) => {
                format!("{} of micro-batch {micro_batch}", self.edge(edge))
            }
            (Operation::AllReduce(id), Some(micro_batch)) => {
                format!("{} of micro-batch {micro_batch}", self.reduction(id))
            }
            _ => token.to_string(),
        }
    }
}

fn stage_of(pipelines: &[PipelineRanks], rank: Rank) -> usize {
    for pipeline in pipelines {
        if let Some(stage) = pipeline.groups.iter().position(|group| group.contains(&rank)) {
            return stage;
        }
    }
    0
}

/// Returns the name of the tensor of an edge: the block that computes it, `h.1`, or `h.1 again` for
/// a recomputation, or `gradient from h.2` in a backward pass. `plans` are those of all ranks: the
/// tensor has its number in the graph of the sender.
pub fn edge_source(plans: &[Arc<Plan>], edge: &Edge) -> String {
    let graph = &plans[edge.from.index()].graph;
    for node in &graph.nodes {
        if node.outputs.iter().any(|tensor| graph.root(*tensor) == edge.tensor) {
            let block = &graph.blocks[node.block as usize];
            return match node.phase {
                PassKind::Forward => block.clone(),
                _ if is_repeated(graph, node) => format!("{block} again"),
                _ => format!("gradient from {block}"),
            };
        }
    }
    graph.tensor(edge.tensor).name.clone()
}

/// Returns true if a node computes again what the forward pass has computed, or packs such a value.
fn is_repeated(graph: &Graph, node: &Node) -> bool {
    let computed = if node.op.converts_format() { &node.inputs } else { &node.outputs };
    computed.iter().any(|tensor| graph.tensor(graph.root(*tensor)).repeats.is_some())
}
