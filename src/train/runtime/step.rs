//! One step on one device: performs the interpreter's actions on an executor, with or without
//! other ranks.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::defect::defect;
use super::trace_tracks::TraceTracks;
use potluck_core::faults::{Fault, Faults, Point};
use potluck_core::rng::Key;
use potluck_core::{
    BucketId, ChunkId, EdgeId, HostTensor, Position, Rank, ReductionId, Round, SegmentId, TensorId,
    raw,
};
use potluck_graph::{Carried, ParameterKind, PassKind, Update, UpdateRange};
use potluck_kernels::RandomContext;
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{BucketTensor, Executor, LossSums, PassContext, load};
use potluck_parallel::collective::{Collective, CollectiveKind};
use potluck_parallel::{
    Action, Event, GradientSquares, Interpreter, Operation, Outcome, Program, Token, Verdict, Vote,
};

/// Shortest sleep of a device with an injected slowdown.
const SLEEP_MIN: Duration = Duration::from_micros(200);

/// Inputs of one micro-batch.
pub type Inputs = Vec<(TensorId, HostTensor)>;

/// One of [`StepInput::states`] of a micro-batch, with its values for the next step.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NextState {
    pub input: TensorId,
    #[serde(with = "raw")]
    pub values: Vec<f32>,
}

/// Values of all [`StepInput::states`] of one micro-batch for the next step.
pub(crate) type NextStates = Vec<NextState>;

/// Input of one rank for one step.
#[derive(Clone, Debug)]
pub struct StepInput {
    pub round: Round,
    pub rank: Rank,
    pub program: Arc<Program>,
    /// Inputs per micro-batch of the program; empty if the rank's node reads them from its own copy
    /// of the data.
    pub micro_batches: Vec<Inputs>,
    /// State carried into the step, per micro-batch: inputs of the rank's plan. Empty if the model
    /// carries none.
    pub states: Vec<Inputs>,
    /// Random key of the run; the step's key is derived from it.
    pub run_key: Key,
    /// False for a pass without dropout and changes of state.
    pub is_training: bool,
    /// Samples of the step over all ranks, as a weight of statistics in running averages.
    pub samples: usize,
    /// Optimizer update, applied if the verdict is commit.
    pub update: Update,
    /// Fraction by which averages then move to the parameters; `None` without averages.
    pub average_weight: Option<f32>,
    /// Clipping threshold of the gradient norm; 0: no clipping.
    pub clip: f64,
    /// Factor of the gradients, removed by the update: a power of two, 1 in f32.
    pub loss_scale: f32,
    /// Faults to inject, for tests.
    pub faults: Faults,
}

impl StepInput {
    /// Creates the input of a training step of a single rank, without carried states and clipping,
    /// with an update that has no effect, and without faults.
    pub fn new(
        round: Round,
        rank: Rank,
        program: Arc<Program>,
        micro_batches: Vec<Inputs>,
    ) -> Self {
        Self {
            round,
            rank,
            samples: program.samples_end(),
            program,
            micro_batches,
            states: Vec::new(),
            run_key: Key::new(0),
            is_training: true,
            update: Update::Sgd { lr: 0.0, momentum: 0.0, weight_decay: 0.0 },
            average_weight: None,
            clip: 0.0,
            loss_scale: 1.0,
            faults: Faults::none(),
        }
    }

    /// Returns all inputs of a micro-batch.
    pub fn inputs_of(&self, micro_batch: usize) -> Inputs {
        let mut inputs = self.micro_batches[micro_batch].clone();
        if let Some(states) = self.states.get(micro_batch) {
            inputs.extend_from_slice(states);
        }
        inputs
    }

    /// Writes all inputs of a micro-batch.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails.
    pub fn load(&self, device: &mut dyn Executor, micro_batch: usize) -> Result<(), DeviceError> {
        load(device, &self.micro_batches[micro_batch], micro_batch)?;
        if let Some(states) = self.states.get(micro_batch) {
            load(device, states, micro_batch)?;
        }
        Ok(())
    }
}

/// Result of a step on one rank.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct StepReport {
    pub verdict: Verdict,
    pub outcome: Outcome,
    /// Sums of the loss of the rank's samples.
    pub loss: LossSums,
    /// Busy share of the device, as in [`potluck_kernels::exec::StepSums::busy`].
    pub busy: Option<f64>,
    /// Duration of the step; `waits` are the parts of it spent waiting for other ranks.
    pub time: Duration,
    pub waits: StepWaits,
    /// Time in which the rank's ring thread has added and sent values since its last step; zero for
    /// a single rank.
    pub communicated: Duration,
    /// State carried into the next step, per micro-batch.
    pub states: Vec<NextStates>,
}

/// Durations for which a rank has waited for other ranks in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StepWaits {
    /// For collectives: sums of gradients, and parameters.
    pub collectives: Duration,
    /// For tensors of other stages, and for partial sums of a tensor group.
    pub tensors: Duration,
    /// For the verdict, which comes when all ranks have computed.
    pub verdict: Duration,
}

impl StepWaits {
    /// Returns the sum of all waits.
    pub fn sum(&self) -> Duration {
        self.collectives + self.tensors + self.verdict
    }

    /// Returns the waits of the kind of an awaited operation; `None`: the verdict.
    fn of(&mut self, awaited: Option<Token>) -> &mut Duration {
        match awaited.map(|token| token.operation) {
            Some(Operation::Collective(_)) => &mut self.collectives,
            Some(Operation::Receive(_) | Operation::AllReduce(_)) => &mut self.tensors,
            None => &mut self.verdict,
        }
    }
}

impl StepReport {
    pub fn is_updated(&self) -> bool {
        self.outcome == Outcome::Updated
    }

    /// Returns the fraction of the step in which the device was idle, from 0 to 1, by its own
    /// clock. Without a clock, that is the time in which its thread waits for other ranks. This is
    /// exact for the CPU device, which computes on that thread; a GPU may still compute.
    pub fn idle(&self) -> f64 {
        match self.busy {
            Some(busy) => 1.0 - busy,
            None => self.waits.sum().as_secs_f64() / self.time.as_secs_f64(),
        }
    }
}

/// Communication of one rank with the other ranks during a step.
pub trait Peers {
    /// Begins a round: discards the state of the previous one.
    fn restart(&mut self, round: Round);

    /// Starts this rank's part in a collective.
    fn start(
        &mut self,
        device: &mut dyn Executor,
        collective: Collective,
    ) -> Result<(), DeviceError>;

    /// Sends the tensor of an edge for a micro-batch of `rows` rows.
    fn send(
        &mut self,
        device: &mut dyn Executor,
        edge: EdgeId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<(), DeviceError>;

    /// Begins to write the tensor of an edge for a micro-batch of `rows` rows to the device; its
    /// end is returned as an event.
    fn receive(
        &mut self,
        device: &mut dyn Executor,
        edge: EdgeId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<(), DeviceError>;

    /// Begins an all-reduce of a tensor group for a micro-batch of `rows` rows, and the write of
    /// its result; its end is returned as an event.
    fn all_reduce(
        &mut self,
        device: &mut dyn Executor,
        reduction: ReductionId,
        micro_batch: usize,
        rows: usize,
    ) -> Result<(), DeviceError>;

    /// Waits for the readbacks of tensors for other ranks, and sends them: the next actions may
    /// occupy the device's thread for a long time.
    fn send_all(&mut self, _device: &mut dyn Executor) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Sends the vote; the verdict is returned as an event. If the step `updates` parameters, adds
    /// the norms of gradients summed over ranks to the vote.
    fn vote(
        &mut self,
        device: &mut dyn Executor,
        vote: Vote,
        updates: bool,
    ) -> Result<(), DeviceError>;

    /// Returns the next event, if there is one.
    fn poll_event(&mut self, device: &mut dyn Executor) -> Result<Option<Event>, DeviceError>;

    /// Waits for the next event, and adds the time of the wait for other ranks to `waited`. In
    /// traces, the program waits for `awaited`, or for the verdict (`None`).
    fn wait_event(
        &mut self,
        device: &mut dyn Executor,
        awaited: Option<Token>,
        waited: &mut Duration,
    ) -> Result<Event, DeviceError>;

    /// Discards the round: drops its readbacks, also later ones.
    fn discard(&mut self, device: &mut dyn Executor);

    /// Returns the time in which values were added and sent since the last call.
    fn take_communicated(&mut self) -> Duration {
        Duration::ZERO
    }
}

/// Peers of a single rank: none.
#[derive(Debug, Default)]
pub struct NoPeers {
    vote: Option<Vote>,
}

impl Peers for NoPeers {
    fn restart(&mut self, _: Round) {
        self.vote = None;
    }

    fn start(&mut self, _: &mut dyn Executor, _: Collective) -> Result<(), DeviceError> {
        Ok(())
    }

    fn send(
        &mut self,
        _: &mut dyn Executor,
        _: EdgeId,
        _: usize,
        _: usize,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    fn receive(
        &mut self,
        _: &mut dyn Executor,
        _: EdgeId,
        _: usize,
        _: usize,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    fn all_reduce(
        &mut self,
        _: &mut dyn Executor,
        _: ReductionId,
        _: usize,
        _: usize,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    fn vote(&mut self, device: &mut dyn Executor, vote: Vote, _: bool) -> Result<(), DeviceError> {
        self.vote = Some(vote.without_states(device.plan()));
        Ok(())
    }

    fn poll_event(&mut self, _: &mut dyn Executor) -> Result<Option<Event>, DeviceError> {
        Ok(self.vote.take().map(|vote| Event::Verdict(Verdict::from_votes(&[vote]))))
    }

    fn wait_event(
        &mut self,
        device: &mut dyn Executor,
        _: Option<Token>,
        _: &mut Duration,
    ) -> Result<Event, DeviceError> {
        let event = self.poll_event(device)?;
        Ok(event.unwrap_or_else(|| Event::Fault("a single rank waits for others".into())))
    }

    fn discard(&mut self, _: &mut dyn Executor) {}
}

/// Runs one step: forward and backward of every micro-batch, the verdict, the update.
pub fn run_step(
    device: &mut dyn Executor,
    input: &StepInput,
    peers: &mut dyn Peers,
    tracks: &TraceTracks,
) -> Result<StepReport, DeviceError> {
    let mut interpreter = Interpreter::new(&input.program);
    let mut performer = Performer::new(device, input, peers, tracks);
    if !input.round.settles {
        performer.inject_fault(Point::Forward)?;
    }
    loop {
        while let Some(action) = interpreter.poll_action() {
            if let Action::Finish(outcome) = action {
                return performer.finish(outcome);
            }
            performer.perform(action)?;
            while let Some(event) = performer.poll_event()? {
                let is_over = matches!(event, Event::Fault(_));
                performer.report(&mut interpreter, event)?;
                if is_over {
                    break;
                }
            }
        }
        let event = performer.wait_event()?;
        performer.report(&mut interpreter, event)?;
    }
}

/// Performs the actions of a step, with its results so far.
struct Performer<'a> {
    device: &'a mut dyn Executor,
    input: &'a StepInput,
    peers: &'a mut dyn Peers,
    tracks: &'a TraceTracks,
    random: RandomContext,
    /// Operation that the program waits for; `None`: the verdict.
    awaited: Option<Token>,
    verdict: Option<Verdict>,
    /// Sums in the vote of this rank.
    loss: LossSums,
    busy: Option<f64>,
    started: Instant,
    waits: StepWaits,
    /// Last segment of each micro-batch on this rank, if the model carries a state.
    last_segment: Option<SegmentId>,
    /// State after completed micro-batches.
    states: Vec<NextStates>,
    /// Passed fault points; each applies once, though several actions may reach it.
    passed: Vec<Point>,
    /// Time by which the device is still to be slowed down, for tests.
    slowed: Duration,
}

impl<'a> Performer<'a> {
    fn new(
        device: &'a mut dyn Executor,
        input: &'a StepInput,
        peers: &'a mut dyn Peers,
        tracks: &'a TraceTracks,
    ) -> Self {
        let step_key = input.run_key.step(input.round.step);
        Self {
            device,
            input,
            peers,
            tracks,
            random: RandomContext { step_key, training: input.is_training },
            awaited: None,
            verdict: None,
            loss: LossSums::default(),
            busy: None,
            started: Instant::now(),
            waits: StepWaits::default(),
            last_segment: if input.states.is_empty() { None } else { input.program.last_segment() },
            states: vec![NextStates::new(); input.states.len()],
            passed: Vec::new(),
            slowed: Duration::ZERO,
        }
    }

    fn perform(&mut self, action: Action) -> Result<(), DeviceError> {
        match action {
            Action::ZeroGradients => self.device.begin_step(),
            Action::Load { micro_batch } => self.input.load(self.device, micro_batch),
            Action::Run { segment, micro_batch } => self.run(segment, micro_batch),
            Action::Start(collective) => {
                if collective.kind == CollectiveKind::ReduceScatter {
                    self.fault_once(Point::Backward)?;
                }
                self.peers.start(self.device, collective)
            }
            Action::Send { edge, micro_batch } => {
                self.fault_once(Point::Send)?;
                let rows = self.rows(micro_batch);
                self.peers.send(self.device, edge, micro_batch, rows)
            }
            Action::Receive { edge, micro_batch } => {
                self.fault_once(Point::Recv)?;
                self.awaited = Some(Token::receive(edge, micro_batch));
                let rows = self.rows(micro_batch);
                self.peers.receive(self.device, edge, micro_batch, rows)
            }
            Action::AllReduce { reduction, micro_batch } => {
                self.fault_once(Point::Recv)?;
                self.awaited = Some(Token::all_reduce(reduction, micro_batch));
                let rows = self.rows(micro_batch);
                self.peers.all_reduce(self.device, reduction, micro_batch, rows)
            }
            Action::Wait(token) => {
                self.awaited = Some(token);
                match token.operation {
                    Operation::Collective(Collective {
                        kind: CollectiveKind::ReduceScatter,
                        ..
                    }) => self.fault_once(Point::Reduce),
                    Operation::Collective(_) | Operation::Receive(_) | Operation::AllReduce(_) => {
                        Ok(())
                    }
                }
            }
            Action::Finish(_) => Ok(()),
            Action::Vote => self.vote(),
            Action::Update { bucket } => self.update(bucket),
        }
    }

    fn rows(&self, micro_batch: usize) -> usize {
        self.input.program.micro_batches[micro_batch].rows as usize
    }

    fn run(&mut self, segment: SegmentId, micro_batch: usize) -> Result<(), DeviceError> {
        let found = &self.device.plan().segments[segment.index()];
        let nodes = found.nodes.clone();
        let phase = found.phase;
        let block = found.block;
        let rows = self.rows(micro_batch);
        let pass = PassContext {
            micro_batch,
            rows,
            loss_scale: self.input.loss_scale,
            random: self.random,
        };
        let TraceTracks { driver, device, .. } = self.tracks;
        let name = || format!("{phase} {block} of micro-batch {micro_batch}");
        let recorded = driver.clone();
        let begun = Instant::now();
        let _span = recorded.span(|| format!("record {}", name()));
        let of_device = device.clone();
        self.device.run(nodes, &pass)?;
        self.slow_down(begun)?;
        if of_device.is_on() {
            let name = name();
            self.device.on_queue_done(Box::new(move || of_device.record_since(|| name, begun)))?;
        }
        if self.last_segment == Some(segment) {
            self.states[micro_batch] = read_states(self.device, &pass)?;
        }
        Ok(())
    }

    /// Makes a pass that began at this time take longer, if such a fault is planned.
    fn slow_down(&mut self, begun: Instant) -> Result<(), DeviceError> {
        let StepInput { round, rank, ref faults, .. } = *self.input;
        let factor = faults.slowdown(round.step, rank);
        if factor == 1.0 {
            return Ok(());
        }
        // Waits for the device.
        self.device.loss()?;
        self.slowed += begun.elapsed().mul_f64(factor - 1.0);
        // Short sleeps take longer than they should: they add up to one.
        if self.slowed >= SLEEP_MIN {
            let asleep = Instant::now();
            thread::sleep(self.slowed);
            self.slowed = self.slowed.saturating_sub(asleep.elapsed());
        }
        Ok(())
    }

    fn vote(&mut self) -> Result<(), DeviceError> {
        if self.input.program.begins_with_gathers() {
            self.inject_fault_of(self.input.round.step - 1, Point::Gather)?;
        }
        self.fault_once(Point::Backward)?;
        self.fault_once(Point::Reduce)?;
        let norms = self.input.program.unreduced(self.device.plan());
        self.peers.send_all(self.device)?;
        let sums = self.device.finish_step(&norms)?;
        self.loss = sums.loss;
        self.busy = sums.busy;
        self.inject_fault(Point::Verdict)?;
        self.awaited = None;
        // This rank is alone in the groups of these buckets.
        let mut gradients = Vec::with_capacity(norms.len());
        for (bucket, (squares, not_finite)) in norms.iter().zip(&sums.gradients) {
            gradients.push(GradientSquares {
                position: Position(0),
                bucket: *bucket,
                chunk: ChunkId(0),
                squares: *squares,
                not_finite: *not_finite,
            });
        }
        let vote = Vote {
            round: self.input.round,
            rank: self.input.rank,
            loss: self.loss.loss,
            count: self.loss.count,
            terms: self.loss.terms.clone(),
            loss_scale: f64::from(self.input.loss_scale),
            gradients,
        };
        let updates = self.input.program.updates();
        self.peers.vote(self.device, vote, updates)
    }

    fn update(&mut self, bucket: BucketId) -> Result<(), DeviceError> {
        // A program updates only after its verdict.
        let Some(verdict) = &self.verdict else { return Ok(()) };
        let totals = verdict.totals();
        let planned = &self.device.plan().buckets[bucket.index()];
        // No program updates a frozen bucket.
        let Some(update) = planned.update(&self.input.update) else { return Ok(()) };
        let scale = if planned.kind.is_state() {
            1.0 / self.input.samples as f64
        } else {
            let clip = potluck_graph::optim::clip_factor(totals.gradient_norm, self.input.clip);
            clip / (totals.count * f64::from(self.input.loss_scale))
        };
        let decay_end = planned.decay_end;
        let keeps_averages = self.device.plan().options.averages;
        let is_averaged = keeps_averages && planned.kind == ParameterKind::Trained;
        let average_weight = self.input.average_weight.filter(|_| is_averaged);
        let owned = self.device.owned(bucket);
        let range = UpdateRange {
            start: owned.start,
            length: owned.len(),
            decay_end,
            gradient_scale: scale as f32,
            rounding: None,
        };
        if range.length > 0 {
            let _span = self.tracks.driver.span(|| format!("update {bucket}"));
            let step_key = self.random.step_key;
            let ranges = self.device.plan().update_ranges(bucket, &update, range, step_key);
            for range in ranges {
                self.device.update(bucket, &update, &range)?;
            }
            if let Some(weight) = average_weight {
                self.device.average(bucket, owned, weight)?;
            }
        }
        self.inject_fault(Point::Update)
    }

    fn poll_event(&mut self) -> Result<Option<Event>, DeviceError> {
        self.peers.poll_event(self.device)
    }

    fn wait_event(&mut self) -> Result<Event, DeviceError> {
        let waited = self.waits.of(self.awaited);
        self.peers.wait_event(self.device, self.awaited, waited)
    }

    fn report(&mut self, interpreter: &mut Interpreter, event: Event) -> Result<(), DeviceError> {
        if let Event::Verdict(verdict) = &event {
            self.verdict = Some(verdict.clone());
        }
        interpreter.handle(event).map_err(|error| defect(self.device, &error))
    }

    fn finish(&mut self, outcome: Outcome) -> Result<StepReport, DeviceError> {
        self.device.flush()?;
        match outcome {
            // If the step leaves its all-gathers, the next one reaches the point, because they
            // overwrite the shards of other ranks.
            Outcome::Updated if !self.input.program.leaves_gathers() => {
                self.inject_fault(Point::Gather)?;
            }
            Outcome::Updated | Outcome::Skipped => {}
            Outcome::Discarded(_) => self.peers.discard(self.device),
        }
        let verdict = self.verdict.take().unwrap_or_else(|| Verdict::from_votes(&[]));
        Ok(StepReport {
            verdict,
            outcome,
            loss: std::mem::take(&mut self.loss),
            busy: self.busy,
            time: self.started.elapsed(),
            waits: self.waits,
            communicated: self.peers.take_communicated(),
            states: std::mem::take(&mut self.states),
        })
    }

    fn fault_once(&mut self, point: Point) -> Result<(), DeviceError> {
        if self.passed.contains(&point) {
            return Ok(());
        }
        self.passed.push(point);
        self.inject_fault(point)
    }

    /// Injects the fault planned for a point of the step.
    fn inject_fault(&mut self, point: Point) -> Result<(), DeviceError> {
        self.inject_fault_of(self.input.round.step, point)
    }

    /// Injects the fault planned for a point of some step.
    fn inject_fault_of(&mut self, step: u64, point: Point) -> Result<(), DeviceError> {
        match self.input.faults.at_rank(point, step, self.input.rank) {
            Some(Fault::Nan) if point == Point::Forward => {
                poison(self.device, BucketTensor::Parameters, |_| f32::NAN)
            }
            Some(Fault::Nan) => poison(self.device, BucketTensor::Gradients, |_| f32::NAN),
            Some(Fault::Flip) => {
                poison(self.device, BucketTensor::Parameters, |v| f32::from_bits(v.to_bits() ^ 1))
            }
            Some(other) => match other.of_device() {
                Some(injected) => self.device.inject_fault(injected),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }
}

/// Reads the states after a micro-batch that the device computes, and waits for them.
///
/// # Errors
/// Returns [`DeviceError`] if the device fails.
pub(crate) fn read_states(
    device: &mut dyn Executor,
    pass: &PassContext,
) -> Result<NextStates, DeviceError> {
    let plan = device.plan();
    let mut here: Vec<Carried> = Vec::new();
    for carried in &plan.graph.carried {
        if plan.computes(carried.output) {
            here.push(*carried);
        }
    }
    let mut states = NextStates::new();
    for Carried { input, output } in here {
        states.push(NextState { input, values: device.read(output, pass)? });
    }
    Ok(states)
}

/// Context of a forward pass of `rows` samples without dropout.
pub(crate) fn inference_pass(rows: usize) -> PassContext {
    let random = RandomContext { step_key: Key::new(0), training: false };
    PassContext { micro_batch: 0, rows, loss_scale: 1.0, random }
}

/// Runs the forward pass without dropout on loaded inputs. Outputs can be read with the returned
/// context until the device runs another pass.
pub fn forward(device: &mut dyn Executor, rows: usize) -> Result<PassContext, DeviceError> {
    forward_without(device, rows, None)
}

/// Runs the pass of [`forward`], but without one of the blocks.
pub fn forward_without(
    device: &mut dyn Executor,
    rows: usize,
    left_out: Option<u32>,
) -> Result<PassContext, DeviceError> {
    let pass = inference_pass(rows);
    let plan = device.plan();
    let segments = plan.phase(PassKind::Forward).map(|id| &plan.segments[id.index()]);
    let segments = segments.filter(|segment| Some(segment.block) != left_out);
    let nodes: Vec<_> = segments.map(|segment| segment.nodes.clone()).collect();
    for nodes in nodes {
        device.run(nodes, &pass)?;
    }
    Ok(pass)
}

/// Injects a fault for tests: changes the first value of the first updated bucket that a bucket
/// tensor holds.
fn poison(
    device: &mut dyn Executor,
    bucket_tensor: BucketTensor,
    change: impl Fn(f32) -> f32,
) -> Result<(), DeviceError> {
    let plan = device.plan();
    let held = plan.updated_and_held().next();
    let Some(bucket) = held else { return Ok(()) };
    let mut values = device.read_bucket(bucket_tensor, bucket)?;
    values[0] = change(values[0]);
    device.write_bucket(bucket_tensor, bucket, &values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_parallel::verdict::Totals;

    #[test]
    fn a_device_is_idle_by_its_clock_or_while_its_thread_waits() {
        let totals = Totals { loss: 1.0, count: 1.0, terms: Vec::new(), gradient_norm: 1.0 };
        let report = |busy| StepReport {
            verdict: Verdict::Commit(totals.clone()),
            outcome: Outcome::Updated,
            loss: LossSums { loss: 1.0, count: 1.0, terms: Vec::new() },
            busy,
            time: Duration::from_secs(4),
            waits: StepWaits {
                collectives: Duration::from_secs(2),
                tensors: Duration::ZERO,
                verdict: Duration::from_secs(1),
            },
            communicated: Duration::ZERO,
            states: Vec::new(),
        };
        assert_eq!((report(None).idle(), report(Some(0.875)).idle()), (0.75, 0.125));
    }
}
