//! Coordinator thread: runs a [`Coordinator`] per step, sends its decisions to all ranks, and
//! begins the next step when every rank has reported the end of the current one.

use super::scenario::{Scenario, SeededBug};
use crate::base::Rank;
use crate::collective::Collective;
use crate::parallel::{Coordinator, Decision, Verdict, Vote};

/// Message to the coordinator thread.
#[derive(Clone, Debug)]
pub enum ToCoordinator {
    Vote(Vote),
    Failed {
        rank: Rank,
        why: String,
    },
    /// The step of a rank is over, updated or skipped.
    Finished {
        rank: Rank,
    },
}

/// Message to the device thread of a rank.
#[derive(Clone, Debug)]
pub enum ToDriver {
    /// End of a collective, sent by the rank's own ring thread.
    Done(Collective),
    Verdict(Verdict),
    Abort {
        rank: Rank,
        why: String,
    },
    /// Begin this step.
    Step(u64),
    /// The run is over.
    Over,
}

/// State of the coordinator thread.
#[derive(Debug)]
pub struct CoordinatorThread {
    coordinator: Coordinator,
    step: u64,
    steps: u64,
    finished: Vec<bool>,
    is_over: bool,
    /// State of [`SeededBug::CommitsEarly`]: the votes of this step, and (`early`) the rank that
    /// received its verdict too early.
    votes: Vec<Vote>,
    early: Option<Rank>,
    seeded_bug: Option<SeededBug>,
}

impl CoordinatorThread {
    pub fn new(scenario: &Scenario) -> Self {
        Self {
            coordinator: Coordinator::new(scenario.world() as u32),
            step: 0,
            steps: scenario.steps,
            finished: vec![true; scenario.world()],
            is_over: false,
            votes: Vec::new(),
            early: None,
            seeded_bug: scenario.seeded_bug,
        }
    }

    /// Returns the messages to send when every rank is ready for the next step.
    pub fn next_step(&mut self) -> Vec<(Rank, ToDriver)> {
        self.is_over = self.step == self.steps;
        if self.is_over {
            return self.to_all(&ToDriver::Over);
        }
        self.step += 1;
        self.finished.fill(false);
        self.coordinator = Coordinator::new(self.finished.len() as u32);
        self.votes.clear();
        self.early = None;
        self.to_all(&ToDriver::Step(self.step))
    }

    /// Processes a message and returns the messages to send in response.
    pub fn handle(&mut self, news: ToCoordinator) -> Vec<(Rank, ToDriver)> {
        match news {
            ToCoordinator::Vote(vote) => {
                let told_early = self.commit_early(&vote);
                let announced = self.coordinator.vote(vote);
                announced.map_or(told_early, |said| self.announce(said))
            }
            // A run that is over cannot fail any more.
            ToCoordinator::Failed { .. } if self.is_over => Vec::new(),
            ToCoordinator::Failed { rank, why } => {
                let announced = self.coordinator.fail(rank, &why);
                announced.map_or(Vec::new(), |said| self.announce(said))
            }
            ToCoordinator::Finished { rank } => {
                self.finished[rank.index()] = true;
                let is_next = self.finished.iter().all(|&is_finished| is_finished);
                if is_next { self.next_step() } else { Vec::new() }
            }
        }
    }

    fn announce(&self, said: Decision) -> Vec<(Rank, ToDriver)> {
        match said {
            Decision::Verdict(verdict) => {
                let mut told = self.to_all(&ToDriver::Verdict(verdict));
                told.retain(|(rank, _)| Some(*rank) != self.early);
                told
            }
            Decision::Abort { rank, why } => {
                let mut told = self.to_all(&ToDriver::Abort { rank, why });
                if self.seeded_bug == Some(SeededBug::LosesFailure) {
                    let forgotten = told.iter().rposition(|(other, _)| *other != rank);
                    forgotten.map(|index| told.remove(index));
                }
                told
            }
        }
    }

    /// Returns the premature verdict of `SeededBug::CommitsEarly`, if that bug is seeded and due.
    fn commit_early(&mut self, vote: &Vote) -> Vec<(Rank, ToDriver)> {
        if self.seeded_bug != Some(SeededBug::CommitsEarly) {
            return Vec::new();
        }
        self.votes.push(vote.clone());
        if self.votes.len() + 1 != self.finished.len() {
            return Vec::new();
        }
        let first = self.votes[0].rank;
        self.early = Some(first);
        vec![(first, ToDriver::Verdict(Verdict::from_votes(&self.votes)))]
    }

    fn to_all(&self, mail: &ToDriver) -> Vec<(Rank, ToDriver)> {
        (0..self.finished.len() as u32).map(|rank| (Rank(rank), mail.clone())).collect()
    }
}
