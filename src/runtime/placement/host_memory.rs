//! Host memory that a run takes: for devices that use it, for values on their way between devices,
//! and for the copy of the state that saving a checkpoint makes.

use super::shares::layout_of;
use super::types::ParallelOptions;
use crate::base::Position;
use crate::comm::ring_pool_bytes_max;
use crate::device::Selection;
use crate::exec::{Moments, host_staging_bytes, staging_bytes};
use crate::graph::Plan;
use crate::graph::print::MemoryUsage;
use crate::runtime::memory;

/// Returns the bytes of host memory that a device takes as one of `world`: its tensors, if it
/// uses host memory, and its staging buffers.
pub fn of_device(selection: &Selection, plan: &Plan, moments: &Moments, world: usize) -> usize {
    let tensors = match memory::uses_host_memory(selection) {
        true => memory::needed(selection, plan, moments),
        false => 0,
    };
    tensors.saturating_add(staging(selection, plan, world))
}

/// Returns the bytes of the buffers through which a device's values move to and from other
/// devices; a single device has none.
pub fn staging(selection: &Selection, plan: &Plan, world: usize) -> usize {
    match selection {
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
    let pools =
        |world: usize| pools(parallel, plan, world).into_iter().fold(0, usize::saturating_add);
    let pools = (1..=world).map(pools).max().unwrap_or(0);
    let MemoryUsage { parameters, moments, .. } = MemoryUsage::of(plan, moments);
    pools.saturating_add(parameters).saturating_add(moments)
}
