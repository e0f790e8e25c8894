//! Arrangement of a run: the device of each rank, its blocks and its samples.

use std::ops::Range;

use crate::{Mesh, PipelineRanks, PipelineSchedule, Share, ShareChange};

/// Ranks of a run: parallel pipelines, of one stage each if every rank has the whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrangement {
    pub mesh: Mesh,
    /// By rank: the index of its device among the requested ones.
    pub positions: Vec<usize>,
    pub pipelines: Vec<PipelineRanks>,
    /// Samples of each pipeline.
    pub shares: Vec<Share>,
    /// By rank: the maximum rows of its plan.
    pub rows: Vec<u32>,
    pub schedule: PipelineSchedule,
    /// Shares of the tensors by rank of a tensor group; empty if stages have one rank each.
    pub tensor_shares: Vec<u32>,
}

impl Arrangement {
    /// Returns the arrangement of pipelines with these model chunks and shares, by pipeline. Plans
    /// of parts of the model are all for the longest micro-batch, other plans for their own.
    pub fn of(
        mesh: Mesh,
        positions: Vec<usize>,
        chunks: &[Vec<Range<u32>>],
        shares: Vec<Share>,
        schedule: PipelineSchedule,
    ) -> Self {
        let mut rows = Vec::new();
        for share in &shares {
            rows.push(share.micro_batch.min(share.count).max(1));
        }
        if mesh.is_divided() {
            let most = rows.iter().copied().max().unwrap_or(1);
            rows = vec![most; mesh.world_size()];
        }
        let pipelines = pipelines_of(mesh, chunks);
        let tensor_shares = Vec::new();
        Self { mesh, positions, pipelines, shares, rows, schedule, tensor_shares }
    }

    /// Sets the shares of the ranks of tensor groups.
    pub fn with_tensor_shares(self, tensor_shares: Vec<u32>) -> Self {
        Self { tensor_shares, ..self }
    }

    /// Enlarges the plans of ranks with the whole model for the samples of later shares.
    pub fn with_rows_for(mut self, changes: &[ShareChange]) -> Self {
        for change in changes {
            for (rank, share) in change.shares.iter().enumerate() {
                let rows = self.shares[rank].micro_batch.min(*share);
                self.rows[rank] = self.rows[rank].max(rows);
            }
        }
        self
    }

    /// Returns the maximum rows of a micro-batch.
    pub fn rows_max(&self) -> u32 {
        self.rows.iter().copied().max().unwrap_or(1)
    }
}

/// Returns the pipelines of a mesh, each cut into its model chunks.
pub fn pipelines_of(mesh: Mesh, chunks: &[Vec<Range<u32>>]) -> Vec<PipelineRanks> {
    let mut pipelines = Vec::new();
    for (groups, chunks) in mesh.pipelines().zip(chunks) {
        pipelines.push(PipelineRanks { groups, chunks: chunks.clone() });
    }
    pipelines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contiguous_shares;

    #[test]
    fn plans_have_rows_for_later_shares() {
        let chunks = vec![std::iter::once(0..3).collect(); 2];
        let shares = contiguous_shares(&[12, 12], &[16, 8]);
        let mesh = Mesh::of_pipelines(2, 1);
        let schedule = PipelineSchedule::default();
        let arranged = Arrangement::of(mesh, vec![0, 1], &chunks, shares, schedule);
        assert_eq!(arranged.rows, [12, 8]);
        let change = |step, shares: &[u32]| ShareChange { step, shares: shares.to_vec() };
        let changes = [change(9, &[14, 10]), change(34, &[20, 4])];
        let enlarged = arranged.with_rows_for(&changes);
        assert_eq!(enlarged.rows, [16, 8], "at most a micro-batch");
        assert_eq!((enlarged.shares[0].count, enlarged.shares[1].count), (12, 12));
    }
}
