//! Gradient norm: the sum of squares of a bucket of gradients, and the count of non-finite
//! elements. Twin of `shaders/norm.wgsl`, which has the formulas.
//!
//! The sum of finite elements may itself overflow f32, so the caller must check both results.

use rayon::prelude::*;

use super::dispatch_parts::as_words;
use crate::bucket_probe::{normals, probe_count};
use crate::dispatch::{Strips, grid};
use crate::harness::Deviation;
use crate::simd::vectorized;
use crate::{BucketProbe, Caps, Dispatch, Operand, Shader};

/// Elements per rayon task of `fast`; this fixes the order of its sums.
const TASK: usize = 16 * 1024;

/// Elements per partial sum, in buckets for which fewer than `PARTIALS_MAX` sums suffice.
const RUN: usize = 256;

/// Maximum number of partial sums of a bucket: few enough for one workgroup in the second stage,
/// and enough invocations for a software adapter.
const PARTIALS_MAX: usize = 4096;

/// Elements per partial sum on GPUs, where a workgroup of 256 invocations computes each: 4 vectors
/// of 4 for each invocation.
const GROUP_RUN: usize = 4096;

/// Maximum number of partial sums of a bucket on GPUs: enough workgroups to fill a large device.
const GROUPS: usize = 1024;

/// Every kind of value that is not finite, for probes and tests.
const NOT_FINITE: [f32; 4] = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// Reference: returns `(sum of squares of the finite values, count of non-finite values)`.
pub fn reference(values: &[f32]) -> (f64, u64) {
    let mut sum = 0.0;
    let mut bad = 0;
    for value in values {
        if value.is_finite() {
            sum += f64::from(*value) * f64::from(*value);
        } else {
            bad += 1;
        }
    }
    (sum, bad)
}

/// CPU kernel: the reference in parallel; the result is bitwise independent of the number of
/// threads.
pub fn fast(values: &[f32]) -> (f64, u64) {
    let parts: Vec<(f64, u64)> = values.par_chunks(TASK).map(partial).collect();
    total(parts)
}

/// Computes the same bits as [`fast`] on the calling thread, for threads that must not wait for
/// the work of the rayon pool.
pub fn sum_of_squares(values: &[f32]) -> (f64, u64) {
    total(values.chunks(TASK).map(partial))
}

fn total(parts: impl IntoIterator<Item = (f64, u64)>) -> (f64, u64) {
    let mut sum = 0.0;
    let mut bad = 0;
    for (part, count) in parts {
        sum += part;
        bad += count;
    }
    (sum, bad)
}

vectorized! {
    /// Computes the sum and the count of one chunk, in lanes.
    fn partial<S>(values: &[f32]) -> (f64, u64) {
        const LANES: usize = 8;
        let mut sums = [0.0; LANES];
        let square = |value: f32| {
            let value = if value.is_finite() { f64::from(value) } else { 0.0 };
            value * value
        };
        let (whole, rest) = values.as_chunks::<LANES>();
        for chunk in whole {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum += square(*value);
            }
        }
        for (sum, value) in sums.iter_mut().zip(rest) {
            *sum += square(*value);
        }
        // A loop of its own, whose sums are of 32 bits.
        let bad: u32 = values.iter().map(|value| u32::from(!value.is_finite())).sum();
        (sums.iter().sum(), bad.into())
    }
}

/// Number of partial sums that the first stage can use on a bucket of `count` elements.
fn partials(count: usize) -> usize {
    count.div_ceil(RUN).clamp(1, PARTIALS_MAX)
}

/// Layout of the partial sums of several buckets, a slot for each, which one second stage sums.
#[derive(Clone, Copy, Debug)]
pub struct NormSlots {
    pub slots: usize,
    /// Room for partial sums in a slot.
    parts: usize,
}

impl NormSlots {
    /// Creates the slots for buckets of these lengths.
    pub fn new(lengths: impl IntoIterator<Item = usize>) -> Self {
        let parts: Vec<usize> = lengths.into_iter().map(partials).collect();
        Self { slots: parts.len(), parts: parts.into_iter().max().unwrap_or(1) }
    }

    /// Floats of all slots, in pairs; the first pair of a slot holds their number.
    pub fn words(&self) -> usize {
        2 * self.slots * (self.parts + 1)
    }
}

/// Returns the first stage on a bucket of `count` elements, and the second stage, which runs once,
/// after the first stages of all buckets. Input 0 is the gradients, output 0 the partial
/// sums of all slots, output 1 the results: (sum of squares, count of non-finite elements) as two
/// floats per slot.
pub fn dispatch(count: usize, caps: &Caps, places: NormSlots, slot: usize) -> [Dispatch; 2] {
    let NormSlots { slots, parts: room } = places;
    let whole = count.is_multiple_of(4);
    let items = if whole { count / 4 } else { count };
    let (strips, entry, groups) = if caps.wants_gpu_variants() {
        let parts = count.div_ceil(GROUP_RUN).clamp(1, GROUPS).min(room);
        let entry = if whole { "group_sums4" } else { "group_sums" };
        (Strips { parts, strip: items.div_ceil(parts), lanes: 256 }, entry, grid(parts, 1))
    } else {
        let strips = Strips::new(items, partials(count).min(room));
        let entry = if whole { "partial_sums4" } else { "partial_sums" };
        (strips, entry, grid(strips.parts, 64))
    };
    let Strips { parts, strip, lanes } = strips;
    let stage = |entry, groups| Dispatch {
        shader: Shader::new("norm", entry),
        operands: vec![Operand::Input(0), Operand::Output(0), Operand::Output(1)],
        params: as_words(&[count, parts, strip, lanes, slot, slots, room + 1]),
        groups,
    };
    [stage(entry, groups), stage("total", grid(slots, 1))]
}

/// Creates a probe for the kernels that a bucket of `like` elements runs: a bucket with some values
/// that are not finite, and its norm in the second of three slots, with the other two empty. The
/// deviation is infinite if the count is wrong or another slot has a result.
pub fn probe(like: usize, caps: &Caps) -> BucketProbe {
    let count = probe_count(like, |count| {
        let [first, _] = dispatch(count, caps, NormSlots::new([count]), 0);
        first.shader
    });
    let mut gradients = normals(count, 51);
    for (i, bad) in NOT_FINITE.into_iter().enumerate() {
        gradients[(i * 7919 + count / 2) % count] = bad;
    }
    let (sum, bad) = reference(&gradients);
    let places = NormSlots::new([count; 3]);
    // A slot whose number is 0 has no partial sums.
    let mut partial_sums = vec![f32::NAN; places.words()];
    for number in partial_sums.iter_mut().step_by(2 * (places.parts + 1)) {
        *number = 0.0;
    }
    BucketProbe {
        name: "norm",
        input: gradients.iter().map(|gradient| gradient.to_bits()).collect(),
        dispatches: dispatch(count, caps, places, 1).to_vec(),
        starts: vec![partial_sums, vec![0.5; 6]],
        error: Box::new(move |outputs, factor| {
            let slots = &outputs[1];
            let others = [&slots[..2], &slots[4..]].concat();
            if slots[3] != bad as f32 || others != [0.0; 4] {
                return Deviation::WRONG;
            }
            Deviation::of(std::iter::once(f64::from(slots[2] * factor)), &[sum])
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceClass;
    use crate::testing::{for_each_gpu, run_dispatches};
    use potluck_core::Site;
    use potluck_core::rng::Key;

    #[test]
    fn one_thread_gives_the_bits_of_many() {
        for count in [0, 1, TASK - 1, TASK, 3 * TASK + 17] {
            let values = values(count, 0);
            assert_eq!(sum_of_squares(&values), fast(&values), "{count}");
        }
    }

    /// Returns values around 1, and `bad` of them not finite.
    fn values(count: usize, bad: usize) -> Vec<f32> {
        let key = Key::new(42).site(Site(5));
        let mut values: Vec<f32> = (0..count)
            .map(|i| key.words([i as u32, 0])[0] as f32 / 2.0f32.powi(31) - 0.7)
            .collect();
        for i in 0..bad {
            values[(i * 7919 + count / 2) % count] = NOT_FINITE[i % 4];
        }
        values
    }

    fn assert_close(who: &str, got: (f64, u64), expected: (f64, u64), tolerance: f64) {
        let within = (got.0 - expected.0).abs() <= tolerance * expected.0;
        assert!(within && got.1 == expected.1, "{who}: {got:?}, not {expected:?}");
    }

    /// Capabilities of a GPU and of an adapter that runs on a processor.
    fn classes() -> [Caps; 2] {
        let class = |class| Caps { class, ..Caps::EVERY };
        [DeviceClass::Hardware, DeviceClass::Software].map(class)
    }

    /// Runs both stages with room for `parts` partial sums, in the middle one of three slots.
    fn check(values: &[f32], parts: usize) {
        let expected = reference(values);
        // Bound of the rounding errors of that many additions.
        let rounding = values.len() as f64 * f64::EPSILON;
        assert_close("the fast version", fast(values), expected, rounding);
        for_each_gpu(|gpu, pipelines| {
            for caps in classes() {
                let who = format!(
                    "{} ({:?}) as {:?}, {} elements",
                    gpu.name,
                    gpu.checks,
                    caps.class,
                    values.len()
                );
                let places = NormSlots { slots: 3, parts };
                let starts = [vec![f32::NAN; places.words()], vec![0.5; 6]];
                let dispatches = dispatch(values.len(), &caps, places, 1);
                let inputs = [bytemuck::cast_slice(values)];
                let got = run_dispatches(gpu, pipelines, "norm", &dispatches, &inputs, &starts);
                let result = (f64::from(got[1][2]), got[1][3] as u64);
                assert_close(&who, result, expected, 1e-5);
                assert_eq!([&got[1][..2], &got[1][4..]].concat(), [0.0; 4], "{who}: other slots");
            }
        });
    }

    /// The second stage sums the slots of buckets of very different lengths.
    #[test]
    fn one_second_stage_sums_all_slots() {
        let lengths = [3, 20_000, 0, 70_001];
        let buckets = lengths.map(|length| values(length, length.min(2)));
        let places = NormSlots::new(lengths);
        for_each_gpu(|gpu, pipelines| {
            for caps in classes() {
                let mut state = vec![vec![f32::NAN; places.words()], vec![0.5; 8]];
                for (slot, bucket) in buckets.iter().enumerate() {
                    let stages = dispatch(bucket.len(), &caps, places, slot);
                    let last = if slot == 3 { 2 } else { 1 };
                    let padded = [&bucket[..], &[0.0; 4]].concat();
                    let inputs = [bytemuck::cast_slice(&padded)];
                    let stages = &stages[..last];
                    state = run_dispatches(gpu, pipelines, "norm", stages, &inputs, &state);
                }
                for (bucket, got) in buckets.iter().zip(state[1].chunks(2)) {
                    let got = (f64::from(got[0]), got[1] as u64);
                    assert_close(&gpu.name, got, reference(bucket), 1e-5);
                }
            }
        });
    }

    #[test]
    fn sums_and_counts_agree_everywhere() {
        for (count, bad) in [
            (1, 0),
            (1, 1),
            (2, 1),
            (255, 4),
            (256, 3),
            (257, 0),
            (65_536, 9),
            (300_001, 3),
            (65_537, 4),
        ] {
            check(&values(count, bad), partials(count));
        }
    }

    #[test]
    fn less_room_gives_the_same() {
        let values = values(10_007, 5);
        check(&values, 1);
        check(&values, 7);
        check(&values, 1000);
    }

    #[test]
    fn thirty_million_elements_are_summed() {
        let count = 30_000_000;
        assert_eq!(partials(count), PARTIALS_MAX);
        check(&values(count, 11), PARTIALS_MAX);
    }

    #[test]
    fn the_largest_finite_value_is_finite() {
        let values = [f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-42, 0.0, -0.0];
        assert_eq!(reference(&values).1, 0);
        assert_eq!(fast(&values).1, 0);
        check(&[1e18, -1e18, 1e-30, 0.0, f32::NAN], 1);
    }
}
