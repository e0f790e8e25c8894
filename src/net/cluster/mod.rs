//! Nodes of a run over several machines: they meet, are numbered, begin at the same time and detect
//! the loss of a node. State machines without IO and clock; time is an argument, connections are
//! numbers, and the driver moves the messages.
//!
//! A [`FirstNode`] waits until all nodes have joined. Each of the others is a [`JoiningNode`],
//! which dials the first one:
//!
//! ```text
//! JoiningNode                      FirstNode                       phase
//!     Hello  ------------------------>  |                          waiting for nodes, no deadline
//!       <------------ Welcome, Present  | (Present again whenever a node joins or leaves)
//!       <------------------- Roster  -- | all have joined: numbers, addresses, the next generation
//!     PairConnected 0  -------------->  |                          connecting pairs, 5 seconds
//!     Pair <-> Pair between joined nodes; the lower number dials and reports
//!     PairConnected 2  -------------->  |
//!       <-------------------- Start  -- | every pair is connected  running
//!     Heartbeat <------------------> Heartbeat, from the welcome on
//!       <------- Lost, Left, Leave -- / | Leave, PairFailed
//! ```
//!
//! Numbers are assigned only with the roster (`first_node::seating`), to the nodes present then. So
//! a node that leaves before the start frees its place and changes no other number; if it leaves
//! while pairs connect, that generation is over, and all wait again for the next one.
//!
//! The first loss after the start ends the generation for all: the first node reports it to all
//! others, once.

mod bounds;
mod error;
mod event;
mod first_node;
mod heartbeat_timer;
mod hello;
mod hello_error;
mod ids;
mod joining_node;
mod message;
mod pairs;
mod pending_connections;
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
pub use heartbeat_timer::heartbeat_interval;
pub use hello::{Hello, NodeDevice, identity_hash};
pub use hello_error::HelloError;
pub use ids::{ConnectionId, DialId, EndpointId};
pub use joining_node::{JoiningNode, JoiningNodeOptions};
pub use message::{ClusterMsg, Loss, MessageError, Presence, PresentNode, Welcome};
pub use refusal::Refusal;
pub use roster::{Roster, RosterError, RosterNode};
pub use text::{SENTENCE_BYTES_MAX, TextError, WHY_BYTES_MAX, shown_text};
