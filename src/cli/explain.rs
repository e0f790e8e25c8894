//! `potluck train --explain`: tables that describe a run, without running it.

mod edges;
mod instructions;
pub mod pipelines;

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use super::args::Explain;
use super::schedule_chart;
use crate::base::shape::ELEMENT_BYTES;
use crate::base::{BucketId, Position, Rank};
use crate::bench::profile::Profile;
use crate::collective::{CollectiveKind, CommCost, RankGroup, ShardLayout, Topology, cost};
use crate::device::Selection;
use crate::device::host::available_memory;
use crate::exec::Moments;
use crate::graph::passes::fuse::Fusion;
use crate::graph::print::{
    RankMemoryUsage, fusion_table, graph_dot, graph_table, memory_table, memory_tables, size_text,
};
use crate::graph::{Graph, Plan};
use crate::parallel::{Placement, Share, contiguous_shares, data_parallel, single_rank};
use crate::runtime::memory::{comparison, gibibytes, limit};
use crate::runtime::placement::assemble::selections;
use crate::runtime::placement::host_memory;
use crate::runtime::placement::names::distinct;
use crate::runtime::placement::plans::Plans;
use crate::runtime::placement::shares::{
    fixed_counts, layout_of, moments as rank_moments, owned_elements,
};
use crate::runtime::{self, timing};
use crate::train::error::TrainError;
use crate::train::run_data::{DataShape, SavedData};
use crate::train::spec::RunSpec;
use crate::train::{carried, loader};
use instructions::InstructionNames;
use pipelines::{PipelineTable, with_pipelines};

/// Bytes of one exchanged value.
const VALUE_BYTES: usize = size_of::<f32>();

/// Parts of a checkpoint that decide about the run that resumes from it.
#[derive(Default)]
pub struct ResumedParts {
    pub data: SavedData,
    pub placement: Option<Placement>,
}

/// Returns the text that `--explain` prints; `resumed` is of the checkpoint from which the run
/// starts, and `svg` the file of the drawing of a schedule.
///
/// # Errors
/// Returns the errors of loading the text, building the graph, choosing devices and timing kernels,
/// those of pipelines that the run refuses, `UsageError` for the schedule of a run without a
/// pipeline, and `TrainError::Defect` for the keys, which need no run.
pub fn explanation(
    explain: Explain,
    spec: &RunSpec,
    resumed: ResumedParts,
    svg: Option<&Path>,
) -> anyhow::Result<String> {
    let ResumedParts { data, placement } = resumed;
    let data = &data;
    if let Some(table) = pipeline_table(explain).filter(|_| spec.parallel.pipeline.stages > 1) {
        let text = |found: &pipelines::ExplainedPipelines| Ok(table.text(found));
        return with_pipelines(spec, data, placement.as_ref(), None, text);
    }
    let planned = || -> anyhow::Result<(Plans, Vec<Fusion>)> {
        let (training, fused) = spec.training_graph(&data_shape(spec, data)?)?;
        Ok((Plans::new(training), fused))
    };
    let on_devices = |table: fn(&RunSpec, &PlannedDevices, &Plans) -> String| {
        let (plans, _) = planned()?;
        let devices_of_run = PlannedDevices::of(spec)?;
        Ok(devices_of_run.caveat(spec).to_string() + &table(spec, &devices_of_run, &plans))
    };
    match explain {
        Explain::Graph => {
            let (plans, fused) = planned()?;
            let graph = &plans.of_rows(spec.micro_batch).graph;
            Ok(graph_table(graph) + &fusion_table(&fused, spec.micro_batch as usize))
        }
        Explain::Dot => Ok(graph_dot(&planned()?.0.of_rows(spec.micro_batch).graph)),
        Explain::Memory => on_devices(memory),
        Explain::Program => on_devices(program),
        Explain::Communication => on_devices(communication),
        Explain::Schedule => schedule_chart::explain(spec, svg, data, placement.as_ref()),
        Explain::Kernels => kernels(spec, data),
        Explain::Config => Ok(spec.run_toml.clone()),
        Explain::Keys => {
            let why = "the keys are those of every run, and not explained by one";
            Err(TrainError::Defect(why.into()).into())
        }
    }
}

/// Returns the table that describes pipelines, if there is one of its own.
fn pipeline_table(explain: Explain) -> Option<PipelineTable> {
    match explain {
        Explain::Program => Some(PipelineTable::Program),
        Explain::Memory => Some(PipelineTable::Memory),
        Explain::Communication => Some(PipelineTable::Communication),
        _ => None,
    }
}

/// Returns a table per device, each of whole batches on that device alone.
fn kernels(spec: &RunSpec, saved_data: &SavedData) -> anyhow::Result<String> {
    let mut tables = Vec::new();
    for selection in selections(&spec.devices)? {
        tables.push(Profile::measure(spec, selection, saved_data)?.table());
    }
    Ok(tables.join("\n"))
}

/// Returns the sizes of the data of the run's model: as a checkpoint knows them if there is one, or
/// else those of the run's data.
fn data_shape(spec: &RunSpec, saved: &SavedData) -> anyhow::Result<DataShape> {
    Ok(match saved.shape() {
        Some(shape) => shape,
        None => spec.load_data(saved)?.shape,
    })
}

/// Devices and shares of a run as far as they are known without opening a device.
struct PlannedDevices {
    selections: Vec<Selection>,
    names: Vec<String>,
    shares: Vec<Share>,
}

impl PlannedDevices {
    fn of(spec: &RunSpec) -> anyhow::Result<Self> {
        let chosen = selections(&spec.devices)?;
        let names = distinct(chosen.iter().map(|one| one.name().to_string()).collect());
        let counts = match is_measured(spec) {
            true => timing::split_evenly(spec.batch, names.len()),
            false => fixed_counts(&spec.parallel, spec.batch, names.len())?,
        };
        let shares = contiguous_shares(&counts, &vec![spec.micro_batch; counts.len()]);
        Ok(Self { selections: chosen, names, shares })
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
    let world = devices_of_run.names.len();
    let plan_of = |share: &Share| plans.of_rows(share.micro_batch.min(share.count).max(1));
    let plans: Vec<Arc<Plan>> = devices_of_run.shares.iter().map(plan_of).collect();
    let layout = layout_of(&spec.parallel, &plans[0], world);
    let pools = host_memory::pools(&spec.parallel, &plans[0], world);
    let mut host = host_memory::shared(&spec.parallel, &plans[0], world, moments);
    host = host.saturating_add(batches_bytes(&plans[0].graph, spec.batch as usize));
    let (mut limits, mut staging, mut owned) = (Vec::new(), Vec::new(), Vec::new());
    let mut workspaces = Vec::new();
    for (rank, (selection, plan)) in devices_of_run.selections.iter().zip(&plans).enumerate() {
        let moments = rank_moments(&spec.optimizer, &layout, rank);
        host = host.saturating_add(host_memory::of_device(selection, plan, &moments, world));
        workspaces.push(runtime::memory::workspace(selection, plan, &moments));
        limits.push(limit_line(spec, selection, plan, &moments));
        staging.push(host_memory::staging(selection, plan, world));
        owned.push(owned_elements(&moments));
    }
    let available = available_memory().map(|bytes| (bytes, "which are available"));
    let host = format!("memory of the host: {}\n", comparison(host, available));
    if let [plan] = &plans[..] {
        return memory_table(plan, moments, workspaces[0], &limits[0]) + &host;
    }
    let ranks = (0..world).map(|rank| RankMemoryUsage {
        name: &devices_of_run.names[rank],
        plan: &plans[rank],
        owned: owned[rank],
        workspace: workspaces[rank],
        staging: Some(staging[rank]),
        pool: Some(pools[rank]),
        edges: None,
        stashes: None,
        limit: &limits[rank],
    });
    memory_tables(&ranks.collect::<Vec<_>>(), moments) + &host
}

/// Returns the bytes of host memory that batches take: prefetched inputs, and carried states.
fn batches_bytes(graph: &Graph, batch: usize) -> usize {
    let values: usize =
        graph.inputs_of_samples().map(|(_, id)| graph.tensor(*id).shape.per_row()).sum();
    loader::bytes(batch, values * ELEMENT_BYTES).saturating_add(carried::bytes(graph, batch))
}

/// Returns a line that compares what a device needs with the memory that it has.
fn limit_line(spec: &RunSpec, selection: &Selection, plan: &Plan, moments: &Moments) -> String {
    let needed = runtime::memory::needed(selection, plan, moments);
    match (selection, limit(selection, spec.opening.device_memory_mib)) {
        (Selection::Cpu { .. }, None) => {
            format!("{} needed, of the memory of the host", gibibytes(needed as u64))
        }
        (_, Some((has, basis))) if needed as u64 > has && moments.owned.is_some() => {
            // Pipelines take the micro-batches that are given.
            let next = match is_measured(spec) && spec.parallel.pipeline.stages == 1 {
                true => "; a run that measures its shares tries fewer samples at a time",
                false => "",
            };
            comparison(needed, Some((has, basis))) + next
        }
        (_, limit) => comparison(needed, limit),
    }
}

fn program(spec: &RunSpec, devices_of_run: &PlannedDevices, plans: &Plans) -> String {
    let plan = plans.of_rows(spec.micro_batch);
    let names = InstructionNames { plan: &plan, edges: &[] };
    if let [share] = devices_of_run.shares[..] {
        return names.program(&single_rank(&plan, share.count, share.micro_batch));
    }
    let overlap = spec.parallel.overlap;
    let programs = devices_of_run.shares.iter().enumerate().map(|(rank, share)| {
        let program = names.program(&data_parallel(&plan, *share, overlap));
        format!("{}\n{program}", devices_of_run.title(rank))
    });
    programs.collect::<Vec<_>>().join("\n")
}

fn communication(spec: &RunSpec, devices_of_run: &PlannedDevices, plans: &Plans) -> String {
    if devices_of_run.world() == 1 {
        return "one device: nothing travels\n".into();
    }
    let plan = plans.of_rows(spec.micro_batch);
    let layout = layout_of(&spec.parallel, &plan, devices_of_run.names.len());
    [head(spec, devices_of_run), bucket_rows(&layout, &plan), sender_rows(&layout, devices_of_run)]
        .join("\n")
}

fn head(spec: &RunSpec, devices_of_run: &PlannedDevices) -> String {
    let world = devices_of_run.world();
    let way = spec.parallel.topology.name();
    let hops = match spec.parallel.topology {
        Topology::Ring => world - 1,
        Topology::Star => 1,
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
    let members = RankGroup::all(layout.size);
    let row = |(name, (position, rank)): (&String, (Position, Rank))| {
        let phases = [CollectiveKind::ReduceScatter, CollectiveKind::AllGather];
        let [reduce, gather] =
            phases.map(|kind| cost::sent_by(layout, position, kind, VALUE_BYTES as u64));
        (rank.to_string(), vec![reduce, gather, reduce.then(gather)], name.clone())
    };
    let rows: Vec<SenderRow> = devices_of_run.names.iter().zip(members.iter()).map(row).collect();
    sent_table(&["reduce", "gather", "a step"], &rows)
}

/// A rank, what it sends by column, and the name of its device.
type SenderRow = (String, Vec<CommCost>, String);

/// Formats what ranks send, with the sums over all of them.
fn sent_table(columns: &[&str], rows: &[SenderRow]) -> String {
    let titles: String = columns.iter().map(|title| format!("{title:>11}{:8}", "")).collect();
    let mut text = format!("  {:<8}{}\n", "sends", titles.trim_end());
    let sum = |column: usize| {
        let sent = rows.iter().map(|(_, sent, _)| sent[column]);
        sent.fold(CommCost::default(), CommCost::then)
    };
    let all = ("all".to_string(), (0..columns.len()).map(sum).collect(), String::new());
    for (title, sent, name) in rows.iter().chain([&all]) {
        let cell = |sent: &CommCost| {
            format!("{:>11} in {:<4}", size_text(sent.bytes as usize), sent.steps)
        };
        let cells: String = sent.iter().map(cell).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {title:<8}{}", format!("{cells} {name}").trim_end());
    }
    text
}
