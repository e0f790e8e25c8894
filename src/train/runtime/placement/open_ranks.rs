//! Opening of the devices of an arrangement.

use super::decision::PlacementDecision;
use super::laid_out::{later_programs, lay_out, memory_of_ranks, moments_of_rank};
use super::open_one::{BegunOpening, RankOpening, RequestedDevices};
use super::pipeline::require_shared_memory;
use super::rank_memory::{host_bytes, pools_of};
use super::reduce_sites::reduce_sites;
use super::start::ReadyRanks;
use super::statistics::require_statistics;
use super::types::PlacementRequest;
use crate::runtime::open::OpenDevice;
use crate::runtime::{RuntimeError, memory};
use potluck_kernels::autotune;
use potluck_parallel::collective::{BucketGroups, ShardLayout};
use potluck_parallel::{Placement, ReduceSite};

/// Opens the devices of a decision, each with its part of the model. Keeps the choices that `saved`
/// records for a device.
///
/// # Errors
/// Returns `RuntimeError` if the micro-batches are too small for statistics, or if a device cannot
/// be opened or has too little memory.
pub(crate) fn open_decided(
    request: &PlacementRequest,
    devices: RequestedDevices,
    decision: PlacementDecision,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<ReadyRanks, RuntimeError> {
    let PlacementDecision { arrangement, expected, is_kept, mut notes } = decision;
    let laid_out = lay_out(request, &arrangement)?;
    let later = later_programs(request, &arrangement, laid_out.whole());
    let programs = laid_out.written.programs.iter().chain(&later);
    notes.extend(require_statistics(laid_out.whole(), programs)?);
    let on = arrangement.positions.iter().map(|position| &devices.selections[*position]);
    let ranks = memory_of_ranks(&laid_out, request, on);
    memory::require(host_bytes(request, ranks.iter().copied(), pools_of(&ranks)))?;
    if arrangement.mesh.is_divided() {
        require_shared_memory(request, devices, &arrangement.positions, &ranks)?;
    }
    let mut openings = Vec::new();
    for (rank, &position) in arrangement.positions.iter().enumerate() {
        openings.push(RankOpening {
            position,
            selection: &devices.selections[position],
            name: &devices.names[position],
            plan: laid_out.written.plans[rank].clone(),
            tensor_shares: &arrangement.tensor_shares,
            moments: moments_of_rank(&laid_out, request, rank),
        });
    }
    let layout = &laid_out.layout;
    let groups = &laid_out.written.groups;
    let (members, reduce_sites) = open_all(request, openings, layout, groups, saved, report)?;
    Ok(ReadyRanks { arrangement, laid_out, members, reduce_sites, is_kept, notes, expected })
}

/// Opens the devices of all ranks, and decides the site of each for the addition of gradients.
///
/// # Errors
/// Returns the `RuntimeError` of the first device that fails.
fn open_all(
    request: &PlacementRequest,
    ranks: Vec<RankOpening>,
    layout: &ShardLayout,
    groups: &BucketGroups,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<(Vec<OpenDevice>, Vec<ReduceSite>), RuntimeError> {
    let world = ranks.len();
    let mut openings = Vec::new();
    for rank in ranks {
        let position = rank.position;
        let kept = saved.and_then(|saved| saved.of_position(position, world));
        let opening = BegunOpening::begin(request, rank, kept);
        let opening = opening.map_err(|error| error.of_position(position, world))?;
        openings.push((position, opening));
    }
    let mut opened: Vec<OpenDevice> = Vec::new();
    for (position, opening) in openings {
        let one = opening.finish(request, report);
        opened.push(one.map_err(|error| error.of_position(position, world))?);
    }
    let devices: Vec<&OpenDevice> = opened.iter().collect();
    let sites = reduce_sites(request, &devices, layout, groups, saved)
        .map_err(|failed| failed.error.of_position(devices[failed.rank].position, world))?;
    Ok((opened, sites))
}
