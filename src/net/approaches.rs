//! Tests of nodes with several addresses, some of them unused or of another node.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use super::test_peer::{TEST_TIMEOUT, any_port, node, node_with, secret};
use super::*;

/// Returns an address without an answer, as long as the socket is open.
fn silent() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind(any_port()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

fn approach(addresses: Vec<SocketAddr>, limit: Duration) -> Approach {
    Approach { addresses, limit, idle_timeout: None, hello: None }
}

#[test]
fn an_address_that_answers_is_reached_beside_those_that_do_not() {
    let secret = secret();
    let (dialing, there) = (node(&secret), node(&secret));
    let [(_one, dead), (_two, other)] = [silent(), silent()];
    let started = Instant::now();
    let addresses = vec![dead, other, there.local_addr()];
    let peer = dialing.approach(approach(addresses, TEST_TIMEOUT)).unwrap();
    let elapsed = started.elapsed();
    assert_eq!(peer.address(), there.local_addr());
    // Two of 200 ms, and a handshake, long before the first ones give up.
    assert!(elapsed >= Duration::from_millis(400) && elapsed < TEST_TIMEOUT / 2, "{elapsed:?}");
}

#[test]
fn an_address_that_fails_lets_the_next_one_begin_at_once() {
    let secret = secret();
    let (dialing, there) = (node(&secret), node(&secret));
    // IPv6 cannot be dialed from a socket of IPv4.
    let addresses = vec!["[::1]:9".parse().unwrap(); 7];
    let addresses = [addresses, vec![there.local_addr()]].concat();
    let started = Instant::now();
    dialing.approach(approach(addresses, TEST_TIMEOUT)).unwrap();
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

#[test]
fn the_errors_of_all_addresses_are_told() {
    let secret = secret();
    let (_kept, dead) = silent();
    let limit = Duration::from_millis(500);
    let addresses = vec![dead, "[::1]:9".parse().unwrap()];
    let errors = node(&secret).approach(approach(addresses, limit)).unwrap_err();
    let texts: Vec<String> = errors.iter().map(NetError::in_list).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert!(texts[0].starts_with("cannot send to [::1]:9: "), "{texts:?}");
    assert_eq!(texts[1], format!("no answer from {dead} over UDP within 0.5 s"));
}

/// An address of a private network may belong to another node in the network of the dialing node.
#[test]
fn another_node_is_not_taken_for_the_one_that_is_looked_for() {
    let secret = secret();
    let dialing = node(&secret);
    let named = |hello: &[u8]| {
        let options = EndpointOptions::new(any_port());
        Endpoint::bind(options, &secret, hello).unwrap()
    };
    let (other, there) = (named(b"other"), named(b"there"));
    let looking = |addresses| Approach {
        hello: Some(b"there".to_vec()),
        ..approach(addresses, TEST_TIMEOUT)
    };
    let both = vec![other.local_addr(), there.local_addr()];
    let peer = dialing.approach(looking(both)).unwrap();
    assert_eq!(peer.address(), there.local_addr());
    let errors = dialing.approach(looking(vec![other.local_addr()])).unwrap_err();
    assert_eq!(errors, [NetError::OtherNode { address: other.local_addr() }]);
}

/// All attempts to reach one node take one place among the links.
#[test]
fn several_addresses_take_one_place() {
    let secret = secret();
    let dialing = node_with(&secret, |options| options.links_max = 1);
    let there = node(&secret);
    let silent: Vec<_> = (0..3).map(|_| silent()).collect();
    let mut addresses: Vec<SocketAddr> = silent.iter().map(|(_, address)| *address).collect();
    addresses.push(there.local_addr());
    dialing.approach(approach(addresses, TEST_TIMEOUT)).unwrap();
}
