//! Plan of a run on the requested devices: a measured profile, and the search for the fastest
//! layout.

use std::time::Instant;

use super::device_memory::DeviceMemory;
use super::names::is_auto;
use super::open_one::RequestedDevices;
use super::profile::measure_profile;
use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use potluck_core::Setting;
use potluck_kernels::autotune;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::Profile;
use potluck_parallel::planner::proposal::Proposal;
use potluck_parallel::planner::search::{DEVICES_MAX, SearchRequest, search};

/// Plan with its basis.
pub struct PlannedRun {
    pub profile: Profile,
    pub proposal: Proposal,
    /// Seconds of the measurement and of the search.
    pub measured_s: f64,
    pub searched_s: f64,
}

/// Measures the requested devices, and searches for the fastest layout of a run on them. All
/// devices take part unless the selector is `auto`. The plans of the request are of devices that
/// run the whole model, `staged` of stages of pipelines.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if there are too many devices or no layout is possible, and
/// the error of a device that fails during the measurement.
pub fn plan_run(
    request: &PlacementRequest,
    devices: RequestedDevices,
    staged: &Plans,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlannedRun, RuntimeError> {
    let count = devices.selections.len();
    if count > DEVICES_MAX {
        return Err(RuntimeError::unplaceable(format_args!(
            "a plan is for at most {DEVICES_MAX} devices, and there are {count}; choose fewer with \
             {}",
            Setting::Devices
        )));
    }
    let begun = Instant::now();
    let measured = PlacementRequest { plans: staged, ..request.clone() };
    let profile = measure_profile(&measured, devices, report)?;
    let measured_s = begun.elapsed().as_secs_f64();
    let proposal = search(&SearchRequest {
        profile: &profile,
        whole: request.plans,
        staged,
        options: request.parallel,
        uses_all: !is_auto(request.selector),
        batch: request.batch,
        micro_batch: request.micro_batch,
        fits_micro_batch: request.fits_micro_batch,
        memory: &DeviceMemory { request, devices, staged },
    })
    .map_err(|error| {
        RuntimeError::unplaceable(format_args!(
            "{error}; lower {} or {}, or choose other devices",
            Setting::MicroBatchSize,
            Setting::ModelSize
        ))
    })?;
    let searched_s = begun.elapsed().as_secs_f64() - measured_s;
    Ok(PlannedRun { profile, proposal, measured_s, searched_s })
}
