//! Replica check: compares parameter hashes that each device computes from its own memory and,
//! where they differ, the values.

use std::collections::{BTreeMap, HashMap};

use super::RuntimeError;
use super::workers::WorkerGroup;
use crate::base::{BucketId, Position, Rank};
use crate::exec::{BucketTensor, Executor};
use crate::graph::Plan;

/// Rank whose parameters differ from those of the other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaMismatch {
    pub rank: Rank,
    /// Tensors, and how many of their values differ; a message for the user.
    pub what: String,
}

/// Compares the parameters of each bucket on all ranks that hold it; with `repair`, overwrites
/// those that differ. The reference value is that of the majority; without a majority, that of the
/// owner, which is the rank that updates it.
///
/// # Errors
/// Returns `RuntimeError` if a device fails.
pub fn compare(
    group: &WorkerGroup,
    plan: &Plan,
    repair: bool,
) -> Result<Vec<ReplicaMismatch>, RuntimeError> {
    if group.world() == 1 {
        return Ok(Vec::new());
    }
    let buckets = 0..plan.buckets.len() as u32;
    let hashed = buckets.clone();
    let hashes: Vec<Vec<u64>> = group.run_on_all("hashing the parameters", move |_, device| {
        hashed
            .clone()
            .map(|bucket| device.hash(BucketTensor::Parameters, BucketId(bucket)))
            .collect()
    })?;
    let mut found: BTreeMap<Rank, Vec<String>> = BTreeMap::new();
    for bucket in buckets.map(BucketId) {
        let holders = group.groups().of(bucket).iter();
        let of_bucket: Vec<u64> =
            holders.map(|(_, rank)| hashes[rank.index()][bucket.index()]).collect();
        if of_bucket.iter().all(|hash| *hash == of_bucket[0]) {
            continue;
        }
        for (rank, what) in differences(group, plan, bucket, &of_bucket, repair)? {
            found.entry(rank).or_default().push(what);
        }
    }
    Ok(found
        .into_iter()
        .map(|(rank, what)| ReplicaMismatch { rank, what: what.join(", ") })
        .collect())
}

/// Returns the differing tensors per rank in a bucket whose hashes, by position in its group,
/// differ.
fn differences(
    group: &WorkerGroup,
    plan: &Plan,
    bucket: BucketId,
    hashes: &[u64],
    repair: bool,
) -> Result<Vec<(Rank, String)>, RuntimeError> {
    let read = move |_: Rank, device: &mut dyn Executor| {
        device.read_bank(BucketTensor::Parameters, bucket)
    };
    let members = group.groups().of(bucket).clone();
    let mut held = group.run_on_all("reading the parameters", read)?;
    let held: Vec<Vec<f32>> =
        members.iter().map(|(_, rank)| std::mem::take(&mut held[rank.index()])).collect();
    let truth = majority(group, bucket, &held);
    let mut found = Vec::new();
    for ((_, rank), values) in members.iter().zip(&held) {
        let tensors = differing(plan, bucket, values, &truth.values);
        if tensors.is_empty() {
            continue;
        }
        let believed =
            if truth.is_voted { "" } else { " from those of the device that updates them" };
        found.push((rank, format!("{}{believed}", tensors.join(", "))));
        if repair {
            let values = truth.values.clone();
            let write = move |device: &mut dyn Executor| {
                device.write_bank(BucketTensor::Parameters, bucket, &values)
            };
            group.run_on(rank, "repairing the parameters", write)?;
        }
    }
    if found.is_empty() {
        // A device whose hash of its memory does not match the values that it returns must not be
        // trusted, whichever of the two is wrong.
        let most = most_common(hashes.iter().copied());
        let what = format!("the hash of {bucket} differs, though what is read back does not");
        let ranks = members.iter().map(|(_, rank)| rank).zip(hashes);
        let odd = ranks.filter(|(_, hash)| Some(**hash) != most.map(|(most, _)| most));
        found.extend(odd.map(|(rank, _)| (rank, what.clone())));
    }
    Ok(found)
}

/// Returns the most common value, and its count.
fn most_common<V: Copy + Eq + std::hash::Hash + Ord>(
    values: impl Iterator<Item = V>,
) -> Option<(V, usize)> {
    let mut votes: HashMap<V, usize> = HashMap::new();
    values.for_each(|value| *votes.entry(value).or_default() += 1);
    // Ties go to the smallest value, so that the order of the hash map does not matter.
    votes.into_iter().max_by_key(|(value, count)| (*count, std::cmp::Reverse(*value)))
}

/// Reference values of a bucket; `is_voted` is true if a majority of ranks holds every one of
/// them.
struct Majority {
    values: Vec<f32>,
    is_voted: bool,
}

fn majority(group: &WorkerGroup, bucket: BucketId, held: &[Vec<f32>]) -> Majority {
    let owner_of = |index: usize| {
        let mut positions = group.groups().of(bucket).iter().map(|(position, _)| position);
        let owns = |at: &Position| group.layout().shard(bucket, *at).contains(&index);
        positions.find(owns).map_or(0, Position::index)
    };
    let mut is_voted = true;
    let pick = |index: usize| {
        let most = most_common(held.iter().map(|values| values[index].to_bits()));
        match most.filter(|(_, count)| 2 * count > held.len()) {
            Some((bits, _)) => f32::from_bits(bits),
            None => {
                is_voted = false;
                held[owner_of(index)][index]
            }
        }
    };
    let values = (0..held[0].len()).map(pick).collect();
    Majority { values, is_voted }
}

/// Returns the tensors of a bucket in which any value differs in any bit.
fn differing(plan: &Plan, bucket: BucketId, values: &[f32], truth: &[f32]) -> Vec<String> {
    let wrong = |index: &usize| values[*index].to_bits() != truth[*index].to_bits();
    let mut found = Vec::new();
    for &(id, start) in &plan.buckets[bucket.index()].parameters {
        let parameter = &plan.graph.parameters[id.index()];
        let count = plan.graph.tensor(parameter.tensor).shape.per_row();
        let bad: Vec<usize> = (start..start + count).filter(wrong).collect();
        if let Some(first) = bad.first() {
            let (name, first, number) = (&parameter.name, first - start, bad.len());
            found
                .push(format!("{number} of {count} values of {name} differ, the first at {first}"));
        }
    }
    if found.is_empty() && values.iter().zip(truth).any(|(a, b)| a.to_bits() != b.to_bits()) {
        found.push(format!("values between the tensors of {bucket} differ"));
    }
    found
}
