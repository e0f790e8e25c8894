//! All ranks of an exchange in one thread: messages and readiness come in any order.

use std::collections::VecDeque;
use std::sync::Arc;

use potluck_core::{BucketId, ChunkId, Position, Round};
use potluck_parallel::collective::{Chunk, CollectiveKind, ExchangeError, ShardLayout, Topology};
use potluck_parallel::comm::add::add_assign;
use potluck_parallel::comm::{
    Addition, ExchangeDriver, ExchangeIo, Message, PooledBuffer, SharedBuffer,
};
use proptest::prelude::*;

use super::dice::Dice;

/// One rank's values, results and outgoing messages.
#[derive(Default)]
struct Side {
    own: Vec<Vec<f32>>,
    result: Vec<Vec<f32>>,
    /// Chunks that this rank may hand out.
    reduced: Vec<ChunkId>,
    sent: Vec<(Position, Message)>,
    /// True if additions end some time after they are requested, like those of a device.
    adds_later: bool,
    adding: Option<(ChunkId, PooledBuffer)>,
    done: Vec<(CollectiveKind, BucketId)>,
}

impl ExchangeIo for Side {
    type Error = ExchangeError;

    fn read_local(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        into: &mut [f32],
    ) -> Result<(), ExchangeError> {
        into.copy_from_slice(&self.own[chunk.bucket.index()][chunk.range.clone()]);
        Ok(())
    }

    fn add_local(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        mut partial: PooledBuffer,
    ) -> Result<Addition, ExchangeError> {
        add_assign(&mut partial, &self.own[chunk.bucket.index()][chunk.range.clone()]);
        if !self.adds_later {
            return Ok(Addition::Done(partial));
        }
        assert!(self.adding.replace((id, partial)).is_none(), "one addition at a time");
        Ok(Addition::Pending)
    }

    fn on_reduced(
        &mut self,
        id: ChunkId,
        chunk: &Chunk,
        sum: PooledBuffer,
    ) -> Result<SharedBuffer, ExchangeError> {
        self.result[chunk.bucket.index()][chunk.range.clone()].copy_from_slice(&sum);
        self.reduced.push(id);
        Ok(sum.share())
    }

    fn read_final(&mut self, _: ChunkId, chunk: &Chunk) -> Result<SharedBuffer, ExchangeError> {
        Ok(self.result[chunk.bucket.index()][chunk.range.clone()].to_vec().into())
    }

    fn on_gathered(
        &mut self,
        _: ChunkId,
        chunk: &Chunk,
        values: &SharedBuffer,
    ) -> Result<(), ExchangeError> {
        self.result[chunk.bucket.index()][chunk.range.clone()].copy_from_slice(values);
        Ok(())
    }

    fn send(&mut self, to: Position, message: Message) -> Result<(), ExchangeError> {
        self.sent.push((to, message));
        Ok(())
    }

    fn on_done(&mut self, kind: CollectiveKind, bucket: BucketId) -> Result<(), ExchangeError> {
        self.done.push((kind, bucket));
        Ok(())
    }
}

/// What may happen next to a member of the group.
enum Next {
    /// The chunks of a bucket become ready at a position, one after the other.
    Ready {
        at: usize,
        kind: CollectiveKind,
        chunks: VecDeque<ChunkId>,
    },
    Message {
        to: Position,
        message: Message,
    },
    /// The addition that is pending at a position ends.
    Added {
        at: usize,
    },
}

/// All members of a group, by position, and everything on its way between them.
struct World {
    layout: Arc<ShardLayout>,
    window: usize,
    all_reduces: bool,
    members: Vec<ExchangeDriver>,
    sides: Vec<Side>,
    rounds: Vec<usize>,
    next: Vec<Next>,
    dice: Dice,
}

impl World {
    fn new(layout: ShardLayout, window: usize, all_reduces: bool, seed: u32) -> Self {
        let layout = Arc::new(layout);
        let member = |at| {
            let member = ExchangeDriver::new(layout.clone(), Position(at), window);
            if all_reduces { member.into_all_reduce() } else { member }
        };
        let members = (0..layout.size).map(member).collect();
        // Every third rank adds on its device.
        let adds_later = |at: u32| (at + seed % 3).is_multiple_of(3);
        let side = |at| Side {
            own: own(&layout, at, 0, seed),
            adds_later: adds_later(at),
            ..Side::default()
        };
        let mut sides: Vec<Side> = (0..layout.size).map(side).collect();
        for side in &mut sides {
            side.result = side.own.clone();
        }
        let (rounds, dice) = (vec![0; layout.size as usize], Dice(seed, 0));
        Self { layout, window, all_reduces, members, sides, rounds, next: Vec::new(), dice }
    }

    /// A member's buckets become ready, in order, each at some time.
    fn enter(&mut self, at: usize) {
        self.members[at].start(&mut self.sides[at]).unwrap();
        let mut chunks: VecDeque<ChunkId> =
            (0..self.layout.chunks.len() as u32).map(ChunkId).collect();
        let turn = self.dice.below(chunks.len().max(1));
        chunks.rotate_left(turn);
        self.next.push(Next::Ready { at, kind: CollectiveKind::ReduceScatter, chunks });
        self.collect(at);
    }

    /// What a member has sent and reduced becomes something that may happen.
    fn collect(&mut self, at: usize) {
        let side = &mut self.sides[at];
        for (to, message) in side.sent.drain(..) {
            assert_eq!(message.from.index(), at);
            self.next.push(Next::Message { to, message });
        }
        let is_queued = |next: &Next| matches!(next, Next::Added { at: other } if *other == at);
        if side.adding.is_some() && !self.next.iter().any(is_queued) {
            self.next.push(Next::Added { at });
        }
        for chunk in side.reduced.drain(..) {
            if !self.all_reduces {
                let chunks = VecDeque::from([chunk]);
                self.next.push(Next::Ready { at, kind: CollectiveKind::AllGather, chunks });
            }
        }
    }

    /// Something happens; false when nothing is left to happen.
    fn step(&mut self) -> bool {
        if self.next.is_empty() {
            return false;
        }
        let pick = self.dice.below(self.next.len());
        let at = match self.next.swap_remove(pick) {
            Next::Message { to, message } => {
                let at = to.index();
                self.members[at].on_message(message, &mut self.sides[at]).unwrap();
                at
            }
            Next::Ready { at, kind, mut chunks } => {
                if let Some(chunk) = chunks.pop_front() {
                    let side = &mut self.sides[at];
                    self.members[at].on_local_ready(kind, chunk, side).unwrap();
                    self.next.push(Next::Ready { at, kind, chunks });
                }
                at
            }
            Next::Added { at } => {
                let (id, sum) = self.sides[at].adding.take().unwrap();
                self.members[at].on_added(id, sum, &mut self.sides[at]).unwrap();
                at
            }
        };
        self.collect(at);
        true
    }

    /// Partial sums on their way stay within the window, in each bucket and round, and messages
    /// within what the layout says.
    fn check_queues(&self, rounds: usize) {
        let mut waiting = vec![0; self.members.len()];
        for next in &self.next {
            if let Next::Message { to, .. } = next {
                waiting[to.index()] += 1;
            }
        }
        for (at, waiting) in (0..).map(Position).zip(waiting) {
            assert!(waiting <= rounds.min(2) * self.layout.messages_max(at));
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
                Topology::Ring => self.layout.size as usize * self.window,
                Topology::Star => (self.layout.size as usize - 1) * chunks,
            };
            // A rank that is through may be in the next round already, and in none behind that.
            assert!(travelling <= rounds.min(2) * bound, "{travelling} over {bound}");
        }
    }
}

fn own(layout: &ShardLayout, at: u32, round: u32, seed: u32) -> Vec<Vec<f32>> {
    let bucket = |bucket: usize| {
        let mut dice = Dice(seed ^ (at << 8) ^ (round << 16) ^ (bucket as u32) << 24, 1 << 31);
        (0..layout.length(BucketId(bucket as u32))).map(|_| dice.value()).collect()
    };
    (0..layout.buckets()).map(bucket).collect()
}

/// The sums in the order that [`potluck_parallel::collective::exchange`] states.
fn reference(layout: &ShardLayout, own: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    let mut sums: Vec<Vec<f32>> = own[0].clone();
    for chunk in &layout.chunks {
        let world = layout.size;
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

/// Each rank goes through the rounds at its own pace, with the expected bits in each.
fn run(layout: ShardLayout, window: usize, all_reduces: bool, seed: u32, rounds: usize) {
    let mut world = World::new(layout, window, all_reduces, seed);
    let ranks = world.layout.size as usize;
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
                let step = world.rounds[rank] as u64;
                world.members[rank].restart(Round { generation: 0, step, settles: false });
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
    fn sums_any_arrival_are_the_same(
        topology in topology(),
        world in 1..=9u32,
        lengths in prop::collection::vec(0..600usize, 0..5),
        align in 1..=64usize,
        chunk_max in 64..200usize,
        window in 1..=4usize,
        all_reduces: bool,
        seed: u32,
    ) {
        let layout = ShardLayout::new(topology, world, &lengths, align, chunk_max);
        run(layout, window, all_reduces, seed, 3);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn buckets_long_are_summed_in_order(
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

#[test]
fn messages_unexpected_are_errors() {
    let layout = Arc::new(ShardLayout::new(Topology::Ring, 3, &[6], 1, 2));
    let driver = |at| ExchangeDriver::<f32>::new(layout.clone(), Position(at), 1);
    let values = || vec![vec![1.0; 6]];
    let side = || Side { own: values(), result: values(), ..Side::default() };
    let (kind, chunk) = (CollectiveKind::ReduceScatter, ChunkId(0));
    let mut first = side();
    // Chunk 0 is owned by position 0, so position 1 begins its sum.
    driver(1).on_local_ready(kind, chunk, &mut first).unwrap();
    let (to, message) = first.sent.pop().unwrap();
    assert_eq!(to, Position(2));
    let error = driver(0).on_message(message, &mut side()).unwrap_err();
    let position = Some(Position(0));
    let unexpected =
        ExchangeError::UnexpectedMessage { kind, id: chunk, from: Position(1), position };
    assert_eq!(error, unexpected);

    let mut twice = driver(2);
    twice.on_local_ready(kind, chunk, &mut side()).unwrap();
    let error = twice.on_local_ready(kind, chunk, &mut side()).unwrap_err();
    assert_eq!(error, ExchangeError::ReadyTwice { id: chunk });
    let id = ChunkId(3);
    let error = twice.on_local_ready(kind, id, &mut side()).unwrap_err();
    assert_eq!(error, ExchangeError::UnknownChunk { id, chunks: 3 });
    let error = twice.on_local_ready(CollectiveKind::AllGather, chunk, &mut side()).unwrap_err();
    assert_eq!(error, ExchangeError::NotOwner { id: chunk, position: Some(Position(2)) });
    let sum = twice.pool().take(2);
    let error = twice.on_added(chunk, sum, &mut side()).unwrap_err();
    assert_eq!(error, ExchangeError::UnexpectedSum { id: chunk });
}

/// Messages of a rank that is rounds ahead, without end.
#[test]
fn rank_far_ahead_is_an_error() {
    let layout = Arc::new(ShardLayout::new(Topology::Ring, 2, &[4], 1, 2));
    let mut behind = ExchangeDriver::<f32>::new(layout.clone(), Position(0), 1);
    let values = || vec![vec![1.0; 4]];
    let side = || Side { own: values(), result: values(), ..Side::default() };
    let max = layout.messages_max(Position(0));
    for step in 1..=max as u64 + 1 {
        let mut ahead = ExchangeDriver::<f32>::new(layout.clone(), Position(1), 1);
        let mut sender = side();
        ahead.restart(Round { generation: 0, step, settles: false });
        ahead.on_local_ready(CollectiveKind::ReduceScatter, ChunkId(0), &mut sender).unwrap();
        let (_, message) = sender.sent.pop().unwrap();
        let result = behind.on_message(message, &mut side());
        assert_eq!(behind.strays(), step);
        if step as usize > max {
            assert_eq!(result, Err(ExchangeError::TooFarAhead { max }));
        } else {
            assert_eq!(result, Ok(()));
        }
    }
}

/// Messages of two later rounds, the later one first.
#[test]
fn messages_of_later_rounds_wait() {
    let layout = Arc::new(ShardLayout::new(Topology::Ring, 2, &[4], 1, 2));
    let values = || vec![vec![1.0; 4]];
    let side = || Side { own: values(), result: values(), ..Side::default() };
    let message = |step| {
        let mut ahead = ExchangeDriver::<f32>::new(layout.clone(), Position(1), 1);
        let mut sender = side();
        ahead.restart(Round { generation: 0, step, settles: false });
        ahead.on_local_ready(CollectiveKind::ReduceScatter, ChunkId(0), &mut sender).unwrap();
        sender.sent.pop().unwrap().1
    };
    let mut behind = ExchangeDriver::<f32>::new(layout.clone(), Position(0), 1);
    behind.restart(Round { generation: 0, step: 1, settles: false });
    for step in [3, 2] {
        behind.on_message(message(step), &mut side()).unwrap();
    }
    for step in [2, 3] {
        behind.restart(Round { generation: 0, step, settles: false });
        let mut own = side();
        behind.start(&mut own).unwrap();
        behind.on_local_ready(CollectiveKind::ReduceScatter, ChunkId(0), &mut own).unwrap();
        assert_eq!(own.reduced, [ChunkId(0)], "step {step}");
    }
    assert_eq!(behind.strays(), 2);
}
