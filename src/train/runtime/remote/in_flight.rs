//! Work of a node on requests of the first one. The first node is notified while it continues, so
//! that it waits for a late answer, but not for one that will never come.

use potluck_core::Lock;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of notifications per longest silence of a node, and bounds of the time between two. They
/// must not fill a queue while the network is interrupted.
const TOLD_PER_SILENCE: u32 = 8;
const TOLD_MIN: Duration = Duration::from_millis(100);
const TOLD_MAX: Duration = Duration::from_secs(1);
/// Time between two notifications before the longest silence is known.
const TOLD_AT_FIRST: Duration = Duration::from_millis(250);

/// Current work of a node.
#[derive(Debug)]
pub(crate) struct InFlightRequests(Lock<RequestState>);

#[derive(Debug)]
struct RequestState {
    works: HashMap<u64, RequestProgress>,
    next: u64,
    interval: Duration,
    told_at: Instant,
    /// Bytes of messages that had arrived at the last notification.
    arrived: u64,
}

#[derive(Debug)]
struct RequestProgress {
    /// Longest time without progress, after which notifications end.
    limit: Duration,
    progress_at: Instant,
}

/// Work in progress, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct RequestGuard {
    in_flight: Arc<InFlightRequests>,
    number: u64,
}

impl InFlightRequests {
    /// Creates the duties of a node that has none yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Lock::new(RequestState {
            works: HashMap::new(),
            next: 0,
            interval: TOLD_AT_FIRST,
            told_at: Instant::now(),
            arrived: 0,
        })))
    }

    /// Sets the longest silence of a node, after which the first one abandons it.
    pub(crate) fn set_node_timeout(&self, node_timeout: Duration) {
        self.0.lock().interval = (node_timeout / TOLD_PER_SILENCE).clamp(TOLD_MIN, TOLD_MAX);
    }

    /// Begins work that counts as stuck after this time without progress.
    pub fn begin(self: &Arc<Self>, limit: Duration) -> RequestGuard {
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        state.works.insert(number, RequestProgress { limit, progress_at: Instant::now() });
        drop(state);
        RequestGuard { in_flight: Arc::clone(self), number }
    }

    /// Returns true if a notification of the first node is due: that this one works, or that more
    /// bytes of its messages have arrived.
    pub(crate) fn is_to_be_told(&self, arrived: u64) -> bool {
        let mut state = self.0.lock();
        if state.told_at.elapsed() < state.interval {
            return false;
        }
        let goes_on = state.works.values().any(|work| work.progress_at.elapsed() < work.limit);
        let is_to_be_told = goes_on || arrived != state.arrived;
        if is_to_be_told {
            state.told_at = Instant::now();
            state.arrived = arrived;
        }
        is_to_be_told
    }
}

impl RequestGuard {
    /// Records progress of the work.
    pub fn progress(&self) {
        if let Some(work) = self.in_flight.0.lock().works.get_mut(&self.number) {
            work.progress_at = Instant::now();
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.in_flight.0.lock().works.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn work_is_told_until_it_is_done_or_stuck() {
        let in_flight = InFlightRequests::new();
        in_flight.0.lock().interval = Duration::ZERO;
        assert!(!in_flight.is_to_be_told(0));
        let limit = Duration::from_millis(100);
        let (stuck, done) = (in_flight.begin(limit), in_flight.begin(Duration::MAX));
        assert!(in_flight.is_to_be_told(0));
        sleep(limit);
        assert!(in_flight.is_to_be_told(0));
        drop(done);
        assert!(!in_flight.is_to_be_told(0));
        stuck.progress();
        assert!(in_flight.is_to_be_told(0));
        drop(stuck);
        assert!(!in_flight.is_to_be_told(0));
        assert!(in_flight.is_to_be_told(1) && !in_flight.is_to_be_told(1), "bytes arrive");
    }

    #[test]
    fn the_first_node_is_told_some_times_per_silence() {
        let in_flight = InFlightRequests::new();
        let _work = in_flight.begin(Duration::MAX);
        for (seconds, interval) in [(0.1, 0.1), (2.0, 0.25), (30.0, 1.0), (3600.0, 1.0)] {
            in_flight.set_node_timeout(Duration::from_secs_f64(seconds));
            assert_eq!(in_flight.0.lock().interval, Duration::from_secs_f64(interval));
        }
        in_flight.0.lock().told_at = Instant::now();
        assert!(!in_flight.is_to_be_told(0));
    }
}
