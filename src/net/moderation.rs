//! Moderation of wake-ups, as network cards moderate their interrupts: while a stream of messages
//! passes, the thread of the network waits a little before it sleeps, so that it handles more
//! packets at a time.
//!
//! Where the processor is also a device of the run, each wake-up takes time and cache from the
//! kernels: over a link of 27 MB/s a thread that is woken for every packet takes twice the time of
//! one that is woken every 2 ms.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use potluck_core::Lock;

/// Bytes, of both directions, for which one wake-up is enough: a fraction of a socket's buffers.
const BATCH_BYTES: f64 = 128.0 * 1024.0;
/// Longest pause: what a message may arrive later.
const PAUSE_MAX: Duration = Duration::from_millis(2);
/// Shortest pause; below it, the system's timers cost more than they save.
const PAUSE_MIN: Duration = Duration::from_micros(100);
/// Least rate of a stream in bytes per second, in both directions.
const STREAM_RATE: f64 = 4e6;
/// Time over which the rate is measured: single messages are over by then.
const INTERVAL: Duration = Duration::from_millis(20);

/// Moderation of the one thread of an endpoint.
#[derive(Debug, Default)]
pub(crate) struct Moderation {
    /// Bytes sent and received so far.
    bytes: AtomicU64,
    rate: Lock<Rate>,
}

/// Rate of the interval before, and the beginning of the present one.
#[derive(Debug, Default)]
struct Rate {
    began: Option<(Instant, u64)>,
    bytes_per_s: f64,
}

impl Moderation {
    /// Counts bytes that were sent or received.
    pub fn count(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Waits before the thread sleeps, if a stream passes.
    pub fn wait(&self) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        let pause = self.rate.lock().pause(Instant::now(), bytes);
        if let Some(pause) = pause {
            thread::sleep(pause);
        }
    }
}

impl Rate {
    /// Returns the pause at a time at which so many bytes have passed.
    fn pause(&mut self, now: Instant, bytes: u64) -> Option<Duration> {
        let (since, before) = *self.began.get_or_insert((now, bytes));
        let elapsed = now.duration_since(since);
        if elapsed >= INTERVAL {
            self.bytes_per_s = (bytes - before) as f64 / elapsed.as_secs_f64();
            self.began = Some((now, bytes));
        }
        if self.bytes_per_s < STREAM_RATE {
            return None;
        }
        let pause = Duration::from_secs_f64(BATCH_BYTES / self.bytes_per_s).min(PAUSE_MAX);
        (pause >= PAUSE_MIN).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the last pause after 100 ms at a rate, with a thread that would sleep every 0.5 ms.
    fn pause_at(bytes_per_s: u64) -> Option<Duration> {
        let start = Instant::now();
        let mut rate = Rate::default();
        let mut pause = None;
        for halves in 0..200 {
            let now = start + Duration::from_micros(500) * halves;
            pause = rate.pause(now, bytes_per_s / 2000 * u64::from(halves));
        }
        pause
    }

    #[test]
    fn pauses_gather_a_batch_of_a_stream() {
        assert_eq!(pause_at(1_000_000), None, "the packets are few");
        assert_eq!(pause_at(20_000_000), Some(PAUSE_MAX));
        let fast = pause_at(250_000_000).unwrap();
        assert!((0.0005..0.0006).contains(&fast.as_secs_f64()), "{fast:?}");
        assert_eq!(pause_at(2_000_000_000), None, "a batch is there at once");
    }

    #[test]
    fn single_messages_and_the_first_ones_of_a_stream_are_not_delayed() {
        let start = Instant::now();
        let mut rate = Rate::default();
        // 64 KiB every 100 ms, in 5 ms.
        for message in 0..10 {
            for ms in 0..5 {
                let now = start + Duration::from_millis(100 * message + ms);
                let bytes = (message * 5 + ms) * 13_000;
                assert_eq!(rate.pause(now, bytes), None);
            }
        }
        let mut rate = Rate::default();
        assert_eq!(rate.pause(start, 0), None);
        assert_eq!(rate.pause(start + Duration::from_millis(19), 1 << 20), None);
        assert!(rate.pause(start + Duration::from_millis(20), 1 << 20).is_some());
        // The stream has ended.
        assert_eq!(rate.pause(start + Duration::from_millis(60), 1 << 20), None);
    }
}
