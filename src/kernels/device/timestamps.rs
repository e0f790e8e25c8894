//! Device clock: timestamps of the beginning and end of each compute pass, in ticks, kept in a
//! query set until they are read.

use super::{DeviceError, Gpu};

const TICK_BYTES: u64 = 8;

/// Timestamp queries of a device that has a clock.
pub(crate) struct Timestamps {
    period_ns: f64,
    /// Passes that can be timed between two readings.
    passes_max: u32,
    queries: wgpu::QuerySet,
    /// Buffer to which queries are resolved, before it is copied to the host.
    resolved: wgpu::Buffer,
    /// Passes begun since the last reading.
    passes: u32,
    /// True if there were more passes than `passes_max`.
    overflowed: bool,
    /// Number of passes begun by the end of each submission that has passes.
    submissions: Vec<u32>,
}

impl Timestamps {
    /// Returns the timestamps of a device that has a clock, of at most `passes_max` passes between
    /// two readings; `None` without a clock.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub fn new(gpu: &Gpu, passes_max: u32) -> Result<Option<Self>, DeviceError> {
        let Some(period_ns) = gpu.timestamp_period_ns else { return Ok(None) };
        let queries = gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("timestamps"),
            ty: wgpu::QueryType::Timestamp,
            count: 2 * passes_max,
        });
        let resolved = gpu.query_results(u64::from(2 * passes_max) * TICK_BYTES)?;
        Ok(Some(Self {
            period_ns: f64::from(period_ns),
            passes_max,
            queries,
            resolved,
            passes: 0,
            overflowed: false,
            submissions: Vec::new(),
        }))
    }

    /// Queries to which the next pass writes its timestamps; `None` if all are used.
    pub(crate) fn next_pass(&mut self) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        if self.passes == self.passes_max {
            self.overflowed = true;
            return None;
        }
        let first = 2 * self.passes;
        self.passes += 1;
        Some(wgpu::ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: Some(first),
            end_of_pass_write_index: Some(first + 1),
        })
    }

    /// Discards the passes so far. The recorded passes must have been submitted.
    pub fn forget(&mut self) {
        self.passes = 0;
        self.overflowed = false;
        self.submissions.clear();
    }

    /// Notes that the passes so far are submitted.
    pub(crate) fn end_submission(&mut self) {
        if self.submissions.last().copied().unwrap_or(0) < self.passes {
            self.submissions.push(self.passes);
        }
    }

    /// Resolves the passes so far; returns the buffer with their ticks and its bytes, if there is a
    /// pass.
    pub fn resolve(&self, encoder: &mut wgpu::CommandEncoder) -> Option<(wgpu::Buffer, u64)> {
        if self.passes == 0 {
            return None;
        }
        encoder.resolve_query_set(&self.queries, 0..2 * self.passes, &self.resolved, 0);
        Some((self.resolved.clone(), u64::from(2 * self.passes) * TICK_BYTES))
    }

    /// Returns the seconds in which a pass was running, from the resolved ticks; `None` if not
    /// every pass was timed, or if the ticks are inconsistent.
    pub(crate) fn busy_seconds(&self, ticks: &[u8]) -> Option<f64> {
        if self.overflowed || ticks.is_empty() {
            return None;
        }
        let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(ticks);
        Some(self.seconds(busy_ticks(&ticks)?))
    }

    /// Returns the longest time from the beginning of the first pass of a submission to the end of
    /// its last one, from the resolved ticks; `None` if no pass was timed.
    pub(crate) fn longest_submission_seconds(&self, ticks: &[u8]) -> Option<f64> {
        let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(ticks);
        Some(self.seconds(longest_ticks(&ticks, &self.submissions)?))
    }

    fn seconds(&self, ticks: u64) -> f64 {
        ticks as f64 * self.period_ns * 1e-9
    }
}

/// Returns the most ticks from the beginning of the first interval to the end of the last one in a
/// group; `ends` has the number of intervals by the end of each group.
fn longest_ticks(ticks: &[u64], ends: &[u32]) -> Option<u64> {
    let mut longest = None;
    let mut first = 0;
    for end in ends {
        let behind = 2 * *end as usize;
        if let (Some(begin), Some(end)) = (ticks.get(first), ticks.get(behind - 1))
            && let Some(span) = end.checked_sub(*begin)
        {
            longest = longest.max(Some(span));
        }
        first = behind;
    }
    longest
}

/// Returns the ticks covered by intervals `begin, end, begin, end, ..` in order of submission,
/// each tick counted once; `None` if an interval ends before it begins or begins before the
/// preceding one.
fn busy_ticks(ticks: &[u64]) -> Option<u64> {
    let mut busy = 0u64;
    let mut last = 0;
    let mut until = 0;
    for pair in ticks.chunks_exact(2) {
        let (begin, end) = (pair[0], pair[1]);
        if begin == 0 || end < begin || begin < last {
            return None;
        }
        busy += end.saturating_sub(begin.max(until));
        last = begin;
        until = until.max(end);
    }
    Some(busy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tick_counts_once_and_nonsense_not_at_all() {
        assert_eq!(busy_ticks(&[10, 20, 20, 25]), Some(15));
        assert_eq!(busy_ticks(&[10, 20, 15, 25, 16, 18]), Some(15));
        assert_eq!(busy_ticks(&[10, 20, 30, 30]), Some(10));
        assert_eq!(busy_ticks(&[20, 10]), None);
        assert_eq!(busy_ticks(&[30, 40, 10, 20]), None);
        assert_eq!(busy_ticks(&[0, 0]), None);
    }

    #[test]
    fn a_submission_lasts_from_its_first_pass_to_its_last() {
        let ticks = [10, 20, 30, 45, 50, 80];
        assert_eq!(longest_ticks(&ticks, &[2, 3]), Some(35));
        assert_eq!(longest_ticks(&ticks, &[1, 2, 3]), Some(30));
        // Passes of a submission that is not over yet.
        assert_eq!(longest_ticks(&ticks, &[1]), Some(10));
        assert_eq!(longest_ticks(&[], &[]), None);
    }
}
