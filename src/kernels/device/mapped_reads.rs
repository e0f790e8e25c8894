//! Reading of mapped memory. If a driver has no memory that is both cached and coherent for buffers
//! that the host reads, as on some integrated GPUs, it maps uncached memory. Ordinary loads read
//! only a few bytes of it per access, tens of times slower than from the host's own memory;
//! streaming loads fetch whole cache lines.

use std::time::Instant;

use super::error::DeviceError;
use super::gpu::Gpu;

/// Bytes that are read to measure a rate: more than the caches next to a core.
const BYTES: usize = 8 << 20;

/// Number of readings; the fastest counts.
const ROUNDS: usize = 3;

/// Mapped memory that is slower than the host's own by this factor is uncached.
const UNCACHED: f64 = 8.0;

/// Bytes of a cache line, which a streaming load fetches as a whole.
const LINE: usize = 64;

/// Method by which values are read from mapped memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadMethod {
    /// Ordinary loads from the mapped memory.
    #[default]
    InPlace,
    /// A copy by streaming loads first.
    Streaming,
}

/// Rates of reading mapped memory of a device, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MappedReadRates {
    /// Ordinary loads.
    pub mapped: f64,
    /// The same loop over the host's own memory.
    pub own: f64,
    /// A copy with streaming loads, if the processor has them.
    pub streaming: Option<f64>,
}

impl MappedReadRates {
    /// Measures the rates on a device, on a buffer that was touched once before.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if the device fails.
    pub fn measure(gpu: &Gpu) -> Result<Self, DeviceError> {
        let own = vec![1u8; BYTES];
        let mut into = vec![0u8; BYTES];
        let staging = gpu.readback(BYTES as u64)?;
        let source = gpu.storage("mapped reads", BYTES as u64)?;
        gpu.upload(&source, 0, &own);
        let whole = [(&source, 0, BYTES as u64)];
        gpu.read_with(&staging, &whole, |view| Self {
            mapped: rate(|| read_all(view)),
            own: rate(|| read_all(&own)),
            streaming: has_streaming_loads().then(|| rate(|| copy_streaming(view, &mut into))),
        })
    }

    /// Returns the method by which values are read from this memory.
    pub fn method(&self) -> ReadMethod {
        let is_uncached = self.mapped * UNCACHED < self.own;
        if is_uncached && self.streaming.is_some_and(|rate| rate > self.mapped) {
            ReadMethod::Streaming
        } else {
            ReadMethod::InPlace
        }
    }
}

/// Bytes per second of a function that reads [`BYTES`], without its first call.
fn rate(mut read: impl FnMut()) -> f64 {
    read();
    let mut fastest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        read();
        fastest = fastest.min(started.elapsed().as_secs_f64());
    }
    (BYTES as f64 / fastest.max(1e-9)).round()
}

/// Adds up the words in bytes by loads of whole vectors, as a ring adds up values.
fn read_all(bytes: &[u8]) {
    let (words, _) = bytes.as_chunks::<8>();
    let sum: u64 = words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    std::hint::black_box(sum);
}

/// Copies bytes from mapped memory to memory of the host of the same length.
pub(crate) fn copy(method: ReadMethod, from: &[u8], into: &mut [u8]) {
    match method {
        ReadMethod::InPlace => into.copy_from_slice(from),
        ReadMethod::Streaming => copy_streaming(from, into),
    }
}

#[cfg(target_arch = "x86_64")]
fn has_streaming_loads() -> bool {
    is_x86_feature_detected!("sse4.1")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_streaming_loads() -> bool {
    false
}

/// Copies bytes to memory of the same length, whole cache lines by streaming loads.
#[cfg(target_arch = "x86_64")]
fn copy_streaming(from: &[u8], into: &mut [u8]) {
    assert_eq!(from.len(), into.len());
    if !has_streaming_loads() {
        return into.copy_from_slice(from);
    }
    let front = from.as_ptr().align_offset(LINE).min(from.len());
    let whole = (from.len() - front) / LINE * LINE;
    let (first, rest) = from.split_at(front);
    let (lines, last) = rest.split_at(whole);
    into[..front].copy_from_slice(first);
    into[front + whole..].copy_from_slice(last);
    // Safety: the processor has SSE 4.1, and the lines begin at a multiple of their length.
    unsafe { copy_lines(lines, &mut into[front..front + whole]) };
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_streaming(from: &[u8], into: &mut [u8]) {
    into.copy_from_slice(from);
}

/// Copies whole cache lines; all loads of a line hit the same line buffer.
///
/// # Safety
/// The processor must have SSE 4.1, `from` must begin at a multiple of [`LINE`], and both lengths
/// must be the same multiple of it.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.1")]
unsafe fn copy_lines(from: &[u8], into: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_mfence, _mm_storeu_si128, _mm_stream_load_si128};
    const LOADS: usize = LINE / size_of::<__m128i>();
    // Lines that the processor had buffered before the device wrote are read again.
    _mm_mfence();
    for (from, into) in from.chunks_exact(LINE).zip(into.chunks_exact_mut(LINE)) {
        let source = from.as_ptr().cast::<__m128i>();
        let target = into.as_mut_ptr().cast::<__m128i>();
        // Safety: a line has `LOADS` vectors, at multiples of their length in `from`.
        unsafe {
            let vectors: [__m128i; LOADS] =
                std::array::from_fn(|nth| _mm_stream_load_si128(source.add(nth)));
            for (nth, vector) in vectors.into_iter().enumerate() {
                _mm_storeu_si128(target.add(nth), vector);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No adapter here has uncached memory, so the choice is tested on typical rates of it.
    #[test]
    fn uncached_memory_is_read_by_streaming_loads_where_these_are_faster() {
        let rates = |mapped, streaming| MappedReadRates { mapped, own: 1e10, streaming };
        for (mapped, streaming, expected) in [
            (0.11e9, Some(2e9), ReadMethod::Streaming),
            (0.11e9, Some(0.1e9), ReadMethod::InPlace),
            (0.11e9, None, ReadMethod::InPlace),
            // Slower than the host's own, but cached.
            (1.3e9, Some(2e9), ReadMethod::InPlace),
            (1e10, Some(1.2e10), ReadMethod::InPlace),
        ] {
            assert_eq!(rates(mapped, streaming).method(), expected, "{mapped} {streaming:?}");
        }
    }

    #[test]
    fn streaming_loads_copy_all_bytes_of_every_alignment_and_length() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7 % 251) as u8).collect();
        for first in 0..70 {
            for length in [0, 1, 15, 63, 64, 65, 128, 200, 700] {
                let from = &bytes[first..first + length];
                for method in [ReadMethod::InPlace, ReadMethod::Streaming] {
                    let mut into = vec![0; length];
                    copy(method, from, &mut into);
                    assert_eq!(into, from, "{first} {length} {method:?}");
                }
            }
        }
    }
}
