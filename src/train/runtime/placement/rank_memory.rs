//! Memory of the ranks of a run: on their devices, and on the host, for devices that use its
//! memory, for values in transit between devices, and for the copy of the state for a checkpoint.
//! Devices with the whole model are pipelines of one stage.

use super::types::PlacementRequest;
use crate::runtime::memory;
use potluck_core::{DType, Position};
use potluck_graph::Plan;
use potluck_graph::print::MemoryUsage;
use potluck_kernels::device::Selection;
use potluck_kernels::exec::{Moments, RING_BYTES, host_staging_bytes, staging_bytes};
use potluck_parallel::ParallelOptions;
use potluck_parallel::comm::ring_pool_bytes_max;
use potluck_parallel::planner::laid_out::layout_of;

/// Returns the possible sizes of a device's micro-batches up to `most`, the largest first: powers
/// of two, and divisors of `most`, for which all micro-batches are equal.
pub fn micro_batch_sizes(most: u32) -> Vec<u32> {
    let mut sizes = Vec::new();
    for rows in (1..=most).rev() {
        if rows.is_power_of_two() || most.is_multiple_of(rows) {
            sizes.push(rows);
        }
    }
    sizes
}

/// Bytes of memory of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Memory of its device, including `workspace`.
    pub device: usize,
    /// Memory of its device that kernels use within one call and for the addition of gradients.
    pub workspace: usize,
    /// True if the device uses host memory.
    pub(crate) is_of_host: bool,
    /// Host memory of buffers for transfers between the device and the host.
    pub staging: usize,
    /// Host memory of the rank's ring thread; 0 if the layout is unknown.
    pub pool: usize,
    /// Host memory of tensors in transit to other stages.
    pub edges: usize,
}

impl RankMemory {
    /// Returns the memory of one of `world` ranks on a device, without the parts that depend on the
    /// layout of all ranks: see [`memory_of_ranks`](super::laid_out::memory_of_ranks).
    pub fn of(selection: &Selection, plan: &Plan, moments: &Moments, world: usize) -> Self {
        let staging = match selection {
            Selection::Adapter(_) if world == 1 => RING_BYTES,
            _ if world == 1 => 0,
            Selection::Cpu { .. } => host_staging_bytes(plan),
            Selection::Adapter(_) => staging_bytes(plan),
            Selection::Offered(_) => 0,
        };
        let beside = memory::beside_tensors(selection, plan, moments);
        Self {
            device: memory::memory(plan, moments).peak().saturating_add(beside),
            workspace: memory::workspace(selection, plan, moments),
            is_of_host: memory::uses_host_memory(selection),
            staging,
            pool: 0,
            edges: 0,
        }
    }

    /// Returns the bytes of host memory without the buffers of the ring thread.
    pub fn of_host(&self) -> usize {
        let device = if self.is_of_host { self.device } else { 0 };
        device.saturating_add(self.staging).saturating_add(self.edges)
    }
}

/// Returns the bytes of host memory of all ranks, including `pools` bytes for the buffers of their
/// ring threads, and a copy of the parameters, of all moments and of the averages. With devices of
/// other nodes, also all updated parameters may wait in host memory.
pub fn host_bytes(
    request: &PlacementRequest,
    ranks: impl IntoIterator<Item = RankMemory>,
    pools: usize,
) -> usize {
    let plan = request.plans.of_rows(1);
    let memory = MemoryUsage::of(&plan, request.optimizer.moments());
    let mut bytes = pools.saturating_add(memory.saved);
    if !request.nodes.devices.is_empty() {
        let arriving = plan.graph.parameter_count().saturating_mul(DType::F32.bytes());
        bytes = bytes.saturating_add(arriving);
    }
    for rank in ranks {
        bytes = bytes.saturating_add(rank.of_host());
    }
    bytes
}

/// Returns the bytes of the buffers of all ring threads.
pub fn pools_of(ranks: &[RankMemory]) -> usize {
    let mut all: usize = 0;
    for rank in ranks {
        all = all.saturating_add(rank.pool);
    }
    all
}

/// Returns the maximum bytes of the buffers of all ring threads for 1 to `world` ranks with the
/// whole model.
pub fn pools_most(
    parallel: &ParallelOptions,
    plan: &Plan,
    world: usize,
    is_over_nodes: bool,
) -> usize {
    let mut most: usize = 0;
    for ranks in 1..=world {
        let mut all: usize = 0;
        for pool in pools(parallel, plan, ranks, is_over_nodes) {
            all = all.saturating_add(pool);
        }
        most = most.max(all);
    }
    most
}

/// Returns the bytes of the buffers of each ring thread of `world` ranks with the whole model.
pub fn pools(
    parallel: &ParallelOptions,
    plan: &Plan,
    world: usize,
    is_over_nodes: bool,
) -> Vec<usize> {
    let layout = layout_of(parallel, plan, world);
    let positions = (0..world as u32).map(Position);
    positions.map(|position| ring_pool_bytes_max(&layout, position, is_over_nodes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_kernels::device::list_adapters;
    use potluck_kernels::exec::gpu::adder_bytes;

    #[test]
    fn an_adapter_alone_has_rings_and_one_of_several_adds_sums_too() {
        let plan = crate::runtime::placement::shares::tests::plan(4);
        let all = Moments { count: 2, owned: None };
        let owned = plan.buckets.iter().map(|bucket| 0..bucket.length).collect();
        let shard = Moments { count: 2, owned: Some(owned) };
        let cpu = Selection::cpu(1);
        assert_eq!(RankMemory::of(&cpu, &plan, &all, 1).staging, 0);
        for adapter in list_adapters() {
            let adapter = Selection::Adapter(Box::new(adapter));
            let alone = RankMemory::of(&adapter, &plan, &all, 1);
            let beside = RankMemory::of(&adapter, &plan, &shard, 2);
            assert_eq!(alone.staging, RING_BYTES);
            assert!(beside.staging > RING_BYTES);
            assert_eq!(beside.workspace - alone.workspace, adder_bytes(&plan));
        }
    }
}
