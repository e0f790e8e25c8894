//! Layout of an arrangement for a request, and the memory of its ranks.

use super::rank_memory::RankMemory;
use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use potluck_core::{Rank, Setting, Wording};
use potluck_graph::{Plan, ShardError};
use potluck_kernels::device::Selection;
use potluck_kernels::exec::Moments;
use potluck_parallel::comm::ring_pool_bytes_max;
use potluck_parallel::planner::arrangement::Arrangement;
use potluck_parallel::planner::laid_out::{LaidOut, programs_of_replicas};
use potluck_parallel::{PipelinePrograms, Program, contiguous_shares};

/// Writes the programs of an arrangement, and lays out their buckets.
///
/// # Errors
/// Returns `RuntimeError::Unplaceable` if the model cannot be divided over the tensor groups.
pub fn lay_out(
    request: &PlacementRequest,
    arrangement: &Arrangement,
) -> Result<LaidOut, RuntimeError> {
    LaidOut::of(request.parallel, request.plans, arrangement).map_err(|error| cannot_divide(&error))
}

/// Returns the programs of all ranks with each of the later shares that a request gives.
pub(crate) fn later_programs(
    request: &PlacementRequest,
    arrangement: &Arrangement,
    plan: &Plan,
) -> Vec<Program> {
    let mut programs = Vec::new();
    if arrangement.mesh.is_divided() {
        return programs;
    }
    let mut micro_batches = Vec::new();
    for (share, rows) in arrangement.shares.iter().zip(&arrangement.rows) {
        micro_batches.push(share.micro_batch.min(*rows));
    }
    for change in &request.parallel.share_changes {
        let shares = contiguous_shares(&change.shares, &micro_batches);
        programs.extend(programs_of_replicas(request.parallel, plan, &shares));
    }
    programs
}

/// Returns the moments of a rank: for its shards, or for all parameters on a single rank.
pub fn moments_of_rank(laid_out: &LaidOut, request: &PlacementRequest, rank: usize) -> Moments {
    let owned = (laid_out.written.plans.len() > 1).then(|| laid_out.owned(Rank(rank as u32)));
    Moments { count: request.optimizer.moments(), owned }
}

/// Returns the memory of each rank on the devices, given by rank.
pub fn memory_of_ranks<'s>(
    laid_out: &LaidOut,
    request: &PlacementRequest,
    devices: impl IntoIterator<Item = &'s Selection>,
) -> Vec<RankMemory> {
    let PipelinePrograms { plans, edges, groups, .. } = &laid_out.written;
    let is_over_nodes = !request.nodes.nodes.is_empty();
    let mut ranks = Vec::with_capacity(plans.len());
    for (rank, selection) in devices.into_iter().enumerate() {
        let id = Rank(rank as u32);
        let moments = moments_of_rank(laid_out, request, rank);
        ranks.push(RankMemory {
            pool: ring_pool_bytes_max(&laid_out.layout, groups.positions(id), is_over_nodes),
            edges: edges.bytes_from(id),
            ..RankMemory::of(selection, &plans[rank], &moments, plans.len())
        });
    }
    ranks
}

pub(crate) fn cannot_divide(error: &ShardError) -> RuntimeError {
    let advice = match error {
        ShardError::NoRule => Wording::new(format_args!("leave {} at 1", Setting::TensorRanks)),
        _ => Wording::new(format_args!("change {}", Setting::TensorRanks)),
    };
    RuntimeError::unplaceable(format_args!("{error}; {advice}"))
}
