//! Communication cost of collectives in messages and bytes: the formulas of their documentation
//! as functions, for a group of `size` ranks. A shard, or a block of a tree, of `s` bytes is sent
//! in `ceil(s / chunk)` messages.

use super::{CollectiveKind, Positions, ShardLayout, Topology};

/// Number and bytes of messages. The formulas of the collectives count the messages that the
/// busiest rank sends, or receives if that is more; [`sent_by`] counts the messages that one rank
/// sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommCost {
    /// Number of messages, sent one after the other.
    pub steps: u64,
    pub bytes: u64,
}

impl CommCost {
    /// Returns the cost of this collective followed by another.
    pub fn then(self, other: Self) -> Self {
        Self { steps: self.steps + other.steps, bytes: self.bytes + other.bytes }
    }

    /// Returns the seconds on links that start a message within `latency_s` and move
    /// `bytes_per_s` in each direction: `steps * latency + bytes / bandwidth` (Hockney 1994).
    pub fn seconds(self, latency_s: f64, bytes_per_s: f64) -> f64 {
        self.steps as f64 * latency_s + self.bytes as f64 / bytes_per_s
    }
}

/// Returns the messages and bytes that the rank at these positions sends for all chunks of a layout
/// in one phase, with elements of `element_bytes`.
pub fn sent_by(
    layout: &ShardLayout,
    positions: impl Into<Positions>,
    kind: CollectiveKind,
    element_bytes: u64,
) -> CommCost {
    let positions = positions.into();
    let mut cost = CommCost::default();
    for chunk in &layout.chunks {
        let bucket = chunk.bucket;
        let Some(position) = positions.of(bucket) else { continue };
        let messages = match (layout.topology_of(bucket), kind) {
            // Once around the ring, without the hop from the owner; or straight to the server.
            (_, CollectiveKind::ReduceScatter) => u64::from(chunk.owner != position),
            // Once around the ring, without the hop back to the owner.
            (Topology::Ring, CollectiveKind::AllGather) => {
                u64::from(chunk.owner != layout.next(bucket, position))
            }
            (Topology::Star, CollectiveKind::AllGather) => {
                u64::from(chunk.owner == position) * u64::from(layout.size_of(bucket) - 1)
            }
        };
        cost.steps += messages;
        cost.bytes += messages * chunk.range.len() as u64 * element_bytes;
    }
    cost
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use super::*;
    use crate::collective::rooted::levels;
    use crate::collective::{Action, Event, Exchange, RootedStep, rooted};
    use potluck_core::{ChunkId, Position};

    /// Cost of `times` transfers of all bytes.
    fn whole(times: u64, bytes: u64, chunk: u64) -> CommCost {
        CommCost { steps: times * bytes.div_ceil(chunk), bytes: times * bytes }
    }

    /// Cost of all shards but the smallest of `size`.
    fn all_but_a_shard(size: u32, bytes: u64, chunk: u64) -> CommCost {
        let size = u64::from(size);
        let (short, longer) = (bytes / size, bytes % size);
        let chunks_of = |shard: u64| shard.div_ceil(chunk);
        let steps = longer * chunks_of(short + 1) + (size - longer - 1) * chunks_of(short);
        CommCost { steps, bytes: bytes - short }
    }

    /// Cost of a ring reduce-scatter: `size - 1` steps per chunk of a shard, and `(size - 1) /
    /// size` of the bytes (except for uneven shards).
    fn ring_reduce_scatter(size: u32, bytes: u64, chunk: u64) -> CommCost {
        all_but_a_shard(size, bytes, chunk)
    }

    /// Cost of a ring all-gather, the same as of [`ring_reduce_scatter`].
    fn ring_all_gather(size: u32, bytes: u64, chunk: u64) -> CommCost {
        all_but_a_shard(size, bytes, chunk)
    }

    /// Cost of a ring all-reduce, both phases: `2 (size - 1)` steps per chunk of a shard, and
    /// `2 (size - 1) / size` of the bytes.
    fn ring_all_reduce(size: u32, bytes: u64, chunk: u64) -> CommCost {
        ring_reduce_scatter(size, bytes, chunk).then(ring_all_gather(size, bytes, chunk))
    }

    /// Cost of a star reduce: the server receives all bytes `size - 1` times.
    fn star_reduce(size: u32, bytes: u64, chunk: u64) -> CommCost {
        whole(u64::from(size) - 1, bytes, chunk)
    }

    /// Cost of a star gather: the server sends all bytes `size - 1` times.
    fn star_gather(size: u32, bytes: u64, chunk: u64) -> CommCost {
        whole(u64::from(size) - 1, bytes, chunk)
    }

    /// Cost of a star all-reduce, both phases: all bytes `2 (size - 1)` times through the server.
    fn star_all_reduce(size: u32, bytes: u64, chunk: u64) -> CommCost {
        star_reduce(size, bytes, chunk).then(star_gather(size, bytes, chunk))
    }

    /// Cost of [`rooted::reduce`]: the root receives all bytes `L` times.
    fn tree_reduce(size: u32, bytes: u64, chunk: u64) -> CommCost {
        whole(levels(size).into(), bytes, chunk)
    }

    /// Cost of [`rooted::broadcast`]: the root sends all bytes `L` times.
    fn tree_broadcast(size: u32, bytes: u64, chunk: u64) -> CommCost {
        whole(levels(size).into(), bytes, chunk)
    }

    /// Cost of [`rooted::all_reduce`]: `2 L` steps, all bytes `2 L` times through position 0.
    fn tree_all_reduce(size: u32, bytes: u64, chunk: u64) -> CommCost {
        tree_reduce(size, bytes, chunk).then(tree_broadcast(size, bytes, chunk))
    }

    /// Cost of [`rooted::gather`] of one block of `bytes` per rank: `size - 1` blocks.
    fn gather(size: u32, bytes: u64, chunk: u64) -> CommCost {
        whole(u64::from(size) - 1, bytes, chunk)
    }

    /// Cost of [`rooted::scatter`], the same as of [`gather`].
    fn scatter(size: u32, bytes: u64, chunk: u64) -> CommCost {
        whole(u64::from(size) - 1, bytes, chunk)
    }

    /// Cost of [`rooted::barrier`]: `L` messages without values.
    fn barrier(size: u32) -> CommCost {
        CommCost { steps: levels(size).into(), bytes: 0 }
    }

    /// Counters of the messages and bytes that ranks send and receive.
    #[derive(Clone, Debug, Default)]
    struct Tally {
        /// Sent and received totals, by rank.
        ranks: Vec<[CommCost; 2]>,
    }

    impl Tally {
        fn new(size: u32) -> Self {
            Self { ranks: vec![Default::default(); size as usize] }
        }

        fn count(&mut self, from: Position, to: Position, bytes: u64) {
            let message = CommCost { steps: 1, bytes };
            let [sent, _] = &mut self.ranks[from.index()];
            *sent = sent.then(message);
            let [_, received] = &mut self.ranks[to.index()];
            *received = received.then(message);
        }

        /// Cost as the formulas define it.
        fn cost(&self) -> CommCost {
            let all = || self.ranks.iter().flatten();
            CommCost {
                steps: all().map(|cost| cost.steps).max().unwrap_or(0),
                bytes: all().map(|cost| cost.bytes).max().unwrap_or(0),
            }
        }
    }

    /// Returns the cost of the messages of the state machines in one phase, for buckets counted
    /// in bytes.
    fn sent(
        topology: Topology,
        size: u32,
        bytes: u64,
        chunk: u64,
        kind: CollectiveKind,
    ) -> CommCost {
        let layout = ShardLayout::new(topology, size, &[bytes as usize], 1, chunk as usize);
        let layout = Arc::new(layout);
        let mut ranks: Vec<Exchange> = (0..size)
            .map(|position| Exchange::new(layout.clone(), Position(position), 2))
            .collect();
        let mut events = VecDeque::new();
        for chunk in (0..layout.chunks.len() as u32).map(ChunkId) {
            let owner = layout.chunk(chunk).owner;
            let ready = (0..size).map(Position);
            let ready = ready
                .filter(|position| kind == CollectiveKind::ReduceScatter || *position == owner);
            events.extend(ready.map(|position| (position, Event::LocalReady { kind, chunk })));
        }
        let mut tally = Tally::new(size);
        while let Some((position, event)) = events.pop_front() {
            let exchange = &mut ranks[position.index()];
            exchange.handle(0, event).unwrap();
            while let Some(action) = exchange.poll_action() {
                if let Action::Send { kind, chunk, to } = action {
                    tally.count(position, to, layout.chunk(chunk).range.len() as u64);
                    events.push_back((to, Event::Received { kind, chunk, from: position }));
                }
            }
        }
        tally.cost()
    }

    /// Cost of the messages of lists of steps, with each block in chunks.
    fn listed(
        size: u32,
        bytes: u64,
        chunk: u64,
        list: impl Fn(Position) -> Vec<RootedStep>,
    ) -> CommCost {
        let mut tally = Tally::new(size);
        for position in (0..size).map(Position) {
            for step in list(position) {
                if let RootedStep::Send { to, .. } = step {
                    let starts = (0..bytes).step_by(chunk as usize);
                    starts.for_each(|start| tally.count(position, to, chunk.min(bytes - start)));
                }
            }
        }
        tally.cost()
    }

    #[test]
    fn the_formulas_are_what_the_state_machines_send() {
        for size in 1..=9 {
            for (bytes, chunk) in [(0, 8), (1, 8), (100, 7), (720, 16), (721, 16), (5040, 5040)] {
                let ring = |kind| sent(Topology::Ring, size, bytes, chunk, kind);
                assert_eq!(
                    ring(CollectiveKind::ReduceScatter),
                    ring_reduce_scatter(size, bytes, chunk)
                );
                assert_eq!(ring(CollectiveKind::AllGather), ring_all_gather(size, bytes, chunk));
                let star = |kind| sent(Topology::Star, size, bytes, chunk, kind);
                assert_eq!(star(CollectiveKind::ReduceScatter), star_reduce(size, bytes, chunk));
                assert_eq!(star(CollectiveKind::AllGather), star_gather(size, bytes, chunk));
            }
        }
    }

    #[test]
    fn the_formulas_are_what_the_lists_send() {
        for size in 1..=9 {
            for root in (0..size).map(Position) {
                let (bytes, chunk) = (100, 7);
                let of = |list: fn(u32, Position, Position) -> Vec<RootedStep>| {
                    listed(size, bytes, chunk, |position| list(size, root, position))
                };
                assert_eq!(of(rooted::reduce), tree_reduce(size, bytes, chunk));
                assert_eq!(of(rooted::broadcast), tree_broadcast(size, bytes, chunk));
                assert_eq!(of(rooted::gather), gather(size, bytes, chunk));
                assert_eq!(of(rooted::scatter), scatter(size, bytes, chunk));
            }
            let barriers = listed(size, 1, 1, |position| rooted::barrier(size, position));
            assert_eq!(barriers.steps, barrier(size).steps);
        }
    }

    #[test]
    fn known_costs() {
        let mib = 1 << 20;
        assert_eq!(ring_all_reduce(4, 64 * mib, mib), CommCost { steps: 96, bytes: 96 * mib });
        assert_eq!(ring_all_reduce(1, 64 * mib, mib), CommCost { steps: 0, bytes: 0 });
        assert_eq!(star_all_reduce(4, mib, mib), CommCost { steps: 6, bytes: 6 * mib });
        assert_eq!(tree_all_reduce(5, 8, 8), CommCost { steps: 6, bytes: 48 });
        let seconds = CommCost { steps: 3, bytes: 1000 }.seconds(1e-3, 1e6);
        assert!((seconds - 4e-3).abs() < 1e-12);
    }

    /// Runs the exchanges of all ranks with elements of 4 bytes, and returns the traffic that
    /// each rank sent in the reduce-scatter and in the all-gather.
    fn exchanged(layout: &ShardLayout) -> Vec<[CommCost; 2]> {
        let layout = Arc::new(layout.clone());
        let all = 0..layout.size;
        let exchange = |position| Exchange::new(layout.clone(), Position(position), 1);
        let mut ranks: Vec<Exchange> = all.clone().map(exchange).collect();
        let mut events: VecDeque<(Position, Event)> = VecDeque::new();
        for chunk in (0..layout.chunks.len() as u32).map(ChunkId) {
            let ready = Event::LocalReady { kind: CollectiveKind::ReduceScatter, chunk };
            events.extend(all.clone().map(|position| (Position(position), ready)));
        }
        let mut sent = vec![[CommCost::default(); 2]; all.len()];
        while let Some((position, event)) = events.pop_front() {
            ranks[position.index()].handle(0, event).unwrap();
            while let Some(action) = ranks[position.index()].poll_action() {
                match action {
                    Action::Send { kind, chunk, to } => {
                        let bytes = 4 * layout.chunk(chunk).range.len() as u64;
                        let sum = &mut sent[position.index()][kind as usize];
                        *sum = sum.then(CommCost { steps: 1, bytes });
                        events.push_back((to, Event::Received { kind, chunk, from: position }));
                    }
                    Action::Reduced { chunk } => {
                        let kind = CollectiveKind::AllGather;
                        events.push_back((position, Event::LocalReady { kind, chunk }));
                    }
                    Action::Accumulate { .. } | Action::StoreFinal { .. } | Action::Done { .. } => {
                    }
                }
            }
        }
        sent
    }

    #[test]
    fn the_count_per_rank_is_what_an_exchange_sends() {
        for topology in [Topology::Ring, Topology::Star] {
            for world in 1..=5 {
                let layout = ShardLayout::new(topology, world, &[1000, 64, 4097], 64, 256);
                let kinds = [CollectiveKind::ReduceScatter, CollectiveKind::AllGather];
                let counted = |rank| kinds.map(|kind| sent_by(&layout, Position(rank), kind, 4));
                let counted: Vec<[CommCost; 2]> = (0..world).map(counted).collect();
                assert_eq!(counted, exchanged(&layout), "{topology:?} of {world}");
            }
        }
    }
}
