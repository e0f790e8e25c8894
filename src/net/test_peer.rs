//! Peers that are not endpoints of this crate: they speak QUIC with any TLS and send any bytes.

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, ConnectionError};
use tokio::runtime::Runtime;

use super::identity::{Identity, NODE_NAME};
use super::knock::Knock;
use super::link::Control;
use super::*;

/// Usual idle timeout of a peer.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for something that must happen.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(10);

pub fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub fn secret() -> Secret {
    Secret::generate().unwrap()
}

/// Returns an endpoint with timeouts that no successful operation exceeds, except for the flush: no
/// test expects messages sent before an end to arrive.
pub fn node(secret: &Secret) -> Endpoint {
    node_with(secret, |_| {})
}

/// Returns an endpoint with other timeouts, for tests that exceed them.
pub(crate) fn node_with(secret: &Secret, change: impl FnOnce(&mut EndpointOptions)) -> Endpoint {
    let mut options = EndpointOptions {
        handshake_timeout: TEST_TIMEOUT,
        idle_timeout: IDLE_TIMEOUT,
        flush_timeout: Duration::from_millis(300),
        ..EndpointOptions::new(any_port())
    };
    change(&mut options);
    Endpoint::bind(options, secret, b"node").unwrap()
}

/// Dials a node at an address, its own or that of a relay, and opens both ends of the link.
pub(crate) fn linked<R: Receiver + 'static>(
    [dialing, accepting]: [&Endpoint; 2],
    address: SocketAddr,
    receivers: [Arc<R>; 2],
) -> [Link; 2] {
    let dialed = dialing.dial(address, TEST_TIMEOUT).unwrap();
    let accepted = accepting.accepted().recv(Some(Instant::now() + TEST_TIMEOUT)).unwrap();
    let [here, there] = receivers;
    [dialed.open(here), accepted.open(there)]
}

/// Waits until something holds.
pub fn wait(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "after {TEST_TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Settings of a client that knocks with a secret, for any number of connections.
pub(crate) fn client(tls: rustls::ClientConfig, secret: &Secret) -> quinn::ClientConfig {
    let mut config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let knock = Knock::of(secret);
    config.initial_dst_cid_provider(Arc::new(move || knock.fresh().unwrap()));
    config
}

/// QUIC endpoint with its own threads.
pub struct Peer {
    pub runtime: Runtime,
    pub endpoint: quinn::Endpoint,
    /// Idle timeout of its connections and in its greeting.
    pub idle_timeout: Duration,
}

impl Peer {
    pub fn new() -> Self {
        Self::at(any_port(), None)
    }

    pub(crate) fn serving(tls: rustls::ServerConfig) -> Self {
        let tls = QuicServerConfig::try_from(tls).unwrap();
        Self::at(any_port(), Some(quinn::ServerConfig::with_crypto(Arc::new(tls))))
    }

    pub fn at(address: SocketAddr, server: Option<quinn::ServerConfig>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let endpoint = runtime.block_on(async {
            let socket = std::net::UdpSocket::bind(address).unwrap();
            let adapter = Arc::new(quinn::TokioRuntime);
            quinn::Endpoint::new(quinn::EndpointConfig::default(), server, socket, adapter)
        });
        Self { runtime, endpoint: endpoint.unwrap(), idle_timeout: IDLE_TIMEOUT }
    }

    /// Connects with any TLS, and a valid knock.
    pub fn connect(
        &self,
        address: SocketAddr,
        tls: rustls::ClientConfig,
        secret: &Secret,
    ) -> Result<Connection, ConnectionError> {
        let mut config = client(tls, secret);
        let mut transport = quinn::TransportConfig::default();
        transport.max_idle_timeout(Some(self.idle_timeout.try_into().unwrap()));
        config.transport_config(Arc::new(transport));
        let _guard = self.runtime.enter();
        let connecting = self.endpoint.connect_with(config, address, NODE_NAME).unwrap();
        self.runtime.block_on(connecting)
    }

    /// Connects as a node of the run.
    pub(crate) fn connect_as_node(&self, node: &Endpoint, secret: &Secret) -> Connection {
        let tls = Arc::new(Identity::new(secret).unwrap()).client().unwrap();
        self.connect(node.local_addr(), tls, secret).unwrap()
    }

    /// Connects as a node and exchanges greetings.
    pub fn join(&self, node: &Endpoint, secret: &Secret) -> (Connection, Control, PendingPeer) {
        let connection = self.connect_as_node(node, secret);
        let control = self.runtime.block_on(async {
            let (mut send, mut receive) = connection.open_bi().await.unwrap();
            send.write_all(&wire::greeting(b"peer", self.idle_timeout)).await.unwrap();
            let mut greeting = wire::greeting(b"node", Duration::ZERO);
            receive.read_exact(&mut greeting).await.unwrap();
            assert_eq!(greeting[greeting.len() - 4..], *b"node");
            (send, receive)
        });
        let deadline = Some(Instant::now() + TEST_TIMEOUT);
        (connection, control, node.accepted().recv(deadline).unwrap())
    }

    /// Sentence with which the other side closed a connection.
    pub(crate) fn close_of(&self, connection: &Connection) -> String {
        let closed = connection.closed();
        let closed =
            self.runtime.block_on(async { tokio::time::timeout(TEST_TIMEOUT, closed).await });
        error::sentence(&closed.expect("it closes"))
    }
}

/// Receiver that takes all, and expects payloads of 10 bytes and blobs of at most 1000.
#[derive(Default)]
pub struct Sink {
    state: Mutex<SinkState>,
    changed: Condvar,
}

#[derive(Default)]
struct SinkState {
    count: usize,
    end: Option<CloseReason>,
}

impl Sink {
    fn add(&self) -> Result<(), String> {
        self.state.lock().unwrap().count += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// Returns the number of things that have arrived completely.
    pub fn count(&self) -> usize {
        self.state.lock().unwrap().count
    }

    pub fn closed(&self) -> CloseReason {
        let state = self.state.lock().unwrap();
        let is_open = |state: &mut SinkState| state.end.is_none();
        let (state, _) = self.changed.wait_timeout_while(state, TEST_TIMEOUT, is_open).unwrap();
        state.end.clone().expect("the link ends")
    }
}

struct Ten([u8; 10]);

impl ReceiveBuffer for Ten {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        Ok(())
    }
}

impl Receiver for Sink {
    fn control(&self, _: Vec<u8>) -> Result<(), String> {
        self.add()
    }

    fn blob_begins(&self, _: u64, bytes: usize) -> Result<(), String> {
        if bytes <= 1000 { Ok(()) } else { Err(format!("a blob of {bytes} bytes is not due")) }
    }

    fn blob(&self, _: u64, _: Vec<u8>) -> Result<(), String> {
        self.add()
    }

    fn data(&self, _: &[u8; TAG_BYTES], _: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
        self.add()?;
        Ok(Box::new(Ten([0; 10])))
    }

    fn closed(&self, why: &CloseReason) {
        self.state.lock().unwrap().end = Some(why.clone());
        self.changed.notify_all();
    }
}
