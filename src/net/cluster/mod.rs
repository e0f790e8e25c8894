//! Nodes of a run over several machines: how they find together, number themselves, begin at the
//! same time and notice the loss of one. State machines without IO and clock; time is an argument,
//! connections are numbers, and the driver moves the messages.
//!
//! A [`FirstNode`] waits until all nodes are here. Each of the others is a [`JoiningNode`], which
//! dials the first one:
//!
//! ```text
//! JoiningNode                      FirstNode                       phase
//!     Hello  ------------------------>  |                          waiting for people, no deadline
//!       <------------ Welcome, Present  | (Present again whenever somebody comes or goes)
//!       <------------------- Roster  -- | all are here: numbers, addresses, the next generation
//!     PairConnected 0  -------------->  |                          connecting pairs, 5 seconds
//!     Pair <-> Pair between joined nodes; the lower number dials and reports
//!     PairConnected 2  -------------->  |
//!       <-------------------- Start  -- | every pair is connected  running
//!     Heartbeat <------------------> Heartbeat, from the welcome on
//!       <------- Lost, Left, Leave -- / | Leave, PairFailed
//! ```
//!
//! Numbers are given with the roster only (`first_node::seating`), to those who are here then. So a
//! node that goes before the start frees its place and changes nobody's number; if it goes while
//! pairs connect, that generation is over, and all wait again for the next one.
//!
//! The first loss after the start ends the generation for all: the first node names it to all
//! others, once.

mod bounds;
mod error;
mod event;
mod first_node;
mod guests;
mod hello;
mod hello_error;
mod ids;
mod joining_node;
mod message;
mod pairs;
mod pulse;
mod refusal;
mod roster;
#[cfg(test)]
pub(crate) mod testing;
mod text;

pub(crate) use bounds::ADDRESSES_MAX;
pub use bounds::{DEVICE_BYTES_MAX, NODE_TIMEOUT_MAX, NODES_MAX};
pub(crate) use bounds::{DEVICES_MAX, DIAL_TIMEOUT};
pub use error::ClusterError;
pub use event::{Action, ClusterEnd, ConnectionEnd, Event, MovedNode};
pub use first_node::{FirstNode, FirstNodeOptions, FormerNode};
pub use hello::{Hello, NodeDevice, identity_hash};
pub use hello_error::HelloError;
pub use ids::{ConnectionId, DialId, EndpointId};
pub use joining_node::{JoiningNode, JoiningNodeOptions};
pub use message::{ClusterMsg, Loss, MessageError, Presence, PresentNode, Welcome};
pub use pulse::heartbeat_interval;
pub use refusal::Refusal;
pub use roster::{Roster, RosterError, RosterNode};
pub use text::{SENTENCE_BYTES_MAX, TextError, WHY_BYTES_MAX, shown_text};
