//! Scenarios by seed.

use std::sync::Arc;

use potluck_core::{BucketId, Rank};
use potluck_graph::Segment;
use potluck_graph::plan::{Bucket, Plan, PlanOptions};
use potluck_graph::{Graph, ParameterKind, PassKind, UpdateRates};
use potluck_parallel::collective::{ShardLayout, Topology};
use potluck_parallel::sim::queue::Random;
use potluck_parallel::sim::{
    Costs, Detection, FaultTime, LinkModel, MachineModel, ModelPart, Scenario, SegmentCost,
    SimulatedFault, one_step,
};
use potluck_parallel::{
    Program, ReduceSite, Share, SpreadPrograms, contiguous_shares, data_parallel,
};

/// Draws numbers for one seed.
pub struct Draw(Random);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    /// One of `0..n`.
    pub fn below(&mut self, n: u32) -> u32 {
        self.0.word() % n
    }

    pub fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }

    /// Between two sizes, all magnitudes alike.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        let part = f64::from(self.0.word()) / f64::from(u32::MAX);
        low * (high / low).powf(part)
    }
}

/// A plan without a graph: `blocks` blocks, each with a segment F, B and W, and buckets of these
/// lengths, which the segments W finish in order; with `leftover`, none finishes the last one.
pub fn plan(blocks: u32, lengths: &[usize], leftover: bool) -> Plan {
    let segment = |phase, block| Segment { phase, block, nodes: 0..0, completes: Vec::new() };
    let mut segments: Vec<Segment> =
        (0..blocks).map(|block| segment(PassKind::Forward, block)).collect();
    for block in (0..blocks).rev() {
        segments.extend([
            segment(PassKind::BackwardInput, block),
            segment(PassKind::BackwardWeight, block),
        ]);
    }
    let finished = lengths.len() - usize::from(leftover && !lengths.is_empty());
    for bucket in 0..finished {
        let nth = bucket * blocks as usize / finished;
        let index = blocks as usize + 2 * nth + 1;
        segments[index].completes.push(BucketId(bucket as u32));
    }
    let bucket = |&length: &usize| Bucket {
        kind: ParameterKind::Trained,
        rates: UpdateRates::default(),
        rank: None,
        parameters: Vec::new(),
        length,
        decay_end: 0,
    };
    Plan {
        graph: Graph::default(),
        options: PlanOptions::new(8),
        segments,
        slots: Vec::new(),
        places: Vec::new(),
        held: vec![true; lengths.len()],
        held_blocks: vec![true; blocks as usize],
        buckets: lengths.iter().map(bucket).collect(),
        part: None,
    }
}

/// What a scenario is built of.
pub struct Parts {
    pub plan: Plan,
    pub layout: ShardLayout,
    pub shares: Vec<Share>,
    pub overlap: bool,
    pub costs: Vec<Costs>,
    pub links: Vec<Vec<LinkModel>>,
}

impl Parts {
    /// Without chance, faults and timeline.
    pub fn scenario(self, seed: u64) -> Scenario {
        let program = |&share: &Share| data_parallel(&self.plan, share, self.overlap);
        let completes = self.plan.segments.iter().map(|s| s.completes.clone()).collect();
        let programs: Vec<Program> = self.shares.iter().map(program).collect();
        let (costs, links) = (&self.costs, &self.links);
        let machine = MachineModel { costs, links, control_s: 1e-5, window: 2 };
        Scenario {
            parts: vec![ModelPart::whole(completes); programs.len()],
            deadline_s: 10.0,
            seed,
            values: Some(seed),
            ..one_step(&programs, &Arc::new(self.layout), machine)
        }
    }
}

pub fn link(draw: &mut Draw) -> LinkModel {
    if draw.one_in(8) {
        return LinkModel::INSTANT;
    }
    LinkModel { latency_s: draw.between(1e-6, 1e-3), bytes_per_s: draw.between(1e5, 1e10) }
}

pub fn costs(draw: &mut Draw, segments: usize) -> Costs {
    let unit_s = draw.between(1e-6, 1e-2);
    let cost = |draw: &mut Draw| SegmentCost {
        fixed_s: unit_s * draw.between(0.01, 1.0),
        row_s: unit_s * draw.between(0.01, 1.0),
    };
    Costs {
        segments: (0..segments).map(|_| cost(draw)).collect(),
        inputs: None,
        load_s: unit_s * 0.1,
        update_element_s: 1e-9,
        read_back: link(draw),
        upload: link(draw),
        host: link(draw),
    }
}

/// Segments of 0.1 ms and 0.1 ms per row, and transfers over such links.
pub fn even_costs(segments: usize, link: LinkModel) -> Costs {
    Costs {
        segments: vec![SegmentCost { fixed_s: 1e-4, row_s: 1e-4 }; segments],
        inputs: None,
        load_s: 1e-5,
        update_element_s: 1e-7,
        read_back: link,
        upload: link,
        host: link,
    }
}

/// Bucket lengths: mostly a few dozen elements, in one of 64 cases up to 100,000 in all.
fn lengths(draw: &mut Draw) -> Vec<usize> {
    let most = if draw.one_in(64) { 100_000 } else { 150 };
    let buckets = 1 + draw.below(5);
    (0..buckets).map(|_| draw.below(most / buckets + 1) as usize).collect()
}

/// Lets the all-gathers of each step of a scenario travel in the next one; each forward segment
/// needs some of the buckets.
pub fn spread(scenario: Scenario, plan: &Plan, draw: &mut Draw) -> Scenario {
    let buckets = scenario.layout.buckets() as u32;
    let mut needs = Vec::with_capacity(plan.segments.len());
    for _ in &plan.segments {
        needs.push((0..buckets).map(BucketId).filter(|_| draw.one_in(2)).collect::<Vec<_>>());
    }
    let programs = scenario.programs.iter();
    let spread = programs.map(|program| SpreadPrograms::new(program, plan, &needs)).collect();
    Scenario { spread: Some(spread), ..scenario }
}

/// A scenario of any size and speed, without faults.
pub fn scenario(seed: u64) -> Scenario {
    any(seed, false)
}

/// The scenario of the seed in whose steps the all-gathers of the one before travel.
pub fn spread_scenario(seed: u64) -> Scenario {
    any(seed, true)
}

fn any(seed: u64, is_spread: bool) -> Scenario {
    let draw = &mut Draw::new(seed);
    let world = 1 + draw.below(9);
    let lengths = lengths(draw);
    let plan = plan(1 + draw.below(4), &lengths, draw.one_in(5));
    let topology = if draw.one_in(3) { Topology::Star } else { Topology::Ring };
    let align = [1, 4, 64][draw.below(3) as usize];
    let total: usize = lengths.iter().sum();
    let chunk_max = align.max(total / 40).max(1 + draw.below(64) as usize);
    let counts: Vec<u32> = (0..world).map(|_| draw.below(5)).collect();
    let micro_batches: Vec<u32> = (0..world).map(|_| 1 + draw.below(3)).collect();
    let links = (0..world).map(|_| (0..world).map(|_| link(draw)).collect()).collect();
    let parts = Parts {
        layout: ShardLayout::new(topology, world, &lengths, align, chunk_max),
        shares: contiguous_shares(&counts, &micro_batches),
        overlap: !draw.one_in(3),
        costs: (0..world).map(|_| costs(draw, plan.segments.len())).collect(),
        links,
        plan: plan.clone(),
    };
    let mut scenario = parts.scenario(seed);
    scenario.jitter_s = if draw.one_in(4) { 0.0 } else { draw.between(1e-7, 1e-2) };
    scenario.control_s = draw.between(1e-7, 1e-3);
    scenario.window = 1 + draw.below(4) as usize;
    scenario.steps = 1 + u64::from(draw.below(3));
    scenario.slots_max = slots(draw);
    scenario.reduce_site = sites(draw, world);
    if is_spread { spread(scenario, &plan, draw) } else { scenario }
}

/// Places to read back to: as many as there are chunks, or a few.
pub fn slots(draw: &mut Draw) -> Option<usize> {
    let few = 1 + draw.below(4) as usize;
    draw.one_in(2).then_some(few)
}

/// A site of addition per rank, with devices in one of two scenarios.
pub fn sites(draw: &mut Draw, world: u32) -> Vec<ReduceSite> {
    let has_devices = draw.one_in(2);
    let site =
        |_| if has_devices && draw.one_in(2) { ReduceSite::Device } else { ReduceSite::Host };
    (0..world).map(site).collect()
}

/// One fault, or two, somewhere in the time that the scenario takes without them.
pub fn faults(draw: &mut Draw, scenario: &Scenario, seconds: f64) -> Vec<SimulatedFault> {
    let count = if draw.one_in(3) { 2 } else { 1 };
    let fault = |_| {
        let rank = Rank(draw.below(scenario.world() as u32));
        let when = FaultTime::Seconds(seconds * draw.between(0.001, 1.05));
        match draw.below(4) {
            0 => SimulatedFault::NotFinite { rank, step: 1 + u64::from(draw.below(3)) },
            1 => {
                let seconds = scenario.deadline_s * draw.between(0.001, 2.0);
                SimulatedFault::Hang { rank, when, seconds }
            }
            kind => {
                let detection = if kind == 2 { Detection::AtOnce } else { Detection::ByDeadline };
                SimulatedFault::Die { rank, when, detection }
            }
        }
    };
    (0..count).map(fault).collect()
}

/// A small scenario with equal ranks: two blocks, a bucket each, two micro-batches on rank 0.
pub fn small(topology: Topology, world: u32) -> Scenario {
    let lengths = [7, 5];
    let plan = plan(2, &lengths, false);
    let link = LinkModel { latency_s: 1e-5, bytes_per_s: 1e6 };
    let costs = even_costs(plan.segments.len(), link);
    let counts: Vec<u32> = (0..world).map(|rank| 2 - rank.min(2)).collect();
    let parts = Parts {
        layout: ShardLayout::new(topology, world, &lengths, 1, 2),
        shares: contiguous_shares(&counts, &vec![1; world as usize]),
        overlap: true,
        costs: vec![costs; world as usize],
        links: vec![vec![link; world as usize]; world as usize],
        plan,
    };
    let mut scenario = parts.scenario(1);
    scenario.jitter_s = 3e-5;
    scenario
}
