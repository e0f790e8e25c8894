//! Shares of the ranks of tensor groups, by speed.

use crate::Mesh;
use potluck_core::Rank;
use potluck_graph::Plan;

/// Share of the place with the fastest devices.
const FASTEST: f64 = 1000.0;

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

/// Returns a rank's part of the tensors of its stage, from 0 to 1. `plan` may be any rank's.
pub fn tensor_part(mesh: Mesh, plan: &Plan, rank: Rank) -> f64 {
    if mesh.tensor == 1 {
        return 1.0;
    }
    tensor_parts(plan, mesh.tensor)[mesh.coordinates(rank).tensor]
}

/// Returns the shares of the places of tensor groups by the slowest device in each place; `seconds`
/// has the time of each rank for all blocks.
pub fn tensor_shares_by_speed(mesh: Mesh, seconds: &[f64]) -> Vec<u32> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_device_of_a_place_decides_its_share() {
        let mesh = Mesh { data: 2, pipeline: 1, tensor: 2 };
        assert_eq!(tensor_shares_by_speed(mesh, &[1.0, 4.0, 2.0, 3.0]), [1000, 500]);
        assert_eq!(tensor_shares_by_speed(mesh, &[1.0, f64::INFINITY, 2.0, 3.0]), [1000, 1000]);
        let alone = Mesh { data: 1, pipeline: 1, tensor: 3 };
        assert_eq!(tensor_shares_by_speed(alone, &[1.0, 1e9, 3.0]), [1000, 1, 333]);
    }
}
