//! Heartbeat of a device: a progress counter by which a watchdog distinguishes a long job from a
//! hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Progress counter of a device. Clones share the count, so that a watchdog in another thread can
/// read it.
#[derive(Clone, Debug, Default)]
pub struct Heartbeat {
    beats: Arc<AtomicU64>,
}

impl Heartbeat {
    /// Counts one step of progress: the device ran a node, or a call of its driver returned.
    pub fn tick(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of ticks so far.
    pub fn count(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }
}
