//! All ranks of an exchange in one thread: messages and readiness come in any order.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use potluck::base::{BucketId, ChunkId, Rank};
use potluck::collective::{Chunk, CollectiveKind, ShardLayout, Topology};
use potluck::comm::add::add_assign;
use potluck::comm::{ExchangeDriver, ExchangeIo, Message, PooledBuffer, SharedBuffer};
use proptest::prelude::*;

use super::dice::Dice;

/// One rank's values, results and outgoing messages.
#[derive(Default)]
struct Side {
    own: Vec<Vec<f32>>,
    result: Vec<Vec<f32>>,
    /// Chunks that this rank may hand out.
    reduced: Vec<ChunkId>,
    sent: Vec<(Rank, Message)>,
    done: Vec<(CollectiveKind, BucketId)>,
}

impl ExchangeIo for Side {
    type Error = Infallible;

    fn read_local(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        into: &mut [f32],
    ) -> Result<(), Infallible> {
        into.copy_from_slice(&self.own[chunk.bucket.index()][chunk.range.clone()]);
        Ok(())
    }

    fn add_local(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        partial: &mut [f32],
    ) -> Result<(), Infallible> {
        add_assign(partial, &self.own[chunk.bucket.index()][chunk.range.clone()]);
        Ok(())
    }

    fn on_reduced(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        sum: PooledBuffer,
    ) -> Result<SharedBuffer, Infallible> {
        self.result[chunk.bucket.index()][chunk.range.clone()].copy_from_slice(&sum);
        self.reduced.push(id);
        Ok(sum.share())
    }

    fn read_final(&mut self, _: ChunkId, chunk: &Chunk) -> Result<SharedBuffer, Infallible> {
        Ok(self.result[chunk.bucket.index()][chunk.range.clone()].to_vec().into())
    }

    fn on_gathered(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        values: &SharedBuffer,
    ) -> Result<(), Infallible> {
        self.result[chunk.bucket.index()][chunk.range.clone()].copy_from_slice(values);
        Ok(())
    }

    fn send(&mut self, to: Rank, message: Message) -> Result<(), Infallible> {
        self.sent.push((to, message));
        Ok(())
    }

    fn on_done(&mut self, kind: CollectiveKind, bucket: BucketId) -> Result<(), Infallible> {
        self.done.push((kind, bucket));
        Ok(())
    }
}

/// What may happen next to a rank.
enum Next {
    /// The chunks of a bucket become ready, one after the other.
    Ready {
        rank: usize,
        kind: CollectiveKind,
        chunks: VecDeque<ChunkId>,
    },
    Message {
        rank: usize,
        message: Message,
    },
}

/// All ranks, and everything on its way between them.
struct World {
    layout: Arc<ShardLayout>,
    window: usize,
    is_chained: bool,
    members: Vec<ExchangeDriver>,
    sides: Vec<Side>,
    rounds: Vec<usize>,
    next: Vec<Next>,
    dice: Dice,
}

impl World {
    fn new(layout: ShardLayout, window: usize, is_chained: bool, seed: u32) -> Self {
        let layout = Arc::new(layout);
        let member = |rank| {
            let member = ExchangeDriver::new(layout.clone(), Rank(rank), window);
            if is_chained { member.into_all_reduce() } else { member }
        };
        let members = (0..layout.world).map(member).collect();
        let side = |rank| Side { own: own(&layout, rank, 0, seed), ..Side::default() };
        let mut sides: Vec<Side> = (0..layout.world).map(side).collect();
        sides.iter_mut().for_each(|side| side.result = side.own.clone());
        let (rounds, dice) = (vec![0; layout.world as usize], Dice(seed, 0));
        Self { layout, window, is_chained, members, sides, rounds, next: Vec::new(), dice }
    }

    /// A rank's buckets become ready, in order, each at some time.
    fn enter(&mut self, rank: usize) {
        let Ok(()) = self.members[rank].start(&mut self.sides[rank]);
        let mut chunks: VecDeque<ChunkId> =
            (0..self.layout.chunks.len() as u32).map(ChunkId).collect();
        let turn = self.dice.below(chunks.len().max(1));
        chunks.rotate_left(turn);
        self.next.push(Next::Ready { rank, kind: CollectiveKind::ReduceScatter, chunks });
        self.collect(rank);
    }

    /// What a rank has sent and reduced becomes something that may happen.
    fn collect(&mut self, rank: usize) {
        let side = &mut self.sides[rank];
        for (to, message) in side.sent.drain(..) {
            self.next.push(Next::Message { rank: to.index(), message });
        }
        for chunk in side.reduced.drain(..) {
            if !self.is_chained {
                let chunks = VecDeque::from([chunk]);
                self.next.push(Next::Ready { rank, kind: CollectiveKind::AllGather, chunks });
            }
        }
    }

    /// Something happens; false when nothing is left to happen.
    fn step(&mut self) -> bool {
        if self.next.is_empty() {
            return false;
        }
        let pick = self.dice.below(self.next.len());
        let rank = match self.next.swap_remove(pick) {
            Next::Message { rank, message } => {
                let Ok(()) = self.members[rank].on_message(message, &mut self.sides[rank]);
                rank
            }
            Next::Ready { rank, kind, mut chunks } => {
                if let Some(chunk) = chunks.pop_front() {
                    let Ok(()) =
                        self.members[rank].on_local_ready(kind, chunk, &mut self.sides[rank]);
                    self.next.push(Next::Ready { rank, kind, chunks });
                }
                rank
            }
        };
        self.collect(rank);
        true
    }

    /// Partial sums on their way stay within the window, in each bucket and round, and messages
    /// within what the layout says.
    fn check_queues(&self, rounds: usize) {
        let mut waiting = vec![0; self.members.len()];
        for next in &self.next {
            if let Next::Message { rank, .. } = next {
                waiting[*rank] += 1;
            }
        }
        for (rank, waiting) in waiting.into_iter().enumerate() {
            assert!(waiting <= rounds.min(2) * self.layout.messages_max(Rank(rank as u32)));
        }
        let mut travelling = vec![0; self.layout.buckets()];
        for next in &self.next {
            if let Next::Message {
                message: Message { kind: CollectiveKind::ReduceScatter, chunk, .. },
                ..
            } = next
            {
                travelling[self.layout.chunk(*chunk).bucket.index()] += 1;
            }
        }
        for (bucket, travelling) in travelling.into_iter().enumerate() {
            let chunks = self.layout.chunks_of(BucketId(bucket as u32)).len();
            let bound = match self.layout.topology {
                Topology::Ring => self.layout.world as usize * self.window,
                Topology::Star => (self.layout.world as usize - 1) * chunks,
            };
            // A rank that is through may be in the next round already, and in none behind that.
            assert!(travelling <= rounds.min(2) * bound, "{travelling} over {bound}");
        }
    }
}

fn own(layout: &ShardLayout, rank: u32, round: u32, seed: u32) -> Vec<Vec<f32>> {
    let bucket = |bucket: usize| {
        let mut dice = Dice(seed ^ (rank << 8) ^ (round << 16) ^ (bucket as u32) << 24, 1 << 31);
        (0..layout.length(BucketId(bucket as u32))).map(|_| dice.value()).collect()
    };
    (0..layout.buckets()).map(bucket).collect()
}

/// The sums in the order that [`potluck::collective::exchange`] states.
fn reference(layout: &ShardLayout, own: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    let mut sums: Vec<Vec<f32>> = own[0].clone();
    for chunk in &layout.chunks {
        let world = layout.world;
        let first = match layout.topology {
            Topology::Ring => chunk.owner.0 + 1,
            Topology::Star => 0,
        };
        for i in chunk.range.clone() {
            let value = |k: u32| own[((first + k) % world) as usize][chunk.bucket.index()][i];
            let sum = (1..world).fold(value(0), |sum, k| sum + value(k));
            sums[chunk.bucket.index()][i] = sum;
        }
    }
    sums
}

fn bits(values: &[Vec<f32>]) -> Vec<Vec<u32>> {
    values.iter().map(|values| values.iter().map(|v| v.to_bits()).collect()).collect()
}

/// Each rank goes through the rounds at its own pace; ends in the results of the last one.
fn run(layout: ShardLayout, window: usize, is_chained: bool, seed: u32, rounds: usize) {
    let mut world = World::new(layout, window, is_chained, seed);
    let ranks = world.layout.world as usize;
    let expected: Vec<_> = (0..rounds as u32)
        .map(|round| {
            let own: Vec<_> =
                (0..ranks as u32).map(|r| own(&world.layout, r, round, seed)).collect();
            bits(&reference(&world.layout, &own))
        })
        .collect();
    (0..ranks).for_each(|rank| world.enter(rank));
    loop {
        for rank in 0..ranks {
            let round = world.rounds[rank];
            let side = &mut world.sides[rank];
            if round == rounds || side.done.len() < 2 * world.layout.buckets() {
                continue;
            }
            check_done(&mut side.done, world.layout.buckets());
            assert_eq!(bits(&side.result), expected[round], "{rank} in round {round}");
            world.rounds[rank] += 1;
            if round + 1 < rounds {
                side.own = own(&world.layout, rank as u32, round as u32 + 1, seed);
                side.result = side.own.clone();
                world.members[rank].restart();
                world.enter(rank);
            }
        }
        world.check_queues(rounds);
        if !world.step() {
            break;
        }
    }
    assert_eq!(world.rounds, vec![rounds; ranks], "deadlock: {:?}", world.sides[0].done);
}

/// Every bucket and phase is done once, and taken off the list.
fn check_done(done: &mut Vec<(CollectiveKind, BucketId)>, buckets: usize) {
    done.sort_by_key(|(kind, bucket)| (*bucket, *kind == CollectiveKind::AllGather));
    let both = |b| {
        [(CollectiveKind::ReduceScatter, BucketId(b)), (CollectiveKind::AllGather, BucketId(b))]
    };
    assert_eq!(*done, (0..buckets as u32).flat_map(both).collect::<Vec<_>>());
    done.clear();
}

fn topology() -> impl Strategy<Value = Topology> {
    prop_oneof![Just(Topology::Ring), Just(Topology::Star)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn sums_do_not_depend_on_who_is_when(
        topology in topology(),
        world in 1..=9u32,
        lengths in prop::collection::vec(0..600usize, 0..5),
        align in 1..=64usize,
        chunk_max in 64..200usize,
        window in 1..=4usize,
        is_chained: bool,
        seed: u32,
    ) {
        let layout = ShardLayout::new(topology, world, &lengths, align, chunk_max);
        run(layout, window, is_chained, seed, 3);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn long_buckets_are_summed_in_order(
        topology in topology(),
        world in 1..=9u32,
        length in 0..=100_000usize,
        chunk_max in 512..40_000usize,
        window in 1..=3usize,
        seed: u32,
    ) {
        run(ShardLayout::new(topology, world, &[length], 64, chunk_max), window, true, seed, 1);
    }
}
