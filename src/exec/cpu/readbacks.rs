//! Readbacks of the CPU device: copies, made when a readback is started, in pooled buffers.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::BucketId;
use crate::exec::{BucketTensor, Readback};

/// Buffer pool of readbacks.
struct Spares {
    /// Buffers that no readback holds.
    buffers: Vec<Vec<f32>>,
    /// Bytes of the pooled buffers and of those that readbacks hold; the buffer of a dropped
    /// readback is kept if this is at most `bound`.
    bytes: usize,
    bound: usize,
}

/// Buffer pool shared with readbacks, which return their buffers from any thread.
type SharedBuffers = Arc<Mutex<Spares>>;

/// Queue of the readbacks that were started and not taken, oldest first.
pub struct ReadbackQueue {
    begun: VecDeque<Readback>,
    spares: SharedBuffers,
}

impl ReadbackQueue {
    /// Makes an empty queue. Buffers of dropped readbacks are kept for reuse as long as all
    /// buffers take at most `bound` bytes; so they never take more than that, or than readbacks
    /// have taken at once.
    pub fn new(bound: usize) -> Self {
        let spares = Spares { buffers: Vec::new(), bytes: 0, bound };
        Self { begun: VecDeque::new(), spares: Arc::new(Mutex::new(spares)) }
    }

    /// Returns an empty buffer to copy into, for [`ReadbackQueue::begin`].
    pub fn buffer(&mut self) -> Vec<f32> {
        let mut spares = lock(&self.spares);
        let mut buffer = spares.buffers.pop().unwrap_or_default();
        spares.bytes -= bytes(&buffer);
        buffer.clear();
        buffer
    }

    /// Appends `copy`, the values of elements `range` of a bucket, to the queue.
    pub fn begin(
        &mut self,
        bank: BucketTensor,
        bucket: BucketId,
        range: Range<usize>,
        copy: Vec<f32>,
    ) {
        lock(&self.spares).bytes += bytes(&copy);
        let values = Box::new(Copied { values: copy, spares: self.spares.clone() });
        self.begun.push_back(Readback { bank, bucket, range, values });
    }

    /// Returns true if a readback was started and not taken.
    pub fn has_readbacks(&self) -> bool {
        !self.begun.is_empty()
    }

    pub fn take(&mut self) -> Option<Readback> {
        self.begun.pop_front()
    }
}

/// Values of a readback, in a buffer of the pool.
struct Copied {
    values: Vec<f32>,
    spares: SharedBuffers,
}

impl AsRef<[f32]> for Copied {
    fn as_ref(&self) -> &[f32] {
        &self.values
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let mut spares = lock(&self.spares);
        if spares.bytes > spares.bound {
            spares.bytes -= bytes(&self.values);
        } else {
            spares.buffers.push(std::mem::take(&mut self.values));
        }
    }
}

/// Returns the memory that a buffer takes.
fn bytes(buffer: &Vec<f32>) -> usize {
    buffer.capacity() * size_of::<f32>()
}

fn lock(spares: &SharedBuffers) -> MutexGuard<'_, Spares> {
    // Nothing panics between taking a buffer out and putting it in.
    spares.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(pieces: &mut ReadbackQueue, value: f32, count: usize) {
        let mut copy = pieces.buffer();
        copy.resize(count, value);
        pieces.begin(BucketTensor::Gradients, BucketId(0), 0..count, copy);
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let mut pieces = ReadbackQueue::new(10_000);
        let held = |pieces: &ReadbackQueue| {
            let spares = lock(&pieces.spares);
            (spares.bytes, spares.buffers.iter().map(bytes).sum::<usize>())
        };
        for _ in 0..3 {
            (0..40).for_each(|_| begin(&mut pieces, 1.0, 250));
            let (all, kept) = held(&pieces);
            assert!(all >= 40_000 && kept == 0, "{all} {kept}");
            let mut taken: Vec<Readback> = std::iter::from_fn(|| pieces.take()).collect();
            assert!(taken.len() == 40 && !pieces.has_readbacks());
            taken.truncate(20);
            assert_eq!(held(&pieces), (20_000, 0), "those that are out fill it");
            taken.clear();
            assert_eq!(held(&pieces), (10_000, 10_000));
        }
    }

    #[test]
    fn buffers_are_used_again() {
        let mut pieces = ReadbackQueue::new(1 << 20);
        begin(&mut pieces, 1.0, 100);
        let first = pieces.take().unwrap();
        let place = first.values().as_ptr();
        begin(&mut pieces, 2.0, 50);
        assert_ne!(pieces.take().unwrap().values().as_ptr(), place, "the first is still held");
        std::thread::spawn(move || drop(first)).join().unwrap();
        begin(&mut pieces, 3.0, 7);
        let third = pieces.take().unwrap();
        assert_eq!((third.values(), third.values().as_ptr()), ([3.0; 7].as_slice(), place));
        assert!(pieces.take().is_none());
        drop(pieces);
        assert_eq!(third.values(), [3.0; 7]);
    }
}
