//! Best evaluation so far: which one is, and with which others it can be compared.

use crate::checkpoint::Best;

/// Returns true if an evaluation is better than the best one so far; one that is not finite never
/// is.
pub fn is_better(val_loss: f64, best: Option<Best>) -> bool {
    val_loss.is_finite() && best.is_none_or(|best| val_loss < best.val_loss)
}

/// Reason for which later evaluations cannot be compared with the best one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incomparable {
    /// The data or their split are others.
    Data,
    /// Evaluations take another number of samples.
    Samples { was: u64, is: u64 },
}

/// Returns the reason for which evaluations of `samples` samples cannot be compared with earlier
/// ones, if there is one; `None` for `samples` if there will be no evaluation. `data` are the
/// fingerprints of the data earlier and now.
pub fn incomparable(
    best: Option<Best>,
    data: (&str, &str),
    samples: Option<u64>,
) -> Option<Incomparable> {
    if data.0 != data.1 {
        return Some(Incomparable::Data);
    }
    let (was, is) = (best?.samples, samples?);
    (was != is).then_some(Incomparable::Samples { was, is })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEST: Option<Best> = Some(Best { step: 4, val_loss: 0.5, samples: 8 });

    #[test]
    fn a_lower_finite_loss_is_better() {
        assert!(is_better(0.4, BEST) && is_better(9.0, None));
        assert!(!is_better(0.5, BEST) && !is_better(f64::NAN, BEST));
        assert!(!is_better(f64::NAN, None) && !is_better(f64::NEG_INFINITY, BEST));
    }

    #[test]
    fn other_data_and_another_number_of_samples_are_not_compared() {
        let same = ("a", "a");
        assert_eq!(incomparable(BEST, same, Some(8)), None);
        let samples = Incomparable::Samples { was: 8, is: 3 };
        assert_eq!(incomparable(BEST, same, Some(3)), Some(samples));
        assert_eq!(incomparable(BEST, same, None), None);
        assert_eq!(incomparable(None, same, Some(3)), None);
        for best in [BEST, None] {
            assert_eq!(incomparable(best, ("a", "b"), None), Some(Incomparable::Data));
        }
    }
}
