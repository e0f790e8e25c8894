//! Pieces of the CPU device: copies, made when they are begun, in buffers that are used again.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::BucketId;
use crate::exec::{BucketTensor, Readback};

/// Buffers that are used again.
struct Spares {
    /// Those that no piece holds.
    buffers: Vec<Vec<f32>>,
    /// Bytes of these and of those that pieces hold, and what they may be when one is kept.
    bytes: usize,
    bound: usize,
}

/// Shared with pieces, which give their buffers back from any thread.
type Shared = Arc<Mutex<Spares>>;

/// The pieces that were begun and not taken, oldest first.
pub struct ReadbackQueue {
    begun: VecDeque<Readback>,
    spares: Shared,
}

impl ReadbackQueue {
    /// Buffers of dropped pieces are kept for others as long as all together take at most `bound`
    /// bytes; so they never take more than that, or than pieces have taken at once.
    pub fn new(bound: usize) -> Self {
        let spares = Spares { buffers: Vec::new(), bytes: 0, bound };
        Self { begun: VecDeque::new(), spares: Arc::new(Mutex::new(spares)) }
    }

    /// An empty buffer to copy into, for [`ReadbackQueue::begin`].
    pub fn buffer(&mut self) -> Vec<f32> {
        let mut spares = lock(&self.spares);
        let mut buffer = spares.buffers.pop().unwrap_or_default();
        spares.bytes -= bytes(&buffer);
        buffer.clear();
        buffer
    }

    /// Makes `copy`, the values of elements `range` of a bucket, the next piece.
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

    /// Whether some were begun and not taken.
    pub fn has_readbacks(&self) -> bool {
        !self.begun.is_empty()
    }

    pub fn take(&mut self) -> Option<Readback> {
        self.begun.pop_front()
    }
}

/// The values of a piece.
struct Copied {
    values: Vec<f32>,
    spares: Shared,
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

/// The memory that a buffer takes.
fn bytes(buffer: &Vec<f32>) -> usize {
    buffer.capacity() * size_of::<f32>()
}

fn lock(spares: &Shared) -> MutexGuard<'_, Spares> {
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
