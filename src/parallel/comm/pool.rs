//! Buffer pool for values in flight between ranks. Reuse avoids the page faults of a fresh
//! allocation of this size, and a recently used buffer is likely still in a cache.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::Element;
use potluck_core::Lock;

/// Pool of buffers; clones are handles of the same pool.
#[derive(Clone)]
pub struct BufferPool<T> {
    buffers: Arc<Lock<PoolBuffers<T>>>,
    /// Maximum number of free buffers that the pool keeps.
    free_max: usize,
}

struct PoolBuffers<T> {
    free: Vec<Vec<T>>,
    /// Bytes of all buffers, free or in use, and the largest value so far.
    bytes: usize,
    bytes_peak: usize,
}

impl<T> Default for PoolBuffers<T> {
    fn default() -> Self {
        Self { free: Vec::new(), bytes: 0, bytes_peak: 0 }
    }
}

impl<T: Element> BufferPool<T> {
    /// Creates an empty pool that keeps at most `free_max` free buffers.
    pub fn new(free_max: usize) -> Self {
        Self { buffers: Arc::default(), free_max }
    }

    /// Takes a buffer of this length, the most recently used one; its contents are unspecified.
    pub fn take(&self, length: usize) -> PooledBuffer<T> {
        let mut values = self.buffers.lock().free.pop().unwrap_or_default();
        let before = bytes(&values);
        values.reserve_exact(length.saturating_sub(values.len()));
        values.resize(length, T::default());
        let mut buffers = self.buffers.lock();
        buffers.bytes += bytes(&values) - before;
        buffers.bytes_peak = buffers.bytes_peak.max(buffers.bytes);
        drop(buffers);
        PooledBuffer { values, pool: Some(self.clone()) }
    }

    /// Returns the number of free buffers.
    pub fn free(&self) -> usize {
        self.buffers.lock().free.len()
    }

    /// Returns the most bytes that all buffers of the pool, free or in use, have taken at once.
    pub fn bytes_peak(&self) -> usize {
        self.buffers.lock().bytes_peak
    }
}

/// Memory that a buffer takes.
fn bytes<T>(buffer: &Vec<T>) -> usize {
    buffer.capacity() * size_of::<T>()
}

/// Buffer of values with one owner. It returns to its pool when it is dropped.
pub struct PooledBuffer<T: Element = f32> {
    values: Vec<T>,
    pool: Option<BufferPool<T>>,
}

impl<T: Element> PooledBuffer<T> {
    /// Makes the buffer shared and read-only.
    pub fn share(self) -> SharedBuffer<T> {
        SharedBuffer(Arc::new(self))
    }
}

impl<T: Element> Deref for PooledBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values
    }
}

impl<T: Element> DerefMut for PooledBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values
    }
}

impl<T: Element> Drop for PooledBuffer<T> {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            let mut buffers = pool.buffers.lock();
            if buffers.free.len() < pool.free_max {
                buffers.free.push(std::mem::take(&mut self.values));
            } else {
                buffers.bytes -= bytes(&self.values);
            }
        }
    }
}

impl<T: Element> fmt::Debug for PooledBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}; {}]", T::NAME, self.len())
    }
}

/// Final values that several ranks read; clones are handles of the same buffer, which returns to
/// its pool when the last handle is dropped.
#[derive(Clone, Debug)]
pub struct SharedBuffer<T: Element = f32>(Arc<PooledBuffer<T>>);

impl<T: Element> Deref for SharedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Element> AsRef<[T]> for SharedBuffer<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element> From<Vec<T>> for SharedBuffer<T> {
    /// Wraps a vector without a pool: its memory is freed when the last handle is dropped.
    fn from(values: Vec<T>) -> Self {
        PooledBuffer { values, pool: None }.share()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_comes_back_when_its_last_reader_is_gone() {
        let pool = BufferPool::<f32>::new(2);
        let mut values = pool.take(3);
        values.copy_from_slice(&[1.0, 2.0, 3.0]);
        let place = values.as_ptr();
        let shared = values.share();
        let other = shared.clone();
        drop(shared);
        assert_eq!((&other[..], pool.free()), (&[1.0, 2.0, 3.0][..], 0));
        std::thread::spawn(move || drop(other)).join().unwrap();
        assert_eq!(pool.free(), 1);
        assert_eq!(pool.take(2).as_ptr(), place);
        assert_eq!(pool.take(3).len(), 3);
    }

    #[test]
    fn a_pool_keeps_no_more_than_it_may() {
        let pool = BufferPool::<u64>::new(2);
        drop([pool.take(1), pool.take(2), pool.take(3)]);
        assert_eq!(pool.free(), 2);
        drop(SharedBuffer::from(vec![1u64]));
        assert_eq!(pool.free(), 2);
    }

    #[test]
    fn the_peak_counts_all_buffers_by_what_they_take() {
        let pool = BufferPool::<f32>::new(1);
        let held = [pool.take(3), pool.take(5)];
        assert_eq!(pool.bytes_peak(), 8 * 4);
        drop(held);
        assert_eq!(
            (pool.free(), pool.buffers.lock().bytes),
            (1, 3 * 4),
            "the pool keeps the first"
        );
        drop(pool.take(4));
        let kept = pool.buffers.lock().bytes;
        assert_eq!((kept, pool.bytes_peak()), (4 * 4, 8 * 4));
        let _held = [pool.take(4), pool.take(7)];
        assert_eq!(pool.bytes_peak(), 11 * 4);
    }
}
