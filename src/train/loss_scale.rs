//! Dynamic loss scale of mixed precision (Micikevicius et al. 2018): a factor of all gradients that
//! keeps small ones above the smallest f16 numbers, and large ones below the largest. It is applied
//! where the gradient of the loss is computed, and removed in the update.

use crate::checkpoint::LossScale;
use potluck_graph::Precision;
use potluck_parallel::{SkipReason, Verdict};

/// Logarithm of the smallest scale. An overflow at this scale must have another cause.
const LOG2_MIN: i32 = -24;

pub(crate) const SCALE_MIN: f32 = 1.0 / (1 << -LOG2_MIN) as f32;

/// Number of consecutive steps without an overflow after which the scale is doubled.
const CLEAN_STEPS: u64 = 2000;

/// Logarithm of the largest product of the scale and the rows of the loss in a step: about the
/// largest f16 number. The derivative of the loss of a row is about 1.
const LOG2_SUM_MAX: i32 = 16;

/// Rule that updates the loss scale of a run after its steps; in f32 it is always 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DynamicLossScale {
    /// `None` in f32.
    now: Option<LossScale>,
    log2_max: i32,
}

impl DynamicLossScale {
    /// Returns the scale of a new run. `rows` is the number of rows of the loss in a step: tokens,
    /// or samples of other data.
    pub fn new(precision: Precision, rows: usize) -> Self {
        let log2_rows = rows.next_power_of_two().trailing_zeros() as i32;
        let log2_max = (LOG2_SUM_MAX - log2_rows).max(LOG2_MIN);
        let first = LossScale { log2: log2_max.min(0), clean_steps: 0 };
        let now = match precision {
            Precision::F32 => None,
            Precision::Mixed => Some(first),
        };
        Self { now, log2_max }
    }

    /// Returns the factor of the gradients of the next step.
    pub fn factor(&self) -> f32 {
        self.now.map_or(1.0, |now| 2f32.powi(now.log2))
    }

    /// Returns the state for a checkpoint; `None` in f32.
    pub fn saved(&self) -> Option<LossScale> {
        self.now
    }

    /// Restores the scale of a checkpoint. If it was saved in the other precision, the scale starts
    /// anew; returns a sentence about that for the user.
    pub fn restore(&mut self, saved: Option<LossScale>) -> Option<String> {
        match (&mut self.now, saved) {
            (Some(now), Some(saved)) => {
                *now = LossScale { log2: saved.log2.clamp(LOG2_MIN, self.log2_max), ..saved };
                None
            }
            (Some(_), None) => Some(format!(
                "precision changes from f32 to mixed; the loss scale starts at {}",
                self.factor()
            )),
            (None, Some(_)) => Some("precision changes from mixed to f32".into()),
            (None, None) => None,
        }
    }

    /// Updates the scale after a step: halves it after an overflow, and doubles it after many steps
    /// without one.
    pub fn follow(&mut self, verdict: &Verdict) {
        let Some(now) = &mut self.now else { return };
        match verdict {
            Verdict::Commit(_) => now.clean_steps = now.clean_steps.saturating_add(1),
            Verdict::Skip { reason: SkipReason::GradientNotFinite, .. } => {
                *now = LossScale { log2: (now.log2 - 1).max(LOG2_MIN), clean_steps: 0 };
            }
            Verdict::Skip { reason: SkipReason::NothingCounted, .. } => {}
            // The loss is not scaled.
            Verdict::Skip { .. } => now.clean_steps = 0,
        }
        if now.clean_steps >= CLEAN_STEPS {
            *now = LossScale { log2: (now.log2 + 1).min(self.log2_max), clean_steps: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_parallel::verdict::Totals;

    const TOTALS: Totals = Totals { loss: 1.0, count: 1.0, terms: Vec::new(), gradient_norm: 1.0 };
    const CLEAN: Verdict = Verdict::Commit(TOTALS);

    fn skip(reason: SkipReason) -> Verdict {
        Verdict::Skip { totals: TOTALS, reason }
    }

    fn after_clean_steps(mut scale: DynamicLossScale, count: u64) -> DynamicLossScale {
        (0..count).for_each(|_| scale.follow(&CLEAN));
        scale
    }

    #[test]
    fn it_starts_at_one_or_at_the_maximum_if_that_is_lower() {
        let first = |rows| DynamicLossScale::new(Precision::Mixed, rows).factor();
        assert_eq!([1, 8, 1 << 16, (1 << 16) + 1, 1 << 18].map(first), [1.0, 1.0, 1.0, 0.5, 0.25]);
        assert_eq!(first(1 << 50), 2f32.powi(-24));
    }

    #[test]
    fn it_is_doubled_after_2000_clean_steps_in_a_row_up_to_the_maximum() {
        // 2^16 / 2^14.
        let scale = DynamicLossScale::new(Precision::Mixed, (1 << 13) + 1);
        let after = |count| after_clean_steps(scale, count).factor();
        let found = [1999, 2000, 3999, 4000, 6000, 8000].map(after);
        assert_eq!(found, [1.0, 2.0, 2.0, 4.0, 4.0, 4.0]);
    }

    #[test]
    fn it_is_halved_after_an_overflow_and_the_count_begins_anew() {
        let mut scale = after_clean_steps(DynamicLossScale::new(Precision::Mixed, 1 << 10), 1999);
        scale.follow(&skip(SkipReason::GradientNotFinite));
        assert_eq!(scale.factor(), 0.5);
        scale = after_clean_steps(scale, 1999);
        assert_eq!(scale.factor(), 0.5);
        scale.follow(&CLEAN);
        assert_eq!(scale.factor(), 1.0);
        // A skip for another reason ends the row, but does not halve the scale.
        scale = after_clean_steps(scale, 1999);
        scale.follow(&skip(SkipReason::LossNotFinite));
        scale = after_clean_steps(scale, 1999);
        assert_eq!(scale.factor(), 1.0);
        for _ in 0..50 {
            scale.follow(&skip(SkipReason::GradientNotFinite));
        }
        assert_eq!(scale.factor(), 2f32.powi(-24));
    }

    #[test]
    fn a_restored_one_goes_on_where_it_was_saved() {
        let mut scale = DynamicLossScale::new(Precision::Mixed, 1 << 10);
        scale.follow(&skip(SkipReason::GradientNotFinite));
        scale = after_clean_steps(scale, 1234);
        let mut restored = DynamicLossScale::new(Precision::Mixed, 1 << 10);
        assert_eq!(restored.restore(scale.saved()), None);
        assert_eq!(restored.saved(), Some(LossScale { log2: -1, clean_steps: 1234 }));
        assert_eq!(after_clean_steps(restored, 766).factor(), 1.0);
        // A larger batch has a lower maximum; a damaged value is not used.
        let mut larger = DynamicLossScale::new(Precision::Mixed, 1 << 18);
        for (log2, factor) in [(3, 0.25), (i32::MAX, 0.25), (i32::MIN, 2f32.powi(-24))] {
            larger.restore(Some(LossScale { log2, clean_steps: 0 }));
            assert_eq!(larger.factor(), factor);
        }
    }

    #[test]
    fn another_precision_begins_anew_with_a_sentence() {
        let saved = Some(LossScale { log2: -3, clean_steps: 5 });
        let mut plain = DynamicLossScale::new(Precision::F32, 8);
        assert_eq!(plain.restore(None), None);
        assert_eq!(plain.restore(saved).unwrap(), "precision changes from mixed to f32");
        plain.follow(&skip(SkipReason::GradientNotFinite));
        assert_eq!((plain.factor(), plain.saved()), (1.0, None));
        let mut mixed = DynamicLossScale::new(Precision::Mixed, 8);
        let told = "precision changes from f32 to mixed; the loss scale starts at 1";
        assert_eq!(mixed.restore(None).unwrap(), told);
        assert_eq!(mixed.factor(), 1.0);
    }
}
