//! Nodes of a run over several machines: what they are, and what they say to each other. No IO and
//! no clock.

mod hello;
mod message;
mod refusal;
mod roster;
#[cfg(test)]
mod testing;
mod text;

pub use hello::{
    DEVICE_BYTES_MAX, DEVICES_MAX, HOST_BYTES_MAX, Hello, HelloError, NodeDevice, PROTOCOL,
    VERSION_BYTES_MAX,
};
pub use message::{
    ACTIVITY_BYTES_MAX, ClusterMsg, Loss, MESSAGE_BYTES_MAX, MessageError, Presence, PresentNode,
    Welcome,
};
pub use refusal::Refusal;
pub use roster::{ADDRESSES_MAX, Roster, RosterError, RosterNode};
pub use text::{TextError, WHY_BYTES_MAX, shown_text};

use crate::base::Nanos;

/// Most nodes of a run.
pub const NODES_MAX: u32 = 64;
/// Bounds of the longest silence of a node.
pub const NODE_TIMEOUT_MIN: Nanos = 100_000_000;
pub const NODE_TIMEOUT_MAX: Nanos = 3_600_000_000_000;
