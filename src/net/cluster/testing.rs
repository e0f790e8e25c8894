//! Nodes for tests.

use core::net::SocketAddr;

use super::hello::{Hello, NodeDevice};
use super::message::{Presence, PresentNode};
use super::roster::{Roster, RosterNode};
use potluck_core::{Generation, NodeRank};

/// Address of node `n`, at whose port it listens.
pub fn address(node: u32) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, node as u8], 7000))
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
    };
    Roster { generation: Generation(3), nodes: (0..).zip(hosts).map(node).collect() }
}
