//! Flags with which another run gets the same pipelines without measuring.

use crate::device::{Adapter, selector_of};
use crate::parallel::{Placement, RankPlacement};
use crate::runtime::placement::types::PlacementRequest;

/// Returns the flags that give a run these measured pipelines, in words for a shell; `None` if
/// nothing was measured.
pub fn repeated_by(
    request: &PlacementRequest,
    adapters: &[Adapter],
    placement: &Placement,
) -> Option<String> {
    let ranks: Vec<Vec<&RankPlacement>> = placement.pipelines().collect();
    let options = request.parallel;
    let has_shares = ranks.len() > 1 && options.shares.is_none();
    let is_measured = options.pipeline.blocks_per_stage.is_empty() || has_shares;
    if request.probe.is_none() || !is_measured {
        return None;
    }
    let mut flags = Vec::new();
    let positions: Vec<usize> = placement.ranks.iter().map(|rank| rank.position).collect();
    if !positions.iter().copied().eq(0..placement.candidates.len()) {
        flags.push(format!("--devices '{}'", selector_of(request.selector, &positions, adapters)?));
    }
    let cuts: Vec<Vec<usize>> = ranks.iter().map(|pipeline| blocks_of_chunks(pipeline)).collect();
    match cuts.iter().all(|cut| *cut == cuts[0]) {
        true => flags.push(format!("--set parallel.blocks_per_stage='{:?}'", cuts[0])),
        false => flags.push("(but with one cut for all pipelines)".into()),
    }
    if has_shares {
        let shares: Vec<u32> = ranks.iter().map(|pipeline| pipeline[0].share).collect();
        flags.push(format!("--set parallel.shares='{shares:?}'"));
    }
    Some(flags.join(" "))
}

/// Returns the numbers of blocks of a pipeline's model chunks, in the order of the model.
fn blocks_of_chunks(pipeline: &[&RankPlacement]) -> Vec<usize> {
    let chunks = pipeline.first().map_or(0, |rank| rank.blocks.len());
    let blocks = |chunk: usize| pipeline.iter().map(move |rank| rank.blocks[chunk].len());
    (0..chunks).flat_map(blocks).collect()
}
