//! Errors of the calls of a process group.

use crate::collective::{ExchangeError, Member};
use potluck_core::format::listed;

/// Error of a call. After an error, no further call on the group succeeds, and the calls of every
/// other rank fail as well and name this rank; except for errors of
/// [`super::ProcessGroup::new_group`] about its list, which all ranks get alike.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GroupError {
    #[error("{call}: {why}")]
    Argument { call: String, why: String },
    /// Two ranks made calls that do not match.
    #[error("{0}")]
    Mismatch(String),
    #[error("{call}: waited {seconds:.1} s for {}", listed(members))]
    TimedOut { call: String, seconds: f64, members: Vec<Member> },
    #[error(
        "{call}: {}{}",
        left_reason(*member),
        if *panicked { " (its thread panicked)" } else { "" }
    )]
    PeerLeft { call: String, member: Member, panicked: bool },
    /// Another rank failed or aborted the group.
    #[error("{0}")]
    Aborted(String),
    /// The processes of a group could not connect.
    #[error("{0}")]
    Connect(String),
    /// A rank made the same call and sent other values, which no rank of this library does.
    #[error("{call}: {member} sent values of another form, type or length")]
    Unexpected { call: String, member: Member },
    /// A state that only a bug of the library explains.
    #[error("{call}: {why}")]
    Defect { call: String, why: String },
    /// A message that only a bug of the library explains.
    #[error("{0}, which is a defect of potluck; please report it")]
    Exchange(#[from] ExchangeError),
}

/// Close reason of the mailbox of a member whose handle was dropped.
pub(crate) fn left_reason(member: Member) -> String {
    format!("{member} left the group")
}

pub(crate) fn aborted(why: &str) -> GroupError {
    GroupError::Aborted(why.into())
}
