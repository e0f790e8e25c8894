//! Best evaluation so far: comparison of evaluations, and which of them are comparable.

use crate::checkpoint::Best;

/// Returns true if an evaluation is better than the best one so far. A loss that is not finite is
/// never better.
pub fn is_better(val_loss: f64, best: Option<Best>) -> bool {
    val_loss.is_finite() && best.is_none_or(|best| val_loss < best.val_loss)
}

/// Reason why later evaluations are not comparable with the best one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Incomparable {
    /// The data or their split have changed.
    Data,
    /// The number of evaluated samples has changed.
    Samples { was: u64, is: u64 },
    /// The number of runs of samples through which states are carried has changed.
    Runs { was: u64, is: u64 },
}

/// Samples of an evaluation and the runs of consecutive samples through which states are carried,
/// as in [`Best`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EvalExtent {
    pub samples: u64,
    pub runs: u64,
}

/// Reason why evaluations of this extent are not comparable with earlier ones; `None` if they are.
/// `extent` is `None` if there will be no evaluation. `data` are the fingerprints of the earlier
/// and the current data.
pub(crate) fn incomparable(
    best: Option<Best>,
    data: (&str, &str),
    extent: Option<EvalExtent>,
) -> Option<Incomparable> {
    if data.0 != data.1 {
        return Some(Incomparable::Data);
    }
    let best = best?;
    let extent = extent?;
    let (was, is) = (best.samples, extent.samples);
    if was != is {
        return Some(Incomparable::Samples { was, is });
    }
    let (was, is) = (best.runs, extent.runs);
    if was != is {
        return Some(Incomparable::Runs { was, is });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEST: Option<Best> = Some(Best { step: 4, val_loss: 0.5, samples: 8, runs: 2 });

    #[test]
    fn a_lower_finite_loss_is_better() {
        assert!(is_better(0.4, BEST) && is_better(9.0, None));
        assert!(!is_better(0.5, BEST) && !is_better(f64::NAN, BEST));
        assert!(!is_better(f64::NAN, None) && !is_better(f64::NEG_INFINITY, BEST));
    }

    #[test]
    fn other_data_and_another_extent_are_not_compared() {
        let of = |samples, runs| Some(EvalExtent { samples, runs });
        let same = ("a", "a");
        assert_eq!(incomparable(BEST, same, of(8, 2)), None);
        let samples = Incomparable::Samples { was: 8, is: 3 };
        assert_eq!(incomparable(BEST, same, of(3, 2)), Some(samples));
        let runs = Incomparable::Runs { was: 2, is: 4 };
        assert_eq!(incomparable(BEST, same, of(8, 4)), Some(runs));
        assert_eq!(incomparable(BEST, same, None), None);
        assert_eq!(incomparable(None, same, of(3, 2)), None);
        for best in [BEST, None] {
            assert_eq!(incomparable(best, ("a", "b"), None), Some(Incomparable::Data));
        }
    }
}
