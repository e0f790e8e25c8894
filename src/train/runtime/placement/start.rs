//! Start of a worker group of opened devices, with the record of its placement.

use std::sync::Arc;

use super::network_note::network_note;
use super::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::RuntimeError;
use crate::runtime::expected_step::ExpectedStep;
use crate::runtime::open::OpenDevice;
use crate::runtime::pipelines::ModelPipelines;
use crate::runtime::trace_file::QueuedTraceFile;
use crate::runtime::trace_labels::TraceLabels;
use crate::runtime::workers::{WorkerGroup, WorkerGroupOptions};
use potluck_core::metrics::{Trace, TraceFile};
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::laid_out::LaidOut;
use potluck_parallel::{PipelinePrograms, Placement, RankPlacement, ReduceSite, SpreadPrograms};

/// Opened ranks of a run, ready to start.
pub(crate) struct ReadyRanks {
    pub arrangement: Arrangement,
    pub laid_out: LaidOut,
    /// By rank: its device. `reduce_sites` has the site for the addition of gradients.
    pub members: Vec<OpenDevice>,
    pub(crate) reduce_sites: Vec<ReduceSite>,
    /// True if the arrangement is the resumed run's.
    pub is_kept: bool,
    /// Messages for the user, without the devices' messages.
    pub notes: Vec<String>,
    /// Expected step, if the devices were timed.
    pub(crate) expected: Option<ExpectedStep>,
}

/// Starts the worker group of opened ranks. `candidates` are the identities of the requested
/// devices.
///
/// # Errors
/// Returns `RuntimeError` if the trace cannot be written or a thread cannot be started.
pub fn start(
    request: &PlacementRequest,
    ready: ReadyRanks,
    candidates: Vec<String>,
) -> Result<PlacedWorkers, RuntimeError> {
    let placement = placement(request, &ready, candidates);
    let ReadyRanks { arrangement, laid_out, members, reduce_sites, is_kept, mut notes, expected } =
        ready;
    let LaidOut { group: model, written, layout } = laid_out;
    let node = |one: &OpenDevice| one.driver.remote().map_or(0, |slot| slot.node.number);
    let nodes: Vec<u32> = members.iter().map(node).collect();
    notes.extend(network_note(&written, &nodes).map(|note| format!("warning: {note}")));
    let whole = model.plans[0].clone();
    let PipelinePrograms { programs, plans, edges, groups } = written;
    let trace = match &request.trace {
        Some(path) => Some(Trace::create_with(path, |file| {
            QueuedTraceFile::start(file).map(|file| Box::new(file) as Box<dyn TraceFile>)
        })?),
        None => None,
    };
    let options = WorkerGroupOptions {
        reduce_site: reduce_sites,
        all_reduces: false,
        labels: TraceLabels::of(&plans, &arrangement.pipelines, &edges),
        edges: edges.clone(),
        trace: trace.clone(),
    };
    let mut drivers = Vec::new();
    for one in members {
        notes.extend(one.notes);
        drivers.push(one.driver);
    }
    let group = WorkerGroup::start(drivers, layout, groups, &options)?;
    let is_spread = SpreadPrograms::are_used(request.parallel.overlap, arrangement.mesh, &nodes);
    let spread = is_spread.then(|| SpreadPrograms::of_ranks(&programs, &whole));
    let programs = programs.into_iter().map(Arc::new).collect();
    let Arrangement { pipelines, shares, schedule, .. } = arrangement;
    let pipelines = ModelPipelines::new(model, pipelines, shares, schedule, edges);
    let pipelines = Arc::new(pipelines);
    Ok(PlacedWorkers {
        group,
        plan: whole,
        programs,
        spread,
        placement,
        is_kept,
        pipelines,
        plans,
        notes,
        trace,
        expected,
    })
}

/// Record of opened ranks.
fn placement(request: &PlacementRequest, ready: &ReadyRanks, candidates: Vec<String>) -> Placement {
    let Arrangement { mesh, pipelines, shares, tensor_shares, .. } = &ready.arrangement;
    let parameter_bytes_max = ready.laid_out.whole().options.parameter_bytes_max;
    let mut ranks = Vec::new();
    for (rank, one) in mesh.ranks().zip(&ready.members) {
        let at = mesh.coordinates(rank);
        let micro_batches = &ready.laid_out.written.programs[rank.index()].micro_batches;
        let blocks =
            if mesh.is_divided() { pipelines[at.data].chunks_of(at.pipeline) } else { Vec::new() };
        ranks.push(RankPlacement {
            name: one.driver.name().to_string(),
            identity: one.identity.clone(),
            position: one.position,
            share: shares[at.data].count,
            micro_batch: shares[at.data].micro_batch,
            rows: one.rows,
            micro_batches: micro_batches.iter().map(|m| m.rows).collect(),
            blocks,
            reduce_site: ready.reduce_sites[rank.index()],
            kernels: one.choices.clone(),
            untimed: one.untimed.clone(),
        });
    }
    let cluster = request.nodes.placed(candidates.len());
    let share_history = match request.saved {
        Some(saved) if ready.is_kept => saved.share_history.clone(),
        _ => Vec::new(),
    };
    Placement {
        devices_asked: request.selector.into(),
        options: request.parallel.clone(),
        candidates,
        micro_batch_max: request.micro_batch,
        parameter_bytes_max: parameter_bytes_max.map(|bytes| bytes as u64),
        mesh: *mesh,
        tensor_shares: tensor_shares.clone(),
        ranks,
        share_history,
        cluster,
    }
}
