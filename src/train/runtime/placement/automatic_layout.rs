//! Planned layout of a run without given pipelines or tensor groups, whose devices do not all hold
//! the whole model. A run that resumes asks for the recorded layout.

use super::candidate_flags::candidate_flags;
use super::candidates::adapters_for;
use super::decision::PlacementDecision;
use super::names::is_named;
use super::open_one::RequestedDevices;
use super::open_plan::lack_of_memory;
use super::planned::{PlannedRun, plan_run};
use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::expected_step::ExpectedStep;
use potluck_core::format::milliseconds;
use potluck_graph::ModelGraph;
use potluck_kernels::autotune;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::proposal::layout_name;
use potluck_parallel::{Mesh, ParallelOptions};

/// Planned layout.
pub(crate) struct PlannedLayout {
    /// Options and plans that ask for it.
    parallel: ParallelOptions,
    plans: Plans,
    pub decision: PlacementDecision,
    /// Flags that repeat it without a measurement, if there are any.
    pub flags: Option<String>,
}

/// Returns a request for a planned layout, or the same request without one.
pub(crate) fn with_layout<'a>(
    request: &PlacementRequest<'a>,
    layout: Option<&'a PlannedLayout>,
) -> PlacementRequest<'a> {
    match layout {
        Some(PlannedLayout { parallel, plans, .. }) => {
            PlacementRequest { parallel, plans, ..request.clone() }
        }
        None => request.clone(),
    }
}

/// Returns the layout that is planned for a run because a device does not hold the whole model;
/// `None` if all do, if a layout is given or nothing may be measured, or if there is no possible
/// one, so that the devices are refused or left out with their reasons.
///
/// # Errors
/// Returns the error of a named device that fails during the measurement.
pub(crate) fn planned_layout(
    request: &PlacementRequest,
    devices: RequestedDevices,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<Option<PlannedLayout>, RuntimeError> {
    let count = devices.selections.len();
    if count < 2 || request.probe.is_none() || !has_no_layout(request) {
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
    let planned = match plan_run(request, devices, report) {
        Ok(planned) => planned,
        Err(RuntimeError::Unplaceable(_)) => return Ok(None),
        Err(error) if is_named(request.selector) => return Err(error),
        // Devices that fail are left out where they are not named.
        Err(error) => {
            (request.notify)(&format!("no layout is planned: {error}"));
            return Ok(None);
        }
    };
    let arrangement = &planned.proposal.chosen.arrangement;
    if !arrangement.mesh.is_divided() {
        // Some of the devices hold the whole model, and are faster without the others.
        return Ok(None);
    }
    let flags = candidate_flags(
        &planned.proposal.chosen,
        request.selector,
        &adapters_for(request.selector),
    );
    let decision = PlacementDecision {
        arrangement: arrangement.clone(),
        measured: None,
        // Not all devices hold the whole model, so that they have no speed alone to compare with.
        expected: Some(ExpectedStep {
            step_s: Some(planned.proposal.chosen.prediction.step_s),
            solo_s: vec![f64::INFINITY; arrangement.positions.len()],
            fastest: None,
        }),
        is_kept: false,
        notes: notes(&planned),
    };
    Ok(Some(PlannedLayout {
        parallel: options_of(request.parallel, arrangement),
        plans: plans_of(request.plans.model(), arrangement.mesh),
        decision,
        flags,
    }))
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

/// Returns true if neither pipelines nor tensor groups nor shares are given.
fn has_no_layout(request: &PlacementRequest) -> bool {
    !request.parallel.is_divided() && request.parallel.shares.are_measured()
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

/// Sentences on the choice.
fn notes(planned: &PlannedRun) -> Vec<String> {
    let chosen = &planned.proposal.chosen;
    let mut text = format!(
        "planned {}: {} ms per step are predicted",
        layout_name(chosen.arrangement.mesh, chosen.arrangement.schedule),
        milliseconds(chosen.prediction.step_s)
    );
    let mut others = planned.proposal.others.iter();
    if let Some(next) = others.find(|other| other.arrangement.mesh != chosen.arrangement.mesh) {
        text.push_str(&format!(
            ", {} ms with {}",
            milliseconds(next.prediction.step_s),
            layout_name(next.arrangement.mesh, next.arrangement.schedule)
        ));
    }
    let mut notes = vec![text];
    for left in &planned.proposal.left_out {
        notes.push(format!("left out: {}", left.reason));
    }
    notes
}
