//! Edges: tensors that cross from one rank of a pipeline to another.

use std::ops::Range;

use potluck_core::{Rank, Shape, TensorId};

/// Tensor that one rank computes and another one reads, in each micro-batch: values in the forward
/// pass, a gradient in the backward pass. [`potluck_core::EdgeId`] indexes the edges of a run.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Edge {
    /// Tensor in the whole graph, not an alias.
    pub tensor: TensorId,
    pub shape: Shape,
    pub from: Rank,
    pub to: Rank,
    /// The most micro-batches whose values may have been sent and not be received yet.
    pub in_flight: usize,
}

impl Edge {
    /// Returns the number of elements for a micro-batch of `rows` samples.
    pub fn elements(&self, rows: usize) -> usize {
        self.shape.elements(rows)
    }

    /// Returns the ranges in which the elements of a micro-batch of `rows` samples are sent, each
    /// of at most `piece_max` elements.
    pub fn pieces(&self, rows: usize, piece_max: usize) -> impl Iterator<Item = Range<usize>> {
        let (elements, piece_max) = (self.elements(rows), piece_max.max(1));
        let starts = (0..elements).step_by(piece_max);
        starts.map(move |start| start..(start + piece_max).min(elements))
    }

    /// Returns the most messages of the edge that are on their way at a time.
    pub fn messages_max(&self, rows: usize, piece_max: usize) -> usize {
        self.in_flight * self.elements(rows).div_ceil(piece_max.max(1))
    }
}
