//! Replica check: compares parameter hashes, which each device computes from its own memory, and
//! the values if hashes differ.

use std::collections::{BTreeMap, HashMap};

use super::RuntimeError;
use super::workers::WorkerGroup;
use potluck_core::{BucketId, Position, Rank};
use potluck_graph::Plan;
use potluck_kernels::exec::BucketTensor;
use potluck_kernels::ops::hash;

/// Rank whose parameters differ from the other ranks'.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaMismatch {
    pub rank: Rank,
    /// Tensors, with the number of differing values; a message for the user.
    pub what: String,
}

/// Compares the parameters of each bucket on all of its ranks; with `repair`, overwrites differing
/// ones. The majority's value is the reference, or without a majority the owner's: the rank that
/// updates it.
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
    let buckets = plan.buckets.len() as u32;
    let hashes = group.run_on_all("hashing the parameters", move |_, device| {
        let mut hashes = Vec::with_capacity(buckets as usize);
        for bucket in 0..buckets {
            hashes.push(device.hash(BucketTensor::Parameters, BucketId(bucket))?);
        }
        Ok(hashes)
    })?;
    let mut found: BTreeMap<Rank, Vec<String>> = BTreeMap::new();
    for bucket in 0..buckets {
        let bucket = BucketId(bucket);
        let mut of_bucket: Vec<u64> = Vec::new();
        for (_, rank) in group.groups().of(bucket).iter() {
            of_bucket.push(hashes[rank.index()][bucket.index()]);
        }
        if of_bucket.iter().all(|hash| *hash == of_bucket[0]) {
            continue;
        }
        for (rank, what) in differences(group, plan, bucket, &of_bucket, repair)? {
            found.entry(rank).or_default().push(what);
        }
    }
    let mut mismatches = Vec::with_capacity(found.len());
    for (rank, what) in found {
        mismatches.push(ReplicaMismatch { rank, what: what.join(", ") });
    }
    Ok(mismatches)
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
    let members = group.groups().of(bucket).clone();
    let mut by_rank = group.run_on_all("reading the parameters", move |_, device| {
        device.read_bucket(BucketTensor::Parameters, bucket)
    })?;
    let mut held: Vec<Vec<f32>> = Vec::new();
    for (_, rank) in members.iter() {
        held.push(std::mem::take(&mut by_rank[rank.index()]));
    }
    let truth = majority(group, bucket, &held);
    let mut found = Vec::new();
    for ((_, rank), values) in members.iter().zip(&held) {
        let tensors = differing(plan, bucket, values, &truth.values);
        if tensors.is_empty() {
            continue;
        }
        let believed = if truth.is_voted {
            ""
        } else if plan.buckets[bucket.index()].is_updated() {
            " from those of the device that updates them"
        } else {
            " from those of the first device that has them"
        };
        found.push((rank, format!("{}{believed}", tensors.join(", "))));
        if repair {
            let values = truth.values.clone();
            group.run_on(rank, "repairing the parameters", move |device| {
                device.write_bucket(BucketTensor::Parameters, bucket, &values)
            })?;
        }
    }
    if found.is_empty() {
        // A device is not trusted if its hash and its values do not match.
        let what = format!("the hash of {bucket} differs, though what is read back does not");
        let is_true = have_hash(hashes, &truth.values);
        for ((_, rank), is_true) in members.iter().zip(is_true) {
            if !is_true {
                found.push((rank, what.clone()));
            }
        }
    }
    Ok(found)
}

/// Returns for each hash whether it is that of these values.
fn have_hash(hashes: &[u64], values: &[f32]) -> Vec<bool> {
    let expected = hash::fast(bytemuck::cast_slice(values), 0);
    hashes.iter().map(|hash| *hash == expected).collect()
}

/// The most common value, and its count.
fn most_common<V: Copy + Eq + std::hash::Hash + Ord>(
    values: impl Iterator<Item = V>,
) -> Option<(V, usize)> {
    let mut votes: HashMap<V, usize> = HashMap::new();
    for value in values {
        *votes.entry(value).or_default() += 1;
    }
    // Of equally common values the smallest, so that the order of the hash map has no effect.
    votes.into_iter().max_by_key(|(value, count)| (*count, std::cmp::Reverse(*value)))
}

/// Reference values of a bucket; `is_voted` is true if each has a majority of ranks.
struct Majority {
    values: Vec<f32>,
    is_voted: bool,
}

fn majority(group: &WorkerGroup, bucket: BucketId, held: &[Vec<f32>]) -> Majority {
    let mut is_voted = true;
    let mut values = Vec::with_capacity(held[0].len());
    for index in 0..held[0].len() {
        let most = most_common(held.iter().map(|values| values[index].to_bits()));
        values.push(match most {
            Some((bits, count)) if 2 * count > held.len() => f32::from_bits(bits),
            _ => {
                is_voted = false;
                held[owner_of(group, bucket, index).index()][index]
            }
        });
    }
    Majority { values, is_voted }
}

/// Position that updates an element of a bucket, or else the first one.
fn owner_of(group: &WorkerGroup, bucket: BucketId, index: usize) -> Position {
    for (position, _) in group.groups().of(bucket).iter() {
        if group.layout().shard(bucket, position).contains(&index) {
            return position;
        }
    }
    Position(0)
}

/// Tensors of a bucket that differ in any bit.
fn differing(plan: &Plan, bucket: BucketId, values: &[f32], truth: &[f32]) -> Vec<String> {
    let mut found = Vec::new();
    for &(id, start) in &plan.buckets[bucket.index()].parameters {
        let parameter = &plan.graph.parameters[id.index()];
        let count = plan.graph.tensor(parameter.tensor).shape.per_row();
        let mut bad = Vec::new();
        for index in start..start + count {
            if values[index].to_bits() != truth[index].to_bits() {
                bad.push(index - start);
            }
        }
        if let Some(first) = bad.first() {
            let name = &parameter.name;
            let number = bad.len();
            found
                .push(format!("{number} of {count} values of {name} differ, the first at {first}"));
        }
    }
    if found.is_empty() && values.iter().zip(truth).any(|(a, b)| a.to_bits() != b.to_bits()) {
        found.push(format!("values between the tensors of {bucket} differ"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_with_the_wrong_hash_is_found_also_of_two() {
        let values = [0.5, -2.0, 8.0];
        let right = hash::reference(bytemuck::cast_slice(&values), 0);
        let wrong = right ^ 1;
        assert_eq!(have_hash(&[right, wrong], &values), [true, false]);
        assert_eq!(have_hash(&[wrong, right], &values), [false, true]);
        assert_eq!(have_hash(&[wrong, wrong, right], &values), [false, false, true]);
    }
}
