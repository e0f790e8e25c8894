//! Virtual runs of pipelines: programs with stages, edges and groups.

use std::ops::Range;
use std::sync::Arc;

use potluck_core::{BucketId, Rank};
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::{Builder, Init, ModelGraph, PassKind, Plan, PlanOptions, Recompute, Unary};
use potluck_parallel::collective::{BucketGroups, LaidOutBucket, ShardLayout, Topology};
use potluck_parallel::schedule::{StageTimes, ideal_bubble};
use potluck_parallel::sim::{
    Costs, Detection, FaultTime, LinkModel, MachineModel, ModelPart, Scenario, SeededBug,
    SegmentCost, SimulatedFault, SimulationReport, check, one_step, reference, run,
};
use potluck_parallel::{
    Mesh, PipelinePrograms, PipelineRanks, PipelineRequest, PipelineSchedule, PipelineShape, Share,
};

use super::random::{self, Draw};
use super::{Deaths, assert_said, ends_under_faults, for_seeds, is_completed, run_and_check};

/// The model of a scenario: blocks with a weight each.
#[derive(Clone, Copy, Debug)]
struct Chain {
    blocks: u32,
    /// True if the last block also uses the weight of the first one.
    is_tied: bool,
    /// Block that uses the weight of the one before it.
    shared: Option<u32>,
    /// True if the last block but one also reads what the first one computes.
    has_skip: bool,
}

const ROWS: usize = 4;

impl Chain {
    fn plan(self, recompute: Recompute) -> Plan {
        let mut b = Builder::new();
        let (mut x, mut first, mut before, mut early) = (None, None, None, None);
        for block in 0..self.blocks {
            b.block(&format!("block {block}"));
            let input = x.unwrap_or_else(|| b.input("x", &[1, 8]));
            let tied = first.filter(|_| self.is_tied && block + 1 == self.blocks);
            let shared = tied.or(before.filter(|_| self.shared == Some(block)));
            let new = |b: &mut Builder| b.parameter(&format!("w{block}"), &[8, 8], Init::Zeros);
            let w = shared.unwrap_or_else(|| new(&mut b));
            first.get_or_insert(w);
            before = Some(w);
            let y = b.linear(input, w, None).unwrap();
            let mut y = b.unary(y, Unary::Gelu).unwrap();
            if let Some(early) = early.filter(|_| self.has_skip && block + 2 == self.blocks) {
                y = b.add(y, early).unwrap();
            }
            early.get_or_insert(y);
            x = Some(y);
        }
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(x.unwrap(), target).unwrap();
        let model = ModelGraph::training(b.finish(), false).unwrap().with_recompute(recompute);
        Plan::new(model.whole().clone(), PlanOptions::new(ROWS))
    }
}

/// Plans of the ranks of a tensor group of a small GPT with so many blocks.
fn divided(blocks: u32, ranks: usize, recompute: Recompute) -> Vec<Arc<Plan>> {
    let config = GptConfig {
        vocabulary: 8,
        context: 2,
        positions: 2,
        layers: blocks as usize - 2,
        heads: ranks,
        width: 8 * ranks,
        bias: true,
        dropout: 0.0,
        tie: true,
        activation: Unary::Gelu,
    };
    let model = ModelGraph::training(gpt(&config).unwrap(), true).unwrap();
    let model = model.with_recompute(recompute);
    let mut plans = Vec::new();
    for rank in 0..ranks {
        let graph = model.of_rank(&vec![1; ranks], rank).unwrap().graph;
        plans.push(Arc::new(Plan::new(graph, PlanOptions::new(ROWS))));
    }
    plans
}

/// What a scenario of pipelines is built of.
#[derive(Clone, Debug)]
struct Pipelines {
    chain: Chain,
    /// Ranks of the tensor group of each stage: of several, the model is a GPT with as many blocks
    /// as the chain.
    tensor: usize,
    recompute: Recompute,
    stages: Vec<PipelineRanks>,
    shares: Vec<Share>,
    schedule: PipelineSchedule,
    topology: Topology,
    overlap: bool,
    piece_max: usize,
    chunk_max: usize,
}

/// The layout of a run: the ranks of one pipeline that hold a bucket together are a star.
fn layout(plan: &Plan, groups: &BucketGroups, pipelines: &Pipelines) -> ShardLayout {
    let topology = pipelines.topology;
    let bucket = |index: usize| {
        let size = groups.of(BucketId(index as u32)).size();
        let is_star = pipelines.stages.len() == 1 && size > 1;
        let topology = if is_star { Topology::Star } else { topology };
        LaidOutBucket { length: plan.buckets[index].length, size, topology }
    };
    let buckets: Vec<_> = (0..plan.buckets.len()).map(bucket).collect();
    ShardLayout::of_buckets(topology, groups.world(), &buckets, 4, pipelines.chunk_max)
}

impl Pipelines {
    /// Equal pipelines of `stages` stages, which `count` micro-batches of two samples pass.
    fn even(schedule: PipelineSchedule, beside: u32, stages: u32, count: u32) -> Self {
        let chunks = if schedule == PipelineSchedule::Interleaved { 2 } else { 1 };
        let parts = stages * chunks;
        let chunks: Vec<_> = (0..parts).map(|part| part..part + 1).collect();
        let mesh = Mesh::of_pipelines(beside as usize, stages as usize);
        let of = |groups| PipelineRanks { groups, chunks: chunks.clone() };
        let share =
            |pipeline| Share { first: pipeline * 2 * count, count: 2 * count, micro_batch: 2 };
        Self {
            chain: Chain { blocks: parts, is_tied: false, shared: None, has_skip: false },
            tensor: 1,
            recompute: Recompute::None,
            stages: mesh.pipelines().map(of).collect(),
            shares: (0..beside).map(share).collect(),
            schedule,
            topology: Topology::Ring,
            overlap: true,
            piece_max: 10,
            chunk_max: 32,
        }
    }

    fn tied(self) -> Self {
        Self { chain: Chain { is_tied: true, ..self.chain }, ..self }
    }

    /// One or two stages of tensor groups of a GPT of two layers, alone or beside another pipeline.
    fn of_groups(ranks: usize, beside: u32, stages: u32, count: u32) -> Self {
        let one = Self::even(PipelineSchedule::OneFOneB, beside, stages, count);
        let mesh = Mesh { data: beside as usize, pipeline: stages as usize, tensor: ranks };
        let chunks: Vec<Range<u32>> =
            (0..stages).map(|stage| stage * 4 / stages..(stage + 1) * 4 / stages).collect();
        let of = |groups| PipelineRanks { groups, chunks: chunks.clone() };
        let stages = mesh.pipelines().map(of).collect();
        Self {
            chain: Chain { blocks: 4, ..one.chain },
            tensor: ranks,
            stages,
            piece_max: 20,
            chunk_max: 512,
            ..one
        }
    }

    fn plans(&self) -> Vec<Arc<Plan>> {
        match self.tensor {
            1 => vec![Arc::new(self.chain.plan(self.recompute))],
            ranks => divided(self.chain.blocks, ranks, self.recompute),
        }
    }

    fn programs(&self, plans: &[Arc<Plan>]) -> PipelinePrograms {
        PipelinePrograms::training(&PipelineRequest {
            plans,
            pipelines: &self.stages,
            shares: &self.shares,
            schedule: self.schedule,
            overlap: self.overlap,
            piece_max: self.piece_max,
            in_flight_min: 1,
        })
    }

    /// Without chance, faults and timeline; equal ranks and links.
    fn scenario(&self, seed: u64) -> Scenario {
        let plans = self.plans();
        let written = self.programs(&plans);
        let (world, layout) = (written.programs.len(), layout(&plans[0], &written.groups, self));
        let segments = plans.iter().map(|plan| plan.segments.len()).max().unwrap();
        let link = LinkModel { latency_s: 1e-5, bytes_per_s: 1e6 };
        let costs = vec![random::even_costs(segments, link); world];
        let links = vec![vec![link; world]; world];
        let machine = MachineModel { costs: &costs, links: &links, control_s: 1e-5, window: 2 };
        Scenario {
            parts: written.plans.iter().map(ModelPart::of).collect(),
            groups: written.groups,
            edges: written.edges,
            deadline_s: 10.0,
            seed,
            values: Some(seed),
            ..one_step(&written.programs, &Arc::new(layout), machine)
        }
    }
}

/// Cuts `blocks` into `parts` runs, none of them empty.
fn any_cut(draw: &mut Draw, blocks: u32, parts: u32) -> Vec<Range<u32>> {
    let mut bounds: Vec<u32> = (1..blocks).collect();
    while bounds.len() as u32 > parts - 1 {
        bounds.remove(draw.below(bounds.len() as u32) as usize);
    }
    let (starts, ends) = ([vec![0], bounds.clone()].concat(), [bounds, vec![blocks]].concat());
    starts.into_iter().zip(ends).map(|(start, end)| start..end).collect()
}

/// Pipelines of any shape, cut anywhere, on ranks in any order.
fn any_pipelines(draw: &mut Draw) -> Pipelines {
    let schedule = PipelineSchedule::ALL[draw.below(4) as usize];
    let (beside, stages) = (1 + draw.below(3), 1 + draw.below(4));
    let chunks = match schedule {
        PipelineSchedule::Interleaved => 2 + draw.below(2),
        _ => 1,
    };
    let parts = stages * chunks;
    let tensor = if draw.one_in(4) { 2 + draw.below(2) } else { 1 };
    let blocks = (parts + draw.below(3)).max(if tensor == 1 { 1 } else { 3 });
    let chain = Chain {
        blocks,
        is_tied: draw.one_in(2) && blocks > 1,
        shared: (blocks > 1 && draw.one_in(2)).then(|| 1 + draw.below(blocks - 1)),
        has_skip: draw.one_in(2),
    };
    let mut unused: Vec<Rank> = (0..beside * stages * tensor).map(Rank).collect();
    let mut next = |draw: &mut Draw| {
        if draw.one_in(2) {
            unused.remove(0)
        } else {
            unused.swap_remove(draw.below(unused.len() as u32) as usize)
        }
    };
    let mut of = |draw: &mut Draw| PipelineRanks {
        groups: (0..stages).map(|_| (0..tensor).map(|_| next(draw)).collect()).collect(),
        chunks: any_cut(draw, blocks, parts),
    };
    let pipelines = (0..beside).map(|_| of(draw)).collect();
    let mut first = 0;
    let mut share = |draw: &mut Draw| {
        let micro_batch = 1 + draw.below(3);
        let batches = match schedule {
            PipelineSchedule::Interleaved => stages * (1 + draw.below(2)),
            _ => 1 + draw.below(6),
        };
        let count = batches * micro_batch - draw.below(micro_batch);
        first += count;
        Share { first: first - count, count, micro_batch }
    };
    Pipelines {
        chain,
        tensor: tensor as usize,
        recompute: Recompute::None,
        stages: pipelines,
        shares: (0..beside).map(|_| share(draw)).collect(),
        schedule,
        topology: if draw.one_in(3) { Topology::Star } else { Topology::Ring },
        overlap: !draw.one_in(4),
        piece_max: 4 + draw.below(60) as usize,
        chunk_max: if tensor == 1 { 4 * (1 + draw.below(20) as usize) } else { 256 },
    }
}

/// A scenario of pipelines of any shape and speed, without faults.
fn any_scenario(seed: u64) -> Scenario {
    let draw = &mut Draw::new(seed ^ 0x9173);
    let mut pipelines = any_pipelines(draw);
    // Not drawn, so that all else of a seed stays what it is.
    let choices = [Recompute::None, Recompute::Blocks, Recompute::Selective];
    pipelines.recompute = choices[seed as usize % choices.len()];
    let mut scenario = pipelines.scenario(seed);
    let (world, segments) = (scenario.world(), scenario.costs[0].segments.len());
    scenario.costs = (0..world).map(|_| random::costs(draw, segments)).collect();
    let row = |draw: &mut Draw| (0..world).map(|_| random::link(draw)).collect();
    scenario.links = (0..world).map(|_| row(draw)).collect();
    scenario.jitter_s = if draw.one_in(4) { 0.0 } else { draw.between(1e-7, 1e-2) };
    scenario.control_s = draw.between(1e-7, 1e-3);
    scenario.window = 1 + draw.below(4) as usize;
    scenario.steps = 1 + u64::from(draw.below(3));
    scenario.slots_max = random::slots(draw);
    scenario.reduce_site = random::sites(draw, world as u32);
    scenario
}

/// True if all ranks that hold a bucket have the bits of the reference after the last step.
fn assert_bits(scenario: &Scenario, report: &SimulationReport) {
    let expected = reference(scenario).pop().unwrap();
    for (rank, report) in report.ranks.iter().enumerate() {
        for (bucket, (found, expected)) in report.parameters.iter().zip(&expected).enumerate() {
            let is_held = scenario.holds(Rank(rank as u32), BucketId(bucket as u32));
            let expected: &[f32] = if is_held { expected } else { &[] };
            assert_eq!(found, expected);
        }
    }
}

#[test]
fn pipelines_any_shape_end_alike() {
    for_seeds(1000, |seed| {
        let scenario = any_scenario(seed);
        let report = run_and_check(&scenario);
        assert!(is_completed(&report));
        assert_bits(&scenario, &report);
    });
}

#[test]
fn slots_few_never_deadlock() {
    for_seeds(1000, |seed| {
        let mut scenario = any_scenario(seed ^ 0xf05);
        let draw = &mut Draw::new(seed);
        (scenario.slots_max, scenario.window, scenario.steps) = (Some(1 + seed as usize % 2), 1, 2);
        scenario.jitter_s = draw.between(1e-7, 1e-3);
        assert!(is_completed(&run_and_check(&scenario)));
    });
}

/// A weight that two blocks in a row use is on one stage of one pipeline, which completes it early,
/// and on two stages of the other.
#[test]
fn slots_few_unlike_cuts_never_deadlock() {
    for_seeds(100, |seed| {
        let mut pipelines = Pipelines::even(PipelineSchedule::OneFOneB, 2, 2, 4);
        pipelines.chain = Chain { blocks: 5, shared: Some(2), ..pipelines.chain };
        pipelines.stages[0].chunks = vec![0..2, 2..5];
        pipelines.stages[1].chunks = vec![0..3, 3..5];
        let mut scenario = pipelines.scenario(seed);
        let draw = &mut Draw::new(seed ^ 0x0dd);
        let (world, segments) = (scenario.world(), scenario.costs[0].segments.len());
        scenario.costs = (0..world).map(|_| random::costs(draw, segments)).collect();
        (scenario.slots_max, scenario.window, scenario.jitter_s) = (Some(1), 1, 1e-4);
        let report = run_and_check(&scenario);
        assert!(is_completed(&report));
        assert_bits(&scenario, &report);
    });
}

// ---- Bits ----

/// The parameters by bucket, each of the first rank that holds it.
fn parameters(scenario: &Scenario, report: &SimulationReport) -> Vec<Vec<f32>> {
    let buckets = (0..scenario.layout.buckets() as u32).map(BucketId);
    let holder = |bucket| scenario.groups.of(bucket).iter().next().unwrap().1;
    buckets.map(|id| report.ranks[holder(id).index()].parameters[id.index()].clone()).collect()
}

#[test]
fn schedules_any_cut_same_bits() {
    for is_tied in [false, true] {
        let mut bits: Vec<Vec<Vec<f32>>> = Vec::new();
        for schedule in PipelineSchedule::ALL {
            for (stages, cut) in [(2, 0), (2, 1), (3, 2), (1, 3)] {
                let mut pipelines = Pipelines::even(schedule, 1, stages, 6);
                let (parts, draw) = (pipelines.chain.blocks, &mut Draw::new(cut));
                pipelines.chain = Chain { blocks: 7, is_tied, shared: None, has_skip: true };
                pipelines.stages[0].chunks = any_cut(draw, 7, parts);
                let scenario = Scenario { steps: 2, jitter_s: 1e-3, ..pipelines.scenario(3) };
                let report = run_and_check(&scenario);
                // A tied weight on one device is added to in another order.
                if !is_tied || stages > 1 {
                    bits.push(parameters(&scenario, &report));
                }
            }
        }
        assert!(bits.len() > 10 && bits.iter().all(|other| *other == bits[0]), "{is_tied}");
    }
}

// ---- Faults ----

#[test]
fn fault_in_pipeline_leaves_nobody() {
    let kinds = ends_under_faults(1000, |seed| any_scenario(seed ^ 0xfa));
    let is_one_seed = kinds.iter().sum::<u64>() == 1;
    assert!(is_one_seed || kinds.iter().all(|&count| count > 100), "{kinds:?}");
}

#[test]
fn death_before_each_event_ends_all() {
    for pipelines in [
        Pipelines::even(PipelineSchedule::OneFOneB, 1, 2, 2).tied(),
        Pipelines::even(PipelineSchedule::GPipe, 1, 3, 2),
        Pipelines::even(PipelineSchedule::Interleaved, 1, 2, 2).tied(),
        Pipelines { chunk_max: 64, ..Pipelines::even(PipelineSchedule::ZeroBubble, 2, 2, 2) },
        Pipelines { piece_max: 1000, chunk_max: 4096, ..Pipelines::of_groups(2, 1, 1, 2) },
    ] {
        for detection in [Detection::AtOnce, Detection::ByDeadline] {
            let scenario = pipelines.scenario(2);
            let scenario = Scenario { jitter_s: 3e-5, slots_max: Some(2), ..scenario };
            let deaths = Deaths::of(&scenario, detection);
            assert!(deaths.failed_untouched > 40, "{deaths:?}");
            assert!(deaths.failed_touched > 0 && deaths.completed > 0, "{deaths:?}");
        }
    }
}

/// What the ranks of a tensor group send each other in a step, counted as it passes the links: 4
/// all-reduces per layer, 5 if the layer is computed again, of whose second sum in the forward pass
/// the backward pass reads nothing; one behind the embedding and one before the head, of `b t c`
/// elements, and 12 bytes per token for the loss (Shoeybi et al. 2019), from each rank to each,
/// itself included.
#[test]
fn tensor_groups_send_as_formula() {
    let (none, blocks, selective) = (Recompute::None, Recompute::Blocks, Recompute::Selective);
    let kept = [(2usize, 1, none, 4), (3, 1, none, 4), (2, 2, none, 4)];
    let again = [(2, 1, blocks, 5), (2, 2, blocks, 5), (3, 1, selective, 4)];
    for (ranks, stages, recompute, of_layer) in kept.into_iter().chain(again) {
        let groups = Pipelines::of_groups(ranks, 1, stages, 3);
        let pipelines = Pipelines { piece_max: 1, recompute, ..groups };
        let scenario = pipelines.scenario(1);
        let report = run_and_check(&scenario);
        let (layers, context, width) = (2, 2, 8 * ranks);
        // Three micro-batches of two samples.
        let tokens = 3 * 2 * context;
        let sums = (of_layer * layers + 2) * tokens * width + 3 * tokens;
        let crossing = if stages == 1 { 0 } else { 2 * ranks * tokens * width };
        let expected = ranks * ranks * sums + crossing;
        assert_eq!(report.pieces, expected as u64, "{ranks} ranks, {stages} stages, {recompute:?}");
    }
}

/// Two micro-batches at a time: while one is reduced, the other is computed.
#[test]
fn tensor_group_overlaps_reductions() {
    let seconds = |link: LinkModel| {
        let pipelines = Pipelines { piece_max: 1 << 20, ..Pipelines::of_groups(2, 1, 1, 4) };
        let mut scenario = pipelines.scenario(1);
        let (world, segments) = (scenario.world(), scenario.costs[0].segments.len());
        let instant = LinkModel::INSTANT;
        let mut costs = random::even_costs(segments, instant);
        costs.segments = vec![SegmentCost { fixed_s: 1e-3, row_s: 0.0 }; segments];
        (costs.load_s, costs.update_element_s) = (0.0, 0.0);
        (scenario.costs, scenario.control_s) = (vec![costs; world], 0.0);
        scenario.links = vec![vec![link; world]; world];
        run_and_check(&scenario).seconds
    };
    // Every message takes as long as a segment computes.
    let free = seconds(LinkModel::INSTANT);
    let paid = seconds(LinkModel { latency_s: 1e-3, bytes_per_s: f64::INFINITY });
    // Without overlap, 4 micro-batches wait for 11 sums each.
    let sums = 4.0 * 11.0 * 1e-3;
    assert!(paid - free < 0.3 * sums, "{free} s, and {paid} s of {} without overlap", free + sums);
}

// ---- What is wrong is found ----

/// The complaints about the scenarios of the seeds with a bug.
fn complaints(bug: SeededBug) -> Vec<String> {
    let complaint = |seed| {
        let scenario = Scenario { seeded_bug: Some(bug), ..any_scenario(seed) };
        check(&scenario, &run(&scenario)).err()
    };
    (0..200).filter_map(complaint).collect()
}

#[test]
fn planted_hasty_receive_is_found() {
    let found = complaints(SeededBug::ReceivesWithoutWaiting);
    assert_said(&found, "is read, but");
    assert!(found.len() > 100, "{}", found.len());
}

#[test]
fn planted_hasty_all_reduce_is_found() {
    let found = complaints(SeededBug::ReducesWithoutWaiting);
    assert_said(&found, "reduces before all of all-reduce");
    assert!(found.len() > 30, "{}", found.len());
}

#[test]
fn planted_wrong_micro_batch_is_found() {
    let found = complaints(SeededBug::SendsNextMicroBatch);
    assert_said(&found, "receives other values than those of edge 0 of micro-batch 0");
}

#[test]
fn planted_lost_piece_is_found() {
    for nth in [1, 7] {
        let found = complaints(SeededBug::LosesPiece(nth));
        assert_said(&found, "is deadlocked in step 1, waiting for edge");
    }
}

#[test]
fn planted_missing_copy_is_found() {
    let found = complaints(SeededBug::FewerCopies);
    assert_said(&found, "is read, but slot");
    assert!(found.len() > 80, "{}", found.len());
}

/// While a stage hangs, the one before it sends all that it may.
#[test]
fn planted_short_piece_mailbox_is_found() {
    let complaint = |seeded_bug| {
        let shares = vec![Share { first: 0, count: 20, micro_batch: ROWS as u32 }];
        let pipelines = Pipelines { shares, ..Pipelines::even(PipelineSchedule::GPipe, 1, 2, 5) };
        let mut scenario = pipelines.scenario(1);
        let (rank, when) = (Rank(1), FaultTime::Seconds(1e-4));
        scenario.faults = vec![SimulatedFault::Hang { rank, when, seconds: 5.0 }];
        scenario.seeded_bug = seeded_bug;
        check(&scenario, &run(&scenario))
    };
    assert_eq!(complaint(None), Ok(()));
    let why = "the device thread of rank 1: 20 pieces wait, of 19";
    assert_eq!(complaint(Some(SeededBug::FewerPieces)), Err(why.into()));
}

// ---- Idle time ----

/// The fraction of a step in which each device runs nothing, without any cost but that of passes.
fn idle_shares(schedule: PipelineSchedule, shape: PipelineShape, times: StageTimes) -> Vec<f64> {
    let [stages, count] = [shape.stages, shape.micro_batches].map(|number| number as u32);
    let pipelines = Pipelines::even(schedule, 1, stages, count);
    let plan = pipelines.chain.plan(pipelines.recompute);
    let fixed = |seconds: f64| SegmentCost { fixed_s: seconds / shape.chunks as f64, row_s: 0.0 };
    let segments = plan.segments.iter().map(|segment| match segment.phase {
        PassKind::Forward => fixed(times.forward),
        PassKind::BackwardInput => fixed(times.backward_input),
        PassKind::BackwardWeight => fixed(times.backward_weight),
    });
    let instant = LinkModel::INSTANT;
    let costs = Costs {
        segments: segments.collect(),
        inputs: None,
        load_s: 0.0,
        update_element_s: 0.0,
        read_back: instant,
        upload: instant,
        host: instant,
    };
    let mut scenario = pipelines.scenario(1);
    let world = scenario.world();
    (scenario.costs, scenario.links) = (vec![costs; world], vec![vec![instant; world]; world]);
    (scenario.control_s, scenario.timeline) = (0.0, true);
    let report = run_and_check(&scenario);
    let runs = || report.timeline.spans.iter().filter(|span| span.run.is_some());
    let seconds = runs().map(|span| span.to).max().unwrap() as f64;
    let busy = |rank: usize| {
        let of_rank = runs().filter(|span| span.rank.index() == rank);
        of_rank.map(|span| (span.to - span.from) as f64).sum::<f64>()
    };
    (0..world).map(|rank| 1.0 - busy(rank) / seconds).collect()
}

#[test]
fn stages_equal_idle_as_formulas() {
    for schedule in PipelineSchedule::ALL {
        let chunks = if schedule == PipelineSchedule::Interleaved { 2 } else { 1 };
        for (stages, micro_batches) in [(2, 4), (2, 16), (3, 6), (3, 9), (4, 4), (4, 8), (4, 16)] {
            // The formulas of all others take both backward passes as one.
            let weights: &[f64] = if schedule.is_split() { &[0.01, 0.02, 0.03] } else { &[0.0] };
            for &backward_weight in weights {
                let times = StageTimes { forward: 0.03, backward_input: 0.04, backward_weight };
                let shape = PipelineShape { stages, chunks, micro_batches };
                let formula = ideal_bubble(schedule, shape, times);
                let found = idle_shares(schedule, shape, times);
                let is_near = |idle: &f64| (idle - formula).abs() < 1e-3;
                let what = format!("{schedule} {shape:?}: {found:?}, {formula} by the formula");
                assert!(found.iter().all(is_near), "{what}");
            }
        }
    }
}
