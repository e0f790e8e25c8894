//! Ring thread of a rank: receives the rank's own values and the messages of other ranks, adds
//! them, and sends the results on. It waits on one mailbox, or for the device thread to add a
//! chunk, and touches no device except to read mapped values.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::messages::{DriverMsg, RingMsg};
use crate::base::{BucketId, ChunkId, Position, Rank};
use crate::collective::{Chunk, Collective, CollectiveKind, RankGroup, ShardLayout};
use crate::comm::add::add_assign;
use crate::comm::{
    BufferPool, Closed, ExchangeDriver, ExchangeIo, Mailbox, Message, PooledBuffer, RecvError,
    SharedBuffer,
};
use crate::exec::Readback;
use crate::kernels::ops::norm;
use crate::metrics::Track;

/// Interval at which a ring thread that waits for its device checks for the end of the run.
const ABORT_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Send window: partial sums that a rank begins beyond those it has received. Enough to hide one
/// hop, few enough to stay in a cache.
const WINDOW: usize = 4;

/// Mailboxes and settings of a ring thread.
pub struct RingChannels {
    pub rank: Rank,
    /// Ranks that hold the buckets of the layout, and this rank's position among them.
    pub members: RankGroup,
    pub position: Position,
    pub layout: Arc<ShardLayout>,
    pub inbox: Mailbox<RingMsg>,
    /// Mailboxes of all ranks' ring threads, by rank.
    pub rings: Arc<[Mailbox<RingMsg>]>,
    pub driver: Mailbox<DriverMsg>,
    pub track: Track,
    /// True if sums are sent to all ranks as they are (all-reduce), without an update in between.
    pub is_chained: bool,
}

/// Starts a ring thread; it ends when its mailbox is closed.
pub fn start(channels: RingChannels) -> std::io::Result<thread::JoinHandle<()>> {
    let name = format!("ring of {}", channels.rank);
    let ending = CloseOnDrop { driver: channels.driver.clone(), why: String::new() };
    thread::Builder::new().name(name).spawn(move || {
        let mut ending = ending;
        ending.why = run(channels).0;
    })
}

/// Guard that closes the device thread's mailbox when the ring thread ends for any reason;
/// without it the device thread would wait forever.
struct CloseOnDrop {
    driver: Mailbox<DriverMsg>,
    why: String,
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        match thread::panicking() {
            true => self.driver.close("its ring thread panicked, which is a defect of potluck"),
            false => self.driver.close(&self.why),
        }
    }
}

fn run(channels: RingChannels) -> Closed {
    let inbox = channels.inbox.clone();
    let mut exchange = ExchangeDriver::new(channels.layout.clone(), channels.position, WINDOW);
    if channels.is_chained {
        exchange = exchange.into_all_reduce();
    }
    let mut io = RingIo { channels, readbacks: HashMap::new(), pool: exchange.pool().clone() };
    loop {
        let message = match inbox.recv(None) {
            Ok(message) => message,
            Err(RecvError::Closed(closed)) => return closed,
            Err(RecvError::TimedOut) => continue,
        };
        let handled = match message {
            RingMsg::Restart => {
                io.readbacks.clear();
                exchange.restart();
                exchange.start(&mut io)
            }
            RingMsg::Ready { kind, chunk, readback } => {
                io.readbacks.extend(readback.map(|readback| (chunk, readback)));
                exchange.on_local_ready(kind, chunk, &mut io)
            }
            RingMsg::Message(message) => exchange.on_message(message, &mut io),
        };
        if let Err(closed) = handled {
            return closed;
        }
    }
}

/// Local side of the exchange on a rank.
struct RingIo {
    channels: RingChannels,
    /// Own values that were read back and not consumed yet.
    readbacks: HashMap<ChunkId, Readback>,
    pool: BufferPool<f32>,
}

impl RingIo {
    fn send_to_driver(&self, message: DriverMsg) -> Result<(), Closed> {
        Ok(self.channels.driver.send(message)?)
    }

    /// Copies the rank's own values of a chunk to `into`.
    fn put(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        into: &mut [f32],
        what: &str,
    ) -> Result<(), Closed> {
        let missing = || Closed(format!("the values of {id} never came, a defect of potluck"));
        let readback = self.readbacks.remove(&id).ok_or_else(missing)?;
        let _span = self.channels.track.span(|| format!("{what} {chunk}"));
        into.copy_from_slice(readback.values());
        Ok(())
    }
}

impl ExchangeIo for RingIo {
    type Error = Closed;

    fn read_local(&mut self, id: ChunkId, chunk: &Chunk, into: &mut [f32]) -> Result<(), Closed> {
        self.put(id, chunk, into, "begin")
    }

    fn add_local(&mut self, id: ChunkId, chunk: &Chunk, partial: &mut [f32]) -> Result<(), Closed> {
        let _span = self.channels.track.span(|| format!("add {chunk}"));
        if let Some(readback) = self.readbacks.remove(&id) {
            add_assign(partial, readback.values());
            return Ok(());
        }
        let (reply, sum) = mpsc::sync_channel(1);
        self.send_to_driver(DriverMsg::Add { chunk: id, partial: partial.to_vec(), reply })?;
        loop {
            match sum.recv_timeout(ABORT_POLL_INTERVAL) {
                Ok(sum) => {
                    partial.copy_from_slice(&sum);
                    return Ok(());
                }
                // The device thread drops the request when its step ends early; a hung one keeps
                // it.
                Err(RecvTimeoutError::Disconnected) => {
                    let why = "the step ended before a device had added its gradients";
                    return Err(Closed(why.into()));
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.channels.inbox.closed().map_or(Ok(()), Err)?;
                }
            }
        }
    }

    fn on_reduced(
        &mut self,
        chunk: ChunkId,
        _: &Chunk,
        sum: PooledBuffer,
    ) -> Result<SharedBuffer, Closed> {
        // An all-reduce has no vote that needs these sums.
        let is_voted = !self.channels.is_chained;
        let (squares, not_finite) = if is_voted { norm::sum_of_squares(&sum) } else { (0.0, 0) };
        let sum = sum.share();
        self.send_to_driver(DriverMsg::Reduced { chunk, sum: sum.clone(), squares, not_finite })?;
        Ok(sum)
    }

    fn read_final(&mut self, id: ChunkId, chunk: &Chunk) -> Result<SharedBuffer, Closed> {
        let mut values = self.pool.take(chunk.range.len());
        self.put(id, chunk, &mut values, "send final values")?;
        Ok(values.share())
    }

    fn on_gathered(
        &mut self,
        chunk: ChunkId,
        _: &Chunk,
        values: &SharedBuffer,
    ) -> Result<(), Closed> {
        self.send_to_driver(DriverMsg::Gathered { chunk, values: values.clone() })
    }

    fn send(&mut self, to: Position, message: Message) -> Result<(), Closed> {
        let to = self.channels.members.rank(to);
        Ok(self.channels.rings[to.index()].send(RingMsg::Message(message))?)
    }

    fn on_done(&mut self, kind: CollectiveKind, bucket: BucketId) -> Result<(), Closed> {
        self.send_to_driver(DriverMsg::Done(Collective { kind, bucket }))
    }
}
