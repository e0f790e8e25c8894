//! Reference parameters, computed directly: without timing of ranks, messages and chunks.

use super::scenario::Scenario;
use super::values::{Buckets, initial, sample_gradient, sample_key, updated};
use crate::Instruction;
use crate::collective::{ShardLayout, Topology};
use potluck_core::{BucketId, Position, Rank};

/// Returns the parameters before the first step and after each: every element updated by the
/// gradients of all ranks that hold it, added in the order that the topology prescribes. Empty
/// without values.
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

fn samples(scenario: &Scenario) -> u32 {
    let mut samples = 0;
    for (program, part) in scenario.programs.iter().zip(&scenario.parts) {
        if part.has_loss {
            samples += program.micro_batches.iter().map(|batch| batch.rows).sum::<u32>();
        }
    }
    samples
}

/// Returns true if the step is skipped because a gradient is not finite.
fn is_skipped(scenario: &Scenario, step: u64) -> bool {
    let lengths = scenario.lengths();
    for rank in (0..scenario.world() as u32).map(Rank) {
        if !scenario.is_not_finite(rank, step) {
            continue;
        }
        for (bucket, length) in lengths.iter().enumerate() {
            if *length > 0 && scenario.holds(rank, BucketId(bucket as u32)) {
                return true;
            }
        }
    }
    false
}

/// Gradients of a bucket, summed over the ranks that hold it.
fn sums(
    scenario: &Scenario,
    seed: u64,
    step: u64,
    bucket: BucketId,
    parameters: &[f32],
) -> Vec<f32> {
    let mut ranks = Vec::new();
    for (_, rank) in scenario.groups.of(bucket).iter() {
        ranks.push(rank_gradients(scenario, seed, step, rank, bucket, parameters));
    }
    (0..parameters.len())
        .map(|index| sum_in_order(&scenario.layout, bucket, index, &ranks))
        .collect()
}

/// Gradients of a bucket, summed over the segments and samples that a rank runs.
fn rank_gradients(
    scenario: &Scenario,
    seed: u64,
    step: u64,
    rank: Rank,
    bucket: BucketId,
    parameters: &[f32],
) -> Vec<f32> {
    let mut sums = vec![0.0; parameters.len()];
    let program = &scenario.programs[rank.index()];
    let part = &scenario.parts[rank.index()];
    for instruction in &program.instructions {
        let Instruction::Run { segment, micro_batch } = *instruction else { continue };
        if !part.adds_to[segment.index()].contains(&bucket) {
            continue;
        }
        let samples = program.micro_batches[micro_batch];
        for slot in samples.first..samples.first + samples.rows {
            let key = sample_key(seed, step, slot, segment, bucket);
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum += sample_gradient(key, index, parameters[index]);
            }
        }
    }
    sums
}

/// Returns one element, summed over the ranks of a group: on a ring from the rank after its owner
/// around to the owner, in a star from the first one on.
fn sum_in_order(layout: &ShardLayout, bucket: BucketId, index: usize, ranks: &[Vec<f32>]) -> f32 {
    let world = ranks.len();
    let first = match layout.topology_of(bucket) {
        Topology::Star => 0,
        Topology::Ring => {
            let owner = (0..layout.size_of(bucket))
                .find(|at| layout.shard(bucket, Position(*at)).contains(&index));
            match owner {
                Some(owner) => owner as usize + 1,
                None => 0,
            }
        }
    };
    let values = (first..first + world).map(|rank| ranks[rank % world][index]);
    values.reduce(|sum, value| sum + value).unwrap_or(0.0)
}
