//! Warning about tensor groups whose ranks are on several nodes: the bytes sent over the network in
//! a step, and the time.

use std::collections::BTreeMap;

use potluck_core::Rank;
use potluck_core::format::{counted, size_text};
use potluck_parallel::{Edge, PipelinePrograms};

/// Rate of the link for the time in the warning: 1 Gbit/s.
const BYTES_PER_S: f64 = 125e6;

/// Returns a warning about the tensor group with the most bytes sent between nodes, if a group is
/// on several; `nodes` has the node of each rank.
pub(crate) fn network_note(written: &PipelinePrograms, nodes: &[u32]) -> Option<String> {
    let node_of = |rank: &Rank| nodes.get(rank.index()).copied().unwrap_or(0);
    // By group: the bytes sent by each of its nodes, and the number of all-reduces.
    let mut groups: BTreeMap<&[Rank], (BTreeMap<u32, usize>, usize)> = BTreeMap::new();
    for reduction in written.edges.reductions.iter() {
        let edges = reduction.edges().map(|edge| written.edges.edge(edge));
        for edge in edges {
            let own = node_of(&edge.from);
            let others = edge.to.iter().filter(|rank| node_of(rank) != own).count();
            if others > 0 {
                let (sent, _) = groups.entry(&edge.to).or_default();
                *sent.entry(own).or_default() += others * bytes_of(written, edge);
            }
        }
        let first = written.edges.edge(reduction.parts[0][0]);
        if let Some((_, count)) = groups.get_mut(&first.to[..]) {
            *count += written.programs[first.from.index()].micro_batches.len();
        }
    }
    let most_of = |sent: &BTreeMap<u32, usize>| sent.values().copied().max().unwrap_or(0);
    let (_, (sent, count)) = groups.iter().max_by_key(|(_, (sent, _))| most_of(sent))?;
    let most = most_of(sent);
    let seconds = most as f64 / BYTES_PER_S;
    Some(format!(
        "a tensor group is on {} nodes: each step sends {} from one of them for {}, which takes at \
         least {seconds:.3} s at 1 Gbit/s; tensor groups are for devices of one machine, and \
         pipelines for several",
        sent.len(),
        size_text(most),
        counted(*count, "all-reduce", "all-reduces"),
    ))
}

/// Bytes of an edge in a step, to one reader.
fn bytes_of(written: &PipelinePrograms, edge: &Edge) -> usize {
    let batches = &written.programs[edge.from.index()].micro_batches;
    batches.iter().map(|batch| edge.bytes(batch.rows as usize)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
    use potluck_graph::{ModelGraph, Unary};
    use potluck_parallel::planner::plans::Plans;
    use potluck_parallel::{Mesh, PipelineRanks, PipelineRequest, PipelineSchedule, Share};

    #[test]
    fn only_what_leaves_a_node_is_told() {
        let widths = vec![8, 64, 5];
        let loss = MlpLoss::CrossEntropy;
        let config = MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss };
        let plans = Plans::new(ModelGraph::training(mlp(&config).unwrap(), true).unwrap());
        let group = plans.of_group(&[1, 1], 4).unwrap();
        let blocks = group.plans[0].graph.blocks.len() as u32;
        let mesh = Mesh { data: 2, pipeline: 1, tensor: 2 };
        let of = |groups| PipelineRanks { groups, chunks: std::iter::once(0..blocks).collect() };
        let pipelines: Vec<PipelineRanks> = mesh.pipelines().map(of).collect();
        let share = |first| Share { first, count: 8, micro_batch: 4 };
        let written = PipelinePrograms::training(&PipelineRequest {
            plans: &group.plans,
            pipelines: &pipelines,
            shares: &[share(0), share(8)],
            schedule: PipelineSchedule::OneFOneB,
            overlap: true,
            piece_max: 1 << 20,
            in_flight_min: 1,
        });
        assert_eq!(network_note(&written, &[0, 0, 1, 1]), None, "pipelines on nodes of their own");
        let note = network_note(&written, &[0, 1, 0, 1]).unwrap();
        // Two micro-batches of four samples: the sums of the last layer.
        let bytes = size_text(2 * 4 * 5 * 4);
        let expected = format!("on 2 nodes: each step sends {bytes} from one of them for 2 all-");
        assert!(note.contains(&expected), "{note}");
        let one = network_note(&written, &[0, 0, 1, 2]).unwrap();
        assert!(one.contains("on 2 nodes"), "{one}");
    }
}
