//! Programs and plans of an arrangement, and the layout of its buckets.

use std::sync::Arc;

use super::arrangement::Arrangement;
use super::plans::GroupPlans;
use super::rank_memory::RankMemory;
use super::shares::{layout_of, owned};
use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::pipelines::forward_micro_batches_max;
use potluck_core::{BucketId, DType, Rank, Setting, Wording};
use potluck_graph::memory_layout::ALIGNMENT_BYTES;
use potluck_graph::{Plan, ShardError};
use potluck_kernels::device::Selection;
use potluck_kernels::exec::Moments;
use potluck_parallel::collective::{BucketGroups, LaidOutBucket, ShardLayout, Topology};
use potluck_parallel::comm::ring_pool_bytes_max;
use potluck_parallel::{
    EdgeLayout, ParallelOptions, PipelinePrograms, PipelineRequest, Program, Share, data_parallel,
    single_rank,
};

/// Programs of an arrangement, with the layout of their buckets.
pub struct LaidOut {
    /// Plans of the whole graph's shard on each rank of a tensor group.
    pub group: GroupPlans,
    pub written: PipelinePrograms,
    pub layout: ShardLayout,
}

impl LaidOut {
    /// Writes the programs of an arrangement, and lays out their buckets.
    ///
    /// # Errors
    /// Returns `RuntimeError::Unplaceable` if the model cannot be divided over the tensor groups.
    pub fn of(request: &PlacementRequest, arrangement: &Arrangement) -> Result<Self, RuntimeError> {
        if arrangement.mesh.is_divided() {
            Self::of_parts(request, arrangement)
        } else {
            Self::of_replicas(request, arrangement)
        }
    }

    /// Returns the plan of the first rank of a tensor group, which has the buckets of all ranks.
    pub fn whole(&self) -> &Arc<Plan> {
        &self.group.plans[0]
    }

    fn of_parts(
        request: &PlacementRequest,
        arrangement: &Arrangement,
    ) -> Result<Self, RuntimeError> {
        let Arrangement { tensor_shares, .. } = arrangement;
        let group = request.plans.of_group(tensor_shares, arrangement.rows_max());
        let group = group.map_err(|error| cannot_divide(&error))?;
        let written = PipelinePrograms::training(&PipelineRequest {
            plans: &group.plans,
            pipelines: &arrangement.pipelines,
            shares: &arrangement.shares,
            schedule: arrangement.schedule,
            overlap: request.parallel.overlap,
            piece_max: request.parallel.chunk_bytes / DType::F32.bytes(),
            in_flight_min: forward_micro_batches_max(arrangement.mesh.pipeline),
        });
        let pipelines = arrangement.mesh.data;
        let whole = &group.plans[0];
        let layout = layout_of_groups(request.parallel, whole, &written.groups, pipelines);
        Ok(Self { group, written, layout })
    }

    fn of_replicas(
        request: &PlacementRequest,
        arrangement: &Arrangement,
    ) -> Result<Self, RuntimeError> {
        let plans: Vec<Arc<Plan>> =
            arrangement.rows.iter().map(|rows| request.plans.of_rows(*rows)).collect();
        let group = request.plans.of_group(&[], arrangement.rows[0]);
        let group = group.map_err(|error| cannot_divide(&error))?;
        let whole = &group.plans[0];
        let layout = layout_of(request.parallel, whole, arrangement.mesh.world_size());
        let written = PipelinePrograms {
            programs: programs_of_replicas(request.parallel, whole, &arrangement.shares),
            plans,
            edges: EdgeLayout::default(),
            groups: BucketGroups::all(layout.size, layout.buckets()),
        };
        Ok(Self { group, written, layout })
    }

    /// Moments of a rank: for its shards, or for all parameters on a single rank.
    pub fn moments(&self, request: &PlacementRequest, rank: usize) -> Moments {
        let PipelinePrograms { plans, groups, .. } = &self.written;
        let mut shards = None;
        if plans.len() > 1 {
            shards = Some(owned(&plans[rank], &self.layout, groups, Rank(rank as u32)));
        }
        Moments { count: request.optimizer.moments(), owned: shards }
    }

    /// Returns the memory of each rank on the devices, given by rank.
    pub fn memory<'s>(
        &self,
        request: &PlacementRequest,
        devices: impl IntoIterator<Item = &'s Selection>,
    ) -> Vec<RankMemory> {
        let PipelinePrograms { plans, edges, groups, .. } = &self.written;
        let is_over_nodes = !request.nodes.nodes.is_empty();
        let mut ranks = Vec::with_capacity(plans.len());
        for (rank, selection) in devices.into_iter().enumerate() {
            let id = Rank(rank as u32);
            let moments = self.moments(request, rank);
            ranks.push(RankMemory {
                pool: ring_pool_bytes_max(&self.layout, groups.positions(id), is_over_nodes),
                edges: edges.bytes_from(id),
                ..RankMemory::of(selection, &plans[rank], &moments, plans.len())
            });
        }
        ranks
    }
}

pub(crate) fn cannot_divide(error: &ShardError) -> RuntimeError {
    let advice = match error {
        ShardError::NoRule => Wording::new(format_args!("leave {} at 1", Setting::TensorRanks)),
        _ => Wording::new(format_args!("change {}", Setting::TensorRanks)),
    };
    RuntimeError::unplaceable(format_args!("{error}; {advice}"))
}

/// Programs of ranks with the whole model.
pub(crate) fn programs_of_replicas(
    parallel: &ParallelOptions,
    plan: &Plan,
    shares: &[Share],
) -> Vec<Program> {
    if let [one] = shares {
        return vec![single_rank(plan, one.count, one.micro_batch)];
    }
    shares.iter().map(|share| data_parallel(plan, *share, parallel.overlap)).collect()
}

/// Returns the layout of buckets that each have their own group of ranks, for `pipelines`
/// pipelines. A bucket on several stages of a single pipeline is summed by the first of them, which
/// owns all of it; the others send their part when it is complete, without waiting.
pub(crate) fn layout_of_groups(
    parallel: &ParallelOptions,
    plan: &Plan,
    groups: &BucketGroups,
    pipelines: usize,
) -> ShardLayout {
    let mut buckets = Vec::new();
    for (index, bucket) in plan.buckets.iter().enumerate() {
        let size = groups.of(BucketId(index as u32)).size();
        let is_star = pipelines == 1 && size > 1;
        let topology = if is_star { Topology::Star } else { parallel.topology };
        buckets.push(LaidOutBucket { length: bucket.gradient_length(), size, topology });
    }
    let align = ALIGNMENT_BYTES / DType::F32.bytes();
    let chunk_max = parallel.chunk_bytes / DType::F32.bytes();
    ShardLayout::of_buckets(parallel.topology, groups.world(), &buckets, align, chunk_max)
}
