//! State machine of one rank in a reduce-scatter and an all-gather over the chunks of a
//! [`ShardLayout`]. Ranks are known by their positions in the group; the caller sends to the
//! rank at a position.
//!
//! **Ring** (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations", 2009). The partial sum of a chunk with owner `o` begins at position `o+1` with
//! that rank's values, each next rank adds its own, and it ends at the owner:
//! `((g[o+1] + g[o+2]) + ..) + g[o]`, whatever the timing. The final values travel around the
//! ring in the same way.
//!
//! **Star**. Every rank sends to position 0, which adds in the order of positions,
//! `(g[0] + g[1]) + ..` (a message that arrives early waits), and sends the final values to each
//! rank.
//!
//! The cost of both topologies is in [`super::cost`].
//!
//! # The window
//!
//! A rank begins another partial sum of a bucket only while `begun < ended + window`, where
//! `ended` counts the sums of that bucket that have ended with this rank as their owner, or when
//! all sums that will ever end with it have ended.
//!
//! In a ring, shards differ by one chunk at most, so `begun <= ended + window` always holds, and
//! at most `size * window` partial sums of a bucket are in flight. In a star, sums end
//! with the server only, so the window delays no rank: up to `size - 1` values of each chunk of
//! a bucket are in flight, or wait at the server for its own values.
//! [`ShardLayout::messages_max`] is the bound in that case.
//!
//! The window of a ring cannot deadlock. Buckets are counted separately, so one that is not ready
//! yet holds up no other. Take a ready bucket in which no message is left to handle: every sum
//! that was begun has ended, so `ended(r) = begun(r+1)`. If position r may not begin a sum, then
//! `begun(r) >= ended(r) + window > begun(r+1)`, and some sum has not ended with r, which r+1 has
//! not begun; so r+1 may not begin a sum either. By induction no rank may, and `begun(0) >
//! begun(1) > .. > begun(0)`, which is impossible.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use super::layout::{ShardLayout, Topology};
use super::{CollectiveKind, ExchangeError, Positions};
use potluck_core::{BucketId, ChunkId, Nanos, Position};

/// Window of the rings of a run. It hides the latency of one hop, and fits a cache.
pub const SEND_WINDOW: usize = 4;

/// A collective operation of all ranks of a group on one bucket.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct Collective {
    pub kind: CollectiveKind,
    pub bucket: BucketId,
}

impl Collective {
    /// Returns the reduce-scatter of a bucket: sums gradients on the way to the owner of each
    /// shard.
    pub const fn reduce_scatter(bucket: BucketId) -> Self {
        Self { kind: CollectiveKind::ReduceScatter, bucket }
    }

    /// Returns the all-gather of a bucket: copies the owners' parameters to every rank.
    pub const fn all_gather(bucket: BucketId) -> Self {
        Self { kind: CollectiveKind::AllGather, bucket }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            CollectiveKind::ReduceScatter => write!(f, "reduce-scatter of {}", self.bucket),
            CollectiveKind::AllGather => write!(f, "all-gather of {}", self.bucket),
        }
    }
}

/// Input event of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The rank's own values of a chunk are ready: values to add (reduce-scatter, on every rank),
    /// or final values to send (all-gather, on the owner only).
    LocalReady { kind: CollectiveKind, chunk: ChunkId },
    /// A message has arrived.
    Received { kind: CollectiveKind, chunk: ChunkId, from: Position },
}

/// Output action of an exchange; actions must be performed in order. A rank holds at most one
/// value per chunk: nothing (then its own values are used), a partial sum, or the final values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send the held values of the chunk to `to`. In a reduce-scatter they are moved (a partial
    /// sum has one holder); in an all-gather they are shared.
    Send { kind: CollectiveKind, chunk: ChunkId, to: Position },
    /// Add the held values (own values at first) to the message of `from`, and hold the sum.
    Accumulate { chunk: ChunkId, from: Position },
    /// The chunk is summed over all ranks; emitted on its owner only.
    Reduced { chunk: ChunkId },
    /// Hold the message of `from`, which has the final values.
    StoreFinal { chunk: ChunkId, from: Position },
    /// This rank has nothing more to do for a bucket in this phase (once on every rank). A bucket
    /// of length 0 is done from the start.
    Done { kind: CollectiveKind, bucket: BucketId },
}

/// Progress of one chunk on one rank.
#[derive(Clone, Debug, Default)]
struct ChunkProgress {
    /// True if the rank's own values are ready.
    ready: bool,
    /// Positions of senders whose messages arrived and are not folded yet.
    early: Vec<Position>,
    /// Number of folded messages.
    accumulated: u32,
    /// True if the final values have arrived.
    gathered: bool,
}

/// Counters of one bucket on one rank.
#[derive(Clone, Debug, Default)]
struct Count {
    /// Ready chunks whose partial sum begins on this rank, once the window allows it.
    waiting: VecDeque<ChunkId>,
    begun: usize,
    /// Number of sums that have ended on this rank; `ends` is the number that ever will.
    ended: usize,
    ends: usize,
    reduced: usize,
    gathered: usize,
}

/// State of one rank in one exchange over all chunks.
#[derive(Debug)]
pub struct Exchange {
    layout: Arc<ShardLayout>,
    positions: Positions,
    window: usize,
    chunks: Vec<ChunkProgress>,
    buckets: Vec<Count>,
    actions: VecDeque<Action>,
    deadline: Nanos,
    /// Time of the last event.
    progress_at: Nanos,
}

impl Exchange {
    /// Creates the state at the start of both phases, of a rank at these positions of the groups.
    /// `window` (at least 1) bounds the number of partial sums of a bucket that a rank of a ring
    /// has begun, minus the number that have ended with it.
    pub fn new(layout: Arc<ShardLayout>, positions: impl Into<Positions>, window: usize) -> Self {
        let positions = positions.into();
        for bucket in (0..layout.buckets() as u32).map(BucketId) {
            let position = positions.of(bucket);
            let size = layout.size_of(bucket);
            assert!(position.is_none_or(|at| at.0 < size), "{position:?} in a group of {size}");
        }
        assert!(window > 0, "a window of 0 lets nothing begin");
        let mut exchange = Self {
            layout,
            positions,
            window,
            chunks: Vec::new(),
            buckets: Vec::new(),
            actions: VecDeque::new(),
            deadline: Nanos::MAX,
            progress_at: 0,
        };
        exchange.restart();
        exchange
    }

    /// Sets the longest time for which the exchange waits for messages without an event;
    /// [`Nanos::MAX`], the initial value, means no deadline.
    pub(crate) fn with_deadline(self, deadline: Nanos) -> Self {
        Self { deadline, ..self }
    }

    /// Returns this rank's position in the group of a bucket; `None` if it does not hold it.
    pub fn position(&self, bucket: BucketId) -> Option<Position> {
        self.positions.of(bucket)
    }

    pub fn layout(&self) -> &Arc<ShardLayout> {
        &self.layout
    }

    /// Resets the state for the next step. Both phases must be over, or neither begun, or all
    /// ranks must have aborted the step.
    pub fn restart(&mut self) {
        self.chunks.clear();
        self.chunks.resize(self.layout.chunks.len(), ChunkProgress::default());
        self.buckets.clear();
        self.buckets.resize(self.layout.buckets(), Count::default());
        self.actions.clear();
        for chunk in &self.layout.chunks {
            let owns = self.positions.of(chunk.bucket) == Some(chunk.owner);
            self.buckets[chunk.bucket.index()].ends += usize::from(owns);
        }
        for bucket in (0..self.layout.buckets() as u32).map(BucketId) {
            if self.layout.chunks_of(bucket).is_empty() && self.positions.of(bucket).is_some() {
                self.actions
                    .push_back(Action::Done { kind: CollectiveKind::ReduceScatter, bucket });
                self.actions.push_back(Action::Done { kind: CollectiveKind::AllGather, bucket });
            }
        }
    }

    /// Processes an event at the time `now` and queues the resulting actions for `poll_action`.
    ///
    /// # Errors
    ///
    /// Returns [`ExchangeError`], and changes nothing, for an unknown chunk or one of a bucket that
    /// this rank does not hold, a repeated event, and a message from a rank that has none to send.
    pub fn handle(&mut self, now: Nanos, event: Event) -> Result<(), ExchangeError> {
        let (Event::LocalReady { chunk: id, .. } | Event::Received { chunk: id, .. }) = event;
        let chunks = self.layout.chunks.len();
        if id.index() >= chunks {
            return Err(ExchangeError::UnknownChunk { id, chunks });
        }
        if self.own(id).is_none() {
            return Err(ExchangeError::NotHeld { id });
        }
        match event {
            Event::LocalReady { kind: CollectiveKind::ReduceScatter, chunk } => {
                self.own_values(chunk)
            }
            Event::LocalReady { kind: CollectiveKind::AllGather, chunk } => {
                self.own_final_values(chunk)
            }
            Event::Received { kind: CollectiveKind::ReduceScatter, chunk, from } => {
                self.partial(chunk, from)
            }
            Event::Received { kind: CollectiveKind::AllGather, chunk, from } => {
                self.final_values(chunk, from)
            }
        }?;
        self.progress_at = now;
        Ok(())
    }

    /// Returns the next action, if there is one.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    // ---- Deadline ----

    /// Returns the positions whose messages are awaited, in order: the next senders of partial
    /// sums of chunks whose own values are ready here, and of final values of chunks whose
    /// gather has begun.
    pub fn awaited(&self) -> Vec<Position> {
        let mut awaited: Vec<Position> = Vec::new();
        for (index, progress) in self.chunks.iter().enumerate() {
            let id = ChunkId(index as u32);
            if progress.ready && progress.accumulated < self.sources(id) {
                awaited.extend(self.source(id, progress.accumulated));
            }
            let bucket = &self.buckets[self.layout.chunk(id).bucket.index()];
            if bucket.gathered > 0 && !progress.gathered {
                awaited.extend(self.final_source(id));
            }
        }
        awaited.sort();
        awaited.dedup();
        awaited
    }

    /// Returns the time at which the caller calls [`Exchange::handle_timeout`]; `None` without a
    /// deadline, or if no message is awaited.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        if self.deadline == Nanos::MAX || self.awaited().is_empty() {
            return None;
        }
        Some(self.progress_at.saturating_add(self.deadline))
    }

    /// Checks the deadline at the time `now`.
    ///
    /// # Errors
    ///
    /// Returns [`ExchangeError::TimedOut`] with the positions whose messages are awaited if it
    /// has passed.
    pub fn handle_timeout(&self, now: Nanos) -> Result<(), ExchangeError> {
        match self.poll_timeout() {
            Some(at) if at <= now => Err(ExchangeError::TimedOut { awaited: self.awaited() }),
            _ => Ok(()),
        }
    }

    // ---- Message routing ----

    /// Returns this rank's position in the group of a chunk's bucket.
    fn own(&self, chunk: ChunkId) -> Option<Position> {
        self.positions.of(self.layout.chunk(chunk).bucket)
    }

    /// Bucket of a chunk, topology of its group, and owner of the chunk.
    fn route(&self, chunk: ChunkId) -> (BucketId, Topology, Position) {
        let found = self.layout.chunk(chunk);
        (found.bucket, self.layout.topology_of(found.bucket), found.owner)
    }

    /// Number of messages that are folded into a chunk on this rank.
    fn sources(&self, chunk: ChunkId) -> u32 {
        let (bucket, topology, owner) = self.route(chunk);
        let Some(own) = self.own(chunk) else { return 0 };
        match topology {
            Topology::Ring => u32::from(own != self.layout.next(bucket, owner)),
            Topology::Star if own == owner => self.layout.size_of(bucket) - 1,
            Topology::Star => 0,
        }
    }

    /// Returns the sender of message number `index` of [`Self::sources`], in the order of
    /// folding; `None` if this rank does not hold the bucket.
    fn source(&self, chunk: ChunkId, index: u32) -> Option<Position> {
        let (bucket, topology, _) = self.route(chunk);
        let own = self.own(chunk)?;
        Some(match topology {
            Topology::Ring => self.layout.previous(bucket, own),
            Topology::Star => Position(index + 1),
        })
    }

    /// Position to which this rank sends the partial sum; `None` on the owner.
    fn target(&self, chunk: ChunkId) -> Option<Position> {
        let (bucket, topology, owner) = self.route(chunk);
        let own = self.own(chunk)?;
        match topology {
            _ if own == owner => None,
            Topology::Ring => Some(self.layout.next(bucket, own)),
            Topology::Star => Some(owner),
        }
    }

    // ---- Reduce-scatter ----

    fn own_values(&mut self, chunk: ChunkId) -> Result<(), ExchangeError> {
        if std::mem::replace(&mut self.chunks[chunk.index()].ready, true) {
            return Err(ExchangeError::ReadyTwice { id: chunk });
        }
        if self.sources(chunk) == 0 && self.target(chunk).is_some() {
            let bucket = self.layout.chunk(chunk).bucket;
            self.buckets[bucket.index()].waiting.push_back(chunk);
            self.begin(bucket);
        } else {
            self.accumulate(chunk);
        }
        Ok(())
    }

    fn partial(&mut self, chunk: ChunkId, from: Position) -> Result<(), ExchangeError> {
        let progress = &self.chunks[chunk.index()];
        let is_due = (progress.accumulated..self.sources(chunk))
            .any(|index| self.source(chunk, index) == Some(from));
        let is_new = is_due && !progress.early.contains(&from);
        if !is_new {
            return Err(self.unexpected(CollectiveKind::ReduceScatter, chunk, from));
        }
        self.chunks[chunk.index()].early.push(from);
        self.accumulate(chunk);
        Ok(())
    }

    fn unexpected(&self, kind: CollectiveKind, id: ChunkId, from: Position) -> ExchangeError {
        ExchangeError::UnexpectedMessage { kind, id, from, position: self.own(id) }
    }

    /// Begins as many partial sums as the window allows.
    fn begin(&mut self, bucket: BucketId) {
        loop {
            let count = &mut self.buckets[bucket.index()];
            if count.ended < count.ends && count.begun >= count.ended + self.window {
                return;
            }
            let Some(chunk) = count.waiting.pop_front() else { return };
            count.begun += 1;
            self.reduced(chunk);
        }
    }

    /// Folds the messages that have arrived, in order, and passes the sum on when it is complete.
    fn accumulate(&mut self, chunk: ChunkId) {
        if !self.chunks[chunk.index()].ready {
            return;
        }
        let sources = self.sources(chunk);
        while self.chunks[chunk.index()].accumulated < sources {
            let Some(from) = self.source(chunk, self.chunks[chunk.index()].accumulated) else {
                return;
            };
            let progress = &mut self.chunks[chunk.index()];
            let Some(at) = progress.early.iter().position(|position| *position == from) else {
                return;
            };
            progress.early.swap_remove(at);
            progress.accumulated += 1;
            self.actions.push_back(Action::Accumulate { chunk, from });
        }
        self.reduced(chunk);
    }

    /// Emits the send of a chunk with this rank's additions complete, or on its owner the reduced
    /// chunk.
    fn reduced(&mut self, chunk: ChunkId) {
        let bucket = self.layout.chunk(chunk).bucket;
        let target = self.target(chunk);
        self.actions.push_back(match target {
            Some(to) => Action::Send { kind: CollectiveKind::ReduceScatter, chunk, to },
            None => Action::Reduced { chunk },
        });
        let count = &mut self.buckets[bucket.index()];
        count.reduced += 1;
        count.ended += usize::from(target.is_none());
        if count.reduced == self.layout.chunks_of(bucket).len() {
            self.actions.push_back(Action::Done { kind: CollectiveKind::ReduceScatter, bucket });
        } else if target.is_none() {
            self.begin(bucket);
        }
    }

    // ---- All-gather ----

    /// Position that sends the final values of a chunk; `None` on its owner.
    fn final_source(&self, chunk: ChunkId) -> Option<Position> {
        let (bucket, topology, owner) = self.route(chunk);
        let own = self.own(chunk)?;
        match topology {
            _ if own == owner => None,
            Topology::Ring => Some(self.layout.previous(bucket, own)),
            Topology::Star => Some(owner),
        }
    }

    fn own_final_values(&mut self, chunk: ChunkId) -> Result<(), ExchangeError> {
        let position = self.own(chunk);
        if position != Some(self.layout.chunk(chunk).owner) {
            return Err(ExchangeError::NotOwner { id: chunk, position });
        }
        if self.chunks[chunk.index()].gathered {
            return Err(ExchangeError::ReadyTwice { id: chunk });
        }
        self.gathered(chunk);
        Ok(())
    }

    fn final_values(&mut self, chunk: ChunkId, from: Position) -> Result<(), ExchangeError> {
        let is_due = self.final_source(chunk) == Some(from);
        if !is_due || self.chunks[chunk.index()].gathered {
            return Err(self.unexpected(CollectiveKind::AllGather, chunk, from));
        }
        self.actions.push_back(Action::StoreFinal { chunk, from });
        self.gathered(chunk);
        Ok(())
    }

    /// Marks the final values of a chunk as present and sends them on.
    fn gathered(&mut self, chunk: ChunkId) {
        let Some(own) = self.own(chunk) else { return };
        self.chunks[chunk.index()].gathered = true;
        let (bucket, topology, owner) = self.route(chunk);
        let kind = CollectiveKind::AllGather;
        match topology {
            Topology::Ring => {
                let to = self.layout.next(bucket, own);
                if to != owner {
                    self.actions.push_back(Action::Send { kind, chunk, to });
                }
            }
            Topology::Star if own == owner => {
                for to in (0..self.layout.size_of(bucket)).map(Position) {
                    if to != owner {
                        self.actions.push_back(Action::Send { kind, chunk, to });
                    }
                }
            }
            Topology::Star => (),
        }
        let count = &mut self.buckets[bucket.index()];
        count.gathered += 1;
        if count.gathered == self.layout.chunks_of(bucket).len() {
            self.actions.push_back(Action::Done { kind, bucket });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three ranks of a ring with a chunk each; position 1 begins chunk 0.
    fn exchange() -> Exchange {
        let layout = ShardLayout::new(Topology::Ring, 3, &[3], 1, 1);
        Exchange::new(Arc::new(layout), Position(1), 1).with_deadline(100)
    }

    #[test]
    fn a_deadline_names_the_positions_whose_messages_are_awaited() {
        let (reduce, gather) = (CollectiveKind::ReduceScatter, CollectiveKind::AllGather);
        let mut exchange = exchange();
        assert_eq!((exchange.awaited(), exchange.poll_timeout()), (vec![], None));
        let ready = |chunk| Event::LocalReady { kind: reduce, chunk: ChunkId(chunk) };
        exchange.handle(10, ready(0)).unwrap();
        assert_eq!(exchange.poll_timeout(), None, "position 1 begins chunk 0");
        exchange.handle(20, ready(1)).unwrap();
        let awaited = vec![Position(0)];
        assert_eq!((exchange.awaited(), exchange.poll_timeout()), (awaited.clone(), Some(120)));
        assert_eq!(exchange.handle_timeout(119), Ok(()));
        let error = exchange.handle_timeout(120).unwrap_err();
        assert_eq!(error, ExchangeError::TimedOut { awaited });
        assert_eq!(error.to_string(), "no message arrives from position 0");
        let partial = Event::Received { kind: reduce, chunk: ChunkId(1), from: Position(0) };
        exchange.handle(110, partial).unwrap();
        assert_eq!(exchange.poll_timeout(), None);
        let own = Event::LocalReady { kind: gather, chunk: ChunkId(1) };
        exchange.handle(115, own).unwrap();
        assert_eq!((exchange.awaited(), exchange.poll_timeout()), (vec![Position(0)], Some(215)));
        assert_eq!(exchange.with_deadline(Nanos::MAX).poll_timeout(), None);
    }
}
