//! Violations of the protocol of an exchange.

use super::CollectiveKind;
use potluck_core::format::listed;
use potluck_core::{ChunkId, Position, Round};

/// Error of an exchange or of its driver: an event that is not due, which changes nothing and is a
/// defect of its sender, missing values, or a passed deadline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    #[error("{id} is not one of {chunks}")]
    UnknownChunk { id: ChunkId, chunks: usize },
    #[error("the own values of {id} are ready twice")]
    ReadyTwice { id: ChunkId },
    #[error("{id} is of a bucket that this rank does not hold")]
    NotHeld { id: ChunkId },
    #[error("the final values of {id} are ready at {}, which does not own it", own(position))]
    NotOwner { id: ChunkId, position: Option<Position> },
    #[error("{} expects no {} of {id} from {from}", own(position), match kind {
        CollectiveKind::ReduceScatter => "partial sum",
        CollectiveKind::AllGather => "final values",
    })]
    UnexpectedMessage {
        kind: CollectiveKind,
        id: ChunkId,
        from: Position,
        position: Option<Position>,
    },
    #[error("a sum of {id} arrives that no device was asked for")]
    UnexpectedSum { id: ChunkId },
    #[error("the own values of {id} are missing")]
    MissingValues { id: ChunkId },
    #[error("{values} values of {id} arrive, which has {length}")]
    WrongLength { id: ChunkId, values: usize, length: usize },
    #[error("no message arrives from {}", listed(awaited))]
    TimedOut { awaited: Vec<Position> },
    #[error("values of {found} arrive in {current}")]
    LaterRound { found: Round, current: Round },
    #[error("more than {max} messages of a later round arrive")]
    TooFarAhead { max: usize },
}

fn own(position: &Option<Position>) -> String {
    match position {
        Some(position) => position.to_string(),
        None => "a rank outside of the group".into(),
    }
}
