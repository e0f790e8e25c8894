//! Names of the stages and the edges of pipelines in a trace.

use std::sync::Arc;

use crate::base::{EdgeId, Rank};
use crate::graph::{Graph, PassKind};
use crate::parallel::{Edge, EdgeLayout, Operation, PipelineStages, Token};

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
    pub fn of(graph: &Graph, pipelines: &[PipelineStages], edges: &EdgeLayout) -> Self {
        if pipelines.iter().all(|pipeline| pipeline.ranks.len() == 1) {
            return Self::default();
        }
        let all = || pipelines.iter().enumerate();
        let several = pipelines.len() > 1;
        let stages = all().flat_map(|(pipeline, stages)| {
            (0..stages.ranks.len()).map(move |stage| match several {
                true => format!("stage {stage} of pipeline {pipeline}"),
                false => format!("stage {stage}"),
            })
        });
        let stage_of = |rank: Rank| {
            let found = pipelines.iter().find_map(|one| one.ranks.iter().position(|r| *r == rank));
            found.unwrap_or_default()
        };
        let edge = |(index, edge): (usize, &Edge)| {
            let (id, to) = (EdgeId(index as u32), stage_of(edge.to));
            format!("{id} ({} -> stage {to})", edge_source(graph, edge))
        };
        Self { stages: stages.collect(), edges: edges.edges.iter().enumerate().map(edge).collect() }
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

/// Returns the name of the tensor of an edge: the block that computes it, `h.1`, or `gradient from
/// h.2` in a backward pass.
pub fn edge_source(graph: &Graph, edge: &Edge) -> String {
    let writes = |outputs: &[_]| outputs.iter().any(|tensor| graph.root(*tensor) == edge.tensor);
    let Some(writer) = graph.nodes.iter().find(|node| writes(&node.outputs)) else {
        return graph.tensor(edge.tensor).name.clone();
    };
    let block = &graph.blocks[writer.block as usize];
    match writer.phase {
        PassKind::Forward => block.clone(),
        _ => format!("gradient from {block}"),
    }
}
