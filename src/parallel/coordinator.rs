//! State machine of a step's decision: receives the votes, ends, failures and activities of all
//! ranks, and returns one decision for all. Time is an argument.
//!
//! No rank updates before a verdict of commit was announced, and a verdict is announced only
//! after every rank has voted. So as long as a rank may still fail, all ranks have the parameters
//! of the previous step.

use super::StepError;
use super::verdict::{Verdict, Vote};
use potluck_core::{Nanos, Rank, Round};

/// Checks of the ranks' activity per deadline; `CHECK_INTERVAL_MAX` bounds the time between two.
const CHECKS_PER_DEADLINE: Nanos = 8;
const CHECK_INTERVAL_MAX: Nanos = 1_000_000_000;

/// Decision of the coordinator on one step, the same for every rank; at most one verdict and one
/// abort per round.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Verdict(Verdict),
    /// A rank failed: no further update, and the same samples are to run again.
    Abort {
        rank: Rank,
        why: String,
    },
}

/// Decision with the round that it is about.
#[derive(Clone, Debug, PartialEq)]
pub struct Announcement {
    pub round: Round,
    pub decision: Decision,
}

/// Activity of a rank's threads: counters that grow only while it makes progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankActivity {
    /// Heartbeats of its device.
    pub heartbeats: u64,
    /// Messages that its device thread has received.
    pub received: u64,
    /// True while its device thread waits for other ranks: a missing heartbeat then does not mean
    /// a hung device.
    pub is_waiting: bool,
}

/// Deadline that has passed. The caller ends the ranks concerned with [`Coordinator::fail`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// The device of a rank that does not wait has shown no heartbeat for the deadline.
    Hung(Rank),
    /// For the deadline, no device has worked and no device thread has received a message: all
    /// ranks wait for each other. Ring threads are not seen, so the deadline must be longer than a
    /// chunk takes to pass through all ranks. `unvoted` are the ranks whose votes are missing.
    Deadlock { unvoted: Vec<Rank> },
}

#[derive(Debug, Default)]
struct RankState {
    vote: Option<Vote>,
    /// True once the rank's step has ended, also by a failure.
    has_ended: bool,
    activity: RankActivity,
    /// Last time at which the rank waited or its heartbeat had advanced.
    alive_at: Nanos,
}

/// Coordinator of all ranks in one round.
#[derive(Debug)]
pub struct Coordinator {
    round: Round,
    deadline: Nanos,
    ranks: Vec<RankState>,
    /// Last time at which a device worked or a rank received a message.
    progress_at: Nanos,
    /// True once the first failure was announced; nothing is announced after it.
    has_failed: bool,
}

impl Coordinator {
    /// Creates the coordinator of one round of ranks `0..world`, before any vote, at the time
    /// `now`. `deadline` is the longest time without a sign of life; [`Nanos::MAX`] means no
    /// deadline.
    pub fn new(round: Round, world: u32, deadline: Nanos, now: Nanos) -> Self {
        let ranks = (0..world).map(|_| RankState { alive_at: now, ..RankState::default() });
        let ranks = ranks.collect();
        Self { round, deadline, ranks, progress_at: now, has_failed: false }
    }

    pub fn round(&self) -> Round {
        self.round
    }

    // ---- Reports of ranks ----

    /// Records a rank's vote. Returns the decision if this was the last missing vote. A vote
    /// after a failure (its rank did not know yet) or of an earlier round changes nothing.
    ///
    /// # Errors
    /// Returns [`StepError`] for a rank outside the world, a second vote of a rank, and a vote of
    /// a later round.
    pub fn vote(&mut self, now: Nanos, vote: Vote) -> Result<Option<Announcement>, StepError> {
        let rank = vote.rank;
        self.rank(rank)?;
        if !self.is_current(vote.round)? {
            return Ok(None);
        }
        let state = &mut self.ranks[rank.index()];
        if state.vote.is_some() {
            return Err(StepError::VotedTwice { rank });
        }
        state.vote = Some(vote);
        self.progress_at = now;
        if self.has_failed || !self.unvoted().is_empty() {
            return Ok(None);
        }
        let votes: Vec<Vote> = self.ranks.iter().filter_map(|rank| rank.vote.clone()).collect();
        Ok(Some(self.announce(Decision::Verdict(Verdict::from_votes(&votes)))))
    }

    /// Records the end of a rank's step without a failure. A rank that was given up may still
    /// report its end, which changes nothing.
    ///
    /// # Errors
    /// Returns [`StepError`] for a rank outside the world.
    pub fn finish(&mut self, now: Nanos, rank: Rank) -> Result<(), StepError> {
        self.rank(rank)?.has_ended = true;
        self.progress_at = now;
        Ok(())
    }

    /// Records a rank's failure, which also ends its step. Returns the decision to abort if no
    /// failure was announced before. After a verdict of commit the step cannot be undone: the
    /// failure is still announced, once, as the end of the run.
    ///
    /// # Errors
    /// Returns [`StepError`] for a rank outside the world.
    pub fn fail(
        &mut self,
        now: Nanos,
        rank: Rank,
        why: &str,
    ) -> Result<Option<Announcement>, StepError> {
        self.finish(now, rank)?;
        if std::mem::replace(&mut self.has_failed, true) {
            return Ok(None);
        }
        Ok(Some(self.announce(Decision::Abort { rank, why: why.to_owned() })))
    }

    fn announce(&self, decision: Decision) -> Announcement {
        Announcement { round: self.round, decision }
    }

    fn rank(&mut self, rank: Rank) -> Result<&mut RankState, StepError> {
        let world = self.ranks.len() as u32;
        self.ranks.get_mut(rank.index()).ok_or(StepError::UnknownRank { rank, world })
    }

    /// Returns true for this round and false for an earlier one.
    fn is_current(&self, found: Round) -> Result<bool, StepError> {
        if found > self.round {
            return Err(StepError::LaterRound { found, current: self.round });
        }
        Ok(found == self.round)
    }

    // ---- Deadlines ----

    /// Records the activity of a rank's threads at the time `now`.
    ///
    /// # Errors
    /// Returns [`StepError`] for a rank outside the world.
    pub fn observe(
        &mut self,
        now: Nanos,
        rank: Rank,
        activity: RankActivity,
    ) -> Result<(), StepError> {
        let state = self.rank(rank)?;
        if state.has_ended {
            return Ok(());
        }
        let before = std::mem::replace(&mut state.activity, activity);
        if activity.is_waiting || activity.heartbeats != before.heartbeats {
            state.alive_at = now;
        }
        if !activity.is_waiting || activity.received != before.received {
            self.progress_at = now;
        }
        Ok(())
    }

    /// Returns the time at which the caller observes all ranks and calls
    /// [`Coordinator::handle_timeout`] next; `None` without a deadline or once every rank has
    /// ended.
    pub fn poll_timeout(&self, now: Nanos) -> Option<Nanos> {
        if self.deadline == Nanos::MAX || self.ranks.iter().all(|rank| rank.has_ended) {
            return None;
        }
        Some(now.saturating_add(check_interval(self.deadline)))
    }

    /// Returns the deadlines that have passed at the time `now`.
    pub fn handle_timeout(&self, now: Nanos) -> Vec<Expiry> {
        let is_past = |since: Nanos| now.saturating_sub(since) >= self.deadline;
        let pending = self.pending();
        let mut expired = Vec::new();
        for &rank in &pending {
            let state = &self.ranks[rank.index()];
            if !state.activity.is_waiting && is_past(state.alive_at) {
                expired.push(Expiry::Hung(rank));
            }
        }
        if expired.is_empty() && !pending.is_empty() && is_past(self.progress_at) {
            expired.push(Expiry::Deadlock { unvoted: self.unvoted() });
        }
        expired
    }

    // ---- State ----

    /// Returns the ranks whose step has not ended.
    pub fn pending(&self) -> Vec<Rank> {
        self.ranks_where(|rank| !rank.has_ended)
    }

    /// Returns the ranks whose votes are missing; none once a failure was announced.
    pub fn unvoted(&self) -> Vec<Rank> {
        self.ranks_where(|rank| !self.has_failed && rank.vote.is_none())
    }

    fn ranks_where(&self, is_wanted: impl Fn(&RankState) -> bool) -> Vec<Rank> {
        let mut ranks = Vec::new();
        for (rank, state) in self.ranks.iter().enumerate() {
            if is_wanted(state) {
                ranks.push(Rank(rank as u32));
            }
        }
        ranks
    }
}

/// Returns the time between two checks of a rank's activity within a deadline.
pub fn check_interval(deadline: Nanos) -> Nanos {
    (deadline / CHECKS_PER_DEADLINE).min(CHECK_INTERVAL_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GradientSquares;
    use potluck_core::{BucketId, ChunkId, Position};

    const ROUND: Round = Round { generation: 1, step: 7, settles: false };
    const DEADLINE: Nanos = 80;

    fn coordinator(world: u32) -> Coordinator {
        Coordinator::new(ROUND, world, DEADLINE, 1000)
    }

    fn squares(rank: Rank, squares: f64) -> GradientSquares {
        let (position, bucket, chunk) = (Position(rank.0), BucketId(0), ChunkId(rank.0));
        GradientSquares { position, bucket, chunk, squares, not_finite: 0 }
    }

    fn vote(rank: u32) -> Vote {
        let rank = Rank(rank);
        let gradients = vec![squares(rank, 4.0)];
        Vote {
            round: ROUND,
            rank,
            loss: 2.0,
            count: 1.0,
            terms: Vec::new(),
            loss_scale: 1.0,
            gradients,
        }
    }

    fn announced(decision: Decision) -> Option<Announcement> {
        Some(Announcement { round: ROUND, decision })
    }

    fn abort(rank: u32, why: &str) -> Option<Announcement> {
        announced(Decision::Abort { rank: Rank(rank), why: why.into() })
    }

    #[test]
    fn the_last_vote_decides_in_any_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut coordinator = coordinator(3);
            assert_eq!(coordinator.vote(1001, vote(order[0])), Ok(None));
            assert_eq!(coordinator.vote(1002, vote(order[1])), Ok(None));
            assert_eq!(coordinator.unvoted(), [Rank(order[2])]);
            let expected = Verdict::from_votes(&[vote(0), vote(1), vote(2)]);
            let last = coordinator.vote(1003, vote(order[2]));
            assert_eq!(last, Ok(announced(Decision::Verdict(expected))));
            assert!(coordinator.unvoted().is_empty());
        }
    }

    #[test]
    fn one_value_that_is_not_finite_skips_for_all() {
        let mut coordinator = coordinator(2);
        let bad = GradientSquares { not_finite: 1, ..squares(Rank(1), 4.0) };
        coordinator.vote(1001, Vote { gradients: vec![bad], ..vote(1) }).unwrap();
        let last = coordinator.vote(1002, vote(0)).unwrap().unwrap();
        assert!(matches!(last.decision, Decision::Verdict(Verdict::Skip { .. })), "{last:?}");
    }

    #[test]
    fn the_first_failure_is_announced_and_no_verdict_after_it() {
        let mut coordinator = coordinator(2);
        assert_eq!(coordinator.vote(1001, vote(0)), Ok(None));
        assert_eq!(coordinator.fail(1002, Rank(1), "lost"), Ok(abort(1, "lost")));
        assert!(coordinator.unvoted().is_empty());
        assert_eq!(coordinator.fail(1003, Rank(0), "its neighbour is gone"), Ok(None));
        assert_eq!(coordinator.vote(1004, vote(1)), Ok(None));
    }

    #[test]
    fn a_failure_after_the_verdict_is_announced_once() {
        let mut coordinator = coordinator(1);
        let last = coordinator.vote(1001, vote(0)).unwrap().unwrap();
        assert!(matches!(last.decision, Decision::Verdict(Verdict::Commit(_))));
        assert_eq!(coordinator.fail(1002, Rank(0), "lost"), Ok(abort(0, "lost")));
        assert_eq!(coordinator.fail(1003, Rank(0), "lost"), Ok(None));
    }

    #[test]
    fn mistakes_of_a_peer_are_errors_that_change_nothing() {
        let mut coordinator = coordinator(2);
        let (earlier, later) =
            (Round { step: 6, ..ROUND }, Round { generation: 2, step: 1, settles: false });
        assert_eq!(coordinator.vote(1001, Vote { round: earlier, ..vote(1) }), Ok(None));
        let error = coordinator.vote(1001, Vote { round: later, ..vote(1) });
        assert_eq!(error, Err(StepError::LaterRound { found: later, current: ROUND }));
        let unknown = StepError::UnknownRank { rank: Rank(2), world: 2 };
        assert_eq!(coordinator.vote(1001, vote(2)), Err(unknown.clone()));
        assert_eq!(coordinator.fail(1001, Rank(2), "lost"), Err(unknown.clone()));
        assert_eq!(coordinator.finish(1001, Rank(2)), Err(unknown));
        assert_eq!(coordinator.vote(1001, vote(1)), Ok(None));
        assert_eq!(coordinator.vote(1001, vote(1)), Err(StepError::VotedTwice { rank: Rank(1) }));
        assert_eq!(coordinator.unvoted(), [Rank(0)]);
        assert!(coordinator.vote(1002, vote(0)).unwrap().is_some());
    }

    #[test]
    fn a_rank_that_works_without_a_heartbeat_expires_at_the_deadline() {
        let mut coordinator = coordinator(2);
        let beats = |heartbeats| RankActivity { heartbeats, ..RankActivity::default() };
        let waits = RankActivity { is_waiting: true, ..RankActivity::default() };
        coordinator.observe(1010, Rank(0), beats(3)).unwrap();
        coordinator.observe(1010, Rank(1), waits).unwrap();
        coordinator.observe(1089, Rank(0), beats(3)).unwrap();
        assert_eq!(coordinator.handle_timeout(1089), []);
        coordinator.observe(1090, Rank(0), beats(3)).unwrap();
        assert_eq!(coordinator.handle_timeout(1090), [Expiry::Hung(Rank(0))]);
        coordinator.observe(1090, Rank(0), beats(4)).unwrap();
        assert_eq!(coordinator.handle_timeout(1090), []);
        assert_eq!(coordinator.finish(1091, Rank(0)), Ok(()));
        assert_eq!(coordinator.pending(), [Rank(1)]);
    }

    #[test]
    fn ranks_that_all_wait_without_a_message_are_deadlocked() {
        let mut coordinator = coordinator(2);
        let waits = |received| RankActivity { heartbeats: 0, received, is_waiting: true };
        coordinator.vote(1001, vote(1)).unwrap();
        coordinator.observe(1010, Rank(0), waits(5)).unwrap();
        coordinator.observe(1050, Rank(1), waits(0)).unwrap();
        coordinator.observe(1089, Rank(0), waits(5)).unwrap();
        assert_eq!(coordinator.handle_timeout(1089), []);
        let unvoted = vec![Rank(0)];
        assert_eq!(coordinator.handle_timeout(1090), [Expiry::Deadlock { unvoted }]);
        coordinator.observe(1090, Rank(0), waits(6)).unwrap();
        assert_eq!(coordinator.handle_timeout(1090), []);
    }

    #[test]
    fn checks_end_with_the_last_rank_and_without_a_deadline_there_are_none() {
        let mut coordinator = coordinator(1);
        assert_eq!(coordinator.poll_timeout(1000), Some(1010));
        coordinator.finish(1001, Rank(0)).unwrap();
        assert_eq!(coordinator.poll_timeout(1001), None);
        assert_eq!(Coordinator::new(ROUND, 1, Nanos::MAX, 0).poll_timeout(0), None);
        assert_eq!(check_interval(60_000_000_000), CHECK_INTERVAL_MAX);
    }
}
