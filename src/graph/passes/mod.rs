//! Passes: functions from a graph to a graph.

pub mod fuse;
pub mod gradients;
pub mod large_parameters;
pub mod merge_backward;
pub mod recompute;
pub mod shard;
