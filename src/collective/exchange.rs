//! One rank's side of a reduce-scatter and an all-gather over the chunks of a [`ShardLayout`].
//!
//! **Ring** (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations", 2009). The partial sum of a chunk with owner `o` begins at rank `o+1` with that
//! rank's values, each next rank adds its own, and it ends at the owner:
//! `((g[o+1] + g[o+2]) + ..) + g[o]`, whatever the timing. The final values go around the same way.
//!
//! **Star**. Everyone sends to rank 0, which adds in the order of ranks, `(g[0] + g[1]) + ..`
//! (a message that comes early waits), and hands the final values to each.
//!
//! What both cost is in [`super::cost`].
//!
//! # The window
//!
//! A rank begins another partial sum of a bucket only while
//! `begun < ended + window`, where `ended` counts the sums of that bucket that have ended with it
//! as their owner, or when all that will ever end with it have.
//!
//! In a ring, shards differ by one chunk at most, so `begun <= ended + window` always, and of a
//! bucket at most `world * window` partial sums travel at a time. In a star nothing ends with a
//! rank but the server, so the window holds nobody back: of a bucket up to `world - 1` values of
//! each chunk travel at a time, or wait at the server for its own. [`ShardLayout::messages_max`] is the
//! bound there.
//!
//! The window of a ring cannot deadlock. Buckets are counted apart, so one that is not ready yet
//! holds up no other. Take a ready bucket in which no message is left to handle: every sum that was
//! begun has ended, so `ended(r) = begun(r+1)`. If rank r may not begin, then
//! `begun(r) >= ended(r) + window > begun(r+1)`, and something has not ended with r, which r+1 has
//! not begun; so r+1 may not begin either. By induction none may, and
//! `begun(0) > begun(1) > .. > begun(0)`, which is impossible.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use super::layout::{ShardLayout, Topology};
use crate::base::{BucketId, ChunkId, Rank};

/// The two halves of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Values are summed on their way to the owner.
    ReduceScatter,
    /// The owner's values go to everyone.
    AllGather,
}

/// A collective operation of all ranks on one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Collective {
    pub kind: CollectiveKind,
    pub bucket: BucketId,
}

impl Collective {
    /// Sums the gradients of a bucket on the way to the owner of each shard.
    pub const fn reduce_scatter(bucket: BucketId) -> Self {
        Self { kind: CollectiveKind::ReduceScatter, bucket }
    }

    /// Copies the owners' parameters of a bucket to every rank.
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

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The rank's own values of a chunk are there: what is to be added (Reduce, on every rank),
    /// or what is to be handed out (Gather, on the owner only).
    LocalReady { kind: CollectiveKind, chunk: ChunkId },
    /// A message has come.
    Received { kind: CollectiveKind, chunk: ChunkId, from: Rank },
}

/// What is to be done, in this order. A rank holds at most one value per chunk: nothing (then its
/// own values stand for it), a partial sum, or the final values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// What is held of the chunk goes to `to`. In Reduce it leaves (a partial sum has one holder);
    /// in Gather it is shared.
    Send { kind: CollectiveKind, chunk: ChunkId, to: Rank },
    /// The message of `from` plus what is held (own values at first) is held from now on.
    Accumulate { chunk: ChunkId, from: Rank },
    /// The chunk is summed over all ranks; said on its owner.
    Reduced { chunk: ChunkId },
    /// The message of `from` is held: the final values.
    StoreFinal { chunk: ChunkId, from: Rank },
    /// This rank has nothing more to do for a bucket in this phase (on every rank, once). A bucket
    /// of length 0 is done from the start.
    Done { kind: CollectiveKind, bucket: BucketId },
}

/// One chunk on one rank.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// The rank's own values are there.
    ready: bool,
    /// Messages that are not folded yet.
    early: Vec<Rank>,
    /// Messages that are folded.
    folded: u32,
    /// The final values are there.
    gathered: bool,
}

/// One bucket on one rank.
#[derive(Clone, Debug, Default)]
struct Count {
    /// Chunks that are ready and whose partial sum is to begin here.
    waiting: VecDeque<ChunkId>,
    begun: usize,
    /// Sums that have ended here, and those that ever will.
    ended: usize,
    ends: usize,
    reduced: usize,
    gathered: usize,
}

/// The state of one rank in one exchange over all chunks.
#[derive(Debug)]
pub struct Exchange {
    layout: Arc<ShardLayout>,
    rank: Rank,
    window: usize,
    chunks: Vec<Progress>,
    buckets: Vec<Count>,
    actions: VecDeque<Action>,
}

impl Exchange {
    /// At the start of both phases. `window` bounds the partial sums of a bucket that a rank of a
    /// ring has begun beyond those that have ended with it (at least 1).
    pub fn new(layout: Arc<ShardLayout>, rank: Rank, window: usize) -> Self {
        assert!(rank.0 < layout.world, "{rank} of {} ranks", layout.world);
        assert!(window > 0, "a window of 0 lets nothing begin");
        let (chunks, buckets, actions) = Default::default();
        let mut exchange = Self { layout, rank, window, chunks, buckets, actions };
        exchange.restart();
        exchange
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn layout(&self) -> &Arc<ShardLayout> {
        &self.layout
    }

    /// Back to the start, for the next step. Both phases must be over, or neither begun, or the
    /// step was given up by all ranks.
    pub fn restart(&mut self) {
        self.chunks.clear();
        self.chunks.resize(self.layout.chunks.len(), Progress::default());
        self.buckets.clear();
        self.buckets.resize(self.layout.buckets(), Count::default());
        self.actions.clear();
        for chunk in self.layout.chunks.iter().filter(|chunk| chunk.owner == self.rank) {
            self.buckets[chunk.bucket.index()].ends += 1;
        }
        for bucket in (0..self.layout.buckets() as u32).map(BucketId) {
            if self.layout.chunks_of(bucket).is_empty() {
                self.actions
                    .push_back(Action::Done { kind: CollectiveKind::ReduceScatter, bucket });
                self.actions.push_back(Action::Done { kind: CollectiveKind::AllGather, bucket });
            }
        }
    }

    /// Takes in an event; what it leads to is polled.
    ///
    /// # Panics
    ///
    /// If the event makes no sense: an unknown chunk, the same twice, a message from a rank that
    /// has none to send. Whoever drives the exchanges has a defect then.
    pub fn handle(&mut self, event: Event) {
        match event {
            Event::LocalReady { kind: CollectiveKind::ReduceScatter, chunk } => {
                self.own_values(chunk)
            }
            Event::LocalReady { kind: CollectiveKind::AllGather, chunk } => {
                let owner = self.layout.chunk(chunk).owner;
                assert_eq!(owner, self.rank, "{chunk} is handed out by its owner");
                self.gathered(chunk);
            }
            Event::Received { kind: CollectiveKind::ReduceScatter, chunk, from } => {
                self.partial(chunk, from)
            }
            Event::Received { kind: CollectiveKind::AllGather, chunk, from } => {
                self.final_values(chunk, from)
            }
        }
    }

    /// The next action, if there is one.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    // ---- Who sends to whom ----

    /// The messages that are folded into a chunk here, in this order.
    fn sources(&self, chunk: ChunkId) -> u32 {
        let owner = self.layout.chunk(chunk).owner;
        match self.layout.topology {
            Topology::Ring => u32::from(self.rank != self.layout.next(owner)),
            Topology::Star if self.rank == owner => self.layout.world - 1,
            Topology::Star => 0,
        }
    }

    /// Where the message number `index` of [`Self::sources`] comes from.
    fn source(&self, index: u32) -> Rank {
        match self.layout.topology {
            Topology::Ring => self.layout.previous(self.rank),
            Topology::Star => Rank(index + 1),
        }
    }

    /// Where the partial sum goes from here; nowhere from its owner.
    fn target(&self, chunk: ChunkId) -> Option<Rank> {
        let owner = self.layout.chunk(chunk).owner;
        match self.layout.topology {
            _ if self.rank == owner => None,
            Topology::Ring => Some(self.layout.next(self.rank)),
            Topology::Star => Some(owner),
        }
    }

    // ---- Reduce ----

    fn own_values(&mut self, chunk: ChunkId) {
        let ready = std::mem::replace(&mut self.chunks[chunk.index()].ready, true);
        assert!(!ready, "{chunk} was ready on {} before", self.rank);
        if self.sources(chunk) == 0 && self.target(chunk).is_some() {
            let bucket = self.layout.chunk(chunk).bucket;
            self.buckets[bucket.index()].waiting.push_back(chunk);
            self.begin(bucket);
        } else {
            self.fold(chunk);
        }
    }

    fn partial(&mut self, chunk: ChunkId, from: Rank) {
        let progress = &self.chunks[chunk.index()];
        let sources = progress.folded..self.sources(chunk);
        let is_due = sources.into_iter().any(|index| self.source(index) == from);
        let is_new = is_due && !progress.early.contains(&from);
        assert!(is_new, "{} expects no partial sum of {chunk} from {from}", self.rank);
        self.chunks[chunk.index()].early.push(from);
        self.fold(chunk);
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

    /// Folds what has come, in order, and passes on what is complete.
    fn fold(&mut self, chunk: ChunkId) {
        if !self.chunks[chunk.index()].ready {
            return;
        }
        let sources = self.sources(chunk);
        while self.chunks[chunk.index()].folded < sources {
            let from = self.source(self.chunks[chunk.index()].folded);
            let progress = &mut self.chunks[chunk.index()];
            let Some(at) = progress.early.iter().position(|rank| *rank == from) else { return };
            progress.early.swap_remove(at);
            progress.folded += 1;
            self.actions.push_back(Action::Accumulate { chunk, from });
        }
        self.reduced(chunk);
    }

    /// All that this rank adds to a chunk is added.
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

    // ---- Gather ----

    fn final_values(&mut self, chunk: ChunkId, from: Rank) {
        let owner = self.layout.chunk(chunk).owner;
        let expected = match self.layout.topology {
            Topology::Ring => self.layout.previous(self.rank),
            Topology::Star => owner,
        };
        let is_due = self.rank != owner && from == expected;
        assert!(is_due, "{} expects no final values of {chunk} from {from}", self.rank);
        self.actions.push_back(Action::StoreFinal { chunk, from });
        self.gathered(chunk);
    }

    /// The final values are there: they go on.
    fn gathered(&mut self, chunk: ChunkId) {
        let before = std::mem::replace(&mut self.chunks[chunk.index()].gathered, true);
        assert!(!before, "the final values of {chunk} came to {} before", self.rank);
        let (owner, kind) = (self.layout.chunk(chunk).owner, CollectiveKind::AllGather);
        match self.layout.topology {
            Topology::Ring => {
                let to = self.layout.next(self.rank);
                if to != owner {
                    self.actions.push_back(Action::Send { kind, chunk, to });
                }
            }
            Topology::Star if self.rank == owner => {
                let others = (0..self.layout.world).map(Rank).filter(|to| *to != owner);
                self.actions.extend(others.map(|to| Action::Send { kind, chunk, to }));
            }
            Topology::Star => (),
        }
        let bucket = self.layout.chunk(chunk).bucket;
        let count = &mut self.buckets[bucket.index()];
        count.gathered += 1;
        if count.gathered == self.layout.chunks_of(bucket).len() {
            self.actions.push_back(Action::Done { kind, bucket });
        }
    }
}
