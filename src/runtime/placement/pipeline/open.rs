//! Opening of the devices of pipelines, each with the part of the model that it holds.

use std::ops::Range;
use std::sync::Arc;

use super::checks::{require_devices, require_micro_batches, require_model};
use super::repeat::repeated_by;
use super::shared_memory::require_shared_memory;
use super::{PlannedPipelines, RequestedPipelines, given, kept, search};
use crate::autotune;
use crate::base::{BucketId, Rank};
use crate::collective::{BucketGroups, LaidOutBucket, ShardLayout, Topology};
use crate::comm::ring_pool_bytes_max;
use crate::device::{Adapter, Selection};
use crate::exec::Moments;
use crate::graph::plan::ALIGNMENT_BYTES;
use crate::graph::print::MemoryUsage;
use crate::graph::{Graph, Plan};
use crate::metrics::Trace;
use crate::parallel::{
    PipelinePrograms, PipelineRequest, Placement, Program, RankPlacement, ReduceSite,
};
use crate::runtime::open::OpenDevice;
use crate::runtime::pipelines::{ModelPipelines, forward_micro_batches_max};
use crate::runtime::placement::host_memory;
use crate::runtime::placement::open_ranks::{RequestedDevices, open_one};
use crate::runtime::placement::reduce_sites::reduce_sites;
use crate::runtime::placement::shares::owned;
use crate::runtime::placement::statistics::require_statistics;
use crate::runtime::placement::types::{ParallelOptions, PlacedWorkers, PlacementRequest};
use crate::runtime::trace_labels::TraceLabels;
use crate::runtime::workers::{WorkerGroup, WorkerGroupOptions};
use crate::runtime::{RuntimeError, memory};

const ELEMENT_BYTES: usize = crate::base::shape::ELEMENT_BYTES;

/// Programs of planned pipelines, with the layout of their buckets.
pub struct LaidOutPipelines {
    pub whole: Arc<Plan>,
    pub written: PipelinePrograms,
    pub layout: ShardLayout,
}

impl LaidOutPipelines {
    /// Writes the programs of planned pipelines, and lays out their buckets.
    pub fn of(request: &PlacementRequest, planned: &PlannedPipelines) -> Self {
        let whole = request.plans.of_rows(planned.rows());
        let written = PipelinePrograms::training(&PipelineRequest {
            plan: &whole,
            pipelines: &planned.stages,
            shares: &planned.shares,
            schedule: planned.schedule,
            overlap: request.parallel.overlap,
            piece_max: request.parallel.chunk_bytes / ELEMENT_BYTES,
            in_flight_min: forward_micro_batches_max(planned.mesh.pipeline),
        });
        let groups = &written.groups;
        let layout = layout_of_groups(request.parallel, &whole, groups, planned.stages.len());
        Self { whole, written, layout }
    }

    /// Returns the moments that a rank keeps.
    pub fn moments(&self, request: &PlacementRequest, rank: usize) -> Moments {
        let PipelinePrograms { plans, groups, .. } = &self.written;
        let owned = owned(&plans[rank], &self.layout, groups, Rank(rank as u32));
        Moments { count: request.optimizer.moments(), owned: Some(owned) }
    }
}

/// Returns the layout of buckets that groups of their own hold, in `pipelines` pipelines. A bucket
/// that several stages of the only pipeline hold is summed by the first of them, which owns it
/// whole; the others send their part when it is complete, without waiting.
pub fn layout_of_groups(
    parallel: &ParallelOptions,
    plan: &Plan,
    groups: &BucketGroups,
    pipelines: usize,
) -> ShardLayout {
    let bucket = |(index, bucket): (usize, &crate::graph::Bucket)| {
        let size = groups.of(BucketId(index as u32)).size();
        let topology = match (pipelines, size) {
            (1, 2..) => Topology::Star,
            _ => parallel.topology,
        };
        LaidOutBucket { length: bucket.length, size, topology }
    };
    let buckets: Vec<LaidOutBucket> = plan.buckets.iter().enumerate().map(bucket).collect();
    let (align, chunk_max) =
        (ALIGNMENT_BYTES / ELEMENT_BYTES, parallel.chunk_bytes / ELEMENT_BYTES);
    ShardLayout::of_buckets(parallel.topology, groups.world(), &buckets, align, chunk_max)
}

/// Opens the requested devices as pipelines, and starts them as a worker group. Everything that
/// does not need a device is checked before the first one is opened.
///
/// # Errors
/// Returns `RuntimeError` if the devices make no whole pipelines, if the model cannot be cut or the
/// batch not be divided, or if a device cannot be opened or has too little memory.
pub fn assemble_pipelines(
    request: &PlacementRequest,
    devices: RequestedDevices,
    (candidates, adapters): (Vec<String>, &[Adapter]),
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlacedWorkers, RuntimeError> {
    let requested = RequestedPipelines::of(request);
    let options = &request.parallel.pipeline;
    require_devices(&requested, devices.selections.len())?;
    require_model(&requested, &request.plans.of_rows(1).graph, &options.blocks_per_stage)?;
    let mut notes = Vec::new();
    let kept = kept(request, saved);
    let is_new = kept.is_none();
    let planned = match kept {
        Some(kept) => kept,
        None => match given(request, devices.selections.len())? {
            Some(given) => given,
            None => search::by_measurement(request, devices, &mut notes, report)?.0,
        },
    };
    notes.extend(require_micro_batches(&requested, &planned)?);
    let laid_out = LaidOutPipelines::of(request, &planned);
    notes.extend(require_statistics(&laid_out.whole, laid_out.written.programs.iter())?);
    require_host_memory(request, devices, &planned, &laid_out)?;
    require_shared_memory(request, devices, &planned, &laid_out)?;
    let mut members = Vec::new();
    let world = planned.positions.len();
    for (rank, &position) in planned.positions.iter().enumerate() {
        let plan = Plan::clone(&laid_out.written.plans[rank]);
        let moments = laid_out.moments(request, rank);
        let before = saved.and_then(|saved| saved.of_position(position, world));
        let one = (&devices.selections[position], &*devices.names[position]);
        let opened = open_one(request, one, plan, moments, before, report);
        let opened = opened.map_err(|error| error.of_position(position, world))?;
        notes.extend(opened.notes.iter().cloned());
        members.push(OpenDevice { position, ..opened });
    }
    let opened: Vec<&OpenDevice> = members.iter().collect();
    let groups = (&laid_out.layout, &laid_out.written.groups);
    let reduce_sites = reduce_sites(request, &opened, groups, saved)
        .map_err(|failed| failed.error.of_position(planned.positions[failed.rank], world))?;
    let placement = placement(request, candidates, &planned, &laid_out, &members, &reduce_sites);
    let repeated = is_new.then(|| repeated_by(request, adapters, &placement)).flatten();
    let repeated = repeated.map(|flags| format!("; to repeat this, add {flags}"));
    notes.push(stages_note(&placement, &laid_out.whole.graph) + &repeated.unwrap_or_default());
    start(request, planned, laid_out, members, (placement, reduce_sites, notes))
}

fn placement(
    request: &PlacementRequest,
    candidates: Vec<String>,
    planned: &PlannedPipelines,
    laid_out: &LaidOutPipelines,
    members: &[OpenDevice],
    reduce_sites: &[ReduceSite],
) -> Placement {
    let requested = RequestedPipelines::of(request);
    let rank = |(rank, one): (usize, &OpenDevice)| {
        let at = planned.mesh.coordinates(Rank(rank as u32));
        let share = planned.shares[at.data];
        let micro_batches = &laid_out.written.programs[rank].micro_batches;
        RankPlacement {
            name: one.driver.name().to_string(),
            identity: one.identity.clone(),
            position: one.position,
            share: share.count,
            micro_batch: share.micro_batch,
            rows: one.rows,
            micro_batches: micro_batches.iter().map(|m| m.rows).collect(),
            blocks: planned.stages[at.data].chunks_of(at.pipeline),
            reduce_site: reduce_sites[rank],
            kernels: one.choices.clone(),
            untimed: one.untimed.clone(),
        }
    };
    Placement {
        candidates,
        micro_batch_max: request.micro_batch,
        mesh: planned.mesh,
        schedule: requested.schedule,
        virtual_stages: requested.chunks as u32,
        ranks: members.iter().enumerate().map(rank).collect(),
    }
}

/// Starts the worker group of opened devices.
fn start(
    request: &PlacementRequest,
    planned: PlannedPipelines,
    laid_out: LaidOutPipelines,
    members: Vec<OpenDevice>,
    (placement, reduce_site, notes): (Placement, Vec<ReduceSite>, Vec<String>),
) -> Result<PlacedWorkers, RuntimeError> {
    let LaidOutPipelines { whole, written, layout } = laid_out;
    let PipelinePrograms { programs, plans, edges, groups } = written;
    let trace = request.trace.as_deref().map(Trace::create).transpose()?;
    let options = WorkerGroupOptions {
        reduce_site,
        is_chained: false,
        labels: TraceLabels::of(&whole.graph, &planned.stages, &edges),
        edges: edges.clone(),
        trace: trace.clone(),
    };
    let drivers = members.into_iter().map(|one| one.driver).collect();
    let group = WorkerGroup::start(drivers, layout, groups, &options)?;
    let programs: Vec<Arc<Program>> = programs.into_iter().map(Arc::new).collect();
    let PlannedPipelines { stages, shares, schedule, .. } = planned;
    let pipelines = ModelPipelines::new(whole.clone(), stages, shares, schedule, edges);
    let pipelines = Some(Arc::new(pipelines));
    Ok(PlacedWorkers { group, plan: whole, programs, placement, pipelines, plans, notes, trace })
}

/// Checks that the host has memory for the run.
///
/// # Errors
/// Returns `RuntimeError::Memory` if it has less.
pub fn require_host_memory(
    request: &PlacementRequest,
    devices: RequestedDevices,
    planned: &PlannedPipelines,
    laid_out: &LaidOutPipelines,
) -> Result<(), RuntimeError> {
    memory::require(host_bytes(request, devices.selections, planned, laid_out))
}

/// Returns the bytes of host memory that a run takes: for the devices that use it, for the values
/// on their way between devices, and for saving a checkpoint.
pub fn host_bytes(
    request: &PlacementRequest,
    selections: &[Selection],
    planned: &PlannedPipelines,
    laid_out: &LaidOutPipelines,
) -> usize {
    let world = planned.positions.len();
    let of_rank = |(rank, position): (usize, &usize)| {
        let (selection, plan) = (&selections[*position], &laid_out.written.plans[rank]);
        let moments = laid_out.moments(request, rank);
        host_memory::of_device(selection, plan, &moments, world)
            .saturating_add(travelling_bytes(laid_out, rank))
    };
    let saved = MemoryUsage::of(&laid_out.whole, request.optimizer.moments());
    let saved = saved.parameters.saturating_add(saved.moments);
    let ranks = planned.positions.iter().enumerate().map(of_rank);
    ranks.fold(saved, usize::saturating_add)
}

/// Returns the bytes of host memory that the values which a rank sends take at most.
pub fn travelling_bytes(laid_out: &LaidOutPipelines, rank: usize) -> usize {
    let rank = Rank(rank as u32);
    let positions = laid_out.written.groups.positions(rank);
    let reduced = ring_pool_bytes_max(&laid_out.layout, positions);
    reduced.saturating_add(laid_out.written.edges.bytes_from(rank))
}

/// Returns a note on the stages: which device has which blocks, and how many samples.
fn stages_note(placement: &Placement, graph: &Graph) -> String {
    let stage =
        |rank: &RankPlacement| format!("{}: {}", rank.name, names_of_runs(graph, &rank.blocks));
    let pipeline = |ranks: Vec<&RankPlacement>| {
        let stages: Vec<String> = ranks.iter().map(|rank| stage(rank)).collect();
        format!("{} ({} samples per step)", stages.join(", "), ranks[0].share)
    };
    let pipelines: Vec<String> = placement.pipelines().map(pipeline).collect();
    format!("stages: {}", pipelines.join("; "))
}

/// Returns the names of the first and the last block of each run: `embed to h.1 and h.3`.
pub fn names_of_runs(graph: &Graph, runs: &[Range<u32>]) -> String {
    runs.iter().map(|run| run_name(graph, run)).collect::<Vec<_>>().join(" and ")
}

/// Returns the names of the first and the last block of a run: `embed to h.1`.
fn run_name(graph: &Graph, run: &Range<u32>) -> String {
    let name = |block: u32| &graph.blocks[block as usize];
    match run.len() {
        1 => name(run.start).clone(),
        _ => format!("{} to {}", name(run.start), name(run.end - 1)),
    }
}
