//! `potluck train --explain`: tables that describe a run, without running it.

use std::fmt::Write;
use std::sync::Arc;

use super::args::Explain;
use crate::base::{BucketId, Position};
use crate::bench::profile::Profile;
use crate::collective::{RankGroup, ShardLayout, Topology};
use crate::data::Tokenizer;
use crate::device::Selection;
use crate::exec::staging_bytes;
use crate::graph::Plan;
use crate::graph::print::{
    RankMemoryUsage, fusion_table, graph_dot, graph_table, memory_table, memory_tables, size_text,
};
use crate::parallel::{Share, contiguous_shares, data_parallel, single_rank};
use crate::runtime::placement::assemble::selections;
use crate::runtime::placement::plans::Plans;
use crate::runtime::placement::shares::{fixed_counts, layout_of};
use crate::runtime::timing;
use crate::train::spec::RunSpec;

/// Bytes of one exchanged value.
const VALUE_BYTES: usize = size_of::<f32>();

/// Returns the text that `--explain` prints; `devices` is the selector, and `tokenizer` that of a
/// checkpoint.
pub fn explanation(
    explain: Explain,
    spec: &RunSpec,
    devices: &str,
    tokenizer: Option<Tokenizer>,
) -> anyhow::Result<String> {
    if explain == Explain::Kernels {
        return Ok(Profile::measure(spec, devices, tokenizer)?.table());
    }
    let vocabulary = match tokenizer {
        Some(saved) => saved.vocabulary(),
        None => spec.load_data(None)?.tokenizer().vocabulary(),
    };
    let (training, fused) = spec.training_graph(vocabulary)?;
    let plans = Plans::new(training);
    let plan = plans.of_rows(spec.micro_batch);
    Ok(match explain {
        Explain::Graph => {
            graph_table(&plan.graph) + &fusion_table(&fused, spec.micro_batch as usize)
        }
        Explain::Dot => graph_dot(&plan.graph),
        Explain::Memory | Explain::Program | Explain::Communication => {
            let devices_of_run = PlannedDevices::of(spec, devices)?;
            let text = match explain {
                Explain::Memory => memory(spec, &devices_of_run, &plans),
                Explain::Program => program(spec, &devices_of_run, &plan),
                _ => communication(spec, &devices_of_run, &plan),
            };
            devices_of_run.caveat(spec).to_string() + &text
        }
        Explain::Kernels | Explain::Keys | Explain::Config => String::new(),
    })
}

/// Devices and shares of a run as far as they are known without opening a device.
struct PlannedDevices {
    names: Vec<String>,
    shares: Vec<Share>,
}

impl PlannedDevices {
    fn of(spec: &RunSpec, devices: &str) -> anyhow::Result<Self> {
        let chosen = selections(devices)?;
        let name = |selection: &Selection| match selection {
            Selection::Cpu { .. } => "cpu".to_string(),
            Selection::Adapter(adapter) => adapter.name.clone(),
        };
        let names: Vec<String> = chosen.iter().map(name).collect();
        let counts = match is_measured(spec) {
            true => timing::split_evenly(spec.batch, names.len()),
            false => fixed_counts(&spec.parallel, spec.batch, names.len())?,
        };
        let shares = contiguous_shares(&counts, &vec![spec.micro_batch; counts.len()]);
        Ok(Self { names, shares })
    }

    /// Returns a note that the shares are not known before the devices are measured, or an empty
    /// text.
    fn caveat(&self, spec: &RunSpec) -> &'static str {
        match is_measured(spec) && self.names.len() > 1 {
            true => {
                "shares are measured when the run starts, and devices may be left out; here \
                     they are even\n"
            }
            false => "",
        }
    }

    fn world(&self) -> u32 {
        self.names.len() as u32
    }

    /// Returns the heading of a rank's section.
    fn title(&self, rank: usize) -> String {
        format!("rank {rank}: {}, {} samples", self.names[rank], self.shares[rank].count)
    }
}

/// Returns true if the run measures the shares at its start.
fn is_measured(spec: &RunSpec) -> bool {
    spec.parallel.shares.is_none()
}

fn buckets(plan: &Plan) -> impl Iterator<Item = BucketId> {
    (0..plan.buckets.len() as u32).map(BucketId)
}

fn memory(spec: &RunSpec, devices_of_run: &PlannedDevices, plans: &Plans) -> String {
    let moments = spec.optimizer.moments();
    let of_rank = |(rank, share): (u32, &Share)| {
        let plan = plans.of_rows(share.micro_batch.min(share.count).max(1));
        let layout = layout_of(&spec.parallel, &plan, devices_of_run.names.len());
        let owned = buckets(&plan).map(|bucket| layout.shard(bucket, Position(rank)).len()).sum();
        (plan, owned)
    };
    let plans: Vec<(Arc<Plan>, usize)> = (0..).zip(&devices_of_run.shares).map(of_rank).collect();
    if let [(plan, _)] = &plans[..] {
        return memory_table(plan, moments);
    }
    let ranks = devices_of_run.names.iter().zip(&plans).map(|(name, (plan, owned))| {
        RankMemoryUsage { name, plan, owned: *owned, staging: Some(staging_bytes(plan)) }
    });
    memory_tables(&ranks.collect::<Vec<_>>(), moments)
}

fn program(spec: &RunSpec, devices_of_run: &PlannedDevices, plan: &Plan) -> String {
    if let [share] = devices_of_run.shares[..] {
        return single_rank(plan, share.count, share.micro_batch).to_string();
    }
    let overlap = spec.parallel.overlap;
    let programs = devices_of_run.shares.iter().enumerate().map(|(rank, share)| {
        format!("{}\n{}", devices_of_run.title(rank), data_parallel(plan, *share, overlap))
    });
    programs.collect::<Vec<_>>().join("\n")
}

/// Traffic that a rank sends in one phase of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sent {
    messages: usize,
    bytes: usize,
}

impl Sent {
    fn add(&mut self, messages: usize, bytes: usize) {
        self.messages += messages;
        self.bytes += messages * bytes;
    }

    fn plus(self, other: Self) -> Self {
        let Self { messages, bytes } = self;
        Self { messages: messages + other.messages, bytes: bytes + other.bytes }
    }
}

/// Returns the traffic that the rank at a position sends for all chunks: in the reduce-scatter
/// and in the all-gather.
fn sent(layout: &ShardLayout, position: Position) -> [Sent; 2] {
    let [mut reduce, mut gather] = [Sent::default(); 2];
    let others = layout.size - 1;
    for chunk in &layout.chunks {
        let bytes = chunk.range.len() * VALUE_BYTES;
        match layout.topology {
            // Once around the ring, without the hop from the owner in the reduce-scatter and the
            // hop back to it in the all-gather.
            Topology::Ring => {
                reduce.add(usize::from(chunk.owner != position), bytes);
                gather.add(usize::from(chunk.owner != layout.next(position)), bytes);
            }
            Topology::Star if position.index() == 0 => gather.add(others as usize, bytes),
            Topology::Star => reduce.add(1, bytes),
        }
    }
    [reduce, gather]
}

fn communication(spec: &RunSpec, devices_of_run: &PlannedDevices, plan: &Plan) -> String {
    if devices_of_run.world() == 1 {
        return "one device: nothing travels\n".into();
    }
    let layout = layout_of(&spec.parallel, plan, devices_of_run.names.len());
    [head(spec, devices_of_run), bucket_rows(&layout, plan), sender_rows(&layout, devices_of_run)]
        .join("\n")
}

fn head(spec: &RunSpec, devices_of_run: &PlannedDevices) -> String {
    let world = devices_of_run.world();
    let (way, hops) = match spec.parallel.topology {
        Topology::Ring => ("ring", world - 1),
        Topology::Star => ("star", 1),
    };
    let kib = spec.parallel.chunk_bytes >> 10;
    format!(
        "{way} of {world} devices, messages of up to {kib} KiB\n\
         a gradient is summed after {hops} messages in a row, a parameter is everywhere after \
         {hops} more\n"
    )
}

/// Table of the value ranges of each bucket by the rank that owns them.
fn bucket_rows(layout: &ShardLayout, plan: &Plan) -> String {
    let mut text =
        "  bucket        size  messages  values that rank 0, 1, .. updates\n".to_string();
    for bucket in buckets(plan) {
        let size = size_text(plan.buckets[bucket.index()].length * VALUE_BYTES);
        let messages = layout.chunks_of(bucket).len();
        let owned = (0..layout.size).map(|position| layout.shard(bucket, Position(position)));
        let owned = owned.map(|range| format!("{}..{}", range.start, range.end));
        let owned = owned.collect::<Vec<_>>().join("  ");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {:<6}{size:>12}{messages:>10}  {owned}", bucket.index());
    }
    text
}

/// Table of the bytes and messages that each rank sends in a step.
fn sender_rows(layout: &ShardLayout, devices_of_run: &PlannedDevices) -> String {
    let columns = ["reduce", "gather", "a step"].map(|title| format!("{title:>11}{:8}", ""));
    let mut text = format!("  {:<8}{}\n", "sends", columns.concat().trim_end());
    let mut all = [Sent::default(); 3];
    let mut row = |title: &str, sent: &[Sent; 3], name: &str| {
        let cell = |sent: &Sent| format!("{:>11} in {:<4}", size_text(sent.bytes), sent.messages);
        let cells: String = sent.iter().map(cell).collect();
        let _ = writeln!(text, "  {title:<8}{}", format!("{cells} {name}").trim_end());
    };
    let members = RankGroup::all(layout.size);
    for (name, (position, rank)) in devices_of_run.names.iter().zip(members.iter()) {
        let [reduce, gather] = sent(layout, position);
        let sent = [reduce, gather, reduce.plus(gather)];
        all = std::array::from_fn(|column| all[column].plus(sent[column]));
        row(&rank.to_string(), &sent, name);
    }
    row("all", &all, "");
    text
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use super::*;
    use crate::base::ChunkId;
    use crate::collective::{Action, CollectiveKind, Event, Exchange};

    /// Runs the exchanges of all ranks and returns the traffic that each rank sent.
    fn exchanged(layout: &ShardLayout) -> Vec<[Sent; 2]> {
        let layout = Arc::new(layout.clone());
        let all = 0..layout.size;
        let exchange = |position| Exchange::new(layout.clone(), Position(position), 1);
        let mut ranks: Vec<Exchange> = all.clone().map(exchange).collect();
        let mut events: VecDeque<(Position, Event)> = VecDeque::new();
        for chunk in (0..layout.chunks.len() as u32).map(ChunkId) {
            let ready = Event::LocalReady { kind: CollectiveKind::ReduceScatter, chunk };
            events.extend(all.clone().map(|position| (Position(position), ready)));
        }
        let mut sent = vec![[Sent::default(); 2]; all.len()];
        while let Some((position, event)) = events.pop_front() {
            ranks[position.index()].handle(0, event).unwrap();
            while let Some(action) = ranks[position.index()].poll_action() {
                match action {
                    Action::Send { kind, chunk, to } => {
                        let bytes = layout.chunk(chunk).range.len() * VALUE_BYTES;
                        sent[position.index()][kind as usize].add(1, bytes);
                        events.push_back((to, Event::Received { kind, chunk, from: position }));
                    }
                    Action::Reduced { chunk } => {
                        let kind = CollectiveKind::AllGather;
                        events.push_back((position, Event::LocalReady { kind, chunk }));
                    }
                    Action::Accumulate { .. } | Action::StoreFinal { .. } | Action::Done { .. } => {
                    }
                }
            }
        }
        sent
    }

    #[test]
    fn what_is_told_is_what_an_exchange_sends() {
        for topology in [Topology::Ring, Topology::Star] {
            for world in 1..=5 {
                let layout = ShardLayout::new(topology, world, &[1000, 64, 4097], 64, 256);
                let positions = (0..world).map(Position);
                let expected: Vec<[Sent; 2]> =
                    positions.map(|position| sent(&layout, position)).collect();
                assert_eq!(expected, exchanged(&layout), "{topology:?} of {world}");
            }
        }
    }
}
