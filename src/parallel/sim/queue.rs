//! Virtual clock: a queue of events in the order of their times; the seed orders simultaneous
//! events.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use potluck_core::Nanos;
use potluck_core::rng::Key;

/// Converts seconds to virtual time; negative durations become 0.
pub fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9).round() as Nanos
}

/// Source of random numbers that are a function of a seed.
#[derive(Debug)]
pub struct Random {
    key: Key,
    drawn: u64,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { key: Key::new(seed), drawn: 0 }
    }

    pub fn word(&mut self) -> u32 {
        self.drawn += 1;
        self.key.words([self.drawn as u32, (self.drawn >> 32) as u32])[0]
    }

    /// Returns a random time in `0..=most`.
    pub fn up_to(&mut self, most: Nanos) -> Nanos {
        if most == 0 { 0 } else { Nanos::from(self.word()) % (most + 1) }
    }
}

#[derive(Debug)]
struct QueuedEvent<E> {
    at: Nanos,
    tie: u32,
    sequence: u64,
    event: E,
}

impl<E> QueuedEvent<E> {
    fn key(&self) -> (Nanos, u32, u64) {
        (self.at, self.tie, self.sequence)
    }
}

impl<E> PartialEq for QueuedEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for QueuedEvent<E> {}

impl<E> PartialOrd for QueuedEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for QueuedEvent<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// Queue of future events.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    heap: BinaryHeap<Reverse<QueuedEvent<E>>>,
    pub random: Random,
    now: Nanos,
    pushed: u64,
}

impl<E> EventQueue<E> {
    /// Creates an empty queue at time 0.
    pub fn new(seed: u64) -> Self {
        Self { heap: BinaryHeap::new(), random: Random::new(seed), now: 0, pushed: 0 }
    }

    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Queues an event at a time that is not in the past.
    pub fn push(&mut self, at: Nanos, event: E) {
        assert!(at >= self.now, "an event in the past");
        self.pushed += 1;
        let tie = self.random.word();
        self.heap.push(Reverse(QueuedEvent { at, tie, sequence: self.pushed, event }));
    }

    /// Removes the next event and sets the clock to its time.
    pub fn pop(&mut self) -> Option<E> {
        let Reverse(entry) = self.heap.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(seed: u64, times: &[Nanos]) -> Vec<usize> {
        let mut queue = EventQueue::new(seed);
        for (index, &at) in times.iter().enumerate() {
            queue.push(at, index);
        }
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn time_orders_events_and_the_seed_those_of_one_time() {
        assert_eq!(drain(1, &[5, 3, 4]), [1, 2, 0]);
        let ties = [7; 8];
        assert_eq!(drain(1, &ties), drain(1, &ties));
        assert!((2..6).any(|seed| drain(seed, &ties) != drain(1, &ties)));
    }
}
