//! Shards: the elements of each bucket that a device updates, and their positions in its buffers.
//! Parameters and gradients are held whole, moments and averages only for the shard.

use std::ops::Range;

use super::{BucketTensor, Moments};
use potluck_core::BucketId;
use potluck_graph::{Plan, UpdateRange};

/// Alignment of a shard in elements: 256 bytes, at which any device can bind a buffer, and at
/// which every kernel that covers a whole bucket computes the same bits for a shard.
const ALIGNMENT: usize = 64;

/// Elements of each bucket that a device has.
pub struct Shards {
    buckets: Vec<HeldBucket>,
}

/// Elements of a bucket that a device has: none if the plan does not hold it.
struct HeldBucket {
    length: usize,
    /// Number of elements that have gradients: all or, in a frozen bucket, none.
    gradients: usize,
    /// Shard that the device updates.
    owned: Range<usize>,
}

impl Shards {
    /// Returns the shards of a device that holds `plan` and keeps `moments`.
    ///
    /// # Panics
    /// If there is not one range per bucket, if a range does not start at a multiple of 64
    /// elements, if it ends neither at a multiple nor at the end of its bucket, or if elements are
    /// owned in a bucket that the plan does not hold.
    pub fn new(plan: &Plan, moments: &Moments) -> Self {
        if let Some(owned) = &moments.owned {
            assert_eq!(owned.len(), plan.buckets.len(), "one range per bucket");
        }
        let mut buckets = Vec::with_capacity(plan.buckets.len());
        for (index, (bucket, held)) in plan.buckets.iter().zip(&plan.held).enumerate() {
            let [length, gradients] =
                if *held { [bucket.length, bucket.gradient_length()] } else { [0, 0] };
            let owned = match &moments.owned {
                None => 0..gradients,
                Some(owned) if gradients == 0 && owned[index].is_empty() => 0..0,
                Some(owned) => owned[index].clone(),
            };
            let Range { start, end } = owned;
            let fits = start <= end && end <= gradients && start.is_multiple_of(ALIGNMENT);
            let whole = end.is_multiple_of(ALIGNMENT) || end == gradients;
            assert!(fits && whole, "{start}..{end} is no shard of a bucket of {gradients}");
            buckets.push(HeldBucket { length, gradients, owned });
        }
        Self { buckets }
    }

    /// Returns the elements of a bucket that the device updates.
    pub fn owned(&self, bucket: BucketId) -> Range<usize> {
        self.buckets[bucket.index()].owned.clone()
    }

    /// Returns the number of elements of every bucket that a bucket tensor holds.
    pub fn lengths(&self, bucket_tensor: BucketTensor) -> impl Iterator<Item = usize> + '_ {
        (0..self.buckets.len() as u32).map(move |id| self.held(bucket_tensor, BucketId(id)).len())
    }

    /// Returns the elements of a bucket that a bucket tensor holds.
    pub fn held(&self, bucket_tensor: BucketTensor, bucket: BucketId) -> Range<usize> {
        let held = &self.buckets[bucket.index()];
        match bucket_tensor {
            BucketTensor::Parameters => 0..held.length,
            BucketTensor::Gradients => 0..held.gradients,
            BucketTensor::Moment(_) | BucketTensor::Average => held.owned.clone(),
        }
    }

    /// Returns the positions of elements of a bucket in a bucket tensor.
    ///
    /// # Panics
    /// If the bucket tensor does not hold all of them.
    pub fn place(
        &self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
        elements: &Range<usize>,
    ) -> Range<usize> {
        let held = self.held(bucket_tensor, bucket);
        let inside = held.start <= elements.start && elements.end <= held.end;
        assert!(inside, "{elements:?} of bucket {}, which holds {held:?}", bucket.0);
        elements.start - held.start..elements.end - held.start
    }

    /// Returns the range of an update with positions relative to the first owned element.
    ///
    /// # Panics
    /// If the update covers elements that the device does not own.
    pub fn update(&self, bucket: BucketId, range: &UpdateRange) -> UpdateRange {
        let covered = range.start..range.start + range.length;
        let start = self.place(BucketTensor::Moment(0), bucket, &covered).start;
        let decay_end = range.decay_end.saturating_sub(range.start - start);
        UpdateRange { start, decay_end, ..*range }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shards(owned: Range<usize>) -> Shards {
        Shards { buckets: vec![HeldBucket { length: 1024, gradients: 1024, owned }] }
    }

    #[test]
    fn updates_are_counted_from_the_shard() {
        let of = |owned: Range<usize>, start, decay_end| {
            let range =
                UpdateRange { start, length: 64, decay_end, gradient_scale: 1.0, rounding: None };
            let local = shards(owned).update(BucketId(0), &range);
            (local.start, local.length, local.decay_end)
        };
        assert_eq!(of(0..1024, 128, 150), (128, 64, 150));
        assert_eq!(of(128..512, 128, 150), (0, 64, 22));
        assert_eq!(of(128..512, 192, 150), (64, 64, 22));
        assert_eq!(of(128..512, 192, 100), (64, 64, 0));
        assert_eq!(of(128..512, 192, 1024), (64, 64, 896));
    }

    #[test]
    fn buckets_hold_all_but_moments_of_others() {
        let shards = shards(128..512);
        assert_eq!(shards.held(BucketTensor::Gradients, BucketId(0)), 0..1024);
        assert_eq!(shards.held(BucketTensor::Moment(1), BucketId(0)), 128..512);
        assert_eq!(shards.place(BucketTensor::Parameters, BucketId(0), &(130..140)), 130..140);
        assert_eq!(shards.place(BucketTensor::Moment(0), BucketId(0), &(130..140)), 2..12);
    }

    #[test]
    #[should_panic(expected = "120..140 of bucket 0, which holds 128..512")]
    fn what_is_not_held_has_no_place() {
        shards(128..512).place(BucketTensor::Moment(0), BucketId(0), &(120..140));
    }
}
