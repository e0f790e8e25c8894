//! Addresses of this machine at which others may reach it.

use std::net::{IpAddr, SocketAddr};

use crate::cluster::ADDRESSES_MAX;

/// Returns the addresses of a socket of this machine that others are told: those that were typed, in
/// which port 0 stands for the one of the socket, or else those of [`own_addresses`].
pub fn advertised(listening: SocketAddr, typed: &[SocketAddr]) -> Vec<SocketAddr> {
    if typed.is_empty() {
        return own_addresses(listening);
    }
    let mut addresses = typed.to_vec();
    for address in &mut addresses {
        if address.port() == 0 {
            address.set_port(listening.port());
        }
    }
    addresses
}

/// Returns up to eight addresses under which others may reach a socket of this machine; none if it listens
/// at all of them and there are only such as nobody else reaches.
fn own_addresses(listening: SocketAddr) -> Vec<SocketAddr> {
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
    found.truncate(ADDRESSES_MAX);
    found
}
