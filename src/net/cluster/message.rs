//! Messages between nodes, and their bytes.

use core::net::SocketAddr;
use serde::{Deserialize, Serialize};

use super::bounds::{
    ADDRESSES_MAX, HOST_BYTES_MAX, MESSAGE_BYTES_MAX, NODE_TIMEOUT_MAX, NODE_TIMEOUT_MIN,
    NODES_MAX, VERSION_BYTES_MAX,
};
use super::hello::{Hello, NodeDevice, check_host_and_devices};
use super::hello_error::HelloError;
use super::roster::{Roster, RosterError};
use super::text::{TextError, WHY_BYTES_MAX, check_name, check_text};
use potluck_core::format::seconds;
use potluck_core::{Generation, Nanos, NodeRank, Remedy};

/// Beginning of the reason of a loss by silence, which is followed by the time.
const SILENT_FOR: &str = "it has been silent for";

/// Reason of a loss by a silence of this long.
pub(crate) fn silent_for(silence: Nanos) -> String {
    format!("{SILENT_FOR} {}", seconds(silence))
}

/// Node that is present before the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PresentNode {
    pub host: String,
    pub devices: Vec<NodeDevice>,
}

/// Nodes that are present before the start, the first one first and the others in the order of
/// their arrival.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Presence {
    /// Nodes of the run.
    pub expected: u32,
    pub here: Vec<PresentNode>,
}

impl Presence {
    /// Returns the number of nodes that are still awaited.
    pub fn missing(&self) -> u32 {
        self.expected.saturating_sub(self.here.len() as u32)
    }
}

/// Answer to an accepted greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub run: String,
    /// Host of the first node.
    pub host: String,
    /// Nodes of the run.
    pub nodes: u32,
    /// Generation that is being formed.
    pub generation: Generation,
    /// Longest silence of a node.
    pub node_timeout: Nanos,
}

/// Loss that ends a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loss {
    Node {
        node: NodeRank,
        why: String,
    },
    /// The link between two nodes is cut, and both are alive.
    Link {
        between: (NodeRank, NodeRank),
        why: String,
    },
}

impl Loss {
    /// Returns the loss as a sentence with the hosts.
    pub fn sentence(&self, roster: &Roster) -> String {
        match self {
            Self::Node { node, why } => format!("{} is lost: {why}", roster.name(*node)),
            Self::Link { between: (one, other), why } => {
                let one = roster.name(*one);
                let other = roster.name(*other);
                format!("the link between {one} and {other} is cut, and both are alive: {why}")
            }
        }
    }

    /// Returns the loss as a sentence for the lost node itself, which has received it from the
    /// first node: so that direction of the connection works.
    pub(crate) fn sentence_to(&self, you: NodeRank, roster: &Roster) -> String {
        match self {
            Self::Node { node, why } if *node == you => {
                let first = roster.name(NodeRank(0));
                let you = roster.name(you);
                if why.starts_with(SILENT_FOR) {
                    format!(
                        "the first node, {first}, no longer hears this one, {you}: {why}; what it \
                         sends arrives here, so that the connection works in one direction only: \
                         check that UDP passes in both directions between the two (firewall, \
                         router, VPN), and that this machine was not asleep"
                    )
                } else {
                    format!("the first node, {first}, has given this one up, {you}: {why}")
                }
            }
            _ => self.sentence(roster),
        }
    }

    fn why(&self) -> &str {
        let (Self::Node { why, .. } | Self::Link { why, .. }) = self;
        why
    }
}

/// Message between two nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClusterMsg {
    /// First message of a joining node to the first one.
    Hello(Hello),
    /// Answer to a refused greeting, and the end before the start.
    Refused {
        why: String,
        remedy: Remedy,
    },
    Welcome(Welcome),
    /// Sent to all waiting nodes on every change. A later generation ends the attempt at an earlier
    /// one.
    Present {
        generation: Generation,
        presence: Presence,
    },
    /// All nodes have joined. Assigns the numbers; `you` is the receiver's.
    Roster {
        you: NodeRank,
        roster: Roster,
    },
    /// First message between two joined nodes, from the lower to the higher number, and its answer.
    Pair {
        run: String,
        generation: Generation,
        from: NodeRank,
        to: NodeRank,
    },
    /// The sender, the higher number if `peer` is the first node and the lower one otherwise, has
    /// its link to `peer`.
    PairConnected {
        generation: Generation,
        peer: NodeRank,
    },
    /// The sender cannot reach `peer`, or its link to it closed.
    PairFailed {
        generation: Generation,
        peer: NodeRank,
        tried: Vec<SocketAddr>,
        why: String,
    },
    Start {
        generation: Generation,
    },
    /// Sign of life to and from the first node, numbered from 1 on each link.
    Heartbeat {
        generation: Generation,
        sequence: u64,
    },
    /// The sender leaves in order.
    Leave {
        why: String,
    },
    /// A joined node has left in order.
    Left {
        generation: Generation,
        node: NodeRank,
        why: String,
    },
    Lost {
        generation: Generation,
        loss: Loss,
    },
}

/// Error of a message's bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    #[error("a message has {bytes} bytes, of at most {MESSAGE_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("bytes that are no message of a node: {0}")]
    Malformed(String),
    #[error("{bytes} bytes follow behind {message}")]
    Trailing { message: &'static str, bytes: usize },
    #[error("{message} is refused: {error}")]
    Text { message: &'static str, error: TextError },
    #[error("a hello is refused: {0}")]
    Hello(#[from] HelloError),
    #[error("a roster is refused: {0}")]
    Roster(#[from] RosterError),
    #[error("{message} has {found} {what}, of {expected}")]
    Bound { message: &'static str, what: &'static str, found: u64, expected: String },
}

impl ClusterMsg {
    /// Returns the name with its article, for messages to people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "a hello",
            Self::Refused { .. } => "a refusal",
            Self::Welcome(_) => "a welcome",
            Self::Present { .. } => "a list of who is here",
            Self::Roster { .. } => "a roster",
            Self::Pair { .. } => "the opening of a pair",
            Self::PairConnected { .. } => "the report of a connected pair",
            Self::PairFailed { .. } => "the report of a failed pair",
            Self::Start { .. } => "a start",
            Self::Heartbeat { .. } => "a heartbeat",
            Self::Leave { .. } => "a leave",
            Self::Left { .. } => "the notice of a node that left",
            Self::Lost { .. } => "the notice of a loss",
        }
    }

    /// Returns the generation of the message, if it has one.
    pub fn generation(&self) -> Option<Generation> {
        match self {
            Self::Hello(_) | Self::Refused { .. } | Self::Leave { .. } => None,
            Self::Welcome(Welcome { generation, .. })
            | Self::Roster { roster: Roster { generation, .. }, .. }
            | Self::Present { generation, .. }
            | Self::Pair { generation, .. }
            | Self::PairConnected { generation, .. }
            | Self::PairFailed { generation, .. }
            | Self::Start { generation }
            | Self::Heartbeat { generation, .. }
            | Self::Left { generation, .. }
            | Self::Lost { generation, .. } => Some(*generation),
        }
    }

    /// Returns the message as bytes (postcard, <https://postcard.jamesmunns.com/wire-format>).
    ///
    /// # Errors
    /// Returns [`MessageError`] for a message that no receiver would take.
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        self.check()?;
        let bytes = postcard::to_allocvec(self)
            .map_err(|error| MessageError::Malformed(error.to_string()))?;
        match bytes.len() {
            0..=MESSAGE_BYTES_MAX => Ok(bytes),
            bytes => Err(MessageError::TooLong { bytes }),
        }
    }

    /// Returns the message of some bytes. Memory is bounded by [`MESSAGE_BYTES_MAX`], whatever
    /// lengths the bytes claim.
    ///
    /// # Errors
    /// Returns [`MessageError`] for too many bytes, bytes that are no message, trailing
    /// bytes, and values beyond their bounds.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(MessageError::TooLong { bytes: bytes.len() });
        }
        let (message, rest) = postcard::take_from_bytes::<Self>(bytes)
            .map_err(|error| MessageError::Malformed(error.to_string()))?;
        if !rest.is_empty() {
            return Err(MessageError::Trailing { message: message.name(), bytes: rest.len() });
        }
        message.check()?;
        Ok(message)
    }

    /// Checks the bounds of all values.
    fn check(&self) -> Result<(), MessageError> {
        let message = self.name();
        let named = |error| MessageError::Text { message, error };
        match self {
            Self::Hello(hello) => hello.check()?,
            Self::Welcome(welcome) => check_welcome(message, welcome)?,
            Self::Present { presence, .. } => check_presence(message, presence)?,
            Self::Roster { roster, .. } => roster.check()?,
            Self::Pair { run, .. } => check_name("run", run, VERSION_BYTES_MAX).map_err(named)?,
            Self::Refused { why, .. } | Self::Leave { why } | Self::Left { why, .. } => {
                check_text("reason", why, WHY_BYTES_MAX).map_err(named)?;
            }
            Self::Lost { loss, .. } => {
                check_text("reason", loss.why(), WHY_BYTES_MAX).map_err(named)?;
            }
            Self::PairFailed { tried, why, .. } => {
                check_text("reason", why, WHY_BYTES_MAX).map_err(named)?;
                at_most(message, "addresses", tried.len(), ADDRESSES_MAX)?;
            }
            Self::Heartbeat { .. } | Self::PairConnected { .. } | Self::Start { .. } => {}
        }
        Ok(())
    }
}

fn at_most(
    message: &'static str,
    what: &'static str,
    found: usize,
    max: usize,
) -> Result<(), MessageError> {
    if found <= max {
        return Ok(());
    }
    Err(MessageError::Bound {
        message,
        what,
        found: found as u64,
        expected: format!("at most {max}"),
    })
}

fn check_welcome(message: &'static str, welcome: &Welcome) -> Result<(), MessageError> {
    let named = |error| MessageError::Text { message, error };
    check_name("run", &welcome.run, VERSION_BYTES_MAX).map_err(named)?;
    check_name("host name", &welcome.host, HOST_BYTES_MAX).map_err(named)?;
    check_nodes(message, welcome.nodes)?;
    if !(NODE_TIMEOUT_MIN..=NODE_TIMEOUT_MAX).contains(&welcome.node_timeout) {
        let expected = format!("{NODE_TIMEOUT_MIN} to {NODE_TIMEOUT_MAX}");
        return Err(MessageError::Bound {
            message,
            what: "ns as the longest silence of a node",
            found: welcome.node_timeout,
            expected,
        });
    }
    Ok(())
}

fn check_nodes(message: &'static str, nodes: u32) -> Result<(), MessageError> {
    if (2..=NODES_MAX).contains(&nodes) {
        return Ok(());
    }
    let expected = format!("2 to {NODES_MAX}");
    Err(MessageError::Bound { message, what: "nodes", found: u64::from(nodes), expected })
}

fn check_presence(message: &'static str, presence: &Presence) -> Result<(), MessageError> {
    check_nodes(message, presence.expected)?;
    at_most(message, "nodes that are here", presence.here.len(), presence.expected as usize)?;
    for node in &presence.here {
        check_host_and_devices(&node.host, &node.devices)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
