//! Edges: tensors that cross from one rank of a pipeline to another.

use crate::base::{Rank, TensorId};

/// Tensor that one rank computes and another one reads, in each micro-batch: values in the forward
/// pass, a gradient in the backward pass. [`crate::base::EdgeId`] indexes the edges of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// Tensor in the whole graph, not an alias.
    pub tensor: TensorId,
    pub from: Rank,
    pub to: Rank,
}
