//! 1F1B with several model chunks per stage: section 2.2 of Narayanan et al., "Efficient
//! Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.

use super::{PipelineShape, StagePass, StageWork};

/// Returns the work of stage `s` of `K` with `v` model chunks in a step of `M` micro-batches.
///
/// The unit is a virtual micro-batch, a micro-batch in one of the stage's chunks: `vM` forward and
/// `vM` backward. They run in rounds of `K` micro-batches, which pass through the first chunk, then
/// through the second, and so on; backward from the last chunk to the first.
///
/// 1. warm-up: `min(vM, 2(K-s-1) + (v-1)K)` forward passes: the round passes through all chunks
///    but the last (`(v-1)K`), then micro-batch 0 passes to the last stage and comes back
///    (`2(K-s-1)`);
/// 2. steady state: one forward pass and one backward pass by turns, until no virtual micro-batch
///    is left to begin;
/// 3. cool-down: the backward passes of the virtual micro-batches that are still in flight.
///
/// The rounds are full, as `M` is a multiple of `K`. A stash, of a virtual micro-batch, lives from
/// the forward to the backward pass: at most one more than the warm-up at a time.
pub fn work(shape: PipelineShape, stage: usize) -> Vec<StageWork> {
    let PipelineShape { stages, chunks, micro_batches } = shape;
    let count = chunks * micro_batches;
    let warm_up = count.min(2 * (stages - stage - 1) + (chunks - 1) * stages);
    let mut work = Vec::with_capacity(2 * count);
    for i in 0..warm_up {
        work.push(forward(shape, i));
    }
    for i in warm_up..count {
        work.push(forward(shape, i));
        work.push(backward(shape, i - warm_up));
    }
    for i in count - warm_up..count {
        work.push(backward(shape, i));
    }
    work
}

fn forward(shape: PipelineShape, virtual_batch: usize) -> StageWork {
    let (chunk, micro_batch) = place_in_round(shape, virtual_batch);
    StageWork { pass: StagePass::Forward, chunk, micro_batch }
}

fn backward(shape: PipelineShape, virtual_batch: usize) -> StageWork {
    let (chunk, micro_batch) = place_in_round(shape, virtual_batch);
    StageWork { pass: StagePass::Backward, chunk: shape.chunks - 1 - chunk, micro_batch }
}

/// Returns the chunk, counted in the direction of the pass, and the micro-batch of a virtual
/// micro-batch.
const fn place_in_round(shape: PipelineShape, virtual_batch: usize) -> (usize, usize) {
    let PipelineShape { stages, chunks, .. } = shape;
    let round = virtual_batch / (stages * chunks);
    let position = virtual_batch % (stages * chunks);
    (position / stages, round * stages + position % stages)
}
