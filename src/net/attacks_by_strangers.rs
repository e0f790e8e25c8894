//! Attacks by peers that do not know the secret, and faults that look like them. Most of them use a
//! valid knock, which they may have overheard.

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use quinn::ConnectionError;
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, SignatureScheme};

use super::identity::{Authority, Identity, NODE_NAME};
use super::test_peer::{
    IDLE_TIMEOUT, Peer, Sink, TEST_TIMEOUT, any_port, client, linked, node, node_with, secret, wait,
};
use super::*;

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

fn identity(secret: &Secret) -> Arc<Identity> {
    Arc::new(Identity::new(secret).unwrap())
}

fn with_certificate(secret: &Secret, certificate: CertifiedKey) -> ClientConfig {
    let mut tls = identity(secret).client().unwrap();
    tls.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(certificate));
    tls
}

/// Tries to connect with this TLS, and returns the reason for which the node refused it.
fn refusal(secret: &Secret, tls: ClientConfig) -> String {
    let (node, peer) = (node(secret), Peer::new());
    // The side that dials completes TLS before the other one has checked its certificate.
    if let Ok(connection) = peer.connect(node.local_addr(), tls, secret) {
        peer.close_of(&connection);
    }
    wait("a refusal", || node.refused_count() == 1);
    assert!(node.accepted().try_recv().unwrap().is_none(), "it was accepted");
    node.refusals().remove(0).why
}

/// No certificate to show.
#[derive(Debug)]
struct Nothing;

impl ResolvesClientCert for Nothing {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[test]
fn clients_without_a_certificate_of_the_run_are_refused() {
    let (secret, other) = (secret(), secret());
    let mut without = identity(&secret).client().unwrap();
    without.client_auth_cert_resolver = Arc::new(Nothing);
    assert_eq!(refusal(&secret, without), "it does not have the code of this run");
    let span = |authority: &Authority| {
        let now = SystemTime::now();
        authority.issue(NODE_NAME, now - HOUR, now + HOUR).unwrap()
    };
    let of_another = span(&Authority::of(&other));
    let tls = with_certificate(&secret, of_another);
    assert_eq!(refusal(&secret, tls), "it does not have the code of this run");
    // An authority with another key and the name of the right one.
    let of_impostor = span(&Authority::impostor(&other, &secret));
    let tls = with_certificate(&secret, of_impostor);
    assert_eq!(refusal(&secret, tls), "it does not have the code of this run");
    let tls = with_certificate(&secret, identity::self_signed());
    assert_eq!(refusal(&secret, tls), "it does not have the code of this run");
    // The same is accepted with the right certificate.
    let tls = with_certificate(&secret, span(&Authority::of(&secret)));
    let (node, peer) = (node(&secret), Peer::new());
    assert!(peer.connect(node.local_addr(), tls, &secret).is_ok());
}

#[test]
fn certificates_are_valid_in_their_time_and_role_only() {
    let secret = secret();
    let now = SystemTime::now();
    let issue = |role: &str, from, until| Authority::of(&secret).issue(role, from, until).unwrap();
    let expired = issue(NODE_NAME, now - 2 * DAY, now - HOUR);
    let why = "its clock differs from this one by more than a day";
    assert_eq!(refusal(&secret, with_certificate(&secret, expired)), why);
    let early = issue(NODE_NAME, now + HOUR, now + DAY);
    assert_eq!(refusal(&secret, with_certificate(&secret, early)), why);
    let observer = issue("observer.potluck.internal", now - HOUR, now + HOUR);
    let why = "its certificate is not that of a node";
    assert_eq!(refusal(&secret, with_certificate(&secret, observer)), why);
}

/// Dials a server with this certificate.
fn dial_server(secret: &Secret, change: impl FnOnce(&mut rustls::ServerConfig)) -> NetError {
    let mut tls = identity(secret).server().unwrap();
    change(&mut tls);
    let server = Peer::serving(tls);
    let accepting = server.endpoint.clone();
    server.runtime.spawn(async move {
        while let Some(incoming) = accepting.accept().await {
            let _ = incoming.await;
        }
    });
    let address = server.endpoint.local_addr().unwrap();
    node(secret).dial(address, TEST_TIMEOUT).unwrap_err()
}

#[test]
fn a_server_must_have_the_certificate_of_a_node_and_the_protocol() {
    let secret = secret();
    let now = SystemTime::now();
    let issue = |role: &str, from, until| Authority::of(&secret).issue(role, from, until).unwrap();
    let dial = |certificate: CertifiedKey| {
        let resolver = Arc::new(SingleCertAndKey::from(certificate));
        dial_server(&secret, |tls| tls.cert_resolver = resolver)
    };
    let expired = dial(issue(NODE_NAME, now - 2 * DAY, now - HOUR));
    assert!(matches!(expired, NetError::Clocks { .. }), "{expired}");
    let early = dial(issue(NODE_NAME, now + HOUR, now + DAY));
    assert!(matches!(early, NetError::Clocks { .. }), "{early}");
    let observer = dial(issue("observer.potluck.internal", now - HOUR, now + HOUR));
    assert!(matches!(observer, NetError::WrongCode { .. }), "{observer}");
    let impostor = Authority::impostor(&super::test_peer::secret(), &secret);
    let impostor = dial(impostor.issue(NODE_NAME, now - HOUR, now + HOUR).unwrap());
    assert!(matches!(impostor, NetError::WrongCode { .. }), "{impostor}");
    let self_signed = dial(identity::self_signed());
    assert!(matches!(self_signed, NetError::WrongCode { .. }), "{self_signed}");
    let other = dial_server(&secret, |tls| tls.alpn_protocols = vec![b"h3".to_vec()]);
    assert!(matches!(other, NetError::OtherProtocol { .. }), "{other}");
}

/// Dials a server with the right certificate that answers a greeting with these bytes; returns the
/// error within this time.
fn dial_answering(bytes: &'static [u8], timeout: Duration) -> NetError {
    let secret = secret();
    let server = Peer::serving(identity(&secret).server().unwrap());
    let accepting = server.endpoint.clone();
    server.runtime.spawn(async move {
        let connection = accepting.accept().await.unwrap().await.unwrap();
        let (mut send, _receive) = connection.accept_bi().await.unwrap();
        send.write_all(bytes).await.unwrap();
        connection.closed().await;
    });
    let address = server.endpoint.local_addr().unwrap();
    node(&secret).dial(address, timeout).unwrap_err()
}

#[test]
fn a_server_must_send_a_greeting() {
    let short = Duration::from_secs(2);
    std::thread::scope(|scope| {
        let silent = scope.spawn(move || dial_answering(b"", short));
        let half = dial_answering(b"PTLK\0\x09\x01", short);
        assert!(matches!(half, NetError::NoHello { .. }), "{half}");
        let silent = silent.join().unwrap();
        assert!(matches!(silent, NetError::NoHello { .. }), "{silent}");
    });
    let long = dial_answering(b"PTLK\xff\xff", TEST_TIMEOUT);
    assert!(long.to_string().contains("65535 bytes, and at most 4362"), "{long}");
    let later = dial_answering(b"PTLK\0\x08\0\x0e\x059.8.7", TEST_TIMEOUT);
    assert!(later.to_string().contains("is dialed potluck 9.8.7 (protocol 14)"), "{later}");
    let other = dial_answering(b"SSH-2.0", TEST_TIMEOUT);
    assert!(matches!(other, NetError::OtherProtocol { .. }), "{other}");
}

#[test]
fn another_protocol_is_refused() {
    let secret = secret();
    let mut tls = identity(&secret).client().unwrap();
    tls.alpn_protocols = vec![b"potluck/1".to_vec()];
    assert_eq!(refusal(&secret, tls), "it does not speak the protocol of this version");
}

#[test]
fn no_connection_is_resumed_and_none_sends_early_data() {
    let secret = secret();
    let (node, peer) = (node(&secret), Peer::new());
    let mut tls = identity(&secret).client().unwrap();
    tls.enable_early_data = true;
    tls.resumption = Resumption::in_memory_sessions(8);
    let first = peer.connect(node.local_addr(), tls.clone(), &secret).unwrap();
    // Time for tickets to come, if there were any.
    peer.runtime.block_on(async {
        let (mut send, mut receive) = first.open_bi().await.unwrap();
        send.write_all(&wire::greeting(b"peer", IDLE_TIMEOUT)).await.unwrap();
        receive.read_exact(&mut [0; 4]).await.unwrap();
    });
    let config = client(tls, &secret);
    let _guard = peer.runtime.enter();
    let again = peer.endpoint.connect_with(config, node.local_addr(), NODE_NAME).unwrap();
    assert!(again.into_0rtt().is_err(), "a ticket was kept");
}

/// Returns the address of a relay that lets only the first datagrams to the node through, and
/// nothing back.
fn one_way(node: &Endpoint, source: &str) -> (std::net::SocketAddr, Arc<UdpSocket>) {
    let front = UdpSocket::bind("127.0.0.1:0").unwrap();
    let back = Arc::new(UdpSocket::bind(source).unwrap());
    let (address, target) = (front.local_addr().unwrap(), node.local_addr());
    let out = back.clone();
    front.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    std::thread::spawn(move || {
        let mut datagram = [0; 2048];
        while let Ok(bytes) = front.recv(&mut datagram) {
            let _ = out.send_to(&datagram[..bytes], target);
        }
    });
    (address, back)
}

#[test]
fn handshakes_that_are_never_finished_are_given_up() {
    let secret = secret();
    let node = node_with(&secret, |options| options.handshake_timeout = Duration::from_secs(1));
    let peer = Peer::new();
    let (relay, _back) = one_way(&node, "127.0.0.1:0");
    let tls = identity(&secret).client().unwrap();
    let endpoint = peer.endpoint.clone();
    let dialing = std::thread::spawn(move || {
        let config = client(tls, &secret);
        let _guard = peer.runtime.enter();
        let connecting = peer.endpoint.connect_with(config, relay, NODE_NAME).unwrap();
        let _ = peer.runtime.block_on(connecting);
    });
    wait("a handshake begins", || node.crowd() == 1);
    wait("it is given up", || node.crowd() == 0);
    assert_eq!(node.refusals()[0].why, "its handshake took over 1 s");
    endpoint.close(0u32.into(), b"");
    dialing.join().unwrap();
}

/// Many clients that never answer, with a forged address, do not keep a node from coming in.
#[cfg(target_os = "linux")]
#[test]
fn a_flood_of_first_packets_is_bounded_and_nodes_still_come_in() {
    let secret = secret();
    let (first, peer) = (node(&secret), Peer::new());
    let (relay, _back) = one_way(&first, "127.0.0.2:0");
    let config = client(identity(&secret).client().unwrap(), &secret);
    for _ in 0..300 {
        let config = config.clone();
        let endpoint = peer.endpoint.clone();
        peer.runtime.spawn(async move {
            if let Ok(connecting) = endpoint.connect_with(config, relay, NODE_NAME) {
                let _ = connecting.await;
            }
        });
    }
    wait("a crowd", || first.crowd() >= 16);
    let second = node(&secret);
    let (mut dialed, mut most) = (0, 0);
    let ended = Instant::now() + Duration::from_millis(500);
    while Instant::now() < ended {
        most = most.max(first.crowd());
        let peer = second.dial(first.local_addr(), TEST_TIMEOUT).unwrap();
        drop(first.accepted().recv(Some(Instant::now() + TEST_TIMEOUT)).unwrap());
        peer.refuse("enough");
        dialed += 1;
    }
    assert!(most <= 17 && dialed > 0, "{most} handshakes at a time, {dialed} dials");
}

#[test]
fn junk_at_the_port_does_not_disturb_a_link() {
    let secret = secret();
    let (a, b) = (node(&secret), node(&secret));
    let sink = Arc::new(Sink::default());
    let sinks = [Arc::new(Sink::default()), sink.clone()];
    let [link, _kept] = linked([&a, &b], b.local_addr(), sinks);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let word = |i: u32| potluck_core::rng::threefry2x32([i, 3], [0, 0])[0];
    let noise: Vec<u8> = (0..1000).flat_map(|i| word(i).to_le_bytes()).collect();
    for i in 0..10_000u32 {
        let (start, length) = (word(i) as usize % 2500, word(i + 1) as usize % 1400);
        let mut junk = noise[start..start + length].to_vec();
        if i % 2 == 0 && junk.len() > 6 {
            // A first packet of QUIC version 1, of a client.
            junk.resize(1200, i as u8);
            junk[..6].copy_from_slice(&[0xC3, 0, 0, 0, 1, 8]);
        }
        let _ = socket.send_to(&junk, b.local_addr());
        if i % 100 == 0 {
            link.send_control(vec![1; 100]).unwrap();
        }
    }
    wait("all messages", || sink.count() == 100);
    assert!(b.accepted().try_recv().unwrap().is_none());
}

#[test]
fn a_stranger_learns_nothing_from_the_sentences() {
    let secret = secret();
    let (node, peer) = (node(&secret), Peer::new());
    let tls = identity(&super::test_peer::secret()).client().unwrap();
    let error = peer.connect(node.local_addr(), tls, &secret).unwrap_err();
    let ConnectionError::TransportError(error) = error else { panic!("{error}") };
    let code = secret.code().unwrap();
    let told = format!("{error:?}");
    assert!(code.split('-').all(|group| !told.contains(group)), "{told}");
}

// ---- The knock ----

/// The first packets of clients with a secret, one of each.
fn first_packets(secret: &Secret, count: usize) -> Vec<Vec<u8>> {
    let (peer, ear) = (Peer::new(), UdpSocket::bind(any_port()).unwrap());
    ear.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let config = client(identity(secret).client().unwrap(), secret);
    let mut packets = Vec::new();
    for _ in 0..count {
        let _guard = peer.runtime.enter();
        let address = ear.local_addr().unwrap();
        let connecting = peer.endpoint.connect_with(config.clone(), address, NODE_NAME).unwrap();
        let mut packet = [0; 2048];
        let bytes = ear.recv(&mut packet).unwrap();
        packets.push(packet[..bytes].to_vec());
        drop(connecting);
        // Its close, so that the next packet is a first one.
        ear.recv(&mut packet).unwrap();
    }
    packets
}

/// Returns true if the node answers one of these packets, each sent from another port.
fn answers(node: &Endpoint, packets: &[Vec<u8>]) -> bool {
    let sockets: Vec<UdpSocket> = packets
        .iter()
        .map(|packet| {
            let socket = UdpSocket::bind(any_port()).unwrap();
            socket.send_to(packet, node.local_addr()).unwrap();
            socket
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    sockets.iter().any(|socket| {
        socket.set_nonblocking(true).unwrap();
        socket.recv(&mut [0; 2048]).is_ok()
    })
}

#[test]
fn without_the_knock_nothing_answers() {
    let secret = secret();
    let node = node(&secret);
    let other = super::test_peer::secret();
    let mut packets = first_packets(&other, 3);
    assert!(answers(&super::test_peer::node(&other), &packets[..1]), "the packets are none");
    let right = first_packets(&secret, 1).remove(0);
    let changed = |at: usize, byte: u8| {
        let mut packet = right.clone();
        packet[at] = byte;
        packet
    };
    // Unknown versions, a draft, and a negotiated one: servers answer with their own versions.
    packets.extend([changed(1, 0x1a), changed(4, 2), changed(1, 0xff)]);
    // Ids of other lengths, where servers answer a short one with an error, and a knock with a
    // flipped bit.
    packets.extend([4, 8, 19].map(|length| changed(5, length)));
    packets.push(changed(6, right[6] ^ 1));
    packets.push(changed(25, right[25] ^ 1));
    // One of a connection that is not there.
    packets.push(changed(0, 0x40));
    assert!(!answers(&node, &packets), "something answered");
    assert_eq!(node.crowd(), 0);
    let lines = node.refusals();
    assert!(lines.len() == 1 && lines[0].why.contains("another code"), "{lines:?}");
    // A first packet with the knock, from anywhere, is answered.
    assert!(answers(&node, &[right]), "the knock is not answered");
}

/// A knock that was seen on its way takes a single place, from however many addresses it comes, and
/// yields it to others.
#[test]
fn a_replayed_knock_takes_one_place_and_gives_way() {
    let secret = secret();
    let node = node(&secret);
    let seen = first_packets(&secret, 1);
    for _ in 0..100 {
        let socket = UdpSocket::bind(any_port()).unwrap();
        socket.send_to(&seen[0], node.local_addr()).unwrap();
    }
    wait("the replayed handshake", || node.crowd() == 1);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(node.crowd(), 1);
    // Others are proven by then, as those behind it in the same network.
    let honest = super::test_peer::node(&secret);
    let dialed = honest.dial(node.local_addr(), TEST_TIMEOUT).unwrap();
    drop((dialed, node.accepted().recv(Some(Instant::now() + TEST_TIMEOUT)).unwrap()));
}

/// Passes packets of clients on from an address, and only what asks for a proof of the address
/// back: their handshakes begin and are never finished.
fn half_open_relay(node: &Endpoint, source: &str) -> std::net::SocketAddr {
    let [front, back] = [any_port().to_string(), source.into()].map(|address: String| {
        let socket = UdpSocket::bind(address).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        socket
    });
    let (address, target) = (front.local_addr().unwrap(), node.local_addr());
    std::thread::spawn(move || {
        let (mut packet, mut client) = ([0; 2048], None);
        let until = Instant::now() + TEST_TIMEOUT;
        while Instant::now() < until {
            if let Ok((bytes, from)) = front.recv_from(&mut packet) {
                client = Some(from);
                let _ = back.send_to(&packet[..bytes], target);
            }
            while let (Ok(bytes), Some(client)) = (back.recv(&mut packet), client) {
                // A Retry (RFC 9000, section 17.2.5).
                if packet[0] & 0xf0 == 0xf0 {
                    let _ = front.send_to(&packet[..bytes], client);
                }
            }
        }
    });
    address
}

/// Four addresses that prove themselves begin 50 handshakes per second, each as long as allowed: an
/// honest node comes in, from another address or from one of the four.
#[cfg(target_os = "linux")]
#[test]
fn half_open_handshakes_with_replayed_knocks_keep_nobody_out() {
    let secret = secret();
    let first = node(&secret);
    let hosts = ["127.0.0.1:0", "127.0.0.2:0", "127.0.0.3:0", "127.0.0.4:0"];
    let relays = hosts.map(|host| half_open_relay(&first, host));
    let peer = Peer::new();
    let config = client(identity(&secret).client().unwrap(), &secret);
    let begin = |number: usize| {
        let (config, endpoint) = (config.clone(), peer.endpoint.clone());
        let relay = relays[number % 4];
        peer.runtime.spawn(async move {
            if let Ok(connecting) = endpoint.connect_with(config, relay, NODE_NAME) {
                let _ = connecting.await;
            }
        });
        std::thread::sleep(Duration::from_millis(20));
    };
    (0..100).for_each(begin);
    assert_eq!(first.crowd(), 64, "all places are taken");
    let slowest = std::thread::scope(|scope| {
        let joins = scope.spawn(|| {
            let mut slowest = Duration::ZERO;
            for host in [1, 4, 5] {
                let listen = std::net::SocketAddr::from(([127, 0, 0, host], 0));
                let honest = node_with(&secret, |options| options.listen = listen);
                let started = Instant::now();
                let peer = honest.dial(first.local_addr(), TEST_TIMEOUT).unwrap();
                slowest = slowest.max(started.elapsed());
                drop(first.accepted().recv(Some(Instant::now() + TEST_TIMEOUT)).unwrap());
                peer.refuse("enough");
            }
            slowest
        });
        (0..50).for_each(begin);
        joins.join().unwrap()
    });
    println!("slowest of three honest dials: {slowest:?}");
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    assert!(first.crowd() <= 64);
}
