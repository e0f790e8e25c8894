//! Links of a joined node to the other joined nodes.

use core::net::SocketAddr;

use super::ids::{ConnectionId, DialId};
use potluck_core::NodeRank;

/// State of a link to another joined node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PairState {
    Dialing(DialId),
    /// The pair is opened, and the answer awaited.
    Opening(ConnectionId),
    /// The other node is to dial.
    Awaited,
    Connected(ConnectionId),
    /// It failed, which was reported.
    Failed,
    /// The other node has left in order.
    Left,
}

/// Link to another joined node.
#[derive(Debug)]
pub(crate) struct PairLink {
    pub node: NodeRank,
    pub state: PairState,
    /// Addresses that were dialed.
    pub tried: Vec<SocketAddr>,
    /// Present address of the other node, once it is connected.
    pub seen: Option<SocketAddr>,
}

impl PairLink {
    /// Returns the open connection, if there is one.
    pub fn connection(&self) -> Option<ConnectionId> {
        match self.state {
            PairState::Opening(connection) | PairState::Connected(connection) => Some(connection),
            _ => None,
        }
    }
}

/// Returns the addresses at which a node is dialed by one that reached the first node at `first`.
/// A node on the machine of the first one is seen there at a loopback address; from other machines
/// it is at the address of that machine. A link-local address, which is sent without its zone, is
/// in the zone in which the first node was reached.
pub(crate) fn addresses_to_dial(first: SocketAddr, known: &[SocketAddr]) -> Vec<SocketAddr> {
    let ip = first.ip().to_canonical();
    let mut dialed = Vec::new();
    for &(mut address) in known {
        if address.ip().to_canonical().is_loopback() && !ip.is_loopback() {
            address.set_ip(ip);
        }
        if let (SocketAddr::V6(address), SocketAddr::V6(first)) = (&mut address, first)
            && address.ip().is_unicast_link_local()
        {
            address.set_scope_id(first.scope_id());
        }
        if !dialed.contains(&address) {
            dialed.push(address);
        }
    }
    dialed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_beside_the_first_one_is_dialed_at_the_machine_of_the_first_one() {
        let parse = |text: &str| text.parse::<SocketAddr>().unwrap();
        let known = ["127.0.0.1:7001", "10.0.0.5:7001"].map(parse);
        let remote = addresses_to_dial(parse("10.0.0.1:7000"), &known);
        assert_eq!(remote, ["10.0.0.1:7001", "10.0.0.5:7001"].map(parse));
        assert_eq!(addresses_to_dial(parse("127.0.0.1:7000"), &known), known);
        let in_zone = addresses_to_dial(parse("[fe80::1%4]:7000"), &[parse("[fe80::2]:7001")]);
        assert_eq!(in_zone, [parse("[fe80::2%4]:7001")]);
        let mapped = addresses_to_dial(parse("[::ffff:10.0.0.1]:7000"), &[parse("[::1]:7001")]);
        assert_eq!(mapped, [parse("10.0.0.1:7001")]);
    }
}
