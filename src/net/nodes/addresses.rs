//! Addresses at which others may reach this machine, and addresses of other machines by name.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs, UdpSocket};

use if_addrs::{IfOperStatus, Interface};

use crate::cluster::ADDRESSES_MAX;

/// Name prefixes of interfaces between this machine and its own containers and virtual machines:
/// most machines have the same addresses there.
const INNER_NETWORKS: &[&str] = &[
    "br-",
    "cali",
    "cilium",
    "cni",
    "docker",
    "flannel",
    "incusbr",
    "lxcbr",
    "lxdbr",
    "podman",
    "vboxnet",
    "veth",
    "vEthernet",
    "virbr",
    "vmnet",
];
/// Flags of a short-lived IPv6 address in Linux (`IFA_F_`): temporary, duplicate, deprecated, or
/// not checked yet.
const PASSING_FLAGS: u32 = 0x01 | 0x08 | 0x20 | 0x40;

/// Returns the unspecified address, which stands for all addresses of this machine: of IPv6, which
/// includes IPv4, or of IPv4 on a machine without IPv6.
pub fn all_addresses(port: u16) -> SocketAddr {
    let both = SocketAddr::from(([0; 16], port));
    let has_both = UdpSocket::bind(SocketAddr::new(both.ip(), 0)).is_ok();
    if has_both { both } else { SocketAddr::from(([0; 4], port)) }
}

/// Returns the addresses of a socket of this machine to announce to others: the typed ones, in
/// which port 0 stands for the socket's port, or otherwise up to eight addresses of its interfaces,
/// the likeliest one first; none if others cannot reach those.
pub fn advertised(listening: SocketAddr, typed: &[SocketAddr]) -> Vec<SocketAddr> {
    if !typed.is_empty() {
        let mut addresses = typed.to_vec();
        for address in &mut addresses {
            if address.port() == 0 {
                address.set_port(listening.port());
            }
        }
        return addresses;
    }
    if !listening.ip().is_unspecified() {
        return vec![listening];
    }
    let passing = passing_addresses();
    let mut found = Vec::new();
    for interface in if_addrs::get_if_addrs().unwrap_or_default() {
        let ip = interface.ip();
        let is_passing = matches!(ip, IpAddr::V6(ip) if passing.contains(&ip));
        if (ip.is_ipv4() || listening.is_ipv6()) && !is_passing && is_up(&interface) {
            found.push(InterfaceAddress { ip, is_p2p: interface.is_p2p, name: interface.name });
        }
    }
    let mut addresses = Vec::new();
    for ip in likeliest_first(found) {
        addresses.push(SocketAddr::new(ip, listening.port()));
    }
    addresses
}

struct InterfaceAddress {
    ip: IpAddr,
    name: String,
    /// True for a tunnel, such as a VPN's.
    is_p2p: bool,
}

/// Returns up to eight addresses that others may reach: addresses of networks, then of tunnels,
/// IPv4 before IPv6; addresses of inner networks only if there are no others.
fn likeliest_first(mut known: Vec<InterfaceAddress>) -> Vec<IpAddr> {
    known.retain(|known| match known.ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        // Addresses of a link need a zone, which is another one on each machine.
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    });
    if !known.iter().all(InterfaceAddress::is_inner) {
        known.retain(|known| !known.is_inner());
    }
    known.sort_by_key(|known| (known.is_p2p, known.ip.is_ipv6(), known.ip));
    let mut addresses: Vec<IpAddr> = known.iter().map(|known| known.ip).collect();
    addresses.dedup();
    addresses.truncate(ADDRESSES_MAX);
    addresses
}

impl InterfaceAddress {
    /// Returns true for an interface to containers or virtual machines of this machine.
    fn is_inner(&self) -> bool {
        INNER_NETWORKS.iter().any(|prefix| self.name.starts_with(prefix))
    }
}

/// Returns false for an interface that is off or unplugged. Tunnels do not report their status.
fn is_up(interface: &Interface) -> bool {
    matches!(interface.oper_status, IfOperStatus::Up | IfOperStatus::Unknown)
}

/// Short-lived IPv6 addresses, if the system reports them.
fn passing_addresses() -> Vec<Ipv6Addr> {
    if !cfg!(target_os = "linux") {
        return Vec::new();
    }
    passing_in(&std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default())
}

/// Returns the short-lived addresses in a table of Linux: each line has an address, the number of
/// its interface, the length of its prefix, its scope and its flags, all in hexadecimal, and a
/// name.
fn passing_in(table: &str) -> Vec<Ipv6Addr> {
    let mut passing = Vec::new();
    for line in table.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [address, _, _, _, flags, ..] = words[..] else { continue };
        let Ok(address) = u128::from_str_radix(address, 16) else { continue };
        let Ok(flags) = u32::from_str_radix(flags, 16) else { continue };
        if flags & PASSING_FLAGS != 0 {
            passing.push(Ipv6Addr::from(address));
        }
    }
    passing
}

// ---- Addresses of others ----

/// Returns the addresses of a typed host and port. A link-local IPv6 address has a zone, the name
/// or the number of an interface of this machine: `[fe80::1%eth0]:7717`.
///
/// # Errors
/// Returns an error of the kind [`io::ErrorKind::InvalidInput`] for a text that is no address and
/// for the name of an unknown interface, and others for a host name that is not found.
pub fn resolve(text: &str) -> io::Result<Vec<SocketAddr>> {
    match zoned(text) {
        Some(found) => Ok(vec![found?]),
        None => Ok(text.to_socket_addrs()?.collect()),
    }
}

/// Address of a text with a zone, or nothing for another text.
fn zoned(text: &str) -> Option<io::Result<SocketAddr>> {
    let (address, rest) = text.strip_prefix('[')?.split_once('%')?;
    let (zone, port) = rest.split_once("]:")?;
    let address = address.parse::<Ipv6Addr>().ok()?;
    let port = port.parse::<u16>().ok()?;
    let number = zone.parse().ok().or_else(|| interface_number(zone));
    Some(match number {
        Some(number) => Ok(SocketAddrV6::new(address, port, 0, number).into()),
        None => {
            let why = format!("this machine has no network interface {zone}");
            Err(io::Error::new(io::ErrorKind::InvalidInput, why))
        }
    })
}

fn interface_number(name: &str) -> Option<u32> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    interfaces.into_iter().find(|interface| interface.name == name)?.index
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(name: &str, ip: &str, is_p2p: bool) -> InterfaceAddress {
        InterfaceAddress { ip: ip.parse().unwrap(), name: name.into(), is_p2p }
    }

    #[test]
    fn useful_addresses_come_first_and_those_of_inner_networks_are_left_out() {
        let machine = || {
            vec![
                known("lo", "127.0.0.1", false),
                known("docker0", "172.17.0.1", false),
                known("br-0a1b2c3d4e5f", "172.18.0.1", false),
                known("tailscale0", "100.64.0.7", true),
                known("eth0", "2001:db8::20", false),
                known("eth0", "fe80::1", false),
                known("wlan0", "192.168.1.20", false),
                known("eth0", "169.254.3.4", false),
                known("lo", "::1", false),
            ]
        };
        let shown: Vec<String> = likeliest_first(machine()).iter().map(IpAddr::to_string).collect();
        assert_eq!(shown, ["192.168.1.20", "2001:db8::20", "100.64.0.7"]);
        let inner = machine().into_iter().filter(|known| known.name.starts_with("docker"));
        assert_eq!(likeliest_first(inner.collect()), [IpAddr::from([172, 17, 0, 1])]);
        let many = (1..20).map(|host| known("eth0", &format!("10.0.0.{host}"), false));
        assert_eq!(likeliest_first(many.collect()).len(), ADDRESSES_MAX);
    }

    #[test]
    fn addresses_that_do_not_last_are_known_by_their_flags() {
        let table = "\
            20010db8000000000000000000000001 04 40 00 80     eth0\n\
            20010db8000000000000000000000002 04 40 00 01     eth0\n\
            20010db8000000000000000000000003 04 40 00 20     eth0\n\
            what is no line\n";
        let passing = ["2001:db8::2", "2001:db8::3"].map(|ip| ip.parse::<Ipv6Addr>().unwrap());
        assert_eq!(passing_in(table), passing);
    }

    #[test]
    fn a_socket_at_one_address_has_that_one() {
        let listening = SocketAddr::from(([127, 0, 0, 3], 7));
        assert_eq!(advertised(listening, &[]), [listening]);
        let typed = ["10.0.0.1:0", "10.0.0.2:9"].map(|text| text.parse().unwrap());
        let told = ["10.0.0.1:7", "10.0.0.2:9"].map(|text| text.parse().unwrap());
        assert_eq!(advertised(listening, &typed), told);
    }

    #[test]
    fn zones_are_names_or_numbers_of_interfaces() {
        let loopback = if_addrs::get_if_addrs().unwrap();
        let loopback = loopback.iter().find(|interface| interface.is_loopback()).unwrap();
        let number = loopback.index.unwrap();
        let expected = SocketAddrV6::new("fe80::1".parse().unwrap(), 7, 0, number);
        for zone in [loopback.name.clone(), number.to_string()] {
            assert_eq!(resolve(&format!("[fe80::1%{zone}]:7")).unwrap(), [expected.into()]);
        }
        let error = resolve("[fe80::1%no such]:7").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(error.to_string(), "this machine has no network interface no such");
        assert_eq!(resolve("127.0.0.1:7").unwrap(), [SocketAddr::from(([127, 0, 0, 1], 7))]);
        assert!(resolve("[fe80::1%1]:port").is_err());
    }

    /// An address of a link is dialed by its zone, as far as this machine has one.
    #[test]
    fn a_node_is_reached_at_an_address_of_a_link() {
        use crate::test_peer::{TEST_TIMEOUT, node_with, secret};
        let interfaces = if_addrs::get_if_addrs().unwrap();
        let of_link = |interface: &&Interface| match interface.ip() {
            IpAddr::V4(_) => false,
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        let Some(interface) = interfaces.iter().find(of_link) else {
            eprintln!("\nskipped: no interface has an address of its link");
            return;
        };
        let secret = secret();
        let [a, b] = [(); 2].map(|()| {
            node_with(&secret, |options| options.listen = SocketAddr::from(([0; 16], 0)))
        });
        let port = b.local_addr().port();
        let typed = format!("[{}%{}]:{port}", interface.ip(), interface.name);
        a.dial(resolve(&typed).unwrap()[0], TEST_TIMEOUT).unwrap();
    }
}
