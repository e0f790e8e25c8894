//! Hash of a range of a bucket's words, computed on the device, so that a readback can be
//! verified against the contents of device memory. Twin of `shaders/hash.wgsl`, which has the
//! formula.

use std::ops::Range;

use rayon::prelude::*;

use super::dispatch_parts::as_words;
use crate::bucket_probe::probe_count;
use crate::cpu_kernel::TASK;
use crate::dispatch::{Strips, grid};
use crate::harness::Deviation;
use crate::simd::vectorized;
use crate::{BucketProbe, Dispatch, Operand, Shader};
use potluck_core::Site;
use potluck_core::rng::Key;

/// Words per invocation, in ranges for which fewer than `PARTIALS_MAX` invocations suffice.
const RUN: usize = 256;

/// Maximum number of invocations of the first stage: enough to fill large devices, and few enough
/// partial sums for one workgroup in the second stage.
const PARTIALS_MAX: usize = 32 * 1024;

/// The finalizer of MurmurHash3 (Appleby 2011).
#[inline(always)]
fn mix_a(word: u32) -> u32 {
    let h = (word ^ word >> 16).wrapping_mul(0x85EB_CA6B);
    let h = (h ^ h >> 13).wrapping_mul(0xC2B2_AE35);
    h ^ h >> 16
}

/// `lowbias32` (Wellons 2018).
#[inline(always)]
fn mix_b(word: u32) -> u32 {
    let h = (word ^ word >> 16).wrapping_mul(0x7FEB_352D);
    let h = (h ^ h >> 15).wrapping_mul(0x846C_A68B);
    h ^ h >> 16
}

/// Term of word `i` in each of the two lanes.
#[inline(always)]
fn term(i: u32, word: u32) -> [u32; 2] {
    let place = mix_a(i.wrapping_add(0x9E37_79B9));
    let turned = place.rotate_left(16);
    [mix_a(word ^ place), mix_b(word.wrapping_add(turned).wrapping_add(0x85EB_CA77))]
}

/// Reference: returns the hash of words at index `start` and following, with the first lane in
/// the low half. The hash of no words is 0.
pub fn reference(words: &[u32], start: u32) -> u64 {
    let mut lanes = [0u32; 2];
    for (i, word) in (start..).zip(words) {
        let [a, b] = term(i, *word);
        lanes = [lanes[0].wrapping_add(a), lanes[1].wrapping_add(b)];
    }
    join(lanes)
}

/// CPU kernel: the reference in parallel.
pub fn fast(words: &[u32], start: u32) -> u64 {
    let tasks = words.par_chunks(TASK).enumerate();
    let hashes = tasks.map(|(task, words)| join(sums(words, start + (task * TASK) as u32)));
    hashes.reduce(|| 0, combine)
}

vectorized! {
    /// The two lanes of the hash of words at index `start` and following.
    fn sums<S>(words: &[u32], start: u32) -> [u32; 2] {
        let (mut low, mut high) = (0u32, 0u32);
        for (at, word) in words.iter().enumerate() {
            let [of_low, of_high] = term(start.wrapping_add(at as u32), *word);
            (low, high) = (low.wrapping_add(of_low), high.wrapping_add(of_high));
        }
        [low, high]
    }
}

/// Returns the hash of a range from the hashes of its two parts.
pub fn combine(a: u64, b: u64) -> u64 {
    let low = (a as u32).wrapping_add(b as u32);
    let high = ((a >> 32) as u32).wrapping_add((b >> 32) as u32);
    join([low, high])
}

/// Packs the two lanes into one number.
pub fn join([low, high]: [u32; 2]) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Returns the number of partial sums (pairs of words) that the first stage can use on a range of
/// `count` words.
pub fn partials(count: usize) -> usize {
    count.div_ceil(RUN).clamp(1, PARTIALS_MAX)
}

/// Returns the two stages on a range of a bucket. Input 0 is the bucket, output 0 the partial sums
/// (room for `parts` pairs of words; at most [`partials`] are used), output 1 the two lanes.
pub fn dispatch(range: Range<usize>, parts: usize) -> Vec<Dispatch> {
    let count = range.len();
    assert!(parts > 0, "the hash needs room for one partial sum");
    let whole = range.start.is_multiple_of(4) && count.is_multiple_of(4);
    let strips = Strips::new(if whole { count / 4 } else { count }, partials(count).min(parts));
    let Strips { parts, strip, lanes } = strips;
    let first = if whole { "partial_sums4" } else { "partial_sums" };
    let partial_sums = Dispatch {
        shader: Shader::new("hash", first),
        operands: vec![Operand::Input(0), Operand::Output(0), Operand::Output(1)],
        params: as_words(&[range.start, count, parts, strip, lanes]),
        groups: grid(parts, 64),
    };
    let total =
        Dispatch { shader: Shader::new("hash", "total"), groups: [1; 3], ..partial_sums.clone() };
    vec![partial_sums, total]
}

/// Creates a probe for the kernels that a bucket of `like` words runs. The result, which is read as
/// floats, must have the exact bits: the deviation is 0 or infinite. With a factor other than 1,
/// one is added to the result.
pub fn probe(like: usize) -> BucketProbe {
    let count = probe_count(like, |count| dispatch(0..count, 1).swap_remove(0).shader);
    let key = Key::new(42).site(Site(52));
    let words: Vec<u32> = (0..count).map(|i| key.words([i as u32, 0])[0]).collect();
    let expected = reference(&words, 0);
    BucketProbe {
        name: "hash",
        input: words,
        dispatches: dispatch(0..count, partials(count)),
        starts: vec![vec![f32::NAN; 2 * partials(count)], vec![f32::NAN; 2]],
        error: Box::new(move |outputs, factor| {
            let lanes = [outputs[1][0].to_bits(), outputs[1][1].to_bits()];
            let got = join(lanes).wrapping_add(u64::from(factor != 1.0));
            if got == expected { Deviation::default() } else { Deviation::WRONG }
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{for_each_gpu, run_dispatches};

    fn words(count: usize) -> Vec<u32> {
        let key = Key::new(42).site(Site(6));
        (0..count).map(|i| key.words([i as u32, 0])[0]).collect()
    }

    /// Returns the hash of a range and asserts that all implementations agree to the last bit.
    fn hash_everywhere(words: &[u32], range: Range<usize>, parts: usize) -> u64 {
        let start = range.start as u32;
        let expected = reference(&words[range.clone()], start);
        assert_eq!(fast(&words[range.clone()], start), expected);
        for_each_gpu(|gpu, pipelines| {
            let starts = [vec![0.0; 2 * parts], vec![0.0; 2]];
            let dispatches = dispatch(range.clone(), parts);
            let inputs = [bytemuck::cast_slice(words)];
            let got = run_dispatches(gpu, pipelines, "hash", &dispatches, &inputs, &starts);
            let lanes = [got[1][0].to_bits(), got[1][1].to_bits()];
            let who = format!("{} ({:?}), {range:?}", gpu.name, gpu.checks);
            assert_eq!(join(lanes), expected, "{who}");
        });
        expected
    }

    /// The expected values come from an independent implementation of the formula.
    #[test]
    fn the_formula_stays_as_it_is() {
        assert_eq!(reference(&[], 5), 0);
        assert_eq!(reference(&[0], 0), 0xE004_AE34_AA3E_5B61);
        assert_eq!(reference(&[1, 2, u32::MAX], 7), 0xF25B_FB09_EF7E_C1DE);
        let numbers: Vec<u32> = (0..1000).collect();
        assert_eq!(reference(&numbers, 1 << 31), 0xA3C8_86D3_5A71_E6EE);
    }

    #[test]
    fn every_device_finds_the_same_hash() {
        for (count, range) in [
            (1, 0..1),
            (4, 0..4),
            (7, 3..3),
            (257, 1..257),
            (1000, 4..400),
            (70_001, 12_345..70_001),
            (300_000, 0..300_000),
        ] {
            hash_everywhere(&words(count), range.clone(), partials(range.len()));
        }
    }

    #[test]
    fn less_room_and_other_splits_give_the_same() {
        let words = words(10_000);
        let whole = hash_everywhere(&words, 0..10_000, 40);
        assert_eq!(hash_everywhere(&words, 0..10_000, 1), whole);
        assert_eq!(hash_everywhere(&words, 0..10_000, 7), whole);
        for cut in [0, 1, 4096, 9_999, 10_000] {
            let parts = [0..cut, cut..10_000].map(|part| hash_everywhere(&words, part, 40));
            assert_eq!(combine(parts[0], parts[1]), whole, "cut at {cut}");
        }
    }

    #[test]
    fn any_change_changes_the_hash() {
        let words = words(500);
        let hash = reference(&words, 0);
        for at in 0..words.len() {
            for bit in [0, 1, 7, 30, 31] {
                let mut flipped = words.clone();
                flipped[at] ^= 1 << bit;
                assert_ne!(reference(&flipped, 0), hash, "bit {bit} of word {at}");
            }
            let mut swapped = words.clone();
            swapped.swap(at, (at + 1) % 500);
            assert_ne!(reference(&swapped, 0), hash, "word {at} and the next");
            assert_ne!(reference(&words[..at], 0), hash, "the first {at} words");
        }
        assert_ne!(reference(&words, 1), hash, "one place further");
        let zeros = |count| reference(&vec![0; count], 0);
        let hashes: std::collections::BTreeSet<u64> = (0..1000).map(zeros).collect();
        assert_eq!(hashes.len(), 1000, "every length of zeros");
    }
}
