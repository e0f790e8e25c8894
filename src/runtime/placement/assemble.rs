//! Assembly of a worker group from a request: selects and opens the devices, decides their
//! shares, and starts the group. Everything measured here is decided before step 1, recorded, and
//! kept on resume.

use super::arrangement::Arrangement;
use super::laid_out::LaidOut;
use super::names::display_names;
use super::open_ranks::{RequestedDevices, open_new, open_recorded};
use super::pipeline::open_pipelines;
use super::repeat::{note, repeated_by};
use super::start::{ReadyRanks, start};
use super::statistics::require_statistics;
use super::types::{OpenedRanks, PlacedWorkers, PlacementRequest};
use crate::autotune::{self, cache};
use crate::device::{Adapter, Selection, list_adapters, select_all};
use crate::exec::cpu::host_name;
use crate::parallel::{Placement, contiguous_shares};
use crate::runtime::RuntimeError;
use crate::runtime::open::OpenDevice;

/// Opens the requested devices, measures them if requested, and starts them as a worker group.
///
/// # Errors
/// Returns `RuntimeError` if no device matches, if the plan exceeds a device's limits or memory,
/// if the shares do not fit the devices, or if a device fails.
pub fn assemble(
    request: &PlacementRequest,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlacedWorkers, RuntimeError> {
    let adapters = adapters_for(request.selector);
    let mut selections = select_all(request.selector, &adapters)?;
    selections.extend(request.nodes.offered());
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    let candidates = candidates(&selections);
    let has_stages = request.parallel.pipeline.stages > 1;
    let saved = request.saved.filter(|saved| saved.is_of(&candidates, has_stages));
    let ready = if has_stages {
        open_pipelines(request, devices, saved, report)?
    } else {
        open_replicas(request, devices, saved, report)?
    };
    // A run that keeps its shares says nothing new.
    let is_kept = ready.is_kept;
    let mut placed = start(request, ready, candidates)?;
    let repeated = if is_kept {
        None
    } else {
        repeated_by(request, &adapters, &placed.placement, &placed.plan)
    };
    placed.notes.extend(note(&placed, repeated));
    Ok(placed)
}

/// Opens the requested devices with the whole model each.
fn open_replicas(
    request: &PlacementRequest,
    devices: RequestedDevices,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<ReadyRanks, RuntimeError> {
    let keeps_shares = !request.retune && request.parallel.shares.is_none();
    let kept =
        saved.filter(|saved| keeps_shares && saved.shares_fit(request.batch, request.micro_batch));
    let chosen = match kept {
        Some(kept) => open_recorded(request, devices, kept, report),
        None => open_new(request, devices, saved, report),
    };
    let OpenedRanks { members, reduce_sites, mut notes } = chosen?;
    let arrangement = arrangement(request, &members);
    let laid_out = LaidOut::of(request, &arrangement);
    notes.extend(require_statistics(&laid_out.whole, laid_out.written.programs.iter())?);
    let members = members.into_iter().map(|(one, ..)| one).collect();
    let is_kept = kept.is_some();
    Ok(ReadyRanks { arrangement, laid_out, members, reduce_sites, is_kept, notes })
}

/// Returns the devices that a selector chooses.
pub fn selections(selector: &str) -> Result<Vec<Selection>, RuntimeError> {
    Ok(select_all(selector, &adapters_for(selector))?)
}

/// Returns the adapters among which a selector chooses. Enumerating them takes a while, so it is
/// skipped for a selector that names only the CPU.
pub fn adapters_for(selector: &str) -> Vec<Adapter> {
    for part in selector.split(',') {
        let name = part.split('*').next().unwrap_or_default();
        if !name.trim().eq_ignore_ascii_case("cpu") {
            return list_adapters();
        }
    }
    Vec::new()
}

/// Returns the identities of devices, by which a placement knows them.
pub fn candidates(selections: &[Selection]) -> Vec<String> {
    selections.iter().map(identity).collect()
}

/// Returns the identity of a device, which decides the bits of its results.
pub fn identity(selection: &Selection) -> String {
    match selection {
        Selection::Cpu { .. } => host_name(),
        Selection::Adapter(adapter) => cache::device_key(adapter),
        Selection::Offered(device) => device.identity.clone(),
    }
}

/// Returns the arrangement of opened devices; none runs more samples at a time than its plan has
/// rows.
fn arrangement(request: &PlacementRequest, members: &[(OpenDevice, u32, u32)]) -> Arrangement {
    let mut positions = Vec::new();
    let mut counts = Vec::new();
    let mut micro_batches = Vec::new();
    let mut rows = Vec::new();
    for (one, count, micro_batch) in members {
        positions.push(one.position);
        counts.push(*count);
        micro_batches.push((*micro_batch).min(one.rows));
        rows.push(one.rows);
    }
    Arrangement::of_replicas(
        positions,
        contiguous_shares(&counts, &micro_batches),
        rows,
        request.plans.of_rows(1).graph.blocks.len() as u32,
        request.parallel.pipeline.schedule,
    )
}
