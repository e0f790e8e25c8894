//! Advice for a model that does not fit on its devices: the pipeline as which it would. Computed,
//! without opening any device.

use super::checks::require_micro_batches;
use super::measure::MeasuredBlocks;
use super::open::require_host_memory;
use super::search::{expected_counts, planned, searched};
use super::shared_memory::require_shared_memory;
use super::{RequestedPipelines, STAGES_ADVISED};
use crate::device::Selection;
use crate::planner::cut::BlockTimes;
use crate::runtime::placement::laid_out::LaidOut;
use crate::runtime::placement::names::display_names;
use crate::runtime::placement::open_ranks::RequestedDevices;
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};

/// Returns the error that devices have too little memory for a whole model, with the flag that
/// would train it on them, if there is one. Other errors are returned as they are.
pub fn advised(
    request: &PlacementRequest,
    selections: &[Selection],
    error: RuntimeError,
) -> RuntimeError {
    if !error.is_capacity_error() {
        return error;
    }
    // What the driver refused was within the memory that it reported.
    let fits = if matches!(error, RuntimeError::NoRoom { .. }) { "may fit" } else { "fits" };
    let count = selections.len();
    let blocks = request.plans.of_rows(1).graph.blocks.len();
    for stages in 2..=blocks.min(STAGES_ADVISED) {
        let (devices, advice) = if count == 1 {
            let advice = format!(
                "as a pipeline of {stages} such devices it {fits}: name as many with --devices, \
                 and add --pipeline {stages}"
            );
            (vec![selections[0].clone(); stages], advice)
        } else if count == stages {
            let advice = format!(
                "as a pipeline of these {stages} devices it {fits}: add --pipeline {stages}"
            );
            (selections.to_vec(), advice)
        } else if count.is_multiple_of(stages) {
            let advice = format!(
                "as {} pipelines of {stages} of these devices it {fits}: add --pipeline {stages}",
                count / stages
            );
            (selections.to_vec(), advice)
        } else {
            continue;
        };
        // Devices that are only proposed are not on one adapter, as copies of the one are.
        if would_fit(request, &devices, stages, count > 1) {
            return RuntimeError::Advised { error: Box::new(error), advice };
        }
    }
    error
}

/// Returns the longest shorter micro-batch with which the requested pipelines would fit their
/// devices, if there is one.
pub fn micro_batch_that_fits(request: &PlacementRequest, selections: &[Selection]) -> Option<u32> {
    let stages = RequestedPipelines::of(request).stages;
    let halves = std::iter::successors(Some(request.micro_batch / 2), |rows| Some(rows / 2));
    halves.take_while(|rows| *rows > 0).find(|rows| {
        let shorter = PlacementRequest { micro_batch: *rows, ..request.clone() };
        would_fit(&shorter, selections, stages, true)
    })
}

/// Returns true if pipelines of so many stages would fit the memory of these devices and of the
/// host, as far as it is known. If the devices `are_named`, copies of one share its memory.
fn would_fit(
    request: &PlacementRequest,
    selections: &[Selection],
    stages: usize,
    are_named: bool,
) -> bool {
    let setting = request.opening.device_memory_mib;
    let is_unknown = |selection: &Selection| {
        matches!(selection, Selection::Adapter(_)) && memory::limit(selection, setting).is_none()
    };
    if selections.iter().any(is_unknown) {
        return false;
    }
    let requested = RequestedPipelines { stages, ..RequestedPipelines::of(request) };
    let blocks = request.plans.of_rows(1).graph.blocks.len();
    let pipelines = requested.mesh(selections.len()).data;
    let Ok(counts) = expected_counts(request, pipelines) else { return false };
    if blocks < stages * requested.chunks {
        return false;
    }
    let names = display_names(selections);
    let devices = RequestedDevices { selections, names: &names };
    let equal = equal_times(selections.len(), blocks);
    let Ok(mut division) = searched(request, devices, &requested, &equal, &counts) else {
        return false;
    };
    division.counts = counts;
    let planned = planned(request, &requested, &division);
    require_micro_batches(&requested, &planned).is_ok() && {
        let laid_out = LaidOut::of(request, &planned);
        let shared = || require_shared_memory(request, devices, &planned, &laid_out);
        require_host_memory(request, devices, &planned, &laid_out).is_ok()
            && (!are_named || shared().is_ok())
    }
}

/// Returns times as if each block took one second on each device, and transfers took none.
fn equal_times(devices: usize, blocks: usize) -> MeasuredBlocks {
    let [forward_s, backward_input_s, backward_weight_s] = [1.0, 0.0, 0.0];
    let one = BlockTimes { forward_s, backward_input_s, backward_weight_s };
    MeasuredBlocks {
        rows: 1,
        kinds: (0..devices).collect(),
        times: vec![vec![one; blocks]; devices],
        cut_s: vec![vec![0.0; blocks]; devices],
        refusals: vec![vec![None; blocks]; devices],
    }
}
