//! Tokens: operations that a program waits for.

use std::fmt;

use crate::collective::Collective;
use potluck_core::{EdgeId, ReductionId};

/// Operation of a rank with its peers that ends later than it starts.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Operation {
    Collective(Collective),
    /// Receives the tensor of an edge.
    Receive(EdgeId),
    /// Reduces the parts of the ranks of a tensor group.
    AllReduce(ReductionId),
}

/// One operation in a step: an operation may happen once per micro-batch, or once per step.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct Token {
    pub operation: Operation,
    /// Micro-batch of the operation; `None`: it happens once per step.
    pub micro_batch: Option<usize>,
}

impl Token {
    /// Returns the token of the tensor of an edge for a micro-batch.
    pub const fn receive(edge: EdgeId, micro_batch: usize) -> Self {
        Self { operation: Operation::Receive(edge), micro_batch: Some(micro_batch) }
    }

    /// Returns the token of an all-reduce of a micro-batch.
    pub const fn all_reduce(reduction: ReductionId, micro_batch: usize) -> Self {
        Self { operation: Operation::AllReduce(reduction), micro_batch: Some(micro_batch) }
    }

    /// Returns the token of a collective that happens once per step.
    pub const fn of(collective: Collective) -> Self {
        Self { operation: Operation::Collective(collective), micro_batch: None }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collective(collective) => write!(f, "{collective}"),
            Self::Receive(edge) => write!(f, "{edge}"),
            Self::AllReduce(reduction) => write!(f, "{reduction}"),
        }
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.micro_batch {
            Some(micro_batch) => write!(f, "{} for micro-batch {micro_batch}", self.operation),
            None => write!(f, "{}", self.operation),
        }
    }
}
