//! 1F1B with a flush in every step: PipeDream-flush of Narayanan et al., "Memory-Efficient
//! Pipeline-Parallel DNN Training", ICML 2021.

use super::{PipelineShape, StagePass, StageWork};

/// Returns what stage `s` of `K` runs in a step of `M` micro-batches:
///
/// 1. warm-up: `min(M, K-1-s)` forward passes, while micro-batch 0 is on its way to the last
///    stage;
/// 2. steady state: one forward pass and one backward pass by turns, until no micro-batch is left
///    to begin;
/// 3. cool-down: the backward passes of those that are still in flight.
///
/// A stash lives from the forward to the backward pass: at most `min(M, K-s)` at a time.
pub fn work(shape: PipelineShape, stage: usize) -> Vec<StageWork> {
    let count = shape.micro_batches;
    let warm_up = count.min(shape.stages - 1 - stage);
    let forward = |m| StageWork::whole(StagePass::Forward, m);
    let backward = |m| StageWork::whole(StagePass::Backward, m);

    let steady = (warm_up..count).flat_map(|m| [forward(m), backward(m - warm_up)]);
    let cool_down = (count - warm_up..count).map(backward);
    (0..warm_up).map(forward).chain(steady).chain(cool_down).collect()
}
