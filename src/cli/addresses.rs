//! The unspecified address, which stands for all addresses of this machine.

use std::net::{SocketAddr, UdpSocket};

/// Returns the unspecified address: of IPv6, which includes IPv4, or of IPv4 without IPv6.
pub fn all_addresses(port: u16) -> SocketAddr {
    let both = SocketAddr::from(([0; 16], port));
    let has_both = UdpSocket::bind(SocketAddr::new(both.ip(), 0)).is_ok();
    if has_both { both } else { SocketAddr::from(([0; 4], port)) }
}
