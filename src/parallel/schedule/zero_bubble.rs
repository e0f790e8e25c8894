//! ZB-H1: the first handcrafted schedule of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR
//! 2024 (arXiv 2401.10241, 2023).

use super::{PipelineShape, StagePass, StageWork};

/// Returns the work of stage `s` of `K` in a step of `M` micro-batches. Gradients of activations
/// are computed as in 1F1B; gradients of parameters, which no other stage waits for, `s`
/// micro-batches later, so that the last stage answers the first ones sooner and has work left at
/// the end:
///
/// 1. warm-up: `min(M, K-1-s)` forward passes;
/// 2. fill: `s` times a forward pass and a pass to the gradients of activations, by turns;
/// 3. steady state: forward pass of a micro-batch `m`, gradients of activations of
///    `m - (K-1-s)`, gradients of parameters of `m - (K-1)`;
/// 4. cool-down: no micro-batch is left to begin, the other two passes by turns;
/// 5. drain: gradients of parameters of the last `s` micro-batches, where 1F1B is idle.
///
/// With less than `K` micro-batches, phase 3 is missing and the others are shorter.
///
/// A stash lives from the forward pass to the gradients of parameters: at most `min(M, K)` at a
/// time on every stage, as on the first stage of 1F1B. Tensors that only the gradients of
/// activations need live as in 1F1B: at most `min(M, K-s)` at a time.
pub fn work(shape: PipelineShape, stage: usize) -> Vec<StageWork> {
    let PipelineShape { stages, micro_batches: count, .. } = shape;
    let delay = stage;
    let warm_up = count.min(stages - 1 - stage);
    let mut work = Vec::with_capacity(3 * count);

    for m in 0..warm_up {
        work.push(StageWork::whole(StagePass::Forward, m));
    }
    for m in 0..count {
        if warm_up + m < count {
            work.push(StageWork::whole(StagePass::Forward, warm_up + m));
        }
        work.push(StageWork::whole(StagePass::BackwardInput, m));
        if m >= delay {
            work.push(StageWork::whole(StagePass::BackwardWeight, m - delay));
        }
    }
    for m in count.saturating_sub(delay)..count {
        work.push(StageWork::whole(StagePass::BackwardWeight, m));
    }
    work
}
