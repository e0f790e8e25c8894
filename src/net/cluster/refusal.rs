//! Reasons for which a node is refused.

use core::net::SocketAddr;

use super::bounds::MESSAGE_BYTES_MAX;
use super::hello_error::HelloError;
use potluck_core::format::counted;
use potluck_core::{Generation, NodeRank, Remedy, whole_hash};

/// Reason for which a node is refused, as a sentence that is sent to it. Pairs of values are of the
/// node and of the first node, which refuses it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "{} has potluck {} and {} potluck {}: {}",
        .hosts.0, .values.0, .hosts.1, .values.1, advice(.values, &.hosts.1)
    )]
    Version { hosts: (String, String), values: (String, String) },
    #[error(
        "{} has the build {} of potluck and {} the build {}{}: install the same build on both",
        .hosts.0, whole_hash(&.values.0), .hosts.1, whole_hash(&.values.1),
        difference(.values)
    )]
    Build { hosts: (String, String), values: (String, String) },
    #[error(
        "{0} asks for the run {1}, and the run of {2} is {3}: join the node that started {1}",
        .hosts.0, .values.0, .hosts.1, .values.1
    )]
    Run { hosts: (String, String), values: (String, String) },
    #[error("this run is of {}, and all are here: {}", nodes(.hosts), .hosts.join(", "))]
    Full { hosts: Vec<String> },
    #[error(
        "{host} comes too late: this run has started with its {}, {}",
        nodes(.hosts), .hosts.join(", ")
    )]
    TooLate { host: String, hosts: Vec<String> },
    #[error("{host} asks to be {place}, and this run has nodes 0 to {last}", last = .nodes - 1)]
    NoSuchPlace { host: String, place: NodeRank, nodes: u32 },
    #[error(
        "{host} asks to be {place}, which {holder} is: give each node another number, or wait \
         until that one is gone"
    )]
    PlaceTaken { host: String, place: NodeRank, holder: String },
    #[error("{host} said hello on this connection before, as {before}")]
    SecondHello { host: String, before: String },
    #[error("the greeting of {address} is refused: {error}")]
    Hello { address: SocketAddr, error: HelloError },
    #[error(
        "the list of all devices would have more than {MESSAGE_BYTES_MAX} bytes with the {} of \
         {host}: bring fewer", counted(*.devices, "device", "devices")
    )]
    RosterTooLong { host: String, devices: usize },
    #[error("{host} is not the first node of its run, which is at {first}: join that address")]
    NotFirst { host: String, first: SocketAddr },
    #[error("{address} begins with {message} where a hello is expected")]
    NoHello { address: SocketAddr, message: &'static str },
    #[error(
        "{address} sends {message} of {found}, which is over; {current} is the present one: join \
         anew"
    )]
    OverGeneration {
        address: SocketAddr,
        message: &'static str,
        found: Generation,
        current: Generation,
    },
}

impl Refusal {
    /// Returns the remedy of the refusal: a run that is full or has started may end, or begin
    /// again, and the node that holds a place may be gone already.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Run { .. }
            | Self::Full { .. }
            | Self::TooLate { .. }
            | Self::PlaceTaken { .. }
            | Self::OverGeneration { .. } => Remedy::Time,
            Self::Version { .. }
            | Self::Build { .. }
            | Self::NoSuchPlace { .. }
            | Self::SecondHello { .. }
            | Self::Hello { .. }
            | Self::RosterTooLong { .. }
            | Self::NotFirst { .. }
            | Self::NoHello { .. } => Remedy::Person,
        }
    }
}

/// Advice for different versions, which may be followed by the purpose of a node.
fn advice(versions: &(String, String), first: &str) -> String {
    let (theirs, own) = versions;
    if theirs.split(' ').next() == own.split(' ').next() {
        format!("join with the command that {first} shows")
    } else {
        "install the same version on both".into()
    }
}

/// Returns a clause with the first crate in which two builds differ.
fn difference(builds: &(String, String)) -> String {
    let (theirs, own) = builds;
    let theirs = crate_hashes(theirs);
    match crate_hashes(own).iter().find(|hashed| !theirs.contains(hashed)) {
        Some((name, _)) if !theirs.is_empty() => format!(", which differ first in {name}"),
        _ => String::new(),
    }
}

/// Names of crates with their hashes, as in `core=02cd`.
fn crate_hashes(build: &str) -> Vec<(&str, &str)> {
    build.split(' ').filter_map(|word| word.split_once('=')).collect()
}

fn nodes(hosts: &[String]) -> String {
    counted(hosts.len(), "node", "nodes")
}
