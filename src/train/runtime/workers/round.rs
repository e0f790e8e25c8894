//! One step of a worker group: submits it to the device threads, and runs its coordinator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{StepFailure, Worker, WorkerGroup};
use crate::runtime::messages::CoordinatorMsg;
use crate::runtime::step::{StepInput, StepReport};
use potluck_core::{Nanos, Rank, Round};
use potluck_kernels::device::DeviceError;
use potluck_parallel::comm::{Mailbox, RecvError, nanos};
use potluck_parallel::{
    Announcement, Coordinator, Decision, Expiry, Outcome, StepError, Verdict, Vote,
};

/// Guard that reports the end of a rank's step to the coordinator, also if the job panics.
pub(crate) struct FinishOnDrop {
    rank: Rank,
    coordinator: Mailbox<CoordinatorMsg>,
    panicked: Option<Box<dyn FnOnce() -> DeviceError + Send>>,
}

impl FinishOnDrop {
    /// Creates the guard, with a function for the error of a panicked job.
    pub fn new(
        rank: Rank,
        coordinator: Mailbox<CoordinatorMsg>,
        panicked: Box<dyn FnOnce() -> DeviceError + Send>,
    ) -> Self {
        Self { rank, coordinator, panicked: Some(panicked) }
    }

    /// Reports the result of the step.
    pub fn with(mut self, result: Result<StepReport, DeviceError>) {
        self.panicked = None;
        // Fails if the worker group was dropped.
        let _ = self.coordinator.send(CoordinatorMsg::Finished(self.rank, result));
    }
}

impl Drop for FinishOnDrop {
    fn drop(&mut self) {
        if let Some(error) = self.panicked.take() {
            let _ = self.coordinator.send(CoordinatorMsg::Finished(self.rank, Err(error())));
        }
    }
}

/// Effects of the programs of a round, the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundPrograms {
    /// True if they update parameters after the verdict commit.
    pub updates: bool,
    /// True if they begin with the all-gathers of the previous step.
    pub begins_with_gathers: bool,
}

/// Coordinator's state of a step in progress.
pub(crate) struct StepRound<'t> {
    group: &'t WorkerGroup,
    coordinator: Coordinator,
    /// Origin of the coordinator's time.
    started: Instant,
    /// By rank: its result, after the end of its step.
    reports: Vec<Option<Result<StepReport, ()>>>,
    /// First failure, with the failed ranks.
    failed: Option<StepFailure>,
    /// True if the step updates parameters after the verdict commit.
    updates: bool,
    /// True while ranks may have parameters of different steps: after the commit, and before the
    /// last vote if the previous step has left its all-gathers, which end before the votes.
    is_committed: bool,
}

impl<'t> StepRound<'t> {
    /// Creates the coordinator's state at the start of a round.
    pub fn new(group: &'t WorkerGroup, round: Round, programs: RoundPrograms) -> Self {
        let RoundPrograms { updates, begins_with_gathers } = programs;
        let coordinator = Coordinator::new(round, group.world() as u32, group.deadline(), 0);
        let mut round = Self {
            group,
            coordinator,
            started: Instant::now(),
            reports: group.workers.iter().map(|_| None).collect(),
            failed: None,
            updates,
            is_committed: begins_with_gathers,
        };
        round.observe();
        round
    }

    fn now(&self) -> Nanos {
        nanos(self.started.elapsed())
    }

    /// Begins the step of a rank.
    pub fn submit(&mut self, worker: &Worker, input: &Arc<StepInput>) {
        if let Err(error) = worker.endpoint.submit(&worker.driver, input, &self.group.inbox) {
            self.end(input.rank, Err(error));
        }
    }

    /// Processes messages until every rank has ended or is abandoned.
    pub fn run(mut self) -> Result<Vec<StepReport>, StepFailure> {
        while self.reports.iter().any(Option::is_none) {
            let check_at = self.coordinator.poll_timeout(self.now());
            let check_at = check_at.map(|at| self.started + Duration::from_nanos(at));
            match self.group.inbox.recv(check_at) {
                Ok(CoordinatorMsg::Vote(vote)) => self.vote(vote),
                Ok(CoordinatorMsg::Finished(rank, result)) => self.end(rank, result),
                Err(RecvError::TimedOut) => {}
                Err(RecvError::Closed(closed)) => self.end_all(&closed.0),
            }
            self.check_deadlines();
        }
        match self.failed {
            Some(failed) => Err(StepFailure { has_begun_update: self.is_committed, ..failed }),
            None => Ok(self.reports.into_iter().flatten().flatten().collect()),
        }
    }

    // ---- Deadlines ----

    /// Reports the activity of all ranks to the coordinator.
    fn observe(&mut self) {
        let now = self.now();
        for (rank, worker) in self.group.workers.iter().enumerate() {
            let activity = worker.endpoint.activity(worker.driver.heartbeats());
            if let Err(error) = self.coordinator.observe(now, Rank(rank as u32), activity) {
                return self.end_all(&defect(&error));
            }
        }
    }

    /// Abandons ranks with a hung device, and the step if all ranks wait for each other.
    fn check_deadlines(&mut self) {
        self.observe();
        for expiry in self.coordinator.handle_timeout(self.now()) {
            match expiry {
                Expiry::Hung(rank) => {
                    let error = self.group.workers[rank.index()].driver.abandon("a step");
                    self.end(rank, Err(error));
                }
                Expiry::Deadlock { unvoted } => self.end_deadlock(&unvoted),
            }
        }
    }

    /// Ends the step because all ranks wait. If only votes of other nodes are missing, abandons
    /// these nodes.
    fn end_deadlock(&mut self, unvoted: &[Rank]) {
        let seconds = Duration::from_nanos(self.group.deadline()).as_secs_f64();
        let mut nodes = Vec::with_capacity(unvoted.len());
        for rank in unvoted {
            if let Some(slot) = self.group.workers[rank.index()].driver.remote() {
                nodes.push(slot);
            }
        }
        if nodes.is_empty() || nodes.len() < unvoted.len() {
            let unvoted: Vec<String> = unvoted.iter().map(Rank::to_string).collect();
            return self.end_all(&format!(
                "all devices have waited for each other for {seconds} s, without a vote of {}, \
                 which is a defect of potluck; please report it",
                unvoted.join(", ")
            ));
        }
        let round = self.coordinator.round();
        for (rank, slot) in unvoted.iter().zip(nodes) {
            // Its ranks report the loss.
            slot.node.give_up(&format!(
                "it has sent no vote of {rank} for {round}, although all ranks have waited for \
                 {seconds} s and those of this node have voted"
            ));
        }
    }

    // ---- Ends ----

    /// Processes a vote; an unexpected one is a failure of its rank.
    fn vote(&mut self, vote: Vote) {
        let rank = vote.rank;
        match self.coordinator.vote(self.now(), vote) {
            Err(error) if rank.index() < self.reports.len() => {
                let adapter = self.group.name(rank).to_string();
                let why = defect(&error);
                self.end(rank, Err(DeviceError::Refused { adapter, what: "a step".into(), why }));
            }
            announced => self.announce(announced),
        }
    }

    /// Ends the step of every remaining rank, for a common reason.
    fn end_all(&mut self, why: &str) {
        for rank in (0..self.reports.len() as u32).map(Rank) {
            if self.reports[rank.index()].is_none() {
                let adapter = self.group.name(rank).to_string();
                let what = "a step".into();
                self.end(rank, Err(DeviceError::Refused { adapter, what, why: why.into() }));
            }
        }
    }

    fn end(&mut self, rank: Rank, result: Result<StepReport, DeviceError>) {
        match (&self.reports[rank.index()], &result) {
            (None, _) => {}
            // Other ranks may still wait for values of a node lost after the end of its rank.
            (Some(Ok(_)), Err(DeviceError::NodeLost { .. })) => {}
            // An abandoned rank may still report its end.
            (Some(_), _) => return,
        }
        let result = match result {
            // Only a failure discards a step; without one, a thread has ended unexpectedly.
            Ok(StepReport { outcome: Outcome::Discarded(why), .. }) if self.failed.is_none() => {
                let adapter = self.group.name(rank).to_string();
                Err(DeviceError::Refused { adapter, what: "a step".into(), why })
            }
            result => result,
        };
        match result {
            Ok(report) => {
                self.reports[rank.index()] = Some(Ok(report));
                let finished = self.coordinator.finish(self.now(), rank);
                self.announce(finished.map(|()| None));
            }
            Err(error) => {
                self.reports[rank.index()] = Some(Err(()));
                self.fail(rank, error);
            }
        }
    }

    fn fail(&mut self, rank: Rank, error: DeviceError) {
        self.group.workers[rank.index()].driver.note(&error);
        let announced = self.coordinator.fail(self.now(), rank, &error.to_string());
        let failure =
            StepFailure { first: (rank, error), failed: Vec::new(), has_begun_update: false };
        self.failed.get_or_insert(failure).failed.push(rank);
        self.announce(announced);
    }

    /// Sends a decision to all ranks.
    fn announce(&mut self, announced: Result<Option<Announcement>, StepError>) {
        let Announcement { round, decision } = match announced {
            Ok(Some(announcement)) => announcement,
            Ok(None) => return,
            Err(error) => return self.end_all(&defect(&error)),
        };
        for worker in &self.group.workers {
            match &decision {
                Decision::Verdict(verdict) => {
                    self.is_committed = self.updates && matches!(verdict, Verdict::Commit(_));
                    worker.endpoint.decide(round, verdict);
                }
                Decision::Abort { why, .. } => worker.endpoint.close(why),
            }
        }
    }
}

fn defect(error: &StepError) -> String {
    format!("{error}, which is a defect of potluck; please report it")
}
