//! Requested pipelines, and their arrangements.

use std::ops::Range;

use super::types::PlacementRequest;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::cut::{chunks_of_counts, even};
use potluck_parallel::{
    Mesh, ParallelOptions, PipelineOptions, PipelineSchedule, Placement, Share, contiguous_shares,
};

/// Requested pipelines; of one stage each if every rank has the whole model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestedPipelines<'a> {
    /// Stages of each pipeline, and model chunks of each stage.
    pub stages: usize,
    pub chunks: usize,
    pub schedule: PipelineSchedule,
    /// Blocks of each model chunk; empty if they are not given.
    pub blocks: &'a [u32],
    /// Ranks of the tensor group of each stage.
    pub tensor: usize,
    /// Their shares; empty if they are not given.
    pub tensor_shares: &'a [u32],
}

impl<'a> RequestedPipelines<'a> {
    /// Returns the pipelines of a request.
    pub fn of(request: &PlacementRequest<'a>) -> Self {
        Self::from(request.parallel)
    }

    /// Returns the mesh of `devices` devices, with all their complete pipelines.
    pub fn mesh(&self, devices: usize) -> Mesh {
        let Self { stages, tensor, .. } = *self;
        let data = devices / self.devices_per_pipeline().max(1);
        Mesh { data, pipeline: stages, tensor }
    }

    /// Returns the number of devices of a pipeline.
    pub fn devices_per_pipeline(&self) -> usize {
        self.stages * self.tensor
    }

    /// Returns the given or equal shares of the ranks of tensor groups in lowest terms; empty if
    /// stages have one rank each.
    pub fn given_tensor_shares(&self) -> Vec<u32> {
        if self.tensor == 1 {
            Vec::new()
        } else if self.tensor_shares.is_empty() {
            vec![1; self.tensor]
        } else {
            in_lowest_terms(self.tensor_shares)
        }
    }

    /// Returns the given model chunks of a model of `blocks` blocks, or else chunks of nearly equal
    /// numbers of blocks.
    pub(crate) fn model_chunks(&self, blocks: u32) -> Vec<Range<u32>> {
        if self.blocks.is_empty() {
            even(blocks, self.stages * self.chunks)
        } else {
            chunks_of_counts(self.blocks)
        }
    }

    /// Pipelines of devices in this order, all cut into the same model chunks.
    pub(crate) fn in_order(
        &self,
        positions: Vec<usize>,
        chunks: &[Range<u32>],
        counts: &[u32],
        micro_batch: u32,
    ) -> Arrangement {
        let mesh = self.mesh(positions.len());
        let micro_batches: Vec<u32> =
            counts.iter().map(|count| micro_batch.min(*count).max(1)).collect();
        let shares = contiguous_shares(counts, &micro_batches);
        let chunks = vec![chunks.to_vec(); counts.len()];
        Arrangement::of(mesh, positions, &chunks, shares, self.schedule)
            .with_tensor_shares(self.given_tensor_shares())
    }

    /// Returns the recorded pipelines of a model of `blocks` blocks, if they are as requested and
    /// have all blocks in order.
    pub fn recorded(&self, saved: &Placement, blocks: u32) -> Option<Arrangement> {
        let PipelineOptions { schedule, virtual_stages, .. } = saved.options.pipeline;
        let is_same = saved.mesh.pipeline == self.stages
            && saved.mesh.tensor == self.tensor
            && schedule == self.schedule
            && virtual_stages as usize == self.chunks;
        if !is_same || !saved.is_consistent() {
            return None;
        }
        let mut chunks = Vec::new();
        for stages in saved.pipelines() {
            let mut of_pipeline = Vec::new();
            for chunk in 0..self.chunks {
                for group in &stages {
                    of_pipeline.push(group[0].blocks[chunk].clone());
                }
            }
            if !is_all_of(&of_pipeline, blocks) {
                return None;
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
        let arrangement = Arrangement::of(saved.mesh, positions, &chunks, shares, self.schedule);
        Some(arrangement.with_tensor_shares(saved.tensor_shares.clone()))
    }
}

/// Returns shares divided by their greatest common divisor: 3 and 1 for 6 and 2.
fn in_lowest_terms(shares: &[u32]) -> Vec<u32> {
    let mut divisor = 0;
    for share in shares {
        let mut a = divisor;
        let mut b = *share;
        while b > 0 {
            (a, b) = (b, a % b);
        }
        divisor = a;
    }
    shares.iter().map(|share| share / divisor.max(1)).collect()
}

/// Returns true if consecutive runs have all blocks.
fn is_all_of(runs: &[Range<u32>], blocks: u32) -> bool {
    let mut end = 0;
    for run in runs {
        if run.start != end {
            return false;
        }
        end = run.end;
    }
    end == blocks
}

impl<'a> From<&'a ParallelOptions> for RequestedPipelines<'a> {
    fn from(options: &'a ParallelOptions) -> Self {
        let ParallelOptions { pipeline, tensor, .. } = options;
        let PipelineOptions { stages, schedule, virtual_stages, blocks_per_stage } = pipeline;
        let has_stages = pipeline.has_stages();
        Self {
            stages: *stages as usize,
            chunks: if has_stages { *virtual_stages as usize } else { 1 },
            schedule: *schedule,
            blocks: if has_stages { blocks_per_stage } else { &[] },
            tensor: tensor.ranks as usize,
            tensor_shares: &tensor.shares,
        }
    }
}

/// Returns the arrangement of ranks with the whole model, in plans of `rows` rows.
pub(crate) fn arrangement_of_replicas(
    request: &PlacementRequest,
    positions: Vec<usize>,
    shares: Vec<Share>,
    rows: Vec<u32>,
) -> Arrangement {
    let requested = RequestedPipelines::of(request);
    let blocks = request.plans.of_rows(1).graph.blocks.len() as u32;
    let chunks = vec![requested.model_chunks(blocks); positions.len()];
    let mesh = requested.mesh(positions.len());
    Arrangement { rows, ..Arrangement::of(mesh, positions, &chunks, shares, requested.schedule) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_that_mean_the_same_are_the_same() {
        assert_eq!(in_lowest_terms(&[6, 2]), [3, 1]);
        assert_eq!(in_lowest_terms(&[1000, 171]), [1000, 171]);
        assert_eq!(in_lowest_terms(&[5, 5, 10]), [1, 1, 2]);
        assert_eq!(in_lowest_terms(&[]), [0; 0]);
    }

    #[test]
    fn recorded_runs_of_blocks_are_the_model_or_of_another() {
        let runs = |bounds: &[(u32, u32)]| -> Vec<Range<u32>> {
            bounds.iter().map(|(start, end)| *start..*end).collect()
        };
        assert!(is_all_of(&runs(&[(0, 2), (2, 4)]), 4) && is_all_of(&runs(&[(0, 4)]), 4));
        for damaged in [&[(0, 1)][..], &[(1, 4)], &[(0, 9)], &[(0, 2), (3, 4)], &[(2, 4), (0, 2)]] {
            assert!(!is_all_of(&runs(damaged), 4), "{damaged:?}");
        }
    }
}
