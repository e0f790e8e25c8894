//! Host memory that a run takes: for devices that use it, for values on their way between devices,
//! and for the copy of the state that saving a checkpoint makes.

use super::arrangement::Arrangement;
use super::laid_out::LaidOut;
use super::shares::layout_of;
use super::types::PlacementRequest;
use crate::base::{Position, Rank};
use crate::comm::ring_pool_bytes_max;
use crate::device::Selection;
use crate::exec::{Moments, RING_BYTES, host_staging_bytes, staging_bytes};
use crate::graph::Plan;
use crate::graph::print::MemoryUsage;
use crate::parallel::ParallelOptions;
use crate::runtime::memory;

/// Returns the bytes of host memory that a device takes as one of `world`: its tensors, if it
/// uses host memory, and its staging buffers.
pub fn of_device(selection: &Selection, plan: &Plan, moments: &Moments, world: usize) -> usize {
    let mut bytes = staging(selection, plan, world);
    if memory::uses_host_memory(selection) {
        bytes = bytes.saturating_add(memory::needed(selection, plan, moments));
    }
    bytes
}

/// Returns the bytes of the buffers through which a device's values move to and from the host and,
/// of one of several, to and from other devices.
pub fn staging(selection: &Selection, plan: &Plan, world: usize) -> usize {
    match selection {
        Selection::Adapter(_) if world == 1 => RING_BYTES,
        _ if world == 1 => 0,
        Selection::Cpu { .. } => host_staging_bytes(plan),
        Selection::Adapter(_) => staging_bytes(plan),
        Selection::Offered(_) => 0,
    }
}

/// Returns the bytes of the buffer pool of each rank's ring thread; a single device has none.
pub fn pools(parallel: &ParallelOptions, plan: &Plan, world: usize) -> Vec<usize> {
    if world == 1 {
        return vec![0];
    }
    let layout = layout_of(parallel, plan, world);
    (0..world as u32).map(|position| ring_pool_bytes_max(&layout, Position(position))).collect()
}

/// Returns the bytes that the ranks take together besides their devices, if there are up to
/// `world`: the buffer pools of their ring threads, and a copy of the parameters and of `moments`
/// moments of each.
pub fn shared(parallel: &ParallelOptions, plan: &Plan, world: usize, moments: usize) -> usize {
    let mut most: usize = 0;
    for ranks in 1..=world {
        let mut all: usize = 0;
        for pool in pools(parallel, plan, ranks) {
            all = all.saturating_add(pool);
        }
        most = most.max(all);
    }
    let MemoryUsage { parameters, moments, .. } = MemoryUsage::of(plan, moments);
    most.saturating_add(parameters).saturating_add(moments)
}

/// Returns the bytes of host memory that an arrangement of devices takes: for the devices that use
/// it, for the values on their way between devices, and for saving a checkpoint.
pub fn host_bytes(
    request: &PlacementRequest,
    selections: &[Selection],
    arrangement: &Arrangement,
    laid_out: &LaidOut,
) -> usize {
    let world = arrangement.positions.len();
    let saved = MemoryUsage::of(&laid_out.whole, request.optimizer.moments());
    let mut bytes = saved.parameters.saturating_add(saved.moments);
    for (rank, &position) in arrangement.positions.iter().enumerate() {
        let plan = &laid_out.written.plans[rank];
        let moments = laid_out.moments(request, rank);
        let of_rank = of_device(&selections[position], plan, &moments, world);
        bytes = bytes.saturating_add(of_rank).saturating_add(travelling_bytes(laid_out, rank));
    }
    bytes
}

/// Returns the bytes of host memory that the values which a rank sends take at most.
fn travelling_bytes(laid_out: &LaidOut, rank: usize) -> usize {
    let rank = Rank(rank as u32);
    let positions = laid_out.written.groups.positions(rank);
    let reduced = ring_pool_bytes_max(&laid_out.layout, positions);
    reduced.saturating_add(laid_out.written.edges.bytes_from(rank))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::list_adapters;
    use crate::exec::gpu::adder_bytes;

    #[test]
    fn an_adapter_alone_has_rings_and_one_of_several_adds_sums_too() {
        let plan = crate::runtime::placement::shares::tests::plan(4);
        assert_eq!(staging(&Selection::Cpu { reason: None }, &plan, 1), 0);
        for adapter in list_adapters() {
            let adapter = Selection::Adapter(Box::new(adapter));
            assert_eq!(staging(&adapter, &plan, 1), RING_BYTES);
            assert!(staging(&adapter, &plan, 2) > RING_BYTES);
            let all = Moments { count: 2, owned: None };
            let owned = plan.buckets.iter().map(|bucket| 0..bucket.length).collect();
            let shard = Moments { count: 2, owned: Some(owned) };
            let [alone, beside] =
                [all, shard].map(|moments| memory::workspace(&adapter, &plan, &moments));
            assert_eq!(beside - alone, adder_bytes(&plan));
        }
    }
}
