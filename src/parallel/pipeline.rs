//! Programs of pipelines: a model cut into stages and stages cut into tensors, with or without data
//! parallelism.
//!
//! `D` pipelines of `K` stages run their parts of the batch. A stage holds one model chunk, a run
//! of consecutive blocks, or several of them: chunk `c` is on stage `c % K`. A stage has one rank,
//! or a tensor group of `T`, which divide its tensors and all-reduce their results. The programs
//! differ from the programs of data parallelism in the order of their segments, which a
//! [`PipelineSchedule`] determines, and in the tensors that they send, receive and reduce; each
//! bucket is reduced between the ranks that hold it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::program::{micro_batches, nearly_equal};
use super::schedule::{in_flight, stage_work};
use super::{
    Edge, EdgeLayout, GroupReduction, Instruction, MicroBatch, PipelineSchedule, PipelineShape,
    Program, Share, StagePass, StageWork, Token,
};
use crate::collective::{BucketGroups, Collective, RankGroup};
use potluck_core::{BucketId, EdgeId, Rank, ReductionId, SegmentId, TensorId};
use potluck_graph::{Node, PassKind, Plan, PlanPart, ReducedTensors, Role, crossings};

/// All-reduces in flight for each micro-batch that a stage runs at once: the tensors that a rank
/// has sent and others may not have read yet. A rank begins the next all-reduce as soon as it has
/// received the parts of the previous one.
const REDUCTIONS_IN_FLIGHT: usize = 2;
/// The most micro-batches that a tensor group runs at once if it is the only stage of its pipeline:
/// while the sum of one is in flight, the devices compute the other.
pub const OVERLAPPED: usize = 2;

/// One pipeline: its ranks, and the blocks of its model chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineRanks {
    /// By stage: the ranks of its tensor group, the same number for each.
    pub groups: Vec<Vec<Rank>>,
    /// By model chunk, in forward order: consecutive runs of blocks, which are all blocks.
    pub chunks: Vec<Range<u32>>,
}

impl PipelineRanks {
    /// Returns a pipeline of stages of one rank each.
    pub fn of_stages(ranks: Vec<Rank>, chunks: Vec<Range<u32>>) -> Self {
        Self { groups: ranks.into_iter().map(|rank| vec![rank]).collect(), chunks }
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.groups.len()
    }

    /// Returns the number of ranks that divide the tensors of a stage.
    pub fn tensor_ranks(&self) -> usize {
        self.groups.first().map_or(1, Vec::len)
    }

    /// Returns true if the only stage has a tensor group, which then runs up to two micro-batches
    /// at once.
    pub fn is_paired(&self) -> bool {
        self.tensor_ranks() > 1 && self.chunks.len() == 1
    }

    /// Returns all ranks: by stage, then in the order of the tensor group.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + Clone {
        self.groups.iter().flatten().copied()
    }

    /// Ranks with their stages and their places in the tensor group.
    fn places(&self) -> impl Iterator<Item = (usize, usize, Rank)> {
        self.groups.iter().enumerate().flat_map(|(stage, group)| {
            group.iter().enumerate().map(move |(tensor, rank)| (stage, tensor, *rank))
        })
    }

    pub(crate) fn stage_of_chunk(&self, chunk: usize) -> usize {
        chunk % self.stages()
    }

    /// Returns the blocks of a stage's model chunks, in forward order.
    pub fn chunks_of(&self, stage: usize) -> Vec<Range<u32>> {
        chunks_of_stage(&self.chunks, self.stages(), stage).cloned().collect()
    }

    /// Returns the stage of each block.
    pub fn stage_of_block(&self) -> Vec<u32> {
        let mut stages = Vec::new();
        for (chunk, blocks) in self.chunks.iter().enumerate() {
            stages.resize(stages.len() + blocks.len(), self.stage_of_chunk(chunk) as u32);
        }
        stages
    }

    /// Returns true for each block that the stage holds.
    pub(crate) fn blocks_of(&self, stage: usize) -> Vec<bool> {
        self.stage_of_block().iter().map(|of| *of as usize == stage).collect()
    }
}

/// Blocks of the model chunks of one of `stages` stages, in forward order.
pub(crate) fn chunks_of_stage(
    chunks: &[Range<u32>],
    stages: usize,
    stage: usize,
) -> impl Iterator<Item = &Range<u32>> {
    chunks.iter().skip(stage).step_by(stages)
}

/// Request for the programs of pipelines.
#[derive(Clone, Copy, Debug)]
pub struct PipelineRequest<'a> {
    /// Plans of the whole graph by rank of a tensor group, each with that rank's part of every
    /// tensor, for the most rows of a micro-batch. One plan if stages have one rank each.
    pub plans: &'a [Arc<Plan>],
    pub pipelines: &'a [PipelineRanks],
    /// Samples of each pipeline.
    pub shares: &'a [Share],
    pub schedule: PipelineSchedule,
    /// True if reductions start while backward passes still run.
    pub overlap: bool,
    /// The most elements of a message.
    pub piece_max: usize,
    /// Minimum number of micro-batches of an activation that may be in flight, for forward passes
    /// outside of training.
    pub in_flight_min: usize,
}

impl PipelineRequest<'_> {
    /// Returns the plan of the first rank of a tensor group, which has the buckets of all.
    pub fn plan(&self) -> &Plan {
        &self.plans[0]
    }

    fn world(&self) -> usize {
        self.pipelines.iter().map(|pipeline| pipeline.ranks().count()).sum()
    }
}

/// Programs of all ranks of pipelines, with their plans, edges and groups.
#[derive(Clone, Debug)]
pub struct PipelinePrograms {
    /// By rank.
    pub programs: Vec<Program>,
    /// Part of the plan that each rank holds, placed for its program.
    pub plans: Vec<Arc<Plan>>,
    pub edges: EdgeLayout,
    pub groups: BucketGroups,
}

impl PipelinePrograms {
    /// Writes the programs of a training step.
    pub fn training(request: &PipelineRequest) -> Self {
        let PipelineRequest { pipelines, shares, .. } = *request;
        let world = request.world();
        let groups = bucket_groups(request.plan(), pipelines, world as u32);
        let edges = edge_layout(request);
        let mut written: Vec<Option<(Program, Arc<Plan>)>> = vec![None; world];
        for (pipeline, share) in pipelines.iter().zip(shares) {
            let batches = cut(*share, pipelines.len());
            for (stage, tensor, rank) in pipeline.places() {
                let plan = &request.plans[tensor];
                let writer = StageWriter { request, plan, pipeline, stage, rank, edges: &edges };
                let work = writer.training(&batches);
                written[rank.index()] = Some(writer.finish(batches.clone(), work, &groups));
            }
        }
        let (programs, plans) = written.into_iter().flatten().unzip();
        Self { programs, plans, edges, groups }
    }

    /// Returns the programs of a forward pass over these micro-batches of each pipeline, at whose
    /// end all ranks report the sums of their losses. They run on the plans of training, or of a
    /// forward graph.
    pub fn forward(
        request: &PipelineRequest,
        edges: &EdgeLayout,
        batches: &[Vec<MicroBatch>],
    ) -> Vec<Program> {
        let mut programs = vec![None; request.world()];
        for (pipeline, batches) in request.pipelines.iter().zip(batches) {
            for (stage, tensor, rank) in pipeline.places() {
                let plan = &request.plans[tensor];
                let writer = StageWriter { request, plan, pipeline, stage, rank, edges };
                let mut instructions = vec![Instruction::ZeroGradients];
                instructions.extend(writer.forward(batches.len()));
                instructions.push(Instruction::Verdict);
                let micro_batches = batches.clone();
                programs[rank.index()] = Some(Program { micro_batches, instructions });
            }
        }
        programs.into_iter().flatten().collect()
    }

    /// Returns the parts of a forward graph that the ranks hold, for programs of
    /// [`PipelinePrograms::forward`].
    pub fn forward_plans(request: &PipelineRequest) -> Vec<Arc<Plan>> {
        let edges = edge_layout(request);
        let mut plans = vec![None; request.world()];
        for pipeline in request.pipelines {
            for (stage, tensor, rank) in pipeline.places() {
                let plan = &request.plans[tensor];
                let writer = StageWriter { request, plan, pipeline, stage, rank, edges: &edges };
                // All later rounds repeat the first two: a micro-batch is kept on the device while
                // the others of its round run on the model chunks before.
                let runs = runs(&writer.forward(2 * pipeline.stages()));
                let part = PlanPart { blocks: &pipeline.blocks_of(stage), runs: &runs };
                let plan = Plan::part(plan.graph.clone(), plan.options, &part);
                plans[rank.index()] = Some(Arc::new(plan));
            }
        }
        plans.into_iter().flatten().collect()
    }
}

/// Returns the edges of pipelines for passes of their micro-batches; see
/// [`PipelineRequest::in_flight_min`].
pub fn edge_layout(request: &PipelineRequest) -> EdgeLayout {
    let mut edges = edges_between_stages(request);
    let reductions = reductions(request, &mut edges);
    EdgeLayout {
        edges: edges.into(),
        reductions: reductions.into(),
        piece_max: request.piece_max,
        rows_max: request.plan().options.rows,
    }
}

/// Cuts the samples of a pipeline into micro-batches as a single rank does, and beside other
/// pipelines as a data-parallel rank does: so the sums have the same bits.
fn cut(share: Share, pipelines: usize) -> Vec<MicroBatch> {
    match pipelines {
        1 => micro_batches(share.first, share.count, share.micro_batch),
        _ => nearly_equal(share),
    }
}

/// Returns the number of micro-batches of each pipeline.
pub fn micro_batch_counts(shares: &[Share]) -> Vec<usize> {
    shares.iter().map(|share| cut(*share, shares.len()).len()).collect()
}

/// Returns the ranks that hold each bucket: pipeline by pipeline, in the order of the blocks that
/// use it first, and of a tensor group all ranks, or the one whose slices are in the bucket.
pub fn bucket_groups(plan: &Plan, pipelines: &[PipelineRanks], world: u32) -> BucketGroups {
    let stages: Vec<Vec<u32>> = pipelines.iter().map(PipelineRanks::stage_of_block).collect();
    let mut ranks: Vec<Vec<Rank>> = vec![Vec::new(); plan.buckets.len()];
    for (bucket, ranks) in ranks.iter_mut().enumerate() {
        let blocks = plan.blocks_with(BucketId(bucket as u32));
        let of_tensor = plan.buckets[bucket].rank;
        for (pipeline, stages) in pipelines.iter().zip(&stages) {
            for block in &blocks {
                let group = &pipeline.groups[stages[*block as usize] as usize];
                for (tensor, rank) in (0..).zip(group) {
                    let holds = of_tensor.is_none_or(|of| of == tensor);
                    if holds && !ranks.contains(rank) {
                        ranks.push(*rank);
                    }
                }
            }
        }
    }
    let mut groups = Vec::with_capacity(ranks.len());
    for ranks in &ranks {
        // A bucket belongs to at least one block, so it has a rank in every pipeline, and no rank
        // is listed twice.
        groups.push(RankGroup::new(ranks).unwrap_or_else(|_| RankGroup::all(1)));
    }
    BucketGroups::new(world, groups)
}

/// Returns the edges between the stages of all pipelines: each rank of a tensor group has the whole
/// tensor, and sends it to the rank at the same place of the other stage's group.
fn edges_between_stages(request: &PipelineRequest) -> Vec<Edge> {
    let mut edges = Vec::new();
    for (pipeline, share) in request.pipelines.iter().zip(request.shares) {
        let count = cut(*share, request.pipelines.len()).len();
        for (tensor, plan) in request.plans.iter().enumerate() {
            let graph = &plan.graph;
            for crossing in crossings(graph, &pipeline.stage_of_block()) {
                let from = crossing.from as usize;
                let to = crossing.to as usize;
                let shape = shape_of(request, pipeline, count);
                // The earlier of the two stages runs ahead by at most the micro-batches in flight,
                // or by all of them if it waits for no gradients.
                let ahead = if has_backward(plan, pipeline, from.min(to)) {
                    in_flight(request.schedule, shape, from.min(to)).min(count)
                } else {
                    count
                };
                let ahead_min = match crossing.phase {
                    PassKind::Forward => request.in_flight_min,
                    PassKind::BackwardInput | PassKind::BackwardWeight => 1,
                };
                edges.push(Edge {
                    tensor: crossing.tensor,
                    shape: graph.tensor(crossing.tensor).shape.clone(),
                    from: pipeline.groups[from][tensor],
                    to: vec![pipeline.groups[to][tensor]],
                    in_flight: ahead.max(ahead_min),
                    reduction: None,
                });
            }
        }
    }
    edges
}

/// Returns true if a stage has a backward pass: not all parameters of this and of earlier stages
/// are frozen.
fn has_backward(plan: &Plan, pipeline: &PipelineRanks, stage: usize) -> bool {
    let blocks = pipeline.blocks_of(stage);
    plan.segments
        .iter()
        .any(|segment| segment.phase != PassKind::Forward && blocks[segment.block as usize])
}

/// Returns the all-reduces of the tensor groups of all stages, in the order of the plan, and adds
/// their edges.
fn reductions(request: &PipelineRequest, edges: &mut Vec<Edge>) -> Vec<GroupReduction> {
    let mut reductions = Vec::new();
    for (pipeline, share) in request.pipelines.iter().zip(request.shares) {
        let micro_batches = cut(*share, request.pipelines.len()).len();
        let at_a_time = if pipeline.is_paired() { micro_batches.clamp(1, OVERLAPPED) } else { 1 };
        let in_flight = REDUCTIONS_IN_FLIGHT * at_a_time;
        for (stage, group) in pipeline.groups.iter().enumerate() {
            let blocks = pipeline.blocks_of(stage);
            let mut of_ranks = Vec::new();
            for plan in request.plans {
                let mut own = Vec::new();
                for (id, segment) in plan.segments.iter().enumerate() {
                    if blocks[segment.block as usize] {
                        own.extend(ReducedTensors::of(plan, SegmentId(id as u32)));
                    }
                }
                of_ranks.push(own);
            }
            let first = &of_ranks[0];
            let are_alike = of_ranks.iter().all(|own| own.len() == first.len());
            assert!(are_alike, "the ranks of a tensor group all-reduce the same");
            for (nth, ReducedTensors { kind, .. }) in first.iter().enumerate() {
                let id = ReductionId(reductions.len() as u32);
                let mut parts = Vec::new();
                let mut results = Vec::new();
                for (place, (from, reduced)) in group.iter().zip(&of_ranks).enumerate() {
                    let plan = &request.plans[place];
                    let mut own = Vec::new();
                    for &tensor in &reduced[nth].sent {
                        own.push(EdgeId(edges.len() as u32));
                        edges.push(Edge {
                            tensor,
                            shape: plan.graph.tensor(tensor).shape.clone(),
                            from: *from,
                            to: group.clone(),
                            in_flight,
                            reduction: Some(id),
                        });
                    }
                    parts.push(own);
                    results.push(reduced[nth].results.clone());
                }
                reductions.push(GroupReduction { kind: *kind, parts, results });
            }
        }
    }
    reductions
}

fn shape_of(
    request: &PipelineRequest,
    pipeline: &PipelineRanks,
    micro_batches: usize,
) -> PipelineShape {
    let stages = pipeline.stages();
    let chunks = match request.schedule {
        PipelineSchedule::Interleaved => pipeline.chunks.len() / stages,
        _ => 1,
    };
    PipelineShape { stages, chunks, micro_batches }
}

/// Writer of the program of one rank of one stage of a pipeline.
struct StageWriter<'a> {
    request: &'a PipelineRequest<'a>,
    /// Plan of the whole graph for the rank's place in a tensor group.
    plan: &'a Plan,
    pipeline: &'a PipelineRanks,
    stage: usize,
    rank: Rank,
    edges: &'a EdgeLayout,
}

/// Edges of a rank by the segment at which their tensors are received or sent.
#[derive(Default)]
struct SegmentEdges {
    /// Received directly before the segment.
    received: HashMap<SegmentId, Vec<EdgeId>>,
    /// Sent directly after the segment, and after the all-reduce with which it ends.
    sent: HashMap<SegmentId, Vec<EdgeId>>,
    /// All-reduces with which segments end, and the edges of the rank's parts.
    reduced: HashMap<SegmentId, (ReductionId, Vec<EdgeId>)>,
}

impl StageWriter<'_> {
    /// Segments of the stage's work, in order.
    fn segments_of(&self, work: StageWork) -> Vec<SegmentId> {
        segments_of(self.plan, &self.pipeline.chunks_of(self.stage), work)
    }

    /// Edges of the rank by segment, given the segments of a micro-batch in order.
    fn edges_by_segment(&self, order: &[SegmentId]) -> SegmentEdges {
        let mut by_segment = SegmentEdges::default();
        for (index, edge) in self.edges.edges.iter().enumerate() {
            let id = EdgeId(index as u32);
            if let Some(reduction) = edge.reduction {
                if edge.from == self.rank
                    && let Some(segment) = order.iter().find(|segment| {
                        self.writes(**segment, edge.tensor)
                            && ReducedTensors::of(self.plan, **segment).is_some()
                    })
                {
                    let reduced = by_segment.reduced.entry(*segment);
                    reduced.or_insert_with(|| (reduction, Vec::new())).1.push(id);
                }
                continue;
            }
            if edge.leads_to(self.rank)
                && let Some(first) = order.iter().find(|segment| self.reads(**segment, edge.tensor))
            {
                by_segment.received.entry(*first).or_default().push(id);
            }
            if edge.from == self.rank
                && let Some(writer) =
                    order.iter().rfind(|segment| self.writes(**segment, edge.tensor))
            {
                by_segment.sent.entry(*writer).or_default().push(id);
            }
        }
        by_segment
    }

    fn reads(&self, segment: SegmentId, tensor: TensorId) -> bool {
        self.nodes_of(segment).iter().any(|node| self.contains_root(&node.inputs, tensor))
    }

    fn writes(&self, segment: SegmentId, tensor: TensorId) -> bool {
        self.nodes_of(segment).iter().any(|node| self.contains_root(&node.outputs, tensor))
    }

    fn nodes_of(&self, segment: SegmentId) -> &[Node] {
        &self.plan.graph.nodes[self.plan.segments[segment.index()].nodes.clone()]
    }

    /// Returns true if one of these tensors is a view of `root`, or `root` itself.
    fn contains_root(&self, tensors: &[TensorId], root: TensorId) -> bool {
        tensors.iter().any(|tensor| self.plan.graph.root(*tensor) == root)
    }

    /// Instructions of all work of a training step, without collectives.
    fn training(&self, batches: &[MicroBatch]) -> Vec<Instruction> {
        let shape = shape_of(self.request, self.pipeline, batches.len());
        // With several stages, a stage computes other micro-batches while one is in flight to the
        // next stage, which would wait longer for micro-batches that are computed in pairs.
        if self.pipeline.is_paired() {
            return self.lower(&in_pairs(batches.len()), true);
        }
        self.lower(&stage_work(self.request.schedule, shape, self.stage), false)
    }

    /// Instructions of a forward pass of `micro_batches`.
    fn forward(&self, micro_batches: usize) -> Vec<Instruction> {
        let chunks = self.pipeline.chunks_of(self.stage).len();
        let pass = StagePass::Forward;
        // In rounds of as many micro-batches as there are stages, so that stages do not wait for
        // each other in a cycle: a later chunk of a round needs only earlier chunks of that round.
        let stages = self.pipeline.stages();
        let mut work = Vec::new();
        for first in (0..micro_batches).step_by(stages) {
            for chunk in 0..chunks {
                for micro_batch in first..(first + stages).min(micro_batches) {
                    work.push(StageWork { pass, chunk, micro_batch });
                }
            }
        }
        self.lower(&work, false)
    }

    /// Returns the instructions of work. With `overlaps`, two consecutive units that differ only in
    /// their micro-batch run together: one computes while the results of the other are reduced.
    fn lower(&self, work: &[StageWork], overlaps: bool) -> Vec<Instruction> {
        let Some(first) = work.first() else { return Vec::new() };
        let mut order = Vec::new();
        for other in work {
            if other.micro_batch == first.micro_batch {
                order.extend(self.segments_of(*other));
            }
        }
        let edges = self.edges_by_segment(&order);
        let mut instructions = Vec::new();
        let mut loaded = Vec::new();
        let mut work = work.iter().copied().peekable();
        while let Some(now) = work.next() {
            let beside = work.next_if(|next| {
                overlaps
                    && next.pass == now.pass
                    && next.chunk == now.chunk
                    && next.micro_batch != now.micro_batch
            });
            let mut lanes = Vec::new();
            for work in [Some(now), beside].into_iter().flatten() {
                let micro_batch = work.micro_batch;
                if !loaded.contains(&micro_batch) {
                    loaded.push(micro_batch);
                    instructions.push(Instruction::Load { micro_batch });
                }
                lanes.push(self.sections(work, &edges));
            }
            // Lanes run the same segments, so all have the same number of sections.
            debug_assert!(lanes.iter().all(|lane| lane.len() == lanes[0].len()));
            for section in 0..lanes[0].len() {
                for lane in &mut lanes {
                    instructions.append(&mut lane[section]);
                }
            }
        }
        instructions
    }

    /// Returns the instructions of a unit of work, in sections. All but the first begin with an
    /// all-reduce of the tensors that the previous section has computed and sent.
    fn sections(&self, work: StageWork, edges: &SegmentEdges) -> Vec<Vec<Instruction>> {
        let micro_batch = work.micro_batch;
        let mut sections = vec![Vec::new()];
        for segment in self.segments_of(work) {
            let mut now = sections.pop().unwrap_or_default();
            for &edge in edges.received.get(&segment).into_iter().flatten() {
                now.push(Instruction::Recv { edge, micro_batch });
            }
            now.push(Instruction::Run { segment, micro_batch });
            if let Some((reduction, parts)) = edges.reduced.get(&segment) {
                for &edge in parts {
                    now.push(Instruction::Send { edge, micro_batch });
                }
                sections.push(now);
                now = vec![Instruction::AllReduce { reduction: *reduction, micro_batch }];
            }
            for &edge in edges.sent.get(&segment).into_iter().flatten() {
                now.push(Instruction::Send { edge, micro_batch });
            }
            sections.push(now);
        }
        sections
    }

    /// Completes the program of a training step with its collectives, its verdict and its updates,
    /// and plans the part of the graph that it runs.
    fn finish(
        &self,
        micro_batches: Vec<MicroBatch>,
        work: Vec<Instruction>,
        groups: &BucketGroups,
    ) -> (Program, Arc<Plan>) {
        let Plan { graph, options, .. } = self.plan;
        let runs = runs(&work);
        let blocks = self.pipeline.blocks_of(self.stage);
        let part = PlanPart { blocks: &blocks, runs: &runs };
        let plan = Plan::part(graph.clone(), *options, &part);
        let buckets = held_in_order(&plan, &runs);
        let mut shared = buckets.clone();
        shared.retain(|bucket| groups.of(*bucket).size() > 1);

        let mut instructions = vec![Instruction::ZeroGradients];
        instructions.extend(self.with_early_reductions(work, &plan, groups));
        // In one order on all ranks, which is also the order of the early ones: a rank that reads
        // back first the bucket that another rank reads back last would wait for that rank while
        // its slots are taken.
        let mut late = shared.clone();
        late.sort_by_key(|bucket| (!self.may_start_early(*bucket, groups), *bucket));
        for bucket in late {
            let start = Instruction::Start(Collective::reduce_scatter(bucket));
            if !instructions.contains(&start) {
                instructions.push(start);
            }
        }
        for &bucket in &shared {
            instructions.push(Instruction::Wait(Token::of(Collective::reduce_scatter(bucket))));
        }
        instructions.push(Instruction::Verdict);
        for &bucket in &buckets {
            instructions.push(Instruction::Update { bucket });
            if shared.contains(&bucket) {
                instructions.push(Instruction::Start(Collective::all_gather(bucket)));
            }
        }
        for bucket in shared {
            instructions.push(Instruction::Wait(Token::of(Collective::all_gather(bucket))));
        }
        (Program { micro_batches, instructions }, Arc::new(plan))
    }

    /// Returns true if a bucket is reduced, and its reduction may start before the last segment.
    ///
    /// A bucket of several stages of one pipeline is complete at different times on them. In a
    /// ring, the readbacks of the early stage would take the slots that its later sends need, and
    /// its neighbours would wait for each other. The reduction then starts after all sends, on the
    /// ranks of all pipelines: another pipeline, cut otherwise, may hold the bucket on one stage,
    /// and all ranks start their reductions in one order. In a star of two, the stage that does not
    /// own the bucket sends at once.
    ///
    /// A bucket of all ranks of a tensor group starts late as well: only the first rank computes
    /// the gradients, and its readbacks must not take the slots of the sums that the other ranks
    /// wait for.
    fn may_start_early(&self, bucket: BucketId, groups: &BucketGroups) -> bool {
        let group = groups.of(bucket);
        if group.size() <= 1 {
            return false;
        }
        let is_of_one_place =
            self.pipeline.tensor_ranks() == 1 || self.plan.buckets[bucket.index()].rank.is_some();
        if !is_of_one_place {
            return false;
        }
        let pipelines = self.request.pipelines;
        pipelines.len() == 1
            || pipelines.iter().all(|pipeline| {
                pipeline.ranks().filter(|rank| group.position(*rank).is_some()).count() == 1
            })
    }

    /// Inserts the starts of reductions after the segments that complete their gradients.
    fn with_early_reductions(
        &self,
        work: Vec<Instruction>,
        plan: &Plan,
        groups: &BucketGroups,
    ) -> Vec<Instruction> {
        let last = runs(&work).iter().map(|(_, micro_batch)| *micro_batch).max();
        let mut instructions = Vec::with_capacity(work.len());
        let mut due: Vec<BucketId> = Vec::new();
        for instruction in work {
            // Behind the sends of the segment that completes a bucket.
            let is_of_segment =
                matches!(instruction, Instruction::Send { .. } | Instruction::AllReduce { .. });
            if !is_of_segment {
                start_reductions(&mut due, &mut instructions);
            }
            instructions.push(instruction);
            if let Instruction::Run { segment, micro_batch } = instruction
                && self.request.overlap
                && Some(micro_batch) == last
            {
                for &bucket in &plan.segments[segment.index()].completes {
                    if self.may_start_early(bucket, groups) {
                        due.push(bucket);
                    }
                }
            }
        }
        start_reductions(&mut due, &mut instructions);
        instructions
    }
}

/// Appends the starts of the reductions of all buckets that are due.
fn start_reductions(due: &mut Vec<BucketId>, instructions: &mut Vec<Instruction>) {
    for bucket in due.drain(..) {
        instructions.push(Instruction::Start(Collective::reduce_scatter(bucket)));
    }
}

/// Returns the work of the only stage of a pipeline, whose tensor group runs micro-batches in
/// pairs: the forward passes of a pair, and then its backward passes.
fn in_pairs(micro_batches: usize) -> Vec<StageWork> {
    let mut work = Vec::with_capacity(2 * micro_batches);
    for first in (0..micro_batches).step_by(OVERLAPPED) {
        let pair = first..(first + OVERLAPPED).min(micro_batches);
        for pass in [StagePass::Forward, StagePass::Backward] {
            for micro_batch in pair.clone() {
                work.push(StageWork { pass, chunk: 0, micro_batch });
            }
        }
    }
    work
}

/// Segments of a stage's work, in order; `chunks` are the blocks of its model chunks.
fn segments_of(plan: &Plan, chunks: &[Range<u32>], work: StageWork) -> Vec<SegmentId> {
    let blocks = &chunks[work.chunk];
    let passes: &[PassKind] = match work.pass {
        StagePass::Forward => &[PassKind::Forward],
        StagePass::Backward => &[PassKind::BackwardInput, PassKind::BackwardWeight],
        StagePass::BackwardInput => &[PassKind::BackwardInput],
        StagePass::BackwardWeight => &[PassKind::BackwardWeight],
    };
    // The plan's order: forward by block, then backward from the last block.
    let mut segments = Vec::new();
    for (index, segment) in plan.segments.iter().enumerate() {
        if blocks.contains(&segment.block) && passes.contains(&segment.phase) {
            segments.push(SegmentId(index as u32));
        }
    }
    segments
}

/// Returns the segments that a stage with these model chunks runs in a training step, each with its
/// micro-batch, without writing the program. The shape must fit the schedule and have the stage.
pub fn stage_runs(
    plan: &Plan,
    chunks: &[Range<u32>],
    schedule: PipelineSchedule,
    shape: PipelineShape,
    stage: usize,
) -> Vec<(SegmentId, usize)> {
    let mut runs = Vec::new();
    for work in stage_work(schedule, shape, stage) {
        for segment in segments_of(plan, chunks, work) {
            runs.push((segment, work.micro_batch));
        }
    }
    runs
}

/// Returns the segments that instructions run, each with its micro-batch.
pub fn runs(instructions: &[Instruction]) -> Vec<(SegmentId, usize)> {
    let mut runs = Vec::new();
    for instruction in instructions {
        if let Instruction::Run { segment, micro_batch } = *instruction {
            runs.push((segment, micro_batch));
        }
    }
    runs
}

/// Returns the buckets that a rank holds and updates, in the order in which its gradients become
/// final, and last the buckets that no segment completes.
fn held_in_order(plan: &Plan, runs: &[(SegmentId, usize)]) -> Vec<BucketId> {
    let completed = runs.iter().flat_map(|(segment, _)| &plan.segments[segment.index()].completes);
    let all = plan.updated_buckets();
    let mut order = Vec::new();
    for bucket in completed.copied().chain(all).filter(|bucket| plan.holds(*bucket)) {
        if !order.contains(&bucket) {
            order.push(bucket);
        }
    }
    order
}

/// Returns the inputs that a rank with this plan reads in a step; none of them selects an output.
pub fn used_inputs(plan: &Plan) -> Vec<TensorId> {
    let mut used = Vec::new();
    for &(_, tensor) in &plan.graph.inputs {
        let is_input = plan.graph.tensor(tensor).role == Role::Input;
        if is_input && plan.is_placed(tensor) && !plan.graph.is_selector(tensor) {
            used.push(tensor);
        }
    }
    used
}

#[cfg(test)]
mod tests;
