//! Working time of a ring thread, counted by it and read by the device thread of its rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time in which a ring thread has handled messages. Clones share the time.
#[derive(Clone, Debug, Default)]
pub(crate) struct RingWork {
    nanos: Arc<AtomicU64>,
}

impl RingWork {
    /// Adds the time of a message.
    pub fn add(&self, time: Duration) {
        // 584 years fit.
        self.nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns the time since the last call.
    pub fn take(&self) -> Duration {
        Duration::from_nanos(self.nanos.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_since_the_last_call_is_taken() {
        let work = RingWork::default();
        let of_ring = work.clone();
        of_ring.add(Duration::from_micros(3));
        of_ring.add(Duration::from_micros(4));
        assert_eq!((work.take(), work.take()), (Duration::from_micros(7), Duration::ZERO));
    }
}
