//! Split of a batch among many units.

use crate::planner::balance::ThroughputModel;

/// Halvings of the time in which all units are to be done: to a part in 10^12.
const HALVINGS: usize = 40;

/// Returns the most samples that take no longer than `seconds`, at most `most`.
fn samples_in(speed: &ThroughputModel, seconds: f64, most: u32) -> u32 {
    let rows = f64::from(speed.micro_batch.max(1));
    let full_s = speed.fixed_s + rows * speed.row_s;
    if !full_s.is_finite() {
        return 0;
    }
    if full_s <= 0.0 {
        return most;
    }
    let whole = (seconds / full_s).floor();
    let left_s = seconds - whole * full_s - speed.fixed_s;
    let mut part = 0.0;
    if left_s >= 0.0 && speed.row_s > 0.0 {
        part = (left_s / speed.row_s).floor().min(rows);
    }
    (whole * rows + part).min(f64::from(most)) as u32
}

/// Splits `batch` samples so that the slowest unit ends as early as possible, as
/// [`apportion`](crate::planner::balance::apportion) does, in a time that does not grow with the
/// batch.
pub(super) fn share_out(batch: u32, speeds: &[ThroughputModel]) -> Vec<u32> {
    let alone_s = speeds.iter().map(|speed| speed.seconds(batch)).fold(f64::INFINITY, f64::min);
    let mut counts = vec![0; speeds.len()];
    if !alone_s.is_finite() {
        return counts;
    }
    // A little more than the fastest unit needs alone, against the rounding of the quotients.
    let mut enough_s = alone_s * (1.0 + 1e-9);
    let mut less_s = 0.0;
    for _ in 0..HALVINGS {
        let middle_s = (less_s + enough_s) / 2.0;
        let samples = speeds.iter().map(|speed| u64::from(samples_in(speed, middle_s, batch)));
        if samples.sum::<u64>() >= u64::from(batch) {
            enough_s = middle_s;
        } else {
            less_s = middle_s;
        }
    }
    let mut given: u64 = 0;
    for (count, speed) in counts.iter_mut().zip(speeds) {
        *count = samples_in(speed, enough_s, batch);
        given += u64::from(*count);
    }
    take_back(given.saturating_sub(u64::from(batch)), &mut counts, speeds);
    counts
}

/// Takes samples from the units that end last, one from each in turn.
fn take_back(surplus: u64, counts: &mut [u32], speeds: &[ThroughputModel]) {
    let mut left = surplus;
    while left > 0 {
        let mut last: Vec<usize> = (0..counts.len()).filter(|unit| counts[*unit] > 0).collect();
        let end_s = |unit: &usize| speeds[*unit].seconds(counts[*unit]);
        last.sort_by(|a, b| end_s(b).total_cmp(&end_s(a)));
        for unit in last.into_iter().take(left as usize) {
            counts[unit] -= 1;
            left -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::planner::balance::{apportion, makespan};

    fn speed() -> impl Strategy<Value = ThroughputModel> {
        (0u32..20, 1u32..20, 1u32..6).prop_map(|(fixed, row, micro_batch)| ThroughputModel {
            fixed_s: f64::from(fixed) / 8.0,
            row_s: f64::from(row) / 8.0,
            micro_batch,
        })
    }

    proptest! {
        #[test]
        fn no_unit_ends_later_than_by_the_greedy_split(
            batch in 1u32..200,
            speeds in proptest::collection::vec(speed(), 1..12),
        ) {
            let counts = share_out(batch, &speeds);
            prop_assert_eq!(counts.iter().sum::<u32>(), batch);
            let best = makespan(&apportion(batch, &speeds), &speeds);
            let found = makespan(&counts, &speeds);
            prop_assert!(found <= best * (1.0 + 1e-6), "{} {} {:?}", found, best, counts);
        }
    }

    #[test]
    fn unit_that_cannot_run_the_model_gets_nothing() {
        let at = |row_s| ThroughputModel { fixed_s: 0.0, row_s, micro_batch: 8 };
        assert_eq!(share_out(10, &[at(1.0), at(f64::INFINITY), at(1.0)]), [5, 0, 5]);
        assert_eq!(share_out(10, &[at(f64::INFINITY)]), [0]);
        assert_eq!(share_out(1_000_000, &[at(0.0)]), [1_000_000]);
    }
}
