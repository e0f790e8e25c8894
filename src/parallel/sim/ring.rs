//! Ring thread of a virtual rank: a [`RingWorker`] whose work takes virtual time.

use super::device::VirtualRead;
use super::queue::nanos;
use super::report::End;
use super::scenario::{LinkModel, SeededBug};
use super::timeline::VirtualTrack;
use super::values::squares_of;
use super::world::{Event, Simulation, ToDriver};
use crate::collective::{Chunk, Collective, CollectiveKind, ExchangeError, Topology};
use crate::comm::{
    HostWork, Mailbox, Message, PooledBuffer, RingMsg, RingOutput, RingWorker, SharedBuffer,
    send_restart,
};
use crate::transfers::DeviceMsg;
use potluck_core::{ChunkId, EdgePiece, Nanos, Position, Rank, Round};

/// State of the ring thread of a virtual rank.
pub(super) struct Ring {
    pub worker: RingWorker<VirtualRead>,
    pub inbox: Mailbox<RingMsg<VirtualRead>>,
    /// Time at which the ring thread can process the next message.
    pub(crate) free_at: Nanos,
    /// Time of the last message to the device thread.
    pub(crate) sent_last: Nanos,
    /// True if a wake-up at `free_at` is queued.
    pub(crate) wakes: bool,
    /// Number of pieces of tensors in the mailbox.
    pub pieces: usize,
}

/// Effect of a ring thread outside of itself.
enum Effect {
    Send { to: Position, message: Message },
    SendPiece { round: Round, piece: EdgePiece, values: SharedBuffer },
    ToDriver(ToDriver),
}

/// Effects of one message with their delays after its begin, and its duration so far.
struct Work {
    host: LinkModel,
    has_values: bool,
    began: Nanos,
    takes: Nanos,
    effects: Vec<(Nanos, Effect)>,
    /// Work that was done, for the timeline.
    done: Vec<String>,
}

impl Work {
    fn add(&mut self, effect: Effect) -> Result<(), ExchangeError> {
        self.effects.push((self.takes, effect));
        Ok(())
    }
}

impl RingOutput for Work {
    type Error = ExchangeError;
    type Span = ();

    fn now(&self) -> Nanos {
        self.began + self.takes
    }

    fn work(&mut self, work: HostWork, chunk: &Chunk) {
        self.takes += self.host.busy(chunk.range.len());
        self.done.push(format!("{work} {chunk}"));
    }

    fn buffer_length(&self, chunk: &Chunk) -> usize {
        if self.has_values { chunk.range.len() } else { 0 }
    }

    fn send(&mut self, to: Position, message: Message) -> Result<(), ExchangeError> {
        self.add(Effect::Send { to, message })
    }

    fn reduced(
        &mut self,
        round: Round,
        chunk: ChunkId,
        sum: SharedBuffer,
    ) -> Result<(), ExchangeError> {
        let (squares, not_finite) = squares_of(&sum);
        self.add(Effect::ToDriver(DeviceMsg::Reduced { round, chunk, sum, squares, not_finite }))
    }

    fn gathered(
        &mut self,
        round: Round,
        chunk: ChunkId,
        values: SharedBuffer,
    ) -> Result<(), ExchangeError> {
        self.add(Effect::ToDriver(DeviceMsg::Gathered { round, chunk, values }))
    }

    fn add_on_device(
        &mut self,
        round: Round,
        chunk: ChunkId,
        partial: PooledBuffer,
    ) -> Result<(), ExchangeError> {
        self.add(Effect::ToDriver(DeviceMsg::Add { round, chunk, partial }))
    }

    fn copy(&mut self, piece: &EdgePiece) {
        self.takes += self.host.busy(piece.range.len());
        self.done.push(format!("send {piece}"));
    }

    fn send_piece(
        &mut self,
        round: Round,
        piece: EdgePiece,
        values: SharedBuffer,
    ) -> Result<(), ExchangeError> {
        self.add(Effect::SendPiece { round, piece, values })
    }

    fn done(&mut self, round: Round, collective: Collective) -> Result<(), ExchangeError> {
        self.add(Effect::ToDriver(DeviceMsg::Done { round, collective }))
    }
}

impl Simulation<'_> {
    /// Begins a round in the ring thread of a rank.
    pub(super) fn restart_ring(&mut self, rank: Rank, round: Round) {
        let ring = &mut self.virtual_ranks[rank.index()].ring;
        // The restart removes the pieces of earlier rounds.
        ring.pieces = 0;
        let sent = send_restart(&ring.inbox, round);
        self.check_bound(rank, "ring thread", sent);
        self.wake_ring(rank);
    }

    /// Puts a message into the mailbox of a ring thread. A closed one drops it.
    pub(super) fn hand_to_ring(&mut self, rank: Rank, message: RingMsg<VirtualRead>) {
        let message = self.in_arrival_order(message);
        let is_piece = matches!(message, RingMsg::Send { .. });
        let sent = self.virtual_ranks[rank.index()].ring.inbox.send(message);
        if is_piece && sent.is_ok() {
            self.count_piece_to_ring(rank);
        }
        self.check_bound(rank, "ring thread", sent);
        self.wake_ring(rank);
    }

    fn wake_ring(&mut self, rank: Rank) {
        let now = self.queue.now();
        let ring = &mut self.virtual_ranks[rank.index()].ring;
        if !ring.wakes {
            ring.wakes = true;
            self.queue.push(ring.free_at.max(now), Event::Ring(rank));
        }
    }

    /// Processes the next message of a ring thread, if there is one.
    pub(super) fn run_ring(&mut self, rank: Rank) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        virtual_rank.ring.wakes = false;
        if virtual_rank.died_at.is_some() || matches!(virtual_rank.end, Some(End::Failed { .. })) {
            return;
        }
        let Ok(Some(message)) = virtual_rank.ring.inbox.try_recv() else { return };
        virtual_rank.ring.pieces -= usize::from(matches!(message, RingMsg::Send { .. }));
        let now = self.queue.now();
        let host = self.scenario.costs[rank.index()].host;
        let has_values = self.scenario.values.is_some();
        let mut work =
            Work { host, has_values, began: now, takes: 0, effects: Vec::new(), done: Vec::new() };
        if let Err(error) = virtual_rank.ring.worker.handle(message, &mut work) {
            // The thread ends, as in a worker group.
            virtual_rank.driver.inbox.close(&error.to_string());
            virtual_rank.ring.inbox.close(&error.to_string());
            self.violations.push(format!("the ring thread of {rank}: {error}"));
        }
        if virtual_rank.ring.worker.strays() > 0 {
            self.violations.push(format!("a message of another step came to {rank}"));
        }
        self.apply(rank, now, work);
        self.wake_ring(rank);
    }

    fn apply(&mut self, rank: Rank, now: Nanos, work: Work) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        virtual_rank.ring.free_at = now + work.takes;
        if virtual_rank.device.has_freed_slots() {
            self.free_slot(rank, now + work.takes);
        }
        if work.takes > 0 {
            let span = (now, now + work.takes);
            self.timeline.add(rank, VirtualTrack::Ring, span, || work.done.join(", "));
        }
        for (after, effect) in work.effects {
            match effect {
                Effect::Send { to, message } => self.send(rank, to, message, now + after),
                Effect::SendPiece { round, piece, values } => {
                    self.send_piece(rank, &(round, piece, values), now + after);
                }
                Effect::ToDriver(message) => {
                    // In the order in which the ring thread sends them.
                    let last = &mut self.virtual_ranks[rank.index()].ring.sent_last;
                    *last = (now + after).max(*last + 1);
                    self.queue.push(*last, Event::ToDriver { to: rank, message });
                }
            }
        }
    }

    /// Applies `SeededBug::AccumulatesInArrivalOrder`, if it is seeded: the n-th message to arrive
    /// is treated as the n-th in order.
    fn in_arrival_order(&mut self, message: RingMsg<VirtualRead>) -> RingMsg<VirtualRead> {
        match message {
            RingMsg::Message(mut message)
                if self.scenario.seeded_bug == Some(SeededBug::AccumulatesInArrivalOrder)
                    && self.topology_of(&message) == Topology::Star
                    && message.kind == CollectiveKind::ReduceScatter =>
            {
                let layout = &self.scenario.layout;
                let size = layout.size_of(layout.chunk(message.chunk).bucket);
                let arrived = &mut self.arrived[message.chunk.index()];
                *arrived = *arrived % (size - 1) + 1;
                message.from = Position(*arrived);
                RingMsg::Message(message)
            }
            message => message,
        }
    }

    fn topology_of(&self, message: &Message) -> Topology {
        let layout = &self.scenario.layout;
        layout.topology_of(layout.chunk(message.chunk).bucket)
    }

    fn send(&mut self, from: Rank, to: Position, message: Message, at: Nanos) {
        let id = message.chunk;
        let chunk = self.scenario.layout.chunk(id);
        let to = self.scenario.groups.of(chunk.bucket).rank(to);
        self.messages += 1;
        if self.scenario.seeded_bug == Some(SeededBug::LosesMessage(self.messages)) {
            return;
        }
        let elements = chunk.range.len();
        let there = self.pass_link(from, to, elements, at, || format!("{id} to {to}"));
        self.queue.push(there, Event::Message { to, message, sent: (from, at) });
    }

    /// Occupies the link between two ranks with `elements`. Returns the time at which they arrive.
    pub(super) fn pass_link(
        &mut self,
        from: Rank,
        to: Rank,
        elements: usize,
        at: Nanos,
        name: impl FnOnce() -> String,
    ) -> Nanos {
        let link = &self.scenario.links[from.index()][to.index()];
        let free_at = &mut self.links_free_at[from.index()][to.index()];
        let start = at.max(*free_at);
        let gone = start.saturating_add(link.busy(elements));
        self.elements_sent[from.index()][to.index()] += elements as u64;
        *free_at = gone;
        let there = gone.saturating_add(nanos(link.latency_s)).saturating_add(self.jitter());
        self.timeline.add(from, VirtualTrack::Link, (start, there), name);
        there
    }
}
