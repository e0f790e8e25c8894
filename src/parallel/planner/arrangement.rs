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

    /// Enlarges the micro-batches and the plans of ranks with the whole model for the samples of
    /// later shares, to at most `micro_batch` samples.
    pub fn with_rows_for(mut self, changes: &[ShareChange], micro_batch: u32) -> Self {
        let later = micro_batches_for(changes, micro_batch);
        for (rank, rows) in later.into_iter().enumerate() {
            let share = &mut self.shares[rank];
            share.micro_batch = share.micro_batch.max(rows);
            self.rows[rank] = self.rows[rank].max(rows);
        }
        self
    }

    /// Returns the maximum rows of a micro-batch.
    pub fn rows_max(&self) -> u32 {
        self.rows.iter().copied().max().unwrap_or(1)
    }
}

/// Returns the samples of the largest micro-batch of each rank with any of these shares, in
/// micro-batches of at most `micro_batch` samples; empty without shares.
pub fn micro_batches_for(shares: &[ShareChange], micro_batch: u32) -> Vec<u32> {
    let mut largest: Vec<u32> = Vec::new();
    for change in shares {
        largest.resize(change.shares.len(), 1);
        for (rows, count) in largest.iter_mut().zip(&change.shares) {
            *rows = micro_batch.min(*count).max(*rows);
        }
    }
    largest
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
        let mesh = Mesh::of_pipelines(2, 1);
        let schedule = PipelineSchedule::default();
        let change = |step, shares: &[u32]| ShareChange { step, shares: shares.to_vec() };
        let changes = [change(9, &[14, 10]), change(34, &[20, 4])];
        // The micro-batches of the first shares are at most these shares.
        for (micro_batch, first, largest) in
            [(24, [12, 12], [20, 12]), (16, [12, 12], [16, 12]), (8, [8, 8], [8, 8])]
        {
            let shares = contiguous_shares(&[12, 12], &first);
            let arranged = Arrangement::of(mesh, vec![0, 1], &chunks, shares, schedule);
            assert_eq!(arranged.rows, first);
            assert_eq!(arranged.clone().with_rows_for(&[], micro_batch), arranged);
            let enlarged = arranged.with_rows_for(&changes, micro_batch);
            assert_eq!(enlarged.rows, largest, "{micro_batch}");
            assert_eq!(enlarged.shares, contiguous_shares(&[12, 12], &largest), "{micro_batch}");
        }
        assert_eq!(micro_batches_for(&changes, 16), [16, 10]);
    }
}
