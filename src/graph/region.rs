//! Places: ranges of elements that a transfer reads from a device or writes to it.

use std::fmt;
use std::ops::Range;

use super::BucketTensor;
use potluck_core::{BucketId, TensorId};

/// Elements on a device that a transfer reads or writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Region {
    /// Range of elements of a bucket.
    Bucket { bucket_tensor: BucketTensor, bucket: BucketId, range: Range<usize> },
    /// Range of elements of a tensor in a slot, in the copy of a micro-batch.
    Tensor { tensor: TensorId, micro_batch: usize, range: Range<usize> },
}

impl Region {
    /// Returns the place of a range of elements of a bucket.
    pub fn bucket(bucket_tensor: BucketTensor, bucket: BucketId, range: Range<usize>) -> Self {
        Self::Bucket { bucket_tensor, bucket, range }
    }

    /// Returns the number of elements.
    pub fn length(&self) -> usize {
        match self {
            Self::Bucket { range, .. } | Self::Tensor { range, .. } => range.len(),
        }
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bucket { bucket_tensor, bucket, range } => {
                write!(f, "{bucket_tensor} of {bucket}, {}..{}", range.start, range.end)
            }
            Self::Tensor { tensor, micro_batch, range } => {
                let Range { start, end } = range;
                write!(f, "{tensor} of micro-batch {micro_batch}, {start}..{end}")
            }
        }
    }
}
