//! Pieces of the tensors that one rank sends another.

use std::fmt;
use std::ops::Range;

use super::EdgeId;

/// Part of the tensor of an edge for one micro-batch that is sent in one message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct EdgePiece {
    pub edge: EdgeId,
    pub micro_batch: usize,
    /// Range of elements of the tensor.
    pub range: Range<usize>,
}

impl fmt::Display for EdgePiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        write!(f, "{} of micro-batch {}, {start}..{end}", self.edge, self.micro_batch)
    }
}
