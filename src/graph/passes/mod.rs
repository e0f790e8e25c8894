//! Passes: functions from a graph to a graph.

pub mod fuse;
pub mod gradients;
pub mod large_parameters;
pub mod merge_backward;
mod merge_gradients;
pub mod recompute;
pub mod shard;
pub mod store_activations;
