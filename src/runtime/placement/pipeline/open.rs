//! Opening of the devices of pipelines, each with the part of the model that it holds.

use std::ops::Range;

use super::checks::{require_devices, require_micro_batches, require_model};
use super::shared_memory::require_shared_memory;
use super::{RequestedPipelines, given, kept, search};
use crate::autotune;
use crate::base::Rank;
use crate::comm::ring_pool_bytes_max;
use crate::device::Selection;
use crate::graph::Graph;
use crate::graph::print::MemoryUsage;
use crate::parallel::Placement;
use crate::runtime::placement::arrangement::Arrangement;
use crate::runtime::placement::host_memory;
use crate::runtime::placement::laid_out::LaidOut;
use crate::runtime::placement::open_ranks::{RankOpening, RequestedDevices, open_all};
use crate::runtime::placement::start::ReadyRanks;
use crate::runtime::placement::statistics::require_statistics;
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};

/// Opens the requested devices as pipelines. Everything that does not need a device is checked
/// before the first one is opened.
///
/// # Errors
/// Returns `RuntimeError` if the devices make no whole pipelines, if the model cannot be cut or the
/// batch not be divided, or if a device cannot be opened or has too little memory.
pub fn open_pipelines(
    request: &PlacementRequest,
    devices: RequestedDevices,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<ReadyRanks, RuntimeError> {
    let requested = RequestedPipelines::of(request);
    let options = &request.parallel.pipeline;
    require_devices(&requested, devices.selections.len())?;
    require_model(&requested, &request.plans.of_rows(1).graph, &options.blocks_per_stage)?;
    let mut notes = Vec::new();
    let kept = kept(request, saved);
    let is_kept = kept.is_some();
    let arrangement = match kept {
        Some(kept) => kept,
        None => match given(request, devices.selections.len())? {
            Some(given) => given,
            None => search::by_measurement(request, devices, &mut notes, report)?.0,
        },
    };
    notes.extend(require_micro_batches(&requested, &arrangement)?);
    let laid_out = LaidOut::of(request, &arrangement);
    notes.extend(require_statistics(&laid_out.whole, laid_out.written.programs.iter())?);
    require_host_memory(request, devices, &arrangement, &laid_out)?;
    require_shared_memory(request, devices, &arrangement, &laid_out)?;
    let mut openings = Vec::new();
    for (rank, &position) in arrangement.positions.iter().enumerate() {
        openings.push(RankOpening {
            position,
            selection: &devices.selections[position],
            name: &devices.names[position],
            plan: laid_out.written.plans[rank].clone(),
            moments: laid_out.moments(request, rank),
        });
    }
    let layout = &laid_out.layout;
    let groups = &laid_out.written.groups;
    let (members, reduce_sites) = open_all(request, openings, layout, groups, saved, report)?;
    Ok(ReadyRanks { arrangement, laid_out, members, reduce_sites, is_kept, notes })
}

/// Checks that the host has memory for the run.
///
/// # Errors
/// Returns `RuntimeError::Memory` if it has less.
fn require_host_memory(
    request: &PlacementRequest,
    devices: RequestedDevices,
    planned: &Arrangement,
    laid_out: &LaidOut,
) -> Result<(), RuntimeError> {
    memory::require(host_bytes(request, devices.selections, planned, laid_out))
}

/// Returns the bytes of host memory that a run takes: for the devices that use it, for the values
/// on their way between devices, and for saving a checkpoint.
pub fn host_bytes(
    request: &PlacementRequest,
    selections: &[Selection],
    planned: &Arrangement,
    laid_out: &LaidOut,
) -> usize {
    let world = planned.positions.len();
    let saved = MemoryUsage::of(&laid_out.whole, request.optimizer.moments());
    let mut bytes = saved.parameters.saturating_add(saved.moments);
    for (rank, &position) in planned.positions.iter().enumerate() {
        let plan = &laid_out.written.plans[rank];
        let moments = laid_out.moments(request, rank);
        let of_device = host_memory::of_device(&selections[position], plan, &moments, world);
        bytes = bytes.saturating_add(of_device).saturating_add(travelling_bytes(laid_out, rank));
    }
    bytes
}

/// Returns the bytes of host memory that the values which a rank sends take at most.
pub fn travelling_bytes(laid_out: &LaidOut, rank: usize) -> usize {
    let rank = Rank(rank as u32);
    let positions = laid_out.written.groups.positions(rank);
    let reduced = ring_pool_bytes_max(&laid_out.layout, positions);
    reduced.saturating_add(laid_out.written.edges.bytes_from(rank))
}

/// Returns the names of the first and the last block of each run: `embed to h.1 and h.3`.
pub fn names_of_runs(graph: &Graph, runs: &[Range<u32>]) -> String {
    runs.iter().map(|run| run_name(graph, run)).collect::<Vec<_>>().join(" and ")
}

/// Returns the names of the first and the last block of a run: `embed to h.1`.
fn run_name(graph: &Graph, run: &Range<u32>) -> String {
    let first = &graph.blocks[run.start as usize];
    if run.len() == 1 {
        return first.clone();
    }
    format!("{first} to {}", graph.blocks[run.end as usize - 1])
}
