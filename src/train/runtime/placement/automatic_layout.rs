//! Planned placement of a run whose layout is not given or recorded. Devices that hold the whole
//! model are opened and measured with it; otherwise they are measured one block at a time.

use super::candidate_flags::{SelectableDevices, candidate_flags};
use super::candidates::{adapters_for, candidates};
use super::decision::{PlacementDecision, decide};
use super::names::is_named;
use super::open_measured::open_measured;
use super::open_one::RequestedDevices;
use super::open_plan::lack_of_memory;
use super::pipeline::checks::require_micro_batches;
use super::planned::{PlanPurpose, PlannedRun, left_out_notes, plan_run};
use super::requested_pipelines::RequestedPipelines;
use super::start::ReadyRanks;
use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::expected_step::ExpectedStep;
use potluck_core::Setting;
use potluck_core::format::milliseconds;
use potluck_graph::ModelGraph;
use potluck_kernels::autotune;
use potluck_kernels::device::Selection;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::PlanProfile;
use potluck_parallel::planner::proposal::{Proposal, layout_name};
use potluck_parallel::{Mesh, ParallelOptions, Placement};

/// Planned placement.
pub(crate) enum PlannedPlacement {
    /// Open devices with the whole model.
    Opened(Box<ReadyRanks>),
    /// Pipelines or tensor groups as requested.
    Requested(Box<PlacementDecision>),
    /// A layout that the request does not have.
    Layout(Box<PlannedLayout>),
}

/// Layout that a plan adds to a request.
pub(crate) struct PlannedLayout {
    /// Options and plans that ask for it.
    parallel: ParallelOptions,
    plans: Plans,
    pub decision: PlacementDecision,
    /// Flags that repeat it without a measurement, if there are any.
    pub flags: Option<String>,
}

impl PlannedLayout {
    /// Returns the chosen layout of a plan for the requested devices; `notes` are sentences for the
    /// user.
    pub fn of(
        request: &PlacementRequest,
        selections: &[Selection],
        proposal: &Proposal,
        expected: ExpectedStep,
        mut notes: Vec<String>,
    ) -> Self {
        let arrangement = &proposal.chosen.arrangement;
        notes.insert(0, chosen_note(proposal));
        Self {
            parallel: options_of(request.parallel, arrangement),
            plans: plans_of(request.plans.model(), arrangement.mesh),
            decision: PlacementDecision {
                arrangement: arrangement.clone(),
                expected: Some(expected),
                is_kept: false,
                notes,
            },
            flags: candidate_flags(
                &proposal.chosen,
                SelectableDevices {
                    selector: request.selector,
                    adapters: &adapters_for(request.selector),
                    selections,
                },
            ),
        }
    }

    /// Returns the layout that a resumed run has planned before; `None` if the request has one, or
    /// if nothing is recorded for its devices.
    ///
    /// # Errors
    /// Returns the errors of [`decide`].
    pub fn recorded(
        request: &PlacementRequest,
        devices: RequestedDevices,
    ) -> Result<Option<Self>, RuntimeError> {
        let Some(saved) = request.saved else { return Ok(None) };
        let has_layout = request.parallel.is_divided() || !request.parallel.shares.are_measured();
        let is_of_devices = saved.is_of(&candidates(devices.selections), true);
        if request.retune || has_layout || !is_of_devices {
            return Ok(None);
        }
        let mut parallel = request.parallel.clone();
        parallel.pipeline = saved.options.pipeline.clone();
        parallel.tensor = saved.options.tensor.clone();
        let plans = plans_of(request.plans.model(), saved.mesh);
        let asked = PlacementRequest { parallel: &parallel, plans: &plans, ..request.clone() };
        let decision = decide(&asked, devices, Some(saved))?;
        Ok(decision.map(|decision| Self { parallel, plans, decision, flags: None }))
    }

    /// Returns a request for the layout.
    pub fn request<'a>(&'a self, request: &PlacementRequest<'a>) -> PlacementRequest<'a> {
        PlacementRequest { parallel: &self.parallel, plans: &self.plans, ..request.clone() }
    }
}

/// Plan of requested pipelines and tensor groups.
pub struct RequestedPlan {
    pub decision: PlacementDecision,
    /// Measured profile of the devices.
    pub profile: PlanProfile,
}

/// Plans the placement of a run.
///
/// # Errors
/// Returns `RuntimeError` if no layout fits the devices, and the errors of devices that fail.
pub(crate) fn plan_placement(
    request: &PlacementRequest,
    devices: RequestedDevices,
    saved: Option<&Placement>,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlannedPlacement, RuntimeError> {
    if request.parallel.is_divided() {
        let planned = planned_as_requested(request, devices, report)?;
        return Ok(PlannedPlacement::Requested(Box::new(planned.decision)));
    }
    if let Some(layout) = planned_in_parts(request, devices, report)? {
        return Ok(PlannedPlacement::Layout(Box::new(layout)));
    }
    open_measured(request, devices, saved, report)
}

/// Plans the cut, the order of devices and the shares of requested pipelines and tensor groups.
///
/// # Errors
/// Returns the errors of [`plan_run`].
pub fn planned_as_requested(
    request: &PlacementRequest,
    devices: RequestedDevices,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<RequestedPlan, RuntimeError> {
    let planned = planned_run(request, devices, report)?;
    let proposal = &planned.proposal;
    let arrangement = proposal.chosen.arrangement.clone();
    let mut notes = vec![chosen_note(proposal)];
    notes.extend(require_micro_batches(&RequestedPipelines::of(request), &arrangement)?);
    let expected = Some(ExpectedStep::of(proposal, devices.names));
    let decision = PlacementDecision { arrangement, expected, is_kept: false, notes };
    Ok(RequestedPlan { decision, profile: planned.profile })
}

/// Plans a run, and notifies the user if that needed no measurement.
fn planned_run(
    request: &PlacementRequest,
    devices: RequestedDevices,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlannedRun, RuntimeError> {
    let planned = plan_run(request, devices, PlanPurpose::Run, report)?;
    if planned.is_kept {
        (request.notify)(&format!(
            "planned with an earlier measurement of these devices; {} measures again",
            Setting::Retune
        ));
    }
    Ok(planned)
}

/// Returns the layout that is planned for a run because a device does not hold the whole model;
/// `None` if all do, or if there is no possible one that divides the model, so that the devices are
/// refused or left out with their reasons.
///
/// # Errors
/// Returns the error of a named device that fails during the measurement.
fn planned_in_parts(
    request: &PlacementRequest,
    devices: RequestedDevices,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<Option<PlannedLayout>, RuntimeError> {
    let count = devices.selections.len();
    if count < 2 || request.parallel.excluded.are_all() {
        return Ok(None);
    }
    let mut lack = None;
    for (position, (selection, name)) in devices.selections.iter().zip(devices.names).enumerate() {
        if lack.is_none() {
            lack = lack_of_memory(request, selection, name, position, count);
        }
    }
    let Some(lack) = lack else { return Ok(None) };
    (request.notify)(&format!(
        "planning a layout, because not every device holds the whole model: {}",
        lack_text(&lack)
    ));
    let planned = match planned_run(request, devices, report) {
        Ok(planned) => planned,
        Err(RuntimeError::Unplaceable(_)) => return Ok(None),
        Err(error) if is_named(request.selector) => return Err(error),
        // Devices that fail are left out where they are not named.
        Err(error) => {
            (request.notify)(&format!("no layout is planned: {error}"));
            return Ok(None);
        }
    };
    let proposal = &planned.proposal;
    if !proposal.chosen.arrangement.mesh.is_divided() {
        // Some of the devices hold the whole model, and may leave out the others.
        return Ok(None);
    }
    let expected = ExpectedStep::of(proposal, devices.names);
    let notes = left_out_notes(proposal);
    Ok(Some(PlannedLayout::of(request, devices.selections, proposal, expected, notes)))
}

/// Figures of a device that lacks memory, without the advice of the error.
fn lack_text(lack: &RuntimeError) -> String {
    match lack {
        RuntimeError::DeviceMemory { adapter, needed, has, .. } => {
            format!("{adapter} has {has} of memory, and the run needs {needed}")
        }
        other => other.to_string(),
    }
}

fn plans_of(model: &ModelGraph, mesh: Mesh) -> Plans {
    let model = model.clone();
    Plans::new(if mesh.pipeline > 1 {
        model.with_separate_backward()
    } else {
        model.with_merged_backward()
    })
}

/// Options that ask for the layout of an arrangement.
fn options_of(parallel: &ParallelOptions, arrangement: &Arrangement) -> ParallelOptions {
    let Mesh { pipeline, tensor, .. } = arrangement.mesh;
    let mut parallel = parallel.clone();
    let chunks = arrangement.pipelines.first().map_or(1, |first| first.chunks.len());
    parallel.pipeline.stages = pipeline as u32;
    parallel.pipeline.schedule = arrangement.schedule;
    parallel.pipeline.virtual_stages = (chunks / pipeline) as u32;
    parallel.tensor.ranks = tensor as u32;
    parallel
}

/// Sentence on the choice.
fn chosen_note(proposal: &Proposal) -> String {
    let chosen = &proposal.chosen;
    let mut text = format!(
        "planned {}: {} ms per step are predicted",
        layout_name(chosen.arrangement.mesh, chosen.arrangement.schedule),
        milliseconds(chosen.prediction.step_s)
    );
    let mut others = proposal.others.iter();
    if let Some(next) = others.find(|other| other.arrangement.mesh != chosen.arrangement.mesh) {
        text.push_str(&format!(
            ", {} ms with {}",
            milliseconds(next.prediction.step_s),
            layout_name(next.arrangement.mesh, next.arrangement.schedule)
        ));
    }
    text
}
