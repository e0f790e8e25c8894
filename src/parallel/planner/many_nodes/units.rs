//! Units of devices that hold one model together, and their speeds.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use super::ManyNodesRequest;
use crate::planner::balance::ThroughputModel;
use crate::planner::cut::{BlockTimes, Cut, CutRequest, CutStage, crossing_elements, cut};
use crate::planner::price::segment_costs;
use crate::planner::profile::{BlockSpeed, DeviceProfile, PlanProfile};
use crate::planner::proposal::MemoryNeed;
use crate::sim::LinkModel;
use crate::{ParallelOptions, PipelineSchedule};
use potluck_core::format::gibibytes_up;
use potluck_core::{BucketId, DType, SegmentId};
use potluck_graph::Plan;
use potluck_graph::print::MemoryUsage;

/// Most devices of a node that form a unit together.
pub(super) const UNIT_MAX: usize = 8;

/// Layout within a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithinNode {
    /// Each device has the whole model.
    Apart,
    /// The fastest device of a node has the whole model; the others have nothing to do.
    Fastest,
    /// Tensor groups of this many devices.
    Tensor(usize),
    /// Pipelines of this many stages.
    Pipeline(usize),
}

impl fmt::Display for WithinNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Apart => write!(f, "data"),
            Self::Fastest => write!(f, "fastest devices"),
            Self::Tensor(ranks) => write!(f, "tensor {ranks}"),
            Self::Pipeline(stages) => {
                write!(f, "pipeline {stages} ({})", PipelineSchedule::OneFOneB)
            }
        }
    }
}

impl WithinNode {
    /// Layouts that nodes with these devices may have: the given one, or else all but those that
    /// are excluded.
    pub(super) fn of_nodes(profile: &PlanProfile, options: &ParallelOptions) -> Vec<Self> {
        let mut layouts = vec![Self::Apart];
        let sizes: BTreeSet<usize> =
            by_node(profile).iter().map(|devices| devices.len().min(UNIT_MAX)).collect();
        if sizes.iter().any(|size| *size > 1) {
            layouts.push(Self::Fastest);
        }
        for size in 2..=UNIT_MAX {
            // All devices of some node, or a power of two of them.
            let is_given = size == options.devices_per_pipeline();
            let is_worthwhile = is_given || size.is_power_of_two() || sizes.contains(&size);
            if is_worthwhile && sizes.iter().any(|most| *most >= size) {
                layouts.extend([Self::Tensor(size), Self::Pipeline(size)]);
            }
        }
        layouts.retain(|layout| layout.is_asked(options));
        layouts
    }

    /// Returns true for the given layout, or for one that is not excluded if none is given.
    fn is_asked(self, options: &ParallelOptions) -> bool {
        let given = [options.stages(), options.tensor.ranks as usize];
        match self {
            Self::Apart | Self::Fastest => !options.is_divided(),
            Self::Pipeline(stages) if options.is_divided() => given == [stages, 1],
            Self::Tensor(ranks) if options.is_divided() => given == [1, ranks],
            Self::Pipeline(_) => !options.excluded.pipelines,
            Self::Tensor(_) => !options.excluded.tensor_groups,
        }
    }
}

/// Devices of each node, the fastest first.
pub(super) fn by_node(profile: &PlanProfile) -> Vec<Vec<usize>> {
    let mut nodes = vec![Vec::new(); profile.links.len()];
    for (index, device) in profile.devices.iter().enumerate() {
        nodes[device.node as usize].push(index);
    }
    for devices in &mut nodes {
        devices
            .sort_by(|a, b| profile.whole_model_s(*a, 1).total_cmp(&profile.whole_model_s(*b, 1)));
    }
    nodes
}

// ---- Model ----

/// Segment of a step, in the order in which devices run them.
struct SegmentStep {
    id: SegmentId,
    /// Places in the order of the buckets that are complete after it.
    completes: Vec<usize>,
}

/// Elements of the buckets that a stage holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StageElements {
    held: usize,
    /// Those that are updated.
    updated: usize,
}

/// Sizes of a model on which a plan depends.
pub(super) struct ModelSizes {
    /// Buckets in the order in which their gradients become complete.
    pub order: Vec<BucketId>,
    /// By place in the order: elements that are exchanged.
    pub lengths: Vec<usize>,
    /// Elements that are exchanged and updated.
    pub elements: usize,
    segments: Vec<SegmentStep>,
    /// By first block and number of blocks less one: elements of a stage.
    stages: Vec<Vec<StageElements>>,
    /// By the sizes of micro-batches: memory of the whole model without moments.
    memory: Vec<MemoryUsage>,
    /// By block: bytes per sample that cross a cut before it, in both directions.
    cut_bytes: Vec<f64>,
    /// Sizes of micro-batches: the requested one, and its halves if they may be smaller.
    rows: Vec<u32>,
    /// Fewest samples of a unit: of a micro-batch with statistics, or else one.
    pub samples_min: u32,
}

impl ModelSizes {
    pub(super) fn of(request: &ManyNodesRequest<'_>) -> Self {
        let plan = request.plans.of_rows(1);
        let samples_min = plan.rows_min().min(request.batch).max(1);
        let mut rows = vec![request.micro_batch.min(request.batch).max(1)];
        while let Some(last) = rows.last().copied().filter(|last| last / 2 >= samples_min)
            && request.fits_micro_batch
        {
            rows.push(last / 2);
        }
        let (forward, backward) = plan.passes();
        let mut order: Vec<BucketId> = Vec::new();
        for segment in &backward {
            order.extend(&plan.segments[segment.index()].completes);
        }
        for bucket in plan.updated_buckets() {
            if !order.contains(&bucket) {
                order.push(bucket);
            }
        }
        let mut segments = Vec::new();
        for id in forward.iter().chain(&backward) {
            let segment = &plan.segments[id.index()];
            let place = |bucket: &BucketId| order.iter().position(|known| known == bucket);
            segments.push(SegmentStep {
                id: *id,
                completes: segment.completes.iter().filter_map(place).collect(),
            });
        }
        let mut lengths = Vec::new();
        for bucket in &order {
            lengths.push(plan.buckets[bucket.index()].gradient_length());
        }
        let elements = lengths.iter().sum();
        let mut memory = Vec::with_capacity(rows.len());
        for rows in &rows {
            let plan = request.plans.of_rows(*rows);
            memory.push(MemoryUsage::of_shard(&plan, request.moments, 0));
        }
        let stages = stage_elements(&plan);
        let mut cut_bytes = Vec::new();
        for elements in crossing_elements(&plan) {
            cut_bytes.push((elements * DType::F32.bytes()) as f64);
        }
        Self { order, lengths, elements, segments, stages, memory, cut_bytes, rows, samples_min }
    }

    /// Bytes of all gradients.
    pub fn bytes(&self) -> f64 {
        (self.elements * DType::F32.bytes()) as f64
    }

    /// By place in the order: fraction of the time of a micro-batch of `rows` samples after which
    /// the gradients of a bucket are complete.
    fn fractions(&self, plan: &Plan, speeds: &[BlockSpeed], rows: u32) -> Vec<f64> {
        let costs = segment_costs(plan, speeds);
        let mut complete = vec![None; self.order.len()];
        let mut at_s = 0.0;
        for segment in &self.segments {
            let cost = costs[segment.id.index()];
            at_s += cost.fixed_s + f64::from(rows) * cost.row_s;
            for place in &segment.completes {
                complete[*place] = Some(at_s);
            }
        }
        complete.into_iter().map(|at| at.map_or(1.0, |at: f64| at / at_s)).collect()
    }
}

fn stage_elements(plan: &Plan) -> Vec<Vec<StageElements>> {
    let blocks = plan.graph.blocks.len();
    let mut of_block = vec![BTreeSet::new(); blocks];
    for (segment, buckets) in plan.segments.iter().zip(plan.buckets_of_segments()) {
        of_block[segment.block as usize].extend(buckets);
    }
    let mut stages = Vec::with_capacity(blocks);
    for first in 0..blocks {
        let mut buckets: BTreeSet<BucketId> = BTreeSet::new();
        let mut of_first = Vec::with_capacity(blocks - first);
        for block in &of_block[first..] {
            buckets.extend(block);
            let mut elements = StageElements { held: 0, updated: 0 };
            for bucket in &buckets {
                let bucket = &plan.buckets[bucket.index()];
                elements.held += bucket.length;
                elements.updated += bucket.gradient_length();
            }
            of_first.push(elements);
        }
        stages.push(of_first);
    }
    stages
}

// ---- Units ----

/// Devices that hold one model together.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DeviceUnit {
    pub node: u32,
    /// Indices in the profile, the fastest first.
    pub devices: Vec<usize>,
    /// Index among the kinds of units.
    pub kind: usize,
}

/// All units of a layout.
#[derive(Clone, Debug)]
pub(super) struct Units {
    pub within: WithinNode,
    pub all: Vec<DeviceUnit>,
    /// By kind: the devices of one unit of it.
    pub kinds: Vec<Vec<usize>>,
    /// Messages of a tensor group per micro-batch.
    reductions: Reductions,
}

/// Reductions within a tensor group.
#[derive(Clone, Copy, Debug, Default)]
struct Reductions {
    count: usize,
    /// Bytes per sample of all of them that a rank sends each other one.
    sent_bytes: f64,
    /// Bytes per sample of all results.
    written_bytes: f64,
}

impl Units {
    /// Groups the devices of all nodes, except those of nodes with too few of them.
    pub(super) fn new(
        request: &ManyNodesRequest<'_>,
        sizes: &ModelSizes,
        within: WithinNode,
    ) -> Result<Self, String> {
        let mut reductions = Reductions::default();
        match within {
            WithinNode::Tensor(ranks) => reductions = reductions_of(request, ranks)?,
            WithinNode::Pipeline(stages) if stages > sizes.cut_bytes.len() => {
                return Err(format!("the model has {} blocks", sizes.cut_bytes.len()));
            }
            _ => {}
        }
        let mut units = Self { within, all: Vec::new(), kinds: Vec::new(), reductions };
        let mut known: HashMap<Vec<usize>, usize> = HashMap::new();
        for (node, devices) in by_node(request.profile).iter().enumerate() {
            for devices in groups(within, devices) {
                let kinds: Vec<usize> =
                    devices.iter().map(|device| request.profile.devices[*device].kind).collect();
                let next = units.kinds.len();
                let kind = *known.entry(kinds).or_insert(next);
                if kind == next {
                    units.kinds.push(devices.clone());
                }
                units.all.push(DeviceUnit { node: node as u32, devices, kind });
            }
        }
        Ok(units)
    }

    /// Speeds by kind, for a run of `world` units; `None` for a kind that lacks memory.
    pub(super) fn speeds(
        &self,
        request: &ManyNodesRequest<'_>,
        sizes: &ModelSizes,
        world: usize,
    ) -> Vec<Option<Rc<UnitSpeed>>> {
        let owned = sizes.elements.div_ceil(world.max(1));
        let share = request.batch.div_ceil(world.max(1) as u32);
        let memory = memory_by_rows(request, sizes, self.within, owned);
        let mut speeds = Vec::with_capacity(self.kinds.len());
        for devices in &self.kinds {
            let unit = UnitRequest { request, sizes, devices, share, world };
            let speed = match self.within {
                WithinNode::Pipeline(_) => unit.of_pipeline(),
                WithinNode::Tensor(_) => unit.of_tensor_group(&memory, self.reductions),
                WithinNode::Apart | WithinNode::Fastest => unit.alone(&memory),
            };
            speeds.push(speed.map(Rc::new));
        }
        speeds
    }
}

/// Units of one node, whose devices are in the order of their speeds.
fn groups(within: WithinNode, devices: &[usize]) -> Vec<Vec<usize>> {
    match within {
        WithinNode::Apart => devices.iter().map(|device| vec![*device]).collect(),
        WithinNode::Fastest => devices.iter().take(1).map(|device| vec![*device]).collect(),
        WithinNode::Tensor(size) | WithinNode::Pipeline(size) => {
            devices.chunks_exact(size).map(<[usize]>::to_vec).collect()
        }
    }
}

fn reductions_of(request: &ManyNodesRequest<'_>, ranks: usize) -> Result<Reductions, String> {
    let group = request.plans.of_group(&vec![1; ranks], 1).map_err(|why| why.to_string())?;
    let graph = &group.plans[0].graph;
    let mut reductions = Reductions::default();
    for node in &graph.nodes {
        let Some(kind) = node.op.reduction() else { continue };
        reductions.count += 1;
        for output in &node.outputs {
            let written = graph.tensor(*output).bytes(1) as f64;
            reductions.written_bytes += written;
            reductions.sent_bytes += written / kind.expansion() as f64;
        }
    }
    Ok(reductions)
}

/// Memory of a rank with `owned` moments, by the sizes of micro-batches; empty for pipelines, whose
/// stages differ.
fn memory_by_rows(
    request: &ManyNodesRequest<'_>,
    sizes: &ModelSizes,
    within: WithinNode,
    owned: usize,
) -> Vec<u64> {
    let mut memory = Vec::new();
    for rows in &sizes.rows {
        match within {
            WithinNode::Pipeline(_) => {}
            WithinNode::Tensor(ranks) => {
                let Ok(group) = request.plans.of_group(&vec![1; ranks], *rows) else { continue };
                let peak = |plan: &Plan| {
                    MemoryUsage::of_shard(plan, request.moments, owned / ranks).peak() as u64
                };
                memory.push(group.plans.iter().map(|plan| peak(plan)).max().unwrap_or(0));
            }
            WithinNode::Apart | WithinNode::Fastest => {
                let plan = request.plans.of_rows(*rows);
                memory.push(MemoryUsage::of_shard(&plan, request.moments, owned).peak() as u64);
            }
        }
    }
    memory
}

/// Names the device with the most memory, and the least that the model needs on one of many.
pub(super) fn least_need(request: &ManyNodesRequest<'_>, sizes: &ModelSizes) -> String {
    let world = request.profile.devices.len();
    let owned = sizes.elements.div_ceil(world.max(1));
    let needed = memory_by_rows(request, sizes, WithinNode::Apart, owned);
    let needed = needed.last().copied().unwrap_or(0);
    let largest = request.profile.devices.iter().max_by_key(|device| device.memory.unwrap_or(0));
    let Some(largest) = largest else { return "there is no device".into() };
    let has = gibibytes_up(largest.memory.unwrap_or(0));
    format!("it needs {}, and {} has {has} for it", gibibytes_up(needed), largest.name)
}

/// Speed of a kind of units in a run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct UnitSpeed {
    pub throughput: ThroughputModel,
    /// Seconds in which a pipeline fills and drains; 0 for others.
    fill_s: f64,
    /// By place in the order of the buckets: fraction of the last micro-batch after which the
    /// gradients are complete.
    fractions: Vec<f64>,
    /// Memory of the fullest device.
    pub memory: MemoryNeed,
    /// Copies of all devices of the unit together.
    pub read_back: LinkModel,
    pub upload: LinkModel,
    pub host: LinkModel,
    pub update_element_s: f64,
}

impl UnitSpeed {
    /// Seconds of the passes of a share.
    pub(super) fn seconds(&self, samples: u32) -> f64 {
        if samples == 0 {
            return 0.0;
        }
        self.throughput.seconds(samples) + self.fill_s
    }

    /// Seconds of each sample of a long share.
    pub(super) fn sample_s(&self) -> f64 {
        let rows = self.throughput.micro_batch.max(1);
        self.throughput.seconds(rows) / f64::from(rows)
    }

    /// By place in the order of the buckets: seconds after which the gradients are complete.
    pub(super) fn complete_s(&self, samples: u32, overlap: bool) -> Vec<f64> {
        let all_s = self.seconds(samples);
        let micro_batches = samples.div_ceil(self.throughput.micro_batch.max(1)).max(1);
        let last_s = self.throughput.seconds(samples / micro_batches);
        let mut complete = Vec::with_capacity(self.fractions.len());
        for fraction in &self.fractions {
            let left = if overlap { 1.0 - fraction } else { 0.0 };
            complete.push(all_s - left * last_s);
        }
        complete
    }
}

/// Unit whose speed is asked for.
struct UnitRequest<'a> {
    request: &'a ManyNodesRequest<'a>,
    sizes: &'a ModelSizes,
    devices: &'a [usize],
    /// Samples of a unit, if all were equally fast.
    share: u32,
    /// Units of the run.
    world: usize,
}

impl UnitRequest<'_> {
    fn device(&self, index: usize) -> &DeviceProfile {
        &self.request.profile.devices[self.devices[index]]
    }

    /// Speed of a device for the whole model, with the loading of samples.
    fn throughput(&self, index: usize, micro_batch: u32) -> ThroughputModel {
        let device = self.device(index);
        let speed = device.throughput(micro_batch);
        ThroughputModel { row_s: speed.row_s + device.load_row_s, ..speed }
    }

    /// Seconds of a sample in the blocks on a device that has this part of their divided elements.
    fn divided_row_s(&self, index: usize, part: f64) -> f64 {
        let mut row_s = 0.0;
        for (block, speed) in self.device(index).blocks.iter().enumerate() {
            row_s += speed.per_row.sum_s() * self.request.profile.part_of_block(block, part);
        }
        row_s
    }

    fn times(&self, index: usize, rows: u32) -> Vec<BlockTimes> {
        self.device(index).blocks.iter().map(|block| block.at(rows)).collect()
    }

    /// The largest micro-batch for which all devices have the memory.
    fn largest(&self, memory: &[u64]) -> Option<(u32, MemoryNeed)> {
        let has = (0..self.devices.len()).filter_map(|index| self.device(index).memory).min();
        for (rows, needed) in self.sizes.rows.iter().zip(memory) {
            let need = MemoryNeed { needed: *needed, has };
            if need.fits() {
                return Some((*rows, need));
            }
        }
        None
    }

    fn alone(&self, memory: &[u64]) -> Option<UnitSpeed> {
        let (rows, memory) = self.largest(memory)?;
        self.speed(self.throughput(0, rows), memory)
    }

    /// A group of equal shares, which is as fast as its slowest device; its reductions go through
    /// the host.
    fn of_tensor_group(&self, memory: &[u64], reductions: Reductions) -> Option<UnitSpeed> {
        let (rows, memory) = self.largest(memory)?;
        let ranks = self.devices.len() as f64;
        let mut fixed_s: f64 = 0.0;
        let mut row_s: f64 = 0.0;
        for index in 0..self.devices.len() {
            let alone = self.throughput(index, rows);
            let DeviceProfile { read_back, upload, host, .. } = self.device(index);
            let latency_s = read_back.latency_s + upload.latency_s;
            let sent_byte_s = 1.0 / read_back.bytes_per_s + (ranks - 1.0) / host.bytes_per_s;
            let transfers_s =
                reductions.sent_bytes * sent_byte_s + reductions.written_bytes / upload.bytes_per_s;
            fixed_s = fixed_s.max(alone.fixed_s + reductions.count as f64 * latency_s);
            let undivided_s = alone.row_s - self.divided_row_s(index, 1.0);
            let own_s = undivided_s + self.divided_row_s(index, 1.0 / ranks);
            row_s = row_s.max(own_s + transfers_s);
        }
        self.speed(ThroughputModel { fixed_s, row_s, micro_batch: rows }, memory)
    }

    /// The pipeline of the size of micro-batches that is done first with an equal share. Of the
    /// sizes above that share, which then has one smaller micro-batch, the least counts.
    fn of_pipeline(&self) -> Option<UnitSpeed> {
        let mut best: Option<UnitSpeed> = None;
        let share = self.share.max(1);
        let sizes = self.sizes.rows.len();
        for (size, rows) in self.sizes.rows.iter().enumerate() {
            if *rows > share && size + 1 < sizes {
                continue;
            }
            let Some(speed) = self.pipeline_of(size, (*rows).min(share)) else { continue };
            let seconds = speed.seconds(self.share);
            if best.as_ref().is_none_or(|best| seconds < best.seconds(self.share)) {
                best = Some(speed);
            }
        }
        best
    }

    /// The pipeline for micro-batches of `rows` samples, with the memory of a size in the list.
    fn pipeline_of(&self, size: usize, rows: u32) -> Option<UnitSpeed> {
        let stages = self.devices.len();
        let mut times = Vec::with_capacity(stages);
        let mut cut_s = Vec::with_capacity(stages);
        for index in 0..stages {
            let DeviceProfile { read_back, upload, .. } = self.device(index);
            let byte_s = (1.0 / read_back.bytes_per_s + 1.0 / upload.bytes_per_s) / 2.0;
            let latency_s = read_back.latency_s + upload.latency_s;
            let bytes = |of_row: &f64| f64::from(rows) * of_row;
            cut_s.push(
                self.sizes.cut_bytes.iter().map(|of| bytes(of) * byte_s + latency_s).collect(),
            );
            times.push(self.times(index, rows));
        }
        let need = |stage: &CutStage<'_>| self.stage_need(size, stage);
        let request = CutRequest {
            times: &times,
            cut_s: &cut_s,
            chunks: 1,
            stages,
            is_ordered: true,
            fits: &|stage| need(&stage).fits(),
        };
        let Cut { blocks, slowest_s, .. } = cut(&request).ok()?;
        let mut sum_s = 0.0;
        let mut fullest: Option<MemoryNeed> = None;
        for (stage, blocks) in blocks.iter().enumerate() {
            for block in blocks.iter().cloned().flatten() {
                sum_s += times[stage][block as usize].sum_s();
            }
            let of_stage = need(&CutStage { device: stage, stage, blocks });
            if fullest.is_none_or(|fullest| of_stage.left() < fullest.left()) {
                fullest = Some(of_stage);
            }
        }
        let row_s = slowest_s / f64::from(rows);
        let throughput = ThroughputModel { fixed_s: 0.0, row_s, micro_batch: rows };
        let speed = self.speed(throughput, fullest?)?;
        Some(UnitSpeed { fill_s: (sum_s - slowest_s).max(0.0), ..speed })
    }

    /// Memory of a stage: its buckets, its part of what passes keep for each micro-batch in flight,
    /// and the scratch memory of the whole model.
    fn stage_need(&self, size: usize, stage: &CutStage<'_>) -> MemoryNeed {
        let Range { start, end } = stage.blocks[0];
        let StageElements { held, updated } =
            self.sizes.stages[start as usize][(end - start) as usize - 1];
        let MemoryUsage { stash, scratch, states, .. } = self.sizes.memory[size];
        let blocks = self.sizes.stages.len();
        let in_flight = self.devices.len() - stage.stage;
        let stash = stash / blocks * (end - start) as usize * in_flight;
        let owned = updated.div_ceil(self.world.max(1));
        let options = self.request.plans.model().plan_options(1);
        let moments = options.moments.bytes(owned) * self.request.moments;
        let values = (held + updated) * DType::F32.bytes() + options.average_bytes(owned);
        let needed = (values + moments + stash + scratch + states) as u64;
        MemoryNeed { needed, has: self.device(stage.device).memory }
    }

    /// Speed with this throughput; `None` if a device cannot run a block.
    fn speed(&self, throughput: ThroughputModel, memory: MemoryNeed) -> Option<UnitSpeed> {
        if !(throughput.fixed_s + throughput.row_s).is_finite() {
            return None;
        }
        let count = self.devices.len() as f64;
        let first = self.device(0);
        let together =
            |link: LinkModel| LinkModel { bytes_per_s: count * link.bytes_per_s, ..link };
        let mut update_element_s: f64 = 0.0;
        for index in 0..self.devices.len() {
            update_element_s = update_element_s.max(self.device(index).update_element_s / count);
        }
        Some(UnitSpeed {
            throughput,
            fill_s: 0.0,
            fractions: self.sizes.fractions(
                &self.request.plans.of_rows(1),
                &first.blocks,
                throughput.micro_batch,
            ),
            memory,
            read_back: together(first.read_back),
            upload: together(first.upload),
            host: together(first.host),
            update_element_s,
        })
    }
}
