//! Cuts given as numbers of blocks.

use std::ops::Range;

use super::error::CutError;
use crate::pipeline::chunks_of_stage;
use potluck_core::format::counted;
use potluck_core::{Setting, Wording};

/// Returns `parts` contiguous runs of `blocks` blocks that differ by at most one in length, the
/// longer ones first; some are empty if there are fewer blocks than parts.
pub fn even(blocks: u32, parts: usize) -> Vec<Range<u32>> {
    let parts = parts as u64;
    let mut runs = Vec::new();
    let mut start = 0;
    for part in 0..parts {
        let is_longer = part < u64::from(blocks) % parts;
        let end = start + (u64::from(blocks) / parts) as u32 + u32::from(is_longer);
        runs.push(start..end);
        start = end;
    }
    runs
}

/// Returns the contiguous runs of blocks that have these lengths, from block 0 on.
pub fn chunks_of_counts(counts: &[u32]) -> Vec<Range<u32>> {
    let mut chunks = Vec::new();
    let mut start = 0;
    for count in counts {
        chunks.push(start..start + count);
        start += count;
    }
    chunks
}

/// Returns the runs of each stage: chunk c is on stage `c % stages`.
pub fn by_stage(chunks: &[Range<u32>], stages: usize) -> Vec<Vec<Range<u32>>> {
    (0..stages).map(|stage| chunks_of_stage(chunks, stages, stage).cloned().collect()).collect()
}

/// Returns the `parts` runs of a model of `blocks` blocks whose lengths the user gave as
/// `parallel.blocks_per_stage`, in the order of the model.
///
/// # Errors
/// [`CutError::Blocks`] if there are fewer blocks than parts; [`CutError::Counts`] if the counts
/// are not `parts` numbers, each at least 1, that add up to `blocks`.
pub fn of_counts(counts: &[u32], blocks: u32, parts: usize) -> Result<Vec<Range<u32>>, CutError> {
    if (blocks as usize) < parts {
        return Err(CutError::Blocks { blocks: blocks as usize, parts });
    }
    let sum: u64 = counts.iter().map(|&count| u64::from(count)).sum();
    let wrong = if counts.len() != parts {
        format!("has {}", counted(counts.len(), "number", "numbers"))
    } else if counts.contains(&0) {
        "has a part without blocks".into()
    } else if sum != u64::from(blocks) {
        format!("has {} and the model has {blocks}", counted(sum as usize, "block", "blocks"))
    } else {
        return Ok(chunks_of_counts(counts));
    };
    let advice = match parts {
        1 => format!("give the one number {blocks}"),
        _ => format!("give {parts} numbers, each at least 1, that add up to {blocks}"),
    };
    Err(CutError::Counts(Wording::new(format_args!(
        "{} = {counts:?} {wrong}; {advice}",
        Setting::BlocksPerStage
    ))))
}
