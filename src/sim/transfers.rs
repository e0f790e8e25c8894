//! Transfers between the components of a rank, and messages from rank to rank.

use std::rc::Rc;

use super::main_thread::ToDriver;
use super::queue::{Nanos, nanos};
use super::report::End;
use super::ring::{Effect, Item, Message};
use super::scenario::SeededBug;
use super::timeline::VirtualTrack;
use super::world::{Event, Simulation};
use crate::base::{ChunkId, Position, Rank};
use crate::collective::{Collective, CollectiveKind, Topology};

impl Simulation<'_> {
    pub fn hand_to_ring(&mut self, rank: Rank, item: Item) {
        self.virtual_ranks[rank.index()].ring.inbox.push_back(item);
        self.wake_ring(rank);
    }

    fn wake_ring(&mut self, rank: Rank) {
        let now = self.queue.now();
        let ring = &mut self.virtual_ranks[rank.index()].ring;
        if !ring.inbox.is_empty() && !ring.wakes {
            ring.wakes = true;
            self.queue.push(ring.free_at.max(now), Event::Ring(rank));
        }
    }

    pub fn ring_works(&mut self, rank: Rank, item: Item) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        if virtual_rank.died_at.is_some() || matches!(virtual_rank.end, Some(End::Failed { .. })) {
            return;
        }
        let now = self.queue.now();
        let what = item.name();
        let work = virtual_rank.ring.handle(item);
        virtual_rank.ring.free_at = now + work.takes;
        if work.takes > 0 {
            self.timeline.add(rank, VirtualTrack::Ring, (now, now + work.takes), || what.into());
        }
        for (after, effect) in work.effects {
            self.take_effect(rank, now + after, effect);
        }
        self.wake_ring(rank);
    }

    fn take_effect(&mut self, rank: Rank, at: Nanos, effect: Effect) {
        match effect {
            Effect::Send { to, message } => self.send(to, message, at),
            Effect::Reduced { chunk, values } => {
                let place = self.scenario.layout.chunk(chunk);
                let model = &mut self.virtual_ranks[rank.index()].model;
                model.set_gradients(place.bucket, place.range.clone(), &values);
                self.upload(rank, at, chunk);
            }
            Effect::Kept { chunk, values } => {
                let place = self.scenario.layout.chunk(chunk);
                self.check_committed(rank, "takes parameters");
                let model = &mut self.virtual_ranks[rank.index()].model;
                model.set_parameters(place.bucket, place.range.clone(), &values);
                self.upload(rank, at, chunk);
            }
            // Readback slots are counted only if their number is limited.
            Effect::Used if self.scenario.places_max.is_none() => {}
            Effect::Used => self.queue.push(at, Event::Place(rank)),
            Effect::Strayed(chunk) => {
                self.violations
                    .push(format!("a message for {chunk} of another step came to {rank}"));
            }
            Effect::Done(done) => {
                let at = at.max(self.virtual_ranks[rank.index()].upload_last);
                self.queue.push(at, Event::ToDriver { to: rank, mail: ToDriver::Done(done) });
            }
        }
    }

    /// Applies `SeededBug::AccumulatesInArrivalOrder`, if it is seeded: the n-th message to arrive
    /// is treated as the n-th in order.
    pub fn in_arrival_order(&mut self, item: Item) -> Item {
        match item {
            Item::Message(message)
                if self.scenario.seeded_bug == Some(SeededBug::AccumulatesInArrivalOrder)
                    && self.scenario.layout.topology == Topology::Star
                    && message.kind == CollectiveKind::ReduceScatter =>
            {
                let arrived = &mut self.arrived[message.chunk.index()];
                *arrived = *arrived % (self.scenario.layout.size - 1) + 1;
                Item::Message(Message { from: Position(*arrived), ..message })
            }
            item => item,
        }
    }

    fn send(&mut self, to: Position, message: Message, at: Nanos) {
        let (from, to) = (self.members.rank(message.from), self.members.rank(to));
        let chunk = message.chunk;
        self.messages += 1;
        if self.scenario.seeded_bug == Some(SeededBug::LosesMessage(self.messages)) {
            return;
        }
        let link = &self.scenario.links[from.index()][to.index()];
        let free_at = &mut self.links_free_at[from.index()][to.index()];
        let start = at.max(*free_at);
        let gone = start + link.busy(self.scenario.layout.chunk(chunk));
        *free_at = gone;
        let there = gone + nanos(link.latency_s) + self.jitter();
        self.timeline.add(from, VirtualTrack::Link, (start, there), || format!("{chunk} to {to}"));
        let item = Item::Message(message);
        self.queue.push(there, Event::Item { to, item, sent: Some((from, at)) });
    }

    /// Uploads a chunk to the device, after the chunks before it.
    fn upload(&mut self, rank: Rank, at: Nanos, chunk: ChunkId) {
        let link = &self.scenario.costs[rank.index()].upload;
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let start = at.max(virtual_rank.upload_free_at);
        virtual_rank.upload_free_at = start + link.busy(self.scenario.layout.chunk(chunk));
        virtual_rank.upload_last = virtual_rank.upload_free_at + nanos(link.latency_s);
        let span = (start, virtual_rank.upload_last);
        self.timeline.add(rank, VirtualTrack::Upload, span, || chunk.to_string());
    }

    /// Queues a rank's input of a collective, with its current values, for readback.
    pub fn read_back(&mut self, rank: Rank, started: Collective) {
        let layout = &self.scenario.layout;
        let Collective { kind, bucket } = started;
        let position = self.virtual_ranks[rank.index()].position;
        let mut order = layout.consumption_order(bucket, position);
        if self.scenario.seeded_bug == Some(SeededBug::ReadsByPosition) {
            order.sort();
        }
        for chunk in order {
            let place = layout.chunk(chunk);
            if kind == CollectiveKind::AllGather && place.owner != position {
                continue;
            }
            let virtual_rank = &mut self.virtual_ranks[rank.index()];
            let values = match kind {
                CollectiveKind::ReduceScatter => {
                    virtual_rank.model.gradients(bucket, place.range.clone())
                }
                CollectiveKind::AllGather => {
                    virtual_rank.model.parameters(bucket, place.range.clone())
                }
            };
            let item = Item::Ready { kind, chunk, values: Rc::new(values.to_vec()) };
            virtual_rank.unread.push_back((chunk, item));
        }
        self.read_on(rank);
    }

    /// Reads back one chunk after the other, as long as readback slots are free.
    pub fn read_on(&mut self, rank: Rank) {
        let link = &self.scenario.costs[rank.index()].read_back;
        let now = self.queue.now();
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        while self.scenario.places_max.is_none_or(|most| virtual_rank.places < most)
            && let Some((chunk, item)) = virtual_rank.unread.pop_front()
        {
            virtual_rank.places += usize::from(self.scenario.places_max.is_some());
            let start = now.max(virtual_rank.read_back_free_at);
            virtual_rank.read_back_free_at = start + link.busy(self.scenario.layout.chunk(chunk));
            let there = virtual_rank.read_back_free_at + nanos(link.latency_s);
            // Readbacks complete in order, even if they take no time.
            virtual_rank.read_back_last = there.max(virtual_rank.read_back_last + 1);
            let at = virtual_rank.read_back_last;
            self.queue.push(at, Event::Item { to: rank, item, sent: None });
            self.timeline.add(rank, VirtualTrack::ReadBack, (start, at), || chunk.to_string());
        }
    }
}
