//! Moderation of wake-ups, as network cards moderate their interrupts: in the middle of a long
//! message, the thread of the network waits a little before it sleeps, so that it handles more
//! packets at a time.
//!
//! Where the processor is also a device of the run, each wake-up takes time and cache from the
//! kernels: over a link of 27 MB/s a thread that is woken for every packet takes nearly twice the
//! time of one that is woken every 1.5 ms.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use potluck_core::Lock;

/// Bytes for which one wake-up is enough: a fraction of a socket's buffers.
const BATCH_BYTES: f64 = 64.0 * 1024.0;
/// Bytes of messages that are still to come from which on the thread waits: shorter ones are those
/// for which somebody waits.
const LONG_BYTES: u64 = 64 << 10;
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_micros(1500);
/// Shortest pause; below it, the system's timers cost more than they save.
const PAUSE_MIN: Duration = Duration::from_micros(100);
/// Least rate in bytes per second: below it, packets are few.
const RATE_MIN: f64 = 2e6;
/// Time for which messages arrive before their rate is known. The rate between steps, most of which
/// compute, would make a pause of what a fast link sends in an instant.
const BURST_MIN: Duration = Duration::from_millis(2);
/// Time over which the rate is measured.
const INTERVAL: Duration = Duration::from_millis(20);

/// Moderation of the one thread of an endpoint.
#[derive(Debug, Default)]
pub(crate) struct Moderation {
    /// Bytes received so far.
    received: AtomicU64,
    /// Bytes that are still to come of messages that have begun to arrive, on all links. While one
    /// link is slow, messages of others may so wait for a pause, too.
    due: AtomicU64,
    rate: Lock<Rate>,
    /// The thread, once it has waited.
    thread: OnceLock<Thread>,
    is_waiting: AtomicBool,
}

/// Rate at which messages arrive without a break.
#[derive(Debug, Default)]
struct Rate {
    /// Beginning of the present interval, and the bytes received before; `None` between messages.
    began: Option<(Instant, u64)>,
    /// Rate of the interval before; 0 without one since the last break.
    bytes_per_s: f64,
}

/// Message that is arriving: what of it is still to come counts, until it is dropped.
pub(crate) struct Arriving<'a> {
    moderation: &'a Moderation,
    due: u64,
}

impl Arriving<'_> {
    /// Counts bytes of the message that have arrived.
    pub fn arrived(&mut self, bytes: usize) {
        let bytes = (bytes as u64).min(self.due);
        self.due -= bytes;
        self.moderation.due.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        self.moderation.due.fetch_sub(self.due, Ordering::Relaxed);
    }
}

impl Moderation {
    /// Counts received bytes, of packets.
    pub fn count(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Announces a message that arrives.
    pub fn announce(&self, bytes: usize) -> Arriving<'_> {
        let due = bytes as u64;
        self.due.fetch_add(due, Ordering::Relaxed);
        Arriving { moderation: self, due }
    }

    /// Waits before the thread sleeps, in the middle of long messages.
    pub fn wait(&self) {
        let received = self.received.load(Ordering::Relaxed);
        let due = self.due.load(Ordering::Relaxed);
        let pause = self.rate.lock().pause(Instant::now(), received, due);
        if let Some(pause) = pause {
            self.rest(pause);
        }
    }

    /// Waits for a time, or until there is something to send. What comes just before it waits is
    /// sent after the pause: tokio looks at its queue again before the thread sleeps.
    fn rest(&self, pause: Duration) {
        self.thread.get_or_init(thread::current);
        self.is_waiting.store(true, Ordering::SeqCst);
        thread::park_timeout(pause);
        self.is_waiting.store(false, Ordering::SeqCst);
    }

    /// Returns whether the thread has waited, and the bytes that are due.
    #[cfg(test)]
    pub fn state(&self) -> (bool, u64) {
        (self.thread.get().is_some(), self.due.load(Ordering::Relaxed))
    }

    /// Ends a pause: there is something to send.
    pub fn wake(&self) {
        if self.is_waiting.load(Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}

impl Rate {
    /// Returns the pause at a time at which so many bytes have been received, and so many of begun
    /// messages are still to come. It ends before they have come.
    fn pause(&mut self, now: Instant, received: u64, due: u64) -> Option<Duration> {
        if due == 0 {
            *self = Self::default();
            return None;
        }
        let (since, before) = *self.began.get_or_insert((now, received));
        let elapsed = now.duration_since(since);
        let is_known = self.bytes_per_s > 0.0;
        if elapsed >= INTERVAL || !is_known && elapsed >= BURST_MIN {
            self.bytes_per_s = (received - before) as f64 / elapsed.as_secs_f64();
            self.began = Some((now, received));
        }
        if due < LONG_BYTES || self.bytes_per_s < RATE_MIN {
            return None;
        }
        let bytes = BATCH_BYTES.min(due as f64 / 2.0);
        let pause = Duration::from_secs_f64(bytes / self.bytes_per_s).min(PAUSE_MAX);
        (pause >= PAUSE_MIN).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Returns the last pause after 100 ms at a rate, with a thread that would sleep every 0.5 ms.
    fn pause_at(bytes_per_s: u64, due: u64) -> Option<Duration> {
        let start = Instant::now();
        let mut rate = Rate::default();
        let mut pause = None;
        for halves in 0..200 {
            let now = start + Duration::from_micros(500) * halves;
            pause = rate.pause(now, bytes_per_s / 2000 * u64::from(halves), due);
        }
        pause
    }

    #[test]
    fn pauses_gather_a_batch_in_the_middle_of_long_messages() {
        assert_eq!(pause_at(1_000_000, MIB), None, "the packets are few");
        assert_eq!(pause_at(20_000_000, MIB), Some(PAUSE_MAX));
        let fast = pause_at(125_000_000, MIB).unwrap();
        assert!((0.0005..0.0006).contains(&fast.as_secs_f64()), "{fast:?}");
        assert_eq!(pause_at(1_000_000_000, MIB), None, "a batch is there at once");
        // Half of what is still to come.
        let end = pause_at(125_000_000, LONG_BYTES).unwrap();
        assert!((0.00024..0.0003).contains(&end.as_secs_f64()), "{end:?}");
        assert_eq!(pause_at(20_000_000, LONG_BYTES - 1), None, "somebody waits for the end");
    }

    /// Steps of 12 ms, whose messages of 88 KiB are there in less than a millisecond.
    #[test]
    fn short_messages_of_a_fast_link_are_not_held_up() {
        let start = Instant::now();
        let mut rate = Rate::default();
        for tenth in 0..2_000u64 {
            let (step, within) = (tenth / 120, tenth % 120);
            let arrived = 12_500 * within.min(7);
            let due = if (1..7).contains(&within) { 87_500 - arrived } else { 0 };
            let now = start + Duration::from_micros(100 * tenth);
            assert_eq!(rate.pause(now, 87_500 * step + arrived, due), None, "{step} {within}");
        }
    }

    #[test]
    fn bytes_that_are_due_are_counted_until_messages_have_arrived_or_are_given_up() {
        let moderation = Moderation::default();
        let due = || moderation.due.load(Ordering::Relaxed);
        let mut one = moderation.announce(100);
        let other = moderation.announce(7);
        one.arrived(60);
        assert_eq!(due(), 47);
        drop(other);
        assert_eq!(due(), 40);
        one.arrived(40);
        drop(one);
        assert_eq!(due(), 0);
    }

    #[test]
    fn a_pause_ends_when_there_is_something_to_send() {
        let moderation = Arc::new(Moderation::default());
        let resting = moderation.clone();
        let began = Instant::now();
        let thread = thread::spawn(move || resting.rest(Duration::from_secs(60)));
        while !thread.is_finished() {
            moderation.wake();
            thread::sleep(Duration::from_millis(1));
        }
        thread.join().unwrap();
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
