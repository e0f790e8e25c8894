//! Edges: tensors that cross from one rank to others, between the stages of a pipeline or in an
//! all-reduce of a tensor group.

use std::ops::Range;

use potluck_core::{DType, EdgeId, Rank, ReductionId, Shape, TensorId};
use potluck_graph::Reduction;

/// Tensor that one rank computes and others read, in each micro-batch: values in the forward pass,
/// a gradient in the backward pass. [`potluck_core::EdgeId`] indexes the edges of a run.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Edge {
    /// Tensor in the whole graph, not an alias.
    pub tensor: TensorId,
    pub shape: Shape,
    pub from: Rank,
    /// Ranks that read it, ascending: one of another stage, or all of a tensor group, with `from`.
    pub to: Vec<Rank>,
    /// Maximum number of micro-batches whose values have been sent and not received yet.
    pub in_flight: usize,
    /// All-reduce that it is a part of.
    pub reduction: Option<ReductionId>,
}

impl Edge {
    /// Returns the number of elements for a micro-batch of `rows` samples.
    pub fn elements(&self, rows: usize) -> usize {
        self.shape.elements(rows)
    }

    /// Returns the bytes of the values for a micro-batch of `rows` samples.
    pub fn bytes(&self, rows: usize) -> usize {
        self.elements(rows) * DType::F32.bytes()
    }

    /// Returns true if a rank reads the tensor.
    pub fn leads_to(&self, rank: Rank) -> bool {
        self.to.contains(&rank)
    }

    /// Returns the ranges in which the elements of a micro-batch of `rows` samples are sent, each
    /// of at most `piece_max` elements.
    pub fn pieces(&self, rows: usize, piece_max: usize) -> impl Iterator<Item = Range<usize>> {
        let elements = self.elements(rows);
        let piece_max = piece_max.max(1);
        let starts = (0..elements).step_by(piece_max);
        starts.map(move |start| start..(start + piece_max).min(elements))
    }

    /// Returns the maximum number of messages of the edge that are in flight to one rank.
    pub fn messages_max(&self, rows: usize, piece_max: usize) -> usize {
        self.in_flight * self.elements(rows).div_ceil(piece_max.max(1))
    }
}

/// All-reduce of a tensor group: every rank sends its part to all, and each reduces the parts of
/// all in the order of the ranks.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GroupReduction {
    pub kind: Reduction,
    /// Edges of the tensors that are reduced together, by rank of the group, then by tensor.
    pub parts: Vec<Vec<EdgeId>>,
    /// Tensors that the results replace, not aliases: by rank of the group, then by tensor.
    pub results: Vec<Vec<TensorId>>,
}

impl GroupReduction {
    /// Returns the edges of all parts.
    pub fn edges(&self) -> impl Iterator<Item = EdgeId> + Clone {
        self.parts.iter().flatten().copied()
    }
}
