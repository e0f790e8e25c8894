//! What the stages of pipelines send each other in a step: tensors, gradients and parameters.

use std::fmt::Write;

use super::pipelines::ExplainedPipelines;
use super::{VALUE_BYTES, buckets, sent_table};
use crate::base::{EdgeId, Position, Rank};
use crate::collective::{CollectiveKind, CommCost, RankGroup, cost};
use crate::graph::print::size_text;
use crate::parallel::{Edge, Mesh};
use crate::runtime::trace_labels::edge_source;

/// Returns the tables of the edges, the buckets and what each rank sends.
pub fn communication(pipelines: &ExplainedPipelines) -> String {
    [head(pipelines), edge_rows(pipelines), bucket_rows(pipelines), sender_rows(pipelines)]
        .join("\n")
}

fn head(pipelines: &ExplainedPipelines) -> String {
    let planned = &pipelines.planned;
    let Mesh { data: count, pipeline: depth, .. } = planned.mesh;
    let schedule = planned.schedule;
    let counts = || planned.mesh.first_ranks().map(|rank| pipelines.micro_batches(rank.index()));
    let batches = counts().map(|count| count.to_string()).collect::<Vec<_>>().join(" and ");
    let all = if counts().eq([1]) { "micro-batch" } else { "micro-batches" };
    let (rows, kib) = (planned.rows_max(), pipelines.spec.parallel.chunk_bytes >> 10);
    let what = if count == 1 { "pipeline" } else { "pipelines" };
    format!(
        "{count} {what} of {depth} stages ({schedule}), {batches} {all} of up to {rows} rows, \
         messages of up to {kib} KiB\n"
    )
}

/// Bytes and messages of an edge for each micro-batch of a step.
fn sent_on(pipelines: &ExplainedPipelines, edge: &Edge) -> Vec<CommCost> {
    let written = &pipelines.laid_out.written;
    let sent = |rows: u32| CommCost {
        steps: edge.pieces(rows as usize, written.edges.piece_max).count() as u64,
        bytes: (edge.elements(rows as usize) * VALUE_BYTES) as u64,
    };
    let micro_batches = &written.programs[edge.from.index()].micro_batches;
    micro_batches.iter().map(|micro_batch| sent(micro_batch.rows)).collect()
}

fn all_of(sent: &[CommCost]) -> CommCost {
    sent.iter().copied().fold(CommCost::default(), CommCost::then)
}

/// Table of the tensors that cross from one stage to another.
fn edge_rows(pipelines: &ExplainedPipelines) -> String {
    let graph = &pipelines.laid_out.whole.graph;
    let mut text = format!(
        "  {:<8}{:<28}{:>6}{:>6}{:>16}{:>13}{:>10}\n",
        "edge", "tensor", "from", "to", "a micro-batch", "a step", "messages"
    );
    for (index, edge) in pipelines.laid_out.written.edges.edges.iter().enumerate() {
        let sent = sent_on(pipelines, edge);
        let largest = sent.iter().map(|one| one.bytes as usize).max().unwrap_or(0);
        let all = all_of(&sent);
        let tensor = format!("{} {}", edge.tensor, edge_source(graph, edge));
        let (from, to) = (edge.from.index(), edge.to.index());
        let (largest, step) = (size_text(largest), size_text(all.bytes as usize));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {:<8}{tensor:<28}{from:>6}{to:>6}{largest:>16}{step:>13}{:>10}",
            EdgeId(index as u32).index(),
            all.steps
        );
    }
    text
}

/// Table of the buckets: the ranks that hold each, and the values that each of them updates.
fn bucket_rows(pipelines: &ExplainedPipelines) -> String {
    let (layout, plan) = (&pipelines.laid_out.layout, &pipelines.laid_out.whole);
    let group_of = |bucket| pipelines.laid_out.written.groups.of(bucket);
    let widths = buckets(plan).map(|bucket| group_text(group_of(bucket)).len());
    let width = widths.max().unwrap_or(0).max("group".len());
    let title = "values that each of the group updates";
    let mut text =
        format!("  bucket{:>12}{:>10}  {:<width$}  {title}\n", "size", "messages", "group");
    for bucket in buckets(plan) {
        let group = group_of(bucket);
        let size = size_text(plan.buckets[bucket.index()].length * VALUE_BYTES);
        let (messages, owned) = match group.size() {
            1 => (0, "not reduced, one rank updates all".to_string()),
            _ => {
                let owned = (0..group.size()).map(|at| layout.shard(bucket, Position(at)));
                let owned = owned.map(|range| format!("{}..{}", range.start, range.end));
                (layout.chunks_of(bucket).len(), owned.collect::<Vec<_>>().join("  "))
            }
        };
        let (index, members) = (bucket.index(), group_text(group));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {index:<6}{size:>12}{messages:>10}  {members:<width$}  {owned}");
    }
    text
}

/// Formats the ranks of a group: `{0, 2}`.
fn group_text(group: &RankGroup) -> String {
    let ranks: Vec<String> = group.iter().map(|(_, rank)| rank.index().to_string()).collect();
    format!("{{{}}}", ranks.join(", "))
}

/// Table of the bytes and messages that each rank sends in a step.
fn sender_rows(pipelines: &ExplainedPipelines) -> String {
    let (layout, written) = (&pipelines.laid_out.layout, &pipelines.laid_out.written);
    let row = |rank: usize| {
        let id = Rank(rank as u32);
        let positions = written.groups.positions(id);
        let phases = [CollectiveKind::ReduceScatter, CollectiveKind::AllGather];
        let [gradients, parameters] =
            phases.map(|kind| cost::sent_by(layout, positions.clone(), kind, VALUE_BYTES as u64));
        let own = written.edges.edges.iter().filter(|edge| edge.from == id);
        let tensors: Vec<CommCost> = own.map(|edge| all_of(&sent_on(pipelines, edge))).collect();
        let tensors = all_of(&tensors);
        let sent = vec![gradients, parameters, tensors, gradients.then(parameters).then(tensors)];
        (id.to_string(), sent, pipelines.name(rank).to_string())
    };
    let rows: Vec<_> = (0..pipelines.world()).map(row).collect();
    sent_table(&["gradients", "parameters", "edges", "a step"], &rows)
}
