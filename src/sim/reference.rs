//! Reference parameters, computed directly: without timing of ranks, messages and chunks.

use super::scenario::Scenario;
use super::values::{Buckets, initial, sample_gradient, sample_key, updated};
use crate::base::{BucketId, Position, Rank};
use crate::collective::{ShardLayout, Topology};

/// Returns the parameters before the first step and after each: every element updated by the
/// gradients of all ranks, added in the order that the topology prescribes. Empty without values.
pub fn reference(scenario: &Scenario) -> Vec<Buckets> {
    let Some(seed) = scenario.values else { return Vec::new() };
    let mut after = vec![initial(seed, &scenario.lengths())];
    for step in 1..=scenario.steps {
        let mut parameters = after[step as usize - 1].clone();
        let samples = samples(scenario);
        if samples > 0 && !is_skipped(scenario, step) {
            let scale = (1.0 / f64::from(samples)) as f32;
            for (bucket, values) in parameters.iter_mut().enumerate() {
                let sums = sums(scenario, seed, step, BucketId(bucket as u32), values);
                for (value, sum) in values.iter_mut().zip(sums) {
                    *value = updated(*value, sum, scale);
                }
            }
        }
        after.push(parameters);
    }
    after
}

/// Returns the number of samples in the global batch.
fn samples(scenario: &Scenario) -> u32 {
    scenario.programs.iter().flat_map(|p| &p.micro_batches).map(|m| m.rows).sum()
}

/// Returns true if the step is skipped because a gradient is not finite.
fn is_skipped(scenario: &Scenario, step: u64) -> bool {
    let has_elements = scenario.lengths().iter().any(|&length| length > 0);
    has_elements
        && (0..scenario.world() as u32).any(|rank| scenario.is_not_finite(Rank(rank), step))
}

/// Returns the gradients of a bucket, summed over ranks.
fn sums(
    scenario: &Scenario,
    seed: u64,
    step: u64,
    bucket: BucketId,
    parameters: &[f32],
) -> Vec<f32> {
    let of_rank = |rank| rank_gradients(scenario, seed, step, rank, bucket, parameters);
    let ranks: Vec<Vec<f32>> = (0..scenario.world()).map(of_rank).collect();
    let sum = |index| sum_in_order(&scenario.layout, bucket, index, &ranks);
    (0..parameters.len()).map(sum).collect()
}

/// Returns the gradients of a bucket, summed over one rank's samples.
fn rank_gradients(
    scenario: &Scenario,
    seed: u64,
    step: u64,
    rank: usize,
    bucket: BucketId,
    parameters: &[f32],
) -> Vec<f32> {
    let mut sums = vec![0.0; parameters.len()];
    if !scenario.completes.iter().any(|completes| completes.contains(&bucket)) {
        return sums;
    }
    let micro_batches = &scenario.programs[rank].micro_batches;
    for slot in micro_batches.iter().flat_map(|m| m.first..m.first + m.rows) {
        let key = sample_key(seed, step, slot, bucket);
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum += sample_gradient(key, index, parameters[index]);
        }
    }
    sums
}

/// Returns one element, summed over ranks: on a ring from the rank after its owner around to the
/// owner, in a star from rank 0 on.
fn sum_in_order(layout: &ShardLayout, bucket: BucketId, index: usize, ranks: &[Vec<f32>]) -> f32 {
    let world = ranks.len();
    let first = match layout.topology {
        Topology::Star => 0,
        Topology::Ring => {
            let owns = |at: &Position| layout.shard(bucket, *at).contains(&index);
            (0..layout.size).map(Position).find(owns).map_or(0, |owner| owner.index() + 1)
        }
    };
    let values = (first..first + world).map(|rank| ranks[rank % world][index]);
    values.reduce(|sum, value| sum + value).unwrap_or(0.0)
}
