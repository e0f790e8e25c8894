//! Typed indices. Each one indexes exactly one list, so that a bucket is never used as a slot.

use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($int:ty) $letter:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[derive(serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $int);

        impl $name {
            /// Returns the position in the list that this id indexes.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    )*};
}

ids! {
    /// A tensor of a graph.
    TensorId(u32) "t";
    /// A node (one application of an op) of a graph.
    NodeId(u32) "n";
    /// A parameter of a graph.
    ParamId(u32) "p";
    /// A tensor of a graph that stays on the device from step to step.
    StateId(u32) "state ";
    /// A flat range of parameters and of their gradients: the unit of reduction and of update.
    BucketId(u32) "bucket ";
    /// A part of a bucket that is sent in one message.
    ChunkId(u32) "chunk ";
    /// A tensor that crosses from one rank to another in each micro-batch.
    EdgeId(u32) "edge ";
    /// An all-reduce of tensors that the ranks of a tensor group compute in each micro-batch.
    ReductionId(u32) "all-reduce ";
    /// A part of the plan that a device executes without further instructions.
    SegmentId(u32) "s";
    /// A buffer that memory planning assigns to activations by their liveness.
    SlotId(u32) "slot ";
    /// A device's index in a run, `0..world`.
    Rank(u32) "rank ";
    /// An index in a group of ranks; in a group of all ranks, positions equal ranks.
    Position(u32) "position ";
    /// A process with its devices in a run over several machines; node 0 is the first one.
    /// (torchrun calls it node rank; [`NodeId`] is a node of a graph.)
    NodeRank(u32) "node ";
    /// One set of nodes that begin to work together, counted from 1. Another set, or the same one
    /// after a loss, is a later generation.
    Generation(u64) "generation ";
    /// A consumer of random numbers in a model: a dropout, an attention, an initialisation.
    Site(u32) "site ";
}
