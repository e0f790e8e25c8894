//! Remedies of failures to meet other nodes.

use serde::{Deserialize, Serialize};

/// Remedy of a failure: whether the same may go well when it is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Remedy {
    /// Time, or a restart of another node: it is not up yet, or its run is about to end.
    Time,
    /// The user has to change something, such as a code, a flag or the installed version.
    Person,
}
