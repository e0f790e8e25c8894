//! Nodes for tests.

use core::net::SocketAddr;

use super::hello::{Hello, NodeDevice, identity_hash};
use super::ids::EndpointId;
use super::message::{Presence, PresentNode};
use super::roster::{Roster, RosterNode};
use potluck_core::{Generation, NodeRank};

/// Address of node `n`, at whose port it listens.
pub fn address(node: u32) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, node as u8], 7000))
}

/// Number of the socket of a host.
pub fn endpoint(host: &str) -> EndpointId {
    EndpointId(identity_hash(host))
}

pub fn hello(host: &str) -> Hello {
    let device = NodeDevice { name: format!("GPU of {host}"), kind: "discrete GPU, Vulkan".into() };
    Hello {
        version: "0.1.0".into(),
        build: "cafe".into(),
        run: None,
        place: None,
        host: host.into(),
        port: 7000,
        addresses: Vec::new(),
        endpoint: endpoint(host),
        devices: vec![device],
        identities: Vec::new(),
    }
}

pub fn presence(expected: u32, hosts: &[&str]) -> Presence {
    let node = |host: &&str| PresentNode { host: host.to_string(), devices: hello(host).devices };
    Presence { expected, here: hosts.iter().map(node).collect() }
}

/// Roster of generation 3.
pub fn roster(hosts: &[&str]) -> Roster {
    let node = |(node, host): (u32, &&str)| RosterNode {
        node: NodeRank(node),
        host: host.to_string(),
        devices: hello(host).devices,
        addresses: vec![address(node)],
        endpoint: endpoint(host),
    };
    Roster { generation: Generation(3), nodes: (0..).zip(hosts).map(node).collect() }
}
