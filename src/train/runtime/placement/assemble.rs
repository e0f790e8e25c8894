//! Assembly of a worker group from a request: selects and opens the devices, decides their
//! shares, and starts the group. Everything measured here is decided before step 1, recorded, and
//! kept on resume.

use super::decision::{decide, saved_of};
use super::names::display_names;
use super::open_measured::open_measured;
use super::open_ranks::{RequestedDevices, open_decided};
use super::repeat::{note, repeated_by};
use super::start::start;
use super::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::RuntimeError;
use potluck_kernels::autotune::{self, cache};
use potluck_kernels::device::{Adapter, Selection, list_adapters, select_all};
use potluck_kernels::exec::cpu::host_name;

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
    let saved = saved_of(request, &selections);
    let ready = match decide(request, devices, saved, report)? {
        Some(decision) => open_decided(request, devices, decision, saved, report)?,
        None => open_measured(request, devices, saved, report)?,
    };
    // A run that keeps its shares says nothing new.
    let is_kept = ready.is_kept;
    let mut placed = start(request, ready, candidates(&selections))?;
    let repeated = if is_kept {
        None
    } else {
        repeated_by(request, &adapters, &placed.placement, &placed.plan)
    };
    placed.notes.extend(note(&placed, repeated));
    Ok(placed)
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
