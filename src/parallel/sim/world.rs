//! Simulation of all ranks of a run under one virtual clock.

use std::collections::HashMap;

use super::coordinator_thread::{CoordinatorThread, ToCoordinator, ToRank, ToRanks};
use super::device::VirtualDevice;
use super::driver::Driver;
use super::memory::TensorMemory;
use super::queue::{EventQueue, nanos};
use super::report::{End, RankReport, SimulationReport};
use super::ring::Ring;
use super::scenario::{
    Detection, FaultTime, InputPath, InputTransfer, Scenario, SeededBug, SimulatedFault,
};
use super::timeline::Timeline;
use super::values::Model;
use crate::collective::Positions;
use crate::comm::{
    Mailbox, Message, PooledBuffer, RingMsg, RingWorker, SendError, SharedBuffer, ring_inbox_max,
};
use crate::coordinator::RankActivity;
use crate::transfers::{DeviceMsg, PeerTransfers, device_inbox_max};
use crate::{Expiry, Program, StepError};
use potluck_core::{EdgePiece, Nanos, Rank, Round};
use potluck_graph::BucketTensor;

/// Message to a virtual device thread.
pub(super) type ToDriver = DeviceMsg<SharedBuffer, PooledBuffer>;

/// Work that the coordinator gives to a rank.
#[derive(Clone, Copy, Debug)]
pub(super) enum DriverJob {
    Step(Round),
    /// The run is over.
    Over,
}

/// Event of the simulation.
#[derive(Debug)]
pub(super) enum Event {
    /// A device thread may be able to continue.
    Driver(Rank),
    /// A ring thread may be able to continue.
    Ring(Rank),
    /// A message between two ring threads arrives; `sent`: the sender and the time.
    Message {
        to: Rank,
        message: Message,
        sent: (Rank, Nanos),
    },
    /// A piece of a tensor that a ring thread sent to the device thread of another rank arrives.
    Piece {
        to: Rank,
        message: (Round, EdgePiece, SharedBuffer),
        sent: (Rank, Nanos),
    },
    /// A ring thread sends a message to its device thread.
    ToDriver {
        to: Rank,
        message: ToDriver,
    },
    /// A message of the coordinator thread arrives at a rank.
    ToRank {
        to: Rank,
        message: ToRank,
    },
    ToCoordinator(ToCoordinator),
    /// The coordinator thread checks the deadlines of all ranks.
    Check,
    /// The injected fault of this index occurs.
    Strike(usize),
}

/// State of one virtual rank.
pub(super) struct VirtualRank<'a> {
    pub program: &'a Program,
    pub positions: Positions,
    pub driver: Driver<'a>,
    pub ring: Ring,
    pub device: VirtualDevice,
    message_last: Nanos,
    pub(crate) died_at: Option<Nanos>,
    /// Period in which the device does nothing.
    hang: (Nanos, Nanos),
    /// True once the rank was given up: its device thread no longer acts.
    is_abandoned: bool,
    pub end: Option<End>,
}

impl<'a> VirtualRank<'a> {
    fn new(scenario: &'a Scenario, rank: Rank) -> Self {
        let layout = &scenario.layout;
        let costs = &scenario.costs[rank.index()];
        let edges = &scenario.edges;
        let positions = scenario.groups.positions(rank);
        let site = scenario.reduce_site[rank.index()];
        let transfers =
            PeerTransfers::new(layout.clone(), positions.clone(), site, BucketTensor::Parameters)
                .with_edges(rank, edges.clone());
        let mut driver_max = device_inbox_max(layout, edges, rank);
        let mut ring_max = ring_inbox_max(layout, positions.clone()) + edges.messages_from(rank);
        if scenario.seeded_bug == Some(SeededBug::ShortMailboxes) {
            driver_max = 1;
            ring_max = 1;
        }
        let driver_inbox = Mailbox::new(driver_max);
        let ring_inbox = Mailbox::new(ring_max);
        let worker = RingWorker::new(layout.clone(), positions.clone(), scenario.window, false)
            .with_deadline(scenario.deadline());
        let ring =
            Ring { worker, inbox: ring_inbox, free_at: 0, sent_last: 0, wakes: false, pieces: 0 };
        let missing = usize::from(scenario.seeded_bug == Some(SeededBug::FewerCopies));
        let plan = scenario.parts[rank.index()].plan.clone();
        let memory = plan.map(|plan| TensorMemory::new(plan, missing));
        let model = Model::new(scenario, rank);
        Self {
            program: &scenario.programs[rank.index()],
            positions,
            driver: Driver::new(transfers, driver_inbox),
            ring,
            device: VirtualDevice::new(model, memory, costs, scenario.slots_max),
            message_last: 0,
            died_at: None,
            hang: (0, 0),
            is_abandoned: false,
            end: None,
        }
    }

    fn is_live(&self) -> bool {
        self.died_at.is_none() && !self.is_abandoned
    }

    /// Returns true if the rank's device thread still acts.
    pub(crate) fn drives(&self) -> bool {
        self.is_live() && self.end.is_none()
    }

    /// Returns the activity that the coordinator thread observes: the heartbeat of a device is its
    /// clock, which stands still while it hangs.
    fn activity(&self, now: Nanos) -> RankActivity {
        let (from, to) = self.hang;
        let stopped_at = match self.died_at {
            None if (from..to).contains(&now) => Some(from),
            died_at => died_at,
        };
        RankActivity {
            heartbeats: stopped_at.unwrap_or(now),
            received: self.driver.received,
            is_waiting: stopped_at.is_none() && self.driver.is_waiting,
        }
    }
}

/// State of a simulated run.
pub(super) struct Simulation<'a> {
    pub scenario: &'a Scenario,
    pub queue: EventQueue<Event>,
    pub(crate) virtual_ranks: Vec<VirtualRank<'a>>,
    pub timeline: Timeline,
    pub violations: Vec<String>,
    /// Number of the last step in which each rank voted.
    pub voted: Vec<u64>,
    coordinator: CoordinatorThread,
    is_check_queued: bool,
    pub(crate) links_free_at: Vec<Vec<Nanos>>,
    pub messages: u64,
    /// Number of pieces of tensors that ring threads have sent.
    pub pieces: u64,
    /// Number of elements that were sent, by sender and receiver.
    pub(crate) elements_sent: Vec<Vec<u64>>,
    /// By node: end of the last inputs on a link that no ranks use.
    inputs_free_at: HashMap<u32, Nanos>,
    /// By rank: elements of tensors that were copied to be sent and not written since.
    pub(crate) in_flight: Vec<usize>,
    /// Number of ranks that have not taken each piece in flight yet.
    pub(crate) unread: HashMap<EdgePiece, usize>,
    /// For [`SeededBug::AccumulatesInArrivalOrder`]: the last sender that was assigned, per chunk.
    pub arrived: Vec<u32>,
    ended_at: Nanos,
}

/// Simulates a scenario to its end and returns the report.
pub fn run(scenario: &Scenario) -> SimulationReport {
    let mut world = Simulation::new(scenario);
    let mut events = 0;
    world.begin();
    loop {
        for index in 0..scenario.faults.len() {
            if when(&scenario.faults[index]) == Some(FaultTime::Event(events)) {
                world.strike(index);
            }
        }
        let Some(event) = world.queue.pop() else { break };
        world.handle(event);
        events += 1;
    }
    world.report(events)
}

fn when(fault: &SimulatedFault) -> Option<FaultTime> {
    match *fault {
        SimulatedFault::Die { when, .. } | SimulatedFault::Hang { when, .. } => Some(when),
        SimulatedFault::NotFinite { .. } => None,
    }
}

impl<'a> Simulation<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let world = scenario.world();
        let ranks = (0..world as u32).map(Rank);
        let virtual_ranks = ranks.map(|rank| VirtualRank::new(scenario, rank)).collect();
        Self {
            scenario,
            queue: EventQueue::new(scenario.seed),
            virtual_ranks,
            timeline: Timeline::new(scenario.timeline),
            violations: Vec::new(),
            voted: vec![0; world],
            coordinator: CoordinatorThread::new(scenario),
            is_check_queued: false,
            links_free_at: vec![vec![0; world]; world],
            messages: 0,
            elements_sent: vec![vec![0; world]; world],
            inputs_free_at: HashMap::new(),
            pieces: 0,
            in_flight: vec![0; world],
            unread: HashMap::new(),
            arrived: vec![0; scenario.layout.chunks.len()],
            ended_at: 0,
        }
    }

    fn begin(&mut self) {
        for (index, fault) in self.scenario.faults.iter().enumerate() {
            if let Some(FaultTime::Seconds(seconds)) = when(fault) {
                self.queue.push(nanos(seconds), Event::Strike(index));
            }
        }
        let messages = self.coordinator.next_step(0);
        self.send_to_ranks(messages);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Driver(rank) => self.drive(rank),
            Event::Ring(rank) => self.run_ring(rank),
            Event::Message { to, message, sent: (from, at) } => {
                if self.was_sent(from, at) {
                    self.hand_to_ring(to, RingMsg::Message(message));
                }
            }
            Event::Piece { to, message: (round, piece, values), sent: (from, at) } => {
                if self.was_sent(from, at) {
                    self.hand_to_driver(to, DeviceMsg::Piece { round, piece, values });
                }
            }
            Event::ToDriver { to, message } => self.hand_to_driver(to, message),
            Event::ToRank { to, message } => self.receive_from_coordinator(to, message),
            Event::ToCoordinator(message) => {
                let now = self.queue.now();
                let sent = self.coordinator.handle(now, message);
                self.send_or_violate(sent);
            }
            Event::Check => self.check_deadlines(),
            Event::Strike(index) => self.strike(index),
        }
    }

    /// Returns true unless a rank had died before it could send something at this time.
    fn was_sent(&self, from: Rank, at: Nanos) -> bool {
        self.virtual_ranks[from.index()].died_at.is_none_or(|died_at| at <= died_at)
    }

    // ---- Messages ----

    /// Returns a random delay.
    pub fn jitter(&mut self) -> Nanos {
        self.queue.random.up_to(nanos(self.scenario.jitter_s))
    }

    /// Sends a message to the coordinator thread.
    pub(crate) fn send_to_coordinator(&mut self, message: ToCoordinator) {
        let at = self.queue.now() + nanos(self.scenario.control_s) + self.jitter();
        self.queue.push(at, Event::ToCoordinator(message));
    }

    fn send_or_violate(&mut self, messages: Result<ToRanks, StepError>) {
        match messages {
            Ok(messages) => self.send_to_ranks(messages),
            Err(error) => self.violations.push(format!("the coordinator: {error}")),
        }
    }

    fn send_to_ranks(&mut self, messages: ToRanks) {
        let begun = messages.iter().find_map(|(_, message)| match message {
            ToRank::Step(round) => Some(*round),
            _ => None,
        });
        if let Some(round) = begun
            && self.scenario.seeded_bug != Some(SeededBug::RestartsApart)
        {
            // Before any rank runs, as in a worker group: no message of the step arrives earlier.
            for rank in (0..self.scenario.world() as u32).map(Rank) {
                self.restart_ring(rank, round);
            }
        }
        for (to, message) in messages {
            let now = self.queue.now();
            let mut at = now + nanos(self.scenario.control_s) + self.jitter();
            let inputs = self.scenario.costs[to.index()].inputs;
            if let (ToRank::Step(Round { settles: false, .. }), Some(inputs)) = (&message, inputs) {
                at = at.max(self.send_inputs(to, inputs, now));
            }
            let last = &mut self.virtual_ranks[to.index()].message_last;
            *last = at.max(*last + 1);
            self.queue.push(*last, Event::ToRank { to, message });
        }
        self.queue_check();
    }

    /// Returns the time at which the inputs of a rank arrive.
    fn send_inputs(&mut self, rank: Rank, inputs: InputTransfer, now: Nanos) -> Nanos {
        let InputTransfer { path, elements } = inputs;
        match path {
            InputPath::Ranks { from, to } => {
                self.pass_link(from, to, elements, now, || format!("inputs of {rank}"))
            }
            InputPath::Apart { node, link } => {
                let free_at = self.inputs_free_at.entry(node).or_default();
                *free_at = now.max(*free_at).saturating_add(link.busy(elements));
                free_at.saturating_add(nanos(link.latency_s))
            }
        }
    }

    fn receive_from_coordinator(&mut self, rank: Rank, message: ToRank) {
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        match message {
            ToRank::Step(round) => driver.job = Some(DriverJob::Step(round)),
            ToRank::Over => driver.job = Some(DriverJob::Over),
            ToRank::Verdict { round, verdict } => {
                return self.hand_to_driver(rank, DeviceMsg::Decided { round, verdict });
            }
            ToRank::Abort { rank: failed, why } => return self.abort(rank, failed, why),
        }
        self.wake_driver(rank);
    }

    /// Puts a message into the mailbox of a device thread. A closed one drops it.
    fn hand_to_driver(&mut self, rank: Rank, message: ToDriver) {
        let is_piece = matches!(message, DeviceMsg::Piece { .. });
        let sent = self.virtual_ranks[rank.index()].driver.inbox.send(message);
        if is_piece && sent.is_ok() {
            self.count_piece_to_driver(rank);
        }
        self.check_bound(rank, "device thread", sent);
        self.wake_driver(rank);
    }

    /// Records a violation if a mailbox was full.
    pub(crate) fn check_bound(&mut self, rank: Rank, thread: &str, sent: Result<(), SendError>) {
        if let Err(error @ SendError::Full { .. }) = sent {
            self.violations.push(format!("the {thread} of {rank}: {error}"));
        }
    }

    /// Closes the mailboxes of a rank, which wakes it from any wait.
    fn abort(&mut self, rank: Rank, failed: Rank, why: String) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        virtual_rank.driver.inbox.close(&why);
        virtual_rank.ring.inbox.close(&why);
        let driver = &mut virtual_rank.driver;
        if driver.is_between_steps() {
            if virtual_rank.drives() {
                self.end(rank, End::Failed { rank: failed, why });
            }
            return;
        }
        driver.failure.get_or_insert((failed, why));
        self.wake_driver(rank);
    }

    /// Ends a rank's part in the run.
    pub fn end(&mut self, rank: Rank, end: End) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        virtual_rank.end = Some(end);
        self.ended_at = self.ended_at.max(self.queue.now()).max(virtual_rank.device.idle_at());
    }

    /// Records a violation for each rank that has not voted in a step whose parameters `rank`
    /// changes: they may only change in a step for which all have voted.
    pub(crate) fn check_committed(&mut self, rank: Rank, step: u64, what: &str) {
        for (other, &voted) in self.voted.iter().enumerate() {
            if voted < step {
                let violation = format!("{rank} {what} in step {step} without rank {other}'s vote");
                self.violations.push(violation);
            }
        }
    }

    // ---- Deadlines ----

    fn queue_check(&mut self) {
        let now = self.queue.now();
        if let Some(at) = self.coordinator.poll_timeout(now)
            && !self.is_check_queued
        {
            self.is_check_queued = true;
            self.queue.push(at, Event::Check);
        }
    }

    fn check_deadlines(&mut self) {
        self.is_check_queued = false;
        let now = self.queue.now();
        let activities: Vec<RankActivity> =
            self.virtual_ranks.iter().map(|rank| rank.activity(now)).collect();
        match self.coordinator.check(now, &activities) {
            Ok(expired) => {
                for expiry in expired {
                    self.expire(expiry);
                }
            }
            Err(error) => self.violations.push(format!("the coordinator: {error}")),
        }
        self.queue_check();
    }

    /// Ends the ranks whose deadline has passed. A deadlock is a violation: no fault causes one.
    fn expire(&mut self, expiry: Expiry) {
        let now = self.queue.now();
        let deadline_s = self.scenario.deadline_s;
        let (ranks, why) = match expiry {
            Expiry::Hung(rank) => {
                self.virtual_ranks[rank.index()].is_abandoned = true;
                (vec![rank], format!("its device did not answer for {deadline_s} s"))
            }
            Expiry::Deadlock { .. } => {
                self.record_deadlocks();
                let why = format!("all ranks have waited for each other for {deadline_s} s");
                (self.coordinator.pending(), why)
            }
        };
        for rank in ranks {
            let message = ToCoordinator::Failed { rank, why: why.clone() };
            let sent = self.coordinator.handle(now, message);
            self.send_or_violate(sent);
        }
    }

    /// Records a violation for each rank that waits without end, and the positions whose messages
    /// its ring thread awaits.
    fn record_deadlocks(&mut self) {
        let now = self.queue.now();
        for (rank, virtual_rank) in self.virtual_ranks.iter().enumerate() {
            if virtual_rank.drives() {
                let step = virtual_rank.driver.transfers.round().step;
                let waits = &virtual_rank.driver.waits_for;
                let violation =
                    format!("rank {rank} is deadlocked in step {step}, waiting for {waits}");
                self.violations.push(violation);
                if let Err(error) = virtual_rank.ring.worker.handle_timeout(now) {
                    self.violations.push(format!("the ring thread of rank {rank}: {error}"));
                }
            }
        }
    }

    // ---- Faults ----

    fn strike(&mut self, index: usize) {
        let now = self.queue.now();
        match self.scenario.faults[index] {
            SimulatedFault::NotFinite { .. } => {}
            SimulatedFault::Die { rank, detection, .. } => {
                let virtual_rank = &mut self.virtual_ranks[rank.index()];
                if virtual_rank.died_at.replace(now).is_none() && detection == Detection::AtOnce {
                    let why = "it died".to_owned();
                    self.send_to_coordinator(ToCoordinator::Failed { rank, why });
                }
            }
            SimulatedFault::Hang { rank, seconds, .. } => {
                let virtual_rank = &mut self.virtual_ranks[rank.index()];
                let until = now.saturating_add(nanos(seconds));
                let (from, to) = virtual_rank.hang;
                virtual_rank.hang = if now < to { (from, to.max(until)) } else { (now, until) };
                virtual_rank.device.hang(now, nanos(seconds));
                let driver = &mut virtual_rank.driver;
                driver.free_at = driver.free_at.max(until);
            }
        }
    }

    // ---- Report ----

    fn report(mut self, events: u64) -> SimulationReport {
        self.record_deadlocks();
        let mut ranks = Vec::with_capacity(self.virtual_ranks.len());
        for virtual_rank in self.virtual_ranks {
            ranks.push(RankReport {
                is_live: virtual_rank.is_live(),
                end: virtual_rank.end,
                finished: virtual_rank.driver.finished,
                parameters: virtual_rank.device.model.parameters,
            });
        }
        SimulationReport {
            ranks,
            seconds: self.ended_at as f64 / 1e9,
            events,
            pieces: self.pieces,
            elements_sent: self.elements_sent,
            timeline: self.timeline,
            violations: self.violations,
        }
    }
}
