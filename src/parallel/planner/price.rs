//! Price of a step of pipelines: the programs of all ranks, run by `sim` with measured times.

use std::collections::HashMap;
use std::sync::Arc;

use super::cut::BlockTimes;
use super::profile::BlockSpeed;
use crate::collective::{ShardLayout, Topology};
use crate::pipeline::runs;
pub use crate::sim::LinkModel;
use crate::sim::{Costs, MachineModel, Scenario, SegmentCost, VirtualSpan, one_step, run};
use crate::{Instruction, Operation, PipelinePrograms, Program, Token};
use potluck_core::Rank;
use potluck_graph::{PassKind, Plan, Segment};

/// Segment of a pass of a block over a micro-batch, with the time at which its device runs it. A
/// segment is the whole pass, except in a tensor group, where a pass is cut at each reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PricedSpan {
    pub rank: Rank,
    pub pass: PassKind,
    pub block: u32,
    pub micro_batch: usize,
    /// Begin and end, in seconds since the begin of the step.
    pub from_s: f64,
    pub to_s: f64,
}

/// A block has no time on the device of a rank that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block {block} could not be measured on the device of {rank}")]
pub struct UnknownTime {
    pub rank: Rank,
    /// Index of the block in the graph.
    pub block: u32,
}

/// Predicted step of pipelines.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPrice {
    /// Seconds until the last device is done with its last pass.
    pub seconds: f64,
    /// Fraction of the time of all devices in which they are idle.
    pub bubble: f64,
    /// By rank: fraction of the step in which its device is idle.
    pub idle: Vec<f64>,
    /// The segments of all passes in the order in which they are queued.
    pub spans: Vec<PricedSpan>,
}

/// Returns the price of a step of these programs.
///
/// `times` has the seconds of each block for the longest micro-batch of a rank, by rank and then
/// by block; a shorter micro-batch takes less in proportion to its rows. Times of blocks that a
/// rank does not hold are ignored. `links` are the transfers from device to device, by sender and
/// then by receiver: reading back, sending and writing together, which keep neither device from
/// running.
///
/// The price leaves out loading, reductions between pipelines, the verdict and updates. They add to
/// the end of a step, except for the part of the reductions that passes hide.
///
/// # Errors
/// Returns the [`UnknownTime`] of a block that a rank holds and that has no finite time there.
///
/// # Panics
/// If `times` or `links` have fewer ranks, or `times` fewer blocks, than the programs.
pub fn price(
    programs: &PipelinePrograms,
    times: &[Vec<BlockTimes>],
    links: &[Vec<LinkModel>],
) -> Result<StepPrice, UnknownTime> {
    let PipelinePrograms { programs: steps, plans, edges, .. } = programs;
    let mut costs = Vec::with_capacity(steps.len());
    for (rank, ((program, plan), times)) in steps.iter().zip(plans).zip(times).enumerate() {
        for (segment, _) in runs(&program.instructions) {
            let block = plan.segments[segment.index()].block;
            if !times[block as usize].sum_s().is_finite() {
                return Err(UnknownTime { rank: Rank(rank as u32), block });
            }
        }
        costs.push(costs_of(plan, program, times));
    }
    let machine = MachineModel { costs: &costs, links, control_s: 0.0, window: 1 };
    let passes: Vec<Program> = steps.iter().map(without_collectives).collect();
    // Without collectives, no bucket counts.
    let layout = Arc::new(ShardLayout::new(Topology::Ring, passes.len() as u32, &[], 1, 1));
    let step = one_step(&passes, &layout, machine);
    let report = run(&Scenario { edges: edges.clone(), timeline: true, ..step });
    debug_assert!(report.violations.is_empty(), "{report}");
    let mut spans = Vec::new();
    for span in &report.timeline.spans {
        spans.extend(priced(&plans[span.rank.index()], span));
    }
    Ok(of_spans(spans, passes.len()))
}

/// Returns the costs of a rank whose passes take these times for its longest micro-batch.
fn costs_of(plan: &Plan, program: &Program, times: &[BlockTimes]) -> Costs {
    let rows_max = program.micro_batches.iter().map(|batch| batch.rows).max().unwrap_or(0);
    let mut speeds = Vec::with_capacity(times.len());
    for times in times {
        speeds.push(BlockSpeed::in_proportion(rows_max, *times));
    }
    Costs {
        segments: segment_costs(plan, &speeds),
        inputs: None,
        load_s: 0.0,
        update_element_s: 0.0,
        read_back: LinkModel::INSTANT,
        upload: LinkModel::INSTANT,
        host: LinkModel::INSTANT,
    }
}

/// Returns the seconds of each segment of a plan on a device with these times of blocks. The
/// segments of a pass of a block take equal parts of its time, because they are not measured
/// separately. Without a segment for the gradients of parameters, they are part of the pass B.
pub(super) fn segment_costs(plan: &Plan, speeds: &[BlockSpeed]) -> Vec<SegmentCost> {
    let mut of_pass: HashMap<(PassKind, u32), u32> = HashMap::new();
    for segment in &plan.segments {
        *of_pass.entry((segment.phase, segment.block)).or_default() += 1;
    }
    let mut costs = Vec::with_capacity(plan.segments.len());
    for segment in &plan.segments {
        let speed = speeds[segment.block as usize];
        let is_merged = !of_pass.contains_key(&(PassKind::BackwardWeight, segment.block));
        let seconds = |times: BlockTimes| match segment.phase {
            PassKind::Forward => times.forward_s,
            PassKind::BackwardInput if is_merged => {
                times.backward_input_s + times.backward_weight_s
            }
            PassKind::BackwardInput => times.backward_input_s,
            PassKind::BackwardWeight => times.backward_weight_s,
        };
        let parts = f64::from(of_pass[&(segment.phase, segment.block)]);
        costs.push(SegmentCost {
            fixed_s: seconds(speed.fixed) / parts,
            row_s: seconds(speed.per_row) / parts,
        });
    }
    costs
}

fn without_collectives(program: &Program) -> Program {
    let mut program = program.clone();
    program.instructions.retain(|instruction| match instruction {
        Instruction::Start(_) | Instruction::Update { .. } => false,
        Instruction::Wait(Token { operation, .. }) => {
            !matches!(operation, Operation::Collective(_))
        }
        _ => true,
    });
    program
}

/// Pass that a span of the timeline shows, if it is one.
fn priced(plan: &Plan, span: &VirtualSpan) -> Option<PricedSpan> {
    let (segment, micro_batch) = span.run?;
    let Segment { phase, block, .. } = plan.segments[segment.index()];
    let from_s = span.from as f64 / 1e9;
    let to_s = span.to as f64 / 1e9;
    Some(PricedSpan { rank: span.rank, pass: phase, block, micro_batch, from_s, to_s })
}

fn of_spans(spans: Vec<PricedSpan>, ranks: usize) -> StepPrice {
    let mut seconds: f64 = 0.0;
    let mut busy = vec![0.0; ranks];
    for span in &spans {
        seconds = seconds.max(span.to_s);
        busy[span.rank.index()] += span.to_s - span.from_s;
    }
    let mut idle = Vec::with_capacity(ranks);
    for busy in busy {
        // In a step of no length, no device is idle.
        idle.push(if seconds > 0.0 { 1.0 - busy / seconds } else { 0.0 });
    }
    let bubble = idle.iter().sum::<f64>() / ranks.max(1) as f64;
    StepPrice { seconds, bubble, idle, spans }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{StageTimes, ideal_bubble};
    use crate::{PipelineRanks, PipelineRequest, PipelineSchedule, PipelineShape, Share};
    use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
    use potluck_graph::{Builder, Init, PlanOptions, Unary, differentiate, shard};

    const ROWS: usize = 2;

    /// Blocks that all have the three passes.
    fn plan(blocks: u32) -> Plan {
        let mut b = Builder::new();
        let mut x = b.input("x", &[1, 8]);
        for block in 0..blocks {
            b.block(&format!("block {block}"));
            let w = b.parameter(&format!("w{block}"), &[8, 8], Init::Zeros);
            x = b.linear(x, w, None).unwrap();
            x = b.unary(x, Unary::Gelu).unwrap();
        }
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(x, target).unwrap();
        Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(ROWS))
    }

    /// One pipeline with a block per chunk.
    fn programs(plan: &Plan, schedule: PipelineSchedule, shape: PipelineShape) -> PipelinePrograms {
        let parts = (shape.stages * shape.chunks) as u32;
        let ranks = (0..shape.stages as u32).map(Rank).collect();
        let chunks = (0..parts).map(|part| part..part + 1).collect();
        let stages = PipelineRanks::of_stages(ranks, chunks);
        let count = (shape.micro_batches * ROWS) as u32;
        PipelinePrograms::training(&PipelineRequest {
            plans: &[Arc::new(plan.clone())],
            pipelines: &[stages],
            shares: &[Share { first: 0, count, micro_batch: ROWS as u32 }],
            schedule,
            overlap: true,
            piece_max: 1 << 20,
            in_flight_min: 1,
        })
    }

    fn links(ranks: usize, link: LinkModel) -> Vec<Vec<LinkModel>> {
        vec![vec![link; ranks]; ranks]
    }

    const TIMES: BlockTimes =
        BlockTimes { forward_s: 0.020, backward_input_s: 0.030, backward_weight_s: 0.010 };

    #[test]
    fn equal_stages_are_idle_as_the_formulas_say() {
        for schedule in PipelineSchedule::ALL {
            let chunks = if schedule == PipelineSchedule::Interleaved { 2 } else { 1 };
            let shape = PipelineShape { stages: 3, chunks, micro_batches: 6 };
            // The formulas of the others take both backward passes as one.
            let weight_s = if schedule.is_split() { TIMES.backward_weight_s } else { 0.0 };
            let block = BlockTimes { backward_weight_s: weight_s, ..TIMES };
            let plan = plan((shape.stages * chunks) as u32);
            let times = vec![vec![block; plan.graph.blocks.len()]; shape.stages];
            let programs = programs(&plan, schedule, shape);
            let found = price(&programs, &times, &links(shape.stages, LinkModel::INSTANT));
            let found = found.unwrap();
            let stage = StageTimes {
                forward: block.forward_s,
                backward_input: block.backward_input_s,
                backward_weight: block.backward_weight_s,
            };
            let formula = ideal_bubble(schedule, shape, stage);
            assert!((found.bubble - formula).abs() < 1e-3, "{schedule}: {found:?}");
            assert!(found.idle.iter().all(|idle| (idle - formula).abs() < 1e-3), "{schedule}");
            let passes = shape.stages * shape.micro_batches * chunks;
            assert_eq!(found.spans.len(), 3 * passes, "{schedule}");
        }
    }

    #[test]
    fn unlike_stages_wait_for_the_slowest_and_for_their_links() {
        let plan = plan(3);
        let mut times = vec![vec![TIMES; 3]; 3];
        times[1][1].forward_s = 0.1;
        let shape = PipelineShape { stages: 3, chunks: 1, micro_batches: 5 };
        let programs = programs(&plan, PipelineSchedule::OneFOneB, shape);
        let seconds = |times: &[Vec<BlockTimes>], latency_s| {
            let link = LinkModel { latency_s, ..LinkModel::INSTANT };
            price(&programs, times, &links(3, link)).unwrap().seconds
        };
        let unlike = price(&programs, &times, &links(3, LinkModel::INSTANT)).unwrap();
        // Its own passes, and one forward and one backward pass of the stages beside it.
        assert!(unlike.seconds >= 5.0 * 0.14 + 0.05, "{unlike:?}");
        assert!(unlike.idle[1] < 0.2 && unlike.idle[0] > 0.5, "{:?}", unlike.idle);
        assert!(seconds(&times, 0.004) > unlike.seconds);
        times[1][1] = TIMES;
        assert!(seconds(&times, 0.0) < unlike.seconds);
        // A block that a rank does not hold may have no time; one that it holds may not.
        times[0][1].forward_s = f64::INFINITY;
        assert!(seconds(&times, 0.0) < unlike.seconds);
        times[1][1].forward_s = f64::INFINITY;
        let error = price(&programs, &times, &links(3, LinkModel::INSTANT)).unwrap_err();
        assert_eq!(error, UnknownTime { rank: Rank(1), block: 1 });
    }

    /// The two layers of a rank of a tensor group end with reductions.
    #[test]
    fn a_pass_of_several_segments_costs_as_much_as_one() {
        let config = MlpConfig {
            widths: vec![3, 64, 5],
            activation: Unary::Relu,
            dropout: 0.0,
            loss: MlpLoss::SquaredError,
        };
        let graph = mlp(&config).unwrap();
        let step = |shares: &[f64]| {
            let part = shard(&graph, shares, 0).unwrap().graph;
            let plan = Plan::new(differentiate(part).unwrap(), PlanOptions::new(ROWS));
            let shape = PipelineShape { stages: 2, chunks: 1, micro_batches: 1 };
            let programs = programs(&plan, PipelineSchedule::GPipe, shape);
            let times = vec![vec![TIMES; 2]; 2];
            price(&programs, &times, &links(2, LinkModel::INSTANT)).unwrap()
        };
        let (whole, part) = (step(&[1.0]), step(&[1.0, 1.0]));
        assert!(part.spans.len() > whole.spans.len(), "{part:?}");
        for rank in [Rank(0), Rank(1)] {
            let busy = |step: &StepPrice| -> f64 {
                let own = step.spans.iter().filter(|span| span.rank == rank);
                own.map(|span| span.to_s - span.from_s).sum()
            };
            assert!((busy(&part) - busy(&whole)).abs() < 1e-6, "{part:?} {whole:?}");
        }
    }

    #[test]
    fn a_shorter_micro_batch_takes_less() {
        let plan = plan(2);
        let shape = PipelineShape { stages: 2, chunks: 1, micro_batches: 1 };
        let mut programs = programs(&plan, PipelineSchedule::GPipe, shape);
        let times = vec![vec![TIMES; 2]; 2];
        let links = links(2, LinkModel::INSTANT);
        let batch = programs.programs[0].micro_batches[0];
        // The same passes once more, over half of the rows.
        for program in &mut programs.programs {
            program.micro_batches.insert(0, batch);
            program.micro_batches[1].rows = 1;
            for instruction in &mut program.instructions {
                if let Instruction::Load { micro_batch }
                | Instruction::Run { micro_batch, .. }
                | Instruction::Send { micro_batch, .. }
                | Instruction::Recv { micro_batch, .. } = instruction
                {
                    *micro_batch = 1;
                }
            }
        }
        let found = price(&programs, &times, &links).unwrap();
        let longest = found.spans.iter().map(|span| span.to_s - span.from_s).fold(0.0, f64::max);
        assert!((longest - 0.015).abs() < 1e-6, "{found:?}");
    }
}
