//! Places: ranges of elements that a transfer reads from a device or writes to it.

use std::fmt;
use std::ops::Range;

use super::BucketTensor;
use potluck_core::{BucketId, TensorId};

/// Elements on a device that a transfer reads or writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Place {
    /// Range of elements of a bucket.
    Bank { bank: BucketTensor, bucket: BucketId, range: Range<usize> },
    /// Range of elements of a tensor in a slot, in the copy of a micro-batch.
    Tensor { tensor: TensorId, micro_batch: usize, range: Range<usize> },
}

impl Place {
    /// Returns the place of a range of elements of a bucket.
    pub fn bank(bank: BucketTensor, bucket: BucketId, range: Range<usize>) -> Self {
        Self::Bank { bank, bucket, range }
    }

    /// Returns the number of elements.
    pub fn length(&self) -> usize {
        match self {
            Self::Bank { range, .. } | Self::Tensor { range, .. } => range.len(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bank { bank, bucket, range } => {
                write!(f, "{bank} of {bucket}, {}..{}", range.start, range.end)
            }
            Self::Tensor { tensor, micro_batch, range } => {
                let Range { start, end } = range;
                write!(f, "{tensor} of micro-batch {micro_batch}, {start}..{end}")
            }
        }
    }
}
