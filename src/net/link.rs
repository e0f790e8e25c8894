//! A link to an accepted peer: outgoing messages are queued, and incoming ones are handed to a
//! [`Receiver`].

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use quinn::{Connection, RecvStream, SendStream};
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;

use super::endpoint_options::EndpointOptions;
use super::error::CloseReason;
use super::handshake_limiter::canonical;
use super::link_stats::LinkStats;
use super::moderation::Moderation;
use super::receiver::Receiver;
use super::send_queue::{Overflow, SendQueue};
use super::shared::Shared;
use super::wire::{BlobHead, CONTROL_MAX, DataHead, PAYLOAD_MAX, TAG_BYTES};
use super::{reading, writing};
use potluck_core::Lock;
use potluck_parallel::comm::Closed;

/// Most control messages in a link's queue, and most of their bytes.
const CONTROLS_MAX: usize = 1024;
const CONTROLS_BYTES_MAX: usize = 8 << 20;
/// Most payloads, and most blobs, in a link's queue.
const PAYLOADS_MAX: usize = 1024;

/// Time without a packet after which a probe is sent.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// Both directions of the control stream.
pub type Control = (SendStream, RecvStream);

/// Bytes to send, without a copy: the owner is dropped when the peer has received them.
#[derive(Clone, Debug, Default)]
pub struct Payload(pub(super) Bytes);

impl Payload {
    /// Wraps the owner of bytes: a vector, or a buffer that goes back to its pool when dropped.
    pub fn new<T: AsRef<[u8]> + Send + 'static>(owner: T) -> Self {
        Self(Bytes::from_owner(owner))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Bytes::from(bytes))
    }
}

/// Parts of a link to be opened.
pub(crate) struct LinkParts {
    pub connection: Connection,
    pub control: Control,
    pub place: OwnedSemaphorePermit,
    pub options: EndpointOptions,
    pub handle: Handle,
    pub moderation: Arc<Moderation>,
}

/// Authenticated connection to an accepted peer; clones are handles of the same link. When the last
/// one is dropped, the link is closed.
#[derive(Clone)]
pub struct Link(Arc<LinkHandle>);

struct LinkHandle(Arc<Shared>);

impl Drop for LinkHandle {
    fn drop(&mut self) {
        self.0.end("the node gave the link up");
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({})", self.address())
    }
}

impl Link {
    pub(super) fn open(parts: LinkParts, receiver: Arc<dyn Receiver>) -> Self {
        let LinkParts { connection, control, place, options, handle, moderation } = parts;
        let shared = Arc::new(Shared {
            connection,
            controls: SendQueue::new(CONTROLS_MAX, CONTROLS_BYTES_MAX),
            payloads: SendQueue::new(PAYLOADS_MAX, options.queue_bytes),
            blobs: SendQueue::new(PAYLOADS_MAX, options.queue_bytes),
            has_data_stream: AtomicBool::new(false),
            blob_bytes: AtomicU64::new(0),
            is_broken: AtomicBool::new(false),
            reason: Lock::new(None),
            ending: OnceLock::new(),
            options,
            handle: handle.clone(),
            moderation,
        });
        handle.spawn(serve(shared.clone(), receiver, control, place));
        Self(Arc::new(LinkHandle(shared)))
    }

    pub(super) fn shared(&self) -> Weak<Shared> {
        Arc::downgrade(&self.0.0)
    }

    /// Queues a message of 1 byte to 64 KiB, before all payloads and blobs; never waits.
    ///
    /// # Errors
    ///
    /// Returns the reason of a closed link. A message that is too long, or one more than the queue
    /// holds, closes it.
    pub fn send_control(&self, message: Vec<u8>) -> Result<(), Closed> {
        let bytes = message.len();
        if !(1..=CONTROL_MAX).contains(&bytes) {
            let what = format!("a control message of {bytes} bytes, not of 1 to {CONTROL_MAX}");
            return self.defect(what);
        }
        let pushed = self.0.0.controls.push(Bytes::from(message), bytes, false);
        self.result(pushed, "control messages")
    }

    /// Queues bytes, at most 64 MiB, for a separate stream, before all payloads; their hash is
    /// computed here. Waits while the queue is full, except on a thread of the network, where a
    /// full queue closes the link.
    ///
    /// # Errors
    ///
    /// Returns the reason of a closed link.
    pub fn send_blob(&self, id: u64, payload: Payload) -> Result<(), Closed> {
        let bytes = payload.len();
        if bytes > PAYLOAD_MAX {
            return self.defect(format!("a blob of {bytes} bytes, over {PAYLOAD_MAX}"));
        }
        let head = BlobHead { id, bytes, hash: blake3::hash(&payload.0).into() };
        let pushed = self.0.0.blobs.push((head, payload.0), bytes, waits());
        self.result(pushed, "blobs")
    }

    /// Queues a payload of at most 64 MiB after the earlier ones. Waits while the queue is full,
    /// except on a thread of the network, where a full queue closes the link.
    ///
    /// # Errors
    ///
    /// Returns the reason of a closed link.
    pub fn send_data(&self, tag: [u8; TAG_BYTES], payload: Payload) -> Result<(), Closed> {
        let bytes = payload.len();
        if bytes > PAYLOAD_MAX {
            return self.defect(format!("a payload of {bytes} bytes, over {PAYLOAD_MAX}"));
        }
        let pushed = self.0.0.payloads.push((DataHead { tag, bytes }, payload.0), bytes, waits());
        self.result(pushed, "payloads")
    }

    fn result(&self, pushed: Result<(), Overflow>, what: &str) -> Result<(), Closed> {
        match pushed {
            Ok(()) => {
                self.0.0.moderation.wake();
                Ok(())
            }
            Err(Overflow::Closed(closed)) => Err(closed),
            Err(Overflow::Full) => {
                self.defect(format!("more {what} than the queue of a link holds"))
            }
        }
    }

    /// Closes the link because of a mistake of this side.
    fn defect(&self, what: String) -> Result<(), Closed> {
        let why = CloseReason::Defect(what);
        let closed = Closed(why.to_string());
        self.0.0.stop(why);
        Err(closed)
    }

    /// Closes the link: the queues are sent first, for a bounded time, then the peer gets the
    /// sentence. Returns at once. The first close counts.
    pub fn close(&self, why: &str) {
        self.0.0.end(why);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.0.0.connection.close_reason().is_some()
    }

    /// Returns the statistics of the QUIC connection.
    pub fn stats(&self) -> LinkStats {
        LinkStats::of(&self.0.0.connection)
    }

    /// Returns the present address of the peer. A peer that has dialed may change its address
    /// later; QUIC makes sure that it is the same peer (RFC 9000, section 9).
    pub fn address(&self) -> SocketAddr {
        canonical(self.0.0.connection.remote_address())
    }

    /// Bytes of blobs that have arrived, also of incomplete ones.
    pub(crate) fn blob_bytes_received(&self) -> u64 {
        self.0.0.blob_bytes.load(Ordering::Relaxed)
    }
}

/// Returns true if the calling thread may wait for room: threads of the network make the room.
fn waits() -> bool {
    Handle::try_current().is_err()
}

/// Serves a link until it ends.
async fn serve(
    shared: Arc<Shared>,
    receiver: Arc<dyn Receiver>,
    control: Control,
    place: OwnedSemaphorePermit,
) {
    let (send, receive) = control;
    let mut writers = JoinSet::new();
    writers.spawn(writing::write_controls(shared.clone(), send));
    writers.spawn(writing::write_payloads(shared.clone()));
    writers.spawn(writing::write_blobs(shared.clone()));
    let mut readers = JoinSet::new();
    readers.spawn(reading::read_controls(shared.clone(), receiver.clone(), receive));
    readers.spawn(reading::read_streams(shared.clone(), receiver.clone()));
    let written = tokio::spawn(close_when_written(shared.clone(), writers));
    let probes = tokio::spawn(probe(shared.clone()));
    let end = shared.connection.closed().await;
    probes.abort();
    let reason = {
        let mut reason = shared.reason.lock();
        reason
            .get_or_insert_with(|| match (&end, shared.ending.get()) {
                (quinn::ConnectionError::LocallyClosed, Some(why)) => {
                    CloseReason::Here(why.clone())
                }
                _ => CloseReason::of(&end, shared.idle_timeout()),
            })
            .clone()
    };
    // Messages that have arrived before the end are still handed over. Only then do sends fail: the
    // messages may have the peer's reason for the end.
    while readers.join_next().await.is_some() {}
    shared.close_queues(&reason.to_string());
    // A task that panicked has closed the connection; nothing else is to be done.
    let _ = written.await;
    receiver.closed(&reason);
    drop(place);
}

/// Sends a probe every second in which nothing arrives: after a hole in the network, QUIC goes on
/// with the first packet that passes, and the controller of its window lets such probes through
/// ([`congestion`](super::congestion)).
async fn probe(shared: Arc<Shared>) {
    let mut received = 0;
    loop {
        tokio::time::sleep(SILENCE_MAX).await;
        let before = received;
        received = shared.connection.stats().udp_rx.datagrams;
        if received == before {
            // A queue that is full, or has ended, needs no probe.
            let _ = shared.controls.push(Bytes::new(), 0, false);
        }
    }
}

/// Closes the connection after the last byte of a link that ends was acknowledged.
async fn close_when_written(shared: Arc<Shared>, mut writers: JoinSet<()>) {
    while writers.join_next().await.is_some() {}
    if let Some(why) = shared.ending.get() {
        shared.stop(CloseReason::Here(why.clone()));
    }
}
