//! Connection to another node: messages of any length, and frames of values, over one link.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use super::incoming_messages::IncomingMessages;
use super::link_rate::{self, ProbeArrivals, ProbeBuffer};
use crate::cluster::{ClusterMsg, ConnectionId};
use crate::{
    CONTROL_MAX, CloseReason, Link, LinkStats, PAYLOAD_MAX, Payload, PendingPeer, ReceiveBuffer,
    Receiver, TAG_BYTES,
};
use potluck_core::Lock;
use potluck_parallel::comm::{
    Carrier, Closed, FrameHeader, FrameValues, PacketLink, PacketValues, PooledBuffer,
};
use potluck_parallel::planner::links::LinkRate;

/// First byte of a control message: a message of `cluster`, a message of the layer above, or a
/// message in blobs.
const CLUSTER: u8 = 0;
const WHOLE: u8 = 1;
const IN_BLOBS: u8 = 2;

/// Maximum number of messages of the cluster that wait for its thread, per link: all links together
/// cannot fill its mailbox.
const CLUSTER_WAITING_MAX: usize = 512;

/// Event of a link, for the thread of the cluster.
pub enum LinkEvent {
    Message(ConnectionId, ClusterMsg, QueueSlot),
    Closed(ConnectionId, CloseReason),
}

/// Place of a message that waits for the cluster's thread; dropping it frees the place.
pub struct QueueSlot(Arc<AtomicUsize>);

impl QueueSlot {
    /// Takes a place, if there is one.
    fn take(taken: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Self(taken.clone());
        if taken.fetch_add(1, Ordering::Relaxed) < CLUSTER_WAITING_MAX { Some(place) } else { None }
    }
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Receiver of the messages of a peer; an error closes the link.
pub(crate) type MessageReceiver = Arc<dyn Fn(Vec<u8>) -> Result<(), String> + Send + Sync>;

/// Receiver of values from a peer. Called on the threads of the network, which must not wait for
/// long.
pub trait ValueReceiver: Send + Sync {
    /// Returns the place for values; an error closes the link.
    ///
    /// # Errors
    /// Returns the fault of the values.
    fn landing(
        &self,
        tag: &[u8; TAG_BYTES],
        bytes: usize,
    ) -> Result<Box<dyn ReceiveBuffer>, String>;

    /// Takes the end of the link: called once, after everything else.
    fn closed(&self);
}

/// Receiver of the frames of values for the ranks of this node.
pub trait ReceiveFrames: Send + Sync {
    /// Returns true for a frame of an earlier group of ranks.
    fn is_late(&self, header: &FrameHeader) -> bool;

    /// Returns a buffer for the `bytes` of values of a frame.
    ///
    /// # Errors
    /// Returns the fault of a frame for no rank of this process, or with a length that is
    /// impossible for its content.
    fn buffer(&self, header: &FrameHeader, bytes: usize) -> Result<PooledBuffer, String>;

    /// Puts a frame into the mailbox of its rank. A closed mailbox drops it.
    fn deliver(&self, header: FrameHeader, values: PooledBuffer);
}

/// Receiver of frames from other nodes, replaced with each group of ranks.
pub type FrameReceiver = Arc<Lock<Option<Arc<dyn ReceiveFrames>>>>;

/// Connection to another node.
pub trait NodeConnection: Send + Sync {
    /// Sends a message of any length. A long message waits while the queue of the link is full;
    /// short ones are sent at once, and are delivered after a long one in flight. Messages of a
    /// thread arrive in order.
    ///
    /// # Errors
    /// Returns the reason with which the connection is closed.
    fn send(&self, message: Vec<u8>) -> Result<(), Closed>;

    /// Returns the connection as one for values of ranks.
    fn carrier(&self) -> Arc<dyn Carrier>;

    /// Returns the received bytes of long messages, also of incomplete ones.
    fn arrived(&self) -> u64;

    /// Allows at least this many bytes of messages that the other node may be sending at the same
    /// time, 64 MiB without a call; more of them close the connection.
    fn allow_messages(&self, _bytes: usize) {}

    /// Measures for about `_time` the rate of the connection to the other node; `None` if there is
    /// no network in between, or if the rate is unknown.
    fn measure(&self, _time: Duration) -> Option<LinkRate> {
        None
    }

    /// Returns the bytes per second at which the values of the other node's last measurement have
    /// arrived; `None` if it has measured nothing since the last call, or if too little of it has
    /// arrived.
    fn take_arrival_rate(&self) -> Option<f64> {
        None
    }
}

/// Link to another node.
pub struct NodeLink {
    link: Link,
    incoming: Arc<LinkReceiver>,
    /// Number of the next blob; locked while a long message is queued, so that there is only one.
    next_blob: Lock<u64>,
}

/// Receiving side of a link.
struct LinkReceiver {
    connection: ConnectionId,
    events: Box<dyn Fn(LinkEvent) + Send + Sync>,
    frames: FrameReceiver,
    /// True once the peer is a node of the run. Before, only messages of the cluster are accepted:
    /// any peer that knows the code can open a link.
    is_of_run: AtomicBool,
    /// Messages that wait for the cluster's thread.
    cluster_waiting: Arc<AtomicUsize>,
    messages: Lock<IncomingMessages>,
    /// Set when the link is given to the layer above.
    receiver: OnceLock<MessageReceiver>,
    /// Receiver of all values instead of `frames`, once it is set.
    values: RwLock<SetReceiver>,
    probes: Arc<Lock<ProbeArrivals>>,
}

#[derive(Default)]
struct SetReceiver {
    receiver: Option<Arc<dyn ValueReceiver>>,
    is_closed: bool,
}

impl NodeLink {
    /// Accepts a peer. `events` is called on threads of the network.
    pub fn open(
        pending: PendingPeer,
        connection: ConnectionId,
        frames: FrameReceiver,
        events: Box<dyn Fn(LinkEvent) + Send + Sync>,
    ) -> Self {
        let incoming = Arc::new(LinkReceiver::new(connection, frames, events));
        Self { link: pending.open(incoming.clone()), incoming, next_blob: Lock::new(0) }
    }

    /// Accepts messages and values of the run from now on.
    pub fn admit(&self) {
        self.incoming.is_of_run.store(true, Ordering::SeqCst);
    }

    /// Sets the receiver of messages, which first gets the messages that have arrived already. If
    /// it refuses one of them, the link is closed, as for a later message.
    pub fn receive_with(&self, receiver: MessageReceiver) {
        // Set once, by the thread that starts the run.
        let _ = self.incoming.receiver.set(receiver);
        let delivered = self.incoming.deliver(&mut self.incoming.messages.lock());
        if let Err(why) = delivered {
            self.link.close(&why);
        }
    }

    /// Sets the receiver of all later values, replacing the previous one; a link that has ended is
    /// reported to it at once.
    pub fn receive_values_with(&self, receiver: Arc<dyn ValueReceiver>) {
        self.incoming.set_values(receiver);
    }

    /// Sends bytes to the peer's receiver of values; waits while the queue of the link is full.
    ///
    /// # Errors
    /// Returns the reason of a closed link.
    pub fn send_values(&self, tag: [u8; TAG_BYTES], values: Payload) -> Result<(), Closed> {
        self.link.send_data(tag, values)
    }

    /// Returns the link as one for the packets of a process group.
    pub fn packets(&self) -> Arc<dyn PacketLink> {
        Arc::new(LinkCarrier(self.link.clone()))
    }

    /// Sends a message of the cluster.
    ///
    /// # Errors
    /// Returns the reason with which the link is closed.
    pub(crate) fn send_cluster(&self, message: &ClusterMsg) -> Result<(), Closed> {
        let encoded = message.encode().map_err(|why| Closed(why.to_string()))?;
        self.link.send_control(tagged(CLUSTER, &encoded))
    }

    /// Returns the statistics of the link.
    pub fn stats(&self) -> LinkStats {
        self.link.stats()
    }

    /// Returns the present address of the peer.
    pub fn address(&self) -> SocketAddr {
        self.link.address()
    }

    /// Closes the link after its queues are sent.
    pub fn close(&self, why: &str) {
        self.link.close(why);
    }
}

impl NodeConnection for NodeLink {
    fn send(&self, message: Vec<u8>) -> Result<(), Closed> {
        if message.len() < CONTROL_MAX {
            return self.link.send_control(tagged(WHOLE, &message));
        }
        let mut next = self.next_blob.lock();
        let first = *next;
        let count = message.len().div_ceil(PAYLOAD_MAX) as u64;
        *next += count;
        let head = [first.to_le_bytes(), count.to_le_bytes()].concat();
        self.link.send_control(tagged(IN_BLOBS, &head))?;
        if count == 1 {
            return self.link.send_blob(first, Payload::from(message));
        }
        for (id, part) in (first..).zip(message.chunks(PAYLOAD_MAX)) {
            self.link.send_blob(id, Payload::from(part.to_vec()))?;
        }
        Ok(())
    }

    fn carrier(&self) -> Arc<dyn Carrier> {
        Arc::new(LinkCarrier(self.link.clone()))
    }

    fn arrived(&self) -> u64 {
        self.link.blob_bytes_received()
    }

    fn allow_messages(&self, bytes: usize) {
        self.incoming.messages.lock().allow(bytes);
    }

    fn measure(&self, time: Duration) -> Option<LinkRate> {
        link_rate::measure(&self.link, time)
    }

    fn take_arrival_rate(&self) -> Option<f64> {
        link_rate::take_arrival_rate(&self.incoming.probes)
    }
}

fn tagged(tag: u8, message: &[u8]) -> Vec<u8> {
    let mut tagged = Vec::with_capacity(message.len() + 1);
    tagged.push(tag);
    tagged.extend_from_slice(message);
    tagged
}

/// Link as a connection for values of ranks.
struct LinkCarrier(Link);

impl Carrier for LinkCarrier {
    fn send(&self, header: FrameHeader, values: FrameValues) -> Result<(), Closed> {
        // The end of a link is reported to the cluster, which names the lost node to all. An error
        // of this rank would often come first, and this node would be named instead.
        let _ = self.0.send_data(header.encode(), Payload::new(values));
        Ok(())
    }
}

impl PacketLink for LinkCarrier {
    fn send(&self, header: [u8; TAG_BYTES], values: PacketValues) -> Result<(), Closed> {
        self.0.send_data(header, Payload::new(values))
    }
}

impl LinkReceiver {
    fn new(
        connection: ConnectionId,
        frames: FrameReceiver,
        events: Box<dyn Fn(LinkEvent) + Send + Sync>,
    ) -> Self {
        Self {
            connection,
            events,
            frames,
            is_of_run: AtomicBool::new(false),
            cluster_waiting: Arc::default(),
            messages: Lock::default(),
            receiver: OnceLock::new(),
            values: RwLock::default(),
            probes: Arc::default(),
        }
    }

    /// Returns an error if the peer is no node of the run.
    fn check_is_of_run(&self, what: &str) -> Result<(), String> {
        if !self.is_of_run.load(Ordering::SeqCst) {
            return Err(format!("{what} of a peer that is no node of the run"));
        }
        Ok(())
    }

    fn values(&self) -> Option<Arc<dyn ValueReceiver>> {
        self.values.read().unwrap_or_else(PoisonError::into_inner).receiver.clone()
    }

    fn set_values(&self, receiver: Arc<dyn ValueReceiver>) {
        // Only whole receivers are moved under the lock.
        let mut values = self.values.write().unwrap_or_else(PoisonError::into_inner);
        values.receiver = Some(receiver.clone());
        let is_closed = values.is_closed;
        drop(values);
        if is_closed {
            receiver.closed();
        }
    }

    /// Hands all complete messages at the front to the receiver.
    fn deliver(&self, messages: &mut IncomingMessages) -> Result<(), String> {
        let Some(receiver) = self.receiver.get() else { return Ok(()) };
        while let Some(message) = messages.next() {
            receiver(message)?;
        }
        Ok(())
    }

    /// Adds a message, or the announcement of one, and delivers what is complete.
    fn wait(
        &self,
        add: impl FnOnce(&mut IncomingMessages) -> Result<(), String>,
    ) -> Result<(), String> {
        self.check_is_of_run("a message")?;
        let mut messages = self.messages.lock();
        add(&mut messages)?;
        self.deliver(&mut messages)
    }
}

impl Receiver for LinkReceiver {
    fn control(&self, message: Vec<u8>) -> Result<(), String> {
        match message.split_first() {
            Some((&CLUSTER, rest)) => {
                let message = ClusterMsg::decode(rest).map_err(|why| why.to_string())?;
                let place = QueueSlot::take(&self.cluster_waiting)
                    .ok_or("more messages of the cluster than its thread can process")?;
                (self.events)(LinkEvent::Message(self.connection, message, place));
                Ok(())
            }
            Some((&WHOLE, rest)) => self.wait(|messages| messages.add(rest.to_vec())),
            Some((&IN_BLOBS, rest)) => {
                let ([first, count], []) = rest.as_chunks() else {
                    return Err("an announcement of blobs of another length".into());
                };
                let first = u64::from_le_bytes(*first);
                let count = u64::from_le_bytes(*count);
                // A message that cannot be is the fault of any peer.
                self.messages.lock().check(first, count)?;
                self.wait(|messages| messages.announce(first, count))
            }
            _ => Err("a control message of no kind".into()),
        }
    }

    fn blob_begins(&self, id: u64, bytes: usize) -> Result<(), String> {
        self.check_is_of_run("a blob")?;
        self.messages.lock().begin_blob(id, bytes)
    }

    fn blob(&self, id: u64, bytes: Vec<u8>) -> Result<(), String> {
        let mut messages = self.messages.lock();
        messages.end_blob(id, bytes);
        self.deliver(&mut messages)
    }

    fn data(&self, tag: &[u8; TAG_BYTES], bytes: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
        self.check_is_of_run("a frame")?;
        if link_rate::is_probe(tag) {
            if bytes > link_rate::BYTES_MAX {
                return Err(format!("values of {bytes} bytes to measure a link"));
            }
            let arrivals = Arc::clone(&self.probes);
            return Ok(Box::new(ProbeBuffer { values: vec![0; bytes], arrivals }));
        }
        if let Some(values) = self.values() {
            return values.landing(tag, bytes);
        }
        let header = FrameHeader::decode(tag).ok_or("a frame without a header")?;
        let frames = self.frames.lock().clone();
        Ok(match frames {
            Some(frames) if !frames.is_late(&header) => {
                let buffer = frames.buffer(&header, bytes)?;
                Box::new(FrameBuffer { header, buffer, frames })
            }
            // Values of a group of ranks that is over.
            _ => Box::new(UnusedValues(vec![0; bytes])),
        })
    }

    fn closed(&self, why: &CloseReason) {
        let mut values = self.values.write().unwrap_or_else(PoisonError::into_inner);
        values.is_closed = true;
        let receiver = values.receiver.clone();
        drop(values);
        if let Some(receiver) = receiver {
            receiver.closed();
        }
        (self.events)(LinkEvent::Closed(self.connection, why.clone()));
    }
}

/// Place of the values of a frame.
struct FrameBuffer {
    header: FrameHeader,
    buffer: PooledBuffer,
    frames: Arc<dyn ReceiveFrames>,
}

impl ReceiveBuffer for FrameBuffer {
    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.buffer)
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        let Self { header, buffer, frames } = *self;
        frames.deliver(header, buffer);
        Ok(())
    }
}

/// Place for values that are not awaited, or no longer.
pub(super) struct UnusedValues(pub Vec<u8>);

impl ReceiveBuffer for UnusedValues {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::incoming_messages::WAITING_MAX;
    use potluck_core::rng::Key;
    use potluck_core::{ChunkId, Generation, Position, Rank, Round};
    use potluck_parallel::collective::CollectiveKind;
    use potluck_parallel::comm::FrameContent;

    type Kept = Arc<Lock<Vec<LinkEvent>>>;

    /// Receiving side of a link, with the events that it has reported.
    fn incoming() -> (LinkReceiver, Kept) {
        let kept = Kept::default();
        let keeping = kept.clone();
        let events = move |event| keeping.lock().push(event);
        (LinkReceiver::new(ConnectionId(3), FrameReceiver::default(), Box::new(events)), kept)
    }

    fn start() -> Vec<u8> {
        tagged(CLUSTER, &ClusterMsg::Start { generation: Generation(1) }.encode().unwrap())
    }

    fn in_blobs(first: u64, count: u64) -> Vec<u8> {
        tagged(IN_BLOBS, &[first.to_le_bytes(), count.to_le_bytes()].concat())
    }

    #[test]
    fn only_a_node_of_the_run_sends_messages_and_values() {
        let (incoming, events) = incoming();
        let (kind, chunk, from) = (CollectiveKind::AllGather, ChunkId(0), Position(1));
        let content = FrameContent::Chunk { kind, chunk, from };
        let round = Round { generation: 1, step: 1, settles: false };
        let tag = FrameHeader { to: Rank(0), round, content }.encode();
        let tries = |incoming: &LinkReceiver| {
            [
                incoming.control(tagged(WHOLE, b"hello")),
                incoming.control(in_blobs(0, 1)),
                incoming.blob_begins(0, 100),
                incoming.data(&tag, 64).map(|_| ()),
            ]
        };
        for (what, refused) in ["message", "message", "blob", "frame"].iter().zip(tries(&incoming))
        {
            let why = format!("a {what} of a peer that is no node of the run");
            assert_eq!(refused, Err(why));
        }
        assert_eq!(incoming.control(start()), Ok(()));
        assert_eq!(events.lock().len(), 1);
        incoming.is_of_run.store(true, Ordering::SeqCst);
        assert_eq!(tries(&incoming), [const { Ok(()) }; 4]);
    }

    #[test]
    fn messages_of_the_cluster_that_wait_are_bounded() {
        let (incoming, events) = incoming();
        for _ in 0..CLUSTER_WAITING_MAX {
            assert_eq!(incoming.control(start()), Ok(()));
        }
        let why = incoming.control(start()).unwrap_err();
        assert!(why.contains("more messages of the cluster"), "{why}");
        drop(events.lock().pop());
        assert_eq!(incoming.control(start()), Ok(()));
        assert!(incoming.control(start()).is_err());
    }

    /// Receiver that counts the ends of its link.
    #[derive(Default)]
    struct CountsEnds(AtomicUsize);

    impl ValueReceiver for CountsEnds {
        fn landing(&self, _: &[u8; TAG_BYTES], _: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
            Err("nothing is due".into())
        }

        fn closed(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_end_of_a_link_reaches_a_receiver_that_was_set_before_or_after_it() {
        let (incoming, events) = incoming();
        let receivers = [(); 2].map(|()| Arc::new(CountsEnds::default()));
        incoming.set_values(receivers[0].clone());
        Receiver::closed(&incoming, &CloseReason::Here("it is over".into()));
        incoming.set_values(receivers[1].clone());
        assert_eq!(receivers.map(|receiver| receiver.0.load(Ordering::Relaxed)), [1, 1]);
        assert!(matches!(events.lock()[..], [LinkEvent::Closed(ConnectionId(3), _)]));
    }

    /// Random control messages, half of them like announcements of blobs.
    #[test]
    fn random_control_messages_are_refused_or_wait_within_their_bounds() {
        let (mut received, mut refused) = (incoming(), 0);
        for round in 0..100_000u32 {
            let word = |counter: u32| Key::new(9).words([round, counter])[0];
            let mut message = match word(0) % 4 {
                0 | 1 => in_blobs(u64::from(word(1)) << (word(2) % 33), u64::from(word(3) % 300)),
                2 => start(),
                _ => tagged(WHOLE, &word(1).to_le_bytes()),
            };
            let at = word(4) as usize % message.len();
            match word(5) % 4 {
                0 => message[at] = word(6) as u8,
                1 => message.truncate(at),
                2 => message.insert(at, word(6) as u8),
                _ => {}
            }
            received.0.is_of_run.store(true, Ordering::SeqCst);
            received.1.lock().clear();
            if received.0.control(message).is_err() {
                refused += 1;
            }
            let waiting = received.0.messages.lock().waiting();
            assert!(waiting <= WAITING_MAX, "{waiting}");
            if waiting == WAITING_MAX {
                received = incoming();
            }
        }
        assert!((10_000..90_000).contains(&refused), "{refused} are refused");
    }
}
