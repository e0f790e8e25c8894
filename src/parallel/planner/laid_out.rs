//! Programs and plans of an arrangement, and the layout of its buckets.

use std::ops::Range;
use std::sync::Arc;

use super::arrangement::Arrangement;
use super::plans::{GroupPlans, Plans};
use crate::collective::{BucketGroups, LaidOutBucket, ShardLayout, Topology};
use crate::{
    EdgeLayout, ParallelOptions, PipelinePrograms, PipelineRequest, Program, Share, data_parallel,
    single_rank,
};
use potluck_core::{BucketId, DType, Position, Rank};
use potluck_graph::memory_layout::ALIGNMENT_BYTES;
use potluck_graph::{Bucket, Plan, ShardError};

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
    /// Returns `ShardError` if the model cannot be divided over the tensor groups.
    pub fn of(
        options: &ParallelOptions,
        plans: &Plans,
        arrangement: &Arrangement,
    ) -> Result<Self, ShardError> {
        if arrangement.mesh.is_divided() {
            Self::of_parts(options, plans, arrangement)
        } else {
            Self::of_replicas(options, plans, arrangement)
        }
    }

    /// Returns the plan of the first rank of a tensor group, which has the buckets of all ranks.
    pub fn whole(&self) -> &Arc<Plan> {
        &self.group.plans[0]
    }

    /// Returns the elements of each bucket that a rank updates.
    pub fn owned(&self, rank: Rank) -> Vec<Range<usize>> {
        owned(&self.written.plans[rank.index()], &self.layout, &self.written.groups, rank)
    }

    fn of_parts(
        options: &ParallelOptions,
        plans: &Plans,
        arrangement: &Arrangement,
    ) -> Result<Self, ShardError> {
        let group = plans.of_group(&arrangement.tensor_shares, arrangement.rows_max())?;
        let written = PipelinePrograms::training(&PipelineRequest {
            plans: &group.plans,
            pipelines: &arrangement.pipelines,
            shares: &arrangement.shares,
            schedule: arrangement.schedule,
            overlap: options.overlap,
            piece_max: options.chunk_bytes / DType::F32.bytes(),
            in_flight_min: forward_micro_batches_max(arrangement.mesh.pipeline),
        });
        let pipelines = arrangement.mesh.data;
        let layout = layout_of_groups(options, &group.plans[0], &written.groups, pipelines);
        Ok(Self { group, written, layout })
    }

    fn of_replicas(
        options: &ParallelOptions,
        plans: &Plans,
        arrangement: &Arrangement,
    ) -> Result<Self, ShardError> {
        let of_ranks: Vec<Arc<Plan>> =
            arrangement.rows.iter().map(|rows| plans.of_rows(*rows)).collect();
        let group = plans.of_group(&[], arrangement.rows[0])?;
        let whole = &group.plans[0];
        let layout = layout_of(options, whole, arrangement.mesh.world_size());
        let written = PipelinePrograms {
            programs: programs_of_replicas(options, whole, &arrangement.shares),
            plans: of_ranks,
            edges: EdgeLayout::default(),
            groups: BucketGroups::all(layout.size, layout.buckets()),
        };
        Ok(Self { group, written, layout })
    }
}

/// Returns the maximum number of micro-batches that a pipeline runs in one forward pass. It keeps
/// stages busy most of the time, and bounds the memory of tensors in transit.
pub fn forward_micro_batches_max(stages: usize) -> usize {
    4 * stages
}

/// Returns the programs of ranks with the whole model.
pub fn programs_of_replicas(
    options: &ParallelOptions,
    plan: &Plan,
    shares: &[Share],
) -> Vec<Program> {
    if let [one] = shares {
        return vec![single_rank(plan, one.count, one.micro_batch)];
    }
    shares.iter().map(|share| data_parallel(plan, *share, options.overlap)).collect()
}

/// Returns the shard layout of a plan's buckets for `world` ranks that hold all of them.
pub fn layout_of(options: &ParallelOptions, plan: &Plan, world: usize) -> ShardLayout {
    layout(plan, options.topology, world, options.chunk_bytes)
}

/// Returns the shard layout of a plan's buckets for `world` ranks, in messages of at most
/// `chunk_bytes`; nothing of a frozen bucket is in a shard.
pub fn layout(plan: &Plan, topology: Topology, world: usize, chunk_bytes: usize) -> ShardLayout {
    let lengths: Vec<usize> = plan.buckets.iter().map(Bucket::gradient_length).collect();
    let align = ALIGNMENT_BYTES / DType::F32.bytes();
    let chunk_max = chunk_bytes / DType::F32.bytes();
    ShardLayout::new(topology, world as u32, &lengths, align, chunk_max)
}

/// Returns the layout of buckets that each have their own group of ranks, for `pipelines`
/// pipelines. A bucket on several stages of a single pipeline is summed by the first of them, which
/// owns all of it; the others send their part when it is complete, without waiting.
pub fn layout_of_groups(
    options: &ParallelOptions,
    plan: &Plan,
    groups: &BucketGroups,
    pipelines: usize,
) -> ShardLayout {
    let mut buckets = Vec::new();
    for (index, bucket) in plan.buckets.iter().enumerate() {
        let size = groups.of(BucketId(index as u32)).size();
        let is_star = pipelines == 1 && size > 1;
        let topology = if is_star { Topology::Star } else { options.topology };
        buckets.push(LaidOutBucket { length: bucket.gradient_length(), size, topology });
    }
    let align = ALIGNMENT_BYTES / DType::F32.bytes();
    let chunk_max = options.chunk_bytes / DType::F32.bytes();
    ShardLayout::of_buckets(options.topology, groups.world(), &buckets, align, chunk_max)
}

/// Returns the elements of each bucket that a rank updates, by the group of each bucket.
pub fn owned(
    plan: &Plan,
    layout: &ShardLayout,
    groups: &BucketGroups,
    rank: Rank,
) -> Vec<Range<usize>> {
    let positions = groups.positions(rank);
    let mut owned = Vec::new();
    for bucket in (0..layout.buckets() as u32).map(BucketId) {
        owned.push(match positions.of(bucket) {
            Some(position) if plan.holds(bucket) => {
                if layout.size_of(bucket) == 1 {
                    0..layout.length(bucket)
                } else {
                    layout.shard(bucket, position)
                }
            }
            _ => 0..0,
        });
    }
    owned
}

/// Returns a rank's shard of each bucket, if all ranks hold all buckets, in the order of ranks.
pub fn shards(layout: &ShardLayout, rank: usize) -> Vec<Range<usize>> {
    let position = Position(rank as u32);
    (0..layout.buckets()).map(|bucket| layout.shard(BucketId(bucket as u32), position)).collect()
}
