//! One step on one device: the interpreter's actions performed on an executor, alone or together
//! with other ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::rng::Key;
use crate::base::{BucketId, Rank, SegmentId, TensorId};
use crate::collective::{Collective, CollectiveKind};
use crate::device::DeviceError;
use crate::exec::{BucketTensor, Executor, Input, PassContext};
use crate::faults::{Fault, Faults, Point};
use crate::graph::{PassKind, Update, UpdateRange};
use crate::kernels::RandomContext;
use crate::metrics::Track;
use crate::parallel::{Action, Event, Interpreter, Outcome, Program, Verdict, Vote};

/// An input of a micro-batch, with the values of its rows.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    Float(Vec<f32>),
    Int(Vec<u32>),
}

/// The elements in the order of the dimensions, whatever the array's memory layout.
impl<D: ndarray::Dimension> From<ndarray::Array<f32, D>> for Values {
    fn from(array: ndarray::Array<f32, D>) -> Self {
        Self::Float(array.iter().copied().collect())
    }
}

/// The elements in the order of the dimensions, whatever the array's memory layout.
impl<D: ndarray::Dimension> From<ndarray::Array<u32, D>> for Values {
    fn from(array: ndarray::Array<u32, D>) -> Self {
        Self::Int(array.iter().copied().collect())
    }
}

/// What one micro-batch is made of.
pub type Inputs = Vec<(TensorId, Values)>;

/// Everything that a rank needs for a step.
#[derive(Clone, Debug)]
pub struct StepInput {
    pub step: u64,
    pub rank: Rank,
    pub program: Arc<Program>,
    /// Per micro-batch of the program.
    pub micro_batches: Vec<Inputs>,
    /// The key of the run; the step's is derived from it.
    pub run_key: Key,
    /// The update, if the step is committed.
    pub update: Update,
    /// 0: no clipping.
    pub clip: f64,
    /// For tests.
    pub faults: Faults,
}

/// How a step went.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    pub verdict: Verdict,
    pub outcome: Outcome,
    /// As in [`crate::exec::StepSums::busy`].
    pub busy: Option<f64>,
    /// From the beginning to the end, and how much of that it waited for other ranks.
    pub time: Duration,
    pub waited: Duration,
}

impl StepReport {
    pub fn is_updated(&self) -> bool {
        self.outcome == Outcome::Updated
    }
}

/// The ranks that a step is made with, as one of them sees them.
pub trait Peers {
    /// A step begins: forgets what the last one left.
    fn restart(&mut self);

    /// Begins this rank's part in a collective.
    fn start(
        &mut self,
        device: &mut dyn Executor,
        collective: Collective,
    ) -> Result<(), DeviceError>;

    /// What the program waits for next, for people: a collective or the verdict.
    fn set_awaited(&mut self, awaited: Option<Collective>);

    /// Sends the vote; the answer comes as an event.
    fn vote(&mut self, vote: Vote) -> Result<(), DeviceError>;

    /// What happened; with `wait`, waits until something does, and adds to `waited` how long it
    /// waited for others. `None` only without `wait`.
    fn next_event(
        &mut self,
        device: &mut dyn Executor,
        wait: bool,
        waited: &mut Duration,
    ) -> Result<Option<Event>, DeviceError>;

    /// Whether the sums of gradients come from the ranks together, not from the device.
    fn sum_gradients(&self) -> bool;

    /// Where what this rank does is traced, and what its device does.
    fn tracks(&self) -> (&Track, &Track);
}

/// No other ranks.
#[derive(Default)]
pub struct NoPeers {
    vote: Option<Vote>,
    track: Track,
    device: Track,
}

impl NoPeers {
    /// Traced on the lanes of its driver and of its device.
    pub fn traced(track: Track, device: Track) -> Self {
        Self { vote: None, track, device }
    }
}

impl Peers for NoPeers {
    fn restart(&mut self) {
        self.vote = None;
    }

    fn start(&mut self, _: &mut dyn Executor, _: Collective) -> Result<(), DeviceError> {
        Ok(())
    }

    fn set_awaited(&mut self, _: Option<Collective>) {}

    fn vote(&mut self, vote: Vote) -> Result<(), DeviceError> {
        self.vote = Some(vote);
        Ok(())
    }

    fn next_event(
        &mut self,
        _: &mut dyn Executor,
        _: bool,
        _: &mut Duration,
    ) -> Result<Option<Event>, DeviceError> {
        Ok(self.vote.take().map(|vote| Event::Verdict(Verdict::from_votes(&[vote]))))
    }

    fn sum_gradients(&self) -> bool {
        false
    }

    fn tracks(&self) -> (&Track, &Track) {
        (&self.track, &self.device)
    }
}

/// Runs one step: forward and backward of every micro-batch, the verdict, the update.
pub fn run_step(
    device: &mut dyn Executor,
    input: &StepInput,
    peers: &mut dyn Peers,
) -> Result<StepReport, DeviceError> {
    let mut interpreter = Interpreter::new(&input.program);
    let mut performer = Performer::new(device, input, peers);
    performer.inject_fault(Point::Forward)?;
    loop {
        while let Some(action) = interpreter.poll_action() {
            if let Action::Finish(outcome) = action {
                return performer.finish(outcome);
            }
            performer.perform(action)?;
            while let Some(event) = performer.next_event(false)? {
                let is_over = matches!(event, Event::Fault(_));
                interpreter.handle(event);
                if is_over {
                    break;
                }
            }
        }
        if let Some(event) = performer.next_event(true)? {
            interpreter.handle(event);
        }
    }
}

/// What performs the actions of a step, and what it has learned so far.
struct Performer<'a> {
    device: &'a mut dyn Executor,
    input: &'a StepInput,
    peers: &'a mut dyn Peers,
    random: RandomContext,
    verdict: Option<Verdict>,
    busy: Option<f64>,
    started: Instant,
    waited: Duration,
    /// Points that come once, though several actions lead there.
    passed: Vec<Point>,
}

impl<'a> Performer<'a> {
    fn new(device: &'a mut dyn Executor, input: &'a StepInput, peers: &'a mut dyn Peers) -> Self {
        let random = RandomContext { step_key: input.run_key.step(input.step), training: true };
        let (started, waited) = (Instant::now(), Duration::ZERO);
        let (verdict, busy, passed) = (None, None, Vec::new());
        Self { device, input, peers, random, verdict, busy, started, waited, passed }
    }

    fn perform(&mut self, action: Action) -> Result<(), DeviceError> {
        match action {
            Action::ZeroGradients => self.device.begin_step(),
            Action::Load { micro_batch } => {
                load(self.device, &self.input.micro_batches[micro_batch], 0)
            }
            Action::Run { segment, micro_batch } => self.run(segment, micro_batch),
            Action::Start(collective) => {
                if collective.kind == CollectiveKind::ReduceScatter {
                    self.fault_once(Point::Backward)?;
                }
                self.peers.start(self.device, collective)
            }
            Action::Wait(collective) => {
                self.peers.set_awaited(Some(collective));
                match collective.kind {
                    CollectiveKind::ReduceScatter => self.fault_once(Point::Reduce),
                    CollectiveKind::AllGather => Ok(()),
                }
            }
            Action::Finish(_) => Ok(()),
            Action::Vote => self.vote(),
            Action::Update { bucket } => self.update(bucket),
        }
    }

    fn run(&mut self, segment: SegmentId, micro_batch: usize) -> Result<(), DeviceError> {
        let found = &self.device.plan().segments[segment.index()];
        let (nodes, phase, block) = (found.nodes.clone(), found.phase, found.block);
        let rows = self.input.program.micro_batches[micro_batch].rows as usize;
        let pass = PassContext { stash_index: 0, rows, random: self.random };
        let (driver, device) = self.peers.tracks();
        let (name, recorded) = (|| format!("{phase} {block}"), driver.clone());
        let begun = Instant::now();
        let _span = recorded.span(|| format!("record {}", name()));
        let of_device = device.clone();
        self.device.run(nodes, &pass)?;
        if of_device.is_on() {
            let name = name();
            self.device.on_queue_done(Box::new(move || of_device.record_since(|| name, begun)))?;
        }
        Ok(())
    }

    fn vote(&mut self) -> Result<(), DeviceError> {
        self.fault_once(Point::Backward)?;
        self.fault_once(Point::Reduce)?;
        let sums = self.device.finish_step(!self.peers.sum_gradients())?;
        self.busy = sums.busy;
        self.inject_fault(Point::Verdict)?;
        self.peers.set_awaited(None);
        self.peers.vote(Vote {
            rank: self.input.rank,
            loss: sums.loss,
            count: sums.count,
            sum_squares: sums.gradients.iter().map(|(squares, _)| squares).sum(),
            not_finite: sums.gradients.iter().map(|(_, bad)| bad).sum(),
        })
    }

    fn update(&mut self, bucket: BucketId) -> Result<(), DeviceError> {
        // A program updates after its verdict only.
        let Some(verdict) = &self.verdict else { return Ok(()) };
        let totals = verdict.totals();
        let clip = crate::optim::clip_factor(totals.gradient_norm, self.input.clip);
        let owned = self.device.owned(bucket);
        let range = UpdateRange {
            start: owned.start,
            length: owned.len(),
            decay_end: self.device.plan().buckets[bucket.index()].decay_end,
            gradient_scale: (clip / totals.count) as f32,
        };
        if range.length > 0 {
            let _span = self.peers.tracks().0.span(|| format!("update {bucket}"));
            self.device.update(bucket, &self.input.update, &range)?;
        }
        self.inject_fault(Point::Update)
    }

    fn next_event(&mut self, wait: bool) -> Result<Option<Event>, DeviceError> {
        let event = self.peers.next_event(self.device, wait, &mut self.waited)?;
        if let Some(Event::Verdict(verdict)) = &event {
            self.verdict = Some(verdict.clone());
        }
        Ok(event)
    }

    fn finish(&mut self, outcome: Outcome) -> Result<StepReport, DeviceError> {
        self.device.flush()?;
        if outcome == Outcome::Updated {
            self.inject_fault(Point::Gather)?;
        }
        let verdict = self.verdict.take().unwrap_or_else(|| Verdict::from_votes(&[]));
        let (time, waited) = (self.started.elapsed(), self.waited);
        Ok(StepReport { verdict, outcome, busy: self.busy, time, waited })
    }

    fn fault_once(&mut self, point: Point) -> Result<(), DeviceError> {
        if self.passed.contains(&point) {
            return Ok(());
        }
        self.passed.push(point);
        self.inject_fault(point)
    }

    /// Makes what is planned for a point of the step happen on the device.
    fn inject_fault(&mut self, point: Point) -> Result<(), DeviceError> {
        match self.input.faults.at_rank(point, self.input.step, self.input.rank) {
            Some(Fault::Nan) if point == Point::Forward => {
                poison(self.device, BucketTensor::Parameters, |_| f32::NAN)
            }
            Some(Fault::Nan) => poison(self.device, BucketTensor::Gradients, |_| f32::NAN),
            Some(Fault::Flip) => {
                poison(self.device, BucketTensor::Parameters, |v| f32::from_bits(v.to_bits() ^ 1))
            }
            Some(other) => {
                other.of_device().map_or(Ok(()), |injected| self.device.inject_fault(injected))
            }
            None => Ok(()),
        }
    }
}

/// Puts the inputs of a micro-batch into a copy of the stash.
pub fn load(
    device: &mut dyn Executor,
    inputs: &Inputs,
    stash_index: usize,
) -> Result<(), DeviceError> {
    for (tensor, values) in inputs {
        let values = match values {
            Values::Float(values) => Input::Float(values),
            Values::Int(values) => Input::Int(values),
        };
        device.set_input(*tensor, stash_index, values)?;
    }
    Ok(())
}

/// The forward pass without dropout, on inputs that are loaded. Outputs can be read with the
/// returned pass until something else runs.
pub fn forward(device: &mut dyn Executor, rows: usize) -> Result<PassContext, DeviceError> {
    let random = RandomContext { step_key: Key::new(0), training: false };
    let pass = PassContext { stash_index: 0, rows, random };
    let segments: Vec<_> = device.plan().phase(PassKind::Forward).collect();
    for segment in segments {
        let nodes = device.plan().segments[segment.index()].nodes.clone();
        device.run(nodes, &pass)?;
    }
    Ok(pass)
}

/// Changes the first value of the first bucket of a bank: a fault for tests.
fn poison(
    device: &mut dyn Executor,
    bank: BucketTensor,
    change: impl Fn(f32) -> f32,
) -> Result<(), DeviceError> {
    let mut values = device.read_bank(bank, BucketId(0))?;
    values[0] = change(values[0]);
    device.write_bank(bank, BucketId(0), &values)
}
