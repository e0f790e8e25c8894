//! Queue of a link between any threads and the task that writes: bounded in items and bytes.

use std::collections::VecDeque;
use std::sync::{Condvar, PoisonError};

use tokio::sync::Notify;

use potluck_core::Lock;
use potluck_parallel::comm::Closed;

/// Refusal of an item, which is dropped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Overflow {
    Closed(Closed),
    /// The queue is full, and the caller does not wait.
    Full,
}

#[derive(Debug)]
struct Lane<T> {
    items: VecDeque<(T, usize)>,
    bytes: usize,
    /// Set once no more items are accepted; queued ones are still written.
    ended: Option<Closed>,
}

/// Queue with many senders and one task that takes the items.
#[derive(Debug)]
pub(crate) struct SendQueue<T> {
    lane: Lock<Lane<T>>,
    /// Notified when an item was taken, or the queue ended.
    room: Condvar,
    /// Notified when an item was added, or the queue ended.
    filled: Notify,
    items_max: usize,
    bytes_max: usize,
}

impl<T> SendQueue<T> {
    /// Creates an empty queue. An item of more than `bytes_max` bytes passes alone.
    pub fn new(items_max: usize, bytes_max: usize) -> Self {
        let lane = Lane { items: VecDeque::new(), bytes: 0, ended: None };
        Self {
            lane: Lock::new(lane),
            room: Condvar::new(),
            filled: Notify::new(),
            items_max,
            bytes_max,
        }
    }

    /// Adds an item of `bytes`; with `waits`, blocks until there is room.
    pub fn push(&self, item: T, bytes: usize, waits: bool) -> Result<(), Overflow> {
        let mut lane = self.lane.lock();
        loop {
            if let Some(closed) = &lane.ended {
                return Err(Overflow::Closed(closed.clone()));
            }
            let is_full = lane.items.len() >= self.items_max || lane.bytes + bytes > self.bytes_max;
            if !is_full || lane.items.is_empty() {
                break;
            }
            if !waits {
                return Err(Overflow::Full);
            }
            lane = self.room.wait(lane).unwrap_or_else(PoisonError::into_inner);
        }
        lane.bytes += bytes;
        lane.items.push_back((item, bytes));
        drop(lane);
        self.filled.notify_one();
        Ok(())
    }

    /// Waits for the next item; returns `None` after the last one of a queue that ended.
    pub async fn take(&self) -> Option<T> {
        loop {
            {
                let mut lane = self.lane.lock();
                if let Some((item, bytes)) = lane.items.pop_front() {
                    lane.bytes -= bytes;
                    self.room.notify_all();
                    return Some(item);
                }
                if lane.ended.is_some() {
                    return None;
                }
            }
            self.filled.notified().await;
        }
    }

    /// Ends the queue: no more items are accepted, and queued ones are still taken.
    pub fn end(&self, why: &str) {
        self.lane.lock().ended.get_or_insert_with(|| Closed(why.into()));
        self.room.notify_all();
        self.filled.notify_one();
    }

    /// Ends the queue and drops its items. The first reason counts.
    pub fn close(&self, why: &str) {
        let mut lane = self.lane.lock();
        lane.ended.get_or_insert_with(|| Closed(why.into()));
        lane.bytes = 0;
        let lost = std::mem::take(&mut lane.items);
        drop(lane);
        self.room.notify_all();
        self.filled.notify_one();
        // Outside the lock: dropping an item may run arbitrary code.
        drop(lost);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn items_come_in_order_until_the_end() {
        let outbox = SendQueue::new(8, 100);
        (0..3).for_each(|i| outbox.push(i, 10, false).unwrap());
        outbox.end("over");
        assert_eq!(outbox.push(9, 1, true), Err(Overflow::Closed(Closed("over".into()))));
        let taken = block_on(async {
            let mut taken = Vec::new();
            while let Some(item) = outbox.take().await {
                taken.push(item);
            }
            taken
        });
        assert_eq!(taken, [0, 1, 2]);
    }

    #[test]
    fn items_and_bytes_are_bounded_and_a_large_item_passes_alone() {
        let items = SendQueue::new(2, 100);
        assert_eq!(
            (0..3).map(|i| items.push(i, 1, false).is_ok()).collect::<Vec<_>>(),
            [true, true, false]
        );
        let bytes = SendQueue::new(9, 100);
        assert!(bytes.push(0, 500, false).is_ok());
        assert_eq!(bytes.push(1, 1, false), Err(Overflow::Full));
        assert_eq!(block_on(bytes.take()), Some(0));
        assert!(bytes.push(1, 1, false).is_ok());
    }

    #[test]
    fn a_sender_that_waits_goes_on_with_room_and_at_a_close() {
        let outbox = Arc::new(SendQueue::new(1, 100));
        outbox.push(0, 1, false).unwrap();
        let waiting = outbox.clone();
        let sender = std::thread::spawn(move || [1, 2].map(|i| waiting.push(i, 1, true)));
        assert_eq!(block_on(outbox.take()), Some(0));
        while outbox.lane.lock().items.is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        outbox.close("lost");
        let [first, second] = sender.join().unwrap();
        assert_eq!(first, Ok(()));
        assert_eq!(second, Err(Overflow::Closed(Closed("lost".into()))));
        assert_eq!(block_on(outbox.take()), None);
    }
}
