//! Errors of a cluster's machines.

use core::net::SocketAddr;

use super::bounds::{MESSAGE_BYTES_MAX, NODE_TIMEOUT_MAX, NODE_TIMEOUT_MIN};
use super::hello_error::HelloError;
use super::ids::ConnectionId;
use super::refusal::Refusal;
use super::roster::RosterError;
use potluck_core::format::{listed, seconds};
use potluck_core::{Generation, Nanos, NodeRank, Remedy};

/// Error of a cluster: an event that is not due, a message that breaks the protocol, or a passed
/// deadline. `who` is a node with its host, or an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    #[error("a run over several machines has {min} to {max} nodes, and {nodes} are asked for")]
    Nodes { nodes: u32, min: u32, max: u32 },
    #[error(
        "a node may be silent for {} to {}, and {} is asked for",
        seconds(*.min), seconds(*.max), seconds(*.timeout)
    )]
    NodeTimeout { timeout: Nanos, min: Nanos, max: Nanos },
    #[error("the greeting of this node is refused: {0}")]
    OwnHello(#[from] HelloError),
    #[error("the name of the run is refused: {0}")]
    Run(super::text::TextError),
    #[error("the list of the devices of this node has more than {MESSAGE_BYTES_MAX} bytes")]
    OwnDevices,
    #[error("{address} is no address to join: name the host and the port of the first node")]
    Address { address: SocketAddr },
    #[error("no address to join is given")]
    NoAddress,
    #[error("{connection} is not open")]
    UnknownConnection { connection: ConnectionId },
    #[error("{connection} is opened twice")]
    ConnectionTwice { connection: ConnectionId },
    #[error("{0}")]
    Refused(#[from] Refusal),
    #[error("{who} sends {message} {phase}")]
    Unexpected { who: String, message: &'static str, phase: &'static str },
    #[error("{who} sends {message} of {found}, which is over: the present one is {current}")]
    OverGeneration { who: String, message: &'static str, found: Generation, current: Generation },
    #[error("{who} sends {message} of {found}, and the present one is {current}")]
    LaterGeneration { who: String, message: &'static str, found: Generation, current: Generation },
    #[error("{who} sends heartbeat {found} where {expected} is expected")]
    Sequence { who: String, found: u64, expected: u64 },
    #[error("{who} reports the pair with {peer}, which is not its to report")]
    ForeignPair { who: String, peer: NodeRank },
    #[error(
        "{who} opens the pair of {from} and {to} in the run {run}, which is not the one expected"
    )]
    WrongPair { who: String, from: NodeRank, to: NodeRank, run: String },
    #[error("{who} names {node}, which is none of the others in the roster")]
    UnknownNode { who: String, node: NodeRank },
    #[error("{who}: {error}")]
    Roster { who: String, error: RosterError },
    #[error("{who} runs {found}, and this node belongs to {own}: join the node that started {own}")]
    OtherRun { who: String, found: String, own: String },
    #[error(
        "cannot join the first node at {}: no answer over UDP within {}; check the address, that \
         UDP reaches its port, and that the code is that of the first node (nodes do not answer \
         those who have another one)", addresses(.tried), seconds(*.timeout)
    )]
    RpcError { tried: Vec<SocketAddr>, timeout: Nanos },
    #[error("cannot join the first node at {}: {why}", addresses(.tried))]
    NoFirstNode { tried: Vec<SocketAddr>, why: String, remedy: Remedy },
    #[error("the node at {address} does not answer the hello within {}", seconds(*.timeout))]
    NoWelcome { address: SocketAddr, timeout: Nanos },
    #[error("the first node, {who}, is lost before the start: {why}")]
    FirstNodeLost { who: String, why: String },
    #[error(
        "{who} has neither started the run nor given it up within {} of its roster",
        seconds(*.timeout)
    )]
    NoStart { who: String, timeout: Nanos },
    #[error(
        "{from} at {} cannot reach {to} at {}: {why}; check that UDP passes between the two",
        addresses(.from_addresses), addresses(.to_addresses)
    )]
    PairNotConnected {
        from: String,
        from_addresses: Vec<SocketAddr>,
        to: String,
        to_addresses: Vec<SocketAddr>,
        why: String,
    },
}

impl ClusterError {
    /// Checks the longest silence of a node against its bounds.
    pub(crate) fn check_timeout(timeout: Nanos) -> Result<(), Self> {
        let (min, max) = (NODE_TIMEOUT_MIN, NODE_TIMEOUT_MAX);
        if (min..=max).contains(&timeout) {
            Ok(())
        } else {
            Err(Self::NodeTimeout { timeout, min, max })
        }
    }

    /// Returns the remedy of the error: time, if other nodes or the links to them failed. A
    /// violation of the protocol would happen again.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Refused(refusal) => refusal.remedy(),
            Self::NoFirstNode { remedy, .. } => *remedy,
            Self::OtherRun { .. }
            | Self::RpcError { .. }
            | Self::NoWelcome { .. }
            | Self::FirstNodeLost { .. }
            | Self::NoStart { .. }
            | Self::PairNotConnected { .. } => Remedy::Time,
            _ => Remedy::Person,
        }
    }
}

fn addresses(addresses: &[SocketAddr]) -> String {
    if addresses.is_empty() { "no known address".into() } else { listed(addresses) }
}
