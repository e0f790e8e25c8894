//! Mutex that stays usable after a panic of another thread.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Mutex without poisoning: it is taken over from a thread that panicked while it held the lock. It
/// is for values that change by whole items under the lock, so that a panic leaves none half
/// changed. The panic is reported where its thread is joined; the error of a poisoned lock in
/// another thread would only hide it.
#[derive(Debug, Default)]
pub struct Lock<T: ?Sized>(Mutex<T>);

impl<T> Lock<T> {
    /// Creates a lock that is free.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Lock<T> {
    /// Waits for the lock, and holds it as long as the guard lives.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the value, which needs no lock: there is no other reference to it.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_outlives_a_panic() {
        let mut lock = Lock::new(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut guard = lock.lock();
            *guard = 2;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(*lock.lock(), 2);
        *lock.get_mut() += 1;
        assert_eq!(lock.into_inner(), 3);
    }
}
