//! Pipelines of a worker group: forward passes of many micro-batches, which the stages run at the
//! same time, and passes of one micro-batch, segment by segment through the stages and their tensor
//! groups. A device with the whole model is a pipeline of one stage and one rank, which runs its
//! passes alone.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use super::RuntimeError;
use super::step::{Inputs, NextStates, StepInput, forward, forward_without, read_states};
use super::workers::WorkerGroup;
use potluck_core::rng::Key;
use potluck_core::{Rank, SegmentId, TensorId};
use potluck_graph::{Graph, PassKind, Plan, ReducedTensors, Region, TensorLocation};
use potluck_kernels::RandomContext;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{Executor, LossSums, PassContext, load};
use potluck_parallel::planner::laid_out::forward_micro_batches_max;
use potluck_parallel::planner::plans::GroupPlans;
use potluck_parallel::{
    EdgeLayout, MicroBatch, PipelinePrograms, PipelineRanks, PipelineRequest, PipelineSchedule,
    Program, Share,
};

/// Name of the pass of a walk in errors.
const PASS: &str = "a pass through a pipeline";

/// Pipelines of a worker group, with the stages of a model or the whole model on each device.
#[derive(Clone, Debug)]
pub struct ModelPipelines {
    /// Plans of the whole graph's shard on each rank of a tensor group.
    model: GroupPlans,
    /// By pipeline.
    pub stages: Vec<PipelineRanks>,
    /// Samples of each pipeline per step.
    pub shares: Vec<Share>,
    pub schedule: PipelineSchedule,
    pub edges: EdgeLayout,
    /// By pipeline and block: its stage.
    stage_of_block: Vec<Vec<u32>>,
    /// By member of a tensor group and tensor: the block that computes it, if there is one.
    block_of_tensor: Vec<Vec<Option<u32>>>,
}

/// Units of a worker group that compute forward passes independently: devices with the whole model,
/// or pipelines.
#[derive(Clone, Copy)]
pub struct ForwardUnits<'a> {
    pub group: &'a WorkerGroup,
    pub pipelines: &'a ModelPipelines,
}

/// Forward pass without dropout of one micro-batch, and the parts of an output to read. Without
/// parts, the block that computes the output does not run.
#[derive(Clone, Debug)]
pub(crate) struct OutputPass {
    pub rows: usize,
    pub inputs: Inputs,
    pub output: TensorId,
    /// Ranges of the elements of the output.
    pub parts: Vec<Range<usize>>,
}

impl OutputPass {
    /// Runs the pass on a device with the whole model; returns the parts of the output, and the
    /// states after the micro-batch.
    fn run(&self, device: &mut dyn Executor) -> Result<(Vec<f32>, NextStates), DeviceError> {
        load(device, &self.inputs, 0)?;
        let left_out = self.left_out(&device.plan().graph);
        let pass = forward_without(device, self.rows, left_out)?;
        if self.parts.is_empty() {
            return Ok(Default::default());
        }
        let values = device.read_parts(self.output, &self.parts, &pass)?;
        Ok((values, read_states(device, &pass)?))
    }

    /// Block that does not run.
    fn left_out(&self, graph: &Graph) -> Option<u32> {
        if self.parts.is_empty() { graph.block_of(self.output) } else { None }
    }
}

impl ForwardUnits<'_> {
    /// Returns the concatenated values of a tensor for the micro-batches (rows, inputs) of each
    /// unit.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub fn outputs(
        self,
        tensor: TensorId,
        work: Vec<Vec<(usize, Inputs)>>,
    ) -> Result<Vec<f32>, RuntimeError> {
        if self.pipelines.is_divided() {
            let mut values = Vec::new();
            for (pipeline, parts) in work.iter().enumerate() {
                for (rows, inputs) in parts {
                    let found =
                        self.pipelines.output(self.group, pipeline, *rows, inputs, tensor)?;
                    values.extend(found);
                }
            }
            return Ok(values);
        }
        let values = self.group.run_on_all("a prediction", move |rank, device| {
            let mut values = Vec::new();
            for (rows, inputs) in &work[rank.index()] {
                load(device, inputs, 0)?;
                let pass = forward(device, *rows)?;
                values.extend(device.read(tensor, &pass)?);
            }
            Ok(values)
        })?;
        Ok(values.concat())
    }

    /// Runs a pass on one unit; returns the parts of the output, and the states after the
    /// micro-batch. `what` names the pass in errors.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub(crate) fn output_parts(
        self,
        what: &str,
        unit: usize,
        pass: OutputPass,
    ) -> Result<(Vec<f32>, NextStates), RuntimeError> {
        if self.pipelines.is_divided() {
            return self.pipelines.output_parts(self.group, unit, pass);
        }
        let rank = self.pipelines.stages[unit].groups[0][0];
        self.group.run_on(rank, what, move |device: &mut dyn Executor| pass.run(device))
    }

    /// Runs a pass on each unit that has one, and returns the results of
    /// [`ForwardUnits::output_parts`], empty for the others. Devices run at the same time,
    /// pipelines in sequence.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub(crate) fn output_parts_of_all(
        self,
        what: &str,
        passes: Vec<Option<OutputPass>>,
    ) -> Result<Vec<(Vec<f32>, NextStates)>, RuntimeError> {
        if self.pipelines.is_divided() {
            let mut found = Vec::new();
            for (unit, pass) in passes.into_iter().enumerate() {
                found.push(match pass {
                    Some(pass) => self.pipelines.output_parts(self.group, unit, pass)?,
                    None => Default::default(),
                });
            }
            return Ok(found);
        }
        self.group.run_on_all(what, move |rank, device| match &passes[rank.index()] {
            Some(pass) => pass.run(device),
            None => Ok(Default::default()),
        })
    }
}

/// Passes of one micro-batch on a pipeline.
pub struct PipelineWalk<'a> {
    pub pipeline: usize,
    pub passes: &'a [PassKind],
    /// Returns the inputs to load, by rank.
    pub inputs: &'a dyn Fn(Rank) -> Inputs,
    pub pass: PassContext,
    /// Block that does not run.
    pub left_out: Option<u32>,
}

/// Segment that a rank runs in a walk.
#[derive(Clone, Debug)]
struct WalkedSegment {
    /// Place of the rank in its tensor group.
    member: usize,
    rank: Rank,
    nodes: Range<usize>,
    /// Tensors that it reads from another rank.
    foreign: Vec<TensorId>,
    /// All-reduce at its end, with the tensors of this rank.
    reduced: Option<ReducedTensors>,
}

/// Result of the forward pass of one pipeline.
#[derive(Clone, Debug, Default)]
pub struct PipelinePass {
    pub loss: LossSums,
    /// States after each micro-batch, of a model that carries them.
    pub states: Vec<NextStates>,
}

impl ModelPipelines {
    /// Returns the pipelines of a worker group with the stages of a model.
    pub fn new(
        model: GroupPlans,
        stages: Vec<PipelineRanks>,
        shares: Vec<Share>,
        schedule: PipelineSchedule,
        edges: EdgeLayout,
    ) -> Self {
        let stage_of_block = stages.iter().map(PipelineRanks::stage_of_block).collect();
        let block_of_tensor = model.plans.iter().map(|plan| writers(&plan.graph)).collect();
        Self { model, stages, shares, schedule, edges, stage_of_block, block_of_tensor }
    }

    /// Returns the plan of the first rank of a tensor group for all stages.
    pub fn plan(&self) -> &Plan {
        &self.model.plans[0]
    }

    /// Returns the graph of the first rank of a tensor group, which has the inputs and outputs of
    /// all ranks.
    pub fn graph(&self) -> &Graph {
        &self.plan().graph
    }

    /// Returns `ranks` pipelines of one stage each, with the whole model.
    #[cfg(test)]
    pub(crate) fn of_replicas(whole: Arc<Plan>, ranks: usize) -> Self {
        let blocks = whole.graph.blocks.len() as u32;
        let chunks = vec![std::iter::once(0..blocks).collect(); ranks];
        let mesh = potluck_parallel::Mesh::of_pipelines(ranks, 1);
        let outputs = vec![Vec::new()];
        let model = GroupPlans { plans: vec![whole.clone()], outputs };
        let stages = potluck_parallel::planner::arrangement::pipelines_of(mesh, &chunks);
        let rows = whole.options.rows as u32;
        let shares = vec![Share { first: 0, count: rows, micro_batch: rows }; ranks];
        Self::new(model, stages, shares, PipelineSchedule::default(), EdgeLayout::default())
    }

    /// Returns true if a pipeline has several ranks, so that none has the whole model.
    pub fn is_divided(&self) -> bool {
        self.stages.first().is_some_and(|pipeline| pipeline.ranks().count() > 1)
    }

    /// Returns the number of stages of each pipeline.
    pub fn depth(&self) -> usize {
        self.stages.first().map_or(1, PipelineRanks::stages)
    }

    /// Ranks of a pipeline with a block, in the order of the tensor group.
    fn group_of(&self, pipeline: usize, block: u32) -> &[Rank] {
        let stage = self.stage_of_block[pipeline][block as usize];
        &self.stages[pipeline].groups[stage as usize]
    }

    /// Ranks of a pipeline that compute a tensor of the graph of a member of the tensor group, in
    /// the order of the group.
    fn group_with(&self, pipeline: usize, member: usize, tensor: TensorId) -> Option<&[Rank]> {
        let root = self.model.plans[member].graph.root(tensor);
        let block = self.block_of_tensor[member][root.index()]?;
        Some(self.group_of(pipeline, block))
    }

    /// Runs the forward pass without dropout of all pipelines on these micro-batches (rows and
    /// inputs, at most [`forward_micro_batches_max`] per pipeline), and returns the result of each
    /// pipeline.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub fn forward(
        &self,
        group: &mut WorkerGroup,
        work: Vec<Vec<(u32, Inputs)>>,
    ) -> Result<Vec<PipelinePass>, RuntimeError> {
        let mut batches: Vec<Vec<MicroBatch>> = Vec::with_capacity(work.len());
        let mut inputs: Vec<Vec<Inputs>> = Vec::with_capacity(work.len());
        for of_pipeline in work {
            let mut batches_here = Vec::with_capacity(of_pipeline.len());
            let mut inputs_here = Vec::with_capacity(of_pipeline.len());
            // Any slots of the batch will do.
            let mut first = 0;
            for (rows, inputs) in of_pipeline {
                batches_here.push(MicroBatch { first, rows });
                inputs_here.push(inputs);
                first += rows;
            }
            batches.push(batches_here);
            inputs.push(inputs_here);
        }
        let request = PipelineRequest {
            plans: &self.model.plans,
            pipelines: &self.stages,
            shares: &self.shares,
            schedule: self.schedule,
            overlap: false,
            piece_max: self.edges.piece_max,
            in_flight_min: 1,
        };
        let programs = PipelinePrograms::forward(&request, &self.edges, &batches);
        let programs: Vec<Arc<Program>> = programs.into_iter().map(Arc::new).collect();
        let round = group.round().next(group.round().step);
        let mut of_rank = vec![None; programs.len()];
        for (pipeline, stages) in self.stages.iter().enumerate() {
            for rank in stages.ranks() {
                let program = programs[rank.index()].clone();
                let input = StepInput {
                    // Initial states are among the inputs; final ones are reported.
                    states: vec![Inputs::new(); inputs[pipeline].len()],
                    is_training: false,
                    ..StepInput::new(round, rank, program, inputs[pipeline].clone())
                };
                of_rank[rank.index()] = Some(Arc::new(input));
            }
        }
        let inputs: Vec<Arc<StepInput>> = of_rank.into_iter().flatten().collect();
        let reports = group.step(&inputs)?;
        let mut passes = Vec::with_capacity(self.stages.len());
        for stages in &self.stages {
            let mut pass = PipelinePass::default();
            for rank in stages.ranks() {
                let report = &reports[rank.index()];
                pass.loss.add(&report.loss);
                pass.states.resize(report.states.len(), NextStates::new());
                for (all, own) in pass.states.iter_mut().zip(&report.states) {
                    all.extend_from_slice(own);
                }
            }
            passes.push(pass);
        }
        Ok(passes)
    }

    /// Returns the sums of the loss of these micro-batches of each pipeline, (rows, inputs),
    /// without dropout.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub fn losses(
        &self,
        group: &mut WorkerGroup,
        work: Vec<Vec<(usize, Inputs)>>,
    ) -> Result<Vec<LossSums>, RuntimeError> {
        if !self.is_divided() {
            return group.run_on_all("an evaluation", move |rank, device| {
                device.begin_step()?;
                for (rows, inputs) in &work[rank.index()] {
                    load(device, inputs, 0)?;
                    forward(device, *rows)?;
                }
                device.loss()
            });
        }
        let most = forward_micro_batches_max(self.depth());
        let longest = work.iter().map(Vec::len).max().unwrap_or(0);
        let mut sums = vec![LossSums::default(); work.len()];
        for first in (0..longest).step_by(most) {
            let mut now = Vec::new();
            for of_pipeline in &work {
                let mut batches = Vec::new();
                for (rows, inputs) in of_pipeline.iter().skip(first).take(most) {
                    batches.push((*rows as u32, inputs.clone()));
                }
                now.push(batches);
            }
            let passed = self.forward(group, now)?;
            for (sum, PipelinePass { loss, .. }) in sums.iter_mut().zip(passed) {
                sum.add(&loss);
            }
        }
        Ok(sums)
    }

    /// Runs the forward pass without dropout of one micro-batch on one pipeline, and returns the
    /// values of an output.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub fn output(
        &self,
        group: &WorkerGroup,
        pipeline: usize,
        rows: usize,
        inputs: &Inputs,
        output: TensorId,
    ) -> Result<Vec<f32>, RuntimeError> {
        let all = 0..rows * self.width_of(output) * self.output_rows(output);
        let parts = std::iter::once(all).collect();
        let pass = OutputPass { rows, inputs: inputs.clone(), output, parts };
        Ok(self.output_parts(group, pipeline, pass)?.0)
    }

    /// Runs a pass like [`ModelPipelines::output`]; returns the parts of the output, and the states
    /// after the micro-batch.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    fn output_parts(
        &self,
        group: &WorkerGroup,
        pipeline: usize,
        pass: OutputPass,
    ) -> Result<(Vec<f32>, NextStates), RuntimeError> {
        let left_out = pass.left_out(self.graph());
        let OutputPass { rows, inputs, output, parts } = pass;
        let random = RandomContext { step_key: Key::new(0), training: false };
        let pass = PassContext { micro_batch: 0, rows, loss_scale: 1.0, random };
        let passes = &[PassKind::Forward];
        let walk = PipelineWalk { pipeline, passes, inputs: &|_| inputs.clone(), pass, left_out };
        self.walk(group, walk, |device, nodes, pass| {
            device.run(nodes, pass)?;
            Ok(None::<()>)
        })?;
        if parts.is_empty() {
            return Ok(Default::default());
        }
        let Some(ranks) = self.group_with(pipeline, 0, output) else {
            let why = format!("no stage computes {output}");
            return Err(RuntimeError::Defect(why));
        };
        let places = OutputPlaces::of(&self.columns_of(output), &parts);
        let mut values = vec![0.0; parts.iter().map(Range::len).sum()];
        for (rank, own) in ranks.iter().zip(places.ranks) {
            if own.is_empty() {
                continue;
            }
            let (ranges, own): (Vec<_>, Vec<_>) = own.into_iter().unzip();
            let read = group.run_on(*rank, "reading an output", move |device| {
                device.read_parts(output, &ranges, &pass)
            })?;
            let mut read = &read[..];
            for place in own {
                let (now, rest) = read.split_at(place.len());
                values[place].copy_from_slice(now);
                read = rest;
            }
        }
        let mut states = NextStates::new();
        if !self.graph().carried.is_empty() {
            for rank in self.stages[pipeline].ranks() {
                let of_rank = group
                    .run_on(rank, "reading the states", move |device| read_states(device, &pass))?;
                states.extend(of_rank);
            }
        }
        Ok((values, states))
    }

    /// Returns the ranges of the last dimension of an output by the rank of a tensor group that
    /// computes them. Ranges of all ranks are listed only for the first.
    fn columns_of(&self, output: TensorId) -> Vec<Vec<Range<usize>>> {
        let graph = self.graph();
        let root = graph.root(output);
        let index = graph.outputs.iter().position(|(_, id)| graph.root(*id) == root);
        let mut columns = Vec::new();
        for outputs in &self.model.outputs {
            let own = match index.and_then(|index| outputs.get(index)) {
                Some(own) => own.clone(),
                None => std::iter::once(0..graph.tensor(output).shape.last()).collect(),
            };
            columns.push(if columns.contains(&own) { Vec::new() } else { own });
        }
        columns
    }

    /// The last dimension of an output over all ranks of a tensor group.
    fn width_of(&self, output: TensorId) -> usize {
        self.columns_of(output).iter().flatten().map(|range| range.end).max().unwrap_or(0)
    }

    fn output_rows(&self, output: TensorId) -> usize {
        let shape = &self.graph().tensor(output).shape;
        shape.elements(1) / shape.last().max(1)
    }

    /// Runs passes of a walk, after loading the inputs of each rank. Each segment runs on the ranks
    /// with its block: tensors of other stages are first copied to its device, and all-reduces of a
    /// tensor group follow it. `visit` performs the nodes of a segment. Its first result ends the
    /// walk and is returned, with the rank.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub fn walk<T, F>(
        &self,
        group: &WorkerGroup,
        walk: PipelineWalk,
        visit: F,
    ) -> Result<Option<(Rank, T)>, RuntimeError>
    where
        T: Send + 'static,
        F: Fn(&mut dyn Executor, Range<usize>, &PassContext) -> Result<Option<T>, DeviceError>
            + Clone
            + Send
            + 'static,
    {
        let PipelineWalk { pipeline, passes, inputs, pass, left_out } = walk;
        for rank in self.stages[pipeline].ranks() {
            let inputs = inputs(rank);
            group.run_on(rank, PASS, move |device| load(device, &inputs, pass.micro_batch))?;
        }
        let order = self.walk_order(pipeline, passes, left_out);
        let mut crossing = CrossingTensors::of(&order);
        let mut received: Vec<(TensorId, Rank)> = Vec::new();
        for segments in &order {
            let mut runs: HashMap<Rank, WalkedSegment> = HashMap::new();
            for segment in segments {
                let rank = segment.rank;
                for &tensor in &segment.foreign {
                    if received.contains(&(tensor, rank)) {
                        continue;
                    }
                    received.push((tensor, rank));
                    crossing.write(group, segment.member, tensor, rank, pass)?;
                }
                runs.insert(rank, segment.clone());
            }
            let visited = self.run_segments(group, &runs, pass, visit.clone())?;
            if visited.is_some() {
                return Ok(visited);
            }
            for segment in segments {
                let graph = &self.model.plans[segment.member].graph;
                crossing.read(group, graph, segment, pass)?;
            }
        }
        Ok(None)
    }

    /// Runs segments on the ranks of a tensor group at the same time, followed by their all-reduce,
    /// if they end with one. Returns the first result of `visit` in the order of ranks, with the
    /// rank.
    fn run_segments<T, F>(
        &self,
        group: &WorkerGroup,
        runs: &HashMap<Rank, WalkedSegment>,
        pass: PassContext,
        visit: F,
    ) -> Result<Option<(Rank, T)>, RuntimeError>
    where
        T: Send + 'static,
        F: Fn(&mut dyn Executor, Range<usize>, &PassContext) -> Result<Option<T>, DeviceError>
            + Clone
            + Send
            + 'static,
    {
        if runs.len() == 1
            && let Some((rank, run)) = runs.iter().next()
        {
            // A single rank of a stage has no all-reduce.
            let nodes = run.nodes.clone();
            let visited = group.run_on(*rank, PASS, move |device| visit(device, nodes, &pass))?;
            return Ok(visited.map(|result| (*rank, result)));
        }
        let of_ranks = runs.clone();
        let ended = group.run_on_all(PASS, move |rank, device| {
            let Some(run) = of_ranks.get(&rank) else { return Ok((None, Vec::new())) };
            let visited = visit(device, run.nodes.clone(), &pass)?;
            let mut parts = Vec::new();
            for tensor in run.reduced.iter().flat_map(|reduced| &reduced.sent) {
                parts.push(device.read(*tensor, &pass)?);
            }
            Ok((visited, parts))
        })?;
        let mut parts = Vec::new();
        let mut first = None;
        for (rank, (visited, of_rank)) in (0..).map(Rank).zip(ended) {
            first = first.or(visited.map(|result| (rank, result)));
            if runs.contains_key(&rank) {
                parts.push(of_rank);
            }
        }
        let kind = runs.values().find_map(|run| run.reduced.as_ref()).map(|reduced| reduced.kind);
        let Some(kind) = kind.filter(|_| first.is_none()) else { return Ok(first) };
        let reduced = Arc::new(kind.reduce(&parts));
        let of_ranks = runs.clone();
        group.run_on_all(PASS, move |rank, device| {
            let Some(run) = of_ranks.get(&rank) else { return Ok(()) };
            let Some(ReducedTensors { results, .. }) = &run.reduced else { return Ok(()) };
            for (&tensor, values) in results.iter().zip(reduced.iter()) {
                let range = 0..values.len();
                let micro_batch = pass.micro_batch;
                device.write_place(&Region::Tensor { tensor, micro_batch, range }, values)?;
            }
            Ok(())
        })?;
        Ok(None)
    }

    /// Returns the segments of passes on a pipeline in the order of execution. Each entry has the
    /// segments that the ranks of a tensor group run at the same time, before an all-reduce. At the
    /// end of a pass a rank may have none.
    fn walk_order(
        &self,
        pipeline: usize,
        passes: &[PassKind],
        left_out: Option<u32>,
    ) -> Vec<Vec<WalkedSegment>> {
        let mut all: Vec<Vec<WalkedSegment>> = Vec::new();
        let mut of_run: Vec<Vec<SegmentId>> = vec![Vec::new(); self.model.plans.len()];
        let first = &self.model.plans[0].segments;
        let mut runs: Vec<(PassKind, u32)> = first.iter().map(|s| (s.phase, s.block)).collect();
        runs.dedup();
        runs.retain(|(phase, block)| passes.contains(phase) && Some(*block) != left_out);
        for run in runs {
            for (plan, own) in self.model.plans.iter().zip(&mut of_run) {
                own.clear();
                for (index, segment) in plan.segments.iter().enumerate() {
                    if (segment.phase, segment.block) == run {
                        own.push(SegmentId(index as u32));
                    }
                }
            }
            let count = of_run.iter().map(Vec::len).max().unwrap_or(0);
            for nth in 0..count {
                let mut segments = Vec::with_capacity(of_run.len());
                for (member, own) in of_run.iter().enumerate() {
                    let segment = own.get(nth).map(|id| self.walked(pipeline, member, *id));
                    segments.extend(segment);
                }
                all.push(segments);
            }
        }
        all
    }

    /// Returns a segment of the member of a tensor group.
    fn walked(&self, pipeline: usize, member: usize, id: SegmentId) -> WalkedSegment {
        let plan = &self.model.plans[member];
        let segment = &plan.segments[id.index()];
        let nodes = segment.nodes.clone();
        let rank = self.group_of(pipeline, segment.block)[member];
        let foreign = self.foreign_inputs(pipeline, member, &nodes, rank);
        WalkedSegment { member, rank, nodes, foreign, reduced: ReducedTensors::of(plan, id) }
    }

    /// Tensors that nodes of a rank read from another rank.
    fn foreign_inputs(
        &self,
        pipeline: usize,
        member: usize,
        nodes: &Range<usize>,
        rank: Rank,
    ) -> Vec<TensorId> {
        let plan = &self.model.plans[member];
        let graph = &plan.graph;
        let mut foreign = Vec::new();
        for node in &graph.nodes[nodes.clone()] {
            for input in &node.inputs {
                let tensor = graph.root(*input);
                if matches!(plan.place(tensor), TensorLocation::Slot(_))
                    && self
                        .group_with(pipeline, member, tensor)
                        .is_some_and(|of| of[member] != rank)
                {
                    foreign.push(tensor);
                }
            }
        }
        foreign
    }
}

/// Tensors of a walk that are read by another stage, by member of the tensor group. They are read
/// from their device directly after their segment, because the plan of the stage does not keep them
/// longer, and written to the other device before the segment that reads them.
struct CrossingTensors {
    values: HashMap<(usize, TensorId), Arc<Vec<f32>>>,
    read_elsewhere: HashSet<(usize, TensorId)>,
}

impl CrossingTensors {
    /// Finds the tensors that cross between the segments of a walk.
    fn of(order: &[Vec<WalkedSegment>]) -> Self {
        let mut read_elsewhere = HashSet::new();
        for WalkedSegment { member, foreign, .. } in order.iter().flatten() {
            read_elsewhere.extend(foreign.iter().map(|tensor| (*member, *tensor)));
        }
        Self { values: HashMap::new(), read_elsewhere }
    }

    /// Reads the crossing tensors of a segment from its rank.
    fn read(
        &mut self,
        group: &WorkerGroup,
        graph: &Graph,
        segment: &WalkedSegment,
        pass: PassContext,
    ) -> Result<(), RuntimeError> {
        let &WalkedSegment { member, rank, ref nodes, .. } = segment;
        for output in graph.nodes[nodes.clone()].iter().flat_map(|node| &node.outputs) {
            let tensor = graph.root(*output);
            if self.read_elsewhere.contains(&(member, tensor)) {
                let values = group.run_on(rank, "reading a tensor of a stage", move |device| {
                    device.read(tensor, &pass)
                })?;
                self.values.insert((member, tensor), Arc::new(values));
            }
        }
        Ok(())
    }

    /// Writes a tensor to a rank whose next segment reads it.
    fn write(
        &self,
        group: &WorkerGroup,
        member: usize,
        tensor: TensorId,
        to: Rank,
        pass: PassContext,
    ) -> Result<(), RuntimeError> {
        let Some(values) = self.values.get(&(member, tensor)).cloned() else {
            return Err(RuntimeError::Defect(format!("{tensor} is read before it is computed")));
        };
        let range = 0..values.len();
        let place = Region::Tensor { tensor, micro_batch: pass.micro_batch, range };
        group.run_on(to, "writing a tensor of a stage", move |device| {
            device.write_place(&place, &values)
        })
    }
}

/// Places of the parts of an output on the ranks of a tensor group.
struct OutputPlaces {
    /// By rank: ranges of its elements, and their places among the elements of all parts.
    ranks: Vec<Vec<(Range<usize>, Range<usize>)>>,
}

impl OutputPlaces {
    /// Returns the places of parts of an output. `columns` has the ranges of the last dimension by
    /// rank.
    fn of(columns: &[Vec<Range<usize>>], parts: &[Range<usize>]) -> Self {
        let width = columns.iter().flatten().map(|range| range.end).max().unwrap_or(1);
        let mut ranks = vec![Vec::new(); columns.len()];
        for (own, found) in columns.iter().zip(&mut ranks) {
            let own_width: usize = own.iter().map(Range::len).sum();
            let mut before = 0;
            for part in parts {
                for row in part.start / width..part.end.div_ceil(width) {
                    let first = part.start.max(row * width) - row * width;
                    let end = part.end.min((row + 1) * width) - row * width;
                    let mut packed = 0;
                    for range in own {
                        let of = range.start.max(first)..range.end.min(end);
                        if of.start < of.end {
                            let start = row * own_width + packed + of.start - range.start;
                            let place = before + row * width + of.start - part.start;
                            found.push((start..start + of.len(), place..place + of.len()));
                        }
                        packed += range.len();
                    }
                }
                before += part.len();
            }
        }
        Self { ranks }
    }
}

/// Returns by tensor the block of the first node that computes it; aliases have none.
fn writers(graph: &Graph) -> Vec<Option<u32>> {
    let mut writers = vec![None; graph.tensors.len()];
    for node in &graph.nodes {
        for output in &node.outputs {
            writers[graph.root(*output).index()].get_or_insert(node.block);
        }
    }
    writers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three rows of five columns: one rank has the columns 0, 1 and 4, the other the rest.
    #[test]
    fn parts_of_an_output_are_gathered_from_the_columns_of_ranks() {
        let columns = [vec![0..2, 4..5], vec![2..3, 3..4]];
        let whole: Vec<usize> = (0..15).collect();
        let of_rank = |own: &Vec<Range<usize>>| -> Vec<usize> {
            let of_row = |row: usize| {
                own.iter().flat_map(move |range| range.clone().map(move |column| 5 * row + column))
            };
            (0..3).flat_map(of_row).collect()
        };
        for parts in [vec![0..0, 0..15], vec![5..10, 1..2], vec![14..15, 0..0, 2..9]] {
            let wanted: Vec<usize> =
                parts.iter().flat_map(|part| whole[part.clone()].iter().copied()).collect();
            let mut found = vec![usize::MAX; wanted.len()];
            let places = OutputPlaces::of(&columns, &parts);
            for (own, ranges) in columns.iter().zip(places.ranks) {
                let values = of_rank(own);
                for (range, place) in ranges {
                    found[place].copy_from_slice(&values[range]);
                }
            }
            assert_eq!(found, wanted, "{parts:?}");
        }
    }
}
