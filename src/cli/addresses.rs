//! Address of this machine that stands for all of them.

use std::net::{SocketAddr, UdpSocket};

/// Returns the address that stands for all of this machine, of both versions if there are two.
pub fn all_addresses(port: u16) -> SocketAddr {
    let both = SocketAddr::from(([0; 16], port));
    let has_both = UdpSocket::bind(SocketAddr::new(both.ip(), 0)).is_ok();
    if has_both { both } else { SocketAddr::from(([0; 4], port)) }
}
