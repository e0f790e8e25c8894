//! Signs of life of a device, counted: what tells a long job from a hung one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what a device has done. Clones share the count, so that another thread can watch it.
#[derive(Clone, Debug, Default)]
pub struct Heartbeat {
    beats: Arc<AtomicU64>,
}

impl Heartbeat {
    /// The device did something: it ran a node, or came back from its driver.
    pub fn tick(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// The beats so far.
    pub fn count(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }
}
