//! Flags that repeat a candidate of the planner.

use potluck_core::Setting;
use potluck_kernels::device::{Adapter, selector_of};
use potluck_parallel::Mesh;
use potluck_parallel::planner::proposal::Candidate;

/// Returns the flags that repeat a candidate without a plan, quoted for a shell; `None` if no
/// selector names its devices in their order, or if its pipelines have different cuts or its ranks
/// different micro-batches.
pub fn candidate_flags(
    candidate: &Candidate,
    selector: &str,
    adapters: &[Adapter],
) -> Option<String> {
    let arrangement = &candidate.arrangement;
    let Mesh { data, pipeline, tensor } = arrangement.mesh;
    let named = selector_of(selector, &arrangement.positions, adapters)?;
    let mut flags = vec![Setting::Devices.given(named).to_string()];
    if pipeline > 1 {
        let chunks = &arrangement.pipelines[0].chunks;
        if arrangement.pipelines.iter().any(|other| other.chunks != *chunks) {
            return None;
        }
        flags.push(Setting::PipelineStages.given(pipeline).to_string());
        flags.push(Setting::Schedule.given(arrangement.schedule).to_string());
        if chunks.len() > pipeline {
            flags.push(Setting::VirtualStages.given(chunks.len() / pipeline).to_string());
        }
        let blocks: Vec<usize> = chunks.iter().map(ExactSizeIterator::len).collect();
        flags.push(Setting::BlocksPerStage.given(format_args!("{blocks:?}")).to_string());
    }
    if tensor > 1 {
        flags.push(Setting::TensorRanks.given(tensor).to_string());
        let shares = &arrangement.tensor_shares;
        flags.push(Setting::TensorShares.given(format_args!("{shares:?}")).to_string());
    }
    if data > 1 {
        let shares: Vec<u32> = arrangement.shares.iter().map(|share| share.count).collect();
        flags.push(Setting::Shares.given(format_args!("{shares:?}")).to_string());
    }
    let micro_batch = candidate.micro_batch();
    for share in &arrangement.shares {
        if share.micro_batch != micro_batch.min(share.count) {
            return None;
        }
    }
    flags.push(Setting::MicroBatchSize.given(micro_batch).to_string());
    Some(flags.join(" "))
}
