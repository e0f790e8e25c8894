//! Batch splitting among devices of unequal speed.

/// Minimum gain: a device is taken only if it makes a step shorter by this fraction.
pub(super) const GAIN_MIN: f64 = 0.02;

/// Measured throughput of a device: a micro-batch of `rows` samples takes
/// `fixed_s + rows * row_s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ThroughputModel {
    pub fixed_s: f64,
    pub row_s: f64,
    /// The most samples that the device runs at once.
    pub micro_batch: u32,
}

impl ThroughputModel {
    /// Returns the seconds that `count` samples take, in as few micro-batches as they fit in.
    pub fn seconds(&self, count: u32) -> f64 {
        let micro_batches = count.div_ceil(self.micro_batch.max(1));
        f64::from(micro_batches) * self.fixed_s + f64::from(count) * self.row_s
    }
}

/// Splits `batch` samples among ranks so that the slowest rank finishes as early as possible;
/// returns the samples per rank.
///
/// Each sample goes to the rank that would finish it first, the lowest of equal ones. This greedy
/// choice is exact, because a device's time never falls with its count: the `batch` smallest of
/// all times "rank r finishes its n-th sample" are taken, in their order, and no other choice of
/// `batch` of them ends before the last one taken.
pub fn apportion(batch: u32, speeds: &[ThroughputModel]) -> Vec<u32> {
    assert!(!speeds.is_empty() || batch == 0, "no device takes the {batch} samples");
    let mut counts = vec![0; speeds.len()];
    for _ in 0..batch {
        let first = (0..speeds.len()).min_by(|&a, &b| {
            let a_s = speeds[a].seconds(counts[a] + 1);
            let b_s = speeds[b].seconds(counts[b] + 1);
            a_s.total_cmp(&b_s)
        });
        if let Some(rank) = first {
            counts[rank] += 1;
        }
    }
    counts
}

/// Moves samples from the ranks with the most to ranks with none; returns false and changes nothing
/// if there are too few.
pub fn give_each_a_sample(counts: &mut [u32]) -> bool {
    let is_enough = counts.iter().map(|count| *count as usize).sum::<usize>() >= counts.len();
    while is_enough
        && let Some(idle) = counts.iter().position(|count| *count == 0)
        && let Some(most) = counts.iter_mut().max()
    {
        *most -= 1;
        counts[idle] = 1;
    }
    is_enough
}

/// Moves samples so that each rank has at least `least` or none: a rank with fewer gets the missing
/// ones from the rank with the most if that keeps at least `least`, and otherwise gives up its own.
pub fn give_at_least(counts: &mut [u32], least: u32) {
    while let Some(few) = (0..counts.len())
        .filter(|rank| (1..least).contains(&counts[*rank]))
        .min_by_key(|rank| counts[*rank])
    {
        let others = (0..counts.len()).filter(|rank| *rank != few && counts[*rank] > 0);
        let Some(most) = others.max_by_key(|rank| (counts[*rank], std::cmp::Reverse(*rank))) else {
            return;
        };
        let missing = least - counts[few];
        if counts[most] >= least + missing {
            counts[most] -= missing;
            counts[few] += missing;
        } else {
            counts[most] += std::mem::take(&mut counts[few]);
        }
    }
}

/// Returns the makespan: the seconds until the slowest rank finishes.
pub fn makespan(counts: &[u32], speeds: &[ThroughputModel]) -> f64 {
    let mut slowest_s: f64 = 0.0;
    for (&count, speed) in counts.iter().zip(speeds) {
        slowest_s = slowest_s.max(speed.seconds(count));
    }
    slowest_s
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The smallest makespan of all ways to split a batch.
    fn best(batch: u32, speeds: &[ThroughputModel], counts: &mut Vec<u32>) -> f64 {
        if counts.len() + 1 == speeds.len() {
            counts.push(batch);
            let seconds = makespan(counts, speeds);
            counts.pop();
            return seconds;
        }
        let mut least = f64::INFINITY;
        for count in 0..=batch {
            counts.push(count);
            least = least.min(best(batch - count, speeds, counts));
            counts.pop();
        }
        least
    }

    fn speed() -> impl Strategy<Value = ThroughputModel> {
        let times = (0u32..20, 0u32..20, 1u32..6);
        times.prop_map(|(fixed, row, micro_batch)| ThroughputModel {
            fixed_s: f64::from(fixed) / 8.0,
            row_s: f64::from(row) / 8.0,
            micro_batch,
        })
    }

    proptest! {
        #[test]
        fn no_other_way_to_share_out_is_faster(
            batch in 0u32..14,
            speeds in proptest::collection::vec(speed(), 1..5),
        ) {
            let counts = apportion(batch, &speeds);
            prop_assert_eq!(counts.iter().sum::<u32>(), batch);
            // Times are small multiples of 1/8, so they are exact.
            prop_assert_eq!(makespan(&counts, &speeds), best(batch, &speeds, &mut Vec::new()));
        }
    }

    #[test]
    fn devices_that_must_take_part_get_a_sample_of_those_that_have_most() {
        let with = |counts: &[u32]| {
            let mut counts = counts.to_vec();
            give_each_a_sample(&mut counts).then_some(counts)
        };
        assert_eq!(with(&[4, 0]), Some(vec![3, 1]));
        assert_eq!(with(&[0, 3, 2, 0, 0]), Some(vec![1; 5]));
        assert_eq!(with(&[0, 1]), None);
        assert_eq!(with(&[2, 2]), Some(vec![2, 2]));
    }

    #[test]
    fn equal_devices_share_equally_and_the_first_takes_the_rest() {
        let speed = ThroughputModel { fixed_s: 0.0, row_s: 1.0, micro_batch: 8 };
        assert_eq!(apportion(11, &[speed; 4]), [3, 3, 3, 2]);
        assert_eq!(apportion(0, &[speed; 2]), [0, 0]);
        assert_eq!(apportion(0, &[]), [0u32; 0]);
    }

    #[test]
    fn shares_follow_speed_and_a_hopeless_device_gets_none() {
        let at = |row_s: f64| ThroughputModel { fixed_s: 0.0, row_s, micro_batch: 64 };
        assert_eq!(apportion(16, &[at(0.1), at(0.3)]), [12, 4]);
        assert_eq!(apportion(16, &[at(10.0), at(0.1)]), [0, 16]);
        let slow_to_start = ThroughputModel { fixed_s: 5.0, row_s: 0.0, micro_batch: 64 };
        assert_eq!(apportion(4, &[slow_to_start, at(1.0)]), [0, 4]);
        assert_eq!(apportion(20, &[slow_to_start, at(1.0)]), [16, 4]);
    }

    #[test]
    fn each_rank_has_enough_samples_or_none() {
        let given = |counts: &[u32]| {
            let mut counts = counts.to_vec();
            give_at_least(&mut counts, 8);
            counts
        };
        assert_eq!(given(&[20, 3, 9]), [15, 8, 9]);
        assert_eq!(given(&[13, 0, 3]), [8, 0, 8]);
        assert_eq!(given(&[10, 3]), [13, 0]);
        assert_eq!(given(&[5, 4, 3]), [12, 0, 0]);
        assert_eq!(given(&[5]), [5]);
        assert_eq!(given(&[8, 8]), [8, 8]);
    }

    #[test]
    fn the_cost_of_a_micro_batch_counts_for_each() {
        let speed = ThroughputModel { fixed_s: 1.0, row_s: 0.5, micro_batch: 4 };
        assert_eq!(speed.seconds(0), 0.0);
        assert_eq!(speed.seconds(4), 3.0);
        assert_eq!(speed.seconds(5), 4.5);
        assert_eq!(makespan(&[4, 5], &[speed, speed]), 4.5);
    }
}
