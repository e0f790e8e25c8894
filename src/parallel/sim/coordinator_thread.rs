//! Coordinator thread: runs a [`Coordinator`] per round, sends its decisions to all ranks, checks
//! deadlines, and begins the next step when every rank has ended the current one.

use super::scenario::{Scenario, SeededBug};
use crate::coordinator::RankActivity;
use crate::{Announcement, Coordinator, Decision, Expiry, StepError, Verdict, Vote};
use potluck_core::{Nanos, Rank, Round};

/// Message to the coordinator thread.
#[derive(Clone, Debug)]
pub(crate) enum ToCoordinator {
    Vote(Vote),
    Failed {
        rank: Rank,
        why: String,
    },
    /// The step of a rank is over: updated, skipped, or discarded for this reason.
    Finished {
        rank: Rank,
        discarded: Option<String>,
    },
}

/// Message of the coordinator thread to a rank.
#[derive(Clone, Debug)]
pub(crate) enum ToRank {
    /// Begin a round.
    Step(Round),
    Verdict {
        round: Round,
        verdict: Verdict,
    },
    /// A rank failed: the mailboxes of all ranks are closed.
    Abort {
        rank: Rank,
        why: String,
    },
    /// The run is over.
    Over,
}

/// Messages to ranks, in the order in which they are sent.
pub(crate) type ToRanks = Vec<(Rank, ToRank)>;

/// State of the coordinator thread.
#[derive(Debug)]
pub(crate) struct CoordinatorThread {
    coordinator: Coordinator,
    deadline: Nanos,
    world: u32,
    steps: u64,
    /// True if a settling round follows the last step.
    settles: bool,
    has_failed: bool,
    is_over: bool,
    /// State of [`SeededBug::CommitsEarly`]: the votes of this step, and (`early`) the rank that
    /// received its verdict too early.
    votes: Vec<Vote>,
    early: Option<Rank>,
    seeded_bug: Option<SeededBug>,
}

impl CoordinatorThread {
    pub fn new(scenario: &Scenario) -> Self {
        let world = scenario.world() as u32;
        let deadline = scenario.deadline();
        Self {
            coordinator: Coordinator::new(Round::default(), world, deadline, 0),
            deadline,
            world,
            steps: scenario.steps,
            settles: scenario.spread.is_some(),
            has_failed: false,
            is_over: false,
            votes: Vec::new(),
            early: None,
            seeded_bug: scenario.seeded_bug,
        }
    }

    /// Returns the messages to send when every rank is ready for the next step.
    pub fn next_step(&mut self, now: Nanos) -> ToRanks {
        let round = self.coordinator.round();
        let is_last = round.step == self.steps;
        self.is_over = is_last && round.settles == self.settles;
        if self.is_over {
            return self.to_all(&ToRank::Over);
        }
        let round = if is_last { round.settling() } else { round.next(round.step + 1) };
        self.coordinator = Coordinator::new(round, self.world, self.deadline, now);
        self.votes.clear();
        self.early = None;
        self.to_all(&ToRank::Step(round))
    }

    /// Processes a message and returns the messages to send in response.
    ///
    /// # Errors
    /// Returns the error of the coordinator about the message.
    pub fn handle(&mut self, now: Nanos, message: ToCoordinator) -> Result<ToRanks, StepError> {
        let announcement = match message {
            ToCoordinator::Vote(vote) => {
                let early = self.commit_early(&vote);
                let announcement = self.coordinator.vote(now, vote)?;
                if announcement.is_none() {
                    return Ok(early);
                }
                announcement
            }
            // A run that is over cannot fail.
            ToCoordinator::Failed { .. } if self.is_over => None,
            ToCoordinator::Failed { rank, why } => self.coordinator.fail(now, rank, &why)?,
            // Only a failure discards a step; without one, a thread has ended unexpectedly.
            ToCoordinator::Finished { rank, discarded: Some(why) } if !self.has_failed => {
                self.coordinator.fail(now, rank, &why)?
            }
            ToCoordinator::Finished { rank, .. } => {
                self.coordinator.finish(now, rank)?;
                None
            }
        };
        let mut messages = match announcement {
            Some(announcement) => self.announce(announcement),
            None => Vec::new(),
        };
        if self.coordinator.pending().is_empty() && !self.has_failed && !self.is_over {
            messages.extend(self.next_step(now));
        }
        Ok(messages)
    }

    // ---- Deadlines ----

    /// Returns the time of the next check of all ranks.
    pub fn poll_timeout(&self, now: Nanos) -> Option<Nanos> {
        if self.is_over { None } else { self.coordinator.poll_timeout(now) }
    }

    /// Records the activities of all ranks, and returns the deadlines that have passed.
    pub fn check(
        &mut self,
        now: Nanos,
        activities: &[RankActivity],
    ) -> Result<Vec<Expiry>, StepError> {
        for (rank, activity) in activities.iter().enumerate() {
            self.coordinator.observe(now, Rank(rank as u32), *activity)?;
        }
        Ok(self.coordinator.handle_timeout(now))
    }

    /// Returns the ranks whose step has not ended.
    pub fn pending(&self) -> Vec<Rank> {
        self.coordinator.pending()
    }

    // ---- Announcements ----

    fn announce(&mut self, Announcement { round, decision }: Announcement) -> ToRanks {
        match decision {
            Decision::Verdict(verdict) => {
                let mut messages = self.to_all(&ToRank::Verdict { round, verdict });
                messages.retain(|(rank, _)| Some(*rank) != self.early);
                messages
            }
            Decision::Abort { rank, why } => {
                self.has_failed = true;
                let mut messages = self.to_all(&ToRank::Abort { rank, why });
                if self.seeded_bug == Some(SeededBug::LosesFailure) {
                    let lost = messages.iter().rposition(|(other, _)| *other != rank);
                    if let Some(lost) = lost {
                        messages.remove(lost);
                    }
                }
                messages
            }
        }
    }

    /// Premature verdict of `SeededBug::CommitsEarly`, if that bug is seeded and due.
    fn commit_early(&mut self, vote: &Vote) -> ToRanks {
        if self.seeded_bug != Some(SeededBug::CommitsEarly) {
            return Vec::new();
        }
        self.votes.push(vote.clone());
        if self.votes.len() + 1 != self.world as usize {
            return Vec::new();
        }
        let first = self.votes[0].rank;
        self.early = Some(first);
        let verdict = Verdict::from_votes(&self.votes);
        vec![(first, ToRank::Verdict { round: vote.round, verdict })]
    }

    fn to_all(&self, message: &ToRank) -> ToRanks {
        (0..self.world).map(|rank| (Rank(rank), message.clone())).collect()
    }
}
