//! Splits of buckets, moments and samples among ranks.

use crate::runtime::workers::WorkerGroup;
use crate::runtime::{RuntimeError, timing};
use potluck_core::format::counted;
use potluck_core::{Rank, Setting};
use potluck_graph::Plan;
use potluck_graph::optim::Optimizer;
use potluck_kernels::exec::Moments;
use potluck_parallel::collective::ShardLayout;
use potluck_parallel::planner::laid_out::{owned, shards};
use potluck_parallel::{ParallelOptions, Shares};

/// Returns the optimizer moments of a rank.
pub fn moments(optimizer: &Optimizer, layout: &ShardLayout, rank: usize) -> Moments {
    let owned = (layout.size > 1).then(|| shards(layout, rank));
    Moments { count: optimizer.moments(), owned }
}

pub(crate) fn held_moments(
    optimizer: &Optimizer,
    group: &WorkerGroup,
    plan: &Plan,
    rank: Rank,
) -> Moments {
    let owned = (group.world() > 1).then(|| owned(plan, group.layout(), group.groups(), rank));
    Moments { count: optimizer.moments(), owned }
}

/// Number of parameters with moments on a device that has moments of shards; 0 on a device with
/// moments of whole buckets.
pub fn owned_elements(moments: &Moments) -> usize {
    match &moments.owned {
        Some(owned) => owned.iter().map(ExactSizeIterator::len).sum(),
        None => 0,
    }
}

/// Returns the given samples per device or pipeline, or else even ones.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if there is not one share per device or pipeline, if their
/// sum is not the batch, or if there are fewer samples than devices or pipelines.
pub(crate) fn fixed_counts(
    parallel: &ParallelOptions,
    batch: u32,
    world: usize,
) -> Result<Vec<u32>, RuntimeError> {
    let unit = if parallel.is_divided() { "pipeline" } else { "device" };
    let Shares::Fixed(shares) = &parallel.shares else {
        if (batch as usize) < world {
            return Err(RuntimeError::unplaceable(format_args!(
                "{} = {batch} has no sample for each of {world} {unit}s; raise it, or choose \
                 fewer with {}",
                Setting::Batch,
                Setting::Devices
            )));
        }
        return Ok(timing::split_evenly(batch, world));
    };
    if shares.len() != world {
        return Err(RuntimeError::unplaceable(format_args!(
            "{} has {} for {}; give one per {unit}, in the order of {}",
            Setting::Shares,
            counted(shares.len(), "entry", "entries"),
            counted(world, unit, &format!("{unit}s")),
            Setting::Devices
        )));
    }
    let sum: u64 = shares.iter().map(|share| *share as u64).sum();
    if sum != u64::from(batch) {
        return Err(RuntimeError::unplaceable(format_args!(
            "{} must add up to {} = {batch}",
            Setting::Shares,
            Setting::Batch
        )));
    }
    // Each share is at most `batch`, a u32.
    Ok(shares.iter().map(|share| *share as u32).collect())
}

/// Checks that later shares are of as many devices.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if one of them has another number of devices.
pub(crate) fn require_changes(
    parallel: &ParallelOptions,
    world: usize,
) -> Result<(), RuntimeError> {
    for change in &parallel.share_changes {
        if change.shares.len() != world {
            return Err(RuntimeError::unplaceable(format_args!(
                "{} has '{change}' for {}; give one share per device, in the order of {}",
                Setting::ShareChanges,
                counted(world, "device", "devices"),
                Setting::Devices
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use potluck_graph::{Builder, Init, ModelGraph, PlanOptions};
    use potluck_parallel::ShareChange;

    /// Returns a model of one parameter with 2^18 values: 1 MiB.
    pub fn model() -> ModelGraph {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 512]);
        let w = b.parameter("w", &[512, 512], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        b.squared_error_loss(y, x).unwrap();
        ModelGraph::training(b.finish(), false).unwrap()
    }

    /// Plan of that model for up to `rows` rows.
    pub fn plan(rows: usize) -> Plan {
        Plan::new(model().whole().clone(), PlanOptions::new(rows))
    }

    #[test]
    fn a_batch_is_shared_evenly_or_as_it_is_given() {
        let mut parallel = ParallelOptions::default();
        assert_eq!(fixed_counts(&parallel, 12, 5).unwrap(), [3, 3, 2, 2, 2]);
        let error = fixed_counts(&parallel, 12, 13).unwrap_err().to_string();
        assert!(error.contains("no sample for each of 13 devices"), "{error}");
        parallel.shares = Shares::Fixed(vec![4, 8]);
        assert_eq!(fixed_counts(&parallel, 12, 2).unwrap(), [4, 8]);
        let error = fixed_counts(&parallel, 12, 3).unwrap_err().to_string();
        assert!(error.contains("parallel.shares has 2 entries for 3 devices"), "{error}");
        parallel.share_changes = vec![ShareChange { step: 9, shares: vec![5, 7] }];
        assert!(require_changes(&parallel, 2).is_ok());
        let error = require_changes(&parallel, 3).unwrap_err().to_string();
        let expected = "parallel.share_changes has '9: 5 7' for 3 devices; give one share per ";
        assert!(error.contains(expected), "{error}");
        assert!(fixed_counts(&parallel, 13, 2).is_err());
        parallel.pipeline.stages = 2;
        let error = fixed_counts(&parallel, 12, 1).unwrap_err().to_string();
        let expected = "parallel.shares has 2 entries for 1 pipeline; give one per pipeline, ";
        assert!(error.contains(expected), "{error}");
        parallel.shares = Shares::Fixed(vec![12]);
        let error = fixed_counts(&parallel, 12, 2).unwrap_err().to_string();
        assert!(error.contains("parallel.shares has 1 entry for 2 pipelines; "), "{error}");
        parallel.shares = Shares::Even;
        let error = fixed_counts(&parallel, 1, 2).unwrap_err().to_string();
        assert!(error.contains("train.batch = 1 has no sample for each of 2 pipelines"), "{error}");
    }
}
