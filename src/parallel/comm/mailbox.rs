//! Mailbox: a queue between threads with many senders and one receiver, which can be closed with
//! a reason that senders and receiver get.

use std::collections::VecDeque;
use std::time::Instant;

use super::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Error of a closed mailbox, with the reason of the close.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Closed(pub String);

/// Error of a send; the item is dropped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error(transparent)]
    Closed(Closed),
    /// The mailbox held its maximum number of items, which is a bug of the senders. It is closed
    /// from now on, with this error as its reason, so that no thread waits for the dropped item.
    #[error("a mailbox for {items_max} items is full, which is a defect of potluck")]
    Full { items_max: usize },
}

impl From<SendError> for Closed {
    /// Reason with which the mailbox is closed after the error.
    fn from(error: SendError) -> Self {
        match error {
            SendError::Closed(closed) => closed,
            SendError::Full { .. } => Self(error.to_string()),
        }
    }
}

/// Reason for which a wait ended without an item.
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
    /// Number of threads that wait for an item; without one, a sender signals nothing.
    waiting: usize,
}

#[derive(Debug)]
struct Inner<T> {
    queue: Mutex<Queue<T>>,
    changed: Condvar,
    items_max: usize,
}

/// Queue between threads; clones are handles of the same queue. Items of one sender arrive in the
/// order in which it sent them.
#[derive(Debug)]
pub struct Mailbox<T>(Arc<Inner<T>>);

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Mailbox<T> {
    /// Creates an empty, open mailbox for at most `items_max` items.
    pub fn new(items_max: usize) -> Self {
        let queue = Queue { items: VecDeque::new(), closed: None, waiting: 0 };
        Self(Arc::new(Inner { queue: Mutex::new(queue), changed: Condvar::new(), items_max }))
    }

    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        // What runs under the lock does not panic, so the queue is never inconsistent.
        self.0.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds an item to the queue; never blocks.
    ///
    /// # Errors
    ///
    /// Returns [`SendError::Closed`] if the mailbox is closed, and [`SendError::Full`] if it holds
    /// its maximum number of items, which also closes it.
    pub fn send(&self, item: T) -> Result<(), SendError> {
        self.send_into(self.lock(), item)
    }

    /// Adds an item to the queue and removes the items that it makes obsolete; never blocks. The
    /// receiver sees both changes at once. `is_obsolete` must not panic.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Mailbox::send`].
    pub fn send_in_place_of(
        &self,
        item: T,
        is_obsolete: impl Fn(&T) -> bool,
    ) -> Result<(), SendError> {
        let mut queue = self.lock();
        let mut removed = Vec::new();
        for _ in 0..queue.items.len() {
            let Some(earlier) = queue.items.pop_front() else { break };
            if is_obsolete(&earlier) {
                removed.push(earlier);
            } else {
                queue.items.push_back(earlier);
            }
        }
        let sent = self.send_into(queue, item);
        // Outside the lock: dropping an item may run arbitrary code.
        drop(removed);
        sent
    }

    /// Adds an item to the locked queue. An item that is refused is dropped outside the lock.
    fn send_into(&self, mut queue: MutexGuard<'_, Queue<T>>, item: T) -> Result<(), SendError> {
        if let Some(closed) = queue.closed.clone() {
            drop(queue);
            return Err(SendError::Closed(closed));
        }
        let items_max = self.0.items_max;
        if queue.items.len() >= items_max {
            drop(queue);
            let full = SendError::Full { items_max };
            self.close(&full.to_string());
            return Err(full);
        }
        queue.items.push_back(item);
        let wake = queue.waiting > 0;
        drop(queue);
        if wake {
            self.0.changed.notify_one();
        }
        Ok(())
    }

    /// Waits for an item until the deadline; with `None`, without a timeout. Items that were sent
    /// before a close are lost: a close takes effect at once.
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

    /// Returns the next item, if there is one now; never blocks.
    pub fn try_recv(&self) -> Result<Option<T>, Closed> {
        let mut queue = self.lock();
        match &queue.closed {
            Some(closed) => Err(closed.clone()),
            None => Ok(queue.items.pop_front()),
        }
    }

    /// Returns the reason of the close, if the mailbox is closed.
    pub fn closed(&self) -> Option<Closed> {
        self.lock().closed.clone()
    }

    /// Closes the mailbox and drops its items. The reason of the first close counts.
    pub fn close(&self, why: &str) {
        let mut queue = self.lock();
        queue.closed.get_or_insert_with(|| Closed(why.into()));
        let lost = std::mem::take(&mut queue.items);
        drop(queue);
        self.0.changed.notify_all();
        // Outside the lock: dropping an item may run arbitrary code.
        drop(lost);
    }
}
