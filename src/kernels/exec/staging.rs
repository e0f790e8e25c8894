//! Staging memory: the host memory for transfers, by one rule for all devices.

use super::READBACK_ELEMENTS_MAX;
use potluck_core::{DType, TensorId};
use potluck_graph::{Plan, SlotKind, TensorLocation};

/// Memory of readback slots: they take this many bytes in total, or this many times the bytes of
/// all buckets if that is less, because readbacks may be shorter than slots and may be held while
/// the same range is read again. Their number is within `PLACES`.
const PLACES_BYTES: usize = 64 << 20;
const PLACES_TIMES: usize = 8;
const PLACES: (usize, usize) = (4, 256);

/// Slots of a GPU's upload ring and readback ring, used in rotation, and bytes of each slot: large
/// enough that one submission per slot does not show in the bandwidth.
pub(crate) const UPLOAD_SLOTS: usize = 4;
pub(crate) const READBACK_SLOTS: usize = 2;
pub(crate) const SLOT_BYTES: u64 = 4 << 20;

/// Bytes of both rings, which every GPU has.
pub const RING_BYTES: usize = (UPLOAD_SLOTS + READBACK_SLOTS) * SLOT_BYTES as usize;

/// Memory budget of readbacks: number of slots, and bytes of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadbackBudget {
    pub count: usize,
    pub bytes: usize,
}

impl ReadbackBudget {
    /// Returns the budget for readbacks of at most `elements` elements from buckets and tensors of
    /// these lengths.
    pub fn new(elements: usize, lengths: &[usize]) -> Self {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let bytes = elements.min(longest).max(1) * DType::F32.bytes();
        let all = lengths.iter().sum::<usize>() * DType::F32.bytes();
        let count = PLACES_BYTES.min(PLACES_TIMES * all) / bytes;
        Self { count: count.clamp(PLACES.0, PLACES.1), bytes }
    }

    /// Returns the budget for all buckets that a plan holds and, if it is a part of a plan, for the
    /// tensors that it may send to the devices of the other parts.
    pub fn of(plan: &Plan, elements: usize) -> Self {
        let mut lengths = held_lengths(plan);
        let (longest, _) = longest_sent(plan);
        if longest > 0 {
            lengths.push(longest);
        }
        Self::new(elements, &lengths)
    }

    /// Returns the bytes of all slots.
    pub fn total(&self) -> usize {
        self.count * self.bytes
    }
}

/// Returns the bytes of host memory for the transfers of a GPU that trains `plan` as one of several
/// ranks: readback slots (at most 64 MiB, unless `start_readback` needs additional ones), and the
/// rings for uploads and for blocking reads (24 MiB).
pub fn staging_bytes(plan: &Plan) -> usize {
    ReadbackBudget::of(plan, READBACK_ELEMENTS_MAX).total() + RING_BYTES
}

/// Returns the most bytes that the readbacks of the CPU device take, which copies values when a
/// readback is started: all gradients, which may wait for other ranks at the same time; for a part
/// of a plan, also one tensor to the previous part and one to the next, for each micro-batch in
/// flight.
pub fn host_staging_bytes(plan: &Plan) -> usize {
    let (longest, copies) = longest_sent(plan);
    let mut elements = longest.saturating_mul(2 * copies);
    for length in held_lengths(plan) {
        elements = elements.saturating_add(length);
    }
    elements.saturating_mul(DType::F32.bytes())
}

/// Lengths of the buckets that a plan holds and that are reduced over ranks.
pub(crate) fn held_lengths(plan: &Plan) -> Vec<usize> {
    let mut lengths = Vec::new();
    for (bucket, held) in plan.buckets.iter().zip(&plan.held) {
        if *held && bucket.gradient_length() > 0 {
            lengths.push(bucket.gradient_length());
        }
    }
    lengths
}

/// Returns the elements of the longest tensor that a part of a plan may send, and the most copies
/// of such a tensor; zeros for a whole plan, which sends none.
fn longest_sent(plan: &Plan) -> (usize, usize) {
    if !is_part(plan) {
        return (0, 0);
    }
    let mut longest = 0;
    let mut copies_max = 0;
    for index in 0..plan.graph.tensors.len() as u32 {
        let tensor = TensorId(index);
        let TensorLocation::Slot(slot) = plan.place(tensor) else { continue };
        let slot = &plan.slots[slot.index()];
        if slot.kind == SlotKind::Stash {
            longest = longest.max(plan.graph.tensor(tensor).shape.elements(plan.options.rows));
            copies_max = copies_max.max(slot.copies);
        }
    }
    (longest, copies_max)
}

/// Returns true if a plan leaves buckets or nodes to other devices.
fn is_part(plan: &Plan) -> bool {
    let mut outputs = plan.graph.nodes.iter().flat_map(|node| &node.outputs);
    plan.held.iter().any(|held| !held)
        || outputs.any(|output| plan.place(*output) == TensorLocation::Unallocated)
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
