//! The virtual clock: events in the order of their times, those of one time in an order by seed.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::base::rng::Key;

/// A point or a length of virtual time.
pub type Nanos = u64;

/// Virtual time from seconds; nothing is shorter than none.
pub fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9).round() as Nanos
}

/// A source of random numbers that are a function of a seed.
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

    /// A time in `0..=most`.
    pub fn up_to(&mut self, most: Nanos) -> Nanos {
        if most == 0 { 0 } else { Nanos::from(self.word()) % (most + 1) }
    }
}

#[derive(Debug)]
struct Entry<E> {
    at: Nanos,
    tie: u32,
    sequence: u64,
    event: E,
}

impl<E> Entry<E> {
    fn key(&self) -> (Nanos, u32, u64) {
        (self.at, self.tie, self.sequence)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// Events to come.
#[derive(Debug)]
pub struct Queue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    pub random: Random,
    now: Nanos,
    pushed: u64,
}

impl<E> Queue<E> {
    /// Empty, at time 0.
    pub fn new(seed: u64) -> Self {
        Self { heap: BinaryHeap::new(), random: Random::new(seed), now: 0, pushed: 0 }
    }

    pub fn now(&self) -> Nanos {
        self.now
    }

    /// An event at a time that is not over.
    pub fn push(&mut self, at: Nanos, event: E) {
        assert!(at >= self.now, "an event in the past");
        self.pushed += 1;
        let (tie, sequence) = (self.random.word(), self.pushed);
        self.heap.push(Reverse(Entry { at, tie, sequence, event }));
    }

    /// The next event; the time is then its time.
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
        let mut queue = Queue::new(seed);
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
