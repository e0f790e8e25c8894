//! Readbacks of the CPU device: copies, made when a readback is started, in pooled buffers.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::exec::Readback;
use potluck_core::{DType, Lock};
use potluck_graph::Region;

/// Buffer pool of readbacks.
struct Spares {
    /// Buffers that no readback holds.
    buffers: Vec<Vec<f32>>,
    /// Bytes of the pooled buffers and of the buffers that readbacks hold; the buffer of a dropped
    /// readback is kept if this is at most `bound`.
    bytes: usize,
    bound: usize,
    /// The largest value of `bytes` so far.
    bytes_peak: usize,
}

impl Spares {
    /// Returns a buffer with room for exactly `length` values: a pooled one of that size, or a new
    /// one, after freeing pooled buffers of other sizes as far as the bound requires.
    fn take(&mut self, length: usize) -> Vec<f32> {
        let wanted = length * DType::F32.bytes();
        let same_size = self.buffers.iter().rposition(|buffer| bytes(buffer) == wanted);
        if let Some(found) = same_size {
            return self.buffers.swap_remove(found);
        }
        while self.bytes + wanted > self.bound
            && let Some(other) = self.buffers.pop()
        {
            self.bytes -= bytes(&other);
        }
        let buffer = Vec::with_capacity(length);
        self.bytes += bytes(&buffer);
        self.bytes_peak = self.bytes_peak.max(self.bytes);
        buffer
    }
}

/// Buffer pool shared with readbacks, which return their buffers from any thread.
type SharedBuffers = Arc<Lock<Spares>>;

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
        let spares = Spares { buffers: Vec::new(), bytes: 0, bound, bytes_peak: 0 };
        Self { begun: VecDeque::new(), spares: Arc::new(Lock::new(spares)) }
    }

    /// Returns an empty buffer with room for `length` values, for [`ReadbackQueue::begin`].
    pub fn buffer(&mut self, length: usize) -> Vec<f32> {
        let mut buffer = self.spares.lock().take(length);
        buffer.clear();
        buffer
    }

    /// Returns the most bytes that all buffers have taken at once.
    pub fn bytes_peak(&self) -> usize {
        self.spares.lock().bytes_peak
    }

    /// Appends `copy`, the values of a place in a buffer of this queue that has room for them.
    pub fn begin(&mut self, place: Region, copy: Vec<f32>) {
        let values = Box::new(Copied { values: copy, spares: self.spares.clone() });
        self.begun.push_back(Readback { place, values });
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
        let mut spares = self.spares.lock();
        if spares.bytes > spares.bound {
            spares.bytes -= bytes(&self.values);
        } else {
            spares.buffers.push(std::mem::take(&mut self.values));
        }
    }
}

fn bytes(buffer: &Vec<f32>) -> usize {
    buffer.capacity() * DType::F32.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::BucketId;
    use potluck_graph::BucketTensor;

    fn begin(pieces: &mut ReadbackQueue, value: f32, count: usize) {
        let mut copy = pieces.buffer(count);
        copy.resize(count, value);
        pieces.begin(Region::bucket(BucketTensor::Gradients, BucketId(0), 0..count), copy);
    }

    #[test]
    fn what_is_kept_has_a_bound() {
        let mut pieces = ReadbackQueue::new(10_000);
        let held = |pieces: &ReadbackQueue| {
            let spares = pieces.spares.lock();
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
    fn buffers_are_used_again_for_as_many_values() {
        let mut pieces = ReadbackQueue::new(1 << 20);
        begin(&mut pieces, 1.0, 100);
        let first = pieces.take().unwrap();
        let place = first.values().as_ptr();
        begin(&mut pieces, 2.0, 100);
        assert_ne!(pieces.take().unwrap().values().as_ptr(), place, "the first is still held");
        std::thread::spawn(move || drop(first)).join().unwrap();
        begin(&mut pieces, 3.0, 7);
        let other = pieces.take().unwrap();
        assert_eq!(other.values(), [3.0; 7]);
        assert_ne!(other.values().as_ptr(), place, "a buffer of another size");
        begin(&mut pieces, 3.0, 100);
        let third = pieces.take().unwrap();
        assert_eq!((third.values(), third.values().as_ptr()), ([3.0; 100].as_slice(), place));
        assert!(pieces.take().is_none());
        drop(pieces);
        assert_eq!(third.values(), [3.0; 100]);
    }

    #[test]
    fn buffers_of_other_sizes_make_room_within_the_bound() {
        let mut pieces = ReadbackQueue::new(4000);
        for count in [10, 1000, 500, 100, 1000] {
            (0..1000 / count).for_each(|_| begin(&mut pieces, 1.0, count));
            while pieces.take().is_some() {}
            assert!(pieces.bytes_peak() <= 4000, "{count}: {}", pieces.bytes_peak());
        }
    }
}
