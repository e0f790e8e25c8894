//! Device thread's side of a worker group: sends values to its ring thread, receives sums and
//! parameters from it, votes, and receives the verdict.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::messages::{CoordinatorMsg, DriverMsg, RingMsg};
use super::step::Peers;
use crate::base::{ChunkId, Position, Rank};
use crate::collective::{Collective, CollectiveKind, ShardLayout};
use crate::comm::{Closed, Mailbox, RecvError};
use crate::device::DeviceError;
use crate::exec::{BucketTensor, Executor, Readback};
use crate::metrics::{Trace, Track};
use crate::parallel::{Event, ReduceSite, Vote};

/// Longest wait of a device thread at its mailbox before it checks for a free readback slot.
const SLOT_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Tracks of one rank in a trace.
#[derive(Clone, Debug, Default)]
pub struct TraceTracks {
    pub driver: Track,
    pub device: Track,
    pub staging: Track,
    pub ring: Track,
}

impl TraceTracks {
    /// Creates the tracks of a rank: of its device thread and its device, and, if there are other
    /// ranks, also of its transfers and its ring thread.
    pub fn of(trace: Option<&Trace>, rank: Rank, device: &str, with_others: bool) -> Self {
        let Some(trace) = trace else { return Self::default() };
        let track = |name: &str| trace.track(rank.0, device, name);
        let (driver, of_device) = (track("driver"), track("device"));
        if !with_others {
            return Self { driver, device: of_device, ..Self::default() };
        }
        Self { driver, device: of_device, staging: track("staging"), ring: track("ring") }
    }
}

/// Wait state of a rank, shared with the coordinator.
#[derive(Debug, Default)]
pub struct WaitStatus {
    /// True while the rank waits for other ranks: a missing heartbeat then does not mean a hung
    /// device.
    is_waiting: AtomicBool,
    /// Number of messages received so far.
    received: AtomicU64,
}

impl WaitStatus {
    /// Returns true while the rank waits for other ranks.
    pub fn is_waiting(&self) -> bool {
        self.is_waiting.load(Ordering::Relaxed)
    }

    /// Returns the number of messages that the rank has received.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}

/// Peers of a rank in a worker group, connected through its ring thread.
pub struct RingPeers {
    /// Position of the rank in the group that holds the buckets of the layout.
    pub position: Position,
    pub layout: Arc<ShardLayout>,
    pub reduce_site: ReduceSite,
    /// Bucket tensor that receives the final values of chunks that other ranks own.
    pub gathers: BucketTensor,
    pub ring: Mailbox<RingMsg>,
    pub inbox: Mailbox<DriverMsg>,
    pub group: Mailbox<CoordinatorMsg>,
    pub tracks: TraceTracks,
    pub waiting: Arc<WaitStatus>,
    /// Collective that the program waits for next; `None`: the verdict.
    pub awaited: Option<Collective>,
    /// Readbacks in flight, in order, with the time at which each was started.
    pub in_flight: VecDeque<(CollectiveKind, ChunkId, Instant)>,
    /// Per chunk that the rank owns: (sum of squares, number of non-finite values) of its
    /// gradient sums.
    pub sums: Vec<(f64, u64)>,
}

impl RingPeers {
    /// Returns true if this rank must read the chunk back to host memory before the collective.
    fn is_read(&self, collective: Collective, chunk: ChunkId) -> bool {
        let owner = self.layout.chunk(chunk).owner;
        match (collective.kind, self.reduce_site) {
            (CollectiveKind::AllGather, _) => owner == self.position,
            (CollectiveKind::ReduceScatter, ReduceSite::Host) => true,
            (CollectiveKind::ReduceScatter, ReduceSite::Device) => {
                self.layout.is_initiator(chunk, self.position)
            }
        }
    }

    /// Sends a completed readback to the ring thread.
    fn forward_to_ring(&mut self, readback: Readback) -> Result<(), Closed> {
        let Some((kind, chunk, since)) = self.in_flight.pop_front() else { return Ok(()) };
        self.tracks.staging.record_since(|| format!("read {}", self.layout.chunk(chunk)), since);
        Ok(self.ring.send(RingMsg::Ready { kind, chunk, readback: Some(readback) })?)
    }

    /// Sends all completed readbacks to the ring thread.
    fn forward_all_to_ring(&mut self, device: &mut dyn Executor) -> Result<(), DeviceError> {
        while let Some(readback) = device.next_readback(false)? {
            if self.forward_to_ring(readback).is_err() {
                // The next receive on the mailbox reports that it is closed.
                break;
            }
        }
        Ok(())
    }

    /// Performs the request of the ring thread or the coordinator; returns an event if the
    /// message is one.
    fn handle_message(
        &mut self,
        device: &mut dyn Executor,
        message: DriverMsg,
    ) -> Result<Option<Event>, DeviceError> {
        match message {
            DriverMsg::Reduced { chunk, sum, squares, not_finite } => {
                self.sums[chunk.index()] = (squares, not_finite);
                self.upload(device, BucketTensor::Gradients, chunk, &sum)?;
            }
            DriverMsg::Gathered { chunk, values } => {
                self.upload(device, self.gathers, chunk, &values)?;
            }
            DriverMsg::Add { chunk, mut partial, reply } => {
                let found = self.layout.chunk(chunk);
                device.add(found.bucket, found.range.start, &mut partial)?;
                // The ring thread waits for this; the receiver is gone only if the run is over.
                let _ = reply.send(partial);
            }
            DriverMsg::Done(collective) => return Ok(Some(Event::Done(collective))),
            DriverMsg::Decided(verdict) => return Ok(Some(Event::Verdict(verdict))),
        }
        Ok(None)
    }

    fn upload(
        &self,
        device: &mut dyn Executor,
        bank: BucketTensor,
        chunk: ChunkId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        let found = self.layout.chunk(chunk);
        let _span = self.tracks.staging.span(|| format!("write {found}"));
        device.write_range(bank, found.bucket, found.range.start, values)
    }

    /// Waits for a message of the ring thread or the coordinator, for `at_most` if given.
    fn recv(
        &mut self,
        at_most: Option<Duration>,
        waited: &mut Duration,
    ) -> Result<Option<DriverMsg>, Closed> {
        let started = Instant::now();
        let _span = self.tracks.driver.span(|| match self.awaited {
            Some(collective) => format!("wait for {collective}"),
            None => "wait for the verdict".into(),
        });
        self.waiting.is_waiting.store(true, Ordering::Relaxed);
        let received = match self.inbox.recv(at_most.map(|most| started + most)) {
            Ok(message) => Ok(Some(message)),
            Err(RecvError::Closed(closed)) => Err(closed),
            Err(RecvError::TimedOut) => Ok(None),
        };
        self.waiting.is_waiting.store(false, Ordering::Relaxed);
        self.waiting
            .received
            .fetch_add(u64::from(!matches!(received, Ok(None))), Ordering::Relaxed);
        *waited += started.elapsed();
        received
    }

    /// Waits for the next readback in flight, which other ranks need; or else for a message.
    fn wait(
        &mut self,
        device: &mut dyn Executor,
        waited: &mut Duration,
    ) -> Result<Result<Option<DriverMsg>, Closed>, DeviceError> {
        if self.in_flight.is_empty() {
            device.flush()?;
            return Ok(self.recv(None, waited));
        }
        match device.next_readback(true)? {
            Some(readback) => Ok(self.forward_to_ring(readback).map(|()| None)),
            // Every readback slot holds values that the ring thread has not consumed yet.
            None => Ok(self.recv(Some(SLOT_POLL_INTERVAL), waited)),
        }
    }
}

impl Peers for RingPeers {
    fn restart(&mut self) {
        self.in_flight.clear();
        self.sums = vec![(0.0, 0); self.layout.chunks.len()];
    }

    fn start(
        &mut self,
        device: &mut dyn Executor,
        collective: Collective,
    ) -> Result<(), DeviceError> {
        let Collective { kind, bucket } = collective;
        let bank = match kind {
            CollectiveKind::ReduceScatter => BucketTensor::Gradients,
            CollectiveKind::AllGather => BucketTensor::Parameters,
        };
        for id in self.layout.consumption_order(bucket, self.position) {
            let chunk = self.layout.chunk(id).clone();
            if self.is_read(collective, id) {
                self.in_flight.push_back((kind, id, Instant::now()));
                device.start_readback(bank, chunk.bucket, chunk.range)?;
            } else if kind == CollectiveKind::ReduceScatter {
                // The next wait reports a closed mailbox.
                let _ = self.ring.send(RingMsg::Ready { kind, chunk: id, readback: None });
            }
        }
        self.forward_all_to_ring(device)
    }

    fn vote(&mut self, mut vote: Vote) -> Result<(), DeviceError> {
        // Summed in the order of chunks, so that the result does not depend on the timing of
        // ranks.
        vote.sum_squares = self.sums.iter().map(|(squares, _)| squares).sum();
        vote.not_finite = self.sums.iter().map(|(_, bad)| bad).sum();
        // The next wait reports a closed mailbox.
        let _ = self.group.send(CoordinatorMsg::Vote(vote));
        Ok(())
    }

    fn next_event(
        &mut self,
        device: &mut dyn Executor,
        wait: bool,
        waited: &mut Duration,
    ) -> Result<Option<Event>, DeviceError> {
        loop {
            self.forward_all_to_ring(device)?;
            let message = match self.inbox.try_recv() {
                Ok(None) if !wait => return Ok(None),
                Ok(None) => self.wait(device, waited)?,
                known => known,
            };
            match message {
                Err(Closed(why)) => return Ok(Some(Event::Fault(why))),
                Ok(Some(message)) => {
                    if let Some(event) = self.handle_message(device, message)? {
                        return Ok(Some(event));
                    }
                }
                Ok(None) => {}
            }
        }
    }

    fn set_awaited(&mut self, awaited: Option<Collective>) {
        self.awaited = awaited;
    }

    fn sum_gradients(&self) -> bool {
        true
    }

    fn tracks(&self) -> (&Track, &Track) {
        (&self.tracks.driver, &self.tracks.device)
    }
}
