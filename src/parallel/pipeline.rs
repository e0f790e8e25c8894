//! Programs of pipelines: a model cut into stages and its stages into tensors, alone or beside data
//! parallelism.
//!
//! `D` pipelines of `K` stages run their parts of the batch. A stage holds one model chunk, a run
//! of consecutive blocks, or several of them: chunk `c` is on stage `c % K`. A stage has one rank,
//! or a tensor group of `T`, which divide its tensors and all-reduce what they compute. The
//! programs differ from those of data parallelism in the order of their segments, which a
//! [`PipelineSchedule`] gives, and in the tensors that they send, receive and reduce; each bucket
//! is reduced between the ranks that hold it.

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
use potluck_graph::{Node, PassKind, Plan, PlanPart, Reduction, Role, crossings};

/// Tensors of all-reduces, each of a micro-batch, that a rank may have sent and others not read
/// yet, for each micro-batch that a stage runs at a time: a rank begins the next all-reduce when it
/// has what the others have sent for the one before.
const REDUCTIONS_IN_FLIGHT: usize = 2;
/// Micro-batches that a tensor group runs at a time, if it has so many and is the only stage of its
/// pipeline: while the sum of one travels, its devices compute the other.
pub const OVERLAPPED: usize = 2;

/// One pipeline: its ranks, and the blocks of its model chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineRanks {
    /// By stage: the ranks of its tensor group, as many for each.
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

    /// Returns true if the only stage has a tensor group, which runs two micro-batches at a time if
    /// it has so many.
    pub fn is_paired(&self) -> bool {
        self.tensor_ranks() > 1 && self.chunks.len() == 1
    }

    /// Returns all ranks: by stage, then in the order of the tensor group.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + Clone {
        self.groups.iter().flatten().copied()
    }

    /// Returns the ranks with their stages and their places in the tensor group.
    fn places(&self) -> impl Iterator<Item = (usize, usize, Rank)> {
        let of_stage = |(stage, group): (usize, &Vec<Rank>)| {
            let of_group = group.clone().into_iter().enumerate();
            of_group.map(move |(tensor, rank)| (stage, tensor, rank))
        };
        self.groups.iter().enumerate().flat_map(of_stage)
    }

    /// Returns the stage of a model chunk.
    pub(crate) fn stage_of_chunk(&self, chunk: usize) -> usize {
        chunk % self.stages()
    }

    /// Returns the blocks of a stage's model chunks, in forward order.
    pub fn chunks_of(&self, stage: usize) -> Vec<Range<u32>> {
        chunks_of_stage(&self.chunks, self.stages(), stage).cloned().collect()
    }

    /// Returns by block the stage that holds it.
    pub fn stage_of_block(&self) -> Vec<u32> {
        let of_chunk = |(chunk, blocks): (usize, &Range<u32>)| {
            vec![self.stage_of_chunk(chunk) as u32; blocks.len()]
        };
        self.chunks.iter().enumerate().flat_map(of_chunk).collect()
    }

    /// Returns by block true if a stage holds it.
    pub(crate) fn blocks_of(&self, stage: usize) -> Vec<bool> {
        self.stage_of_block().iter().map(|of| *of as usize == stage).collect()
    }
}

/// Returns the blocks of the model chunks that a stage of so many has, in forward order.
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
    /// Plans of what each rank of a tensor group computes of the whole graph, for the most rows of
    /// a micro-batch: of one rank, all of it.
    pub plans: &'a [Arc<Plan>],
    pub pipelines: &'a [PipelineRanks],
    /// Samples of each pipeline.
    pub shares: &'a [Share],
    pub schedule: PipelineSchedule,
    /// True if reductions start while backward passes still run.
    pub overlap: bool,
    /// The most elements of a message.
    pub piece_max: usize,
    /// Least number of micro-batches of an activation that may be on their way at a time, for
    /// forward passes outside of training.
    pub in_flight_min: usize,
}

impl PipelineRequest<'_> {
    /// Returns the plan of the first rank of a tensor group, which has the buckets of all.
    pub fn plan(&self) -> &Plan {
        &self.plans[0]
    }

    /// Returns the number of ranks.
    fn world(&self) -> usize {
        self.pipelines.iter().map(|pipeline| pipeline.ranks().count()).sum()
    }
}

/// Programs of all ranks of pipelines, with what they need.
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
    /// end all ranks report the sums of their losses. They run on the plans of training, or on
    /// those of a forward graph.
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
    // A bucket belongs to at least one block, so it has a rank in every pipeline, and no rank is
    // listed twice.
    let group = |ranks: &Vec<Rank>| RankGroup::new(ranks).unwrap_or_else(|_| RankGroup::all(1));
    BucketGroups::new(world, ranks.iter().map(group).collect())
}

/// Returns the edges between the stages of all pipelines: each rank of a tensor group has the whole
/// tensor, and sends it to the rank in its place.
fn edges_between_stages(request: &PipelineRequest) -> Vec<Edge> {
    let mut edges = Vec::new();
    for (pipeline, share) in request.pipelines.iter().zip(request.shares) {
        let count = cut(*share, request.pipelines.len()).len();
        for (tensor, plan) in request.plans.iter().enumerate() {
            let graph = &plan.graph;
            for crossing in crossings(graph, &pipeline.stage_of_block()) {
                let (from, to) = (crossing.from as usize, crossing.to as usize);
                let shape = shape_of(request, pipeline, count);
                // The earlier of the two stages runs at most so many micro-batches ahead, or all of
                // them, if it waits for no gradients.
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

/// Returns true if a stage has a backward pass: not all of its parameters, and of those before
/// them, are frozen.
fn has_backward(plan: &Plan, pipeline: &PipelineRanks, stage: usize) -> bool {
    let blocks = pipeline.blocks_of(stage);
    let mut backward = plan.segments.iter().filter(|of| of.phase != PassKind::Forward);
    backward.any(|segment| blocks[segment.block as usize])
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
                let segments = (0..plan.segments.len() as u32).map(SegmentId);
                let held = segments.filter(|id| blocks[plan.segments[id.index()].block as usize]);
                of_ranks.push(held.filter_map(|id| reduction_of(plan, id)).collect::<Vec<_>>());
            }
            let count = of_ranks[0].len();
            let are_alike = of_ranks.iter().all(|own| own.len() == count);
            assert!(are_alike, "the ranks of a tensor group all-reduce the same");
            for nth in 0..count {
                let id = ReductionId(reductions.len() as u32);
                let mut parts = Vec::new();
                for ((plan, of_rank), from) in request.plans.iter().zip(&of_ranks).zip(group) {
                    let (_, node) = of_rank[nth];
                    let mut own = Vec::new();
                    for input in &node.inputs {
                        let tensor = plan.graph.root(*input);
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
                }
                reductions.push(GroupReduction { kind: of_ranks[0][nth].0, parts });
            }
        }
    }
    reductions
}

/// Returns the reduction with which a segment ends, if it does, and its node.
fn reduction_of(plan: &Plan, segment: SegmentId) -> Option<(Reduction, &Node)> {
    let nodes = plan.segments[segment.index()].nodes.clone();
    let last = plan.graph.nodes[nodes].last()?;
    Some((last.op.reduction()?, last))
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
    /// Plan of what the rank's place in a tensor group computes of the whole graph.
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
    /// Returns the segments of the stage's work, in order.
    fn segments_of(&self, work: StageWork) -> Vec<SegmentId> {
        segments_of(self.plan, &self.pipeline.chunks_of(self.stage), work)
    }

    /// Returns the edges of the rank by segment, given the segments of a micro-batch in order.
    fn edges_by_segment(&self, order: &[SegmentId]) -> SegmentEdges {
        let plan = self.plan;
        let mut by_segment = SegmentEdges::default();
        for (index, edge) in self.edges.edges.iter().enumerate() {
            let touches = |segment: &&SegmentId, reads: bool| {
                let nodes = &plan.graph.nodes[plan.segments[segment.index()].nodes.clone()];
                let tensors = nodes.iter().flat_map(|n| if reads { &n.inputs } else { &n.outputs });
                tensors.into_iter().any(|tensor| plan.graph.root(*tensor) == edge.tensor)
            };
            let id = EdgeId(index as u32);
            if let Some(reduction) = edge.reduction {
                let reduces = |segment: &&SegmentId| {
                    touches(segment, false) && reduction_of(plan, **segment).is_some()
                };
                if edge.from == self.rank
                    && let Some(segment) = order.iter().find(reduces)
                {
                    let empty = || (reduction, Vec::new());
                    by_segment.reduced.entry(*segment).or_insert_with(empty).1.push(id);
                }
                continue;
            }
            if edge.leads_to(self.rank)
                && let Some(first) = order.iter().find(|segment| touches(segment, true))
            {
                by_segment.received.entry(*first).or_default().push(id);
            }
            if edge.from == self.rank
                && let Some(writer) = order.iter().rfind(|segment| touches(segment, false))
            {
                by_segment.sent.entry(*writer).or_default().push(id);
            }
        }
        by_segment
    }

    /// Returns the instructions of all work of a training step, without those of collectives.
    fn training(&self, batches: &[MicroBatch]) -> Vec<Instruction> {
        let shape = shape_of(self.request, self.pipeline, batches.len());
        // Stages compute other micro-batches while one travels to the next stage, which would wait
        // longer for what is computed two at a time.
        if self.pipeline.is_paired() {
            return self.lower(&in_pairs(batches.len()), true);
        }
        self.lower(&stage_work(self.request.schedule, shape, self.stage), false)
    }

    /// Returns the instructions of a forward pass of so many micro-batches.
    fn forward(&self, micro_batches: usize) -> Vec<Instruction> {
        let chunks = self.pipeline.chunks_of(self.stage).len();
        let pass = StagePass::Forward;
        // In rounds of as many micro-batches as there are stages, which no stage waits for in a
        // cycle: a later chunk of a round needs only earlier chunks of the same round.
        let stages = self.pipeline.stages();
        let rounds = (0..micro_batches).step_by(stages);
        let work = rounds.flat_map(|first| {
            (0..chunks).flat_map(move |chunk| {
                let round = first..(first + stages).min(micro_batches);
                round.map(move |micro_batch| StageWork { pass, chunk, micro_batch })
            })
        });
        self.lower(&work.collect::<Vec<_>>(), false)
    }

    /// Returns the instructions of work. With `overlaps`, two neighbours that differ in their
    /// micro-batch only run at a time: one computes while what the other has computed is reduced.
    fn lower(&self, work: &[StageWork], overlaps: bool) -> Vec<Instruction> {
        let Some(first) = work.first() else { return Vec::new() };
        let of_first = work.iter().filter(|other| other.micro_batch == first.micro_batch);
        let order: Vec<SegmentId> = of_first.flat_map(|work| self.segments_of(*work)).collect();
        let edges = self.edges_by_segment(&order);
        let mut instructions = Vec::new();
        let mut loaded = Vec::new();
        let mut work = work.iter().copied().peekable();
        while let Some(now) = work.next() {
            let is_alike = |next: &StageWork| {
                (next.pass, next.chunk) == (now.pass, now.chunk)
                    && next.micro_batch != now.micro_batch
            };
            let beside = work.next_if(|next| overlaps && is_alike(next));
            let mut lanes = Vec::new();
            for work in [Some(now), beside].into_iter().flatten() {
                let micro_batch = work.micro_batch;
                if !loaded.contains(&micro_batch) {
                    loaded.push(micro_batch);
                    instructions.push(Instruction::Load { micro_batch });
                }
                lanes.push(self.sections(work, &edges).into_iter());
            }
            // Lanes run the same segments, so that all have as many sections.
            debug_assert!(lanes.iter().all(|lane| lane.len() == lanes[0].len()));
            while let Some(sections) =
                lanes.iter_mut().map(Iterator::next).collect::<Option<Vec<_>>>()
            {
                instructions.extend(sections.into_iter().flatten());
            }
        }
        instructions
    }

    /// Returns the instructions of a unit of work, in sections of which all but the first begin
    /// with an all-reduce of what the one before has computed and sent.
    fn sections(&self, work: StageWork, edges: &SegmentEdges) -> Vec<Vec<Instruction>> {
        let micro_batch = work.micro_batch;
        let mut sections = vec![Vec::new()];
        for segment in self.segments_of(work) {
            let of = |list: &HashMap<SegmentId, Vec<EdgeId>>| {
                list.get(&segment).cloned().unwrap_or_default().into_iter()
            };
            let mut now = sections.pop().unwrap_or_default();
            let received = of(&edges.received);
            now.extend(received.map(|edge| Instruction::Recv { edge, micro_batch }));
            now.push(Instruction::Run { segment, micro_batch });
            if let Some((reduction, parts)) = edges.reduced.get(&segment) {
                let sent = parts.iter().map(|part| Instruction::Send { edge: *part, micro_batch });
                now.extend(sent);
                sections.push(now);
                now = vec![Instruction::AllReduce { reduction: *reduction, micro_batch }];
            }
            now.extend(of(&edges.sent).map(|edge| Instruction::Send { edge, micro_batch }));
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
        let shared = |bucket: &&BucketId| groups.of(**bucket).size() > 1;
        let mut instructions = vec![Instruction::ZeroGradients];
        instructions.extend(self.with_early_reductions(work, &plan, groups));
        let reduce = |bucket: &BucketId| Collective::reduce_scatter(*bucket);
        // In one order on all ranks, which is also that of the early ones: a rank that read back
        // first what another one reads back last would wait for it with its slots taken.
        let mut late: Vec<BucketId> = buckets.iter().filter(shared).copied().collect();
        late.sort_by_key(|bucket| (!self.may_start_early(*bucket, groups), *bucket));
        for start in late.iter().map(|bucket| Instruction::Start(reduce(bucket))) {
            if !instructions.contains(&start) {
                instructions.push(start);
            }
        }
        let waits = buckets.iter().filter(shared);
        instructions.extend(waits.map(|b| Instruction::Wait(Token::of(reduce(b)))));
        instructions.push(Instruction::Verdict);
        for bucket in &buckets {
            instructions.push(Instruction::Update { bucket: *bucket });
            if shared(&bucket) {
                instructions.push(Instruction::Start(Collective::all_gather(*bucket)));
            }
        }
        let gather = |b: &BucketId| Instruction::Wait(Token::of(Collective::all_gather(*b)));
        instructions.extend(buckets.iter().filter(shared).map(gather));
        (Program { micro_batches, instructions }, Arc::new(plan))
    }

    /// Returns true if a bucket is reduced, and its reduction may start before the last segment.
    ///
    /// A bucket that several stages of one pipeline hold is complete at unlike times: in a ring,
    /// the readbacks of the stage that is early would take the slots that its later sends need, so
    /// that its neighbours would wait for each other. It starts behind all sends then, on the ranks
    /// of all pipelines: one with another cut may hold it on one stage, and all ranks start their
    /// reductions in one order. In a star of two, the stage that does not own it sends at once.
    /// What all ranks of a tensor group hold starts late as well: only the first of them computes
    /// the gradients, and its readbacks must not take the slots of the sums that the others wait
    /// for.
    fn may_start_early(&self, bucket: BucketId, groups: &BucketGroups) -> bool {
        let (group, pipelines) = (groups.of(bucket), self.request.pipelines);
        let is_of_one_stage = |pipeline: &PipelineRanks| {
            pipeline.ranks().filter(|rank| group.position(*rank).is_some()).count() == 1
        };
        let is_of_one_place =
            self.pipeline.tensor_ranks() == 1 || self.plan.buckets[bucket.index()].rank.is_some();
        group.size() > 1
            && is_of_one_place
            && (pipelines.len() == 1 || pipelines.iter().all(is_of_one_stage))
    }

    /// Inserts the starts of reductions behind the segments that complete their gradients.
    fn with_early_reductions(
        &self,
        work: Vec<Instruction>,
        plan: &Plan,
        groups: &BucketGroups,
    ) -> Vec<Instruction> {
        let micro_batch_of = |instruction: &Instruction| match instruction {
            Instruction::Run { micro_batch, .. } => Some(*micro_batch),
            _ => None,
        };
        let last = work.iter().filter_map(micro_batch_of).max();
        let mut instructions = Vec::with_capacity(work.len());
        let mut due: Vec<BucketId> = Vec::new();
        for instruction in work {
            // Behind the sends of the segment that completes a bucket.
            let is_of_segment =
                matches!(instruction, Instruction::Send { .. } | Instruction::AllReduce { .. });
            if !is_of_segment {
                let starts = due.drain(..).map(Collective::reduce_scatter);
                instructions.extend(starts.map(Instruction::Start));
            }
            instructions.push(instruction);
            if let Instruction::Run { segment, micro_batch } = instruction
                && self.request.overlap
                && Some(micro_batch) == last
            {
                let completed = plan.segments[segment.index()].completes.iter();
                due.extend(completed.copied().filter(|of| self.may_start_early(*of, groups)));
            }
        }
        instructions
            .extend(due.into_iter().map(Collective::reduce_scatter).map(Instruction::Start));
        instructions
    }
}

/// Returns the work of the only stage of a pipeline, whose tensor group runs two micro-batches at a
/// time: the forward passes of a pair, and then its backward passes.
fn in_pairs(micro_batches: usize) -> Vec<StageWork> {
    let mut work = Vec::with_capacity(2 * micro_batches);
    for first in (0..micro_batches).step_by(OVERLAPPED) {
        let pair = first..(first + OVERLAPPED).min(micro_batches);
        for pass in [StagePass::Forward, StagePass::Backward] {
            work.extend(pair.clone().map(|micro_batch| StageWork { pass, chunk: 0, micro_batch }));
        }
    }
    work
}

/// Returns the segments of a stage's work, in order; `chunks` are the blocks of its model chunks.
fn segments_of(plan: &Plan, chunks: &[Range<u32>], work: StageWork) -> Vec<SegmentId> {
    let blocks = &chunks[work.chunk];
    let passes: &[PassKind] = match work.pass {
        StagePass::Forward => &[PassKind::Forward],
        StagePass::Backward => &[PassKind::BackwardInput, PassKind::BackwardWeight],
        StagePass::BackwardInput => &[PassKind::BackwardInput],
        StagePass::BackwardWeight => &[PassKind::BackwardWeight],
    };
    // The plan's order: forward by block, then backward from the last block.
    let segments = plan.segments.iter().enumerate();
    let of_work = segments
        .filter(|(_, segment)| blocks.contains(&segment.block) && passes.contains(&segment.phase));
    of_work.map(|(index, _)| SegmentId(index as u32)).collect()
}

/// Returns the segments that a stage with these model chunks runs in a training step, each with
/// its micro-batch: what its program runs, without the program. The shape fits the schedule and
/// has the stage.
pub fn stage_runs(
    plan: &Plan,
    chunks: &[Range<u32>],
    schedule: PipelineSchedule,
    shape: PipelineShape,
    stage: usize,
) -> Vec<(SegmentId, usize)> {
    let work = stage_work(schedule, shape, stage);
    let runs = work.into_iter().flat_map(|work| {
        segments_of(plan, chunks, work).into_iter().map(move |id| (id, work.micro_batch))
    });
    runs.collect()
}

/// Returns the segments that instructions run, each with its micro-batch.
pub fn runs(instructions: &[Instruction]) -> Vec<(SegmentId, usize)> {
    let run = |instruction: &Instruction| match *instruction {
        Instruction::Run { segment, micro_batch } => Some((segment, micro_batch)),
        _ => None,
    };
    instructions.iter().filter_map(run).collect()
}

/// Returns the buckets that a rank holds and updates, in the order in which its gradients become
/// final, and last those that no segment completes.
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
    let is_used = |tensor: &TensorId| {
        let is_input = plan.graph.tensor(*tensor).role == Role::Input;
        is_input && plan.is_placed(*tensor) && !plan.graph.is_selector(*tensor)
    };
    plan.graph.inputs.iter().map(|(_, tensor)| *tensor).filter(is_used).collect()
}

#[cfg(test)]
mod tests;
