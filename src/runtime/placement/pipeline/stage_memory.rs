//! Memory that a device needs as a stage of a pipeline, before there are programs.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::RequestedPipelines;
use crate::base::shape::ELEMENT_BYTES;
use crate::base::{BucketId, Position};
use crate::collective::{LaidOutBucket, ShardLayout};
use crate::device::Selection;
use crate::exec::cpu::host_extra_bytes;
use crate::exec::gpu::workspace_bytes;
use crate::graph::plan::ALIGNMENT_BYTES;
use crate::graph::print::MemoryUsage;
use crate::graph::{Plan, PlanPart};
use crate::kernels::Caps;
use crate::parallel::pipeline::stage_runs;
use crate::parallel::schedule::in_flight;
use crate::parallel::{PipelineSchedule, PipelineShape};
use crate::runtime::memory;
use crate::runtime::placement::types::PlacementRequest;

/// Stage, and the blocks of its model chunks.
type StageChunks = (usize, Vec<Range<u32>>);

/// Memory of stages: of each, known once it was computed.
pub struct StageMemory<'a> {
    request: &'a PlacementRequest<'a>,
    /// Plan of the whole graph, for the most rows of a micro-batch.
    whole: Arc<Plan>,
    schedule: PipelineSchedule,
    shape: PipelineShape,
    /// By bucket: the blocks that use it, ascending, and the elements that a rank owns of it.
    buckets: Vec<(Vec<u32>, Owned)>,
    /// By block: what it needs alone for one micro-batch.
    alone: OnceCell<Vec<BlockBytes>>,
    workspace: OnceCell<usize>,
    known: RefCell<HashMap<StageChunks, StageBytes>>,
}

/// Elements of a bucket of which a rank keeps moments.
enum Owned {
    /// All, on the stage that has the bucket's first block.
    OfFirst,
    /// At most so many on each stage that holds the bucket: one with all blocks that use it, and
    /// one of several, which share it with more ranks.
    Shard { of_all: usize, of_some: usize },
}

/// Bytes that a block needs alone for one micro-batch, besides its parameters.
struct BlockBytes {
    stash: usize,
    scratch: usize,
}

/// Bytes that a stage needs: `host_extra` of them only on the CPU device, `workspace` at
/// most only on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageBytes {
    pub peak: usize,
    pub host_extra: usize,
    pub workspace: usize,
}

impl StageBytes {
    /// Returns the bytes that the stage needs on a device.
    pub fn on(self, selection: &Selection) -> u64 {
        let extra = match selection {
            Selection::Cpu { .. } => self.host_extra,
            Selection::Adapter(adapter) if Caps::of_adapter(adapter).suits_hardware() => {
                self.workspace
            }
            Selection::Adapter(_) | Selection::Offered(_) => 0,
        };
        self.peak.saturating_add(extra) as u64
    }
}

impl<'a> StageMemory<'a> {
    /// Returns the memory of the stages of `pipelines` pipelines that each run `micro_batches`
    /// micro-batches of up to `rows` samples.
    pub fn of(
        request: &'a PlacementRequest<'a>,
        requested: &RequestedPipelines,
        pipelines: usize,
        micro_batches: usize,
        rows: u32,
    ) -> Self {
        let RequestedPipelines { stages, chunks, schedule, .. } = *requested;
        // The next number that the schedule can run: whether it can run this one is said later.
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
            whole,
            schedule,
            shape: PipelineShape { stages, chunks, micro_batches },
            buckets,
            alone: OnceCell::new(),
            workspace: OnceCell::new(),
            known: RefCell::default(),
        }
    }

    /// Returns true if a device has memory for these model chunks as that stage, or no limit is
    /// known. Unless `is_exact`, a quick bound of what they need at most may decide.
    pub fn fits(
        &self,
        selection: &Selection,
        stage: usize,
        blocks: &[Range<u32>],
        is_exact: bool,
    ) -> bool {
        let setting = self.request.opening.device_memory_mib;
        let Some((has, _)) = memory::limit(selection, setting) else { return true };
        let (fixed, most) = self.bounds(stage, blocks);
        if fixed as u64 > has {
            return false;
        }
        (!is_exact && most.on(selection) <= has) || self.needed(stage, blocks).on(selection) <= has
    }

    /// Returns the bytes that a stage with these model chunks needs.
    pub fn needed(&self, stage: usize, blocks: &[Range<u32>]) -> StageBytes {
        let subject = (stage, blocks.to_vec());
        if let Some(known) = self.known.borrow().get(&subject) {
            return *known;
        }
        let runs = stage_runs(&self.whole, blocks, self.schedule, self.shape, stage);
        let plan = self.part(blocks, &runs);
        let (_, owned) = self.elements(blocks);
        let moments = self.request.optimizer.moments();
        let bytes = StageBytes {
            peak: MemoryUsage::of_shard(&plan, moments, owned).peak(),
            host_extra: host_extra_bytes(&plan),
            workspace: self.workspace_bytes(),
        };
        self.known.borrow_mut().insert(subject, bytes);
        bytes
    }

    /// Returns the bytes of parameters, gradients and moments, which a stage needs at least, and a
    /// bound of what it needs at most: all tensors of all blocks in memory of their own, and as
    /// many copies of what is kept as there are micro-batches in flight.
    pub fn bounds(&self, stage: usize, blocks: &[Range<u32>]) -> (usize, StageBytes) {
        let (held, owned) = self.elements(blocks);
        let banks = if self.whole.graph.is_trained() { 2 } else { 1 };
        let elements = held * banks + owned * self.request.optimizer.moments();
        let fixed = elements * ELEMENT_BYTES;
        let copies = in_flight(self.schedule, self.shape, stage);
        let alone = self.alone.get_or_init(|| self.blocks_alone());
        let mut peak = fixed;
        for run in blocks {
            for of in &alone[run.start as usize..run.end as usize] {
                let bytes = of.stash.saturating_mul(copies).saturating_add(of.scratch);
                peak = peak.saturating_add(bytes);
            }
        }
        let host_extra = host_extra_bytes(&self.whole).saturating_mul(copies);
        (fixed, StageBytes { peak, host_extra, workspace: self.workspace_bytes() })
    }

    /// Returns the workspace of the whole model's kernels in bytes, which bounds a stage's.
    fn workspace_bytes(&self) -> usize {
        *self.workspace.get_or_init(|| workspace_bytes(&self.whole, &Caps::EVERY))
    }

    /// Returns the elements of the buckets that a stage holds, and of those it keeps moments of.
    fn elements(&self, blocks: &[Range<u32>]) -> (usize, usize) {
        let has = |block: &u32| blocks.iter().any(|run| run.contains(block));
        let mut held = 0;
        let mut owned = 0;
        for ((users, of_bucket), bucket) in self.buckets.iter().zip(&self.whole.buckets) {
            if !users.iter().any(has) {
                continue;
            }
            held += bucket.length;
            owned += match of_bucket {
                Owned::OfFirst if users.first().is_some_and(has) => bucket.length,
                Owned::OfFirst => 0,
                Owned::Shard { of_all, .. } if users.iter().all(has) => *of_all,
                Owned::Shard { of_some, .. } => *of_some,
            };
        }
        (held, owned)
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

    fn part(&self, blocks: &[Range<u32>], runs: &[(crate::base::SegmentId, usize)]) -> Plan {
        let count = self.whole.graph.blocks.len() as u32;
        let mut held = Vec::new();
        for block in 0..count {
            held.push(blocks.iter().any(|run| run.contains(&block)));
        }
        let part = PlanPart { blocks: &held, runs };
        Plan::part(self.whole.graph.clone(), self.whole.options, &part)
    }
}

/// Returns the longest shards of a bucket that these blocks use, beside other pipelines. Only one
/// stage of one pipeline is known: the others may hold the bucket on as few stages as any cut does.
fn shards(
    request: &PlacementRequest,
    whole: &Plan,
    bucket: BucketId,
    users: &[u32],
    pipelines: usize,
) -> Owned {
    // No stage of several has the first and the last block.
    let last = whole.graph.blocks.len() as u32 - 1;
    let fewest = if users.contains(&0) && users.contains(&last) { 2 } else { 1 };
    let length = whole.buckets[bucket.index()].length;
    let topology = request.parallel.topology;
    let chunk_max = request.parallel.chunk_bytes / ELEMENT_BYTES;
    let longest = |of_own: usize| {
        let size = (of_own + (pipelines - 1) * fewest) as u32;
        let laid_out = [LaidOutBucket { length, size, topology }];
        let align = ALIGNMENT_BYTES / ELEMENT_BYTES;
        let layout = ShardLayout::of_buckets(topology, size, &laid_out, align, chunk_max);
        let mut longest = 0;
        for position in 0..size {
            longest = longest.max(layout.shard(BucketId(0), Position(position)).len());
        }
        longest
    };
    Owned::Shard { of_all: longest(1), of_some: longest(2) }
}
