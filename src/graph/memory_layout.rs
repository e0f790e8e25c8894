//! Parts of the memory of a plan: its segments, their slots, and the locations of tensors.

use std::ops::Range;

use super::PassKind;
use potluck_core::{BucketId, SlotId, StateId};

/// Alignment in bytes of tensors in buckets and of ranges of slots: offsets at which every device
/// can bind a buffer.
pub const ALIGNMENT_BYTES: usize = 256;

/// Segment of the plan: nodes of one pass and block, which a device runs without interruption. A
/// pass of a block is one segment, or several if it has all-reduces, with which a segment ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub phase: PassKind,
    pub block: u32,
    /// Indices into [`Graph::nodes`](super::Graph::nodes).
    pub nodes: Range<usize>,
    /// Buckets whose gradients are complete for the micro-batch when the segment has run.
    pub completes: Vec<BucketId>,
}

/// Lifetime of a slot's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotKind {
    /// Within one segment; one copy.
    Scratch,
    /// From one segment to another, for some of its tensors, so that other micro-batches may run
    /// between; one copy per micro-batch in flight.
    Stash,
    /// As [`SlotKind::Scratch`], in the memory by which kernels pass logits from one dispatch to
    /// the next: its tensors are dead when such a kernel runs, and no larger than the logits. At
    /// most one slot is of this kind; it has no bytes if it holds no tensor.
    Logits,
}

/// A buffer for tensors whose lifetimes do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub kind: SlotKind,
    /// Bytes of one copy.
    pub bytes: usize,
    /// Number of copies: micro-batch `m` uses copy `m % copies`.
    pub copies: usize,
}

/// Location of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorLocation {
    Slot(SlotId),
    /// Element `start` of the bucket's parameters.
    Parameter {
        bucket: BucketId,
        start: usize,
    },
    /// Element `start` of the bucket's gradients.
    Gradient {
        bucket: BucketId,
        start: usize,
    },
    /// A buffer of its own.
    State(StateId),
    /// The (sum, count) accumulator.
    Loss,
    /// Without memory: no node writes or reads it.
    Unallocated,
}
