//! Simulation of all ranks of a run under one virtual clock.

use std::collections::VecDeque;

use super::driver::Driver;
use super::main_thread::{CoordinatorThread, ToCoordinator, ToDriver};
use super::queue::{EventQueue, Nanos, nanos};
use super::report::{End, RankReport, SimulationReport};
use super::ring::{Item, Ring};
use super::scenario::{Detection, FaultTime, Scenario, SeededBug, SimulatedFault};
use super::timeline::Timeline;
use super::values::Model;
use crate::base::{ChunkId, Position, Rank};
use crate::collective::RankGroup;
use crate::parallel::Program;

/// Event of the simulation.
#[derive(Debug)]
pub(super) enum Event {
    /// A device thread may be able to continue.
    Driver(Rank),
    /// A ring thread may be able to continue.
    Ring(Rank),
    /// A readback slot of a rank is free again.
    Place(Rank),
    /// Item for a ring thread, sent by another ring thread (`sent`: the rank and the time) or by
    /// the rank's own device.
    Item {
        to: Rank,
        item: Item,
        sent: Option<(Rank, Nanos)>,
    },
    ToDriver {
        to: Rank,
        mail: ToDriver,
    },
    ToCoordinator(ToCoordinator),
    /// The injected fault of this index occurs.
    Strike(usize),
    /// A device thread has hung for the deadline.
    Deadline(Rank),
}

/// State of one virtual rank.
#[derive(Debug)]
pub(super) struct VirtualRank<'a> {
    pub program: &'a Program,
    /// Position of the rank among the members of the simulation.
    pub position: Position,
    pub driver: Driver<'a>,
    pub ring: Ring,
    pub model: Model,
    /// Chunks to be read back, in this order.
    pub unread: VecDeque<(ChunkId, Item)>,
    /// Number of chunks that are being read back, or were read back and are not used yet.
    pub places: usize,
    pub read_back_free_at: Nanos,
    pub read_back_last: Nanos,
    pub upload_free_at: Nanos,
    pub upload_last: Nanos,
    mail_last: Nanos,
    pub died_at: Option<Nanos>,
    /// True if the device thread has hung for the deadline; it does nothing any more.
    pub is_hung: bool,
    pub end: Option<End>,
}

impl<'a> VirtualRank<'a> {
    fn new(scenario: &'a Scenario, (position, rank): (Position, Rank)) -> Self {
        let host = scenario.costs[rank.index()].host;
        Self {
            program: &scenario.programs[rank.index()],
            position,
            driver: Driver::default(),
            ring: Ring::new(&scenario.layout, position, scenario.window, host),
            model: Model::new(scenario),
            unread: VecDeque::new(),
            places: 0,
            read_back_free_at: 0,
            read_back_last: 0,
            upload_free_at: 0,
            upload_last: 0,
            mail_last: 0,
            died_at: None,
            is_hung: false,
            end: None,
        }
    }

    fn is_live(&self) -> bool {
        self.died_at.is_none() && !self.is_hung
    }

    /// Returns true if the rank's device thread still acts.
    pub fn drives(&self) -> bool {
        self.is_live() && self.end.is_none()
    }
}

/// State of a simulated run.
pub(super) struct Simulation<'a> {
    pub scenario: &'a Scenario,
    /// Ranks that hold the buckets: all of them.
    pub members: RankGroup,
    pub queue: EventQueue<Event>,
    pub virtual_ranks: Vec<VirtualRank<'a>>,
    pub timeline: Timeline,
    pub violations: Vec<String>,
    /// Number of the last step in which each rank voted.
    pub voted: Vec<u64>,
    main: CoordinatorThread,
    pub links_free_at: Vec<Vec<Nanos>>,
    pub messages: u64,
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
        let members = RankGroup::all(world as u32);
        let virtual_ranks = members.iter().map(|member| VirtualRank::new(scenario, member));
        Self {
            scenario,
            queue: EventQueue::new(scenario.seed),
            virtual_ranks: virtual_ranks.collect(),
            members,
            timeline: Timeline::new(scenario.timeline),
            violations: Vec::new(),
            voted: vec![0; world],
            main: CoordinatorThread::new(scenario),
            links_free_at: vec![vec![0; world]; world],
            messages: 0,
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
        let told = self.main.next_step();
        self.tell_ranks(told);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Driver(rank) => self.drive(rank),
            Event::Ring(rank) => {
                let virtual_rank = &mut self.virtual_ranks[rank.index()];
                virtual_rank.ring.wakes = false;
                if let Some(item) = virtual_rank.ring.inbox.pop_front() {
                    self.ring_works(rank, item);
                }
            }
            Event::Place(rank) => {
                self.virtual_ranks[rank.index()].places -= 1;
                self.read_on(rank);
            }
            Event::Item { to, item, sent } => {
                // A message that a rank had not sent when it died is lost.
                let is_lost = sent.is_some_and(|(from, at)| {
                    self.virtual_ranks[from.index()].died_at.is_some_and(|died_at| at > died_at)
                });
                if !is_lost {
                    let item = self.in_arrival_order(item);
                    self.hand_to_ring(to, item);
                }
            }
            Event::ToDriver { to, mail } => self.hand_to_driver(to, mail),
            Event::ToCoordinator(news) => {
                let told = self.main.handle(news);
                self.tell_ranks(told);
            }
            Event::Strike(index) => self.strike(index),
            Event::Deadline(rank) => self.deadline(rank),
        }
    }

    // ---- Messages between ranks and the coordinator thread ----

    /// Returns a random delay.
    pub fn jitter(&mut self) -> Nanos {
        self.queue.random.up_to(nanos(self.scenario.jitter_s))
    }

    /// Sends a message to the coordinator thread, `after` that time and the latency of a message.
    pub fn send_to_coordinator(&mut self, news: ToCoordinator, after: Nanos) {
        let at = self.queue.now() + after + nanos(self.scenario.control_s) + self.jitter();
        self.queue.push(at, Event::ToCoordinator(news));
    }

    fn tell_ranks(&mut self, told: Vec<(Rank, ToDriver)>) {
        let begins_step = told.iter().any(|(_, mail)| matches!(mail, ToDriver::Step(_)));
        if begins_step && self.scenario.seeded_bug != Some(SeededBug::RestartsApart) {
            // Before any rank runs, as in a worker group: no message of the step arrives earlier.
            for rank in (0..self.scenario.world() as u32).map(Rank) {
                self.hand_to_ring(rank, Item::Restart);
            }
        }
        for (to, mail) in told {
            let at = self.queue.now() + nanos(self.scenario.control_s) + self.jitter();
            let last = &mut self.virtual_ranks[to.index()].mail_last;
            *last = at.max(*last + 1);
            self.queue.push(*last, Event::ToDriver { to, mail });
        }
    }

    /// Ends a rank's part in the run.
    pub fn end(&mut self, rank: Rank, end: End) {
        self.virtual_ranks[rank.index()].end = Some(end);
        self.ended_at = self.queue.now();
    }

    /// Records a violation for each rank that has not voted in the step of `rank`: parameters may
    /// only change in a step for which all have voted.
    pub fn check_committed(&mut self, rank: Rank, what: &str) {
        let step = self.virtual_ranks[rank.index()].driver.step;
        for (other, &voted) in self.voted.iter().enumerate() {
            if voted < step {
                let violation = format!("{rank} {what} in step {step} without rank {other}'s vote");
                self.violations.push(violation);
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
                if virtual_rank.died_at.replace(now).is_some() {
                    return;
                }
                let deadline_s = self.scenario.deadline_s;
                let (after, why) = match detection {
                    Detection::AtOnce => (0, "it died".to_owned()),
                    Detection::ByDeadline => {
                        (nanos(deadline_s), format!("no heartbeat for {deadline_s} s"))
                    }
                };
                self.send_to_coordinator(ToCoordinator::Failed { rank, why }, after);
            }
            SimulatedFault::Hang { rank, seconds, .. } => {
                let driver = &mut self.virtual_ranks[rank.index()].driver;
                driver.free_at = driver.free_at.max(now).saturating_add(nanos(seconds));
                if seconds >= self.scenario.deadline_s {
                    let at = now + nanos(self.scenario.deadline_s);
                    self.queue.push(at, Event::Deadline(rank));
                }
            }
        }
    }

    fn deadline(&mut self, rank: Rank) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        if virtual_rank.drives() {
            virtual_rank.is_hung = true;
            let why = format!("its device did not answer for {} s", self.scenario.deadline_s);
            self.send_to_coordinator(ToCoordinator::Failed { rank, why }, 0);
        }
    }

    // ---- Report ----

    fn report(mut self, events: u64) -> SimulationReport {
        for (rank, virtual_rank) in self.virtual_ranks.iter().enumerate() {
            if virtual_rank.drives() {
                let (step, waits) = (virtual_rank.driver.step, &virtual_rank.driver.waits_for);
                let violation =
                    format!("rank {rank} is deadlocked in step {step}, waiting for {waits}");
                self.violations.push(violation);
            }
        }
        let rank_report = |virtual_rank: VirtualRank| RankReport {
            is_live: virtual_rank.is_live(),
            end: virtual_rank.end,
            finished: virtual_rank.driver.finished,
            parameters: virtual_rank.model.parameters,
        };
        SimulationReport {
            ranks: self.virtual_ranks.into_iter().map(rank_report).collect(),
            seconds: self.ended_at as f64 / 1e9,
            events,
            timeline: self.timeline,
            violations: self.violations,
        }
    }
}
