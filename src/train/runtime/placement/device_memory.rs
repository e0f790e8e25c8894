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
        let mut needs = Vec::with_capacity(ranks.len());
        for selection in &selections {
            let mut needed = 0;
            for (other, rank) in selections.iter().zip(&ranks) {
                if std::ptr::eq(*other, *selection) || selection.shares_memory(other) {
                    needed += rank.device as u64;
                }
            }
            let limit = memory::limit(selection, setting).map(|(has, _)| has);
            let need = MemoryNeed { needed, has: limit };
            let is_short = lacks_host && memory::uses_host_memory(selection) && need.fits();
            needs.push(if is_short {
                MemoryNeed { needed: of_host, has: available }
            } else {
                need
            });
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
