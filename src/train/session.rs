//! Session: opened devices with the state of a model, and the number of steps. A run or a
//! [`Trainer`](super::Trainer) trains with it, and adds the source of samples and the saves.

mod shares;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use super::carried::CarriedStates;
use super::error::TrainError;
use super::loader::LoadedRanks;
use super::loss_scale::{DynamicLossScale, SCALE_MIN};
use super::state::{self, StateTensors};
use crate::checkpoint::{Checkpoint, Meta, NamedTensor, put_averages};
use crate::cost_meter::{CostMeter, MeteredStep};
use crate::runtime::expected_step::ExpectedStep;
use crate::runtime::memory;
use crate::runtime::pipelines::{ForwardUnits, ModelPipelines};
use crate::runtime::placement::shares::held_moments;
use crate::runtime::placement::types::PlacedWorkers;
use crate::runtime::replica_check::{ReplicaMismatch, compare};
use crate::runtime::step::{Inputs, StepInput, StepReport};
use crate::runtime::workers::WorkerGroup;
use potluck_core::Rank;
use potluck_core::faults::{Fault, Faults, Point};
use potluck_core::metrics::{RankRecord, RunCost, StageRecord, StepRecord, Unit};
use potluck_core::rng::Key;
use potluck_data::Sampler;
use potluck_graph::optim::{Optimizer, average_weight};
use potluck_graph::{Plan, Precision};
use potluck_parallel::{Coordinates, Placement, Program, SpreadPrograms, Verdict};
use shares::SessionShares;

/// Options of a session.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    pub optimizer: Optimizer,
    /// Decay of the exponential average of the parameters; 0: none.
    pub ema: f64,
    /// Gradient norm above which gradients are scaled down to it; 0: off.
    pub clip: f64,
    /// Arithmetic of matrix products; if it is mixed, gradients have a dynamic loss scale.
    pub precision: Precision,
    pub seed: u64,
    /// True if measured shares follow the speed of the devices.
    pub follows_speed: bool,
    /// Faults to inject, for tests.
    pub faults: Faults,
}

/// Completed steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepsTaken {
    pub steps: u64,
    /// Steps that updated parameters; skipped ones do not.
    pub updates: u64,
}

impl StepsTaken {
    /// Returns the steps of a checkpoint.
    pub fn of(meta: &Meta) -> Self {
        Self { steps: meta.step, updates: meta.optimizer_step }
    }
}

/// Values for the record of a step that the session does not have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTiming {
    pub lr: f64,
    /// Unit of the counts of steps.
    pub unit: Unit,
    pub batch: u64,
    pub loss_scale: f32,
    pub started: Instant,
}

/// Devices with a model in training.
pub struct Session {
    pub group: WorkerGroup,
    /// Plan of the whole model; buckets are equal on all ranks.
    pub plan: Arc<Plan>,
    /// Programs by rank.
    pub programs: Vec<Arc<Program>>,
    /// By rank: programs of steps that leave their all-gathers to the next step, if any.
    spread: Option<Vec<SpreadPrograms>>,
    /// True while steps may leave their all-gathers to the next one.
    pub(crate) leaves_gathers: bool,
    /// By rank: plan of its part of the model.
    pub(crate) rank_plans: Vec<Arc<Plan>>,
    /// Pipelines of the devices; each has one stage if every rank has the whole model.
    pub pipelines: Arc<ModelPipelines>,
    pub placement: Placement,
    pub taken: StepsTaken,
    pub(crate) loss_scale: DynamicLossScale,
    options: SessionOptions,
    /// Expected step, if the devices were timed.
    expected: Option<ExpectedStep>,
    /// Meter of the steps.
    meter: CostMeter,
    /// Initial states of the next step.
    states: CarriedStates,
    /// Parameters replaced by averages on the devices for an evaluation.
    displaced: Option<Displaced>,
    /// Samples of the ranks, which may change between two steps.
    shares: SessionShares,
}

/// Parameters that averages have displaced from the devices.
struct Displaced {
    parameters: Vec<NamedTensor>,
    /// True if all devices have the averages, false if only some may have them.
    is_whole: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SessionState {
    pub parameters: Vec<NamedTensor>,
    pub moments: Vec<NamedTensor>,
    /// Averages of the parameters; empty without averages, and before the first update.
    pub averages: Vec<NamedTensor>,
}

impl Session {
    /// Creates the session of placed devices, which have no values yet: call
    /// [`Session::initialize`] or [`Session::restore`] first.
    pub fn new(placed: PlacedWorkers, options: SessionOptions) -> Self {
        let (graph, batch) = (&placed.plan.graph, batch_of(&placed.programs));
        let states = CarriedStates::zeros(graph, batch);
        let loss_scale = DynamicLossScale::new(options.precision, graph.loss_rows(batch));
        let shares = SessionShares::of(&placed, options.follows_speed);
        let meter = CostMeter::new(placed.placement.shares(), shares.follow_speed());
        Self {
            group: placed.group,
            plan: placed.plan,
            programs: placed.programs,
            spread: placed.spread,
            leaves_gathers: false,
            rank_plans: placed.plans,
            pipelines: placed.pipelines,
            placement: placed.placement,
            expected: placed.expected,
            meter,
            taken: StepsTaken::default(),
            loss_scale,
            options,
            states,
            displaced: None,
            shares,
        }
    }

    /// Sets carried states to zeros, for the start of new sequences.
    pub fn reset_states(&mut self) {
        self.states.reset();
    }

    /// Sets carried states to zeros if the streams of a sampler begin in the next step.
    pub(crate) fn reset_states_at_beginnings(&mut self, sampler: &Sampler) {
        if sampler.begins_streams(self.taken.steps + 1) {
            self.states.reset();
        }
    }

    /// Initializes the parameters from the seed alone.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    pub fn initialize(&mut self) -> Result<(), TrainError> {
        self.displaced = None;
        let seed = self.options.seed;
        self.group.run_on_all("initialization", move |_, device| device.initialize(seed))?;
        Ok(())
    }

    /// Writes the tensors of a checkpoint to the devices, with zeros for missing moments, and
    /// restores carried states. Returns false and sets these to zeros if they belong to another
    /// batch size or other states.
    ///
    /// # Errors
    /// Returns `TrainError` if the tensors do not fit the model, or if a device fails.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<bool, TrainError> {
        let step = checkpoint.meta.step;
        for rank in (0..self.group.world() as u32).map(Rank) {
            let planned = self.options.faults.at_rank(Point::Restore, step, rank);
            if let Some(fault) = planned.and_then(Fault::of_device) {
                self.group.run_on(rank, "a fault", move |device| device.inject_fault(fault))?;
            }
        }
        let kept = self.options.optimizer.moments();
        let tensors = StateTensors::of(checkpoint);
        state::restore(&self.group, &self.rank_plans, tensors, kept)?;
        self.displaced = None;
        Ok(self.states.restore(&checkpoint.carried))
    }

    /// Reads parameters, moments and averages by name, in the model's order.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails, or if values read back differ from those on the
    /// device.
    pub(crate) fn state(&self) -> Result<SessionState, TrainError> {
        let parameters = self.parameters()?;
        let count = self.options.optimizer.moments();
        let moments = state::moments(&self.group, &self.plan, count)?;
        Ok(SessionState { parameters, moments, averages: self.averages()? })
    }

    /// Reads the parameters by name, in the model's order; see [`state::parameters`].
    ///
    /// # Errors
    /// Returns the errors of [`state::parameters`].
    pub(crate) fn parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        match &self.displaced {
            Some(displaced) => Ok(displaced.parameters.clone()),
            None => state::parameters(&self.group, &self.plan),
        }
    }

    /// Returns true if the session has averages of the parameters, after the first update.
    pub(crate) fn has_averages(&self) -> bool {
        self.options.ema > 0.0 && self.taken.updates > 0
    }

    /// Reads the averages of the parameters by name; empty without averages, and before the first
    /// update.
    fn averages(&self) -> Result<Vec<NamedTensor>, TrainError> {
        if !self.has_averages() {
            return Ok(Vec::new());
        }
        state::averages(&self.group, &self.plan)
    }

    /// Reads the parameters for evaluations: averages replace the parameters that have one.
    ///
    /// # Errors
    /// Returns the errors of [`Session::state`].
    pub(crate) fn evaluated_parameters(&self) -> Result<Vec<NamedTensor>, TrainError> {
        let mut parameters = self.parameters()?;
        put_averages(&mut parameters, self.averages()?);
        Ok(parameters)
    }

    /// Returns true if all devices have averages instead of the parameters.
    pub(crate) fn holds_averages(&self) -> bool {
        self.displaced.as_ref().is_some_and(|displaced| displaced.is_whole)
    }

    /// Replaces the parameters by their averages on all devices, if the session has averages, until
    /// [`Session::put_parameters_back`]. Callers must compare the ranks first, because this makes
    /// them equal.
    ///
    /// # Errors
    /// Returns the errors of [`Session::state`].
    pub(crate) fn put_averages_in_place(&mut self) -> Result<(), TrainError> {
        let averages = self.averages()?;
        if averages.is_empty() {
            return Ok(());
        }
        let parameters = self.parameters()?;
        let displaced = self.displaced.insert(Displaced { parameters, is_whole: false });
        let state = StateTensors {
            parameters: &displaced.parameters,
            averages: &averages,
            ..StateTensors::default()
        };
        state::write_evaluated(&self.group, &self.rank_plans, state)?;
        displaced.is_whole = true;
        Ok(())
    }

    /// Restores the parameters on all devices, if they hold averages instead.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails; the session then keeps the parameters.
    pub(crate) fn put_parameters_back(&mut self) -> Result<(), TrainError> {
        if let Some(displaced) = &mut self.displaced {
            displaced.is_whole = false;
            let parameters = &displaced.parameters;
            let state = StateTensors { parameters, ..StateTensors::default() };
            state::write_evaluated(&self.group, &self.rank_plans, state)?;
        }
        self.displaced = None;
        Ok(())
    }

    /// Returns the states carried into the next step, by name.
    pub fn carried(&self) -> Vec<NamedTensor> {
        self.states.named()
    }

    /// Returns each rank's input for the next step at this learning rate, from the inputs of its
    /// micro-batches.
    pub fn inputs(&self, ranks: Vec<Vec<Inputs>>, lr: f64) -> Vec<Arc<StepInput>> {
        let StepsTaken { steps, updates } = self.taken;
        let round = self.group.round().next(steps + 1);
        let update = self.options.optimizer.update(lr, updates + 1);
        let samples = batch_of(&self.programs);
        let mut inputs = Vec::with_capacity(ranks.len());
        for (rank, micro_batches) in ranks.into_iter().enumerate() {
            let program = self.next_program(rank).clone();
            let mut states = Vec::new();
            if !self.states.is_empty() {
                for part in &program.micro_batches {
                    states.push(self.states.of(part, &self.rank_plans[rank]));
                }
            }
            inputs.push(Arc::new(StepInput {
                states,
                run_key: Key::new(self.options.seed),
                samples,
                update,
                average_weight: average_weight(self.options.ema, updates + 1),
                clip: self.options.clip,
                loss_scale: self.loss_scale.factor(),
                faults: self.options.faults.clone(),
                ..StepInput::new(round, Rank(rank as u32), program, micro_batches)
            }));
        }
        inputs
    }

    fn next_program(&self, rank: usize) -> &Arc<Program> {
        match &self.spread {
            Some(spread) if self.group.is_unsettled() => &spread[rank].next,
            Some(spread) if self.leaves_gathers => &spread[rank].first,
            _ => &self.programs[rank],
        }
    }

    /// Performs the all-gathers left by the last step, if any, after which parameters are the same
    /// on all ranks.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    pub(crate) fn settle(&mut self) -> Result<(), TrainError> {
        let Some(spread) = self.spread.as_ref().filter(|_| self.group.is_unsettled()) else {
            return Ok(());
        };
        let round = self.group.round().settling();
        let mut inputs = Vec::with_capacity(spread.len());
        for (rank, programs) in (0..).map(Rank).zip(spread) {
            let faults = self.options.faults.clone();
            let input = StepInput::new(round, rank, programs.settle.clone(), Vec::new());
            inputs.push(Arc::new(StepInput { faults, ..input }));
        }
        self.group.step(&inputs)?;
        Ok(())
    }

    /// Takes a step, and adjusts the loss scale by its verdict; returns the reports of all ranks.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    pub fn step(&mut self, inputs: &[Arc<StepInput>]) -> Result<Vec<StepReport>, TrainError> {
        self.put_parameters_back()?;
        let reports = self.group.step(inputs)?;
        self.shares.observe(&reports);
        self.taken.steps += 1;
        let verdict = reports.first().map(|report| &report.verdict);
        if let Some(verdict) = verdict {
            self.loss_scale.follow(verdict);
        }
        let is_updated = matches!(verdict, Some(Verdict::Commit(_)));
        self.taken.updates += u64::from(is_updated);
        // A skipped step has no effect: its states may not be finite.
        if is_updated {
            self.carry(&reports)?;
        }
        Ok(reports)
    }

    /// Computes the gradients of the mean loss on the inputs of each rank's micro-batches, by
    /// parameter, before clipping, with the random numbers of the next step. Parameters, moments,
    /// running averages and carried states are unchanged. In mixed precision an overflow halves the
    /// loss scale only for these gradients.
    ///
    /// # Errors
    /// Returns `TrainError` if no target counts, or if a device fails.
    pub fn gradients(&mut self, ranks: Vec<Vec<Inputs>>) -> Result<Vec<NamedTensor>, TrainError> {
        self.put_parameters_back()?;
        self.settle()?;
        let mut inputs = Vec::new();
        for (rank, input) in self.inputs(ranks, 0.0).into_iter().enumerate() {
            let program = Arc::new(self.programs[rank].without_updates());
            let faults = Faults::none();
            let input = StepInput { program, faults, ..Arc::unwrap_or_clone(input) };
            inputs.push(Arc::new(input));
        }
        loop {
            let scale = inputs[0].loss_scale;
            let reports = self.group.step(&inputs)?;
            let totals = reports[0].verdict.totals();
            if totals.count == 0.0 {
                let why = "no target of the batch is a class, and without one there is no gradient";
                return Err(TrainError::InvalidRequest(why.into()));
            }
            let factor = 1.0 / (totals.count * f64::from(scale));
            let mut gradients = state::gradient_sums(&self.group, &self.plan)?;
            for tensor in &mut gradients {
                for value in &mut tensor.values {
                    *value = (f64::from(*value) * factor) as f32;
                }
            }
            let may_overflow = self.options.precision == Precision::Mixed && scale > SCALE_MIN;
            if !may_overflow || gradients.iter().all(NamedTensor::is_finite) {
                return Ok(gradients);
            }
            let round = self.group.round().next(self.taken.steps + 1);
            for input in &mut inputs {
                let input = Arc::make_mut(input);
                input.loss_scale = scale / 2.0;
                input.round = round;
            }
        }
    }

    fn carry(&mut self, reports: &[StepReport]) -> Result<(), TrainError> {
        let mut parts = Vec::new();
        for (program, report) in self.programs.iter().zip(reports) {
            parts.extend(program.micro_batches.iter().zip(&report.states));
        }
        self.states.take(parts.into_iter()).map_err(TrainError::Defect)
    }

    /// Compares the parameters of ranks with the same buckets; returns the differences. With
    /// `repair`, overwrites differing values by the majority's, or without a majority by those of
    /// the rank that updates them.
    ///
    /// # Errors
    /// Returns `TrainError` if a device fails.
    pub fn compare(&self, repair: bool) -> Result<Vec<ReplicaMismatch>, TrainError> {
        Ok(compare(&self.group, &self.plan, repair)?)
    }

    /// Like [`Session::compare`], but requires equal parameters. With `repair`, repairs differences
    /// first, and calls `tell` with a sentence on each.
    ///
    /// # Errors
    /// Returns `TrainError::ReplicaMismatch` for the first rank that differs, the errors of `tell`,
    /// and `TrainError` if a device fails.
    pub(crate) fn require_equal(
        &self,
        repair: bool,
        tell: &mut dyn FnMut(String) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let mut found = self.compare(repair)?;
        let step = self.taken.steps;
        let ranks = &self.placement.ranks;
        if repair && !found.is_empty() {
            let left = self.compare(false)?;
            for ReplicaMismatch { rank, what } in &found {
                if left.iter().any(|mismatch| mismatch.rank == *rank) {
                    continue;
                }
                let device = &ranks[rank.index()].name;
                tell(format!(
                    "{device} ({rank}) did not hold the same parameters as the other ranks after \
                     step {step}: {what}; they were repaired"
                ))?;
            }
            found = left;
        }
        let Some(ReplicaMismatch { rank, what }) = found.into_iter().next() else { return Ok(()) };
        let device = ranks[rank.index()].name.clone();
        Err(TrainError::ReplicaMismatch { rank, device, step, what })
    }

    /// Returns the bytes of the session on the device of each rank.
    pub fn device_bytes(&self) -> Vec<u64> {
        let mut bytes = Vec::with_capacity(self.rank_plans.len());
        for (rank, plan) in self.rank_plans.iter().enumerate() {
            let rank = Rank(rank as u32);
            let moments = held_moments(&self.options.optimizer, &self.group, plan, rank);
            bytes.push(memory::memory(plan, &moments).peak() as u64);
        }
        bytes
    }

    /// Measures a step of `samples` samples for the cost.
    pub fn measure_samples(&mut self, samples: u64, seconds: f64, reports: &[StepReport]) {
        let number = self.taken.steps;
        let step = MeteredStep { number, seconds, unit: Unit::Samples, count: samples };
        self.measure(step, reports);
    }

    /// Measures a step for the cost.
    pub(crate) fn measure(&mut self, step: MeteredStep, reports: &[StepReport]) {
        self.meter.add(step, &self.placement, reports);
    }

    /// Returns the cost of the measured steps on several ranks since their shares last changed;
    /// `None` before there are enough.
    pub fn cost(&self) -> Option<RunCost> {
        self.meter.cost(&self.placement, self.expected.as_ref())
    }

    /// Record of the last step, which began at `timing.started` and includes the wait for its
    /// samples.
    pub(crate) fn step_record(&self, reports: &[StepReport], timing: &StepTiming) -> StepRecord {
        let StepTiming { lr, unit, batch, loss_scale, started } = *timing;
        let report = &reports[Rank(0).index()];
        let seconds = started.elapsed().as_secs_f64();
        let totals = report.verdict.totals();
        let is_mixed = self.options.precision == Precision::Mixed;
        let mut terms = Vec::new();
        for (name, mean) in self.named_terms(&totals.terms) {
            terms.push((Cow::Owned(name), mean));
        }
        let count = match unit {
            Unit::Tokens => totals.count as u64,
            Unit::Samples => batch,
        };
        StepRecord {
            step: self.taken.steps,
            loss: totals.loss,
            terms,
            lr,
            grad_norm: totals.gradient_norm,
            loss_scale: is_mixed.then_some(f64::from(loss_scale)),
            unit,
            count,
            ms: 1e3 * seconds,
            per_s: count as f64 / seconds,
            busy: if reports.len() == 1 { report.busy } else { None },
            ranks: self.rank_records(reports),
            skipped: match &report.verdict {
                Verdict::Skip { reason, .. } => Some(reason.to_string()),
                Verdict::Commit(_) => None,
            },
        }
    }

    /// Metrics of each rank in a step; empty for a single rank.
    fn rank_records(&self, reports: &[StepReport]) -> Vec<RankRecord> {
        let Placement { mesh, ranks, .. } = &self.placement;
        let mut records = Vec::new();
        if ranks.len() == 1 {
            return records;
        }
        for ((rank, placed), report) in mesh.ranks().zip(ranks).zip(reports) {
            let Coordinates { data, pipeline, tensor } = mesh.coordinates(rank);
            let mut stage = None;
            if mesh.is_divided() {
                stage = Some(StageRecord {
                    pipeline: data as u64,
                    stage: pipeline as u64,
                    tensor: (mesh.tensor > 1).then_some(tensor as u64),
                });
            }
            records.push(RankRecord {
                name: placed.name.clone(),
                share: u64::from(placed.share),
                time: report.time,
                waited: report.waits.sum(),
                idle: report.idle(),
                stage,
            });
        }
        records
    }

    /// Ranks whose inputs are loaded here; nodes may read the inputs of their own ranks.
    pub(crate) fn loaded_ranks(&self) -> LoadedRanks {
        LoadedRanks::of(&self.programs, &self.rank_plans)
            .without(|rank| self.group.reads_inputs(rank))
    }

    pub(crate) fn named_terms(&self, terms: &[f64]) -> Vec<(String, f64)> {
        self.plan.graph.loss_terms.iter().cloned().zip(terms.iter().copied()).collect()
    }

    /// Returns the units of the devices that compute forward passes.
    pub fn units(&self) -> ForwardUnits<'_> {
        ForwardUnits { group: &self.group, pipelines: &self.pipelines }
    }
}

fn batch_of(programs: &[Arc<Program>]) -> usize {
    programs.iter().map(|program| program.samples_end()).max().unwrap_or(0)
}
