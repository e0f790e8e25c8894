//! Times of the segments of pipelines in a step, from the times of blocks.

use std::collections::BTreeMap;

use crate::base::EdgeId;
use crate::exec::PassContext;
use crate::graph::{PassKind, Plan, Segment};
use crate::parallel::{Instruction, PipelinePrograms};
use crate::planner::cut::BlockTimes;
use crate::runtime::step::inference_pass;
use crate::ui::gantt::SegmentRun;

/// Floating-point operations and bytes of memory in a second of nominal times.
const NOMINAL_FLOPS_PER_S: f64 = 1e9;
const NOMINAL_BYTES_PER_S: f64 = 1e10;

/// Returns nominal times of the blocks of a plan for its most rows: by the floating-point
/// operations and the memory traffic of their kernels.
pub fn nominal_times(plan: &Plan) -> Vec<BlockTimes> {
    let pass = inference_pass(plan.options.rows);
    let seconds = |block: usize, phase: PassKind| {
        let own = |segment: &&Segment| segment.block as usize == block && segment.phase == phase;
        let found = plan.segments.iter().filter(own);
        found.map(|segment| nominal(plan, segment, &pass)).sum()
    };
    let of_block = |block: usize| BlockTimes {
        forward_s: seconds(block, PassKind::Forward),
        backward_input_s: seconds(block, PassKind::BackwardInput),
        backward_weight_s: seconds(block, PassKind::BackwardWeight),
    };
    (0..plan.graph.blocks.len()).map(of_block).collect()
}

/// Returns the nominal seconds of a segment.
fn nominal(plan: &Plan, segment: &Segment, pass: &PassContext) -> f64 {
    let nodes = &plan.graph.nodes[segment.nodes.clone()];
    let of_node = |node| {
        let cost = pass.cost(&plan.graph, node).unwrap_or_default();
        cost.flops / NOMINAL_FLOPS_PER_S + cost.bytes / NOMINAL_BYTES_PER_S
    };
    nodes.iter().map(of_node).sum()
}

/// Returns by rank when each segment runs in a step, if each device runs its program's segments one
/// after the other, waits only for the tensors that other stages send, and these travel in no time.
/// `times` has the seconds of each block for the most rows of `whole`, by rank and then by block.
pub fn predicted(
    programs: &PipelinePrograms,
    whole: &Plan,
    times: &[Vec<BlockTimes>],
) -> Vec<Vec<SegmentRun>> {
    let programs = &programs.programs;
    let mut rows: Vec<Vec<SegmentRun>> = vec![Vec::new(); programs.len()];
    let (mut next, mut free) = (vec![0; programs.len()], vec![0.0f64; programs.len()]);
    let mut sent: BTreeMap<(EdgeId, usize), f64> = BTreeMap::new();
    let mut is_moving = true;
    while is_moving {
        is_moving = false;
        for (rank, program) in programs.iter().enumerate() {
            while let Some(instruction) = program.instructions.get(next[rank]) {
                match *instruction {
                    Instruction::Recv { edge, micro_batch } => {
                        let Some(at) = sent.get(&(edge, micro_batch)) else { break };
                        free[rank] = free[rank].max(*at);
                    }
                    Instruction::Send { edge, micro_batch } => {
                        sent.insert((edge, micro_batch), free[rank]);
                    }
                    Instruction::Run { segment, micro_batch } => {
                        let segment = &whole.segments[segment.index()];
                        let rows_of = f64::from(program.micro_batches[micro_batch].rows);
                        let part = rows_of / whole.options.rows as f64;
                        let seconds = part * seconds_of(segment, &times[rank]);
                        let (from, to) = (free[rank], free[rank] + seconds);
                        let segment = (letter(segment.phase), segment.block as usize);
                        rows[rank].push(SegmentRun { segment, micro_batch, from, to });
                        free[rank] = to;
                    }
                    _ => {}
                }
                next[rank] += 1;
                is_moving = true;
            }
        }
    }
    rows
}

fn seconds_of(segment: &Segment, times: &[BlockTimes]) -> f64 {
    let times = &times[segment.block as usize];
    match segment.phase {
        PassKind::Forward => times.forward_s,
        PassKind::BackwardInput => times.backward_input_s,
        PassKind::BackwardWeight => times.backward_weight_s,
    }
}

/// Returns the letter of a pass.
fn letter(phase: PassKind) -> char {
    match phase {
        PassKind::Forward => 'F',
        PassKind::BackwardInput => 'B',
        PassKind::BackwardWeight => 'W',
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Rank;
    use crate::graph::{Builder, Init, PlanOptions, Unary, differentiate};
    use crate::parallel::{PipelineRequest, PipelineSchedule, PipelineStages, contiguous_shares};

    /// Two blocks, each with all three passes.
    fn plan() -> Plan {
        let mut b = Builder::new();
        let mut x = b.input("x", &[1, 8]);
        for block in 0..2 {
            b.block(&format!("h.{block}"));
            let w = b.parameter(&format!("w{block}"), &[8, 8], Init::Zeros);
            x = b.linear(x, w, None).unwrap();
            x = b.unary(x, Unary::Gelu).unwrap();
        }
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(x, target).unwrap();
        Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(2))
    }

    /// Runs of a pipeline of two stages with a block each as text, all passes taking a second.
    fn rows(schedule: PipelineSchedule, samples: u32) -> Vec<String> {
        let plan = plan();
        let stages = PipelineStages { ranks: vec![Rank(0), Rank(1)], chunks: vec![0..1, 1..2] };
        let programs = PipelinePrograms::training(&PipelineRequest {
            plan: &plan,
            pipelines: &[stages],
            shares: &contiguous_shares(&[samples], &[2]),
            schedule,
            overlap: true,
            piece_max: 1 << 20,
            in_flight_min: 1,
        });
        let second = BlockTimes { forward_s: 1.0, backward_input_s: 1.0, backward_weight_s: 1.0 };
        let rows = predicted(&programs, &plan, &[vec![second; 2], vec![second; 2]]);
        let text = |run: &SegmentRun| {
            let ((pass, block), m) = (run.segment, run.micro_batch);
            format!("{pass}{block} {m}: {}-{}", run.from, run.to)
        };
        rows.iter().map(|row| row.iter().map(text).collect::<Vec<_>>().join(", ")).collect()
    }

    #[test]
    fn a_stage_waits_for_the_tensors_of_the_other_one_only() {
        let first = "F0 0: 0-1, F0 1: 1-2, B0 0: 3-4, W0 0: 4-5, B0 1: 6-7, W0 1: 7-8";
        let last = "F1 0: 1-2, B1 0: 2-3, W1 0: 3-4, F1 1: 4-5, B1 1: 5-6, W1 1: 6-7";
        assert_eq!(rows(PipelineSchedule::OneFOneB, 4), [first, last]);
        let first = "F0 0: 0-1, F0 1: 1-2, B0 0: 4-5, W0 0: 5-6, B0 1: 6-7, W0 1: 7-8";
        let last = "F1 0: 1-2, F1 1: 2-3, B1 0: 3-4, W1 0: 4-5, B1 1: 5-6, W1 1: 6-7";
        assert_eq!(rows(PipelineSchedule::GPipe, 4), [first, last]);
    }

    #[test]
    fn fewer_rows_take_less_time() {
        let last = "F1 0: 1-2, B1 0: 2-3, W1 0: 3-4, F1 1: 4-4.5, B1 1: 4.5-5, W1 1: 5-5.5";
        assert_eq!(rows(PipelineSchedule::OneFOneB, 3)[1], last);
    }

    #[test]
    fn nominal_times_count_operations_by_pass() {
        let times = nominal_times(&plan());
        // 2 rows of a matrix product of 8 with 8 values, and some for each value.
        let product = 2.0 * 2.0 * 8.0 * 8.0 / NOMINAL_FLOPS_PER_S;
        for block in &times {
            assert!((product..10.0 * product).contains(&block.forward_s), "{block:?}");
            assert!((product..2.0 * product).contains(&block.backward_weight_s), "{block:?}");
        }
        // The first block needs no gradient of its input, and so no product for it.
        assert!(times[0].backward_input_s > 0.0, "{times:?}");
        assert!(times[1].backward_input_s > times[0].backward_input_s + 0.9 * product, "{times:?}");
    }
}
