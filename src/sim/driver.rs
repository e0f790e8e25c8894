//! Device thread of a virtual rank: performs the actions of an interpreter, one at a time.

use std::collections::VecDeque;

use super::main_thread::{ToCoordinator, ToDriver};
use super::queue::{Nanos, nanos};
use super::report::End;
use super::ring::Item;
use super::scenario::SeededBug;
use super::timeline::VirtualTrack;
use super::world::{Event, Simulation};
use crate::base::Rank;
use crate::collective::Collective;
use crate::parallel::{Action, Event as Happened, Interpreter, Outcome, Verdict};

/// State of the device thread of a virtual rank.
#[derive(Debug, Default)]
pub(super) struct Driver<'a> {
    /// Interpreter of the current step; `None` between steps.
    interpreter: Option<Interpreter<'a>>,
    /// Number of the current step, counted from 1.
    pub step: u64,
    /// Number of steps that are over.
    pub finished: u64,
    /// Action that keeps the device thread busy until `free_at`.
    doing: Option<Action>,
    pub free_at: Nanos,
    /// True if a wake-up event is queued.
    wakes: bool,
    mail: VecDeque<ToDriver>,
    /// Collectives of the next step that are over before it begins.
    early: Vec<Collective>,
    verdict: Option<Verdict>,
    failure: Option<(Rank, String)>,
    /// Display text of what the device thread waits for; used in violation messages only.
    pub waits_for: String,
}

impl Simulation<'_> {
    /// Queues a message for the device thread, which reads it when it is free.
    pub(super) fn hand_to_driver(&mut self, rank: Rank, mail: ToDriver) {
        self.virtual_ranks[rank.index()].driver.mail.push_back(mail);
        self.wake_driver(rank);
    }

    fn wake_driver(&mut self, rank: Rank) {
        let now = self.queue.now();
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        if !driver.wakes {
            driver.wakes = true;
            self.queue.push(driver.free_at.max(now), Event::Driver(rank));
        }
    }

    /// Completes the device thread's action, reads its messages, and continues until it is busy
    /// or waits.
    pub(super) fn drive(&mut self, rank: Rank) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        virtual_rank.driver.wakes = false;
        if !virtual_rank.drives() {
            return;
        }
        if self.queue.now() < virtual_rank.driver.free_at {
            return self.wake_driver(rank);
        }
        if let Some(action) = virtual_rank.driver.doing.take() {
            self.complete(rank, &action);
        }
        while let Some(mail) = self.virtual_ranks[rank.index()].driver.mail.pop_front() {
            self.read(rank, mail);
        }
        while let Some(action) = self.next_action(rank) {
            if let Some(takes) = self.takes(rank, &action) {
                return self.do_for(rank, action, takes);
            }
            self.act(rank, action);
        }
    }

    fn next_action(&mut self, rank: Rank) -> Option<Action> {
        self.virtual_ranks[rank.index()].driver.interpreter.as_mut()?.poll_action()
    }

    fn do_for(&mut self, rank: Rank, action: Action, takes: Nanos) {
        let (from, to) = (self.queue.now(), self.queue.now() + takes);
        self.timeline.add(rank, VirtualTrack::Driver, (from, to), || name(&action));
        let driver = &mut self.virtual_ranks[rank.index()].driver;
        driver.doing = Some(action);
        driver.free_at = to;
        self.wake_driver(rank);
    }

    /// Returns the duration for which an action keeps the device thread busy; `None` if it only
    /// sends or waits.
    fn takes(&mut self, rank: Rank, action: &Action) -> Option<Nanos> {
        let costs = &self.scenario.costs[rank.index()];
        let position = self.virtual_ranks[rank.index()].position;
        let seconds = match *action {
            Action::Load { .. } => costs.load_s,
            Action::Run { segment, micro_batch } => {
                let cost = costs.segments[segment.index()];
                let rows = self.scenario.programs[rank.index()].micro_batches[micro_batch].rows;
                cost.fixed_s + f64::from(rows) * cost.row_s
            }
            Action::Update { bucket } => {
                self.scenario.layout.shard(bucket, position).len() as f64 * costs.update_element_s
            }
            Action::ZeroGradients
            | Action::Start(_)
            | Action::Wait(_)
            | Action::Vote
            | Action::Finish(_) => return None,
        };
        Some(nanos(seconds) + self.jitter())
    }

    /// Applies the effect of an action whose duration is over.
    fn complete(&mut self, rank: Rank, action: &Action) {
        if let Action::Update { .. } = action {
            self.check_committed(rank, "updates");
        }
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let step = virtual_rank.driver.step;
        match *action {
            Action::Load { micro_batch } => {
                virtual_rank.model.count(step, virtual_rank.program.micro_batches[micro_batch]);
            }
            Action::Run { segment, micro_batch } => {
                let buckets = &self.scenario.completes[segment.index()];
                virtual_rank.model.run(
                    step,
                    virtual_rank.program.micro_batches[micro_batch],
                    buckets,
                );
            }
            Action::Update { bucket } => {
                let shard = self.scenario.layout.shard(bucket, virtual_rank.position);
                if let Some(verdict) = &virtual_rank.driver.verdict {
                    virtual_rank.model.update(bucket, shard, verdict);
                }
            }
            Action::ZeroGradients
            | Action::Start(_)
            | Action::Wait(_)
            | Action::Vote
            | Action::Finish(_) => {}
        }
    }

    /// Performs an action without duration: starts a collective, sends a message, or waits.
    fn act(&mut self, rank: Rank, action: Action) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        match action {
            Action::Start(collective) => self.read_back(rank, collective),
            Action::Wait(collective) => virtual_rank.driver.waits_for = collective.to_string(),
            Action::Vote => {
                virtual_rank.driver.waits_for = "the verdict".into();
                self.voted[rank.index()] = virtual_rank.driver.step;
                let member = (virtual_rank.position, rank);
                let vote = virtual_rank.model.vote(&self.scenario.layout, member);
                self.send_to_coordinator(ToCoordinator::Vote(vote), 0);
            }
            Action::Finish(Outcome::Discarded(_)) => self.fail(rank),
            Action::Finish(Outcome::Updated | Outcome::Skipped) => {
                virtual_rank.driver.interpreter = None;
                virtual_rank.driver.finished += 1;
                virtual_rank.driver.waits_for = "the next step".into();
                self.send_to_coordinator(ToCoordinator::Finished { rank }, 0);
            }
            Action::ZeroGradients
            | Action::Load { .. }
            | Action::Run { .. }
            | Action::Update { .. } => {}
        }
    }

    fn read(&mut self, rank: Rank, mail: ToDriver) {
        let virtual_rank = &mut self.virtual_ranks[rank.index()];
        let driver = &mut virtual_rank.driver;
        match (mail, &mut driver.interpreter) {
            (ToDriver::Done(done), Some(interpreter)) => interpreter.handle(Happened::Done(done)),
            (ToDriver::Done(done), None) => driver.early.push(done),
            (ToDriver::Verdict(verdict), Some(interpreter)) => {
                interpreter.handle(Happened::Verdict(verdict.clone()));
                driver.verdict = Some(verdict);
            }
            (ToDriver::Abort { rank: failed, why }, Some(interpreter)) => {
                interpreter.handle(Happened::Fault(format!("{failed} failed: {why}")));
                driver.failure = Some((failed, why));
            }
            (ToDriver::Abort { rank: failed, why }, None) => {
                driver.failure = Some((failed, why));
                self.fail(rank);
            }
            (ToDriver::Step(step), None) => {
                let mut interpreter = Interpreter::new(virtual_rank.program);
                for done in driver.early.drain(..) {
                    interpreter.handle(Happened::Done(done));
                }
                driver.interpreter = Some(interpreter);
                driver.step = step;
                virtual_rank.model.begin_step(self.scenario.is_not_finite(rank, step));
                if self.scenario.seeded_bug == Some(SeededBug::RestartsApart) {
                    self.hand_to_ring(rank, Item::Restart);
                }
            }
            (ToDriver::Over, None) => self.end(rank, End::Completed),
            (mail, _) => self.violations.push(format!("{rank} receives {mail:?} at a wrong time")),
        }
    }

    fn fail(&mut self, rank: Rank) {
        let failure = self.virtual_ranks[rank.index()].driver.failure.take();
        match failure {
            Some((rank_failed, why)) => self.end(rank, End::Failed { rank: rank_failed, why }),
            None => self.violations.push(format!("{rank} discards a step without a reason")),
        }
    }
}

fn name(action: &Action) -> String {
    match action {
        Action::ZeroGradients => "zero gradients".into(),
        Action::Load { micro_batch } => format!("load micro-batch {micro_batch}"),
        Action::Run { segment, micro_batch } => format!("run {segment} on {micro_batch}"),
        Action::Update { bucket } => format!("update {bucket}"),
        Action::Start(collective) => format!("start {collective}"),
        Action::Wait(collective) => format!("wait {collective}"),
        Action::Vote => "vote".into(),
        Action::Finish(_) => "finish".into(),
    }
}
