//! Violations of the protocol of a step.

use super::Token;
use potluck_core::{ChunkId, EdgePiece, Rank, Round};

/// Report or message that the state machines of a step do not expect: a defect of its sender. The
/// machine is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    #[error("{rank} reports in a world of {world}")]
    UnknownRank { rank: Rank, world: u32 },
    #[error("{rank} votes twice")]
    VotedTwice { rank: Rank },
    #[error("a message of {found} arrives in {current}")]
    LaterRound { found: Round, current: Round },
    #[error("a verdict arrives without a vote")]
    UnexpectedVerdict,
    #[error("{0} is over twice")]
    DoneTwice(Token),
    #[error("the device returns {found} and {awaited} is awaited")]
    UnexpectedReadback { found: String, awaited: String },
    #[error("{what} of {chunk} arrives at a rank that expects none")]
    UnexpectedChunk { what: &'static str, chunk: ChunkId },
    #[error("{piece} arrives at a rank that does not expect it")]
    UnexpectedPiece { piece: EdgePiece },
    #[error("the sum of {chunk} is missing in the vote")]
    MissingSum { chunk: ChunkId },
}
