//! Names of the stages and the edges of pipelines in a trace.

use std::sync::Arc;

use potluck_core::{EdgeId, Rank};
use potluck_graph::{Graph, PassKind};
use potluck_parallel::{Edge, EdgeLayout, Operation, PipelineRanks, Token};

/// Names of stages and edges; empty if pipelines have one stage each.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct TraceLabels {
    /// By rank: `stage 1`, or `stage 1 of pipeline 0` if there are several.
    stages: Arc<[String]>,
    /// By edge: `edge 1 (h.1 -> stage 1)`, the block that computes the tensor and its receiver.
    edges: Arc<[String]>,
}

impl TraceLabels {
    /// Creates the names of these pipelines of a graph.
    pub fn of(graph: &Graph, pipelines: &[PipelineRanks], edges: &EdgeLayout) -> Self {
        if pipelines.iter().all(|pipeline| pipeline.ranks.len() == 1) {
            return Self::default();
        }
        let several = pipelines.len() > 1;
        let mut stages = Vec::new();
        for (pipeline, of_pipeline) in pipelines.iter().enumerate() {
            for stage in 0..of_pipeline.ranks.len() {
                stages.push(if several {
                    format!("stage {stage} of pipeline {pipeline}")
                } else {
                    format!("stage {stage}")
                });
            }
        }
        let mut names = Vec::with_capacity(edges.edges.len());
        for (index, edge) in edges.edges.iter().enumerate() {
            let id = EdgeId(index as u32);
            let to = stage_of(pipelines, edge.to);
            names.push(format!("{id} ({} -> stage {to})", edge_source(graph, edge)));
        }
        Self { stages: stages.into(), edges: names.into() }
    }

    /// Returns the name of a rank's device, with its stage if it has one.
    pub fn device(&self, rank: Rank, name: &str) -> String {
        match self.stages.get(rank.index()) {
            Some(stage) => format!("{name}, {stage}"),
            None => name.into(),
        }
    }

    /// Returns the name of an edge.
    pub fn edge(&self, edge: EdgeId) -> String {
        self.edges.get(edge.index()).cloned().unwrap_or_else(|| edge.to_string())
    }

    /// Returns the name of what a program waits for.
    pub fn awaited(&self, token: &Token) -> String {
        match (token.operation, token.micro_batch) {
            (Operation::Receive(edge), Some(micro_batch)) => {
                format!("{} of micro-batch {micro_batch}", self.edge(edge))
            }
            _ => token.to_string(),
        }
    }
}

/// Returns the stage of a rank in its pipeline.
fn stage_of(pipelines: &[PipelineRanks], rank: Rank) -> usize {
    for pipeline in pipelines {
        if let Some(stage) = pipeline.ranks.iter().position(|one| *one == rank) {
            return stage;
        }
    }
    0
}

/// Returns the name of the tensor of an edge: the block that computes it, `h.1`, or `gradient from
/// h.2` in a backward pass.
pub fn edge_source(graph: &Graph, edge: &Edge) -> String {
    for node in &graph.nodes {
        if node.outputs.iter().any(|tensor| graph.root(*tensor) == edge.tensor) {
            let block = &graph.blocks[node.block as usize];
            return match node.phase {
                PassKind::Forward => block.clone(),
                _ => format!("gradient from {block}"),
            };
        }
    }
    graph.tensor(edge.tensor).name.clone()
}
