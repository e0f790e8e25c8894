//! Relay of UDP for tests, which changes the port that a node sees, like a router that forgets its
//! mapping; and tests of links over it.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::test_peer::{Sink, linked, node, node_with, secret, wait};
use super::{CloseReason, ReceiveBuffer, Receiver, TAG_BYTES};

/// Relay between one client and a node; dropped, it ends.
pub struct MovingRelay {
    /// Address to dial instead of the node's.
    pub address: SocketAddr,
    ip: [u8; 4],
    state: Arc<RelayState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct RelayState {
    /// Port at which the node sees the client; 0 requests another one.
    port: AtomicU16,
    is_cut: AtomicBool,
    /// Datagrams of the client, and of the node.
    counts: [AtomicUsize; 2],
    is_over: AtomicBool,
}

impl MovingRelay {
    pub fn start(node: SocketAddr) -> Self {
        Self::seen_at([127, 0, 0, 1], node)
    }

    /// Starts a relay that the node sees at an address of loopback.
    pub fn seen_at(ip: [u8; 4], node: SocketAddr) -> Self {
        let front = socket([127, 0, 0, 1]);
        let address = front.local_addr().unwrap();
        let state = Arc::<RelayState>::default();
        let shared = state.clone();
        let thread = Some(std::thread::spawn(move || relay(&front, (ip, node), &shared)));
        wait("the relay", || state.port.load(Ordering::SeqCst) != 0);
        Self { address, ip, state, thread }
    }

    /// Returns the address at which the node sees the client.
    pub fn seen(&self) -> SocketAddr {
        SocketAddr::from((self.ip, self.state.port.load(Ordering::SeqCst)))
    }

    /// Gives the client another port, and returns the address at which the node sees it.
    pub fn move_client(&self) -> SocketAddr {
        self.state.port.store(0, Ordering::SeqCst);
        wait("the other port", || self.state.port.load(Ordering::SeqCst) != 0);
        self.seen()
    }

    /// Returns the number of datagrams of the client, and of the node.
    fn counts(&self) -> [usize; 2] {
        [0, 1].map(|side| self.state.counts[side].load(Ordering::SeqCst))
    }

    /// Drops all datagrams from now on, or none any more.
    pub fn cut(&self, is_cut: bool) {
        self.state.is_cut.store(is_cut, Ordering::SeqCst);
    }
}

impl Drop for MovingRelay {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn socket(ip: [u8; 4]) -> UdpSocket {
    let socket = UdpSocket::bind(SocketAddr::from((ip, 0))).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    socket
}

fn relay(front: &UdpSocket, (ip, node): ([u8; 4], SocketAddr), state: &RelayState) {
    let (mut back, mut client) = (socket(ip), None);
    let mut datagram = vec![0; 1 << 16];
    while !state.is_over.load(Ordering::SeqCst) {
        if state.port.load(Ordering::SeqCst) == 0 {
            // The old one stays open until there is another one, which so has another port.
            back = socket(ip);
            state.port.store(back.local_addr().unwrap().port(), Ordering::SeqCst);
        }
        // Errors are timeouts, and reports that a peer has gone.
        if let Ok((bytes, from)) = front.recv_from(&mut datagram) {
            client = Some(from);
            state.counts[0].fetch_add(1, Ordering::SeqCst);
            if !state.is_cut.load(Ordering::SeqCst) {
                let _ = back.send_to(&datagram[..bytes], node);
            }
        }
        if let (Ok(bytes), Some(client)) = (back.recv(&mut datagram), client) {
            state.counts[1].fetch_add(1, Ordering::SeqCst);
            if !state.is_cut.load(Ordering::SeqCst) {
                let _ = front.send_to(&datagram[..bytes], client);
            }
        }
    }
}

#[test]
fn a_link_goes_on_while_its_client_has_one_address_after_another() {
    let secret = secret();
    let (dialing, accepting) = (node(&secret), node(&secret));
    let relay = MovingRelay::start(accepting.local_addr());
    let sinks = [(); 2].map(|()| Arc::new(Sink::default()));
    let links = linked([&dialing, &accepting], relay.address, sinks.clone());
    assert_eq!(links[1].address(), relay.seen());
    let mut count = 0;
    for _ in 0..3 {
        let seen = relay.move_client();
        for _ in 0..100 {
            for link in &links {
                link.send_control(vec![1; 1000]).unwrap();
                link.send_data([0; TAG_BYTES], vec![7; 10].into()).unwrap();
            }
            count += 2;
        }
        wait("all that was sent", || sinks.iter().all(|sink| sink.count() == count));
        assert_eq!(links[1].address(), seen);
    }
    assert_eq!(links[0].address(), relay.address);
}

/// Receiver that counts blobs and payloads of any length.
#[derive(Default)]
struct BlobSink {
    blobs: AtomicUsize,
    /// Payloads that have arrived completely, now and when the last blob had.
    payloads: Arc<AtomicUsize>,
    payloads_at_blob: AtomicUsize,
}

struct CountedPayload {
    bytes: Vec<u8>,
    payloads: Arc<AtomicUsize>,
}

impl ReceiveBuffer for CountedPayload {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        self.payloads.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

impl Receiver for BlobSink {
    fn control(&self, _: Vec<u8>) -> Result<(), String> {
        Err("probes are handed to nobody".into())
    }

    fn blob_begins(&self, _: u64, _: usize) -> Result<(), String> {
        Ok(())
    }

    fn blob(&self, _: u64, _: Vec<u8>) -> Result<(), String> {
        self.payloads_at_blob.store(self.payloads.load(Ordering::SeqCst), Ordering::SeqCst);
        self.blobs.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn data(&self, _: &[u8; TAG_BYTES], bytes: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
        Ok(Box::new(CountedPayload { bytes: vec![0; bytes], payloads: self.payloads.clone() }))
    }

    fn closed(&self, _: &CloseReason) {}
}

/// Both sides have a window full of blobs in flight, so that no heartbeat would pass. QUIC's own
/// probes come at intervals that double, so that in one of three spans of 2 s after 3 s there would
/// be none.
#[test]
fn a_link_goes_on_soon_after_a_hole_in_the_network() {
    const BLOBS: usize = 60;
    let secret = secret();
    let (dialing, accepting) = (node(&secret), node(&secret));
    let relay = MovingRelay::start(accepting.local_addr());
    let sinks = [(); 2].map(|()| Arc::new(BlobSink::default()));
    let links = linked([&dialing, &accepting], relay.address, sinks.clone());
    for link in &links {
        for id in 0..BLOBS {
            link.send_blob(id as u64, vec![7; 1 << 20].into()).unwrap();
        }
    }
    let counts = || [0, 1].map(|side| sinks[side].blobs.load(Ordering::SeqCst));
    wait("the first blobs", || counts().iter().all(|&count| count > 0));
    relay.cut(true);
    std::thread::sleep(Duration::from_secs(3));
    for span in 0..3 {
        let before = relay.counts();
        std::thread::sleep(Duration::from_secs(2));
        let after = relay.counts();
        assert!(before[0] < after[0] && before[1] < after[1], "no probe in span {span}");
    }
    let before = counts();
    assert!(before.iter().all(|&count| count < BLOBS), "the hole is in the middle: {before:?}");
    relay.cut(false);
    let mended = Instant::now();
    wait("more blobs", || counts().iter().zip(before).all(|(&count, before)| count > before));
    eprintln!("the next blobs have come after {:?}", mended.elapsed());
}

/// A relay takes longer than the sender: nearly all payloads still wait when the blob comes.
/// A stream of the same priority would take turns with theirs: 32 of them would pass first.
#[test]
fn a_blob_overtakes_payloads_that_wait() {
    const PAYLOADS: usize = 64;
    const BYTES: usize = 16 << 10;
    let secret = secret();
    let (dialing, accepting) = (node(&secret), node(&secret));
    let relay = MovingRelay::start(accepting.local_addr());
    let sinks = [(); 2].map(|()| Arc::new(BlobSink::default()));
    let links = linked([&dialing, &accepting], relay.address, sinks.clone());
    for _ in 0..PAYLOADS {
        links[0].send_data([0; TAG_BYTES], vec![7; BYTES].into()).unwrap();
    }
    links[0].send_blob(0, vec![7; 32 * BYTES].into()).unwrap();
    wait("all payloads", || sinks[1].payloads.load(Ordering::SeqCst) == PAYLOADS);
    assert_eq!(sinks[1].blobs.load(Ordering::SeqCst), 1);
    let before = sinks[1].payloads_at_blob.load(Ordering::SeqCst);
    assert!(before < 24, "{before} payloads came first");
}

/// A payload of which a part has come waits for longer than a stream may pause, while a blob comes.
#[test]
fn a_payload_waits_as_long_as_a_blob_overtakes_it() {
    const PAUSE: Duration = Duration::from_millis(600);
    let secret = secret();
    let nodes = [(); 2].map(|()| node_with(&secret, |options| options.idle_timeout = PAUSE));
    let relay = MovingRelay::start(nodes[1].local_addr());
    let sinks = [(); 2].map(|()| Arc::new(BlobSink::default()));
    let links = linked([&nodes[0], &nodes[1]], relay.address, sinks.clone());
    links[0].send_data([0; TAG_BYTES], vec![7; 1 << 20].into()).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let begun = Instant::now();
    links[0].send_blob(0, vec![7; 4 << 20].into()).unwrap();
    wait("the blob", || sinks[1].blobs.load(Ordering::SeqCst) == 1);
    assert_eq!(sinks[1].payloads_at_blob.load(Ordering::SeqCst), 0);
    assert!(begun.elapsed() > PAUSE, "the blob has come too fast for this test");
    wait("the payload", || sinks[1].payloads.load(Ordering::SeqCst) == 1);
}

#[test]
fn one_thread_waits_in_the_middle_of_long_messages() {
    const BLOBS: u64 = 20;
    let secret = secret();
    let nodes = [(); 2].map(|()| node_with(&secret, |options| options.threads = 1));
    let relay = MovingRelay::start(nodes[1].local_addr());
    let sinks = [(); 2].map(|()| Arc::new(BlobSink::default()));
    let links = linked([&nodes[0], &nodes[1]], relay.address, sinks.clone());
    for link in &links {
        for id in 0..BLOBS {
            link.send_blob(id, vec![7; 1 << 20].into()).unwrap();
        }
    }
    let have_all = || sinks.iter().all(|sink| sink.blobs.load(Ordering::SeqCst) == BLOBS as usize);
    wait("all blobs", have_all);
    for node in &nodes {
        assert_eq!(node.moderation().state(), (true, 0), "it has waited, and nothing is due");
    }
}
