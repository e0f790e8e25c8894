//! Messages that the ranks of a placement send each other in a step: gradients, parameters and
//! tensors, from one stage of a pipeline to another and in the all-reduces of tensor groups.

use std::fmt::Write;

use super::placement::ExplainedPlacement;
use potluck_core::format::{counted, listed, size_text};
use potluck_core::{BucketId, DType, EdgeId, Position, Rank};
use potluck_graph::Plan;
use potluck_parallel::collective::{CollectiveKind, CommCost, RankGroup, Topology, cost};
use potluck_parallel::{Edge, Mesh};
use potluck_train::runtime::trace_labels::edge_source;

/// Returns the tables of the edges, the buckets and the messages of each rank.
pub fn communication(placement: &ExplainedPlacement) -> String {
    if placement.world() == 1 {
        return "one device: nothing travels\n".into();
    }
    let mut tables = Vec::new();
    if placement.is_divided() {
        tables.push(head_of_pipelines(placement));
        if placement.planned.mesh.pipeline > 1 {
            tables.push(edge_rows(placement));
        }
        if placement.planned.mesh.tensor > 1 {
            tables.push(reduction_rows(placement));
        }
    } else {
        tables.push(head_of_replicas(placement));
    }
    tables.push(bucket_rows(placement));
    tables.push(sender_rows(placement));
    tables.join("\n")
}

fn head_of_replicas(placement: &ExplainedPlacement) -> String {
    let parallel = &placement.spec.parallel;
    let world = placement.world();
    let way = parallel.topology.name();
    let hops = match parallel.topology {
        Topology::Ring => world - 1,
        Topology::Star => 1,
    };
    let kib = parallel.chunk_bytes >> 10;
    format!(
        "{way} of {world} devices, messages of up to {kib} KiB\n\
         a gradient is summed after {hops} messages in a row, a parameter is everywhere after \
         {hops} more\n"
    )
}

fn head_of_pipelines(placement: &ExplainedPlacement) -> String {
    let planned = &placement.planned;
    let Mesh { data: count, pipeline: depth, tensor } = planned.mesh;
    let schedule = planned.schedule;
    let mut counts = Vec::new();
    for rank in planned.mesh.first_ranks() {
        counts.push(placement.micro_batches(rank.index()).to_string());
    }
    let all = if counts == ["1"] { "micro-batch" } else { "micro-batches" };
    let batches = counts.join(" and ");
    let rows = planned.rows_max();
    let kib = placement.spec.parallel.chunk_bytes >> 10;
    let what = if count == 1 { "pipeline" } else { "pipelines" };
    let stages = match depth {
        1 => "one stage".into(),
        _ => format!("{depth} stages ({schedule})"),
    };
    let mut head = format!(
        "{count} {what} of {stages}, {batches} {all} of up to {rows} rows, messages of up to {kib} \
         KiB\n"
    );
    if tensor > 1 {
        head += &tensor_line(placement);
    }
    head
}

/// Returns the line on tensor groups: their shares, and the all-reduces of a rank for a
/// micro-batch, whose tensors it reads back and writes again: of the words of two bf16 values, the
/// sums in f32, twice as much.
fn tensor_line(placement: &ExplainedPlacement) -> String {
    let planned = &placement.planned;
    let edges = &placement.laid_out.written.edges;
    let rows = planned.rows_max() as usize;
    let mut read = 0;
    let mut written = 0;
    let mut sums = 0;
    for reduction in edges.reductions.iter() {
        // The first rank of each group of the first pipeline; all others have the same bytes.
        let own = &reduction.parts[0];
        if planned.mesh.coordinates(edges.edge(own[0]).from).data > 0 {
            continue;
        }
        sums += 1;
        let bytes: usize = own.iter().map(|edge| edges.edge(*edge).bytes(rows)).sum();
        read += bytes;
        written += reduction.kind.expansion() * bytes;
    }
    let writes = if written == read { "as much".into() } else { size_text(written) };
    let shares = planned.tensor_shares.iter().map(u32::to_string).collect::<Vec<_>>().join(" : ");
    let what = if planned.mesh.pipeline > 1 { ", in all stages together" } else { "" };
    format!(
        "tensor groups of {} ranks with shares {shares}: {} of a micro-batch, of which each rank \
         reads back {} and writes {writes}{what}\n",
        planned.mesh.tensor,
        counted(sums, "all-reduce", "all-reduces"),
        size_text(read)
    )
}

/// Bytes and messages of an edge for each micro-batch of a step.
fn sent_on(placement: &ExplainedPlacement, edge: &Edge) -> Vec<CommCost> {
    let written = &placement.laid_out.written;
    let mut sent = Vec::new();
    for micro_batch in &written.programs[edge.from.index()].micro_batches {
        let rows = micro_batch.rows as usize;
        sent.push(CommCost {
            steps: edge.pieces(rows, written.edges.piece_max).count() as u64,
            bytes: edge.bytes(rows) as u64,
        });
    }
    sent
}

fn all_of(sent: &[CommCost]) -> CommCost {
    let mut all = CommCost::default();
    for one in sent {
        all = all.then(*one);
    }
    all
}

/// Table of the tensors that cross from one stage to another.
fn edge_rows(placement: &ExplainedPlacement) -> String {
    let plans = &placement.laid_out.written.plans;
    let mut text = format!(
        "  {:<8}{:<28}{:>6}{:>6}{:>16}{:>13}{:>10}\n",
        "edge", "tensor", "from", "to", "a micro-batch", "a step", "messages"
    );
    let edges = placement.laid_out.written.edges.edges.iter().enumerate();
    for (index, edge) in edges.filter(|(_, edge)| edge.reduction.is_none()) {
        let sent = sent_on(placement, edge);
        let largest = sent.iter().map(|one| one.bytes as usize).max().unwrap_or(0);
        let all = all_of(&sent);
        let tensor = format!("{} {}", edge.tensor, edge_source(plans, edge));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {:<8}{tensor:<28}{:>6}{:>6}{:>16}{:>13}{:>10}",
            EdgeId(index as u32).index(),
            edge.from.index(),
            edge.to[0].index(),
            size_text(largest),
            size_text(all.bytes as usize),
            all.steps
        );
    }
    text
}

/// Table of the all-reduces of tensor groups: the bytes that each rank reads back. It writes as
/// much after the sum, or twice as much if it sends words of bf16.
fn reduction_rows(placement: &ExplainedPlacement) -> String {
    let plans = &placement.laid_out.written.plans;
    let edges = &placement.laid_out.written.edges;
    let head = ["all-reduce", "tensor", "ranks", "a micro-batch", "a step", "messages"];
    let [id, tensor, ranks, batch, step, messages] = head;
    let mut text =
        format!("  {id:<12}{tensor:<28}{ranks:<10}{batch:>16}{step:>13}{messages:>10}\n");
    for (index, reduction) in edges.reductions.iter().enumerate() {
        // All ranks send the same tensors.
        let mut all = CommCost::default();
        let mut largest = 0;
        for edge in &reduction.parts[0] {
            let sent = sent_on(placement, edges.edge(*edge));
            largest += sent.iter().map(|one| one.bytes as usize).max().unwrap_or(0);
            all = all.then(all_of(&sent));
        }
        let edge = edges.edge(reduction.parts[0][0]);
        let tensor = format!("{} {}", edge.tensor, edge_source(plans, edge));
        let group = group_text(edge.to.iter().copied());
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {index:<12}{tensor:<28}{group:<10}{:>16}{:>13}{:>10}",
            size_text(largest),
            size_text(all.bytes as usize),
            all.steps
        );
    }
    text
}

fn buckets(plan: &Plan) -> impl Iterator<Item = BucketId> {
    (0..plan.buckets.len() as u32).map(BucketId)
}

/// Table of the buckets: the ranks that hold each, if not all do, and the values that each rank
/// updates.
fn bucket_rows(placement: &ExplainedPlacement) -> String {
    let layout = &placement.laid_out.layout;
    let plan = placement.laid_out.whole();
    let groups = &placement.laid_out.written.groups;
    let widths = buckets(plan).map(|bucket| group_text(ranks_of(groups.of(bucket))).len());
    let width = widths.max().unwrap_or(0).max("group".len());
    let mut text = format!("  bucket{:>12}{:>10}  ", "size", "messages");
    text += &if placement.is_divided() {
        format!("{:<width$}  values that each of the group updates\n", "group")
    } else {
        "values that rank 0, 1, .. updates\n".to_string()
    };
    for bucket in buckets(plan) {
        let group = groups.of(bucket);
        let size = size_text(plan.buckets[bucket.index()].length * DType::F32.bytes());
        let mut messages = 0;
        let mut owned = "not reduced, one rank updates all".to_string();
        if !plan.buckets[bucket.index()].is_updated() {
            owned = "not reduced, frozen".to_string();
        } else if group.size() > 1 {
            messages = layout.chunks_of(bucket).len();
            let mut ranges = Vec::new();
            for position in 0..group.size() {
                let range = layout.shard(bucket, Position(position));
                ranges.push(format!("{}..{}", range.start, range.end));
            }
            owned = ranges.join("  ");
        }
        let members = if placement.is_divided() {
            format!("{:<width$}  ", group_text(ranks_of(group)))
        } else {
            String::new()
        };
        let index = bucket.index();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {index:<6}{size:>12}{messages:>10}  {members}{owned}");
    }
    text
}

fn ranks_of(group: &RankGroup) -> impl Iterator<Item = Rank> {
    group.iter().map(|(_, rank)| rank)
}

/// Formats the ranks of a group: `{0, 2}`.
fn group_text(ranks: impl Iterator<Item = Rank>) -> String {
    format!("{{{}}}", listed(ranks.map(Rank::index)))
}

/// Row with the messages of a rank.
struct SenderRow {
    title: String,
    /// Costs by column.
    sent: Vec<CommCost>,
    /// Name of the device.
    name: String,
}

/// Table of the bytes and messages that each rank sends in a step, with the sums over all of them.
fn sender_rows(placement: &ExplainedPlacement) -> String {
    let layout = &placement.laid_out.layout;
    let written = &placement.laid_out.written;
    let columns: &[&str] = if placement.is_divided() {
        match placement.planned.mesh.tensor {
            1 => &["gradients", "parameters", "edges", "a step"],
            _ => &["gradients", "parameters", "edges", "all-reduces", "a step"],
        }
    } else {
        &["reduce", "gather", "a step"]
    };
    let mut rows = Vec::new();
    let mut sums = vec![CommCost::default(); columns.len()];
    for rank in 0..placement.world() {
        let id = Rank(rank as u32);
        let positions = written.groups.positions(id);
        let bytes = DType::F32.bytes() as u64;
        let gradients =
            cost::sent_by(layout, positions.clone(), CollectiveKind::ReduceScatter, bytes);
        let parameters = cost::sent_by(layout, positions, CollectiveKind::AllGather, bytes);
        let mut sent = vec![gradients, parameters];
        if placement.is_divided() {
            let mut tensors = CommCost::default();
            let mut parts = CommCost::default();
            for edge in written.edges.edges.iter().filter(|edge| edge.from == id) {
                let sent = all_of(&sent_on(placement, edge));
                if edge.reduction.is_some() {
                    parts = parts.then(sent);
                } else {
                    tensors = tensors.then(sent);
                }
            }
            sent.push(tensors);
            if placement.planned.mesh.tensor > 1 {
                sent.push(parts);
            }
        }
        sent.push(all_of(&sent));
        for (column, one) in sent.iter().enumerate() {
            sums[column] = sums[column].then(*one);
        }
        rows.push(SenderRow {
            title: id.to_string(),
            sent,
            name: placement.name(rank).to_string(),
        });
    }
    rows.push(SenderRow { title: "all".into(), sent: sums, name: String::new() });

    let mut head = String::new();
    for column in columns {
        head += &format!("{column:>11}{:8}", "");
    }
    let mut text = format!("  {:<8}{}\n", "sends", head.trim_end());
    for SenderRow { title, sent, name } in &rows {
        let mut cells = String::new();
        for one in sent {
            cells += &format!("{:>11} in {:<4}", size_text(one.bytes as usize), one.steps);
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {title:<8}{}", format!("{cells} {name}").trim_end());
    }
    text
}
