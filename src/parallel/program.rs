//! Instructions, and the program of one rank for one step.

use crate::Mesh;
use std::fmt;
use std::sync::Arc;

use super::{Operation, Token};
use crate::collective::{Collective, CollectiveKind};
use potluck_core::format::counted;
use potluck_core::{BucketId, EdgeId, ReductionId, SegmentId};
use potluck_graph::Plan;

/// One instruction of a rank's program. Instructions name segments and buckets, not whole passes,
/// so that schedules differ only in their lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Instruction {
    /// Zero the gradients and the loss.
    ZeroGradients,
    /// Load the samples of a micro-batch into the plan's input tensors.
    Load { micro_batch: usize },
    /// Run a segment on a micro-batch.
    Run { segment: SegmentId, micro_batch: usize },
    /// Send the tensor of an edge; never waits.
    Send { edge: EdgeId, micro_batch: usize },
    /// Wait for the tensor of an edge, and write it to the device.
    Recv { edge: EdgeId, micro_batch: usize },
    /// Wait for what all ranks of the tensor group have sent for an all-reduce, reduce it in the
    /// order of the ranks, and write the result to the device.
    AllReduce { reduction: ReductionId, micro_batch: usize },
    /// Start this rank's part in a collective, which then runs asynchronously.
    Start(Collective),
    /// Wait until this rank's part in an operation is over.
    Wait(Token),
    /// Send this rank's vote, and wait for the verdict on the step.
    Verdict,
    /// Update the rank's shard of a bucket from its gradients.
    Update { bucket: BucketId },
}

/// Contiguous part of a rank's share of the global batch that runs at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct MicroBatch {
    /// Slot of the micro-batch's first sample in the global batch.
    pub first: u32,
    /// Number of samples in the micro-batch.
    pub rows: u32,
}

/// Instructions of one rank for one step.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Program {
    pub micro_batches: Vec<MicroBatch>,
    pub instructions: Vec<Instruction>,
}

impl Program {
    /// Returns the slot after the program's last sample; the largest over all ranks is the number
    /// of samples of a step.
    pub fn samples_end(&self) -> usize {
        self.micro_batches.iter().map(|part| (part.first + part.rows) as usize).max().unwrap_or(0)
    }

    /// Returns the segment with which each micro-batch ends: all run the same in the same order.
    pub fn last_segment(&self) -> Option<SegmentId> {
        self.instructions.iter().rev().find_map(|instruction| match instruction {
            Instruction::Run { segment, micro_batch: 0 } => Some(*segment),
            _ => None,
        })
    }

    /// Returns true if the program updates parameters if its verdict is a commit.
    pub fn updates(&self) -> bool {
        self.instructions
            .iter()
            .any(|instruction| matches!(instruction, Instruction::Update { .. }))
    }

    /// Returns the program up to its verdict: gradients are summed up, and no parameter is updated.
    /// For a program that neither begins with all-gathers nor leaves any.
    pub fn without_updates(&self) -> Self {
        let mut program = self.clone();
        program.instructions.truncate(self.before_verdict().count() + 1);
        program
    }

    fn before_verdict(&self) -> impl Iterator<Item = &Instruction> {
        self.instructions.iter().take_while(|one| **one != Instruction::Verdict)
    }

    /// Returns true if the program begins with the all-gathers of the previous step: no rank has
    /// the parameters of that step before all have voted.
    pub fn begins_with_gathers(&self) -> bool {
        self.before_verdict().any(is_start_of_gather)
    }

    /// Returns true if the program updates shards, and leaves their all-gathers to a later one.
    pub fn leaves_gathers(&self) -> bool {
        if !self.updates() {
            return false;
        }
        let reduces = self.instructions.iter().any(|instruction| match instruction {
            Instruction::Start(collective) => collective.kind == CollectiveKind::ReduceScatter,
            _ => false,
        });
        let after_verdict = &self.instructions[self.before_verdict().count()..];
        reduces && !after_verdict.iter().any(is_start_of_gather)
    }

    /// Returns the buckets that the program updates and that a rank with this plan holds alone. The
    /// norms of their gradients come from the device, the norms of all other gradients from the
    /// collectives that sum them over ranks.
    pub fn unreduced(&self, plan: &Plan) -> Vec<BucketId> {
        let mut alone = Vec::new();
        for bucket in plan.updated_buckets() {
            let update = Instruction::Update { bucket };
            let reduction = Instruction::Start(Collective::reduce_scatter(bucket));
            if plan.holds(bucket)
                && self.instructions.contains(&update)
                && !self.instructions.contains(&reduction)
            {
                alone.push(bucket);
            }
        }
        alone
    }

    /// Formats the program with the texts that `text` gives for its instructions.
    pub fn text_of(&self, text: impl Fn(&Instruction) -> String) -> String {
        let mut lines = String::new();
        for (index, MicroBatch { first, rows }) in self.micro_batches.iter().enumerate() {
            let samples = counted(*rows as usize, "sample", "samples");
            lines += &format!("micro-batch {index}: {samples} from slot {first}\n");
        }
        for (index, instruction) in self.instructions.iter().enumerate() {
            lines += &format!("{index:4} {}\n", text(instruction));
        }
        lines
    }
}

/// Cuts `count` samples from slot `first` on into micro-batches of at most `rows_max`.
pub fn micro_batches(first: u32, count: u32, rows_max: u32) -> Vec<MicroBatch> {
    let starts = (0..count).step_by(rows_max.max(1) as usize);
    starts.map(|at| MicroBatch { first: first + at, rows: rows_max.min(count - at) }).collect()
}

/// Contiguous part of the global batch that one rank computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Slot of the share's first sample; `count` is its number of samples.
    pub first: u32,
    pub count: u32,
    /// The most samples that the rank runs at once.
    pub micro_batch: u32,
}

/// Cuts a share into micro-batches of at most `share.micro_batch` samples, as few as possible and
/// nearly equal: sizes differ by at most one, the larger ones first.
pub(super) fn nearly_equal(share: Share) -> Vec<MicroBatch> {
    let pieces = share.count.div_ceil(share.micro_batch.max(1));
    let mut batches = Vec::with_capacity(pieces as usize);
    let mut first = share.first;
    for index in 0..pieces {
        let rows = share.count / pieces + u32::from(index < share.count % pieces);
        batches.push(MicroBatch { first, rows });
        first += rows;
    }
    batches
}

/// Returns the buckets that a step updates in the order in which a rank's gradients become final:
/// as the segments complete them, then the buckets that no segment completes. A property of the
/// plan, so it is the same on every rank, also on one that runs nothing.
fn completion_order(plan: &Plan) -> Vec<BucketId> {
    let (_, backward) = plan.passes();
    let mut order = Vec::with_capacity(plan.buckets.len());
    let finished = backward.iter().flat_map(|segment| &plan.segments[segment.index()].completes);
    for bucket in finished.copied().chain(plan.updated_buckets()) {
        if !order.contains(&bucket) {
            order.push(bucket);
        }
    }
    order
}

/// Returns the program of one data-parallel rank: it runs its share, reduce-scatters the gradients,
/// updates the shards that it owns and all-gathers the parameters. With `overlap`, a bucket's
/// reduction starts in the last micro-batch as soon as its gradients are complete, otherwise after
/// the whole backward pass.
///
/// Micro-batches are nearly equal, at most `share.micro_batch` samples each. A rank without a
/// sample runs no segment and takes part in every collective, with gradients of zero.
pub fn data_parallel(plan: &Plan, share: Share, overlap: bool) -> Program {
    let micro_batches = nearly_equal(share);
    let (forward, backward) = plan.passes();
    let buckets = completion_order(plan);
    let mut instructions = vec![Instruction::ZeroGradients];
    let mut started = Vec::new();
    for micro_batch in 0..micro_batches.len() {
        instructions.push(Instruction::Load { micro_batch });
        for &segment in forward.iter().chain(&backward) {
            instructions.push(Instruction::Run { segment, micro_batch });
            // Earlier micro-batches only accumulate.
            if overlap && micro_batch + 1 == micro_batches.len() {
                for &bucket in &plan.segments[segment.index()].completes {
                    instructions.push(Instruction::Start(Collective::reduce_scatter(bucket)));
                    started.push(bucket);
                }
            }
        }
    }
    for &bucket in &buckets {
        if !started.contains(&bucket) {
            instructions.push(Instruction::Start(Collective::reduce_scatter(bucket)));
        }
    }
    for &bucket in &buckets {
        instructions.push(Instruction::Wait(Token::of(Collective::reduce_scatter(bucket))));
    }
    instructions.push(Instruction::Verdict);
    for &bucket in &buckets {
        instructions.push(Instruction::Update { bucket });
        instructions.push(Instruction::Start(Collective::all_gather(bucket)));
    }
    for &bucket in &buckets {
        instructions.push(Instruction::Wait(Token::of(Collective::all_gather(bucket))));
    }
    Program { micro_batches, instructions }
}

/// Programs of a data-parallel rank whose all-gathers run in the next step, while it computes with
/// the buckets that have already arrived. Steps have the bits of [`data_parallel`].
///
/// After such a step, ranks have old parameters of the shards of others, until the next step, or
/// the program [`settle`](Self::settle), has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpreadPrograms {
    /// Step without all-gathers.
    pub first: Arc<Program>,
    /// Step that begins with the all-gathers of the one before it, and leaves its own.
    pub next: Arc<Program>,
    /// The all-gathers alone.
    pub settle: Arc<Program>,
}

impl SpreadPrograms {
    /// Returns true if the all-gathers of a run run in the next step: for replicas on several
    /// nodes. On one node they are fast, and the loss of a device would cost more than the step.
    pub fn are_used(overlap: bool, mesh: Mesh, nodes: &[u32]) -> bool {
        let is_over_nodes = nodes.iter().any(|node| *node != nodes[0]);
        overlap && is_over_nodes && !mesh.is_divided()
    }

    /// Derives the programs from those of all ranks, which have the whole plan each.
    pub fn of_ranks(programs: &[Program], plan: &Plan) -> Vec<Self> {
        let needs = plan.buckets_of_segments();
        programs.iter().map(|program| Self::new(program, plan, &needs)).collect()
    }

    /// Derives the programs from the program of a rank with this plan; `needs` has the buckets that
    /// each segment needs.
    pub fn new(program: &Program, plan: &Plan, needs: &[Vec<BucketId>]) -> Self {
        let (forward, _) = plan.passes();
        let mut order = Vec::new();
        for segment in &forward {
            order.extend(needs[segment.index()].iter().copied());
        }
        order.extend(completion_order(plan));
        let mut gathers = Vec::new();
        for bucket in order {
            let start = Instruction::Start(Collective::all_gather(bucket));
            if program.instructions.contains(&start) && !gathers.contains(&bucket) {
                gathers.push(bucket);
            }
        }
        let mut instructions = program.instructions.clone();
        instructions.retain(|instruction| !is_of_gather(instruction));
        let next = Program {
            micro_batches: program.micro_batches.clone(),
            instructions: behind_gathers(&instructions, &gathers, &forward, needs),
        };
        let first = Program { micro_batches: program.micro_batches.clone(), instructions };
        let mut settling = Vec::with_capacity(2 * gathers.len());
        for &bucket in &gathers {
            settling.push(Instruction::Start(Collective::all_gather(bucket)));
        }
        for &bucket in &gathers {
            settling.push(Instruction::Wait(Token::of(Collective::all_gather(bucket))));
        }
        let settle = Program { micro_batches: Vec::new(), instructions: settling };
        Self { first: Arc::new(first), next: Arc::new(next), settle: Arc::new(settle) }
    }
}

fn is_start_of_gather(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Start(_)) && is_of_gather(instruction)
}

fn is_of_gather(instruction: &Instruction) -> bool {
    let collective = match instruction {
        Instruction::Start(collective) => *collective,
        Instruction::Wait(Token { operation: Operation::Collective(collective), .. }) => {
            *collective
        }
        _ => return false,
    };
    collective.kind == CollectiveKind::AllGather
}

/// Returns instructions preceded by the all-gathers of these buckets. Each one is awaited before
/// the first segment that needs it, and all of them before the backward pass and before any
/// reduction.
fn behind_gathers(
    instructions: &[Instruction],
    gathers: &[BucketId],
    forward: &[SegmentId],
    needs: &[Vec<BucketId>],
) -> Vec<Instruction> {
    let mut waiting = gathers.to_vec();
    let mut placed: Vec<Instruction> =
        gathers.iter().map(|bucket| Instruction::Start(Collective::all_gather(*bucket))).collect();
    for instruction in instructions {
        let due = waiting.extract_if(.., |bucket| match instruction {
            Instruction::Run { segment, .. } if forward.contains(segment) => {
                needs[segment.index()].contains(bucket)
            }
            Instruction::ZeroGradients | Instruction::Load { .. } => false,
            _ => true,
        });
        for bucket in due {
            placed.push(Instruction::Wait(Token::of(Collective::all_gather(bucket))));
        }
        placed.push(*instruction);
    }
    placed
}

/// Returns the program of a rank that all-reduces its gradients, so that every rank holds the
/// sums, and does nothing else.
pub fn gradient_all_reduce(plan: &Plan) -> Program {
    let buckets = completion_order(plan);
    let mut instructions = Vec::with_capacity(3 * buckets.len());
    for &bucket in &buckets {
        instructions.push(Instruction::Start(Collective::reduce_scatter(bucket)));
    }
    for &bucket in &buckets {
        instructions.push(Instruction::Wait(Token::of(Collective::reduce_scatter(bucket))));
    }
    for &bucket in &buckets {
        instructions.push(Instruction::Wait(Token::of(Collective::all_gather(bucket))));
    }
    Program { micro_batches: Vec::new(), instructions }
}

/// Returns the program of a single rank without peers: each micro-batch forward and backward,
/// then one update. Gradients accumulate over micro-batches; at most one is in flight.
/// Micro-batches are nearly equal if their statistics matter.
pub fn single_rank(plan: &Plan, batch: u32, micro_batch: u32) -> Program {
    let micro_batches = match plan.rows_min() {
        1 => micro_batches(0, batch, micro_batch),
        _ => nearly_equal(Share { first: 0, count: batch, micro_batch }),
    };
    let (forward, backward) = plan.passes();
    let mut instructions = vec![Instruction::ZeroGradients];
    for micro_batch in 0..micro_batches.len() {
        instructions.push(Instruction::Load { micro_batch });
        for &segment in forward.iter().chain(&backward) {
            instructions.push(Instruction::Run { segment, micro_batch });
        }
    }
    instructions.push(Instruction::Verdict);
    instructions.extend(plan.updated_buckets().map(|bucket| Instruction::Update { bucket }));
    Program { micro_batches, instructions }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroGradients => write!(f, "zero gradients and loss"),
            Self::Load { micro_batch } => write!(f, "load micro-batch {micro_batch}"),
            Self::Run { segment, micro_batch } => {
                write!(f, "run {segment} on micro-batch {micro_batch}")
            }
            Self::Send { edge, micro_batch } => {
                write!(f, "send {edge} of micro-batch {micro_batch}")
            }
            Self::Recv { edge, micro_batch } => {
                write!(f, "receive {edge} of micro-batch {micro_batch}")
            }
            Self::AllReduce { reduction, micro_batch } => {
                write!(f, "{reduction} of micro-batch {micro_batch}")
            }
            Self::Start(collective) => write!(f, "start {collective}"),
            Self::Wait(token) => write!(f, "wait for {token}"),
            Self::Verdict => write!(f, "verdict"),
            Self::Update { bucket } => write!(f, "update {bucket}"),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text_of(Instruction::to_string))
    }
}

/// Returns consecutive shares of `counts` samples, each with the most samples that its rank runs
/// at once.
pub fn contiguous_shares(counts: &[u32], micro_batches: &[u32]) -> Vec<Share> {
    assert_eq!(counts.len(), micro_batches.len(), "a size and a micro-batch per rank");
    let mut shares = Vec::with_capacity(counts.len());
    let mut first = 0;
    for (&count, &micro_batch) in counts.iter().zip(micro_batches) {
        shares.push(Share { first, count, micro_batch });
        first += count;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::{Builder, Init, PassKind, PlanOptions, differentiate};

    pub(super) fn plan() -> Plan {
        let mut b = Builder::new();
        b.block("only");
        let x = b.input("x", &[1, 2]);
        let w = b.parameter("w", &[2, 2], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        let target = b.input("target", &[1, 2]);
        b.squared_error_loss(y, target).unwrap();
        Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(4))
    }

    #[test]
    fn the_last_micro_batch_takes_what_is_left() {
        let cut = micro_batches(5, 10, 4);
        let pairs: Vec<(u32, u32)> = cut.iter().map(|m| (m.first, m.rows)).collect();
        assert_eq!(pairs, [(5, 4), (9, 4), (13, 2)]);
    }

    #[test]
    fn every_micro_batch_runs_every_segment_before_the_verdict() {
        let plan = plan();
        let program = single_rank(&plan, 10, 4);
        let runs =
            program.instructions.iter().filter(|i| matches!(i, Instruction::Run { .. })).count();
        assert_eq!(runs, 3 * plan.segments.len());
        assert!(plan.phase(PassKind::BackwardWeight).count() > 0);
        let verdict = program.instructions.iter().position(|i| *i == Instruction::Verdict);
        let (before, after) = program.instructions.split_at(verdict.unwrap());
        assert!(before.iter().all(|i| !matches!(i, Instruction::Update { .. })));
        assert!(after[1..].iter().all(|i| matches!(i, Instruction::Update { .. })));
        assert!(program.to_string().contains("run s0 on micro-batch 2"));
        assert!(!program.begins_with_gathers() && !program.leaves_gathers());
    }

    /// Two blocks with a bucket each, and a bucket for a tensor that both use.
    fn tied() -> Plan {
        let mut b = Builder::new();
        b.block("first");
        let x = b.input("x", &[1, 2]);
        let w = b.parameter("w", &[2, 2], Init::Zeros);
        let shared = b.parameter("shared", &[2, 2], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        let y = b.linear(y, shared, None).unwrap();
        b.block("second");
        let v = b.parameter("v", &[2, 2], Init::Zeros);
        let y = b.linear(y, v, None).unwrap();
        let y = b.linear(y, shared, None).unwrap();
        let target = b.input("target", &[1, 2]);
        b.squared_error_loss(y, target).unwrap();
        Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(4))
    }

    fn share(count: u32, micro_batch: u32) -> Share {
        Share { first: 3, count, micro_batch }
    }

    fn position(program: &Program, wanted: Instruction) -> usize {
        let mut found = program.instructions.iter().enumerate().filter(|(_, i)| **i == wanted);
        let position = found.next().unwrap_or_else(|| panic!("no {wanted}")).0;
        assert_eq!(found.next(), None, "{wanted} twice");
        position
    }

    #[test]
    fn micro_batches_of_a_share_are_nearly_equal() {
        for count in 0..40 {
            for most in 1..12 {
                let cut = nearly_equal(share(count, most));
                assert_eq!(cut.len() as u32, count.div_ceil(most));
                assert_eq!(cut.iter().map(|m| m.rows).sum::<u32>(), count);
                assert!(cut.iter().all(|m| (1..=most).contains(&m.rows)));
                let sizes = cut.iter().map(|m| m.rows);
                assert!(sizes.clone().max().unwrap_or(0) - sizes.min().unwrap_or(0) <= 1);
                let mut next = 3;
                for m in cut {
                    assert_eq!(m.first, next);
                    next += m.rows;
                }
            }
        }
    }

    #[test]
    fn every_bucket_is_reduced_updated_and_gathered_once_in_this_order() {
        let plan = tied();
        assert!(plan.buckets.len() >= 3);
        for (count, overlap) in [(0, false), (0, true), (1, true), (10, false), (10, true)] {
            let program = data_parallel(&plan, share(count, 4), overlap);
            let verdict = position(&program, Instruction::Verdict);
            for bucket in (0..plan.buckets.len() as u32).map(BucketId) {
                let (reduce, gather) =
                    (Collective::reduce_scatter(bucket), Collective::all_gather(bucket));
                let steps = [
                    position(&program, Instruction::Start(reduce)),
                    position(&program, Instruction::Wait(Token::of(reduce))),
                    verdict,
                    position(&program, Instruction::Update { bucket }),
                    position(&program, Instruction::Start(gather)),
                    position(&program, Instruction::Wait(Token::of(gather))),
                ];
                assert!(steps.is_sorted(), "{program}");
            }
            let runs = program.instructions.iter();
            let runs = runs.filter(|i| matches!(i, Instruction::Run { .. })).count();
            assert_eq!(runs, count.div_ceil(4) as usize * plan.segments.len());
            let collectives = 4 * plan.buckets.len();
            assert_eq!(program.instructions[0], Instruction::ZeroGradients);
            // Clear and the verdict, an update per bucket, a load per micro-batch.
            let others = 2 + plan.buckets.len() + count.div_ceil(4) as usize;
            assert_eq!(program.instructions.len(), runs + collectives + others);
        }
    }

    #[test]
    fn a_reduction_starts_behind_the_last_segment_that_adds_to_it() {
        let plan = tied();
        let program = data_parallel(&plan, share(10, 4), true);
        let last_run =
            program.instructions.iter().rposition(|i| matches!(i, Instruction::Run { .. }));
        let mut early = 0;
        for (index, segment) in plan.segments.iter().enumerate() {
            for &bucket in &segment.completes {
                let run = Instruction::Run { segment: SegmentId(index as u32), micro_batch: 2 };
                let start = Instruction::Start(Collective::reduce_scatter(bucket));
                let between =
                    &program.instructions[position(&program, run)..position(&program, start)];
                assert!(!between[1..].iter().any(|i| matches!(i, Instruction::Run { .. })));
                early += usize::from(position(&program, start) < last_run.unwrap());
            }
        }
        assert!(early > 0, "nothing overlaps");
        let without = data_parallel(&plan, share(10, 4), false);
        let is_start = |i: &Instruction| match i {
            Instruction::Start(collective) => collective.kind == CollectiveKind::ReduceScatter,
            _ => false,
        };
        let first = without.instructions.iter().position(is_start).unwrap();
        let ran = &without.instructions[first..];
        assert!(!ran.iter().any(|i| matches!(i, Instruction::Run { .. })));
    }

    #[test]
    fn ranks_start_collectives_in_the_same_order_whatever_they_run() {
        let plan = tied();
        let starts = |count: u32, overlap: bool| {
            let program = data_parallel(&plan, share(count, 4), overlap);
            let is_start = |i: &Instruction| matches!(i, Instruction::Start(_));
            program.instructions.into_iter().filter(is_start).collect::<Vec<_>>()
        };
        for count in [0, 1, 9] {
            assert_eq!(starts(count, true), starts(0, false));
            assert_eq!(starts(count, false), starts(0, false));
        }
    }

    #[test]
    fn buckets_that_no_segment_finishes_are_not_missed() {
        let mut plan = tied();
        for segment in &mut plan.segments {
            segment.completes.clear();
        }
        let program = data_parallel(&plan, share(5, 4), true);
        for bucket in (0..plan.buckets.len() as u32).map(BucketId) {
            position(&program, Instruction::Start(Collective::reduce_scatter(bucket)));
        }
    }

    #[test]
    fn spread_gathers_begin_the_next_step_and_end_before_what_needs_their_buckets() {
        let plan = tied();
        let needs = plan.buckets_of_segments();
        let (forward, _) = plan.passes();
        let buckets = plan.buckets.len();
        let gathers = |of: &Program| of.instructions.iter().filter(|i| is_of_gather(i)).count();
        let without = |of: &Program| {
            let mut instructions = of.instructions.clone();
            instructions.retain(|i| !is_of_gather(i));
            instructions
        };
        for count in [0, 1, 10] {
            let program = data_parallel(&plan, share(count, 4), true);
            let SpreadPrograms { first, next, settle } =
                SpreadPrograms::new(&program, &plan, &needs);
            assert_eq!([&*first, &*next, &*settle].map(gathers), [0, 2 * buckets, 2 * buckets]);
            let all = [&program, &first, &next, &settle];
            assert_eq!(all.map(Program::begins_with_gathers), [false, false, true, true]);
            assert_eq!(all.map(Program::leaves_gathers), [false, true, true, false]);
            // All else is as before.
            assert_eq!(first.instructions, without(&program));
            assert_eq!(without(&next), first.instructions);
            assert_eq!(without(&settle), []);
            for bucket in (0..buckets as u32).map(BucketId) {
                let gather = Collective::all_gather(bucket);
                let start = position(&next, Instruction::Start(gather));
                let wait = position(&next, Instruction::Wait(Token::of(gather)));
                let reduce = Instruction::Start(Collective::reduce_scatter(bucket));
                assert!(start < buckets && start < wait, "{next}");
                assert!(wait < position(&next, reduce), "{next}");
                let needing = next.instructions.iter().position(|i| match i {
                    Instruction::Run { segment, .. } => needs[segment.index()].contains(&bucket),
                    _ => false,
                });
                assert!(needing.is_none_or(|at| wait < at), "{next}");
            }
            // Segments run while the last bucket is in flight.
            let last_wait = next.instructions.iter().rposition(is_of_gather).unwrap();
            let runs = next.instructions[..last_wait].iter();
            let runs = runs.filter(|i| matches!(i, Instruction::Run { .. })).count();
            assert_eq!(runs > 0, count > 0, "{next}");
            assert!(runs < forward.len(), "{next}");
        }
    }

    #[test]
    fn shares_are_consecutive() {
        let shares = contiguous_shares(&[3, 0, 5], &[2, 4, 8]);
        let triples: Vec<_> = shares.iter().map(|s| (s.first, s.count, s.micro_batch)).collect();
        assert_eq!(triples, [(0, 3, 2), (3, 0, 4), (3, 5, 8)]);
    }
}
