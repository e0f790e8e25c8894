//! What transfers take of the host's memory: one rule for all devices.

use super::READBACK_ELEMENTS_MAX;
use crate::base::shape::ELEMENT_BYTES;
use crate::graph::Plan;

/// Places for pieces take this much together, or so many times what there is to read, because
/// pieces may be shorter than places and may be held while the same comes again. They are so many
/// at least and at most.
const PLACES_BYTES: usize = 64 << 20;
const PLACES_TIMES: usize = 8;
const PLACES: (usize, usize) = (4, 256);

/// Slots of a GPU's two rings that take turns, and bytes of each: large enough that a submission
/// per slot does not show in the bandwidth.
pub const UPLOAD_SLOTS: usize = 4;
pub const READBACK_SLOTS: usize = 2;
pub const SLOT_BYTES: u64 = 4 << 20;

/// Bytes that both rings take.
const RING_BYTES: usize = (UPLOAD_SLOTS + READBACK_SLOTS) * SLOT_BYTES as usize;

/// Room for pieces: how many, and bytes of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadbackBudget {
    pub count: usize,
    pub bytes: usize,
}

impl ReadbackBudget {
    /// For pieces of at most `elements` elements of buckets of these lengths.
    pub fn new(elements: usize, lengths: &[usize]) -> Self {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let bytes = elements.min(longest).max(1) * ELEMENT_BYTES;
        let all = lengths.iter().sum::<usize>() * ELEMENT_BYTES;
        let count = PLACES_BYTES.min(PLACES_TIMES * all) / bytes;
        Self { count: count.clamp(PLACES.0, PLACES.1), bytes }
    }

    /// The same for all buckets of a plan.
    pub fn of(plan: &Plan, elements: usize) -> Self {
        let lengths: Vec<usize> = plan.buckets.iter().map(|bucket| bucket.length).collect();
        Self::new(elements, &lengths)
    }

    /// Bytes of all together.
    pub fn total(&self) -> usize {
        self.count * self.bytes
    }
}

/// The bytes of the host's memory that the transfers of a GPU take which trains `plan` among
/// others: places for pieces on their way back (at most 64 MiB, unless
/// [`start_readback`](super::Executor::begin_read) says otherwise), and the rings for what goes up and
/// for what is waited for (24 MiB). The CPU device has no rings and copies a piece when it is
/// begun; it takes as much as its pieces that are not dropped yet, and keeps for the next ones
/// what is within the same bound for places.
pub fn staging_bytes(plan: &Plan) -> usize {
    ReadbackBudget::of(plan, READBACK_ELEMENTS_MAX).total() + RING_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_in_number_and_bytes() {
        let of = |elements, lengths: &[usize]| {
            let places = ReadbackBudget::new(elements, lengths);
            (places.count, places.bytes)
        };
        assert_eq!(of(1 << 18, &[1 << 24, 1 << 20]), (64, 1 << 20), "64 MiB");
        assert_eq!(of(1 << 18, &[1 << 18]), (8, 1 << 20), "8 times what there is");
        assert_eq!(of(1 << 18, &[1000, 500]), (12, 4000), "no longer than a bucket");
        assert_eq!(of(100, &[1 << 24]), (256, 400), "so many at most");
        assert_eq!(of(1 << 23, &[1 << 24]), (4, 32 << 20), "so many at least");
        assert_eq!(of(100, &[]), (4, 4));
    }
}
