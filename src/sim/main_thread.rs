//! The thread that the drivers report to: it asks a [`Coordinator`] per step, tells everyone what
//! it announces, and begins the next step when every rank has reported the end of this one.

use super::scenario::{Scenario, SeededBug};
use crate::base::Rank;
use crate::collective::Collective;
use crate::parallel::{Coordinator, Decision, Verdict, Vote};

/// What main is told.
#[derive(Clone, Debug)]
pub enum ToCoordinator {
    Vote(Vote),
    Failed {
        rank: Rank,
        why: String,
    },
    /// A rank's step is over, updated or skipped.
    Finished {
        rank: Rank,
    },
}

/// What a driver is told.
#[derive(Clone, Debug)]
pub enum ToDriver {
    /// By its own ring.
    Done(Collective),
    Verdict(Verdict),
    Discard {
        rank: Rank,
        why: String,
    },
    /// Begin this step.
    Step(u64),
    /// The run is over.
    Over,
}

/// The main thread.
#[derive(Debug)]
pub struct CoordinatorThread {
    coordinator: Coordinator,
    step: u64,
    steps: u64,
    finished: Vec<bool>,
    is_over: bool,
    /// For [`SeededBug::CommitsEarly`]: votes of this step, and who was told too early.
    votes: Vec<Vote>,
    early: Option<Rank>,
    seeded_bug: Option<SeededBug>,
}

impl CoordinatorThread {
    pub fn new(scenario: &Scenario) -> Self {
        Self {
            coordinator: Coordinator::new(scenario.layout.world),
            step: 0,
            steps: scenario.steps,
            finished: vec![true; scenario.world()],
            is_over: false,
            votes: Vec::new(),
            early: None,
            seeded_bug: scenario.seeded_bug,
        }
    }

    /// What is to be told when every rank is ready for the next step.
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

    /// Takes in what is told, and says what is to be told.
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
                let mut told = self.to_all(&ToDriver::Discard { rank, why });
                if self.seeded_bug == Some(SeededBug::ForgetsToTell) {
                    let forgotten = told.iter().rposition(|(other, _)| *other != rank);
                    forgotten.map(|index| told.remove(index));
                }
                told
            }
        }
    }

    /// The planted defect, if it is planted.
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
