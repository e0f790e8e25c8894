//! Layout of a run without given pipelines or tensor groups, whose devices do not all hold the
//! whole model: the resumed run's, or a planned one.

use super::candidate_flags::candidate_flags;
use super::candidates::{adapters_for, candidates};
use super::decision::PlacementDecision;
use super::open_one::RequestedDevices;
use super::open_plan::lack_of_memory;
use super::planned::{PlannedRun, plan_run};
use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::expected_step::ExpectedStep;
use potluck_core::format::milliseconds;
use potluck_graph::ModelGraph;
use potluck_kernels::autotune;
use potluck_kernels::device::Selection;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::proposal::layout_name;
use potluck_parallel::{Mesh, ParallelOptions};

/// Options and plans of a layout.
pub(crate) struct AutomaticLayout {
    parallel: ParallelOptions,
    plans: Plans,
}

/// Planned layout with its arrangement.
pub(crate) struct PlannedLayout {
    pub layout: AutomaticLayout,
    pub decision: PlacementDecision,
    /// Flags that repeat it without a measurement, if there are any.
    pub flags: Option<String>,
}

/// Returns a request for a layout, or the same request without one.
pub(crate) fn with_layout<'a>(
    request: &PlacementRequest<'a>,
    layout: Option<&'a AutomaticLayout>,
) -> PlacementRequest<'a> {
    match layout {
        Some(AutomaticLayout { parallel, plans }) => {
            PlacementRequest { parallel, plans, ..request.clone() }
        }
        None => request.clone(),
    }
}

/// Returns the layout of the resumed run if that was planned for the same devices.
pub(crate) fn resumed_layout(
    request: &PlacementRequest,
    selections: &[Selection],
) -> Option<AutomaticLayout> {
    let saved = request.saved.filter(|saved| {
        !request.retune && has_no_layout(request) && saved.is_of(&candidates(selections), true)
    })?;
    let mut parallel = request.parallel.clone();
    parallel.pipeline = saved.options.pipeline.clone();
    parallel.tensor = saved.options.tensor.clone();
    let plans = plans_of(request.plans.model(), saved.mesh);
    Some(AutomaticLayout { parallel, plans })
}

/// Returns the layout that is planned for a run because a device does not hold the whole model;
/// `None` if all do, if a layout is given or nothing may be measured, or if there is no possible
/// one, so that the devices are refused or left out with their reasons.
///
/// # Errors
/// Returns the error of a device that fails during the measurement.
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
    let staged = Plans::new(request.plans.model().clone().with_separate_backward());
    let planned = match plan_run(request, devices, &staged, report) {
        Ok(planned) => planned,
        Err(RuntimeError::Unplaceable(_)) => return Ok(None),
        Err(error) => return Err(error),
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
    let layout = AutomaticLayout {
        parallel: options_of(request.parallel, arrangement),
        plans: plans_of(request.plans.model(), arrangement.mesh),
    };
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
    Ok(Some(PlannedLayout { layout, decision, flags }))
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
    let is_other = |mesh: Mesh| mesh != chosen.arrangement.mesh;
    let mut others = planned.proposal.others.iter();
    if let Some(next) = others.find(|other| is_other(other.arrangement.mesh)) {
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
