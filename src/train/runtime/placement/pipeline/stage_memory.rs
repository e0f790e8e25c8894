//! Memory of a device as a stage of a pipeline, before there is an arrangement.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::runtime::memory;
use crate::runtime::placement::rank_memory::RankMemory;
use crate::runtime::placement::requested_pipelines::RequestedPipelines;
use crate::runtime::placement::shares::owned_elements;
use crate::runtime::placement::types::PlacementRequest;
use potluck_core::{BucketId, DType, Position};
use potluck_graph::memory_layout::ALIGNMENT_BYTES;
use potluck_graph::print::MemoryUsage;
use potluck_graph::{Plan, PlanPart};
use potluck_kernels::device::Selection;
use potluck_kernels::exec::Moments;
use potluck_parallel::collective::{LaidOutBucket, ShardLayout};
use potluck_parallel::pipeline::stage_runs;
use potluck_parallel::planner::cut::CutStage;
use potluck_parallel::schedule::in_flight;
use potluck_parallel::{PipelineSchedule, PipelineShape};

/// Kind of a device, its stage, and the blocks of its model chunks.
type StageOfKind = (usize, usize, Vec<Range<u32>>);

/// Memory of devices as stages, computed on demand and cached.
pub(crate) struct StageMemory<'a> {
    request: &'a PlacementRequest<'a>,
    devices: &'a [Selection],
    /// By device: the first one of the same kind.
    kinds: &'a [usize],
    /// Number of ranks.
    world: usize,
    /// Plan of the whole graph, for the maximum rows of a micro-batch.
    whole: Arc<Plan>,
    schedule: PipelineSchedule,
    shape: PipelineShape,
    /// By bucket: the blocks that use it, ascending, and a rank's owned elements.
    buckets: Vec<(Vec<u32>, Owned)>,
    /// By block: its own memory for one micro-batch.
    alone: OnceCell<Vec<BlockBytes>>,
    /// By kind of device: its memory for the whole model besides tensors.
    beside: RefCell<HashMap<usize, usize>>,
    known: RefCell<HashMap<StageOfKind, u64>>,
}

/// Elements of a bucket for which a rank has moments.
enum Owned {
    /// All, on the stage that has the bucket's first block.
    OfFirst,
    /// Maximum numbers on each stage with the bucket: `of_all` on a stage with all blocks that use
    /// it, and `of_some` on one of several, for which more ranks divide it.
    Shard { of_all: usize, of_some: usize },
}

/// Bytes of a block's own tensors for one micro-batch, besides its parameters.
struct BlockBytes {
    stash: usize,
    scratch: usize,
}

impl<'a> StageMemory<'a> {
    /// Returns the memory of devices as the stages of pipelines that each run `micro_batches`
    /// micro-batches of up to `rows` samples. `kinds` has the first device of the kind of each.
    pub fn of(
        request: &'a PlacementRequest<'a>,
        devices: &'a [Selection],
        kinds: &'a [usize],
        micro_batches: usize,
        rows: u32,
    ) -> Self {
        let requested = RequestedPipelines::of(request);
        let pipelines = requested.mesh(devices.len()).data;
        let RequestedPipelines { stages, chunks, schedule, .. } = requested;
        // Rounded up to a number that the schedule can run; a later check refuses other ones.
        let micro_batches = match schedule {
            PipelineSchedule::Interleaved => micro_batches.next_multiple_of(stages),
            _ => micro_batches,
        };
        let whole = request.plans.of_rows(rows);
        let mut buckets = Vec::new();
        for bucket in (0..whole.buckets.len() as u32).map(BucketId) {
            let users = whole.blocks_with(bucket);
            let owned = if pipelines == 1 {
                Owned::OfFirst
            } else {
                shards(request, &whole, bucket, &users, pipelines)
            };
            buckets.push((users, owned));
        }
        Self {
            request,
            devices,
            kinds,
            world: pipelines * stages,
            whole,
            schedule,
            shape: PipelineShape { stages, chunks, micro_batches },
            buckets,
            alone: OnceCell::new(),
            beside: RefCell::default(),
            known: RefCell::default(),
        }
    }

    /// Returns true if a device has memory for its model chunks, or no known limit. Unless
    /// `is_exact`, a fast upper bound may suffice.
    pub fn fits(&self, stage: CutStage, is_exact: bool) -> bool {
        let setting = self.request.opening.device_memory_mib;
        let selection = &self.devices[stage.device];
        let Some((has, _)) = memory::limit(selection, setting) else { return true };
        let (least, most) = self.bounds(stage);
        least <= has && ((!is_exact && most <= has) || self.needed(stage) <= has)
    }

    /// Returns the bytes of a device's memory for its model chunks: as in the [`RankMemory`] with
    /// which it is opened, or more if its shards turn out to be shorter than assumed.
    pub fn needed(&self, stage: CutStage) -> u64 {
        let CutStage { device, stage, blocks } = stage;
        let subject = (self.kinds[device], stage, blocks.to_vec());
        if let Some(known) = self.known.borrow().get(&subject) {
            return *known;
        }
        let runs = stage_runs(&self.whole, blocks, self.schedule, self.shape, stage);
        let plan = self.part(blocks, &runs);
        let (_, moments) = self.held(blocks);
        let rank = RankMemory::of(&self.devices[device], &plan, &moments, self.world);
        let bytes = rank.device as u64;
        self.known.borrow_mut().insert(subject, bytes);
        bytes
    }

    /// Returns a lower and an upper bound of a device's bytes. The lower one has parameters,
    /// gradients, moments and averages; the upper one also all tensors of all blocks in separate
    /// memory, with a copy of kept tensors for each micro-batch in flight.
    pub fn bounds(&self, stage: CutStage) -> (u64, u64) {
        let CutStage { device, stage, blocks } = stage;
        let (held, moments) = self.held(blocks);
        let owned = owned_elements(&moments);
        let of_moments = self.whole.options.moments.bytes(owned) * moments.count;
        let of_averages = self.whole.options.average_bytes(owned);
        let least = held * DType::F32.bytes() + of_moments + of_averages;
        let copies = in_flight(self.schedule, self.shape, stage);
        let alone = self.alone.get_or_init(|| self.blocks_alone());
        let mut most = least;
        for run in blocks {
            for of in &alone[run.start as usize..run.end as usize] {
                let bytes = of.stash.saturating_mul(copies).saturating_add(of.scratch);
                most = most.saturating_add(bytes);
            }
        }
        let mut beside = self.beside_tensors(device, &moments);
        if let Selection::Cpu { .. } = self.devices[device] {
            beside = beside.saturating_mul(copies);
        }
        (least as u64, most.saturating_add(beside) as u64)
    }

    /// Bytes of a device besides tensors, for the whole model: an upper bound for a stage.
    fn beside_tensors(&self, device: usize, moments: &Moments) -> usize {
        let selection = &self.devices[device];
        let mut known = self.beside.borrow_mut();
        *known
            .entry(self.kinds[device])
            .or_insert_with(|| memory::beside_tensors(selection, &self.whole, moments))
    }

    /// Elements of a stage's parameters and gradients, and its moments.
    fn held(&self, blocks: &[Range<u32>]) -> (usize, Moments) {
        let has = |block: &u32| blocks.iter().any(|run| run.contains(block));
        let is_trained = self.whole.graph.is_trained();
        let mut held = 0;
        let mut owned = Vec::new();
        for ((users, of_bucket), bucket) in self.buckets.iter().zip(&self.whole.buckets) {
            if !users.iter().any(has) {
                owned.push(0..0);
                continue;
            }
            held += bucket.length + if is_trained { bucket.gradient_length() } else { 0 };
            owned.push(match of_bucket {
                Owned::OfFirst if users.first().is_some_and(has) => 0..bucket.gradient_length(),
                Owned::OfFirst => 0..0,
                Owned::Shard { of_all, .. } if users.iter().all(has) => 0..*of_all,
                Owned::Shard { of_some, .. } => 0..*of_some,
            });
        }
        (held, Moments { count: self.request.optimizer.moments(), owned: Some(owned) })
    }

    fn blocks_alone(&self) -> Vec<BlockBytes> {
        let mut alone = Vec::new();
        for block in 0..self.whole.graph.blocks.len() as u32 {
            let run = block..block + 1;
            let usage = MemoryUsage::of(&self.part(std::slice::from_ref(&run), &[]), 0);
            alone.push(BlockBytes { stash: usage.stash, scratch: usage.scratch });
        }
        alone
    }

    fn part(&self, blocks: &[Range<u32>], runs: &[(potluck_core::SegmentId, usize)]) -> Plan {
        let count = self.whole.graph.blocks.len() as u32;
        let mut held = Vec::new();
        for block in 0..count {
            held.push(blocks.iter().any(|run| run.contains(&block)));
        }
        let part = PlanPart { blocks: &held, runs };
        Plan::part(self.whole.graph.clone(), self.whole.options, &part)
    }
}

/// Returns the longest possible shards of a bucket that these blocks use. Only one stage of one
/// pipeline is known: for other pipelines the minimum number of stages with the bucket is assumed.
fn shards(
    request: &PlacementRequest,
    whole: &Plan,
    bucket: BucketId,
    users: &[u32],
    pipelines: usize,
) -> Owned {
    // With several stages, none has both the first and the last block.
    let last = whole.graph.blocks.len() as u32 - 1;
    let fewest = if users.contains(&0) && users.contains(&last) { 2 } else { 1 };
    let length = whole.buckets[bucket.index()].gradient_length();
    let topology = request.parallel.topology;
    let chunk_max = request.parallel.chunk_bytes / DType::F32.bytes();
    let longest = |of_own: usize| {
        let size = (of_own + (pipelines - 1) * fewest) as u32;
        let laid_out = [LaidOutBucket { length, size, topology }];
        let align = ALIGNMENT_BYTES / DType::F32.bytes();
        let layout = ShardLayout::of_buckets(topology, size, &laid_out, align, chunk_max);
        let mut longest = 0;
        for position in 0..size {
            longest = longest.max(layout.shard(BucketId(0), Position(position)).len());
        }
        longest
    };
    Owned::Shard { of_all: longest(1), of_some: longest(2) }
}
