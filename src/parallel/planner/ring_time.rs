//! Time of a step of data-parallel ranks in a ring with unequal devices and links, by recurrence:
//! a chunk passes a link at `max(its arrival, the end of the chunk before it) + bytes / rate`, and
//! arrives one latency later. It is the part of [`crate::sim`] that decides times, without
//! mailboxes and values, so that it takes rings of 1,000 ranks.
//!
//! Equal to the simulation to the nanosecond if gradients are added on the host, every node reads
//! its own inputs, readback slots are not limited, nothing is random, and no two chunks reach one
//! link or ring thread in the same nanosecond; the simulation draws the order of those.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::collective::ShardLayout;
use crate::sim::LinkModel;
use crate::sim::queue::nanos;
use potluck_core::{BucketId, Nanos, Position};

/// Speeds of a rank of the ring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingRank {
    /// Link to the next rank.
    pub link: LinkModel,
    /// Readback from the device, and upload to it.
    pub read_back: LinkModel,
    pub upload: LinkModel,
    /// Additions on the host.
    pub host: LinkModel,
    /// Seconds to update one element.
    pub update_element_s: f64,
}

/// Ring of ranks that hold the whole model.
#[derive(Clone, Copy, Debug)]
pub struct RingStep<'a> {
    /// Layout of the buckets: rings of all ranks.
    pub layout: &'a ShardLayout,
    /// Buckets in the order in which their gradients become complete.
    pub order: &'a [BucketId],
    pub ranks: &'a [RingRank],
    /// By rank, and then by place in `order`: nanoseconds since the rank began the step after which
    /// its device has the gradients. Ascending.
    pub complete: &'a [Vec<Nanos>],
    /// Seconds of a message between a rank and the coordinator of the votes.
    pub control_s: f64,
    /// Window as in [`crate::collective::Exchange::new`].
    pub window: usize,
}

/// Times of a step in nanoseconds since its begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingStepTimes {
    /// The last device has computed its gradients.
    pub computed: Nanos,
    /// The last rank has voted, and so has its sums.
    pub voted: Nanos,
    /// All ranks know that all have the new parameters.
    pub ended: Nanos,
}

/// Number of ranks that are no longer served by the recurrence: its memory grows with their square.
pub const RANKS_MAX: usize = 2_048;

impl RingStep<'_> {
    /// Returns the times of a step.
    ///
    /// # Panics
    /// If there are fewer than two ranks, or the lists do not have an entry for each.
    pub fn times(&self) -> RingStepTimes {
        assert!(self.ranks.len() > 1 && self.complete.len() == self.ranks.len(), "no ring");
        let mut state = RingState::new(self);
        let control = nanos(self.control_s);
        // The first message to a rank arrives after the one that began the run.
        let begin = control.max(1);
        let mut computed = 0;
        for (rank, complete) in self.complete.iter().enumerate() {
            let at = begin + complete.last().copied().unwrap_or(0);
            state.device_free[rank] = at;
            computed = computed.max(at);
        }
        state.reduce_scatter(begin);
        let mut voted = 0;
        for rank in 0..self.ranks.len() {
            voted = voted.max(state.idle_at(rank).max(state.answered[rank]));
        }
        state.all_gather(voted + 2 * control);
        let mut ended = 0;
        for rank in 0..self.ranks.len() {
            ended = ended.max(state.answered[rank] + 2 * control).max(state.idle_at(rank));
        }
        RingStepTimes { computed, voted, ended }
    }
}

/// Next work on a chunk: its time, and the rank and the chunk by number.
type Due = Reverse<(Nanos, u32, u32)>;

/// Chunk, by the numbers that the recurrence needs.
#[derive(Clone, Copy, Debug)]
struct RingChunk {
    elements: usize,
    owner: u32,
    /// Place of its bucket in the order.
    bucket: u32,
    /// Number among the chunks of its shard.
    round: u32,
}

/// Progress of the sums of a bucket on one rank.
#[derive(Clone, Copy, Debug, Default)]
struct BucketProgress {
    /// Own chunks that may begin, that have begun, and sums that have ended here.
    ready: u32,
    begun: u32,
    ended: u32,
    /// Chunks that were passed on, or ended here, in this phase.
    passed: u32,
}

struct RingState<'a> {
    of: &'a RingStep<'a>,
    chunks: Vec<RingChunk>,
    /// By bucket and then by owner: the first of its chunks; one more at the end.
    firsts: Vec<u32>,
    /// By bucket: the first of its places in a rank's readbacks.
    first_reads: Vec<usize>,
    /// Readbacks of a rank, with one for each shard and round, also where a shard has none.
    reads_of_rank: usize,
    /// By rank and then in order: time at which the ring thread has the gradients of a chunk.
    reads: Vec<Nanos>,
    progress: Vec<BucketProgress>,
    due: BinaryHeap<Due>,
    // By rank.
    link_free: Vec<Nanos>,
    host_free: Vec<Nanos>,
    device_free: Vec<Nanos>,
    read_free: Vec<Nanos>,
    read_last: Vec<Nanos>,
    upload_free: Vec<Nanos>,
    uploaded: Vec<Nanos>,
    /// Last message of the ring thread to its device thread.
    sent_last: Vec<Nanos>,
    /// Time at which the device thread has taken the last message.
    answered: Vec<Nanos>,
    /// Readbacks of parameters of the rank, in order.
    final_reads: Vec<Vec<Nanos>>,
}

impl<'a> RingState<'a> {
    fn new(of: &'a RingStep<'a>) -> Self {
        let world = of.ranks.len();
        let mut chunks = Vec::with_capacity(of.layout.chunks.len());
        let mut firsts = Vec::with_capacity(of.order.len() * world + 1);
        let mut first_reads = Vec::with_capacity(of.order.len());
        let mut reads_of_rank = 0;
        for (place, bucket) in of.order.iter().enumerate() {
            first_reads.push(reads_of_rank);
            let mut found = of.layout.chunks_of(*bucket).peekable();
            let mut rounds = 0;
            for owner in (0..world as u32).map(Position) {
                firsts.push(chunks.len() as u32);
                let mut round = 0;
                while let Some(chunk) =
                    found.next_if(|index| of.layout.chunks[*index].owner == owner)
                {
                    let elements = of.layout.chunks[chunk].range.len();
                    let bucket = place as u32;
                    chunks.push(RingChunk { elements, owner: owner.0, bucket, round });
                    round += 1;
                }
                rounds = rounds.max(round as usize);
            }
            reads_of_rank += rounds * world;
        }
        firsts.push(chunks.len() as u32);
        Self {
            of,
            firsts,
            first_reads,
            reads_of_rank,
            reads: vec![0; reads_of_rank * world],
            progress: vec![BucketProgress::default(); of.order.len() * world],
            due: BinaryHeap::with_capacity(chunks.len()),
            chunks,
            link_free: vec![0; world],
            host_free: vec![0; world],
            device_free: vec![0; world],
            read_free: vec![0; world],
            read_last: vec![0; world],
            upload_free: vec![0; world],
            uploaded: vec![0; world],
            sent_last: vec![0; world],
            answered: vec![0; world],
            final_reads: vec![Vec::new(); world],
        }
    }

    fn world(&self) -> u32 {
        self.of.ranks.len() as u32
    }

    fn next(&self, rank: u32) -> u32 {
        if rank + 1 == self.world() { 0 } else { rank + 1 }
    }

    /// Chunks of the shard of an owner.
    fn shard(&self, bucket: u32, owner: u32) -> std::ops::Range<u32> {
        let at = (bucket * self.world() + owner) as usize;
        self.firsts[at]..self.firsts[at + 1]
    }

    fn chunks_of(&self, bucket: u32) -> u32 {
        let first = (bucket * self.world()) as usize;
        self.firsts[first + self.world() as usize] - self.firsts[first]
    }

    fn progress(&mut self, rank: u32, bucket: u32) -> &mut BucketProgress {
        &mut self.progress[(bucket * self.of.ranks.len() as u32 + rank) as usize]
    }

    /// Time at which a rank has performed all commands and uploads.
    fn idle_at(&self, rank: usize) -> Nanos {
        self.device_free[rank].max(self.uploaded[rank])
    }

    /// Reads a chunk back that a device has from `from` on. Returns the time at which its ring
    /// thread has it; readbacks end in order, even if they take no time.
    fn read_back(&mut self, rank: usize, from: Nanos, elements: usize) -> Nanos {
        let link = &self.of.ranks[rank].read_back;
        self.read_free[rank] = from.max(self.read_free[rank]) + link.busy(elements);
        let done = self.read_free[rank] + nanos(link.latency_s);
        self.read_last[rank] = done.max(self.read_last[rank] + 1);
        self.read_last[rank]
    }

    fn upload(&mut self, rank: usize, now: Nanos, elements: usize) {
        let link = &self.of.ranks[rank].upload;
        self.upload_free[rank] = now.max(self.upload_free[rank]) + link.busy(elements);
        self.uploaded[rank] = self.upload_free[rank] + nanos(link.latency_s);
    }

    /// Sends a chunk to the next rank, whose work on it is due `from` the readback of its own
    /// values.
    fn send(&mut self, rank: u32, chunk: u32, at: Nanos) -> (Nanos, u32) {
        let link = &self.of.ranks[rank as usize].link;
        let free = &mut self.link_free[rank as usize];
        *free = at.max(*free) + link.busy(self.chunks[chunk as usize].elements);
        (*free + nanos(link.latency_s), self.next(rank))
    }

    /// Message to the device thread, after those before it.
    fn tell(&mut self, rank: u32, at: Nanos) -> Nanos {
        let last = &mut self.sent_last[rank as usize];
        *last = at.max(*last + 1);
        *last
    }

    // ---- Reduce-scatter ----

    /// Place of the readback of a chunk on a rank: rounds of all shards, from the one that the rank
    /// begins on.
    fn read_of(&self, rank: u32, chunk: RingChunk) -> usize {
        let world = self.world();
        let hop = (rank + 2 * world - 1 - chunk.owner) % world;
        let in_bucket = (chunk.round * world + hop) as usize;
        rank as usize * self.reads_of_rank + self.first_reads[chunk.bucket as usize] + in_bucket
    }

    fn read_gradients(&mut self, begin: Nanos) {
        let world = self.world();
        for rank in 0..world {
            for bucket in 0..self.of.order.len() as u32 {
                let from = begin + self.of.complete[rank as usize][bucket as usize];
                let first = self.first_reads[bucket as usize];
                let end = self.first_reads.get(bucket as usize + 1).copied();
                for at in 0..(end.unwrap_or(self.reads_of_rank) - first) as u32 {
                    let (round, hop) = (at / world, at % world);
                    let owner = (rank + 2 * world - 1 - hop) % world;
                    let shard = self.shard(bucket, owner);
                    let mut done = self.read_last[rank as usize];
                    if round < shard.len() as u32 {
                        let elements = self.chunks[(shard.start + round) as usize].elements;
                        done = self.read_back(rank as usize, from, elements);
                        if hop == 0 {
                            self.due.push(Reverse((done, rank, shard.start + round)));
                        }
                    }
                    self.reads[rank as usize * self.reads_of_rank + first + at as usize] = done;
                }
            }
        }
    }

    fn reduce_scatter(&mut self, begin: Nanos) {
        self.read_gradients(begin);
        while let Some(Reverse((at, rank, id))) = self.due.pop() {
            let chunk = self.chunks[id as usize];
            if rank == self.next(chunk.owner) {
                self.progress(rank, chunk.bucket).ready += 1;
                let free = self.host_free[rank as usize];
                self.begin_sums(rank, chunk.bucket, at.max(free));
                continue;
            }
            let host = &self.of.ranks[rank as usize].host;
            let free = &mut self.host_free[rank as usize];
            *free = at.max(*free) + host.busy(chunk.elements);
            let at = *free;
            if rank != chunk.owner {
                self.send_sum(rank, id, at);
                self.pass(rank, chunk.bucket, at);
                continue;
            }
            let told = self.tell(rank, at);
            let taken = self.taken(rank, told);
            self.upload(rank as usize, taken, chunk.elements);
            self.progress(rank, chunk.bucket).ended += 1;
            if !self.pass(rank, chunk.bucket, at) {
                self.begin_sums(rank, chunk.bucket, at);
            }
        }
    }

    /// Begins as many sums as the window allows.
    fn begin_sums(&mut self, rank: u32, bucket: u32, mut at: Nanos) {
        let ends = self.shard(bucket, rank).len() as u32;
        let owner = if rank == 0 { self.world() - 1 } else { rank - 1 };
        let first = self.shard(bucket, owner).start;
        loop {
            let window = self.of.window as u32;
            let progress = self.progress(rank, bucket);
            let is_open = progress.ended >= ends || progress.begun < progress.ended + window;
            if !is_open || progress.begun == progress.ready {
                return;
            }
            let id = first + progress.begun;
            progress.begun += 1;
            at += self.of.ranks[rank as usize].host.busy(self.chunks[id as usize].elements);
            self.host_free[rank as usize] = at;
            self.send_sum(rank, id, at);
            self.pass(rank, bucket, at);
        }
    }

    fn send_sum(&mut self, rank: u32, id: u32, at: Nanos) {
        let (there, next) = self.send(rank, id, at);
        let own = self.reads[self.read_of(next, self.chunks[id as usize])];
        self.due.push(Reverse((there.max(own), next, id)));
    }

    /// Counts a chunk. Returns true if it was the last one of its bucket.
    fn pass(&mut self, rank: u32, bucket: u32, at: Nanos) -> bool {
        let all = self.chunks_of(bucket);
        let progress = self.progress(rank, bucket);
        progress.passed += 1;
        if progress.passed < all {
            return false;
        }
        let told = self.tell(rank, at);
        self.answered[rank as usize] = self.taken(rank, told);
        true
    }

    /// Time at which a device thread takes a message: while readbacks are under way, it wakes with
    /// the next one.
    fn taken(&self, rank: u32, told: Nanos) -> Nanos {
        let first = rank as usize * self.reads_of_rank;
        let reads = &self.reads[first..first + self.reads_of_rank];
        woken(reads, told)
    }

    // ---- All-gather ----

    fn all_gather(&mut self, decided: Nanos) {
        let world = self.world();
        self.progress.fill(BucketProgress::default());
        for rank in 0..world {
            self.update(rank, decided);
        }
        while let Some(Reverse((mut at, rank, id))) = self.due.pop() {
            let chunk = self.chunks[id as usize];
            if rank == chunk.owner {
                let host = &self.of.ranks[rank as usize].host;
                let free = &mut self.host_free[rank as usize];
                *free = at.max(*free) + host.busy(chunk.elements);
                at = *free;
            } else {
                at = at.max(self.host_free[rank as usize]);
            }
            if self.next(rank) != chunk.owner {
                let (there, next) = self.send(rank, id, at);
                self.due.push(Reverse((there, next, id)));
            }
            if rank != chunk.owner {
                let told = self.tell(rank, at);
                let taken = woken(&self.final_reads[rank as usize], told);
                self.upload(rank as usize, taken, chunk.elements);
            }
            let all = self.chunks_of(chunk.bucket);
            let progress = self.progress(rank, chunk.bucket);
            progress.passed += 1;
            if progress.passed == all {
                let told = self.tell(rank, at);
                self.answered[rank as usize] = woken(&self.final_reads[rank as usize], told);
            }
        }
    }

    /// Updates the own shards of a rank, and reads them back.
    fn update(&mut self, rank: u32, decided: Nanos) {
        let of = &self.of.ranks[rank as usize];
        let mut free = decided.max(self.idle_at(rank as usize));
        for bucket in 0..self.of.order.len() as u32 {
            let shard = self.shard(bucket, rank);
            let mut elements = 0;
            for id in shard.clone() {
                elements += self.chunks[id as usize].elements;
            }
            free += nanos(elements as f64 * of.update_element_s);
            for id in shard {
                let elements = self.chunks[id as usize].elements;
                let done = self.read_back(rank as usize, free, elements);
                self.final_reads[rank as usize].push(done);
                self.due.push(Reverse((done, rank, id)));
            }
        }
        self.device_free[rank as usize] = free;
    }
}

/// Time at which a device thread takes a message of the time `told`, given the ascending ends of
/// its readbacks.
fn woken(reads: &[Nanos], told: Nanos) -> Nanos {
    let next = reads.partition_point(|done| *done < told);
    reads.get(next).copied().unwrap_or(told)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::collective::{CollectiveKind, ShardLayout, Topology};
    use crate::sim::queue::Random;
    use crate::sim::{Costs, MachineModel, SegmentCost, one_step, run};
    use crate::{Instruction, Program, Share, data_parallel};
    use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
    use potluck_graph::{Plan, PlanOptions, Unary, differentiate};

    /// A model with a bucket for each of its layers, some of which are small.
    fn plan() -> Plan {
        let config = MlpConfig {
            widths: vec![37, 300, 41, 500, 10],
            activation: Unary::Gelu,
            dropout: 0.0,
            loss: MlpLoss::SquaredError,
        };
        Plan::new(differentiate(mlp(&config).unwrap()).unwrap(), PlanOptions::new(4))
    }

    /// Speeds that differ in any digit, so that no two events are at one time.
    fn between(random: &mut Random, least: f64, most: f64) -> f64 {
        least + (most - least) * f64::from(random.word()) / f64::from(u32::MAX)
    }

    fn link(random: &mut Random, latency_s: f64, bytes_per_s: f64) -> LinkModel {
        LinkModel {
            latency_s: between(random, 0.1, 1.0) * latency_s,
            bytes_per_s: between(random, 0.1, 1.0) * bytes_per_s,
        }
    }

    struct Case {
        programs: Vec<Program>,
        layout: Arc<ShardLayout>,
        costs: Vec<Costs>,
        links: Vec<Vec<LinkModel>>,
        control_s: f64,
        window: usize,
    }

    impl Case {
        fn random(world: usize, seed: u64, overlap: bool, chunk_max: usize) -> Self {
            let plan = plan();
            let random = &mut Random::new(seed);
            let mut costs = Vec::new();
            let mut programs = Vec::new();
            for rank in 0..world as u32 {
                let segments = plan.segments.iter().map(|_| SegmentCost {
                    fixed_s: between(random, 0.0, 1e-4),
                    row_s: between(random, 0.0, 1e-4),
                });
                costs.push(Costs {
                    segments: segments.collect(),
                    inputs: None,
                    load_s: between(random, 0.0, 1e-5),
                    update_element_s: between(random, 0.0, 1e-9),
                    read_back: link(random, 1e-5, 1e9),
                    upload: link(random, 1e-5, 1e9),
                    host: link(random, 0.0, 4e9),
                });
                // The last rank has no samples in some cases.
                let count = if rank > 1 { random.word() % 8 } else { 3 + 4 * rank };
                let share = Share { first: 8 * rank, count, micro_batch: 4 };
                programs.push(data_parallel(&plan, share, overlap));
            }
            let mut links = Vec::new();
            for _ in 0..world {
                links.push((0..world).map(|_| link(random, 2e-4, 1e8)).collect());
            }
            let lengths: Vec<usize> =
                plan.buckets.iter().map(potluck_graph::Bucket::gradient_length).collect();
            let layout = ShardLayout::new(Topology::Ring, world as u32, &lengths, 64, chunk_max);
            let layout = Arc::new(layout);
            let control_s = between(random, 0.0, 1e-4);
            let window = 1 + seed as usize % 4;
            Self { programs, layout, costs, links, control_s, window }
        }

        /// The step by the simulation.
        fn simulated(&self) -> Nanos {
            let machine = MachineModel {
                costs: &self.costs,
                links: &self.links,
                control_s: self.control_s,
                window: self.window,
            };
            let report = run(&one_step(&self.programs, &self.layout, machine));
            assert!(report.violations.is_empty(), "{report}");
            nanos(report.seconds)
        }

        fn by_recurrence(&self) -> RingStepTimes {
            let world = self.programs.len();
            let mut order: Vec<BucketId> = Vec::new();
            let mut complete = Vec::new();
            for (program, costs) in self.programs.iter().zip(&self.costs) {
                let mut at = 0;
                let mut of_rank = Vec::new();
                order.clear();
                for instruction in &program.instructions {
                    match *instruction {
                        Instruction::Load { .. } => at += nanos(costs.load_s),
                        Instruction::Run { segment, micro_batch } => {
                            let rows = f64::from(program.micro_batches[micro_batch].rows);
                            let SegmentCost { fixed_s, row_s } = costs.segments[segment.index()];
                            at += nanos(fixed_s + rows * row_s);
                        }
                        Instruction::Start(one) if one.kind == CollectiveKind::ReduceScatter => {
                            order.push(one.bucket);
                            of_rank.push(at);
                        }
                        _ => {}
                    }
                }
                complete.push(of_rank);
            }
            let mut ranks = Vec::new();
            for (rank, costs) in self.costs.iter().enumerate() {
                ranks.push(RingRank {
                    link: self.links[rank][(rank + 1) % world],
                    read_back: costs.read_back,
                    upload: costs.upload,
                    host: costs.host,
                    update_element_s: costs.update_element_s,
                });
            }
            let step = RingStep {
                layout: &self.layout,
                order: &order,
                ranks: &ranks,
                complete: &complete,
                control_s: self.control_s,
                window: self.window,
            };
            step.times()
        }
    }

    #[test]
    fn recurrence_is_the_simulation_to_the_nanosecond() {
        for world in 2..=9 {
            for seed in 0..12 {
                for (overlap, chunk_max) in [(true, 1 << 18), (false, 1 << 18), (true, 512)] {
                    let case = Case::random(world, seed, overlap, chunk_max);
                    let times = case.by_recurrence();
                    let what = format!("{world} ranks, seed {seed}, {overlap}, {chunk_max}");
                    assert_eq!(times.ended, case.simulated(), "{what}: {times:?}");
                    assert!(times.computed <= times.voted && times.voted < times.ended, "{what}");
                }
            }
        }
    }
}
