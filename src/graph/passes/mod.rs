//! Passes: functions from a graph to a graph.

pub mod fuse;
pub mod gradients;
pub mod recompute;
pub mod shard;
