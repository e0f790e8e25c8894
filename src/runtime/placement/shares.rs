//! Splits of buckets, moments and samples among ranks.

use super::types::ParallelOptions;
use crate::base::{BucketId, Position};
use crate::collective::ShardLayout;
use crate::exec::Moments;
use crate::graph::Plan;
use crate::optim::Optimizer;
use crate::runtime::workers::layout;
use crate::runtime::{RuntimeError, timing};

/// Returns the requested shard layout of a plan's buckets.
pub fn layout_of(parallel: &ParallelOptions, plan: &Plan, world: usize) -> ShardLayout {
    layout(plan, parallel.topology, world, parallel.chunk_bytes)
}

/// Returns the optimizer moments that a rank keeps.
pub fn moments(
    optimizer: &Optimizer,
    layout: &ShardLayout,
    buckets: usize,
    rank: usize,
) -> Moments {
    // All ranks hold all buckets, in order of ranks.
    let position = Position(rank as u32);
    let shard = |bucket| layout.shard(BucketId(bucket as u32), position);
    let owned = (layout.size > 1).then(|| (0..buckets).map(shard).collect());
    Moments { count: optimizer.moments(), owned }
}

/// Returns the samples per device if they are not measured.
///
/// # Errors
/// Returns `RuntimeError::InvalidRequest` if the number of shares is not that of the devices, if
/// their sum is not the batch, or if there are fewer samples than devices.
pub fn fixed_counts(
    parallel: &ParallelOptions,
    batch: u32,
    world: usize,
) -> Result<Vec<u32>, RuntimeError> {
    let unusable = |why: String| Err(RuntimeError::InvalidRequest(why));
    let shares = parallel.shares.as_deref().unwrap_or_default();
    if shares.is_empty() && (batch as usize) < world {
        return unusable(format!(
            "train.batch = {batch} has no sample for each of {world} devices; raise it, or choose \
             fewer with --devices"
        ));
    }
    if shares.is_empty() {
        return Ok(timing::split_evenly(batch, world));
    }
    if shares.len() != world {
        return unusable(format!(
            "parallel.shares has {} entries for {world} devices; give one per device, in the \
             order of --devices",
            shares.len()
        ));
    }
    if shares.iter().sum::<u64>() != u64::from(batch) {
        return unusable(format!("parallel.shares must add up to train.batch = {batch}"));
    }
    // Each share is at most `batch`, a u32.
    Ok(shares.iter().map(|share| *share as u32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_shared_evenly_or_as_it_is_given() {
        let mut parallel = ParallelOptions::default();
        assert_eq!(fixed_counts(&parallel, 12, 5).unwrap(), [3, 3, 2, 2, 2]);
        let error = fixed_counts(&parallel, 12, 13).unwrap_err().to_string();
        assert!(error.contains("no sample for each of 13 devices"), "{error}");
        parallel.shares = Some(vec![4, 8]);
        assert_eq!(fixed_counts(&parallel, 12, 2).unwrap(), [4, 8]);
        let error = fixed_counts(&parallel, 12, 3).unwrap_err().to_string();
        assert!(error.contains("parallel.shares has 2 entries for 3 devices"), "{error}");
        assert!(fixed_counts(&parallel, 13, 2).is_err());
    }
}
