//! Pace of long dispatches: the seconds per workgroup, which determine the workgroups that fit a
//! submission. Windows resets a device whose submission takes two seconds, and a screen that the
//! device also draws freezes meanwhile, so a long dispatch is submitted in parts of its grid.

use std::ops::Range;

use super::Cost;
use crate::device::gpu::SUBMISSION_SECONDS;

/// Target time of a part at a known pace if submissions may take [`SUBMISSION_SECONDS`]; see
/// [`part_seconds`].
pub(crate) const PART_SECONDS: f64 = part_seconds(SUBMISSION_SECONDS);

/// Returns the target time of a part at a known pace: shorter than a submission, because workgroups
/// may differ: in causal attention, the last rows take twice the average.
pub(crate) const fn part_seconds(submission_seconds: f64) -> f64 {
    submission_seconds / 2.0
}

/// Target time of a part at a pace that is not settled, as a fraction of a submission's. Parts grow
/// to four times the last one, and with the rows of causal attention the work of each workgroup in
/// them to six times.
const TRIAL: f64 = 0.2;
const GROWTH: u32 = 4;

/// Target time of the first part at the nominal rates, as a fraction of a submission's: a plain
/// kernel on a software adapter is slower.
const FIRST: f64 = 0.05;

/// Two parts of different lengths whose paces are within this factor of each other keep the whole
/// device busy, so that longer parts have the same pace.
const AGREEMENT: f64 = 1.5;

/// Nominal rates, below the rates of any device that trains. They bound the time of a dispatch that
/// has not run yet.
const NOMINAL_FLOPS: f64 = 2e9;
const NOMINAL_BYTES: f64 = 2e9;

/// Seconds of a call at the nominal rates.
pub(crate) fn nominal_seconds(cost: Cost) -> f64 {
    cost.flops / NOMINAL_FLOPS + cost.bytes / NOMINAL_BYTES
}

/// Returns the number of workgroups, at least 1, that take these seconds at a pace in seconds per
/// workgroup.
pub(crate) fn fitting(seconds: f64, pace: f64) -> u32 {
    // The conversion saturates, also at a pace of 0.
    (seconds / pace).max(1.0) as u32
}

/// Trial of a dispatch whose pace is not known: it is run in parts that grow, each timed by itself,
/// until it has run as a whole.
#[derive(Clone, Debug)]
pub(crate) struct PaceTrial {
    workgroups: u32,
    /// The longest time that a submission should take.
    submission_seconds: f64,
    /// Workgroups that have run.
    done: u32,
    /// Most workgroups of the next part.
    next: u32,
    /// Workgroups and seconds of the first part, which may contain the end of the compilation.
    first: (u32, f64),
    /// Workgroups and seconds of the other parts.
    others: (u32, f64),
    /// Workgroups of the last part, and its pace.
    last: Option<(u32, f64)>,
    is_settled: bool,
}

impl PaceTrial {
    /// Begins the trial of a dispatch that takes at most `seconds_max` as a whole on the slowest
    /// device.
    pub fn new(workgroups: u32, seconds_max: f64, submission_seconds: f64) -> Self {
        let pace = seconds_max / f64::from(workgroups.max(1));
        Self {
            workgroups,
            submission_seconds,
            done: 0,
            next: fitting(FIRST * submission_seconds, pace),
            first: (0, 0.0),
            others: (0, 0.0),
            last: None,
            is_settled: false,
        }
    }

    /// Returns the first workgroup of the next part and the most workgroups that it may have;
    /// `None` at the end.
    pub(crate) fn next_part(&self) -> Option<(u32, u32)> {
        if self.done < self.workgroups { Some((self.done, self.next)) } else { None }
    }

    /// Notes the seconds of the next part.
    pub fn note(&mut self, part: &Range<u32>, seconds: f64) {
        let count = part.end - part.start;
        let sum = if self.last.is_none() { &mut self.first } else { &mut self.others };
        sum.0 += count;
        sum.1 += seconds;
        let pace = seconds / f64::from(count);
        if let Some((before, known)) = self.last {
            let agree = pace.max(known) <= AGREEMENT * pace.min(known);
            self.is_settled |= agree && count >= before.saturating_mul(2);
        }
        self.last = Some((count, pace));
        self.done = part.end;
        // A few workgroups may take as long as one, so a short part is doubled at any pace.
        let is_short = seconds <= part_seconds(self.submission_seconds) / 2.0;
        let doubled = if is_short { count.saturating_mul(2) } else { 1 };
        let target = fitting(TRIAL * self.submission_seconds, pace);
        self.next = target.max(doubled).min(count.saturating_mul(GROWTH));
    }

    /// Returns the seconds of all parts so far.
    pub fn seconds(&self) -> f64 {
        self.first.1 + self.others.1
    }

    /// Returns the pace in seconds per workgroup, if a part has run.
    pub fn pace(&self) -> Option<f64> {
        let (count, seconds) = if self.others.0 > 0 { self.others } else { self.first };
        if count > 0 { Some(seconds / f64::from(count)) } else { None }
    }

    /// Returns the predicted seconds of the whole dispatch, if the parts so far allow a
    /// prediction.
    pub fn predicted(&self) -> Option<f64> {
        if !self.is_settled {
            return None;
        }
        Some(self.seconds() + self.pace()? * f64::from(self.workgroups - self.done))
    }
}

#[cfg(test)]
mod tests;
