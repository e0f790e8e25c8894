//! Memory of the requested devices for the layouts that the planner tries.

use super::candidates::kinds;
use super::laid_out::memory_of_ranks;
use super::open_one::RequestedDevices;
use super::pipeline::StageMemory;
use super::rank_memory::{host_bytes, pools_of};
use super::types::PlacementRequest;
use crate::runtime::memory;
use potluck_kernels::device::Selection;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::laid_out::LaidOut;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::proposal::MemoryNeed;
use potluck_parallel::planner::search::{MemoryModel, StageFits, StageQuestion};

/// Memory of the requested devices.
pub struct DeviceMemory<'a> {
    pub request: &'a PlacementRequest<'a>,
    pub devices: RequestedDevices<'a>,
    /// Plans of stages of pipelines.
    pub staged: &'a Plans,
    /// Bytes of host memory for the run, if known.
    pub available: Option<u64>,
}

/// Memory that the ranks in the memory of another node's host need together, if a device is there.
fn need_of_other_host(
    selection: &Selection,
    selections: &[&Selection],
    bytes: &[u64],
) -> Option<MemoryNeed> {
    let Selection::Offered(device) = selection else { return None };
    let has = device.host_memory?;
    let mut needed = 0;
    for (other, bytes) in selections.iter().zip(bytes) {
        if let Selection::Offered(other) = other
            && other.node == device.node
            && other.host_memory.is_some()
        {
            needed += bytes;
        }
    }
    Some(MemoryNeed { needed, has: Some(has) })
}

impl MemoryModel for DeviceMemory<'_> {
    /// Ranks on one adapter need its memory together. If all ranks need more of the host's memory
    /// than is available, the ones on the host do not fit.
    fn needs(&self, arrangement: &Arrangement, laid_out: &LaidOut) -> Vec<MemoryNeed> {
        let mut selections = Vec::with_capacity(arrangement.positions.len());
        for position in &arrangement.positions {
            selections.push(&self.devices.selections[*position]);
        }
        let ranks = memory_of_ranks(laid_out, self.request, selections.iter().copied());
        let of_host = host_bytes(self.request, ranks.iter().copied(), pools_of(&ranks)) as u64;
        let available = self.available;
        let lacks_host = available.is_some_and(|available| of_host > available);
        let setting = self.request.opening.device_memory_mib;
        let of_ranks: Vec<u64> = ranks.iter().map(|rank| rank.device as u64).collect();
        let mut needs = Vec::with_capacity(ranks.len());
        for selection in &selections {
            let mut needed = 0;
            for (other, bytes) in selections.iter().zip(&of_ranks) {
                if std::ptr::eq(*other, *selection) || selection.shares_adapter(other) {
                    needed += bytes;
                }
            }
            let limit = memory::limit(selection, setting).map(|(has, _)| has);
            let mut need = MemoryNeed { needed, has: limit };
            let is_short = lacks_host && memory::uses_host_memory(selection);
            if is_short && need.fits() {
                need = MemoryNeed { needed: of_host, has: available };
            }
            let of_other_host = need_of_other_host(selection, &selections, &of_ranks);
            needs.push(of_other_host.filter(|host| need.fits() && !host.fits()).unwrap_or(need));
        }
        needs
    }

    fn with_stage_memory(&self, question: StageQuestion<'_>, cut: &mut dyn FnMut(&StageFits<'_>)) {
        let StageQuestion { devices, mesh, schedule, chunks, batch, micro_batch, is_exact } =
            question;
        let mut parallel = self.request.parallel.clone();
        parallel.pipeline.stages = mesh.pipeline as u32;
        parallel.pipeline.schedule = schedule;
        parallel.pipeline.virtual_stages = chunks as u32;
        parallel.tensor.ranks = 1;
        let request =
            PlacementRequest { parallel: &parallel, plans: self.staged, ..self.request.clone() };
        let selections: Vec<Selection> =
            devices.iter().map(|device| self.devices.selections[*device].clone()).collect();
        let kinds = kinds(&selections);
        let per_pipeline = batch.div_ceil(mesh.data.max(1) as u32);
        let micro_batches = per_pipeline.div_ceil(micro_batch.max(1)) as usize;
        let memory =
            StageMemory::of(&request, &selections, &kinds, micro_batches.max(1), micro_batch);
        cut(&|stage| memory.fits(stage, is_exact));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::limit_basis::LimitBasis;
    use crate::runtime::placement::candidates::tests::cpu_of_node;
    use potluck_kernels::device::RemoteDeviceInfo;

    fn offered(node: u32, adapter: Option<u32>, host_memory: Option<u64>) -> Selection {
        let is_cpu = adapter.is_none();
        let memory = Some(10);
        Selection::Offered(RemoteDeviceInfo {
            is_cpu,
            memory,
            host_memory,
            adapter,
            ..cpu_of_node(node, 0)
        })
    }

    #[test]
    fn devices_of_other_nodes_have_their_own_memory_and_share_that_of_their_host() {
        let devices = [
            offered(1, None, Some(15)),
            offered(1, Some(1), Some(15)),
            offered(1, Some(2), None),
            offered(1, Some(2), None),
            offered(2, None, Some(15)),
        ];
        assert_eq!(memory::limit(&devices[0], 1), Some((10, LimitBasis::Node)));
        let shared: Vec<bool> = devices.iter().map(|one| devices[2].shares_adapter(one)).collect();
        assert_eq!(shared, [false, false, true, true, false]);
        assert!(!devices[0].shares_adapter(&devices[4]), "CPU devices have no adapter");
        let all: Vec<&Selection> = devices.iter().collect();
        let need = |one: usize| need_of_other_host(&devices[one], &all, &[8, 8, 8, 8, 8]);
        assert_eq!(need(1), Some(MemoryNeed { needed: 16, has: Some(15) }));
        assert_eq!(need(4), Some(MemoryNeed { needed: 8, has: Some(15) }));
        assert_eq!((need(2), need_of_other_host(&Selection::cpu(1), &all, &[8; 5])), (None, None));
    }
}
