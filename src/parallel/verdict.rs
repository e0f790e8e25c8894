//! Votes of the ranks at the end of a step, and the verdict that follows from them.

use potluck_core::{BucketId, ChunkId, Position, Rank, Round};
use potluck_graph::Plan;

/// Vote of one rank on its share of a step. Its values are sums, so that shares of any size add
/// up.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Vote {
    pub round: Round,
    pub rank: Rank,
    /// Sum of the losses over `count` targets.
    pub loss: f64,
    pub count: f64,
    /// Sums of the terms of the loss.
    pub terms: Vec<f64>,
    /// Factor of the gradients, the same on all ranks.
    pub loss_scale: f64,
    /// Squares of the gradient sums that this rank contributes to the norm.
    pub gradients: Vec<GradientSquares>,
}

impl Vote {
    /// Removes the squares of running averages, which are no gradients of the loss; their
    /// non-finite values still count.
    pub fn without_states(mut self, plan: &Plan) -> Self {
        for of in &mut self.gradients {
            if plan.buckets[of.bucket.index()].kind.is_state() {
                of.squares = 0.0;
            }
        }
        self
    }
}

/// Sum of squares of gradient sums: of one chunk, or of a whole bucket, which counts as its first
/// chunk. Norms are summed by owners' positions in their groups, then by bucket and chunk, so that
/// the result does not depend on which rank has which bucket.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GradientSquares {
    /// Position of the rank that owns the chunk.
    pub position: Position,
    pub bucket: BucketId,
    pub chunk: ChunkId,
    pub squares: f64,
    /// Gradient sums that are not finite.
    pub not_finite: u64,
}

/// Sum of squares over all gradients: by position, then over the positions.
fn sum_of_squares(gradients: &mut [&GradientSquares]) -> f64 {
    gradients.sort_by_key(|of| (of.position, of.bucket, of.chunk));
    let positions = gradients.chunk_by(|one, next| one.position == next.position);
    positions.map(|of| of.iter().fold(0.0, |sum, of| sum + of.squares)).sum()
}

/// Verdict on a step, the same on all ranks.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Verdict {
    /// All ranks update.
    Commit(Totals),
    /// No rank updates, because a value is not finite or no target counted. The batch is
    /// consumed, the schedule advances, the optimizer's own step does not.
    Skip { totals: Totals, reason: SkipReason },
}

/// Reason for skipping a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum SkipReason {
    LossNotFinite,
    GradientNotFinite,
    NothingCounted,
}

/// Totals of a step over all ranks.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Totals {
    /// Mean loss over the global batch.
    pub loss: f64,
    pub count: f64,
    /// Means of the terms of the loss.
    pub terms: Vec<f64>,
    /// Norm of the gradient of the mean loss.
    pub gradient_norm: f64,
}

impl Verdict {
    /// Decides from the votes of all ranks, summed in the order of ranks.
    pub fn from_votes(votes: &[Vote]) -> Self {
        let mut ordered: Vec<&Vote> = votes.iter().collect();
        ordered.sort_by_key(|vote| vote.rank);
        let loss: f64 = ordered.iter().map(|vote| vote.loss).sum();
        let count: f64 = ordered.iter().map(|vote| vote.count).sum();
        let mut gradients: Vec<&GradientSquares> = Vec::new();
        let mut terms: Vec<f64> = Vec::new();
        for vote in &ordered {
            gradients.extend(&vote.gradients);
            if vote.terms.len() > terms.len() {
                terms.resize(vote.terms.len(), 0.0);
            }
            for (sum, term) in terms.iter_mut().zip(&vote.terms) {
                *sum += term;
            }
        }
        for term in &mut terms {
            *term /= count;
        }
        let loss_scale = match ordered.first() {
            Some(vote) => vote.loss_scale,
            None => 1.0,
        };
        let totals = Totals {
            loss: loss / count,
            count,
            terms,
            gradient_norm: sum_of_squares(&mut gradients).sqrt() / (count * loss_scale),
        };
        let not_finite = gradients.iter().any(|of| of.not_finite > 0);
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

    /// Returns true if no target of the step counts, so that it has neither a loss nor gradients.
    pub fn counts_nothing(&self) -> bool {
        matches!(self, Self::Skip { reason: SkipReason::NothingCounted, .. })
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

    fn squares(position: u32, chunk: u32, squares: f64) -> GradientSquares {
        let (position, bucket) = (Position(position), BucketId(chunk / 2));
        GradientSquares { position, bucket, chunk: ChunkId(chunk), squares, not_finite: 0 }
    }

    fn vote(rank: u32, loss: f64, count: f64) -> Vote {
        let gradients = vec![squares(rank, 0, 4.0 * count)];
        let round = Round::default();
        Vote {
            round,
            rank: Rank(rank),
            loss,
            count,
            terms: vec![loss / 2.0],
            loss_scale: 1.0,
            gradients,
        }
    }

    #[test]
    fn the_mean_is_over_all_targets_not_over_ranks() {
        let verdict = Verdict::from_votes(&[vote(0, 30.0, 10.0), vote(1, 2.0, 6.0)]);
        let totals = verdict.totals().clone();
        assert_eq!((totals.loss, &totals.terms[..]), (2.0, &[1.0][..]));
        assert_eq!(totals.gradient_norm, 8.0 / 16.0);
        assert!(matches!(verdict, Verdict::Commit(_)));
    }

    #[test]
    fn the_norm_is_that_of_gradients_without_the_loss_scale() {
        let scaled = |vote: Vote| Vote { loss_scale: 4.0, ..vote };
        let verdict =
            Verdict::from_votes(&[scaled(vote(0, 30.0, 10.0)), scaled(vote(1, 2.0, 6.0))]);
        let totals = verdict.totals();
        assert_eq!((totals.loss, totals.gradient_norm), (2.0, 8.0 / 16.0 / 4.0));
    }

    #[test]
    fn squares_are_summed_by_position_in_the_order_of_chunks_whoever_has_them() {
        let values = [1e17, 0.2, 0.3, 1e-17, -1e17, 7.0, 3.3];
        let of = |index: usize| squares(index as u32 % 2, index as u32, values[index]);
        let sum_from = |parts: &[&[usize]]| {
            let vote = |(rank, part): (usize, &&[usize])| Vote {
                gradients: part.iter().copied().map(of).collect(),
                ..vote(rank as u32, 1.0, 1.0)
            };
            let votes: Vec<Vote> = parts.iter().enumerate().map(vote).collect();
            let verdict = Verdict::from_votes(&votes);
            let totals = verdict.totals();
            (totals.gradient_norm * totals.count).to_bits()
        };
        let even = ((1e17 + 0.3) - 1e17) + 3.3;
        let odd = (0.2 + 1e-17) + 7.0;
        let expected = f64::sqrt(even + odd);
        let expected = (expected / 2.0 * 2.0).to_bits();
        assert_eq!(sum_from(&[&[0, 2, 4, 6], &[1, 3, 5]]), expected);
        assert_eq!(sum_from(&[&[6, 5, 0], &[4, 3, 2, 1]]), expected);
        let in_another_order = f64::sqrt(values.iter().sum::<f64>());
        assert_ne!(expected, in_another_order.to_bits(), "the order shows");
    }

    #[test]
    fn one_bad_value_anywhere_skips_for_all() {
        let skipped = |votes: &[Vote]| match Verdict::from_votes(votes) {
            Verdict::Skip { reason, .. } => Some(reason),
            Verdict::Commit(_) => None,
        };
        let bad = GradientSquares { not_finite: 1, ..squares(1, 0, 1.0) };
        let bad = Vote { gradients: vec![bad], ..vote(1, 1.0, 1.0) };
        assert_eq!(skipped(&[vote(0, 1.0, 1.0), bad]), Some(SkipReason::GradientNotFinite));
        assert_eq!(skipped(&[vote(0, f64::NAN, 1.0)]), Some(SkipReason::LossNotFinite));
        assert_eq!(skipped(&[vote(0, 0.0, 0.0)]), Some(SkipReason::NothingCounted));
        assert_eq!(skipped(&[vote(0, 1.0, 1.0)]), None);
    }
}
