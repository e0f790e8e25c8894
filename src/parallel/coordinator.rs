//! State machine of a step's verdict: receives the votes and failures of all ranks, returns one
//! decision for all.
//!
//! No rank updates before a verdict of commit was announced, and a verdict is announced only
//! after every rank has voted. So as long as a rank may still fail, all parameters are those of
//! the previous step.

use super::verdict::{Verdict, Vote};
use crate::base::Rank;

/// Decision of the coordinator on one step, the same for every rank; at most one verdict and one
/// abort per step.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Verdict(Verdict),
    /// A rank failed: no further update, and the same samples are to run again.
    Abort {
        rank: Rank,
        why: String,
    },
}

/// Collects the votes and failures of all ranks in one step.
#[derive(Debug)]
pub struct Coordinator {
    votes: Vec<Option<Vote>>,
    /// True once the first failure was announced; nothing is announced after it.
    failed: bool,
}

impl Coordinator {
    /// Creates the coordinator of one step of ranks `0..world`, none of which has voted.
    pub fn new(world: u32) -> Self {
        Self { votes: vec![None; world as usize], failed: false }
    }

    /// Records a rank's vote. Returns the decision if this was the last missing vote. A vote
    /// after a failure (its rank did not know yet) changes nothing. Panics if the rank is outside
    /// the world or votes twice, which is a defect of the caller.
    pub fn vote(&mut self, vote: Vote) -> Option<Decision> {
        let Rank(rank) = vote.rank;
        let world = self.votes.len();
        assert!((rank as usize) < world, "rank {rank} votes in a world of {world}");
        let slot = &mut self.votes[rank as usize];
        assert!(slot.is_none(), "rank {rank} votes twice");
        *slot = Some(vote);
        if self.failed || !self.pending_ranks().is_empty() {
            return None;
        }
        let votes: Vec<Vote> = self.votes.iter().flatten().cloned().collect();
        Some(Decision::Verdict(Verdict::from_votes(&votes)))
    }

    /// Records a rank's failure. Returns the decision to abort if no failure was announced
    /// before. After a verdict of commit the step cannot be taken back: the failure is announced
    /// all the same, once, as what ends the run.
    pub fn fail(&mut self, rank: Rank, why: &str) -> Option<Decision> {
        assert!(rank.index() < self.votes.len(), "{rank} fails in a world of {}", self.votes.len());
        if std::mem::replace(&mut self.failed, true) {
            return None;
        }
        Some(Decision::Abort { rank, why: why.to_owned() })
    }

    /// Returns the ranks whose votes are missing; none once a failure was announced.
    pub fn pending_ranks(&self) -> Vec<Rank> {
        let ranks = (0..self.votes.len() as u32).map(Rank);
        let is_missing = |rank: &Rank| !self.failed && self.votes[rank.index()].is_none();
        ranks.filter(is_missing).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(rank: u32) -> Vote {
        Vote { rank: Rank(rank), loss: 2.0, count: 1.0, sum_squares: 4.0, not_finite: 0 }
    }

    fn abort(rank: u32, why: &str) -> Option<Decision> {
        Some(Decision::Abort { rank: Rank(rank), why: why.into() })
    }

    #[test]
    fn the_last_vote_decides_in_any_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut coordinator = Coordinator::new(3);
            assert_eq!(coordinator.vote(vote(order[0])), None);
            assert_eq!(coordinator.vote(vote(order[1])), None);
            assert_eq!(coordinator.pending_ranks(), [Rank(order[2])]);
            let expected = Verdict::from_votes(&[vote(0), vote(1), vote(2)]);
            let last = coordinator.vote(vote(order[2]));
            assert_eq!(last, Some(Decision::Verdict(expected)));
            assert!(coordinator.pending_ranks().is_empty());
        }
    }

    #[test]
    fn one_value_that_is_not_finite_skips_for_all() {
        let mut coordinator = Coordinator::new(2);
        coordinator.vote(Vote { not_finite: 1, ..vote(1) });
        let said = coordinator.vote(vote(0));
        assert!(matches!(said, Some(Decision::Verdict(Verdict::Skip { .. }))), "{said:?}");
    }

    #[test]
    fn the_first_failure_is_announced_and_no_verdict_after_it() {
        let mut coordinator = Coordinator::new(2);
        assert_eq!(coordinator.vote(vote(0)), None);
        assert_eq!(coordinator.fail(Rank(1), "lost"), abort(1, "lost"));
        assert!(coordinator.pending_ranks().is_empty());
        assert_eq!(coordinator.fail(Rank(0), "its neighbour is gone"), None);
        assert_eq!(coordinator.vote(vote(1)), None);
    }

    #[test]
    fn a_failure_after_the_verdict_is_announced_once() {
        let mut coordinator = Coordinator::new(1);
        let said = coordinator.vote(vote(0));
        assert!(matches!(said, Some(Decision::Verdict(Verdict::Commit(_)))));
        assert_eq!(coordinator.fail(Rank(0), "lost"), abort(0, "lost"));
        assert_eq!(coordinator.fail(Rank(0), "lost"), None);
    }

    #[test]
    #[should_panic(expected = "rank 1 votes twice")]
    fn a_second_vote_of_a_rank_is_a_defect() {
        let mut coordinator = Coordinator::new(2);
        coordinator.vote(vote(1));
        coordinator.vote(vote(1));
    }

    #[test]
    #[should_panic(expected = "rank 2 votes in a world of 2")]
    fn a_vote_of_nobody_is_a_defect() {
        Coordinator::new(2).vote(vote(2));
    }
}
