//! Plan of a run on the requested devices: a measured profile, and the search for the fastest
//! layout.

use std::time::Instant;

use super::device_memory::DeviceMemory;
use super::model_changes;
use super::names::{is_auto, is_named};
use super::open_one::RequestedDevices;
use super::pipeline::checks::{require_devices, require_model};
use super::profile::{MeasuredProfile, measure_profile};
use super::profile_file::ProfileFile;
use super::requested_pipelines::RequestedPipelines;
use super::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};
use potluck_core::Setting;
use potluck_kernels::autotune;
use potluck_kernels::device::host::available_memory;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::PlanProfile;
use potluck_parallel::planner::proposal::Proposal;
use potluck_parallel::planner::search::{DEVICES_MAX, NoPlan, SearchRequest, search};

/// Plan with its basis.
pub struct PlannedRun {
    pub profile: PlanProfile,
    pub proposal: Proposal,
    /// True if the profile is an earlier one of the same devices and model.
    pub is_kept: bool,
    /// Seconds of the measurement and of the search.
    pub measured_s: f64,
    pub searched_s: f64,
}

/// Purpose of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanPurpose {
    /// Only the chosen layout counts.
    Run,
    /// Layouts that cannot be chosen are compared too, and changes of the machine are priced.
    Explanation,
}

/// Measures the requested devices, one block of the model at a time, and searches for the fastest
/// layout of a run on them. All named devices take part, and all devices of given pipelines and
/// tensor groups; with `all`, all devices if there is such a layout.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if there are too many devices or no layout is possible, and
/// the error of a device that fails during the measurement.
pub fn plan_run(
    request: &PlacementRequest,
    devices: RequestedDevices,
    purpose: PlanPurpose,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlannedRun, RuntimeError> {
    let count = devices.selections.len();
    if count > DEVICES_MAX && !request.parallel.is_divided() {
        return Err(RuntimeError::unplaceable(format_args!(
            "a plan is for at most {DEVICES_MAX} devices, and there are {count}; choose fewer with \
             {}",
            Setting::Devices
        )));
    }
    let requested = RequestedPipelines::of(request);
    require_devices(&requested, count)?;
    require_model(&requested, request.plans)?;
    let model = request.plans.model();
    let whole = Plans::new(model.clone().with_merged_backward());
    let staged = Plans::new(model.clone().with_separate_backward());
    let begun = Instant::now();
    let of_stages = PlacementRequest { plans: &staged, ..request.clone() };
    let kept = ProfileFile::of(&of_stages, devices);
    let known = kept.as_ref().filter(|_| !request.retune).and_then(ProfileFile::read);
    let is_kept = known.is_some();
    let profile = if let Some(profile) = known {
        renewed(profile, request, devices)
    } else {
        let MeasuredProfile { profile, is_complete } =
            measure_profile(&of_stages, devices, purpose, report)?;
        if let Some(file) = &kept {
            // Without a cache, the next plan measures again.
            let _ = if is_complete { file.write(&profile) } else { file.remove() };
        }
        profile
    };
    let measured_s = begun.elapsed().as_secs_f64();
    let memory = DeviceMemory { request, devices, staged: &staged, available: available_memory() };
    let are_required = is_named(request.selector) || request.parallel.is_divided();
    let mut searched = SearchRequest {
        profile: &profile,
        whole: &whole,
        staged: &staged,
        options: request.parallel,
        uses_all: are_required || !is_auto(request.selector),
        batch: request.batch,
        micro_batch: request.micro_batch,
        fits_micro_batch: request.fits_micro_batch,
        prices_runners_up: purpose == PlanPurpose::Explanation,
        may_divide: true,
        memory: &memory,
    };
    let mut found = search(&searched);
    if found.is_err() && searched.uses_all && !are_required {
        // A device without memory for its part is left out.
        searched.uses_all = false;
        found = search(&searched);
    }
    let mut proposal = match found {
        Ok(proposal) => proposal,
        Err(error) => return Err(no_plan(&error, model_changes::hint(&searched, &memory))),
    };
    if purpose == PlanPurpose::Explanation {
        proposal.advise(model_changes::advice(&searched, &memory, &proposal));
    }
    let searched_s = begun.elapsed().as_secs_f64() - measured_s;
    Ok(PlannedRun { profile, proposal, is_kept, measured_s, searched_s })
}

/// Returns the error that no layout is possible, with advice; `hint` is what would fit otherwise.
fn no_plan(error: &NoPlan, hint: Option<String>) -> RuntimeError {
    if let Some(hint) = hint {
        return RuntimeError::unplaceable(format_args!("{error}; {hint}"));
    }
    if error.impossible.is_some() {
        // More stages do not help.
        return RuntimeError::unplaceable(format_args!(
            "{error}; lower {} or {}, or choose other devices",
            Setting::MicroBatchSize,
            Setting::ModelSize
        ));
    }
    RuntimeError::unplaceable(format_args!(
        "{error}; {}, lower {} or {}, or choose other devices",
        Setting::MoreStages,
        Setting::MicroBatchSize,
        Setting::ModelSize
    ))
}

/// Returns a sentence for each device that a plan leaves out.
pub(crate) fn left_out_notes(proposal: &Proposal) -> Vec<String> {
    proposal.left_out.iter().map(|left| left.reason.clone()).collect()
}

/// A kept profile with the names and the memory that the devices have now.
fn renewed(
    mut profile: PlanProfile,
    request: &PlacementRequest,
    devices: RequestedDevices,
) -> PlanProfile {
    let setting = request.opening.device_memory_mib;
    let now = devices.selections.iter().zip(devices.names);
    for (device, (selection, name)) in profile.devices.iter_mut().zip(now) {
        device.name.clone_from(name);
        device.memory = memory::limit(selection, setting).map(|(bytes, _)| bytes);
    }
    profile
}
