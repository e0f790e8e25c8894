//! Shard layout: cuts buckets into one shard per rank of their group, and shards into chunks of one
//! message each.

use std::fmt;
use std::ops::Range;

use super::bucket_groups::{BucketGroups, Positions};
use potluck_core::{BucketId, ChunkId, Position};

/// Topology of an exchange: the path that values take between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Topology {
    /// Ring: values travel from rank to rank; every rank owns a shard of each bucket.
    Ring,
    /// Star: values travel to and from position 0, the server, which owns all buckets
    /// ("parameter server").
    Star,
}

impl Topology {
    /// Returns the name in configurations and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Star => "star",
        }
    }
}

/// Chunk: a part of a shard that is sent in one message.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Chunk {
    pub bucket: BucketId,
    /// Range of elements of the bucket.
    pub range: Range<usize>,
    /// Position of the rank that reduces and updates the chunk and sends its final values to the
    /// other ranks.
    pub owner: Position,
}

/// Display name: the bucket and its elements.
impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}..{}", self.bucket, self.range.start, self.range.end)
    }
}

/// Bucket of a layout: its number of elements, the number of ranks that hold it, and their
/// topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LaidOutBucket {
    pub length: usize,
    pub size: u32,
    pub topology: Topology,
}

/// Shard layout of buckets, each held by a group of ranks; the same on every rank. It knows
/// positions in the groups only.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShardLayout {
    /// Topology of the group of all ranks; [`ShardLayout::of_buckets`] has one for each bucket.
    pub topology: Topology,
    /// Number of ranks that hold the buckets together: the size of the group if all buckets have
    /// the same.
    pub size: u32,
    /// Chunks, ordered by bucket, then by position.
    pub chunks: Vec<Chunk>,
    align: usize,
    chunk_max: usize,
    buckets: Vec<LaidOutBucket>,
    /// Index of the first chunk of each bucket, and the number of chunks at the end.
    firsts: Vec<usize>,
}

/// Returns part `part` of `units` units cut into `parts` parts, the longer ones first.
fn cut(units: usize, parts: usize, part: usize) -> Range<usize> {
    let length = units / parts;
    let longer = units % parts;
    let start = part * length + part.min(longer);
    start..start + length + usize::from(part < longer)
}

/// Returns the number of elements of a chunk in the layout of one bucket of `length` elements in a
/// ring of `size` ranks, without alignment, as [`ShardLayout::new`] cuts it; `None` if there is no
/// such chunk. Nothing is allocated, so the numbers may come from an untrusted peer.
pub(crate) fn ring_chunk_length(
    size: u32,
    length: usize,
    chunk_max: usize,
    chunk: ChunkId,
) -> Option<usize> {
    let size = size as usize;
    let chunk = chunk.index();
    if size == 0 || chunk_max == 0 {
        return None;
    }
    // The longer shards come first, each one element longer than the others.
    let shard = length / size;
    let longer = length % size;
    let of_longer = (shard + 1).div_ceil(chunk_max);
    let of_others = shard.div_ceil(chunk_max);
    let in_longer = longer.checked_mul(of_longer)?;
    let (shard, parts, part) = if chunk < in_longer {
        (shard + 1, of_longer, chunk % of_longer)
    } else {
        let behind = chunk - in_longer;
        if of_others == 0 || behind / of_others >= size - longer {
            return None;
        }
        (shard, of_others, behind % of_others)
    };
    Some(cut(shard, parts, part).len())
}

impl ShardLayout {
    /// Cuts buckets of these lengths (in elements), which one group of `size` ranks holds. Bounds
    /// of shards and chunks are multiples of `align` elements except for the end of a bucket; a
    /// chunk has at most `chunk_max` elements, and shards may be empty. Shards of a bucket differ
    /// by at most one unit of alignment, and in their number of chunks by at most one.
    ///
    /// # Panics
    ///
    /// Panics if `size` is 0, or if a chunk could not hold a unit of `align >= 1` elements.
    pub fn new(
        topology: Topology,
        size: u32,
        lengths: &[usize],
        align: usize,
        chunk_max: usize,
    ) -> Self {
        let buckets: Vec<LaidOutBucket> =
            lengths.iter().map(|&length| LaidOutBucket { length, size, topology }).collect();
        Self::of_buckets(topology, size, &buckets, align, chunk_max)
    }

    /// Cuts buckets with different groups, as [`ShardLayout::new`] does; `size` is the number of
    /// ranks of all groups together.
    ///
    /// # Panics
    ///
    /// Panics as [`ShardLayout::new`] does.
    pub fn of_buckets(
        topology: Topology,
        size: u32,
        buckets: &[LaidOutBucket],
        align: usize,
        chunk_max: usize,
    ) -> Self {
        assert!(size > 0 && buckets.iter().all(|of| of.size > 0), "a layout needs a rank");
        assert!(align > 0 && chunk_max >= align, "chunks of {chunk_max} cannot keep to {align}");
        let mut layout = Self {
            topology,
            size,
            chunks: Vec::new(),
            align,
            chunk_max,
            buckets: buckets.to_vec(),
            firsts: vec![0],
        };
        for bucket in (0..layout.buckets.len() as u32).map(BucketId) {
            for position in 0..layout.size_of(bucket) {
                layout.cut_shard(bucket, Position(position));
            }
            layout.firsts.push(layout.chunks.len());
        }
        layout
    }

    /// Appends the chunks of a shard: as few as their size allows, nearly equal.
    fn cut_shard(&mut self, bucket: BucketId, owner: Position) {
        let shard = self.shard(bucket, owner);
        let units = shard.len().div_ceil(self.align);
        let parts = units.div_ceil(self.chunk_max / self.align);
        for part in 0..parts {
            let units = cut(units, parts, part);
            let start = shard.start + units.start * self.align;
            let range = start..(shard.start + units.end * self.align).min(shard.end);
            self.chunks.push(Chunk { bucket, range, owner });
        }
    }

    /// Returns true if the chunks are parts of the buckets, which these groups hold: false only
    /// for the layout of a damaged message.
    pub fn is_sound(&self, groups: &BucketGroups) -> bool {
        let buckets = self.buckets.len();
        let ends = [self.firsts.first(), self.firsts.last()];
        let are_counted = groups.buckets() == buckets
            && self.firsts.len() == buckets + 1
            && ends == [Some(&0), Some(&self.chunks.len())]
            && self.firsts.is_sorted();
        let has_sizes =
            self.size == groups.world() && self.align > 0 && self.align <= self.chunk_max;
        // So that no bound of a chunk overflows.
        let is_in_memory = |elements: usize| elements <= isize::MAX as usize;
        let fit = self.buckets.iter().all(|of| is_in_memory(of.length));
        if !are_counted || !has_sizes || !fit || !is_in_memory(self.chunk_max) {
            return false;
        }
        for (bucket, of) in (0..).map(BucketId).zip(&self.buckets) {
            let is_part = |chunk: &Chunk| {
                let Range { start, end } = chunk.range;
                chunk.bucket == bucket
                    && chunk.owner.0 < of.size
                    && start <= end
                    && end <= of.length
                    && end - start <= self.chunk_max
            };
            let group = groups.of(bucket).size() as usize;
            let chunks = &self.chunks[self.chunks_of(bucket)];
            if of.size == 0 || of.size as usize != group || !chunks.iter().all(is_part) {
                return false;
            }
        }
        true
    }

    pub fn chunk(&self, id: ChunkId) -> &Chunk {
        &self.chunks[id.index()]
    }

    /// Returns the number of buckets.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// Returns the number of ranks in the group of a bucket.
    pub fn size_of(&self, bucket: BucketId) -> u32 {
        self.buckets[bucket.index()].size
    }

    pub(crate) fn topology_of(&self, bucket: BucketId) -> Topology {
        self.buckets[bucket.index()].topology
    }

    /// Returns the number of elements of a bucket.
    pub fn length(&self, bucket: BucketId) -> usize {
        self.buckets[bucket.index()].length
    }

    /// Returns the maximum number of elements of a chunk.
    pub fn chunk_max(&self) -> usize {
        self.chunk_max
    }

    /// Returns the shard of a bucket that the rank at a position owns; it may be empty.
    pub fn shard(&self, bucket: BucketId, position: Position) -> Range<usize> {
        let length = self.length(bucket);
        let units = length.div_ceil(self.align);
        let units = match self.topology_of(bucket) {
            Topology::Ring => cut(units, self.size_of(bucket) as usize, position.index()),
            Topology::Star if position.index() == 0 => 0..units,
            Topology::Star => units..units,
        };
        (units.start * self.align).min(length)..(units.end * self.align).min(length)
    }

    /// Returns the chunks of a bucket, as indices of [`ShardLayout::chunks`].
    pub fn chunks_of(&self, bucket: BucketId) -> Range<usize> {
        self.firsts[bucket.index()]..self.firsts[bucket.index() + 1]
    }

    /// Returns the chunks of a bucket in the order in which the exchange at a position uses its
    /// rank's own values if all ranks are equally fast: in a ring, the first chunk of each shard,
    /// beginning with the one that this rank begins and then in the order of arrival, then the
    /// second chunk of each shard, up to the last.
    ///
    /// A rank that reads values in this order needs memory for one chunk only. Take the first
    /// chunk of the order, round by round, that some rank has not used: the rank that begins it
    /// needs no message, its window is open because every sum of earlier rounds has ended, and
    /// for each next rank it is the first unused chunk as well. In the order of chunks
    /// instead, ranks with little memory would deadlock.
    pub(crate) fn consumption_order(&self, bucket: BucketId, position: Position) -> Vec<ChunkId> {
        let chunks = self.chunks_of(bucket).map(|index| ChunkId(index as u32));
        if self.topology_of(bucket) == Topology::Star {
            return chunks.collect();
        }
        let size = self.size_of(bucket) as usize;
        let mut shards: Vec<Vec<ChunkId>> = vec![Vec::new(); size];
        for id in chunks {
            shards[self.chunk(id).owner.index()].push(id);
        }
        let rounds = shards.iter().map(Vec::len).max().unwrap_or(0);
        let mut order = Vec::new();
        for round in 0..rounds {
            for hop in 0..size {
                // The shard that a rank begins is owned by the previous rank.
                let owner = (position.index() + 2 * size - 1 - hop) % size;
                order.extend(shards[owner].get(round).copied());
            }
        }
        order
    }

    /// Returns true if the rank at a position is the first to send a chunk: its own values, with
    /// nothing added.
    pub(crate) fn is_initiator(&self, id: ChunkId, position: Position) -> bool {
        let Chunk { bucket, owner, .. } = *self.chunk(id);
        match self.topology_of(bucket) {
            Topology::Ring => self.size_of(bucket) > 1 && position == self.next(bucket, owner),
            Topology::Star => position != owner,
        }
    }

    /// Returns the maximum number of messages that the rank at these positions receives in one
    /// exchange, over both phases: a bound for its mailbox, which must hold twice as many if ranks
    /// may already be in the next exchange.
    pub fn messages_max(&self, positions: impl Into<Positions>) -> usize {
        let positions = positions.into();
        let mut messages = 0;
        for bucket in (0..self.buckets() as u32).map(BucketId) {
            let chunks = self.chunks_of(bucket).len();
            let others = self.size_of(bucket) - 1;
            messages += match (self.topology_of(bucket), positions.of(bucket)) {
                (_, None) => 0,
                _ if others == 0 => 0,
                (Topology::Ring, _) => 2 * chunks,
                (Topology::Star, Some(Position(0))) => others as usize * chunks,
                (Topology::Star, _) => chunks,
            };
        }
        messages
    }

    /// Returns the position after another one in the ring of a bucket's group.
    pub fn next(&self, bucket: BucketId, position: Position) -> Position {
        Position((position.0 + 1) % self.size_of(bucket))
    }

    /// Returns the position before another one in the ring of a bucket's group.
    pub fn previous(&self, bucket: BucketId, position: Position) -> Position {
        let size = self.size_of(bucket);
        Position((position.0 + size - 1) % size)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use super::*;
    use crate::collective::{Action, CollectiveKind, Event, Exchange};

    fn shards(layout: &ShardLayout) -> Vec<Range<usize>> {
        (0..layout.size).map(|position| layout.shard(BucketId(0), Position(position))).collect()
    }

    #[test]
    fn shards_are_as_equal_as_the_alignment_allows() {
        let ring = |size, length| ShardLayout::new(Topology::Ring, size, &[length], 64, 128);
        assert_eq!(shards(&ring(3, 64 * 7)), [0..192, 192..320, 320..448]);
        assert_eq!(shards(&ring(3, 64 * 7 - 1)), [0..192, 192..320, 320..447]);
        assert_eq!(shards(&ring(3, 65)), [0..64, 64..65, 65..65]);
        assert_eq!(shards(&ring(2, 0)), [0..0, 0..0]);
        let star = ShardLayout::new(Topology::Star, 3, &[100], 64, 64);
        assert_eq!(shards(&star), [0..100, 100..100, 100..100]);
    }

    #[test]
    fn damaged_layouts_are_not_sound() {
        let sound = ShardLayout::new(Topology::Ring, 3, &[100, 0, 40], 4, 16);
        let groups = BucketGroups::all(3, 3);
        assert!(sound.is_sound(&groups) && groups.is_sound(3) && !groups.is_sound(2));
        assert!(!sound.is_sound(&BucketGroups::all(2, 3)));
        assert!(!sound.is_sound(&BucketGroups::all(3, 2)));
        let edits: [fn(&mut ShardLayout); 14] = [
            |layout| layout.size = 0,
            |layout| layout.align = 0,
            |layout| layout.chunk_max = usize::MAX,
            |layout| layout.buckets[1].length = usize::MAX,
            |layout| layout.chunk_max = 3,
            |layout| layout.firsts.truncate(3),
            |layout| layout.firsts[1] = usize::MAX,
            |layout| layout.firsts[3] += 1,
            |layout| layout.buckets[0].size = 0,
            |layout| layout.buckets[2].size = 4,
            |layout| layout.chunks[0].bucket = BucketId(3),
            |layout| layout.chunks[0].owner = Position(3),
            |layout| layout.chunks[0].range = 96..101,
            |layout| layout.chunks.truncate(4),
        ];
        for (index, edit) in edits.into_iter().enumerate() {
            let mut layout = sound.clone();
            edit(&mut layout);
            assert!(!layout.is_sound(&groups), "edit {index}");
        }
    }

    #[test]
    fn the_length_of_a_chunk_is_known_without_a_layout() {
        for (size, length) in (1..=5).flat_map(|size| (0..60).map(move |length| (size, length))) {
            for chunk_max in [1, 3, 7, 100] {
                let layout = ShardLayout::new(Topology::Ring, size, &[length], 1, chunk_max);
                let found = |chunk| ring_chunk_length(size, length, chunk_max, ChunkId(chunk));
                let count = layout.chunks.len() as u32;
                for (chunk, expected) in (0..).zip(&layout.chunks) {
                    assert_eq!(found(chunk), Some(expected.range.len()), "{size} {length}");
                }
                assert_eq!([count, count + 1, u32::MAX].map(found), [None; 3], "{size} {length}");
            }
        }
        assert_eq!(ring_chunk_length(3, usize::MAX, usize::MAX, ChunkId(1)), Some(usize::MAX / 3));
        assert_eq!(ring_chunk_length(0, 1, 1, ChunkId(0)), None);
    }

    /// Returns true if a reduce-scatter completes in which each rank has memory for one of its
    /// own chunks at a time and reads them in this order.
    fn ends(layout: &ShardLayout, order: impl Fn(Position) -> Vec<ChunkId>) -> bool {
        let shared = Arc::new(layout.clone());
        let ranks = || (0..layout.size).map(Position);
        let mut exchanges: Vec<_> =
            ranks().map(|position| Exchange::new(shared.clone(), position, 1)).collect();
        let mut unread: Vec<VecDeque<ChunkId>> = ranks().map(|r| order(r).into()).collect();
        let mut read: Vec<Option<ChunkId>> = vec![None; unread.len()];
        let mut messages = VecDeque::new();
        let kind = CollectiveKind::ReduceScatter;
        loop {
            let mut moved = false;
            for position in 0..exchanges.len() {
                if read[position].is_none()
                    && let Some(chunk) = unread[position].pop_front()
                {
                    (read[position], moved) = (Some(chunk), true);
                    exchanges[position].handle(0, Event::LocalReady { kind, chunk }).unwrap();
                }
                while let Some(action) = exchanges[position].poll_action() {
                    if let Action::Send { chunk, .. } | Action::Accumulate { chunk, .. } = action
                        && read[position] == Some(chunk)
                    {
                        read[position] = None;
                    }
                    if let Action::Send { chunk, to, .. } = action {
                        messages.push_back((chunk, Position(position as u32), to));
                    }
                }
            }
            if let Some((chunk, from, to)) = messages.pop_front() {
                exchanges[to.index()].handle(0, Event::Received { kind, chunk, from }).unwrap();
                moved = true;
            }
            if !moved {
                return unread.iter().all(VecDeque::is_empty) && read.iter().all(Option::is_none);
            }
        }
    }

    #[test]
    fn room_for_one_chunk_is_enough_in_the_order_of_use_and_not_in_that_of_positions() {
        let bucket = BucketId(0);
        for topology in [Topology::Ring, Topology::Star] {
            for size in 2..=9 {
                for length in [0, 1, 64, 1000, 5000] {
                    let layout = ShardLayout::new(topology, size, &[length], 64, 64);
                    let used = |position| layout.consumption_order(bucket, position);
                    assert!(ends(&layout, used), "{topology:?} of {size}, {length}");
                }
            }
        }
        let layout = ShardLayout::new(Topology::Ring, 2, &[5000], 64, 64);
        assert!(!ends(&layout, |_| (0..layout.chunks.len() as u32).map(ChunkId).collect()));
    }

    #[test]
    fn chunks_cover_every_bucket_in_order_and_keep_their_bounds() {
        for topology in [Topology::Ring, Topology::Star] {
            for size in 1..=9 {
                for (align, chunk_max) in [(1, 1), (1, 7), (4, 4), (4, 11), (64, 200)] {
                    let lengths = [0, 1, 63, 64, 65, 1000];
                    check(&ShardLayout::new(topology, size, &lengths, align, chunk_max), chunk_max);
                }
            }
        }
    }

    fn check(layout: &ShardLayout, chunk_max: usize) {
        for bucket in (0..layout.buckets()).map(|bucket| BucketId(bucket as u32)) {
            let chunks = &layout.chunks[layout.chunks_of(bucket)];
            let mut counts = vec![0; layout.size as usize];
            let mut end = 0;
            for chunk in chunks {
                assert_eq!((chunk.bucket, chunk.range.start), (bucket, end));
                assert!(!chunk.range.is_empty() && chunk.range.len() <= chunk_max);
                assert!(chunk.range.start.is_multiple_of(layout.align));
                let shard = layout.shard(bucket, chunk.owner);
                assert!(shard.start <= chunk.range.start && chunk.range.end <= shard.end);
                counts[chunk.owner.index()] += 1;
                end = chunk.range.end;
            }
            assert_eq!(end, layout.length(bucket));
            if layout.topology == Topology::Ring {
                assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
            }
        }
    }
}
