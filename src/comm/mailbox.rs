//! The hand-over between threads: a queue that many fill and one empties, which can be closed with
//! a reason that everyone learns.

use std::collections::VecDeque;
use std::time::Instant;

use super::sync::{Arc, Condvar, Mutex, MutexGuard};

/// The mailbox was closed, with this reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Closed(pub String);

/// How a wait ended without an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecvError {
    Closed(Closed),
    /// The deadline passed.
    TimedOut,
}

#[derive(Debug)]
struct Queue<T> {
    items: VecDeque<T>,
    closed: Option<Closed>,
    /// Threads that wait; nobody is woken for nothing.
    waiting: usize,
}

#[derive(Debug)]
struct Inner<T> {
    queue: Mutex<Queue<T>>,
    changed: Condvar,
    items_max: usize,
}

/// A queue between threads; clones are handles on the same one. Items of one sender arrive in
/// their order.
#[derive(Debug)]
pub struct Mailbox<T>(Arc<Inner<T>>);

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Mailbox<T> {
    /// Empty and open; more than `items_max` items at a time are a defect of whoever sends, and
    /// panic in debug builds.
    pub fn new(items_max: usize) -> Self {
        let queue = Queue { items: VecDeque::new(), closed: None, waiting: 0 };
        Self(Arc::new(Inner { queue: Mutex::new(queue), changed: Condvar::new(), items_max }))
    }

    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        // No code of others runs under the lock, so a thread that panicked left it whole.
        self.0.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Puts an item in; never waits.
    pub fn send(&self, item: T) -> Result<(), Closed> {
        let mut queue = self.lock();
        if let Some(closed) = &queue.closed {
            return Err(closed.clone());
        }
        queue.items.push_back(item);
        let (items, wake) = (queue.items.len(), queue.waiting > 0);
        drop(queue);
        if wake {
            self.0.changed.notify_one();
        }
        let items_max = self.0.items_max;
        debug_assert!(items <= items_max, "{items} items in a mailbox for {items_max}");
        Ok(())
    }

    /// Waits for an item; `None`: for ever. Items sent before a close are lost: a close is prompt.
    pub fn recv(&self, deadline: Option<Instant>) -> Result<T, RecvError> {
        let mut queue = self.lock();
        loop {
            if let Some(closed) = &queue.closed {
                return Err(RecvError::Closed(closed.clone()));
            }
            if let Some(item) = queue.items.pop_front() {
                return Ok(item);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(RecvError::TimedOut);
            }
            queue.waiting += 1;
            let changed = &self.0.changed;
            queue = match left {
                None => changed.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(left) => {
                    let waited = changed.wait_timeout(queue, left);
                    waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
            };
            queue.waiting -= 1;
        }
    }

    /// An item, if there is one now.
    pub fn try_recv(&self) -> Result<Option<T>, Closed> {
        let mut queue = self.lock();
        match &queue.closed {
            Some(closed) => Err(closed.clone()),
            None => Ok(queue.items.pop_front()),
        }
    }

    /// Why it is closed, if it is.
    pub fn closed(&self) -> Option<Closed> {
        self.lock().closed.clone()
    }

    /// Closes; the first reason counts. What was in it is dropped.
    pub fn close(&self, why: &str) {
        let mut queue = self.lock();
        queue.closed.get_or_insert_with(|| Closed(why.into()));
        let lost = std::mem::take(&mut queue.items);
        drop(queue);
        self.0.changed.notify_all();
        // Outside the lock: what an item does when it is dropped is its own.
        drop(lost);
    }
}
