//! Values of the simulation: parameters and gradients of one virtual rank.

use std::ops::Range;

use super::scenario::Scenario;
use crate::{MicroBatch, Verdict};
use potluck_core::{BucketId, Rank, SegmentId, TensorId};

const LEARNING_RATE: f32 = 0.05;

/// Values of each bucket.
pub(crate) type Buckets = Vec<Vec<f32>>;

/// Mixes 64 bits: the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
/// number generators", OOPSLA 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns a number of either sign between 2^-9 and 4 in magnitude, with a full mantissa, so that
/// sums in another order have other bits.
fn number(word: u64) -> f32 {
    let exponent = 118 + (word >> 60) % 10;
    f32::from_bits((word as u32 & 0x807f_ffff) | (exponent as u32) << 23)
}

/// Returns one sample's contribution to the gradient of an element: a function of the sample and
/// of the element's own value, so that parameters that differ give gradients that differ.
pub(super) fn sample_gradient(key: u64, index: usize, parameter: f32) -> f32 {
    number(mix(key.wrapping_add(index as u64))) * (1.0 + 0.125 * parameter)
}

/// Key of a segment's contribution to the gradients of one bucket for one sample.
pub(super) fn sample_key(
    seed: u64,
    step: u64,
    slot: u32,
    segment: SegmentId,
    bucket: BucketId,
) -> u64 {
    let of_both = u64::from(segment.0) << 32 | u64::from(bucket.0);
    mix(mix(mix(seed ^ mix(step)) ^ u64::from(slot)) ^ of_both)
}

fn sample_loss(seed: u64, step: u64, slot: u32) -> f64 {
    f64::from(number(sample_key(seed, step, slot, SegmentId(0), BucketId(u32::MAX))).abs())
}

/// Returns a range of the elements of a tensor that crosses from one rank to another, for a
/// micro-batch of these samples; `part_of` is the rank that has computed a part for an all-reduce.
pub(super) fn tensor_values(
    seed: u64,
    step: u64,
    tensor: TensorId,
    part_of: Option<Rank>,
    samples: MicroBatch,
    range: Range<usize>,
) -> Vec<f32> {
    let of_samples = u64::from(samples.first) << 32 | u64::from(samples.rows);
    let of_part = match part_of {
        Some(rank) => u64::from(rank.0 + 1) << 32,
        None => 0,
    };
    let key = mix(mix(mix(!seed ^ mix(step)) ^ of_samples) ^ u64::from(tensor.0) ^ of_part);
    range.map(|index| number(mix(key.wrapping_add(index as u64)))).collect()
}

/// Applies the update rule: plain gradient descent.
pub(super) fn updated(parameter: f32, gradient: f32, scale: f32) -> f32 {
    parameter - LEARNING_RATE * (gradient * scale)
}

pub(super) fn initial(seed: u64, lengths: &[usize]) -> Buckets {
    let mut buckets = Vec::with_capacity(lengths.len());
    for (bucket, &length) in lengths.iter().enumerate() {
        let key = mix(!seed ^ bucket as u64);
        let values = (0..length).map(|index| number(mix(key.wrapping_add(index as u64))));
        buckets.push(values.collect());
    }
    buckets
}

/// Returns a hash of the bits, the lengths and the order of all values (FNV-1a over words).
pub fn hash(buckets: &Buckets) -> u64 {
    const PRIME: u64 = 0x0100_0000_01b3;
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for bucket in buckets {
        hash = (hash ^ bucket.len() as u64).wrapping_mul(PRIME);
        for value in bucket {
            hash = (hash ^ u64::from(value.to_bits())).wrapping_mul(PRIME);
        }
    }
    hash
}

/// Values on one virtual device.
#[derive(Debug)]
pub struct Model {
    /// Seed of the values; `None` if there are no values.
    seed: Option<u64>,
    pub parameters: Buckets,
    gradients: Buckets,
    loss: f64,
    count: f64,
}

impl Model {
    /// Creates the values of a rank, with nothing of the buckets that it does not hold.
    pub fn new(scenario: &Scenario, rank: Rank) -> Self {
        let lengths = scenario.lengths();
        let mut parameters = match scenario.values {
            Some(seed) => initial(seed, &lengths),
            None => vec![Vec::new(); lengths.len()],
        };
        for (bucket, values) in parameters.iter_mut().enumerate() {
            if !scenario.holds(rank, BucketId(bucket as u32)) {
                values.clear();
            }
        }
        let gradients = parameters.iter().map(|values| vec![0.0; values.len()]).collect();
        Self { seed: scenario.values, parameters, gradients, loss: 0.0, count: 0.0 }
    }

    /// Clears the gradients; if `is_not_finite`, sets one to NaN.
    pub fn begin_step(&mut self, is_not_finite: bool) {
        for bucket in &mut self.gradients {
            bucket.fill(0.0);
        }
        self.loss = 0.0;
        self.count = 0.0;
        if is_not_finite
            && let Some(longest) = self.gradients.iter_mut().max_by_key(|bucket| bucket.len())
            && let Some(value) = longest.last_mut()
        {
            *value = f32::NAN;
        }
    }

    /// Adds the gradients that a segment computes for a micro-batch to buckets.
    pub fn run(
        &mut self,
        step: u64,
        samples: MicroBatch,
        segment: SegmentId,
        buckets: &[BucketId],
    ) {
        let Some(seed) = self.seed else { return };
        for &bucket in buckets {
            let parameters = &self.parameters[bucket.index()];
            for slot in samples.first..samples.first + samples.rows {
                let key = sample_key(seed, step, slot, segment, bucket);
                let values = self.gradients[bucket.index()].iter_mut().zip(parameters);
                for (index, (gradient, &parameter)) in values.enumerate() {
                    *gradient += sample_gradient(key, index, parameter);
                }
            }
        }
    }

    /// Counts the samples of a micro-batch and adds their losses.
    pub fn count(&mut self, step: u64, samples: MicroBatch) {
        for slot in samples.first..samples.first + samples.rows {
            self.loss += sample_loss(self.seed.unwrap_or(0), step, slot);
            self.count += 1.0;
        }
    }

    /// Returns the sum of the losses of this rank's samples, and their number.
    pub fn loss(&self) -> (f64, f64) {
        (self.loss, self.count)
    }

    /// Updates a range of a bucket.
    pub fn update(&mut self, bucket: BucketId, range: Range<usize>, verdict: &Verdict) {
        let scale = (1.0 / verdict.totals().count) as f32;
        let range = self.held(range);
        let gradients = &self.gradients[bucket.index()][range.clone()];
        for (value, &gradient) in self.parameters[bucket.index()][range].iter_mut().zip(gradients) {
            *value = updated(*value, gradient, scale);
        }
    }

    /// Returns the sum of squares of a bucket's gradients, and the number of non-finite ones.
    pub fn squares(&self, bucket: BucketId) -> (f64, u64) {
        squares_of(&self.gradients[bucket.index()])
    }

    pub fn gradients(&self, bucket: BucketId, range: Range<usize>) -> &[f32] {
        &self.gradients[bucket.index()][self.held(range)]
    }

    pub fn parameters(&self, bucket: BucketId, range: Range<usize>) -> &[f32] {
        &self.parameters[bucket.index()][self.held(range)]
    }

    pub(crate) fn set_gradients(&mut self, bucket: BucketId, range: Range<usize>, values: &[f32]) {
        let range = self.held(range);
        self.gradients[bucket.index()][range].copy_from_slice(values);
    }

    pub fn set_parameters(&mut self, bucket: BucketId, range: Range<usize>, values: &[f32]) {
        let range = self.held(range);
        self.parameters[bucket.index()][range].copy_from_slice(values);
    }

    /// The part of a range that is stored: nothing, if there are no values.
    fn held(&self, range: Range<usize>) -> Range<usize> {
        if self.seed.is_some() { range } else { 0..0 }
    }
}

/// Sum of the squares of values, and the number of non-finite ones.
pub(super) fn squares_of(values: &[f32]) -> (f64, u64) {
    let squares = values.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    (squares, values.iter().filter(|value| !value.is_finite()).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_bounded_and_the_order_of_their_sum_matters() {
        let numbers: Vec<f32> = (0..1000).map(|word| number(mix(word))).collect();
        assert!(numbers.iter().all(|x| (2f32.powi(-9)..4.0).contains(&x.abs())));
        assert!(numbers.iter().any(|x| *x < 0.0) && numbers.iter().any(|x| *x > 0.0));
        let triples = numbers.windows(3);
        let other = triples.filter(|t| (t[0] + t[1]) + t[2] != (t[1] + t[2]) + t[0]).count();
        assert!(other > 100, "{other}");
    }

    #[test]
    fn a_hash_sees_bits_lengths_and_order() {
        let buckets = vec![vec![1.0, 2.0], vec![3.0]];
        let others = [
            vec![vec![1.0, 2.0, 3.0]],
            vec![vec![2.0, 1.0], vec![3.0]],
            vec![vec![1.0, 2.0], vec![3.0000002]],
            vec![vec![1.0, 2.0], vec![3.0], vec![]],
            vec![vec![0.0, 2.0], vec![3.0]],
        ];
        for other in others {
            assert_ne!(hash(&other), hash(&buckets));
        }
        assert_ne!(hash(&vec![vec![0.0]]), hash(&vec![vec![-0.0]]));
    }
}
