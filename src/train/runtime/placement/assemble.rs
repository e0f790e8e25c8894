//! Assembly of a worker group from a request: selects and opens the devices, decides their shares,
//! and starts the group. All measured results are recorded before step 1 and kept on resume.

use super::automatic_layout::{PlannedLayout, planned_layout, with_layout};
use super::candidates::{adapters_for, candidates};
use super::decision::{decide, saved_of};
use super::device_limits::cut_plans;
use super::names::{display_names, is_named};
use super::open_measured::open_measured;
use super::open_one::RequestedDevices;
use super::open_ranks::open_decided;
use super::repeat::{note, repeated_by};
use super::start::start;
use super::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::RuntimeError;
use potluck_kernels::autotune;
use potluck_kernels::device::{Adapter, Selection, select_all};

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
    assemble_on(request, &adapters, selections, report)
}

/// Assembles a worker group like [`assemble`], on these devices: those of the request's selector
/// among `adapters`, or some of them.
///
/// # Errors
/// Returns the errors of [`assemble`].
pub fn assemble_on(
    request: &PlacementRequest,
    adapters: &[Adapter],
    selections: Vec<Selection>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlacedWorkers, RuntimeError> {
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    let saved = saved_of(request, &selections);
    let cut = cut_plans(request.plans, is_named(request.selector), devices, saved)?;
    let plans = cut.as_ref().map_or(request.plans, |cut| &cut.plans);
    let request = &PlacementRequest { plans, ..request.clone() };
    let planned = planned_layout(request, devices, report)?;
    let request = &with_layout(request, planned.as_ref());
    let mut repeated = None;
    let ready = if let Some(PlannedLayout { decision, flags, .. }) = planned.as_ref() {
        repeated.clone_from(flags);
        open_decided(request, devices, decision.clone(), None, report)?
    } else {
        match decide(request, devices, saved, report)? {
            Some(decision) => open_decided(request, devices, decision, saved, report)?,
            None => open_measured(request, devices, saved, report)?,
        }
    };
    // A run that keeps its shares has no new notes.
    let is_kept = ready.is_kept;
    let mut placed = start(request, ready, candidates(&selections))?;
    if !is_kept && planned.is_none() {
        repeated = repeated_by(request, adapters, &placed.placement, &placed.plan);
    }
    placed.notes.extend(note(&placed, repeated));
    let cut = cut.filter(|_| !is_kept).and_then(|cut| cut.note(&placed.plan.graph));
    placed.notes.extend(cut);
    Ok(placed)
}
