//! Instructions, and the program of one rank for one step.

use std::fmt;

use crate::base::{BucketId, SegmentId};
use crate::graph::Plan;

/// What a rank is told to do. Instructions name segments and buckets, not whole passes, so that
/// schedules differ only in their lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// Put the samples of a micro-batch where the plan wants them.
    Load { micro_batch: usize },
    /// Run a segment on a micro-batch.
    Run { segment: SegmentId, micro_batch: usize },
    /// Say how the step went, and wait until it is known whether it counts.
    Verdict,
    /// Update a bucket from its gradients.
    Update { bucket: BucketId },
}

/// A stretch of a rank's share of the global batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// The slot in the global batch of its first sample.
    pub first: u32,
    /// How many samples it has.
    pub rows: u32,
}

/// The instructions of one rank for one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub micro_batches: Vec<MicroBatch>,
    pub instructions: Vec<Instruction>,
}

/// Cuts `count` samples from slot `first` on into micro-batches of at most `rows_max`.
pub fn micro_batches(first: u32, count: u32, rows_max: u32) -> Vec<MicroBatch> {
    let starts = (0..count).step_by(rows_max.max(1) as usize);
    starts.map(|at| MicroBatch { first: first + at, rows: rows_max.min(count - at) }).collect()
}

/// The program of a rank that is alone: each micro-batch forward and backward, then one update.
/// Gradients accumulate over micro-batches; at most one is in flight.
pub fn one_rank(plan: &Plan, batch: u32, micro_batch: u32) -> Program {
    let micro_batches = micro_batches(0, batch, micro_batch);
    let mut instructions = Vec::new();
    for index in 0..micro_batches.len() {
        instructions.push(Instruction::Load { micro_batch: index });
        let (forward, backward) = plan.passes();
        instructions.extend(
            forward
                .into_iter()
                .chain(backward)
                .map(|segment| Instruction::Run { segment, micro_batch: index }),
        );
    }
    instructions.push(Instruction::Verdict);
    let buckets = (0..plan.buckets.len() as u32).map(BucketId);
    instructions.extend(buckets.map(|bucket| Instruction::Update { bucket }));
    Program { micro_batches, instructions }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load { micro_batch } => write!(f, "load micro-batch {micro_batch}"),
            Self::Run { segment, micro_batch } => {
                write!(f, "run {segment} on micro-batch {micro_batch}")
            }
            Self::Verdict => write!(f, "verdict"),
            Self::Update { bucket } => write!(f, "update {bucket}"),
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, micro_batch) in self.micro_batches.iter().enumerate() {
            let (first, rows) = (micro_batch.first, micro_batch.rows);
            writeln!(f, "micro-batch {index}: {rows} samples from slot {first}")?;
        }
        for (index, instruction) in self.instructions.iter().enumerate() {
            writeln!(f, "{index:4} {instruction}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Builder, Init, Phase, PlanOptions, differentiate};

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
        let program = one_rank(&plan, 10, 4);
        let runs =
            program.instructions.iter().filter(|i| matches!(i, Instruction::Run { .. })).count();
        assert_eq!(runs, 3 * plan.segments.len());
        assert!(plan.phase(Phase::W).count() > 0);
        let verdict = program.instructions.iter().position(|i| *i == Instruction::Verdict);
        let (before, after) = program.instructions.split_at(verdict.unwrap());
        assert!(before.iter().all(|i| !matches!(i, Instruction::Update { .. })));
        assert!(after[1..].iter().all(|i| matches!(i, Instruction::Update { .. })));
        assert!(program.to_string().contains("run s0 on micro-batch 2"));
    }
}
