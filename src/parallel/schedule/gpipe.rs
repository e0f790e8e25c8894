//! GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
//! Parallelism", NeurIPS 2019.

use super::{PipelineShape, StagePass, StageWork};

/// Returns the work of every stage in a step:
///
/// 1. the forward passes of all micro-batches, so that the stashes of all are in flight;
/// 2. the backward passes of all micro-batches.
///
/// The paper draws phase 2 from the last micro-batch to the first. Here it runs in the order of
/// micro-batches, in the same time, so that gradients are added in the order of all schedules.
pub fn work(shape: PipelineShape) -> Vec<StageWork> {
    let mut work = Vec::with_capacity(2 * shape.micro_batches);
    for pass in [StagePass::Forward, StagePass::Backward] {
        for m in 0..shape.micro_batches {
            work.push(StageWork::whole(pass, m));
        }
    }
    work
}
