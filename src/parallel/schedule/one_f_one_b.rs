//! 1F1B with a flush in every step: PipeDream-flush of Narayanan et al., "Memory-Efficient
//! Pipeline-Parallel DNN Training", ICML 2021.

use super::{PipelineShape, StagePass, StageWork};

/// Returns the work of stage `s` of `K` in a step of `M` micro-batches:
///
/// 1. warm-up: `min(M, K-1-s)` forward passes, while micro-batch 0 passes to the last stage;
/// 2. steady state: one forward pass and one backward pass by turns, until no micro-batch is left
///    to begin;
/// 3. cool-down: the backward passes of the micro-batches that are still in flight.
///
/// A stash lives from the forward to the backward pass: at most `min(M, K-s)` at a time.
pub fn work(shape: PipelineShape, stage: usize) -> Vec<StageWork> {
    let count = shape.micro_batches;
    let warm_up = count.min(shape.stages - 1 - stage);
    let mut work = Vec::with_capacity(2 * count);
    for m in 0..warm_up {
        work.push(StageWork::whole(StagePass::Forward, m));
    }
    for m in warm_up..count {
        work.push(StageWork::whole(StagePass::Forward, m));
        work.push(StageWork::whole(StagePass::Backward, m - warm_up));
    }
    for m in count - warm_up..count {
        work.push(StageWork::whole(StagePass::Backward, m));
    }
    work
}
