//! A driver's side of a team: hands values to its ring thread, takes sums and parameters from it,
//! votes, and learns the verdict.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::messages::{Said, ToDriver, ToRing};
use super::step::Others;
use crate::base::{ChunkId, Rank};
use crate::collective::{Collective, CollectiveKind, ShardLayout};
use crate::comm::{Closed, Mailbox, RecvError};
use crate::device::DeviceError;
use crate::exec::{Bank, Executor, Piece};
use crate::metrics::{Lane, Trace};
use crate::parallel::{Event, Vote};

/// How long a driver waits at its mailbox before it looks whether a place to read to is free again.
const SLOT_BEAT: Duration = Duration::from_millis(2);

/// Where gradients of other ranks and of this one are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddingPlace {
    /// On the host, as they pass by.
    Host,
    /// By a kernel: partial sums go up to the device and come back.
    Device,
}

impl std::fmt::Display for AddingPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Device => "device",
        })
    }
}

/// The lanes of a rank in a trace.
#[derive(Clone, Debug, Default)]
pub struct Lanes {
    pub driver: Lane,
    pub device: Lane,
    pub staging: Lane,
    pub ring: Lane,
}

impl Lanes {
    /// The lanes of a rank: those of its driver and its device, and with others also those of
    /// its transfers and its ring thread.
    pub fn of(trace: Option<&Trace>, rank: Rank, device: &str, with_others: bool) -> Self {
        let Some(trace) = trace else { return Self::default() };
        let lane = |name: &str| trace.lane(rank.0, device, name);
        let (driver, of_device) = (lane("driver"), lane("device"));
        if !with_others {
            return Self { driver, device: of_device, ..Self::default() };
        }
        Self { driver, device: of_device, staging: lane("staging"), ring: lane("ring") }
    }
}

/// What a rank's coordinator sees of its waiting.
#[derive(Debug, Default)]
pub struct Waiting {
    /// Whether it waits for others now: then its silence says nothing of its device.
    now: AtomicBool,
    /// What it was told so far.
    told: AtomicU64,
}

impl Waiting {
    /// Whether the rank waits for others now.
    pub fn is_now(&self) -> bool {
        self.now.load(Ordering::Relaxed)
    }

    /// How often the rank was told something.
    pub fn told(&self) -> u64 {
        self.told.load(Ordering::Relaxed)
    }
}

/// A rank's driver among the others.
pub struct Link {
    pub rank: Rank,
    pub layout: Arc<ShardLayout>,
    pub adding: AddingPlace,
    /// Where the final values of other ranks go.
    pub gathers: Bank,
    pub ring: Mailbox<ToRing>,
    pub inbox: Mailbox<ToDriver>,
    pub team: Mailbox<Said>,
    pub lanes: Lanes,
    pub waiting: Arc<Waiting>,
    /// What the program waits for next; nothing: the verdict.
    pub awaited: Option<Collective>,
    /// Chunks on their way from the device, in order, and when each was asked for.
    pub under_way: VecDeque<(CollectiveKind, ChunkId, Instant)>,
    /// Per chunk that the rank owns: (sum of squares, number not finite) of its gradient sums.
    pub sums: Vec<(f64, u64)>,
}

impl Link {
    /// Whether this rank's values of a chunk are to come to the host for a collective.
    fn is_read(&self, collective: Collective, chunk: ChunkId) -> bool {
        let owner = self.layout.chunk(chunk).owner;
        match (collective.kind, self.adding) {
            (CollectiveKind::AllGather, _) => owner == self.rank,
            (CollectiveKind::ReduceScatter, AddingPlace::Host) => true,
            (CollectiveKind::ReduceScatter, AddingPlace::Device) => {
                self.layout.is_initiator(chunk, self.rank)
            }
        }
    }

    /// Hands a piece that has come to the ring thread.
    fn hand_over(&mut self, piece: Piece) -> Result<(), Closed> {
        let Some((kind, chunk, since)) = self.under_way.pop_front() else { return Ok(()) };
        self.lanes.staging.follow(|| format!("read {}", self.layout.chunk(chunk)), since);
        self.ring.send(ToRing::Ready { kind, chunk, piece: Some(piece) })
    }

    /// Hands over what has come.
    fn hand_over_all(&mut self, device: &mut dyn Executor) -> Result<(), DeviceError> {
        while let Some(piece) = device.take_read(false)? {
            if self.hand_over(piece).is_err() {
                // The mailbox says so to whoever waits at it.
                break;
            }
        }
        Ok(())
    }

    /// Does what the ring thread or the team asks for; an event if it is one.
    fn take_in(
        &mut self,
        device: &mut dyn Executor,
        told: ToDriver,
    ) -> Result<Option<Event>, DeviceError> {
        match told {
            ToDriver::Reduced { chunk, sum, squares, not_finite } => {
                self.sums[chunk.index()] = (squares, not_finite);
                self.upload(device, Bank::Gradients, chunk, &sum)?;
            }
            ToDriver::Gathered { chunk, values } => {
                self.upload(device, self.gathers, chunk, &values)?;
            }
            ToDriver::Add { chunk, mut partial, reply } => {
                let found = self.layout.chunk(chunk);
                device.add(found.bucket, found.range.start, &mut partial)?;
                // The ring thread waits, unless the run is over.
                let _ = reply.send(partial);
            }
            ToDriver::Done(collective) => return Ok(Some(Event::Done(collective))),
            ToDriver::Announced(verdict) => return Ok(Some(Event::Verdict(verdict))),
        }
        Ok(None)
    }

    fn upload(
        &self,
        device: &mut dyn Executor,
        bank: Bank,
        chunk: ChunkId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        let found = self.layout.chunk(chunk);
        let _span = self.lanes.staging.span(|| format!("write {found}"));
        device.write_range(bank, found.bucket, found.range.start, values)
    }

    /// Waits for something from the ring thread or the team, for `at_most` if that is given.
    fn recv(
        &mut self,
        at_most: Option<Duration>,
        waited: &mut Duration,
    ) -> Result<Option<ToDriver>, Closed> {
        let started = Instant::now();
        let _span = self.lanes.driver.span(|| match self.awaited {
            Some(collective) => format!("wait for {collective}"),
            None => "wait for the verdict".into(),
        });
        self.waiting.now.store(true, Ordering::Relaxed);
        let received = match self.inbox.recv(at_most.map(|most| started + most)) {
            Ok(told) => Ok(Some(told)),
            Err(RecvError::Closed(closed)) => Err(closed),
            Err(RecvError::TimedOut) => Ok(None),
        };
        self.waiting.now.store(false, Ordering::Relaxed);
        self.waiting.told.fetch_add(u64::from(!matches!(received, Ok(None))), Ordering::Relaxed);
        *waited += started.elapsed();
        received
    }

    /// Waits for what comes first: a piece that the device owes the others, or else something
    /// from them.
    fn wait(
        &mut self,
        device: &mut dyn Executor,
        waited: &mut Duration,
    ) -> Result<Result<Option<ToDriver>, Closed>, DeviceError> {
        if self.under_way.is_empty() {
            device.flush()?;
            return Ok(self.recv(None, waited));
        }
        match device.take_read(true)? {
            Some(piece) => Ok(self.hand_over(piece).map(|()| None)),
            // Every place to read to is taken by what others have not used yet.
            None => Ok(self.recv(Some(SLOT_BEAT), waited)),
        }
    }
}

impl Others for Link {
    fn restart(&mut self) {
        self.under_way.clear();
        self.sums = vec![(0.0, 0); self.layout.chunks.len()];
    }

    fn start(
        &mut self,
        device: &mut dyn Executor,
        collective: Collective,
    ) -> Result<(), DeviceError> {
        let Collective { kind, bucket } = collective;
        let bank = match kind {
            CollectiveKind::ReduceScatter => Bank::Gradients,
            CollectiveKind::AllGather => Bank::Parameters,
        };
        for id in self.layout.consumption_order(bucket, self.rank) {
            let chunk = self.layout.chunk(id).clone();
            if self.is_read(collective, id) {
                self.under_way.push_back((kind, id, Instant::now()));
                device.begin_read(bank, chunk.bucket, chunk.range)?;
            } else if kind == CollectiveKind::ReduceScatter {
                // A closed mailbox shows at the next wait.
                let _ = self.ring.send(ToRing::Ready { kind, chunk: id, piece: None });
            }
        }
        self.hand_over_all(device)
    }

    fn vote(&mut self, mut vote: Vote) -> Result<(), DeviceError> {
        // In the order of chunks, so that the sum does not depend on who was faster.
        vote.sum_squares = self.sums.iter().map(|(squares, _)| squares).sum();
        vote.not_finite = self.sums.iter().map(|(_, bad)| bad).sum();
        // A closed mailbox shows at the next wait.
        let _ = self.team.send(Said::Vote(vote));
        Ok(())
    }

    fn event(
        &mut self,
        device: &mut dyn Executor,
        wait: bool,
        waited: &mut Duration,
    ) -> Result<Option<Event>, DeviceError> {
        loop {
            self.hand_over_all(device)?;
            let told = match self.inbox.try_recv() {
                Ok(None) if !wait => return Ok(None),
                Ok(None) => self.wait(device, waited)?,
                known => known,
            };
            match told {
                Err(Closed(why)) => return Ok(Some(Event::Fault(why))),
                Ok(Some(told)) => {
                    if let Some(event) = self.take_in(device, told)? {
                        return Ok(Some(event));
                    }
                }
                Ok(None) => {}
            }
        }
    }

    fn will_wait(&mut self, awaited: Option<Collective>) {
        self.awaited = awaited;
    }

    fn sum_gradients(&self) -> bool {
        true
    }

    fn lanes(&self) -> (&Lane, &Lane) {
        (&self.lanes.driver, &self.lanes.device)
    }
}
