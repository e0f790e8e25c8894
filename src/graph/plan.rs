//! Execution plan: a graph in execution order, split into segments, with its tensors assigned to
//! slots by liveness (memory planning) and its parameters to buckets. Independent of the device,
//! whose limits are passed as values.

use std::collections::{BTreeMap, HashMap};

use super::memory_layout::{ALIGNMENT_BYTES, Segment, Slot, SlotKind, TensorLocation};
use super::slots::{Liveness, NodeOrder, assign};
use super::{
    Graph, MomentFormat, MomentRounding, Parameter, ParameterKind, PassKind, Role, Update,
    UpdateRange, UpdateRates,
};
use potluck_core::rng::Key;
use potluck_core::{BucketId, DType, ParamId, SegmentId, Site, TensorId};

const ALIGNMENT: usize = ALIGNMENT_BYTES / DType::F32.bytes();

/// Random-number site of the rounding of parameter 0's moments; each parameter has its own, far
/// from the sites of dropouts.
const FIRST_ROUNDING_SITE: u32 = 1 << 20;

/// Smallest number of samples for statistics of a normalization.
pub const STATISTICS_ROWS_MIN: u32 = 8;

/// Upper bound of the workspace of any kernel, in bytes.
pub const WORKSPACE_BYTES_MAX: usize = 64 << 20;

/// Options of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlanOptions {
    /// Largest number of rows (samples) of a micro-batch.
    pub rows: usize,
    /// Micro-batches in flight, between forward and backward pass: the number of copies of the
    /// stash.
    pub in_flight: usize,
    /// Upper bound of a bucket's bytes, unless a single tensor is larger.
    pub bucket_bytes_max: usize,
    /// Largest binding of the devices of the run, in bytes, if parameters are cut to it; also an
    /// upper bound of buckets. It is the argument of [`ModelGraph::with_parameter_bytes_max`].
    ///
    /// [`ModelGraph::with_parameter_bytes_max`]: super::ModelGraph::with_parameter_bytes_max
    pub parameter_bytes_max: Option<usize>,
    /// Upper bound of the bytes in which a kernel keeps partial results: kernels that need more are
    /// not chosen, unless a call has no other. No kernel needs more than the default.
    pub workspace_bytes_max: usize,
    /// Number format of the optimizer's moments.
    pub moments: MomentFormat,
    /// True if the device keeps an exponential average of the parameters that it updates, in f32.
    pub averages: bool,
}

impl PlanOptions {
    /// Returns options for one device that runs one micro-batch of up to `rows` rows after another.
    pub fn new(rows: usize) -> Self {
        Self {
            rows,
            in_flight: 1,
            bucket_bytes_max: 64 << 20,
            parameter_bytes_max: None,
            workspace_bytes_max: WORKSPACE_BYTES_MAX,
            moments: MomentFormat::default(),
            averages: false,
        }
    }

    /// Returns the bytes of the averages of `elements` parameters; 0 if none are kept.
    pub fn average_bytes(&self, elements: usize) -> usize {
        if self.averages { elements.saturating_mul(DType::F32.bytes()) } else { 0 }
    }

    fn bucket_bytes(&self) -> usize {
        self.parameter_bytes_max.unwrap_or(usize::MAX).min(self.bucket_bytes_max)
    }
}

/// A flat range of parameters of one kind and at the same rates, and of gradients and moments in
/// the same order.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    pub kind: ParameterKind,
    /// Rates of the optimizer, if it is trained.
    pub rates: UpdateRates,
    /// Rank of the tensor group that holds its slices; `None` if every rank has the bucket.
    pub rank: Option<u32>,
    /// Each parameter and its first element; parameters with weight decay come first.
    pub parameters: Vec<(ParamId, usize)>,
    /// Number of elements, including the gaps that alignment leaves (which stay zero).
    pub length: usize,
    /// Elements before this one have weight decay. In a running average all have; see
    /// [`Bucket::update`].
    pub decay_end: usize,
}

impl Bucket {
    /// Returns true if a rank of a tensor group, or a device that runs the whole graph (`None`),
    /// has the bucket.
    pub(super) fn is_of(&self, tensor_rank: Option<u32>) -> bool {
        self.rank.is_none() || self.rank == tensor_rank
    }

    /// Returns true if a step updates the bucket: it has gradients, which are reduced over the
    /// ranks.
    pub fn is_updated(&self) -> bool {
        self.kind != ParameterKind::Frozen
    }

    /// Returns the number of elements that have gradients: all or none.
    pub fn gradient_length(&self) -> usize {
        if self.is_updated() { self.length } else { 0 }
    }

    /// Returns the rule that updates the bucket in a step with this rule of the optimizer; `None`
    /// if it is frozen.
    ///
    /// A running average is plain gradient descent on `(state - s)^2 / 2` per row, with the
    /// momentum as learning rate: the gradient `state - s` is a weight decay of 1 plus the
    /// accumulated gradient.
    pub fn update(&self, optimizer: &Update) -> Option<Update> {
        match self.kind {
            ParameterKind::Trained => Some(optimizer.at(self.rates)),
            ParameterKind::State { momentum } => Some(Update::of_average(momentum)),
            ParameterKind::Frozen => None,
        }
    }
}

/// Execution plan of a graph: its segments, slots and buckets.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub graph: Graph,
    pub options: PlanOptions,
    /// Segments in canonical order: F by block, then B and W by block from the last.
    pub segments: Vec<Segment>,
    pub slots: Vec<Slot>,
    /// Location of each tensor.
    pub places: Vec<TensorLocation>,
    /// Buckets in the order in which the backward pass completes them.
    pub buckets: Vec<Bucket>,
    /// True for each bucket that a device with this plan holds.
    pub held: Vec<bool>,
    /// True for each block whose segments a device with this plan runs.
    pub held_blocks: Vec<bool>,
    /// The planned part; `None` for a whole graph.
    pub part: Option<super::PlannedPart>,
}

impl Plan {
    /// Plans a forward or a training graph for a device that holds all of it; [`Plan::part`] is
    /// for one that holds some of its blocks.
    pub fn new(graph: Graph, options: PlanOptions) -> Self {
        assert!(options.rows > 0 && options.in_flight > 0, "a plan has rows and one copy");
        let mut segments = segments(&graph);
        let (buckets, finished_by) = buckets(&graph, &segments, &options);
        for (bucket, segment) in finished_by.into_iter().enumerate() {
            if let Some(segment) = segment {
                segments[segment.index()].completes.push(BucketId(bucket as u32));
            }
        }
        let held: Vec<bool> = buckets.iter().map(|of| of.is_of(graph.tensor_rank)).collect();
        let held_blocks = vec![true; graph.blocks.len()];
        let mut places = vec![TensorLocation::Unallocated; graph.tensors.len()];
        place_parameters(&graph, &buckets, &held, &mut places);
        if let Some(loss) = graph.loss {
            places[loss.index()] = TensorLocation::Loss;
        }
        place_states(&graph, &held_blocks, &mut places);
        let canonical: Vec<SegmentId> = (0..segments.len() as u32).map(SegmentId).collect();
        let order = NodeOrder::new(&segments, &canonical);
        let lives = order.lifetimes(&graph, &held_blocks, |_| true);
        let logits = order.logits(&graph, options.rows);
        let liveness = Liveness { graph: &graph, lives, logits, rows: options.rows };
        let slots = assign(&liveness, &mut places, |_| options.in_flight);
        Self { graph, options, segments, slots, places, buckets, held, held_blocks, part: None }
    }

    /// Returns the smallest advisable number of samples in a micro-batch: 8 if a layer normalizes
    /// by statistics of micro-batches, which differ too much from the batch's with fewer, or else
    /// 1.
    pub fn rows_min(&self) -> u32 {
        if self.buckets.iter().any(|bucket| bucket.kind.is_state()) {
            STATISTICS_ROWS_MIN
        } else {
            1
        }
    }

    /// Returns true if a device that runs this plan holds a block.
    pub fn holds_block(&self, block: u32) -> bool {
        self.held_blocks[block as usize]
    }

    /// Returns true if a device that runs this plan holds a bucket.
    pub fn holds(&self, bucket: BucketId) -> bool {
        self.held[bucket.index()]
    }

    /// Returns the bytes of the slot that shares the memory of logits; 0 without one.
    pub fn logits_slot_bytes(&self) -> usize {
        match self.slots.iter().find(|slot| slot.kind == SlotKind::Logits) {
            Some(slot) => slot.bytes,
            None => 0,
        }
    }

    /// Returns the buckets that a step updates, in order.
    pub fn updated_buckets(&self) -> impl Iterator<Item = BucketId> + '_ {
        let ids = (0..self.buckets.len() as u32).map(BucketId);
        ids.filter(|id| self.buckets[id.index()].is_updated())
    }

    /// Returns the buckets that a step updates and that a device with this plan holds, in order.
    pub fn updated_and_held(&self) -> impl Iterator<Item = BucketId> + '_ {
        self.updated_buckets().filter(|id| self.holds(*id))
    }

    /// Returns the ranges in which an update of a range of a bucket runs: that one or, if moments
    /// are rounded, one or more for each of its parameters. `step_key` is the key of the step.
    pub fn update_ranges(
        &self,
        bucket: BucketId,
        update: &Update,
        range: UpdateRange,
        step_key: Key,
    ) -> Vec<UpdateRange> {
        if self.options.moments == MomentFormat::F32 || update.moments() == 0 {
            return vec![range];
        }
        let mut ranges = Vec::new();
        for &(id, parameter_start) in &self.buckets[bucket.index()].parameters {
            let Parameter { whole, slice, .. } = &self.graph.parameters[id.index()];
            let key = step_key.site(Site(FIRST_ROUNDING_SITE + whole.number));
            for series in slice.series() {
                let begin = parameter_start + series.start;
                let start = begin.max(range.start);
                let end = (begin + series.elements).min(range.start + range.length);
                if start < end {
                    let rounding = MomentRounding { key, series, number: start - begin };
                    let length = end - start;
                    ranges.push(UpdateRange { start, length, rounding: Some(rounding), ..range });
                }
            }
        }
        ranges
    }

    /// Returns true if a device that runs this plan runs a segment.
    pub fn holds_segment(&self, segment: SegmentId) -> bool {
        self.holds_block(self.segments[segment.index()].block)
    }

    /// Returns true if a tensor has memory: some node that the device runs writes or reads it.
    pub fn is_placed(&self, tensor: TensorId) -> bool {
        self.place(tensor) != TensorLocation::Unallocated
    }

    /// Returns true if a device that runs this plan computes a tensor, and does not receive it.
    pub fn computes(&self, tensor: TensorId) -> bool {
        let root = self.graph.root(tensor);
        let mut nodes = self.graph.nodes.iter();
        nodes.any(|node| self.holds_block(node.block) && node.outputs.contains(&root))
    }

    /// Returns the location of a tensor's elements, through aliases.
    pub fn place(&self, tensor: TensorId) -> TensorLocation {
        self.places[self.graph.root(tensor).index()]
    }

    /// Returns the bytes of the states that a device with this plan has.
    pub fn state_bytes(&self) -> usize {
        let mut bytes = 0;
        for state in &self.graph.states {
            if self.is_placed(state.tensor) {
                bytes += self.graph.tensor(state.tensor).bytes(0);
            }
        }
        bytes
    }

    /// Returns the segments of a pass, in canonical order.
    pub fn phase(&self, phase: PassKind) -> impl Iterator<Item = SegmentId> + '_ {
        let ids = (0..self.segments.len() as u32).map(SegmentId);
        ids.filter(move |id| self.segments[id.index()].phase == phase)
    }

    /// Returns, for each segment, the buckets whose parameters it reads or writes.
    pub fn buckets_of_segments(&self) -> Vec<Vec<BucketId>> {
        let mut bucket_of = HashMap::new();
        for (index, bucket) in self.buckets.iter().enumerate() {
            for (parameter, _) in &bucket.parameters {
                let tensor = self.graph.parameters[parameter.index()].tensor;
                bucket_of.insert(tensor, BucketId(index as u32));
            }
        }
        let mut found = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            let mut buckets = Vec::new();
            for node in &self.graph.nodes[segment.nodes.clone()] {
                for tensor in node.inputs.iter().chain(&node.outputs) {
                    if let Some(bucket) = bucket_of.get(tensor)
                        && !buckets.contains(bucket)
                    {
                        buckets.push(*bucket);
                    }
                }
            }
            found.push(buckets);
        }
        found
    }

    /// Returns the segments of the forward pass and of the backward pass.
    pub fn passes(&self) -> (Vec<SegmentId>, Vec<SegmentId>) {
        (0..self.segments.len() as u32)
            .map(SegmentId)
            .partition(|id| self.segments[id.index()].phase == PassKind::Forward)
    }

    /// Returns the bytes of the largest tensor that has memory, at the plan's capacity of rows,
    /// which one binding must hold.
    pub fn tensor_bytes_max(&self) -> usize {
        let mut largest = 0;
        for id in (0..self.graph.tensors.len() as u32).map(TensorId) {
            if self.is_placed(id) {
                largest = largest.max(self.graph.tensor(id).bytes(self.options.rows));
            }
        }
        largest
    }
}

/// Maximal runs of nodes of one pass and block between which the host does not act.
pub(super) fn segments(graph: &Graph) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let is_new = index > 0 && graph.nodes[index - 1].op.reduction().is_some();
        match segments.last_mut() {
            Some(last) if !is_new && (last.phase, last.block) == (node.phase, node.block) => {
                last.nodes.end = index + 1;
            }
            _ => segments.push(Segment {
                phase: node.phase,
                block: node.block,
                nodes: index..index + 1,
                completes: Vec::new(),
            }),
        }
    }
    segments
}

/// Order of buckets by their updates: trained ones, by their rates, then running averages, then
/// frozen ones. Parameters with the same key have the same update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum UpdateOrder {
    Trained { lr_scale: u32, weight_decay: Option<u32> },
    State { momentum: u32 },
    Frozen,
}

impl UpdateOrder {
    fn of(parameter: &Parameter) -> Self {
        match parameter.kind {
            ParameterKind::Trained => {
                let UpdateRates { lr_scale, weight_decay } = parameter.rates;
                let weight_decay = weight_decay.map(f32::to_bits);
                Self::Trained { lr_scale: lr_scale.to_bits(), weight_decay }
            }
            ParameterKind::State { momentum } => Self::State { momentum: momentum.to_bits() },
            ParameterKind::Frozen => Self::Frozen,
        }
    }
}

/// Returns the buckets in order of backward completion, and the segment that completes each: whole
/// blocks from the last; a parameter that several blocks use has a bucket of its own, complete
/// after the first of them.
pub(super) fn buckets(
    graph: &Graph,
    segments: &[Segment],
    options: &PlanOptions,
) -> (Vec<Bucket>, Vec<Option<SegmentId>>) {
    let used = graph.users_of_parameters();
    // Keyed so that iteration is the order of completion: by the first block that uses the
    // parameter, from the last block; within a block, its own parameters before tied ones, each by
    // its update, and replicated parameters before the slices of the ranks of a tensor group.
    type Key = (std::cmp::Reverse<u32>, Option<u32>, UpdateOrder, Option<u32>);
    let mut groups: BTreeMap<Key, Vec<ParamId>> = BTreeMap::new();
    for (index, blocks) in used.iter().enumerate() {
        let first = blocks.iter().min().copied().unwrap_or(0);
        let is_tied = blocks.iter().any(|&block| block != first);
        let parameter = &graph.parameters[index];
        let tied = if is_tied { Some(parameter.whole.number) } else { None };
        let key = (std::cmp::Reverse(first), tied, UpdateOrder::of(parameter), parameter.rank);
        groups.entry(key).or_default().push(ParamId(index as u32));
    }
    let mut buckets = Vec::new();
    let mut finished_by = Vec::new();
    for ((std::cmp::Reverse(block), ..), parameters) in groups {
        let last = segments.iter().rposition(|s| s.block == block && s.phase != PassKind::Forward);
        for bucket in pack(graph, parameters, options.bucket_bytes()) {
            finished_by.push(match last {
                Some(index) if bucket.is_updated() => Some(SegmentId(index as u32)),
                _ => None,
            });
            buckets.push(bucket);
        }
    }
    (buckets, finished_by)
}

/// Packs parameters into one or more buckets of at most `bytes_max` (but at least a tensor) each.
fn pack(graph: &Graph, parameters: Vec<ParamId>, bytes_max: usize) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let mut part: Vec<ParamId> = Vec::new();
    let mut length = 0;
    for id in parameters {
        let padded = padded_length(graph, id);
        if length > 0 && (length + padded) * DType::F32.bytes() > bytes_max {
            buckets.push(lay_out(graph, std::mem::take(&mut part)));
            length = 0;
        }
        length += padded;
        part.push(id);
    }
    buckets.push(lay_out(graph, part));
    buckets
}

/// Elements of a parameter in a bucket, with the gap after it.
fn padded_length(graph: &Graph, id: ParamId) -> usize {
    let tensor = graph.parameters[id.index()].tensor;
    graph.tensor(tensor).shape.per_row().next_multiple_of(ALIGNMENT)
}

/// Lays out the bucket of parameters, at least one, that have the same kind, rates and rank.
fn lay_out(graph: &Graph, mut ids: Vec<ParamId>) -> Bucket {
    ids.sort_by_key(|id| !graph.parameters[id.index()].decay);
    let Parameter { kind, rates, rank, .. } = graph.parameters[ids[0].index()];
    let parameters = Vec::with_capacity(ids.len());
    let mut bucket = Bucket { kind, rates, rank, parameters, length: 0, decay_end: 0 };
    for id in ids {
        bucket.parameters.push((id, bucket.length));
        bucket.length += padded_length(graph, id);
        if graph.parameters[id.index()].decay || kind.is_state() {
            bucket.decay_end = bucket.length;
        }
    }
    bucket
}

/// Sets the places of the parameters and gradients of the held buckets.
pub(super) fn place_parameters(
    graph: &Graph,
    buckets: &[Bucket],
    held: &[bool],
    places: &mut [TensorLocation],
) {
    for (index, bucket) in buckets.iter().enumerate() {
        if !held[index] {
            continue;
        }
        let bucket_id = BucketId(index as u32);
        for &(id, start) in &bucket.parameters {
            let parameter = &graph.parameters[id.index()];
            places[parameter.tensor.index()] =
                TensorLocation::Parameter { bucket: bucket_id, start };
            if let Some(gradient) = parameter.gradient {
                places[gradient.index()] = TensorLocation::Gradient { bucket: bucket_id, start };
            }
        }
    }
}

/// Sets the places of the states that nodes of the held blocks use.
pub(super) fn place_states(graph: &Graph, held: &[bool], places: &mut [TensorLocation]) {
    for node in graph.nodes.iter().filter(|node| held[node.block as usize]) {
        for tensor in node.inputs.iter().chain(&node.outputs) {
            let root = graph.root(*tensor);
            if let Role::State(id) = graph.tensor(root).role {
                places[root.index()] = TensorLocation::State(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use crate::{Builder, Init, Unary, differentiate};

    /// Three layers in two blocks, with one parameter used in both.
    fn sample() -> Graph {
        let mut b = Builder::new();
        let shared = b.parameter("shared", &[8, 8], Init::Zeros);
        b.block("one");
        let x = b.input("x", &[1, 8]);
        let w = b.parameter("w", &[8, 8], Init::Zeros);
        let bias = b.parameter("bias", &[8], Init::Zeros);
        let y = b.linear(x, w, Some(bias)).unwrap();
        let y = b.unary(y, Unary::Gelu).unwrap();
        let y = b.linear(y, shared, None).unwrap();
        b.block("two");
        let v = b.parameter("v", &[8, 8], Init::Zeros);
        let y = b.linear(y, v, None).unwrap();
        let y = b.unary(y, Unary::Relu).unwrap();
        let y = b.linear(y, shared, None).unwrap();
        b.output("y", y);
        let target = b.input("target", &[1, 8]);
        b.squared_error_loss(y, target).unwrap();
        differentiate(b.finish()).unwrap()
    }

    #[test]
    fn segments_go_forward_by_block_then_back() {
        let plan = Plan::new(sample(), PlanOptions::new(4));
        let order: Vec<String> =
            plan.segments.iter().map(|s| format!("{}{}", s.phase, s.block)).collect();
        assert_eq!(order, ["F0", "F1", "B1", "W1", "B0", "W0"]);
    }

    #[test]
    fn buckets_complete_from_the_last_block_and_tied_ones_stand_alone() {
        let plan = Plan::new(sample(), PlanOptions::new(4));
        let names = |bucket: &Bucket| -> Vec<&str> {
            let name = |(id, _): &(ParamId, usize)| &*plan.graph.parameters[id.index()].name;
            bucket.parameters.iter().map(name).collect()
        };
        let all: Vec<_> = plan.buckets.iter().map(names).collect();
        assert_eq!(all, [vec!["v"], vec!["w", "bias"], vec!["shared"]]);
        assert_eq!(plan.segments[3].completes, [BucketId(0)]);
        assert_eq!(plan.segments[5].completes, [BucketId(1), BucketId(2)]);
        assert_eq!(plan.buckets[1].decay_end, 64);
        assert!(plan.buckets.iter().flat_map(|b| &b.parameters).all(|(_, s)| s % 64 == 0));
    }

    #[test]
    fn a_small_limit_splits_a_block_into_several_buckets() {
        let options = PlanOptions { bucket_bytes_max: 256, ..PlanOptions::new(4) };
        let plan = Plan::new(sample(), options);
        assert_eq!(plan.buckets.len(), 4);
    }

    /// Replays the plan and checks, tensor by tensor, that no node overwrites a tensor that is
    /// still to be read.
    #[test]
    fn no_slot_is_overwritten_while_it_is_needed() {
        let plan = Plan::new(sample(), PlanOptions::new(4));
        let mut holds: Vec<Option<TensorId>> = vec![None; plan.slots.len()];
        for (_, input) in &plan.graph.inputs {
            if let TensorLocation::Slot(slot) = plan.place(*input) {
                assert_eq!(holds[slot.index()], None);
                holds[slot.index()] = Some(*input);
            }
        }
        for node in &plan.graph.nodes {
            let at = |tensor: &TensorId| match plan.place(*tensor) {
                TensorLocation::Slot(slot) => Some((slot, plan.graph.root(*tensor))),
                _ => None,
            };
            for (slot, tensor) in node.inputs.iter().filter_map(at) {
                assert_eq!(holds[slot.index()], Some(tensor), "{}", node.op);
            }
            let real = node.outputs.iter().filter(|t| plan.graph.tensor(**t).alias_of.is_none());
            for (slot, tensor) in real.filter_map(at) {
                assert!(node.inputs.iter().filter_map(at).all(|(s, _)| s != slot));
                holds[slot.index()] = Some(tensor);
            }
        }
    }

    #[test]
    fn what_crosses_segments_is_stashed_and_slots_are_shared() {
        let plan = Plan::new(sample(), PlanOptions::new(4));
        let activations = plan
            .graph
            .tensors
            .iter()
            .filter(|t| t.role == Role::Activation && t.alias_of.is_none())
            .count();
        assert!(plan.slots.len() < activations, "{} of {activations}", plan.slots.len());
        // Of one device every slot has one copy, so that all tensors share all slots.
        let mut lives = BTreeMap::new();
        for (tensor, place) in plan.graph.tensors.iter().zip(&plan.places) {
            if let TensorLocation::Slot(slot) = place {
                lives.entry(slot.index()).or_insert_with(Vec::new).push(tensor.bytes(4));
            }
        }
        for (slot, tensors) in &lives {
            let largest = tensors.iter().max().unwrap().next_multiple_of(256);
            assert_eq!(plan.slots[*slot].bytes, largest);
        }
        assert!(lives.values().any(|tensors| tensors.len() > 2), "{lives:?}");
        for (_, output) in &plan.graph.outputs {
            let TensorLocation::Slot(slot) = plan.place(*output) else {
                panic!("outputs have slots")
            };
            assert_eq!(plan.slots[slot.index()].kind, SlotKind::Stash);
        }
    }
}
