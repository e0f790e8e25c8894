//! The nodes of a generation: their hosts, devices, addresses and ranks.

use std::fmt;
use std::ops::Range;

use core::net::SocketAddr;
use serde::{Deserialize, Serialize};

use super::bounds::{ADDRESSES_MAX, NODES_MAX};
use super::hello::{NodeDevice, check_host_and_devices};
use super::hello_error::HelloError;
use super::ids::EndpointId;
use potluck_core::format::counted;
use potluck_core::{Generation, NodeRank, Table};

/// Node of a roster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterNode {
    pub node: NodeRank,
    pub host: String,
    /// Devices in the order of their ranks.
    pub devices: Vec<NodeDevice>,
    /// Addresses at which other nodes may reach it, the likeliest one first: the address that the
    /// first node sees, with the listening port and with the seen port, and the node's own. May be
    /// empty for the first node, which all others have reached already.
    pub addresses: Vec<SocketAddr>,
    /// Number of its socket.
    pub endpoint: EndpointId,
}

/// Nodes of a generation, in the order of their numbers. Their ranks are numbered in this order,
/// without a gap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roster {
    pub generation: Generation,
    pub nodes: Vec<RosterNode>,
}

/// Error of a roster that the first node sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RosterError {
    #[error(
        "the roster has {}, and the run was announced with {announced}",
        counted(*.nodes, "node", "nodes")
    )]
    Count { nodes: usize, announced: u32 },
    #[error("the roster has {found} where {expected} is expected")]
    Order { found: NodeRank, expected: NodeRank },
    #[error("the roster's {node} is refused: {error}")]
    Node { node: NodeRank, error: HelloError },
    #[error("the roster has no address of {node} ({host})")]
    NoAddress { node: NodeRank, host: String },
    #[error(
        "the roster has {} of {node}, of at most {ADDRESSES_MAX}",
        counted(*.addresses, "address", "addresses")
    )]
    TooManyAddresses { node: NodeRank, addresses: usize },
    #[error("the roster has the address {address} of {node} ({host}), which cannot be dialed")]
    Address { node: NodeRank, host: String, address: SocketAddr },
    #[error("the roster's {you} is not this node: its host is {found}, and this one is {own}")]
    NotYou { you: NodeRank, found: String, own: String },
    #[error("the roster has no {you}, which this node is to be")]
    Unknown { you: NodeRank },
    #[error("the roster's {you} ({host}) does not have the devices of this node")]
    OtherDevices { you: NodeRank, host: String },
}

/// Returns false for an address at which no node can be reached.
pub(crate) fn can_be_dialed(address: &SocketAddr) -> bool {
    let ip = address.ip();
    address.port() != 0 && !ip.is_unspecified() && !ip.is_multicast()
}

impl Roster {
    /// Checks the bounds of all values, that nodes are numbered from 0 without a gap, and that
    /// every node but the first has addresses that can be dialed.
    ///
    /// # Errors
    /// Returns [`RosterError`] for the first faulty node.
    pub fn check(&self) -> Result<(), RosterError> {
        if self.nodes.len() > NODES_MAX as usize {
            return Err(RosterError::Count { nodes: self.nodes.len(), announced: NODES_MAX });
        }
        for (index, of) in self.nodes.iter().enumerate() {
            let node = of.node;
            let expected = NodeRank(index as u32);
            if node != expected {
                return Err(RosterError::Order { found: node, expected });
            }
            check_host_and_devices(&of.host, &of.devices)
                .map_err(|error| RosterError::Node { node, error })?;
            let addresses = of.addresses.len();
            if addresses > ADDRESSES_MAX {
                return Err(RosterError::TooManyAddresses { node, addresses });
            }
            if addresses == 0 && index > 0 {
                return Err(RosterError::NoAddress { node, host: of.host.clone() });
            }
            if let Some(&address) = of.addresses.iter().find(|address| !can_be_dialed(address)) {
                return Err(RosterError::Address { node, host: of.host.clone(), address });
            }
        }
        Ok(())
    }

    /// Checks the roster that a joining node receives: besides [`Roster::check`] the announced
    /// number of nodes, and that node `you` has this node's host and devices.
    ///
    /// # Errors
    /// Returns [`RosterError`] for the first faulty value.
    pub(crate) fn check_for(
        &self,
        you: NodeRank,
        announced: u32,
        own: (&str, &[NodeDevice]),
    ) -> Result<(), RosterError> {
        self.check()?;
        if self.nodes.len() != announced as usize {
            return Err(RosterError::Count { nodes: self.nodes.len(), announced });
        }
        let (host, devices) = own;
        match self.node(you) {
            Some(of) if you == NodeRank(0) || of.host != host => {
                Err(RosterError::NotYou { you, found: of.host.clone(), own: host.to_owned() })
            }
            Some(of) if of.devices != devices => {
                Err(RosterError::OtherDevices { you, host: host.to_owned() })
            }
            Some(_) => Ok(()),
            None => Err(RosterError::Unknown { you }),
        }
    }

    pub fn node(&self, node: NodeRank) -> Option<&RosterNode> {
        self.nodes.get(node.index())
    }

    /// Returns the number of ranks of all nodes.
    pub fn world(&self) -> u32 {
        self.nodes.iter().map(|node| node.devices.len() as u32).sum()
    }

    /// Returns the ranks of a node, one per device in their order; none for an unknown node.
    pub fn ranks(&self, node: NodeRank) -> Range<u32> {
        let mut before = 0;
        for (index, of) in self.nodes.iter().enumerate() {
            let count = of.devices.len() as u32;
            if index == node.index() {
                return before..before + count;
            }
            before += count;
        }
        before..before
    }

    /// Returns a node with its host, as in `node 1 (beta)`.
    pub fn name(&self, node: NodeRank) -> String {
        match self.node(node) {
            Some(of) => format!("{node} ({})", of.host),
            None => node.to_string(),
        }
    }

    /// Returns the pairs of nodes, the lower number first. The lower one dials the higher one.
    pub fn pairs(&self) -> impl Iterator<Item = (NodeRank, NodeRank)> + '_ {
        let count = self.nodes.len() as u32;
        (0..count)
            .flat_map(move |low| (low + 1..count).map(move |high| (NodeRank(low), NodeRank(high))))
    }
}

/// Prints a table with one line per rank, columns as wide as they need to be.
impl fmt::Display for Roster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&["<rank", "<node", "<host", "<device"]);
        for of in &self.nodes {
            for (rank, device) in self.ranks(of.node).zip(&of.devices) {
                let NodeDevice { name, kind } = device;
                let device =
                    if kind.is_empty() { name.clone() } else { format!("{name} ({kind})") };
                let node = of.node.0.to_string();
                table.row(vec![rank.to_string(), node, of.host.clone(), device]);
            }
        }
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::testing::{address, hello, roster};

    #[test]
    fn ranks_are_numbered_over_nodes_without_a_gap() {
        let mut roster = roster(&["alpha", "beta", "gamma"]);
        let device = roster.nodes[0].devices[0].clone();
        roster.nodes[0].devices = vec![device.clone(); 2];
        roster.nodes[2].devices = vec![device; 3];
        assert_eq!(roster.world(), 6);
        let ranks = [0, 1, 2, 3].map(|node| roster.ranks(NodeRank(node)));
        assert_eq!(ranks, [0..2, 2..3, 3..6, 6..6]);
        assert_eq!(roster.name(NodeRank(1)), "node 1 (beta)");
        let pairs: Vec<_> = roster.pairs().map(|(low, high)| (low.0, high.0)).collect();
        assert_eq!(pairs, [(0, 1), (0, 2), (1, 2)]);
    }

    #[test]
    fn a_roster_prints_as_a_table_of_ranks() {
        let mut roster = roster(&["alpha", "b"]);
        let cpu = NodeDevice { name: "CPU".into(), kind: String::new() };
        roster.nodes[1].devices.push(cpu);
        let expected = "\
            rank  node  host   device\n\
            0     0     alpha  GPU of alpha (discrete GPU, Vulkan)\n\
            1     1     b      GPU of b (discrete GPU, Vulkan)\n\
            2     1     b      CPU\n";
        assert_eq!(roster.to_string(), expected);
    }

    #[test]
    fn a_roster_that_is_not_the_announced_one_is_refused() {
        let (hosts, own) = (["alpha", "beta", "gamma"], hello("beta"));
        let check = |you: u32, change: &dyn Fn(&mut Roster)| {
            let mut roster = roster(&hosts);
            change(&mut roster);
            let checked = roster.check_for(NodeRank(you), 3, (&own.host, &own.devices));
            checked.map_err(|error| error.to_string())
        };
        assert_eq!(check(1, &|_| {}), Ok(()));
        let wrong = |you: u32, change: &dyn Fn(&mut Roster)| check(you, change).unwrap_err();
        assert_eq!(
            wrong(1, &|roster| drop(roster.nodes.pop())),
            "the roster has 2 nodes, and the run was announced with 3"
        );
        let twice = |roster: &mut Roster| roster.nodes[2].node = NodeRank(1);
        assert_eq!(wrong(1, &twice), "the roster has node 1 where node 2 is expected");
        assert_eq!(
            wrong(1, &|roster| roster.nodes[2].addresses.clear()),
            "the roster has no address of node 2 (gamma)"
        );
        assert_eq!(
            wrong(1, &|roster| roster.nodes[2].addresses = vec![address(2); 9]),
            "the roster has 9 addresses of node 2, of at most 8"
        );
        let none = |roster: &mut Roster| roster.nodes[2].addresses[0].set_port(0);
        assert_eq!(
            wrong(1, &none),
            "the roster has the address 10.0.0.2:0 of node 2 (gamma), which cannot be dialed"
        );
        assert_eq!(
            wrong(1, &|roster| roster.nodes[0].host.clear()),
            "the roster's node 0 is refused: its host name is empty"
        );
        assert_eq!(
            wrong(2, &|_| {}),
            "the roster's node 2 is not this node: its host is gamma, and this one is beta"
        );
        assert_eq!(wrong(3, &|_| {}), "the roster has no node 3, which this node is to be");
        let other = |roster: &mut Roster| roster.nodes[1].devices[0].name.push('!');
        assert_eq!(
            wrong(1, &other),
            "the roster's node 1 (beta) does not have the devices of this node"
        );
        let first = roster(&["beta", "alpha", "gamma"]);
        let error = first.check_for(NodeRank(0), 3, (&own.host, &own.devices)).unwrap_err();
        assert!(matches!(error, RosterError::NotYou { .. }), "{error}");
    }
}
