//! Flags that repeat a candidate of the planner.

use super::candidates::node_of;
use crate::runtime::remote::FIRST_NODE;
use potluck_core::Setting;
use potluck_kernels::device::{Adapter, Selection, selector_of};
use potluck_parallel::Mesh;
use potluck_parallel::planner::proposal::Candidate;

/// Devices among which a candidate was chosen.
#[derive(Clone, Copy)]
pub struct SelectableDevices<'a> {
    /// Selector of the devices of the first node, and its adapters.
    pub selector: &'a str,
    pub adapters: &'a [Adapter],
    /// All devices; those of other nodes are last.
    pub selections: &'a [Selection],
}

impl SelectableDevices<'_> {
    /// Returns the selector of the devices of the first node at these positions; `None` if none
    /// names them in their order. Devices of other nodes are all chosen in their order, or none.
    fn selector_of(self, positions: &[usize]) -> Option<String> {
        let Self { selector, adapters, selections } = self;
        let is_here = |position: &usize| node_of(&selections[*position]) == FIRST_NODE;
        let own = positions.iter().take_while(|position| is_here(position)).count();
        let (here, elsewhere) = positions.split_at(own);
        let first_elsewhere = (0..selections.len()).filter(is_here).count();
        if !elsewhere.is_empty() && !elsewhere.iter().copied().eq(first_elsewhere..selections.len())
        {
            return None;
        }
        selector_of(selector, here, adapters)
    }
}

/// Returns the flags that repeat a candidate without a plan, quoted for a shell; `None` if no
/// selector names its devices in their order, or if its pipelines have different cuts or its ranks
/// different micro-batches.
pub fn candidate_flags(candidate: &Candidate, devices: SelectableDevices<'_>) -> Option<String> {
    let arrangement = &candidate.arrangement;
    let Mesh { data, pipeline, tensor } = arrangement.mesh;
    let named = devices.selector_of(&arrangement.positions)?;
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
