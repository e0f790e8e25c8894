//! Events for a machine, and the actions that it requests.

use std::collections::VecDeque;
use std::fmt;

use core::net::SocketAddr;

use super::error::ClusterError;
use super::ids::{ConnectionId, DialId, EndpointId};
use super::message::{ClusterMsg, Loss, Presence, silent_for};
use super::roster::Roster;
use super::text::{WHY_BYTES_MAX, shown_text};
use potluck_core::{Nanos, NodeRank, Remedy};

/// Event of the network. The driver authenticates connections before it reports them, delivers the
/// messages of each in order, and closes a connection whose bytes are no message, which it reports
/// as closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A peer opened a connection.
    Accepted {
        connection: ConnectionId,
        address: SocketAddr,
    },
    /// A dial of this machine succeeded.
    Dialed {
        dial: DialId,
        connection: ConnectionId,
        address: SocketAddr,
    },
    DialFailed {
        dial: DialId,
        why: String,
        /// True on timeout (as opposed to refusal): the peer may not be up yet.
        is_silent: bool,
        remedy: Remedy,
    },
    Received {
        connection: ConnectionId,
        message: ClusterMsg,
    },
    /// The peer of a connection has a new address.
    Moved {
        connection: ConnectionId,
        address: SocketAddr,
    },
    /// A connection ended. May follow [`Action::Close`] or not.
    Closed {
        connection: ConnectionId,
        end: ConnectionEnd,
    },
}

/// End of a connection that the machine did not close.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The peer closed it, with a sentence.
    Peer(String),
    /// Nothing has arrived from the peer for this long.
    Silent(Nanos),
    /// It broke, for the reason in this sentence.
    Broken(String),
}

impl ConnectionEnd {
    /// Returns the reason for the loss of the node at the other end, as a sentence; `link` names
    /// the connection.
    pub(super) fn loss(&self, link: &str) -> String {
        match self {
            Self::Peer(why) => format!("the peer closed {link}: {why}"),
            Self::Silent(nanos) => silent_for(*nanos),
            Self::Broken(why) => format!("{link} closed: {why}"),
        }
    }
}

/// Node, named with its host, that has a new address. Displayed as a note for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovedNode {
    pub who: String,
    pub from: SocketAddr,
    pub to: SocketAddr,
}

impl fmt::Display for MovedNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, from, to } = self;
        write!(f, "{who} has another address: {to}, and before {from}; its link goes on")
    }
}

/// Action for the driver, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Send {
        connection: ConnectionId,
        message: ClusterMsg,
    },
    /// Closes a connection after all sent messages; the peer gets the reason. Its later messages
    /// are not delivered.
    Close {
        connection: ConnectionId,
        why: String,
    },
    /// Dials the addresses. If the number of the node's socket is known, other sockets are refused.
    Dial {
        dial: DialId,
        node: NodeRank,
        endpoint: Option<EndpointId>,
        addresses: Vec<SocketAddr>,
    },
    /// Shows the nodes that have joined, before the start.
    Show(Presence),
    /// Shows that a peer was refused; only the first node does.
    TurnedAway {
        address: SocketAddr,
        why: String,
    },
    /// Shows that a node left before the start; only the first node does.
    Departed {
        host: String,
        why: String,
    },
    /// Shows that a node has a new address.
    Moved(MovedNode),
    /// The run begins. `links` are the connections to all other nodes, except one that closed while
    /// the start was in flight: then [`Action::Lost`] or [`Action::Left`] follows.
    Started {
        roster: Roster,
        you: NodeRank,
        links: Vec<(NodeRank, ConnectionId)>,
    },
    /// A node left in order after the start. The layer above decides if the run can continue.
    Left {
        node: NodeRank,
        why: String,
    },
    /// The generation is over by this loss; `why` is the sentence. [`Action::Ended`] follows.
    Lost {
        loss: Loss,
        why: String,
    },
    /// The machine is over, and its last action.
    Ended(ClusterEnd),
}

/// End of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterEnd {
    /// In order, by this node or by the first one, or because all other nodes have left.
    Left {
        why: String,
    },
    /// The first node refuses this one, or gives the run up before the start.
    Refused {
        why: String,
        remedy: Remedy,
    },
    Lost {
        loss: Loss,
        why: String,
    },
    Failed(ClusterError),
}

impl ClusterEnd {
    /// Returns the remedy of an unwanted end.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Left { .. } | Self::Lost { .. } => Remedy::Time,
            Self::Refused { remedy, .. } => *remedy,
            Self::Failed(error) => error.remedy(),
        }
    }
}

impl fmt::Display for ClusterEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left { why } | Self::Refused { why, .. } | Self::Lost { why, .. } => {
                f.write_str(why)
            }
            Self::Failed(error) => write!(f, "{error}"),
        }
    }
}

/// Actions that wait for the driver.
#[derive(Debug, Default)]
pub(crate) struct Outbox(VecDeque<Action>);

impl Outbox {
    pub fn push(&mut self, action: Action) {
        self.0.push_back(action);
    }

    pub fn send(&mut self, connection: ConnectionId, message: ClusterMsg) {
        self.push(Action::Send { connection, message });
    }

    pub fn close(&mut self, connection: ConnectionId, why: &str) {
        self.push(Action::Close { connection, why: shown_text(why, WHY_BYTES_MAX) });
    }

    /// Refuses a peer: sends it the reason and closes its connection.
    pub fn refuse(&mut self, connection: ConnectionId, why: &str, remedy: Remedy) {
        let why = shown_text(why, WHY_BYTES_MAX);
        self.send(connection, ClusterMsg::Refused { why: why.clone(), remedy });
        self.close(connection, &why);
    }

    pub fn pop(&mut self) -> Option<Action> {
        self.0.pop_front()
    }
}
