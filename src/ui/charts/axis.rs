//! Axis of a drawing: its range, ticks at round values, and their labels.
//!
//! The drawing library's own axes compare ticks by absolute differences, and never end the search
//! for ticks in some ranges, which would stop a run.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, KeyPointWeight, Ranged};

/// Linear axis over a range that is not empty, with its ticks.
#[derive(Clone, Debug, PartialEq)]
pub struct TickAxis {
    range: Range<f64>,
    ticks: Vec<f64>,
    /// Distance of the ticks, to which labels are exact.
    distance: f64,
}

impl Ranged for TickAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let (from, to) = limit;
        let share = (value - self.range.start) / (self.range.end - self.range.start);
        from + (share * f64::from(to - from)).round() as i32
    }

    fn key_points<H: KeyPointHint>(&self, hint: H) -> Vec<f64> {
        // Only ticks with labels are drawn.
        let is_labelled = matches!(hint.weight(), KeyPointWeight::Bold);
        if is_labelled { self.ticks.clone() } else { Vec::new() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl TickAxis {
    /// Creates the axis of a range with about `most` ticks at round values: 1, 2 or 5 times a power
    /// of ten apart.
    pub fn round(range: Range<f64>, most: usize) -> Self {
        Self::of(range, most, 0.0)
    }

    /// Creates the axis from one whole number to another around some values, or from 0 to 1 if
    /// there are none, with at most nine ticks at whole numbers.
    pub fn whole(values: impl Iterator<Item = f64>) -> Self {
        let mut least = f64::INFINITY;
        let mut most = f64::NEG_INFINITY;
        for value in values {
            least = least.min(value);
            most = most.max(value);
        }
        let (least, most) = if least <= most { (least, most) } else { (0.0, 1.0) };
        let start = least.floor();
        Self::of(start..most.ceil().max(start + 1.0), 8, 1.0)
    }

    /// Creates the axis from 0 to a round value that is not less than `most`, with five ticks.
    pub fn from_zero(most: f64) -> Self {
        // An axis of zeros has some height nevertheless.
        let distance = round_distance(most.max(1e-9) / 4.0);
        let ticks = (0..=4).map(|tick| distance * f64::from(tick)).collect();
        Self { range: 0.0..4.0 * distance, ticks, distance }
    }

    /// Creates the axis of `count` places, at whole numbers from 0 on.
    pub fn places(count: usize) -> Self {
        let ticks = (0..count).map(|place| place as f64).collect();
        Self { range: -0.5..count.max(1) as f64 - 0.5, ticks, distance: 1.0 }
    }

    fn of(range: Range<f64>, most: usize, distance_least: f64) -> Self {
        let least = (range.end - range.start) / most.max(1) as f64;
        let distance = round_distance(least.max(distance_least));
        let first = (range.start / distance).ceil();
        let mut ticks = Vec::with_capacity(most + 1);
        for index in 0..=most {
            let tick = (first + index as f64) * distance;
            // Rounding may put the tick at the end slightly beyond it.
            let is_inside = tick <= range.end + 1e-9 * distance;
            if !is_inside {
                break;
            }
            ticks.push(tick);
        }
        Self { range, ticks, distance }
    }

    /// Returns the number of ticks, as the drawing library needs it.
    pub fn count(&self) -> usize {
        self.ticks.len()
    }

    /// Formats a tick with the digits that distinguish ticks.
    pub fn label(&self, tick: f64) -> String {
        let distance = power(self.distance);
        let largest = self.range.start.abs().max(self.range.end.abs());
        if tick == 0.0 {
            "0".into()
        } else if (1e-3..1e6).contains(&largest) {
            format!("{tick:.digits$}", digits = -distance.min(0) as usize)
        } else {
            format!("{tick:.digits$e}", digits = (power(tick) - distance).max(0) as usize)
        }
    }
}

/// Power of ten of a value's first digit.
fn power(value: f64) -> i32 {
    value.abs().log10().floor() as i32
}

/// The least of 1, 2 and 5 times a power of ten that is not less than `least`.
fn round_distance(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let round = [1.0, 2.0, 5.0].map(|factor| factor * power);
    round.into_iter().find(|distance| *distance >= least).unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(range: Range<f64>, most: usize) -> Vec<String> {
        let axis = TickAxis::round(range, most);
        axis.ticks.iter().map(|tick| axis.label(*tick)).collect()
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
            let ticks = TickAxis::round(range.clone(), 7).ticks;
            assert!(ticks.len() <= 8, "{range:?}: {ticks:?}");
        }
    }

    #[test]
    fn values_lie_between_the_ends() {
        let axis = TickAxis::round(2.0..4.0, 5);
        assert_eq!([2.0, 3.0, 4.0].map(|value| axis.map(&value, (10, 110))), [10, 60, 110]);
        assert_eq!([2.0, 3.0, 4.0].map(|value| axis.map(&value, (110, 10))), [110, 60, 10]);
    }

    #[test]
    fn axes_of_powers_end_at_whole_numbers() {
        let ends = |values: &[f64]| {
            let TickAxis { range, ticks, .. } = TickAxis::whole(values.iter().copied());
            (range.start, range.end, ticks.len())
        };
        assert_eq!(ends(&[12.0, 28.0, 13.3]), (12.0, 28.0, 9));
        assert_eq!((ends(&[3.0]), ends(&[])), ((3.0, 4.0, 2), (0.0, 1.0, 2)));
        assert_eq!(ends(&[-3.5, 6.2]), (-4.0, 7.0, 6));
        assert_eq!(ends(&[10.5, 18.2]).2, 5, "nine at most, and these are two apart");
    }

    #[test]
    fn axes_from_zero_end_at_round_values() {
        let end = |most: f64| TickAxis::from_zero(most).range.end;
        assert_eq!([96_220.0, 30.6, 3.9, 21.0, 8.0].map(end), [2e5, 40.0, 4.0, 40.0, 8.0]);
        assert!((end(0.3) - 0.4).abs() < 1e-12 && end(0.0) > 0.0);
        let places = TickAxis::places(2);
        assert_eq!((places.range, places.ticks), (-0.5..1.5, vec![0.0, 1.0]));
    }
}
