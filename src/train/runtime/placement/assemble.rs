//! Assembly of a worker group from a request: selects and opens the devices, decides their shares,
//! and starts the group. All measured results are recorded before step 1 and kept on resume.

use super::automatic_layout::{PlannedLayout, PlannedPlacement, plan_placement};
use super::candidates::{adapters_for, candidates};
use super::decision::{decide, saved_of};
use super::device_limits::cut_plans;
use super::names::{display_names, is_named};
use super::open_one::RequestedDevices;
use super::open_ranks::open_decided;
use super::repeat::{note, repeated_by};
use super::start::{ReadyRanks, start};
use super::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::RuntimeError;
use potluck_kernels::autotune;
use potluck_kernels::device::{Adapter, Selection, select_all};
use potluck_parallel::Placement;

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
    let OpenedPlacement { ready, layout } = open_placement(request, devices, saved, report)?;
    let of_layout = layout.as_ref().map(|layout| layout.request(request));
    let request = of_layout.as_ref().unwrap_or(request);
    let is_kept = ready.is_kept;
    let mut placed = start(request, ready, candidates(&selections))?;
    let repeated = match &layout {
        Some(layout) => layout.flags.clone(),
        // A run that keeps its shares has no new notes.
        None if is_kept => None,
        None => repeated_by(request, adapters, &placed.placement, &placed.plan),
    };
    placed.notes.extend(note(&placed, repeated));
    let cut = cut.filter(|_| !is_kept).and_then(|cut| cut.note(&placed.plan.graph));
    placed.notes.extend(cut);
    Ok(placed)
}

/// Opened devices of a run.
pub(super) struct OpenedPlacement {
    pub ready: ReadyRanks,
    /// Layout that a plan adds to the request, if it does.
    pub layout: Option<Box<PlannedLayout>>,
}

/// Decides on the placement of a run, or plans it, and opens its devices.
pub(super) fn open_placement(
    request: &PlacementRequest,
    devices: RequestedDevices,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<OpenedPlacement, RuntimeError> {
    let planned = if let Some(recorded) = PlannedLayout::recorded(request, devices)? {
        PlannedPlacement::Layout(Box::new(recorded))
    } else if let Some(decision) = decide(request, devices, saved)? {
        PlannedPlacement::Requested(Box::new(decision))
    } else {
        plan_placement(request, devices, saved, report)?
    };
    Ok(match planned {
        PlannedPlacement::Opened(ready) => OpenedPlacement { ready: *ready, layout: None },
        PlannedPlacement::Requested(decision) => {
            let ready = open_decided(request, devices, *decision, saved, report)?;
            OpenedPlacement { ready, layout: None }
        }
        PlannedPlacement::Layout(layout) => {
            let decision = layout.decision.clone();
            let kept = request.saved.filter(|_| decision.is_kept);
            let ready = open_decided(&layout.request(request), devices, decision, kept, report)?;
            OpenedPlacement { ready, layout: Some(layout) }
        }
    })
}
