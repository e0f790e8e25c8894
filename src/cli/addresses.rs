//! Addresses of this machine: the one that stands for all of them, and those at which others reach
//! it.

use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Returns the address that stands for all of this machine, of both versions if there are two.
pub fn all_addresses(port: u16) -> SocketAddr {
    let both = SocketAddr::from(([0; 16], port));
    let has_both = UdpSocket::bind(SocketAddr::new(both.ip(), 0)).is_ok();
    if has_both { both } else { SocketAddr::from(([0; 4], port)) }
}

/// Returns the addresses under which others may reach this machine; its own if there are none.
pub fn addresses(listening: SocketAddr) -> Vec<SocketAddr> {
    if !listening.ip().is_unspecified() {
        return vec![listening];
    }
    let mut found = Vec::new();
    for interface in if_addrs::get_if_addrs().unwrap_or_default() {
        let is_reachable = match interface.ip() {
            IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
            // Addresses of a link need a zone, which is another one on each machine.
            IpAddr::V6(ip) => {
                listening.is_ipv6() && !ip.is_loopback() && !ip.is_unicast_link_local()
            }
        };
        if is_reachable {
            found.push(SocketAddr::new(interface.ip(), listening.port()));
        }
    }
    found.sort_by_key(|address| (address.is_ipv6(), *address));
    if found.is_empty() {
        vec![SocketAddr::from(([127, 0, 0, 1], listening.port()))]
    } else {
        found
    }
}
