//! Device thread of a virtual rank: performs the actions of an interpreter and of its transfers.

use std::collections::HashMap;
use std::ops::Range;

use super::coordinator_thread::ToCoordinator;
use super::device::{UploadTarget, VirtualRead};
use super::queue::nanos;
use super::report::End;
use super::scenario::SeededBug;
use super::timeline::VirtualTrack;
use super::world::{DriverJob, Event, Simulation, ToDriver, VirtualRank};
use crate::collective::Collective;
use crate::comm::{Closed, Mailbox, PooledBuffer, RingMsg, SharedBuffer};
use crate::transfers::{
    CompletedRead, DeviceMsg, LocalTransfer, PeerTransfers, Read, Response, SLOT_POLL_INTERVAL,
    WaitFor,
};
use crate::{Action, Event as StepEvent, GradientSquares, Interpreter, Outcome, Verdict, Vote};
use potluck_core::{BucketId, ChunkId, EdgePiece, Nanos, Position, Rank};
use potluck_graph::{BucketTensor, Region};

/// Call of the device thread that returns when its device has performed all queued commands.
#[derive(Debug)]
enum Blocked {
    /// The readbacks of tensors that other ranks need, before the vote.
    SendAll,
    /// The sums of the step, for the vote.
    FinishStep,
    /// The addition of the device's gradients to a partial sum.
    Add { chunk: ChunkId, partial: PooledBuffer },
}

/// State of the device thread of a virtual rank.
#[derive(Debug)]
pub(super) struct Driver<'a> {
    /// Interpreter of the current step; `None` between steps.
    interpreter: Option<Interpreter<'a>>,
    pub transfers: PeerTransfers,
    pub inbox: Mailbox<ToDriver>,
    /// Number of pieces of tensors in the mailbox.
    pub pieces: usize,
    /// Pieces that have arrived before the program receives them.
    pub kept: HashMap<EdgePiece, SharedBuffer>,
    /// Next step, or the end of the run.
    pub job: Option<DriverJob>,
    /// Number of steps that are over.
    pub finished: u64,
    blocked: Option<Blocked>,
    pub(crate) free_at: Nanos,
    /// Time of the next wake-up that is queued.
    wake_at: Option<Nanos>,
    /// True while the thread waits for a message.
    pub is_waiting: bool,
    /// Time from which the thread looks for a free readback slot at intervals.
    polls_from: Option<Nanos>,
    /// Number of messages received.
    pub received: u64,
    verdict: Option<Verdict>,
    /// First cause of an abort.
    pub failure: Option<(Rank, String)>,
    /// Display text of the event that the device thread waits for, for violation messages.
    pub(crate) waits_for: String,
}

impl Driver<'_> {
    pub fn new(transfers: PeerTransfers, inbox: Mailbox<ToDriver>) -> Self {
        Self {
            interpreter: None,
            transfers,
            inbox,
            pieces: 0,
            kept: HashMap::new(),
            job: None,
            finished: 0,
            blocked: None,
            free_at: 0,
            wake_at: None,
            is_waiting: true,
            polls_from: None,
            received: 0,
            verdict: None,
            failure: None,
            waits_for: "the first step".into(),
        }
    }

    pub(crate) fn is_between_steps(&self) -> bool {
        self.interpreter.is_none() && self.job.is_none()
    }
}

impl<'a> Simulation<'a> {
    /// Lets the device thread look for messages now, if it waits for one.
    pub(super) fn wake_driver(&mut self, rank: Rank) {
        if self.virtual_ranks[rank.index()].driver.is_waiting {
            self.wake_driver_at(rank, self.queue.now());
        }
    }

    /// Wakes a device thread that polls for a free readback slot when it finds the slot that is
    /// free from `at` on.
    pub(super) fn free_slot(&mut self, rank: Rank, at: Nanos) {
        if let Some(from) = self.virtual_ranks[rank.index()].driver.polls_from {
            let polls = at.saturating_sub(from).div_ceil(SLOT_POLL_INTERVAL).max(1);
            self.wake_driver_at(rank, from + polls * SLOT_POLL_INTERVAL);
        }
    }

    fn wake_driver_at(&mut self, rank: Rank, at: Nanos) {
        let at = at.max(self.queue.now());
        let wake_at = &mut self.virtual_ranks[rank.index()].driver.wake_at;
        if wake_at.is_none_or(|earlier| at < earlier) {
            *wake_at = Some(at);
            self.queue.push(at, Event::Driver(rank));
        }
    }

    /// Runs the device thread until it waits or its device keeps it busy.
    pub(super) fn drive(&mut self, rank: Rank) {
        let now = self.queue.now();
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        if !virtual_rank.drives() {
            return;
        }
        let driver = &mut virtual_rank.driver;
        driver.wake_at = driver.wake_at.filter(|at| *at > now);
        driver.is_waiting = false;
        driver.polls_from = None;
        if now < driver.free_at {
            let free_at = driver.free_at;
            return self.wake_driver_at(rank, free_at);
        }
        if let Some(blocked) = driver.blocked.take()
            && !self.unblock(rank, blocked)
        {
            return;
        }
        while self.advance(rank) {}
    }

    /// Makes one step: begins a job, handles a message, or performs an action. Returns false if the
    /// thread then waits, is busy, or is over.
    fn advance(&mut self, rank: Rank) -> bool {
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        if driver.interpreter.is_none() {
            let job = driver.job.take();
            if job.is_none() {
                driver.is_waiting = true;
                driver.waits_for = "the next step".into();
            }
            return job.is_some_and(|job| self.take_job(rank, job));
        }
        self.forward_readbacks(rank);
        match self.virtual_ranks[rank.index()].driver.inbox.try_recv() {
            Ok(Some(message)) => return self.receive(rank, message),
            Ok(None) => {}
            Err(Closed(why)) => self.report_event(rank, StepEvent::Fault(why)),
        }
        match self.next_action(rank) {
            Some(action) => self.perform(rank, action),
            None => self.wait(rank),
        }
    }

    /// Begins a step, or ends the run. Returns false if the rank is over.
    fn take_job(&mut self, rank: Rank, job: DriverJob) -> bool {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let driver = &mut virtual_rank.driver;
        match job {
            DriverJob::Step(round) => {
                driver.interpreter = Some(Interpreter::new(self.scenario.program(rank, round)));
                driver.transfers.restart(round);
                driver.kept.clear();
                if self.scenario.seeded_bug == Some(SeededBug::RestartsApart) {
                    self.restart_ring(rank, round);
                }
                true
            }
            DriverJob::Over => {
                self.end(rank, End::Completed);
                false
            }
        }
    }

    fn next_action(&mut self, rank: Rank) -> Option<Action> {
        self.virtual_ranks[rank.index()].driver.interpreter.as_mut()?.poll_action()
    }

    pub(super) fn report_event(&mut self, rank: Rank, event: StepEvent) {
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        if let StepEvent::Verdict(verdict) = &event {
            driver.verdict = Some(verdict.clone());
        }
        if let Some(interpreter) = &mut driver.interpreter
            && let Err(error) = interpreter.handle(event)
        {
            self.violations.push(format!("{rank}: {error}"));
        }
    }

    // ---- Waiting ----

    /// Waits for the next readback or a message. Returns false.
    fn wait(&mut self, rank: Rank) -> bool {
        let now = self.queue.now();
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let wait_for = match self.scenario.seeded_bug {
            Some(SeededBug::IgnoresReadbacks) => WaitFor::Message,
            _ => virtual_rank.driver.transfers.wait_for(),
        };
        match (wait_for, virtual_rank.device.next_done_at()) {
            (WaitFor::Readback, Some(done_at)) => self.wake_driver_at(rank, done_at),
            (WaitFor::Readback, None) => {
                virtual_rank.driver.is_waiting = true;
                virtual_rank.driver.polls_from = Some(now);
            }
            (WaitFor::Message, _) => virtual_rank.driver.is_waiting = true,
        }
        false
    }

    /// Keeps the device thread busy until its device has performed all queued commands.
    fn block(&mut self, rank: Rank, blocked: Blocked, until: Nanos) -> bool {
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        driver.blocked = Some(blocked);
        driver.free_at = until;
        self.wake_driver_at(rank, until);
        false
    }

    /// Continues after a call that kept the device thread busy. Returns false if it is busy again.
    fn unblock(&mut self, rank: Rank, blocked: Blocked) -> bool {
        match blocked {
            Blocked::SendAll => {
                self.forward_readbacks(rank);
                return self.finish_step(rank);
            }
            Blocked::FinishStep => self.vote(rank),
            Blocked::Add { chunk, partial } => {
                let round = self.virtual_ranks[rank.index()].driver.transfers.round();
                self.hand_to_ring(rank, RingMsg::Added { round, chunk, partial });
            }
        }
        true
    }

    /// Waits for the sums of the step, after the readbacks of tensors that other ranks need.
    /// Returns false.
    fn finish_step(&mut self, rank: Rank) -> bool {
        let now = self.queue.now();
        let VirtualRank { driver, device, .. } = &mut self.virtual_ranks[rank.index()];
        if driver.transfers.has_sends()
            && let Some(done_at) = device.next_done_at()
        {
            return self.block(rank, Blocked::SendAll, done_at.max(now));
        }
        let idle_at = device.idle_at().max(now);
        self.block(rank, Blocked::FinishStep, idle_at)
    }

    // ---- Actions ----

    /// Performs an action. Returns false if the device thread is busy then, or has ended.
    fn perform(&mut self, rank: Rank, action: Action) -> bool {
        if let Some(takes) = self.takes(rank, &action) {
            self.queue_command(rank, &action, takes);
        }
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        match action {
            Action::ZeroGradients => {
                let step = virtual_rank.driver.transfers.round().step;
                virtual_rank.device.model.begin_step(self.scenario.is_not_finite(rank, step));
            }
            Action::Start(collective) => self.start(rank, collective),
            Action::Wait(token) => virtual_rank.driver.waits_for = token.to_string(),
            Action::Vote => return self.finish_step(rank),
            Action::Finish(outcome) => return self.finish(rank, outcome),
            Action::Send { edge, micro_batch } => self.send_tensor(rank, edge, micro_batch),
            Action::Receive { edge, micro_batch } => self.receive_tensor(rank, edge, micro_batch),
            Action::AllReduce { reduction, micro_batch } => {
                self.begin_all_reduce(rank, reduction, micro_batch);
            }
            Action::Load { .. } | Action::Run { .. } | Action::Update { .. } => {}
        }
        true
    }

    /// Time that the device needs for an action; `None` if it has no part in it.
    fn takes(&mut self, rank: Rank, action: &Action) -> Option<Nanos> {
        let costs = &self.scenario.costs[rank.index()];
        let seconds = match *action {
            Action::Load { .. } => costs.load_s,
            Action::Run { segment, micro_batch } => {
                let cost = costs.segments[segment.index()];
                let rows = self.scenario.programs[rank.index()].micro_batches[micro_batch].rows;
                cost.fixed_s + f64::from(rows) * cost.row_s
            }
            Action::Update { bucket } => {
                self.owned(rank, bucket).len() as f64 * costs.update_element_s
            }
            _ => return None,
        };
        Some(nanos(seconds) + self.jitter())
    }

    fn owned(&self, rank: Rank, bucket: BucketId) -> Range<usize> {
        match self.virtual_ranks[rank.index()].positions.of(bucket) {
            Some(position) => self.scenario.layout.shard(bucket, position),
            None => 0..0,
        }
    }

    /// Queues a command on the device. Its effect on values counts for all commands after it.
    fn queue_command(&mut self, rank: Rank, action: &Action, takes: Nanos) {
        if let Action::Update { .. } = action {
            let step = self.virtual_ranks[rank.index()].driver.transfers.round().step;
            self.check_committed(rank, step, "updates");
        }
        if let Action::Load { micro_batch } | Action::Run { micro_batch, .. } = *action {
            self.use_memory(rank, action, micro_batch);
        }
        let now = self.queue.now();
        let part = &self.scenario.parts[rank.index()];
        let shard = match *action {
            Action::Update { bucket } => self.owned(rank, bucket),
            _ => 0..0,
        };
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let step = virtual_rank.driver.transfers.round().step;
        let device = &mut virtual_rank.device;
        let mut needs = vec![UploadTarget::Parameters];
        match *action {
            Action::Load { micro_batch } if part.has_loss => {
                device.model.count(step, virtual_rank.program.micro_batches[micro_batch]);
            }
            Action::Run { segment, micro_batch } => {
                let buckets = &part.adds_to[segment.index()];
                let samples = virtual_rank.program.micro_batches[micro_batch];
                device.model.run(step, samples, segment, buckets);
                needs.push(UploadTarget::Tensors);
            }
            Action::Update { bucket } => {
                needs = vec![UploadTarget::Gradients];
                if let Some(verdict) = &virtual_rank.driver.verdict {
                    device.model.update(bucket, shard, verdict);
                }
            }
            _ => {}
        }
        let span = device.run(now, takes, &needs);
        match *action {
            Action::Run { segment, micro_batch } => {
                self.timeline.add_run(rank, span, (segment, micro_batch));
            }
            _ => self.timeline.add(rank, VirtualTrack::Device, span, || name(action)),
        }
    }

    fn vote(&mut self, rank: Rank) {
        let virtual_rank = &self.virtual_ranks[rank.index()];
        let round = virtual_rank.driver.transfers.round();
        let (loss, count) = virtual_rank.device.model.loss();
        let gradients = self.alone(rank);
        let vote = Vote { round, rank, loss, count, terms: Vec::new(), loss_scale: 1.0, gradients };
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        virtual_rank.driver.waits_for = "the verdict".into();
        match virtual_rank.driver.transfers.complete_vote(vote, true) {
            Ok(vote) => {
                self.voted[rank.index()] = round.step;
                self.send_to_coordinator(ToCoordinator::Vote(vote));
            }
            Err(error) => self.violations.push(format!("{rank}: {error}")),
        }
    }

    /// Squares of the gradients that no other rank holds.
    fn alone(&self, rank: Rank) -> Vec<GradientSquares> {
        let Some(plan) = &self.scenario.parts[rank.index()].plan else { return Vec::new() };
        let virtual_rank = &self.virtual_ranks[rank.index()];
        let mut gradients = Vec::new();
        for bucket in virtual_rank.program.unreduced(plan) {
            let (squares, not_finite) = virtual_rank.device.model.squares(bucket);
            gradients.push(GradientSquares {
                position: Position(0),
                bucket,
                chunk: ChunkId(0),
                squares,
                not_finite,
            });
        }
        gradients
    }

    fn finish(&mut self, rank: Rank, outcome: Outcome) -> bool {
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        driver.interpreter = None;
        let discarded = match outcome {
            Outcome::Updated | Outcome::Skipped => {
                driver.finished += u64::from(!driver.transfers.round().settles);
                None
            }
            Outcome::Discarded(why) => Some(why),
        };
        if discarded.is_some() {
            self.drain(rank);
        }
        let failure = self.virtual_ranks[rank.index()].driver.failure.take();
        self.send_to_coordinator(ToCoordinator::Finished { rank, discarded });
        if let Some((failed, why)) = failure {
            self.end(rank, End::Failed { rank: failed, why });
            return false;
        }
        true
    }

    /// Takes the completed readbacks of a discarded step from the device.
    fn drain(&mut self, rank: Rank) {
        let now = self.queue.now();
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let transfers = &mut virtual_rank.driver.transfers;
        transfers.discard();
        while let Some(read) = virtual_rank.device.next_readback(now) {
            match transfers.complete(&read.place) {
                Ok(CompletedRead::Send(_) | CompletedRead::Discard) => {}
                other => self.violations.push(format!("{rank} drains {other:?}")),
            }
        }
    }

    // ---- Transfers ----

    /// Starts the rank's part in a collective.
    fn start(&mut self, rank: Rank, collective: Collective) {
        let now = self.queue.now();
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let transfers = &mut virtual_rank.driver.transfers;
        let started = match self.scenario.seeded_bug {
            Some(SeededBug::ReadsByPosition) => {
                let chunks = self.scenario.layout.chunks_of(collective.bucket);
                let chunks = chunks.map(|index| ChunkId(index as u32)).collect();
                transfers.start_in_order(collective.kind, chunks)
            }
            _ => transfers.start(collective),
        };
        for transfer in started {
            let virtual_rank = &mut self.virtual_ranks[rank.index()];
            match transfer {
                LocalTransfer::Read(read) => {
                    let (tensor, chunk) = virtual_rank.driver.transfers.source(read);
                    let place = Region::bucket(tensor, chunk.bucket, chunk.range.clone());
                    virtual_rank.device.start_readback(now, place, Vec::new());
                }
                LocalTransfer::KeepOnDevice(read) => self.ready(rank, read, None),
            }
        }
    }

    /// Sends all completed readbacks to the ring thread.
    pub(super) fn forward_readbacks(&mut self, rank: Rank) {
        let now = self.queue.now();
        loop {
            let virtual_rank = &mut self.virtual_ranks[rank.index()];
            for span in virtual_rank.device.record_copies(now) {
                self.timeline.add(rank, VirtualTrack::ReadBack, span, || "a place".into());
            }
            if self.scenario.seeded_bug == Some(SeededBug::SwapsReadbacks) {
                virtual_rank.device.swap_readbacks();
            }
            let Some(readback) = virtual_rank.device.next_readback(now) else { return };
            let transfers = &mut virtual_rank.driver.transfers;
            match transfers.complete(&readback.place) {
                Ok(CompletedRead::Forward(read)) => self.ready(rank, read, Some(readback)),
                Ok(CompletedRead::Send(piece)) => {
                    let round = transfers.round();
                    self.hand_to_ring(rank, RingMsg::Send { round, piece, readback });
                }
                Ok(CompletedRead::Discard) => {}
                Err(error) => return self.violations.push(format!("{rank}: {error}")),
            }
        }
    }

    fn ready(&mut self, rank: Rank, read: Read, readback: Option<VirtualRead>) {
        let Read { round, kind, chunk } = read;
        self.hand_to_ring(rank, RingMsg::Ready { round, kind, chunk, readback });
    }

    /// Handles a message of the ring thread or the coordinator. Returns false if the device
    /// thread is busy then.
    fn receive(&mut self, rank: Rank, message: ToDriver) -> bool {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        virtual_rank.driver.received += 1;
        let is_piece = matches!(message, DeviceMsg::Piece { .. });
        virtual_rank.driver.pieces -= usize::from(is_piece);
        match virtual_rank.driver.transfers.handle(message) {
            Ok(Response::Write { tensor, chunk, values }) => {
                self.write(rank, tensor, chunk, &values);
            }
            Ok(Response::Add { chunk, partial }) => return self.add(rank, chunk, partial),
            Ok(Response::Event(event)) => self.report_event(rank, event),
            Ok(Response::WritePiece { piece, values, event }) => {
                self.write_piece(rank, &piece, &values);
                self.report_received(rank, event);
            }
            Ok(Response::Keep { piece, values }) => {
                drop(virtual_rank.driver.kept.insert(piece, values));
            }
            Ok(Response::Reduce { piece, values, reduction }) => {
                let micro_batch = piece.micro_batch;
                virtual_rank.driver.kept.insert(piece, values);
                self.all_reduce(rank, reduction, micro_batch);
            }
            Ok(Response::None) => {}
            Err(error) => self.violations.push(format!("{rank}: {error}")),
        }
        true
    }

    fn write(&mut self, rank: Rank, tensor: BucketTensor, id: ChunkId, values: &[f32]) {
        let now = self.queue.now();
        let chunk = self.scenario.layout.chunk(id);
        if tensor == BucketTensor::Parameters {
            let round = self.virtual_ranks[rank.index()].driver.transfers.round();
            // With spread all-gathers, these are the parameters of the previous step.
            let is_before = self.scenario.spread.is_some() && !round.settles;
            self.check_committed(rank, round.step - u64::from(is_before), "takes parameters");
        }
        let device = &mut self.virtual_ranks[rank.index()].device;
        match tensor {
            BucketTensor::Parameters => {
                device.model.set_parameters(chunk.bucket, chunk.range.clone(), values);
            }
            _ => device.model.set_gradients(chunk.bucket, chunk.range.clone(), values),
        }
        let span = device.write(now, tensor.into(), chunk.range.len());
        self.timeline.add(rank, VirtualTrack::Upload, span, || chunk.to_string());
    }

    /// Adds the device's gradients to a partial sum: an upload, the addition, a readback, after all
    /// queued commands.
    fn add(&mut self, rank: Rank, id: ChunkId, mut partial: PooledBuffer) -> bool {
        let now = self.queue.now();
        let chunk = self.scenario.layout.chunk(id);
        let costs = &self.scenario.costs[rank.index()];
        let takes = costs.upload.time(chunk) + costs.read_back.time(chunk);
        let device = &mut self.virtual_ranks[rank.index()].device;
        let times = match self.scenario.seeded_bug {
            Some(SeededBug::AddsTwiceOnDevice) => 2,
            _ => 1,
        };
        for _ in 0..times {
            let own = device.model.gradients(chunk.bucket, chunk.range.clone());
            for (sum, value) in partial.iter_mut().zip(own) {
                *sum += value;
            }
        }
        let span = device.run(now, takes, &[UploadTarget::Parameters]);
        self.timeline.add(rank, VirtualTrack::Device, span, || format!("add {chunk}"));
        self.block(rank, Blocked::Add { chunk: id, partial }, span.1)
    }
}

fn name(action: &Action) -> String {
    match action {
        Action::Load { micro_batch } => format!("load micro-batch {micro_batch}"),
        Action::Update { bucket } => format!("update {bucket}"),
        other => format!("{other:?}"),
    }
}
