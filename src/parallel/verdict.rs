//! Votes of the ranks at the end of a step, and the verdict that follows from them.

use crate::base::{Rank, Round};

/// Vote of one rank on its share of a step. Its values are sums, so that shares of any size add
/// up.
#[derive(Clone, Debug, PartialEq)]
pub struct Vote {
    pub round: Round,
    pub rank: Rank,
    /// Sum of the losses over `count` targets.
    pub loss: f64,
    pub count: f64,
    /// Sum of squares of the gradient sums that this rank contributes to the norm.
    pub sum_squares: f64,
    /// Gradient elements that are not finite.
    pub not_finite: u64,
}

/// Verdict on a step, the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// All ranks update.
    Commit(Totals),
    /// No rank updates, because a value is not finite or no target counted. The batch is
    /// consumed, the schedule advances, the optimizer's own step does not.
    Skip { totals: Totals, reason: SkipReason },
}

/// Reason for skipping a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    LossNotFinite,
    GradientNotFinite,
    NothingCounted,
}

/// Totals of a step over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Totals {
    /// Mean loss over the global batch.
    pub loss: f64,
    pub count: f64,
    /// Norm of the gradient of the mean loss.
    pub gradient_norm: f64,
}

impl Verdict {
    /// Decides from the votes of all ranks, summed in the order of ranks.
    pub fn from_votes(votes: &[Vote]) -> Self {
        let mut ordered: Vec<&Vote> = votes.iter().collect();
        ordered.sort_by_key(|vote| vote.rank);
        let sum = |value: fn(&Vote) -> f64| ordered.iter().map(|vote| value(vote)).sum::<f64>();
        let count = sum(|vote| vote.count);
        let totals = Totals {
            loss: sum(|vote| vote.loss) / count,
            count,
            gradient_norm: sum(|vote| vote.sum_squares).sqrt() / count,
        };
        let not_finite = ordered.iter().any(|vote| vote.not_finite > 0);
        let reason = if count == 0.0 {
            Some(SkipReason::NothingCounted)
        } else if !totals.loss.is_finite() {
            Some(SkipReason::LossNotFinite)
        } else if not_finite || !totals.gradient_norm.is_finite() {
            Some(SkipReason::GradientNotFinite)
        } else {
            None
        };
        match reason {
            Some(reason) => Self::Skip { totals, reason },
            None => Self::Commit(totals),
        }
    }

    pub fn totals(&self) -> &Totals {
        match self {
            Self::Commit(totals) | Self::Skip { totals, .. } => totals,
        }
    }
}

impl std::fmt::Display for SkipReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::LossNotFinite => "the loss is not finite",
            Self::GradientNotFinite => "a gradient is not finite",
            Self::NothingCounted => "no target counts",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(rank: u32, loss: f64, count: f64) -> Vote {
        let (round, rank) = (Round::default(), Rank(rank));
        Vote { round, rank, loss, count, sum_squares: 4.0 * count, not_finite: 0 }
    }

    #[test]
    fn the_mean_is_over_all_targets_not_over_ranks() {
        let verdict = Verdict::from_votes(&[vote(0, 30.0, 10.0), vote(1, 2.0, 6.0)]);
        let totals = *verdict.totals();
        assert_eq!(totals.loss, 2.0);
        assert_eq!(totals.gradient_norm, 8.0 / 16.0);
        assert!(matches!(verdict, Verdict::Commit(_)));
    }

    #[test]
    fn one_bad_value_anywhere_skips_for_all() {
        let skipped = |votes: &[Vote]| match Verdict::from_votes(votes) {
            Verdict::Skip { reason, .. } => Some(reason),
            Verdict::Commit(_) => None,
        };
        let bad = Vote { not_finite: 1, ..vote(1, 1.0, 1.0) };
        assert_eq!(skipped(&[vote(0, 1.0, 1.0), bad]), Some(SkipReason::GradientNotFinite));
        assert_eq!(skipped(&[vote(0, f64::NAN, 1.0)]), Some(SkipReason::LossNotFinite));
        assert_eq!(skipped(&[vote(0, 0.0, 0.0)]), Some(SkipReason::NothingCounted));
        assert_eq!(skipped(&[vote(0, 1.0, 1.0)]), None);
    }
}
