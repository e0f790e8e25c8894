//! Shares of the ranks of tensor groups, by the measured speed of the devices in each place, and
//! limited by their memory.

use super::laid_out::{lay_out, memory_of_ranks};
use super::open_one::RequestedDevices;
use super::pipeline::{MeasuredBlocks, measure_blocks};
use super::requested_pipelines::RequestedPipelines;
use super::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};
use potluck_graph::Plan;
use potluck_kernels::autotune;
use potluck_parallel::Mesh;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::BlockTimes;

/// Share of the place with the fastest devices.
const FASTEST: f64 = 1000.0;

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
    let shares = shares_of(arrangement.mesh, &seconds);
    let arrangement = arrangement.with_tensor_shares(shares);
    Ok((within_memory(request, devices, arrangement)?, blocks))
}

/// Returns each rank's part of the divided elements of a tensor group, from 0 to 1. `plan` may be
/// any rank's.
pub fn tensor_parts(plan: &Plan, ranks: usize) -> Vec<f64> {
    let mut elements = vec![0; ranks];
    for bucket in &plan.buckets {
        if let Some(rank) = bucket.rank {
            elements[rank as usize] += bucket.length;
        }
    }
    let all: usize = elements.iter().sum();
    elements.into_iter().map(|own| own as f64 / all.max(1) as f64).collect()
}

/// Returns true if devices of a tensor group differ, so that equal shares may not be the fastest;
/// `kinds` has each device's, by rank.
pub(crate) fn differ<T: PartialEq>(requested: &RequestedPipelines, kinds: &[T]) -> bool {
    kinds.chunks(requested.tensor.max(1)).any(|group| group.iter().any(|kind| *kind != group[0]))
}

/// Shares by the seconds that each rank needs for all blocks.
fn shares_of(mesh: Mesh, seconds: &[f64]) -> Vec<u32> {
    let mut slowest = vec![0.0f64; mesh.tensor];
    for (rank, seconds) in mesh.ranks().zip(seconds) {
        let place = mesh.coordinates(rank).tensor;
        slowest[place] = slowest[place].max(*seconds);
    }
    let fastest = slowest.iter().copied().fold(f64::INFINITY, f64::min);
    let share = |seconds: &f64| {
        // The time is infinite if a whole block does not fit the device; a part of it may fit.
        let of_fastest = if seconds.is_finite() { fastest / seconds } else { 1.0 };
        let of_fastest = if of_fastest.is_finite() { of_fastest } else { 1.0 };
        (FASTEST * of_fastest).round().max(1.0) as u32
    };
    slowest.iter().map(share).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_device_of_a_place_decides_its_share() {
        let mesh = Mesh { data: 2, pipeline: 1, tensor: 2 };
        assert_eq!(shares_of(mesh, &[1.0, 4.0, 2.0, 3.0]), [1000, 500]);
        assert_eq!(shares_of(mesh, &[1.0, f64::INFINITY, 2.0, 3.0]), [1000, 1000]);
        let alone = Mesh { data: 1, pipeline: 1, tensor: 3 };
        assert_eq!(shares_of(alone, &[1.0, 1e9, 3.0]), [1000, 1, 333]);
    }
}
