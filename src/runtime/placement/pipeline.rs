//! Placement of pipelines: which device holds which blocks of the model, as it is given, recorded
//! or measured; and the opening of devices with their parts.

mod checks;
mod forward;
mod measure;
mod open;
mod search;
mod shared_memory;
mod stage_memory;
#[cfg(test)]
mod tests;

pub use checks::{require_devices, require_micro_batches, require_model};
pub use forward::{ForwardPipelines, open_forward_pipelines};
pub use measure::{MeasuredBlocks, crossing_elements, measure_blocks};
pub use open::{host_bytes, names_of_runs, open_pipelines};
pub use search::by_measurement;
pub use shared_memory::require_shared_memory;

use std::ops::Range;

use super::arrangement::Arrangement;
use super::shares::fixed_counts;
use super::types::PlacementRequest;
use crate::parallel::{
    Mesh, ParallelOptions, PipelineOptions, PipelineSchedule, Placement, contiguous_shares,
};
use crate::planner::cut::{chunks_of_counts, even};
use crate::runtime::RuntimeError;

/// Pipelines that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedPipelines {
    /// Stages of each pipeline, and model chunks of each stage.
    pub stages: usize,
    pub chunks: usize,
    pub schedule: PipelineSchedule,
}

impl RequestedPipelines {
    /// Returns the pipelines that a request asks for.
    pub fn of(request: &PlacementRequest) -> Self {
        Self::from(&request.parallel.pipeline)
    }

    /// Returns the mesh of so many devices: as many whole pipelines as they make.
    pub fn mesh(&self, devices: usize) -> Mesh {
        Mesh::of_pipelines(devices / self.stages.max(1), self.stages)
    }

    /// Returns the model chunks of a model of `blocks` blocks: of these numbers of blocks or, if
    /// none are given, of nearly equal ones.
    pub fn model_chunks(&self, blocks: u32, given: &[u32]) -> Vec<Range<u32>> {
        if given.is_empty() {
            even(blocks, self.stages * self.chunks)
        } else {
            chunks_of_counts(given)
        }
    }
}

impl From<&PipelineOptions> for RequestedPipelines {
    fn from(options: &PipelineOptions) -> Self {
        let PipelineOptions { stages, schedule, virtual_stages, .. } = *options;
        Self { stages: stages as usize, chunks: virtual_stages as usize, schedule }
    }
}

/// Returns the pipelines of devices in this order, all cut into the same model chunks.
pub fn in_order(
    request: &RequestedPipelines,
    positions: Vec<usize>,
    chunks: &[Range<u32>],
    counts: &[u32],
    micro_batch: u32,
) -> Arrangement {
    let mesh = request.mesh(positions.len());
    let micro_batches: Vec<u32> = counts.iter().map(|count| micro_batch.min(*count)).collect();
    let shares = contiguous_shares(counts, &micro_batches);
    let chunks = vec![chunks.to_vec(); counts.len()];
    Arrangement::of(mesh, positions, &chunks, shares, request.schedule)
}

/// Returns the pipelines of a request whose cut and shares are given or, if nothing can be
/// measured, cut into nearly equal numbers of blocks; `None` if something is to be measured.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if the shares do not fit the batch or the pipelines.
pub fn given(
    request: &PlacementRequest,
    devices: usize,
) -> Result<Option<Arrangement>, RuntimeError> {
    let pipelines = RequestedPipelines::of(request);
    let blocks = request.plans.of_rows(1).graph.blocks.len() as u32;
    let count = pipelines.mesh(devices).data;
    let options = &request.parallel.pipeline;
    let has_shares = request.parallel.shares.is_some() || count == 1;
    if request.probe.is_some() && (options.blocks_per_stage.is_empty() || !has_shares) {
        return Ok(None);
    }
    let chunks = pipelines.model_chunks(blocks, &options.blocks_per_stage);
    let counts = fixed_counts(request.parallel, request.batch, count)?;
    let positions = (0..devices).collect();
    let planned = in_order(&pipelines, positions, &chunks, &counts, request.micro_batch);
    Ok(Some(planned))
}

/// Returns the pipelines of a checkpoint that a run keeps; `None` if it decides anew.
pub fn kept(request: &PlacementRequest, saved: Option<&Placement>) -> Option<Arrangement> {
    let saved = saved?;
    if request.retune || !saved.shares_fit(request.batch, request.micro_batch) {
        return None;
    }
    recorded(request, saved).filter(|kept| is_as_given(request, kept))
}

/// Returns true if pipelines have the cut and the shares that a request gives, and the devices in
/// their order if it gives any.
pub fn is_as_given(request: &PlacementRequest, planned: &Arrangement) -> bool {
    let ParallelOptions { shares, pipeline, .. } = request.parallel;
    if pipeline.blocks_per_stage.is_empty() && shares.is_none() {
        return true;
    }
    if !pipeline.blocks_per_stage.is_empty() {
        let chunks = chunks_of_counts(&pipeline.blocks_per_stage);
        if planned.pipelines.iter().any(|of| of.chunks != chunks) {
            return false;
        }
    }
    if shares.is_some() {
        let counts = fixed_counts(request.parallel, request.batch, planned.mesh.data);
        let now: Vec<u32> = planned.shares.iter().map(|share| share.count).collect();
        if !matches!(counts, Ok(counts) if counts == now) {
            return false;
        }
    }
    planned.positions.iter().copied().eq(0..planned.positions.len())
}

/// Returns the pipelines of a checkpoint, if they were placed as this request asks; `None` if not.
pub fn recorded(request: &PlacementRequest, saved: &Placement) -> Option<Arrangement> {
    let pipelines = RequestedPipelines::of(request);
    let is_same = saved.mesh.pipeline == pipelines.stages
        && saved.schedule == pipelines.schedule
        && saved.virtual_stages as usize == pipelines.chunks;
    if !is_same || !saved.is_consistent() {
        return None;
    }
    let mut chunks = Vec::new();
    for ranks in saved.pipelines() {
        let mut of_pipeline = Vec::new();
        for chunk in 0..pipelines.chunks {
            for rank in &ranks {
                of_pipeline.push(rank.blocks[chunk].clone());
            }
        }
        chunks.push(of_pipeline);
    }
    let mut counts = Vec::new();
    let mut micro_batches = Vec::new();
    for rank in saved.units() {
        counts.push(rank.share);
        micro_batches.push(rank.micro_batch);
    }
    let positions = saved.ranks.iter().map(|rank| rank.position).collect();
    let shares = contiguous_shares(&counts, &micro_batches);
    Some(Arrangement::of(saved.mesh, positions, &chunks, shares, pipelines.schedule))
}
