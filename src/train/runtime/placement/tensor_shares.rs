//! Shares of the ranks of tensor groups, by the measured speed of the devices in each place, and
//! limited by their memory.

use super::laid_out::{lay_out, memory_of_ranks};
use super::open_one::RequestedDevices;
use super::pipeline::{MeasuredBlocks, measure_blocks};
use super::requested_pipelines::RequestedPipelines;
use super::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};
use potluck_kernels::autotune;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::BlockTimes;
use potluck_parallel::planner::tensor::tensor_shares_by_speed;

/// Maximum number of reductions of shares that do not fit their devices.
const ATTEMPTS: usize = 64;

/// Factor of each reduction of a share.
const SHRINKING: f64 = 0.9;

/// Measures the blocks of the model on the devices of an arrangement, and sets the shares of its
/// tensor groups by the slowest device in each place. Reduces shares that do not fit the memory of
/// their devices.
///
/// # Errors
/// Returns `RuntimeError` if a device fails, or if the model cannot be divided.
pub(crate) fn measured(
    request: &PlacementRequest,
    devices: RequestedDevices,
    arrangement: Arrangement,
    report: &mut dyn FnMut(&str, autotune::TuneProgress),
) -> Result<(Arrangement, MeasuredBlocks), RuntimeError> {
    let blocks = measure_blocks(request, devices, arrangement.rows_max(), report)?;
    let mut seconds: Vec<f64> = Vec::new();
    for position in &arrangement.positions {
        seconds.push(blocks.times[*position].iter().map(BlockTimes::sum_s).sum());
    }
    let shares = tensor_shares_by_speed(arrangement.mesh, &seconds);
    let arrangement = arrangement.with_tensor_shares(shares);
    Ok((within_memory(request, devices, arrangement)?, blocks))
}

/// Returns true if devices of a tensor group differ, so that equal shares may not be the fastest;
/// `kinds` has each device's, by rank.
pub(crate) fn differ<T: PartialEq>(requested: &RequestedPipelines, kinds: &[T]) -> bool {
    kinds.chunks(requested.tensor.max(1)).any(|group| group.iter().any(|kind| *kind != group[0]))
}

/// Reduces the shares that do not fit the memory of their devices. If no shares fit, the opening of
/// the devices reports it.
fn within_memory(
    request: &PlacementRequest,
    devices: RequestedDevices,
    mut arrangement: Arrangement,
) -> Result<Arrangement, RuntimeError> {
    for _ in 0..ATTEMPTS {
        let places = overfull_places(request, devices, &arrangement)?;
        let mut shares = arrangement.tensor_shares.clone();
        if places.is_empty() || places.len() == shares.len() {
            break;
        }
        for place in places {
            shares[place] = (f64::from(shares[place]) * SHRINKING).floor().max(1.0) as u32;
        }
        if shares == arrangement.tensor_shares {
            break;
        }
        arrangement = arrangement.with_tensor_shares(shares);
    }
    Ok(arrangement)
}

/// Places of tensor groups in which a device has too little memory for its part.
fn overfull_places(
    request: &PlacementRequest,
    devices: RequestedDevices,
    arrangement: &Arrangement,
) -> Result<Vec<usize>, RuntimeError> {
    let laid_out = lay_out(request, arrangement)?;
    let selections: Vec<_> =
        arrangement.positions.iter().map(|position| &devices.selections[*position]).collect();
    let needed = memory_of_ranks(&laid_out, request, selections.iter().copied());
    let mut places = Vec::new();
    for ((rank, needed), selection) in arrangement.mesh.ranks().zip(needed).zip(selections) {
        let place = arrangement.mesh.coordinates(rank).tensor;
        let limit = memory::limit(selection, request.opening.device_memory_mib);
        let is_over = limit.is_some_and(|(has, _)| needed.device as u64 > has);
        if is_over && !places.contains(&place) {
            places.push(place);
        }
    }
    Ok(places)
}
