//! Device thread's side of a worker group: performs the transfers of its rank, votes, and
//! receives the verdict.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::defect::{defect, refused};
use super::messages::{CoordinatorMsg, DriverMsg, RankRingMsg};
use super::ring_work::RingWork;
use super::step::Peers;
use super::trace_tracks::TraceTracks;
use potluck_core::{ChunkId, EdgeId, EdgePiece, ReductionId, Round};
use potluck_graph::Region;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{BucketTensor, Executor, Readback};
use potluck_parallel::collective::{Collective, ShardLayout};
use potluck_parallel::comm::{Closed, Mailbox, RecvError, RingMsg, SendError, SharedBuffer};
use potluck_parallel::coordinator::RankActivity;
use potluck_parallel::transfers::{
    CompletedRead, LocalTransfer, PeerTransfers, Read, Response, SLOT_POLL_INTERVAL, WaitFor,
};
use potluck_parallel::{Event, GroupReduction, Token, Vote};

/// Wait state of a rank, shared with the coordinator.
#[derive(Debug, Default)]
pub(crate) struct WaitStatus {
    is_waiting: AtomicBool,
    received: AtomicU64,
}

impl WaitStatus {
    /// Returns the activity of the rank with this number of heartbeats of its device.
    pub fn activity(&self, heartbeats: u64) -> RankActivity {
        let is_waiting = self.is_waiting.load(Ordering::Relaxed);
        RankActivity { heartbeats, received: self.received.load(Ordering::Relaxed), is_waiting }
    }
}

/// Peers of a rank in a worker group, connected through its ring thread.
pub(crate) struct RingPeers {
    pub layout: Arc<ShardLayout>,
    pub transfers: PeerTransfers,
    pub ring: Mailbox<RankRingMsg>,
    pub inbox: Mailbox<DriverMsg>,
    pub coordinator: Mailbox<CoordinatorMsg>,
    pub tracks: TraceTracks,
    pub waiting: Arc<WaitStatus>,
    /// Start times of the readbacks in flight, in order.
    pub(crate) read_starts: VecDeque<Instant>,
    /// Pieces of tensors that have arrived before their instruction to receive.
    pub kept: HashMap<EdgePiece, SharedBuffer>,
    /// Events to return before all others.
    pub due: VecDeque<Event>,
    /// Working time of the ring thread.
    pub(crate) ring_work: RingWork,
}

impl RingPeers {
    /// Sends a completed readback to the ring thread, or drops it if its step was discarded.
    fn forward(&mut self, device: &dyn Executor, readback: Readback) -> Result<(), DeviceError> {
        let started = self.read_starts.pop_front();
        match self.transfers.complete(&readback.place).map_err(|e| defect(device, &e))? {
            CompletedRead::Forward(read) => {
                if let Some(started) = started {
                    self.tracks.staging.record_since(
                        || format!("read {}", self.layout.chunk(read.chunk)),
                        started,
                    );
                }
                self.ready(device, read, Some(readback))
            }
            CompletedRead::Send(piece) => {
                if let Some(started) = started {
                    self.tracks.staging.record_since(|| format!("read {piece}"), started);
                }
                let round = self.transfers.round();
                self.send_to_ring(device, RingMsg::Send { round, piece, readback })
            }
            CompletedRead::Discard => Ok(()),
        }
    }

    fn ready(
        &self,
        device: &dyn Executor,
        read: Read,
        readback: Option<Readback>,
    ) -> Result<(), DeviceError> {
        let Read { round, kind, chunk } = read;
        self.send_to_ring(device, RingMsg::Ready { round, kind, chunk, readback })
    }

    fn send_to_ring(&self, device: &dyn Executor, message: RankRingMsg) -> Result<(), DeviceError> {
        match self.ring.send(message) {
            // The next receive from this rank's mailbox reports the reason.
            Ok(()) | Err(SendError::Closed(_)) => Ok(()),
            Err(SendError::Full { items_max }) => {
                Err(refused(device, &format!("a mailbox for {items_max} messages is full")))
            }
        }
    }

    /// Sends all completed readbacks to the ring thread.
    fn forward_all(&mut self, device: &mut dyn Executor) -> Result<(), DeviceError> {
        while let Some(readback) = device.next_readback(false)? {
            self.forward(device, readback)?;
        }
        Ok(())
    }

    /// Handles a message of the ring thread or the coordinator; returns its event for the
    /// interpreter, if it has one.
    fn handle(
        &mut self,
        device: &mut dyn Executor,
        message: DriverMsg,
    ) -> Result<Option<Event>, DeviceError> {
        match self.transfers.handle(message).map_err(|error| defect(device, &error))? {
            Response::Write { tensor, chunk, values } => {
                self.write(device, tensor, chunk, &values)?;
            }
            Response::Add { chunk, mut partial } => {
                let found = self.layout.chunk(chunk);
                device.add(found.bucket, found.range.start, &mut partial)?;
                self.send_to_ring(
                    device,
                    RingMsg::Added { round: self.transfers.round(), chunk, partial },
                )?;
            }
            Response::WritePiece { piece, values, event } => {
                self.write_piece(device, &piece, &values)?;
                return Ok(event);
            }
            Response::Keep { piece, values } => drop(self.kept.insert(piece, values)),
            Response::Reduce { piece, values, reduction } => {
                let micro_batch = piece.micro_batch;
                self.kept.insert(piece, values);
                return Ok(Some(self.reduce(device, reduction, micro_batch)?));
            }
            Response::Event(event) => return Ok(Some(event)),
            Response::None => {}
        }
        Ok(None)
    }

    fn write(
        &self,
        device: &mut dyn Executor,
        tensor: BucketTensor,
        chunk: ChunkId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        let found = self.layout.chunk(chunk);
        let _span = self.tracks.staging.span(|| format!("write {found}"));
        device.write_place(&Region::bucket(tensor, found.bucket, found.range.clone()), values)
    }

    fn write_piece(
        &self,
        device: &mut dyn Executor,
        piece: &EdgePiece,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        let _span = self.tracks.staging.span(|| format!("write {piece}"));
        device.write_place(&self.transfers.edges().place(piece), values)
    }

    /// Reduces the parts of an all-reduce, which have all arrived, and writes the result. Returns
    /// the event of its end.
    fn reduce(
        &mut self,
        device: &mut dyn Executor,
        reduction: ReductionId,
        micro_batch: usize,
    ) -> Result<Event, DeviceError> {
        let labels = self.tracks.labels.clone();
        let name = move || format!("{} of micro-batch {micro_batch}", labels.reduction(reduction));
        let _span = self.tracks.driver.span(|| format!("reduce {}", name()));
        let parts = self.transfers.parts(reduction, micro_batch);
        let edges = self.transfers.edges();
        let own = self.transfers.own_part(reduction);
        let GroupReduction { kind, ref results, .. } = *edges.reduction(reduction);
        let replaced = |result: usize, range| Region::Tensor {
            tensor: results[own][result],
            micro_batch,
            range,
        };
        if kind.tensors() == 1 {
            // By pieces, so that no sum of a whole tensor is in host memory.
            for (nth, piece) in parts[own][0].iter().enumerate() {
                let mut values = Vec::with_capacity(parts.len());
                for of_rank in &parts {
                    values.push(vec![taken(device, &mut self.kept, of_rank[0].get(nth))?]);
                }
                let [sum] = &kind.reduce(&values)[..] else { continue };
                let mut start = kind.expansion() * piece.range.start;
                for values in sum.chunks(edges.piece_max) {
                    device.write_place(&replaced(0, start..start + values.len()), values)?;
                    start += values.len();
                }
            }
        } else {
            let mut values = Vec::with_capacity(parts.len());
            for of_rank in &parts {
                let mut tensors = Vec::with_capacity(of_rank.len());
                for pieces in of_rank {
                    let mut tensor = Vec::new();
                    for piece in pieces {
                        tensor.extend_from_slice(&taken(device, &mut self.kept, Some(piece))?);
                    }
                    tensors.push(tensor);
                }
                values.push(tensors);
            }
            for (result, values) in kind.reduce(&values).iter().enumerate() {
                device.write_place(&replaced(result, 0..values.len()), values)?;
            }
        }
        Ok(Event::Done(Token::all_reduce(reduction, micro_batch)))
    }

    /// Waits for a message of the ring thread or the coordinator, for `at_most` if given.
    fn recv(
        &mut self,
        at_most: Option<Duration>,
        awaited: Option<Token>,
        waited: &mut Duration,
    ) -> Result<Option<DriverMsg>, Closed> {
        let started = Instant::now();
        let _span = self.tracks.driver.span(|| match awaited {
            Some(token) => format!("wait for {}", self.tracks.labels.awaited(&token)),
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

    /// Waits for the next readback in flight or else for a message.
    fn wait(
        &mut self,
        device: &mut dyn Executor,
        awaited: Option<Token>,
        waited: &mut Duration,
    ) -> Result<Result<Option<DriverMsg>, Closed>, DeviceError> {
        if self.transfers.wait_for() == WaitFor::Message {
            device.flush()?;
            return Ok(self.recv(None, awaited, waited));
        }
        match device.next_readback(true)? {
            Some(readback) => {
                self.forward(device, readback)?;
                Ok(Ok(None))
            }
            // All readback slots have values that the ring thread has not consumed yet.
            None => Ok(self.recv(Some(Duration::from_nanos(SLOT_POLL_INTERVAL)), awaited, waited)),
        }
    }
}

/// Takes the kept values of a piece of an all-reduce.
fn taken(
    device: &dyn Executor,
    kept: &mut HashMap<EdgePiece, SharedBuffer>,
    piece: Option<&EdgePiece>,
) -> Result<SharedBuffer, DeviceError> {
    let values = piece.and_then(|piece| kept.remove(piece));
    values.ok_or_else(|| refused(device, "a part of an all-reduce was not kept"))
}

impl Peers for RingPeers {
    fn restart(&mut self, round: Round) {
        self.transfers.restart(round);
        self.kept.clear();
        self.due.clear();
    }

    fn send(
        &mut self,
        device: &mut dyn Executor,
        edge: EdgeId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let TraceTracks { driver, labels, .. } = &self.tracks;
        let _span =
            driver.span(|| format!("send {} of micro-batch {micro_batch}", labels.edge(edge)));
        for piece in self.transfers.send(edge, micro_batch, rows) {
            self.read_starts.push_back(Instant::now());
            device.start_readback(self.transfers.edges().place(&piece))?;
        }
        self.forward_all(device)
    }

    fn receive(
        &mut self,
        device: &mut dyn Executor,
        edge: EdgeId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let TraceTracks { driver, labels, .. } = &self.tracks;
        let _span =
            driver.span(|| format!("receive {} of micro-batch {micro_batch}", labels.edge(edge)));
        let received = self.transfers.receive(edge, micro_batch, rows);
        let (pieces, event) = received.map_err(|error| defect(device, &error))?;
        for piece in pieces {
            if let Some(values) = self.kept.remove(&piece) {
                self.write_piece(device, &piece, &values)?;
            }
        }
        self.due.extend(event);
        Ok(())
    }

    fn all_reduce(
        &mut self,
        device: &mut dyn Executor,
        reduction: ReductionId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let begun = self.transfers.all_reduce(reduction, micro_batch, rows);
        if begun.map_err(|error| defect(device, &error))? {
            let event = self.reduce(device, reduction, micro_batch)?;
            self.due.push_back(event);
        }
        Ok(())
    }

    fn start(
        &mut self,
        device: &mut dyn Executor,
        collective: Collective,
    ) -> Result<(), DeviceError> {
        for transfer in self.transfers.start(collective) {
            match transfer {
                LocalTransfer::Read(read) => {
                    let (tensor, chunk) = self.transfers.source(read);
                    self.read_starts.push_back(Instant::now());
                    let place = Region::bucket(tensor, chunk.bucket, chunk.range.clone());
                    device.start_readback(place)?;
                }
                LocalTransfer::KeepOnDevice(read) => self.ready(device, read, None)?,
            }
        }
        self.forward_all(device)
    }

    fn send_all(&mut self, device: &mut dyn Executor) -> Result<(), DeviceError> {
        while self.transfers.has_sends()
            && let Some(readback) = device.next_readback(true)?
        {
            self.forward(device, readback)?;
        }
        Ok(())
    }

    fn vote(
        &mut self,
        device: &mut dyn Executor,
        vote: Vote,
        updates: bool,
    ) -> Result<(), DeviceError> {
        let vote =
            self.transfers.complete_vote(vote, updates).map_err(|error| defect(device, &error))?;
        let vote = vote.without_states(device.plan());
        // The next wait reports a closed mailbox.
        let _ = self.coordinator.send(CoordinatorMsg::Vote(vote));
        Ok(())
    }

    fn poll_event(&mut self, device: &mut dyn Executor) -> Result<Option<Event>, DeviceError> {
        loop {
            if let Some(event) = self.due.pop_front() {
                return Ok(Some(event));
            }
            self.forward_all(device)?;
            match self.inbox.try_recv() {
                Ok(None) => return Ok(None),
                Err(Closed(why)) => return Ok(Some(Event::Fault(why))),
                Ok(Some(message)) => {
                    if let Some(event) = self.handle(device, message)? {
                        return Ok(Some(event));
                    }
                }
            }
        }
    }

    fn wait_event(
        &mut self,
        device: &mut dyn Executor,
        awaited: Option<Token>,
        waited: &mut Duration,
    ) -> Result<Event, DeviceError> {
        loop {
            if let Some(event) = self.poll_event(device)? {
                return Ok(event);
            }
            match self.wait(device, awaited, waited)? {
                Err(Closed(why)) => return Ok(Event::Fault(why)),
                Ok(Some(message)) => {
                    if let Some(event) = self.handle(device, message)? {
                        return Ok(event);
                    }
                }
                Ok(None) => {}
            }
        }
    }

    fn discard(&mut self, device: &mut dyn Executor) {
        self.transfers.discard();
        // Errors are ignored: they are results of the reason for which the step was discarded.
        // Remaining readbacks are dropped when they complete.
        while let Ok(Some(readback)) = device.next_readback(false)
            && self.forward(device, readback).is_ok()
        {}
    }

    fn take_communicated(&mut self) -> Duration {
        self.ring_work.take()
    }
}
