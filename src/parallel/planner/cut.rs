//! The cut of a model over a pipeline: contiguous runs of blocks on devices, so that the slowest
//! stage is as short as possible. Pure: from measured times to a decision.

mod contiguous;
mod counts;
mod error;
mod interleaved;
mod prices;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use counts::{by_stage, chunks_of_counts, even, of_counts};
pub use error::CutError;

use self::prices::Prices;
use potluck_graph::{Plan, crossings};

/// Most devices whose assignment to stages is searched exactly; beyond it, see [`cut`].
pub(crate) const EXACT_DEVICES: usize = 8;

/// Most devices whose every order is tried for interleaved chunks; beyond it, see [`cut`].
pub(crate) const INTERLEAVED_DEVICES: usize = 6;

/// Seconds of the passes of one block for one micro-batch on one device.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct BlockTimes {
    pub forward_s: f64,
    pub backward_input_s: f64,
    pub backward_weight_s: f64,
}

impl BlockTimes {
    /// Returns the seconds of all passes together.
    pub fn sum_s(&self) -> f64 {
        self.forward_s + self.backward_input_s + self.backward_weight_s
    }

    /// Returns these times, each multiplied by a factor.
    pub fn scaled(self, factor: f64) -> Self {
        Self {
            forward_s: factor * self.forward_s,
            backward_input_s: factor * self.backward_input_s,
            backward_weight_s: factor * self.backward_weight_s,
        }
    }

    /// Returns the sums of these times and others.
    pub fn plus(self, other: Self) -> Self {
        Self {
            forward_s: self.forward_s + other.forward_s,
            backward_input_s: self.backward_input_s + other.backward_input_s,
            backward_weight_s: self.backward_weight_s + other.backward_weight_s,
        }
    }
}

/// Model chunks that a device would hold as a stage of the pipeline: the subject of
/// [`CutRequest::fits`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CutStage<'a> {
    /// Index of the device, as in [`CutRequest::times`].
    pub device: usize,
    /// Stage of the pipeline, on which the stashes in flight depend.
    pub stage: usize,
    /// Blocks of each of the stage's model chunks, in the order of the model; none is empty.
    pub blocks: &'a [Range<u32>],
}

/// Inputs of a cut. All devices take part: there are as many as stages.
#[derive(Clone, Copy)]
pub struct CutRequest<'a> {
    /// Seconds of each block on each device, for one micro-batch: by device, then by block. A
    /// time that is not finite keeps the block off the device; a negative one counts as 0.
    pub times: &'a [Vec<BlockTimes>],
    /// Seconds that a cut before block b costs the device on either side of it, for one
    /// micro-batch (transfers, both directions): by device, then by b. Entry 0 is not used. A cost
    /// that is not finite forbids the device a cut there.
    pub cut_s: &'a [Vec<f64>],
    /// Model chunks per stage: 1 unless interleaved. Chunk c is on stage `c % stages`.
    pub chunks: usize,
    /// Stages of the pipeline.
    pub stages: usize,
    /// True if stage s is device s; false if the search assigns devices to stages.
    pub is_ordered: bool,
    /// Returns true if the device has memory for these chunks as that stage. It is called at most
    /// once for the same argument, need not be monotone in the blocks, and must be a pure function.
    pub fits: &'a dyn Fn(CutStage<'_>) -> bool,
}

/// Model cut into chunks, and the devices that take them.
#[derive(Clone, Debug, PartialEq)]
pub struct Cut {
    /// Device of each stage.
    pub devices: Vec<usize>,
    /// Blocks of each chunk of each stage, in the order of the model.
    pub blocks: Vec<Vec<Range<u32>>>,
    /// Seconds of the slowest stage for one micro-batch: the passes of all its blocks, and the
    /// cost of the cuts beside its chunks.
    pub slowest_s: f64,
}

impl Cut {
    /// Returns the blocks of each model chunk, in the order of the model.
    pub fn chunks_in_order(&self) -> Vec<Range<u32>> {
        let mut chunks = Vec::new();
        for chunk in 0..self.blocks.first().map_or(0, Vec::len) {
            for of_stage in &self.blocks {
                chunks.push(of_stage[chunk].clone());
            }
        }
        chunks
    }
}

/// Returns the elements that cross a cut before each block, in both directions, of a micro-batch of
/// the most rows of the plan.
pub fn crossing_elements(whole: &Plan) -> Vec<usize> {
    let count = whole.graph.blocks.len() as u32;
    let mut elements = Vec::new();
    for cut in 0..count {
        let stages: Vec<u32> = (0..count).map(|block| u32::from(block >= cut)).collect();
        let mut all = 0;
        for crossing in crossings(&whole.graph, &stages) {
            all += whole.graph.tensor(crossing.tensor).shape.elements(whole.options.rows);
        }
        elements.push(all);
    }
    elements
}

/// Cuts the blocks into `stages * chunks` contiguous model chunks and assigns the devices to the
/// stages, so that the slowest stage takes the least time per micro-batch.
///
/// Seconds are rounded to whole picoseconds, so that sums are exact and equal stages tie. Among
/// cuts that are equally slow, the one with the smallest sum of squared stage times is taken, then
/// from the first stage on the lower device and the earlier end of its blocks.
///
/// - One chunk per stage, devices in order, or at most [`EXACT_DEVICES`] of them: exact.
/// - One chunk per stage, more devices: exact for the given order, which is then improved by
///   exchanges of two devices while one helps. No exchange of two improves the result; another
///   order might.
/// - Interleaved chunks: not exact. For each order of at most [`INTERLEAVED_DEVICES`] devices (the
///   given order if there are more), a search moves one bound between chunks by one block while
///   that helps. It starts at the cut with the shortest slowest chunk, and again at the even cut,
///   so the result is never slower than the even cut in any of these orders that has memory for it.
///   A cut that has memory may be missed.
///
/// # Errors
/// - [`CutError::Blocks`] if there are fewer blocks than chunks.
/// - [`CutError::Forbidden`] if no cut has finite costs.
/// - [`CutError::Memory`] if none of those fits, or, interleaved, none was found that does.
///
/// # Panics
/// If there is no stage or no chunk, or if the request's tables disagree in size.
pub fn cut(request: &CutRequest<'_>) -> Result<Cut, CutError> {
    let prices = Prices::of(request);
    let parts = request.stages * request.chunks;
    if prices.blocks() < parts {
        return Err(CutError::Blocks { blocks: prices.blocks(), parts });
    }
    match request.chunks {
        1 => contiguous::cut(&prices),
        _ => interleaved::cut(&prices),
    }
}
