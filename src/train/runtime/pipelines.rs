//! Pipelines of a worker group: forward passes of many micro-batches, which the stages run at the
//! same time, and passes of one micro-batch, segment by segment through the stages. Devices that
//! hold the whole model are pipelines of one stage: each runs its passes by itself.

use std::ops::Range;
use std::sync::Arc;

use super::RuntimeError;
use super::step::{Inputs, NextStates, StepInput, forward, read_states};
use super::workers::WorkerGroup;
use potluck_core::rng::Key;
use potluck_core::{Rank, SegmentId, TensorId};
use potluck_graph::{Graph, PassKind, Place, Plan, TensorLocation};
use potluck_kernels::RandomContext;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{Executor, PassContext, load};
use potluck_parallel::{
    EdgeLayout, MicroBatch, PipelinePrograms, PipelineRanks, PipelineRequest, PipelineSchedule,
    Program, Share,
};

/// Pipelines of a worker group, which hold a model in parts or, with one stage each, whole.
#[derive(Clone, Debug)]
pub struct ModelPipelines {
    /// Plan of the whole graph.
    pub whole: Arc<Plan>,
    pub stages: Vec<PipelineRanks>,
    /// Samples of each pipeline per step.
    pub shares: Vec<Share>,
    pub schedule: PipelineSchedule,
    pub edges: EdgeLayout,
    /// By pipeline, then by block: the rank that holds it.
    rank_of_block: Vec<Vec<Rank>>,
    /// By tensor: the block that computes it, if one does.
    block_of_tensor: Vec<Option<u32>>,
}

/// The most micro-batches of a forward pass that a pipeline of so many stages runs at once: enough
/// to keep its stages busy most of the time, few enough to bound what is on its way.
pub(crate) fn forward_micro_batches_max(stages: usize) -> usize {
    4 * stages
}

/// Units of a worker group that compute forward passes by themselves: devices that hold the whole
/// model, or pipelines.
#[derive(Clone, Copy)]
pub struct ForwardUnits<'a> {
    pub group: &'a WorkerGroup,
    pub pipelines: &'a ModelPipelines,
}

/// Forward pass without dropout of one micro-batch, of which parts of an output are read.
#[derive(Clone, Debug)]
pub(crate) struct OutputPass {
    pub rows: usize,
    pub inputs: Inputs,
    pub output: TensorId,
    /// Ranges of the elements of the output.
    pub parts: Vec<Range<usize>>,
}

impl OutputPass {
    /// Runs the pass on a device that holds the whole model; returns the parts of the output, and
    /// the states behind the micro-batch.
    fn run(&self, device: &mut dyn Executor) -> Result<(Vec<f32>, NextStates), DeviceError> {
        load(device, &self.inputs, 0)?;
        let pass = forward(device, self.rows)?;
        let values = device.read_parts(self.output, &self.parts, &pass)?;
        Ok((values, read_states(device, &pass)?))
    }
}

impl ForwardUnits<'_> {
    /// Returns the values of a tensor for the micro-batches of each unit, (rows, inputs), one
    /// behind the other.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub fn outputs(
        self,
        tensor: TensorId,
        work: Vec<Vec<(usize, Inputs)>>,
    ) -> Result<Vec<f32>, RuntimeError> {
        if self.pipelines.has_stages() {
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

    /// Runs a pass on one unit; returns the parts of the output, and the states behind the
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
        if self.pipelines.has_stages() {
            return self.pipelines.output_parts(self.group, unit, pass);
        }
        let rank = self.pipelines.stages[unit].ranks[0];
        self.group.run_on(rank, what, move |device: &mut dyn Executor| pass.run(device))
    }

    /// Runs a pass on each unit that has one, and returns what [`ForwardUnits::output_parts`] does,
    /// nothing for the others: devices work at the same time, pipelines one after the other.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub(crate) fn output_parts_of_all(
        self,
        what: &str,
        passes: Vec<Option<OutputPass>>,
    ) -> Result<Vec<(Vec<f32>, NextStates)>, RuntimeError> {
        if self.pipelines.has_stages() {
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

/// Segments that one micro-batch runs on a pipeline.
pub struct PipelineWalk<'a> {
    pub pipeline: usize,
    pub segments: &'a [SegmentId],
    /// Returns the inputs to load, by rank.
    pub inputs: &'a dyn Fn(Rank) -> Inputs,
    pub pass: PassContext,
}

/// Result of the forward pass of one pipeline.
#[derive(Clone, Debug, Default)]
pub struct PipelinePass {
    /// Sum of the losses, and the number of targets that it counts.
    pub loss: (f64, f64),
    /// States behind each micro-batch, of a model that carries them.
    pub states: Vec<NextStates>,
}

impl ModelPipelines {
    /// Returns the pipelines of a worker group that hold the model of a plan in parts.
    pub fn new(
        whole: Arc<Plan>,
        stages: Vec<PipelineRanks>,
        shares: Vec<Share>,
        schedule: PipelineSchedule,
        edges: EdgeLayout,
    ) -> Self {
        let mut rank_of_block = Vec::with_capacity(stages.len());
        for pipeline in &stages {
            let mut ranks = Vec::new();
            for stage in pipeline.stage_of_block() {
                ranks.push(pipeline.ranks[stage as usize]);
            }
            rank_of_block.push(ranks);
        }
        let block_of_tensor = writers(&whole.graph);
        Self { whole, stages, shares, schedule, edges, rank_of_block, block_of_tensor }
    }

    /// Returns the pipelines of one stage each of so many ranks, which all hold the model of a
    /// plan.
    #[cfg(test)]
    pub(crate) fn of_replicas(whole: Arc<Plan>, ranks: usize) -> Self {
        let blocks = whole.graph.blocks.len() as u32;
        let chunks = vec![std::iter::once(0..blocks).collect(); ranks];
        let mesh = potluck_parallel::Mesh::of_pipelines(ranks, 1);
        let stages = crate::runtime::placement::arrangement::pipelines_of(mesh, &chunks);
        let rows = whole.options.rows as u32;
        let shares = vec![Share { first: 0, count: rows, micro_batch: rows }; ranks];
        Self::new(whole, stages, shares, PipelineSchedule::default(), EdgeLayout::default())
    }

    /// Returns true if a pipeline has several stages, so that no rank holds the whole model.
    pub fn has_stages(&self) -> bool {
        self.depth() > 1
    }

    /// Returns the number of stages of each pipeline.
    pub fn depth(&self) -> usize {
        self.stages.first().map_or(1, |pipeline| pipeline.ranks.len())
    }

    /// Returns the rank of a pipeline that holds a block.
    pub(crate) fn rank_of(&self, pipeline: usize, block: u32) -> Rank {
        self.rank_of_block[pipeline][block as usize]
    }

    /// Returns the rank of a pipeline that computes a tensor.
    fn rank_with(&self, pipeline: usize, tensor: TensorId) -> Option<Rank> {
        let block = self.block_of_tensor[self.whole.graph.root(tensor).index()]?;
        Some(self.rank_of(pipeline, block))
    }

    /// Runs the forward pass without dropout of all pipelines on these micro-batches (rows and
    /// inputs, at most [`forward_micro_batches_max`] per pipeline), and returns what came of it by
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
            // Their slots do not matter.
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
            plan: &self.whole,
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
            for rank in &stages.ranks {
                let program = programs[rank.index()].clone();
                let input = StepInput {
                    // What is carried in is among the inputs; what is carried on is reported.
                    states: vec![Inputs::new(); inputs[pipeline].len()],
                    is_training: false,
                    ..StepInput::new(round, *rank, program, inputs[pipeline].clone())
                };
                of_rank[rank.index()] = Some(Arc::new(input));
            }
        }
        let inputs: Vec<Arc<StepInput>> = of_rank.into_iter().flatten().collect();
        let reports = group.step(&inputs)?;
        let mut passes = Vec::with_capacity(self.stages.len());
        for stages in &self.stages {
            let mut pass = PipelinePass::default();
            for rank in &stages.ranks {
                let report = &reports[rank.index()];
                pass.loss.0 += report.loss.0;
                pass.loss.1 += report.loss.1;
                pass.states.resize(report.states.len(), NextStates::new());
                for (all, own) in pass.states.iter_mut().zip(&report.states) {
                    all.extend_from_slice(own);
                }
            }
            passes.push(pass);
        }
        Ok(passes)
    }

    /// Returns the sums of the losses of these micro-batches of each pipeline, (rows, inputs),
    /// without dropout, and the numbers of targets.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    pub fn losses(
        &self,
        group: &mut WorkerGroup,
        work: Vec<Vec<(usize, Inputs)>>,
    ) -> Result<Vec<(f64, f64)>, RuntimeError> {
        if !self.has_stages() {
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
        let mut sums = vec![(0.0, 0.0); work.len()];
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
                *sum = (sum.0 + loss.0, sum.1 + loss.1);
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
        let all = 0..self.whole.graph.tensor(output).shape.elements(rows);
        let parts = std::iter::once(all).collect();
        let pass = OutputPass { rows, inputs: inputs.clone(), output, parts };
        Ok(self.output_parts(group, pipeline, pass)?.0)
    }

    /// Does the same as [`ModelPipelines::output`], and returns parts of the output with the states
    /// behind the micro-batch.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of a device that fails.
    fn output_parts(
        &self,
        group: &WorkerGroup,
        pipeline: usize,
        pass: OutputPass,
    ) -> Result<(Vec<f32>, NextStates), RuntimeError> {
        let OutputPass { rows, inputs, output, parts } = pass;
        let random = RandomContext { step_key: Key::new(0), training: false };
        let pass = PassContext { micro_batch: 0, rows, random };
        let segments: Vec<SegmentId> = self.whole.phase(PassKind::Forward).collect();
        let walk =
            PipelineWalk { pipeline, segments: &segments, inputs: &|_| inputs.clone(), pass };
        self.walk(group, walk, |device, nodes, pass| {
            device.run(nodes, pass)?;
            Ok(None::<()>)
        })?;
        let Some(rank) = self.rank_with(pipeline, output) else {
            let why = format!("no stage computes {output}");
            return Err(RuntimeError::Defect(why));
        };
        let values = group.run_on(rank, "reading an output", move |device| {
            device.read_parts(output, &parts, &pass)
        })?;
        let mut states = NextStates::new();
        if !self.whole.graph.carried.is_empty() {
            for rank in &self.stages[pipeline].ranks {
                let of_rank = group.run_on(*rank, "reading the states", move |device| {
                    read_states(device, &pass)
                })?;
                states.extend(of_rank);
            }
        }
        Ok((values, states))
    }

    /// Runs the segments of a walk, one after the other, each on the stage that holds its block,
    /// after loading the inputs of each rank; what a segment reads of another stage is copied to
    /// its device before. `visit` performs the nodes of a segment. Returns its first result, with
    /// the rank, which ends the walk.
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
        const WHAT: &str = "a pass through a pipeline";
        let PipelineWalk { pipeline, segments, inputs, pass } = walk;
        for rank in &self.stages[pipeline].ranks {
            let inputs = inputs(*rank);
            group.run_on(*rank, WHAT, move |device| load(device, &inputs, pass.micro_batch))?;
        }
        let mut received: Vec<(TensorId, Rank)> = Vec::new();
        for segment in segments {
            let found = &self.whole.segments[segment.index()];
            let nodes = found.nodes.clone();
            let rank = self.rank_of(pipeline, found.block);
            for tensor in self.foreign_inputs(pipeline, &nodes, rank) {
                if received.contains(&(tensor, rank)) {
                    continue;
                }
                received.push((tensor, rank));
                self.copy(group, pipeline, tensor, rank, pass)?;
            }
            let visit = visit.clone();
            let visited = group.run_on(rank, WHAT, move |device| visit(device, nodes, &pass))?;
            if let Some(result) = visited {
                return Ok(Some((rank, result)));
            }
        }
        Ok(None)
    }

    /// Returns the tensors that nodes read on a rank and another rank computes.
    fn foreign_inputs(&self, pipeline: usize, nodes: &Range<usize>, rank: Rank) -> Vec<TensorId> {
        let graph = &self.whole.graph;
        let mut foreign = Vec::new();
        for node in &graph.nodes[nodes.clone()] {
            for input in &node.inputs {
                let tensor = graph.root(*input);
                if matches!(self.whole.place(tensor), TensorLocation::Slot(_))
                    && self.rank_with(pipeline, tensor).is_some_and(|of| of != rank)
                {
                    foreign.push(tensor);
                }
            }
        }
        foreign
    }

    /// Copies a tensor of a micro-batch from the rank that computes it to another one.
    fn copy(
        &self,
        group: &WorkerGroup,
        pipeline: usize,
        tensor: TensorId,
        to: Rank,
        pass: PassContext,
    ) -> Result<(), RuntimeError> {
        let Some(from) = self.rank_with(pipeline, tensor) else { return Ok(()) };
        let values = group.run_on(from, "reading a tensor of a stage", move |device| {
            device.read(tensor, &pass)
        })?;
        let place = Place::Tensor { tensor, micro_batch: pass.micro_batch, range: 0..values.len() };
        group.run_on(to, "writing a tensor of a stage", move |device| {
            device.write_place(&place, &values)
        })
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
