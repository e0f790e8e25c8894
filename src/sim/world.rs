//! All ranks of a run under one clock.

use std::collections::VecDeque;

use super::driver::Driver;
use super::main_thread::{CoordinatorThread, ToCoordinator, ToDriver};
use super::queue::{Nanos, Queue, nanos};
use super::report::{End, RankReport, Report};
use super::ring::{Item, Ring};
use super::scenario::{Detection, Fault, FaultTime, Scenario, SeededBug};
use super::timeline::Timeline;
use super::values::Model;
use crate::base::{ChunkId, Rank};
use crate::parallel::Program;

/// What happens.
#[derive(Debug)]
pub(super) enum Event {
    /// A driver may be able to go on.
    Driver(Rank),
    /// A ring may be able to go on.
    Ring(Rank),
    /// A rank has a place more to read back to.
    Place(Rank),
    /// Something for a ring, sent by another ring at a time, or by its own device.
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
    /// The fault of this index strikes.
    Strike(usize),
    /// A driver has hung for the deadline.
    Deadline(Rank),
}

/// One rank.
#[derive(Debug)]
pub(super) struct VirtualRank<'a> {
    pub program: &'a Program,
    pub driver: Driver<'a>,
    pub ring: Ring,
    pub model: Model,
    /// What is to be read back, in this order.
    pub unread: VecDeque<(ChunkId, Item)>,
    /// Chunks that are being read back, or were and are not used yet.
    pub places: usize,
    pub read_back_free_at: Nanos,
    pub read_back_last: Nanos,
    pub upload_free_at: Nanos,
    pub upload_last: Nanos,
    mail_last: Nanos,
    pub died_at: Option<Nanos>,
    /// Its driver hung for the deadline and does nothing any more.
    pub is_hung: bool,
    pub end: Option<End>,
}

impl<'a> VirtualRank<'a> {
    fn new(scenario: &'a Scenario, rank: Rank) -> Self {
        let host = scenario.costs[rank.index()].host;
        Self {
            program: &scenario.programs[rank.index()],
            driver: Driver::default(),
            ring: Ring::new(&scenario.layout, rank, scenario.window, host),
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

    /// Whether its driver still acts.
    pub fn drives(&self) -> bool {
        self.is_live() && self.end.is_none()
    }
}

/// All of it.
pub(super) struct Simulation<'a> {
    pub scenario: &'a Scenario,
    pub queue: Queue<Event>,
    pub virtual_ranks: Vec<VirtualRank<'a>>,
    pub timeline: Timeline,
    pub violations: Vec<String>,
    /// The last step in which each rank voted.
    pub voted: Vec<u64>,
    main: CoordinatorThread,
    pub links_free_at: Vec<Vec<Nanos>>,
    pub messages: u64,
    /// For [`SeededBug::FoldsInArrivalOrder`]: the last place that was given out, per chunk.
    pub arrived: Vec<u32>,
    ended_at: Nanos,
}

/// Runs a scenario to its end.
pub fn run(scenario: &Scenario) -> Report {
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

fn when(fault: &Fault) -> Option<FaultTime> {
    match *fault {
        Fault::Die { when, .. } | Fault::Hang { when, .. } => Some(when),
        Fault::NotFinite { .. } => None,
    }
}

impl<'a> Simulation<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let world = scenario.world();
        let ranks = (0..scenario.layout.world).map(Rank);
        Self {
            scenario,
            queue: Queue::new(scenario.seed),
            virtual_ranks: ranks.map(|rank| VirtualRank::new(scenario, rank)).collect(),
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
                // What a rank had not sent when it died is never sent.
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

    // ---- Between ranks and main ----

    /// A random part of a duration.
    pub fn jitter(&mut self) -> Nanos {
        self.queue.random.up_to(nanos(self.scenario.jitter_s))
    }

    /// Tells main, `after` that time and the time that a message takes.
    pub fn tell_main(&mut self, news: ToCoordinator, after: Nanos) {
        let at = self.queue.now() + after + nanos(self.scenario.control_s) + self.jitter();
        self.queue.push(at, Event::ToCoordinator(news));
    }

    fn tell_ranks(&mut self, told: Vec<(Rank, ToDriver)>) {
        let begins_step = told.iter().any(|(_, mail)| matches!(mail, ToDriver::Step(_)));
        if begins_step && self.scenario.seeded_bug != Some(SeededBug::RestartsApart) {
            // Before any rank runs, as a team does, so that no message of the step comes earlier.
            for rank in (0..self.scenario.layout.world).map(Rank) {
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

    /// A rank's part in the run is over.
    pub fn end(&mut self, rank: Rank, end: End) {
        self.virtual_ranks[rank.index()].end = Some(end);
        self.ended_at = self.queue.now();
    }

    /// Parameters may only change in a step for which all have voted.
    pub fn is_committed(&mut self, rank: Rank, what: &str) {
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
            Fault::NotFinite { .. } => {}
            Fault::Die { rank, detection, .. } => {
                let virtual_rank = &mut self.virtual_ranks[rank.index()];
                if virtual_rank.died_at.replace(now).is_some() {
                    return;
                }
                let deadline_s = self.scenario.deadline_s;
                let (after, why) = match detection {
                    Detection::AtOnce => (0, "it died".to_owned()),
                    Detection::ByDeadline => {
                        (nanos(deadline_s), format!("no sign of life for {deadline_s} s"))
                    }
                };
                self.tell_main(ToCoordinator::Failed { rank, why }, after);
            }
            Fault::Hang { rank, seconds, .. } => {
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
            self.tell_main(ToCoordinator::Failed { rank, why }, 0);
        }
    }

    // ---- The end ----

    fn report(mut self, events: u64) -> Report {
        for (rank, virtual_rank) in self.virtual_ranks.iter().enumerate() {
            if virtual_rank.drives() {
                let (step, waits) = (virtual_rank.driver.step, &virtual_rank.driver.waits_for);
                let violation = format!("rank {rank} waits for ever in step {step} for {waits}");
                self.violations.push(violation);
            }
        }
        let rank_report = |virtual_rank: VirtualRank| RankReport {
            is_live: virtual_rank.is_live(),
            end: virtual_rank.end,
            finished: virtual_rank.driver.finished,
            parameters: virtual_rank.model.parameters,
        };
        Report {
            ranks: self.virtual_ranks.into_iter().map(rank_report).collect(),
            seconds: self.ended_at as f64 / 1e9,
            events,
            timeline: self.timeline,
            violations: self.violations,
        }
    }
}
