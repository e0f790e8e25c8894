//! Axis of a drawing: its range, ticks at round values, and their labels.
//!
//! The ticks of the drawing library's own axes are compared by absolute differences, and are
//! searched without an end for some ranges, which would keep a run from going on.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, KeyPointWeight, Ranged};

/// Linear axis over a range that is not empty.
#[derive(Clone, Debug, PartialEq)]
pub struct TickAxis(Range<f64>);

impl From<Range<f64>> for TickAxis {
    fn from(range: Range<f64>) -> Self {
        Self(range)
    }
}

impl Ranged for TickAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (value - self.0.start) / (self.0.end - self.0.start);
        from + (share * f64::from(to - from)).round() as i32
    }

    fn key_points<H: KeyPointHint>(&self, hint: H) -> Vec<f64> {
        // There are no further ticks between those with labels.
        let is_labelled = matches!(hint.weight(), KeyPointWeight::Bold);
        if is_labelled { self.ticks(hint.max_num_points()).collect() } else { Vec::new() }
    }

    fn range(&self) -> Range<f64> {
        self.0.clone()
    }
}

impl TickAxis {
    /// Returns the distance of at most `most` ticks: 1, 2 or 5 times a power of ten.
    fn distance(&self, most: usize) -> f64 {
        let least = (self.0.end - self.0.start) / most.max(1) as f64;
        let power = 10f64.powf(least.log10().floor());
        let round = [1.0, 2.0, 5.0].map(|factor| factor * power);
        round.into_iter().find(|distance| *distance >= least).unwrap_or(10.0 * power)
    }

    /// Returns about `most` ticks within the range.
    fn ticks(&self, most: usize) -> impl Iterator<Item = f64> + use<> {
        let (distance, end) = (self.distance(most), self.0.end);
        let first = (self.0.start / distance).ceil();
        let ticks = (0..=most).map(move |index| (first + index as f64) * distance);
        // A tick at the end may lie behind it by a rounding.
        ticks.take_while(move |tick| *tick <= end + 1e-9 * distance)
    }

    /// Formats a tick of at most `most`, with as many digits as tell ticks apart.
    pub fn label(&self, tick: f64, most: usize) -> String {
        let power = |value: f64| value.abs().log10().floor() as i32;
        let distance = power(self.distance(most));
        let largest = self.0.start.abs().max(self.0.end.abs());
        if tick == 0.0 {
            "0".into()
        } else if (1e-3..1e6).contains(&largest) {
            format!("{tick:.digits$}", digits = -distance.min(0) as usize)
        } else {
            format!("{tick:.digits$e}", digits = (power(tick) - distance).max(0) as usize)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(range: Range<f64>, most: usize) -> Vec<String> {
        let axis = TickAxis(range);
        axis.ticks(most).map(|tick| axis.label(tick, most)).collect()
    }

    #[test]
    fn ticks_are_at_round_values() {
        assert_eq!(labels(0.0..1000.0, 5), ["0", "200", "400", "600", "800", "1000"]);
        assert_eq!(labels(0.95..2.1, 6), ["1.0", "1.2", "1.4", "1.6", "1.8", "2.0"]);
        assert_eq!(labels(0.0..0.3, 3), ["0", "0.1", "0.2", "0.3"]);
        assert_eq!(labels(-1.1..1.1, 5), ["-1.0", "-0.5", "0", "0.5", "1.0"]);
        assert_eq!(labels(0.0..3.3e-4, 4), ["0", "1e-4", "2e-4", "3e-4"]);
        assert_eq!(labels(100.001..100.0045, 4), ["100.001", "100.002", "100.003", "100.004"]);
        assert_eq!(labels(0.0..2.6e7, 3), ["0", "1e7", "2e7"]);
    }

    #[test]
    fn ticks_have_an_end_for_any_range() {
        let ranges = [0.0..1e-300, 1e16..1e16 + 2.0, -3.4e38..3.4e38, 0.0..f64::MIN_POSITIVE / 4.0];
        for range in ranges {
            let ticks: Vec<f64> = TickAxis(range.clone()).ticks(7).collect();
            assert!(ticks.len() <= 8, "{range:?}: {ticks:?}");
        }
    }

    #[test]
    fn values_lie_between_the_ends() {
        let axis = TickAxis(2.0..4.0);
        assert_eq!([2.0, 3.0, 4.0].map(|value| axis.map(&value, (10, 110))), [10, 60, 110]);
        assert_eq!([2.0, 3.0, 4.0].map(|value| axis.map(&value, (110, 10))), [110, 60, 10]);
    }
}
