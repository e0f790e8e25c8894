//! The sum of squares of a bucket of gradients, and how many of them are not finite. Twin of
//! `shaders/norm.wgsl`, which has the formulas.
//!
//! The sum of finite elements may itself be too large for f32: whoever reads it checks both.

use rayon::prelude::*;

use crate::kernels::dispatch::{Strips, grid};
use crate::kernels::{Dispatch, Operand, Shader};

/// Elements per task of the fast version, which fixes the order of its sums.
const TASK: usize = 16 * 1024;

/// Elements that one invocation sums, in buckets that do not need the most invocations.
const RUN: usize = 256;

/// The most invocations of the first stage: they fill large devices, and the second stage still
/// has few enough partials for one workgroup.
const PARTIALS_MAX: usize = 32 * 1024;

/// The bits that are all set in infinities and NaNs, and in nothing else.
const EXPONENT: u32 = 0x7F80_0000;

/// `(sum of squares of the finite values, how many are not finite)`
pub fn reference(values: &[f32]) -> (f64, u64) {
    let (mut sum, mut bad) = (0.0, 0);
    for value in values {
        if value.to_bits() & EXPONENT == EXPONENT {
            bad += 1;
        } else {
            sum += f64::from(*value) * f64::from(*value);
        }
    }
    (sum, bad)
}

/// The reference, in parallel; how many threads there are changes no bit.
pub fn fast(values: &[f32]) -> (f64, u64) {
    let parts: Vec<(f64, u64)> = values.par_chunks(TASK).map(partial).collect();
    parts.into_iter().fold((0.0, 0), join)
}

/// [`fast`] on the thread that calls it, to the same bits: for threads that must not wait behind
/// what the pool computes.
pub fn sum_of_squares(values: &[f32]) -> (f64, u64) {
    values.chunks(TASK).map(partial).fold((0.0, 0), join)
}

fn join(sum: (f64, u64), part: (f64, u64)) -> (f64, u64) {
    (sum.0 + part.0, sum.1 + part.1)
}

/// The reference of one chunk in lanes, so that it can be vector instructions.
fn partial(values: &[f32]) -> (f64, u64) {
    const LANES: usize = 8;
    let (mut sums, mut bad) = ([0.0; LANES], [0u64; LANES]);
    for chunk in values.chunks(LANES) {
        for ((sum, bad), value) in sums.iter_mut().zip(&mut bad).zip(chunk) {
            let finite = value.to_bits() & EXPONENT != EXPONENT;
            let value = if finite { f64::from(*value) } else { 0.0 };
            *sum += value * value;
            *bad += u64::from(!finite);
        }
    }
    (sums.iter().sum(), bad.iter().sum())
}

/// The pairs of floats that the first stage wants room for, on a bucket of `count` elements.
pub fn partials(count: usize) -> usize {
    count.div_ceil(RUN).clamp(1, PARTIALS_MAX)
}

/// The two stages on a bucket of `count` elements. Input 0 is the gradients, output 0 the
/// partials (room for `parts` pairs, of which [`partials`] are used at most), output 1 the results:
/// (sum of squares, count of what is not finite) as two floats in `slot`.
pub fn dispatch(count: usize, parts: usize, slot: usize) -> Vec<Dispatch> {
    assert!(parts > 0, "the norm needs room for one partial sum");
    let whole = count.is_multiple_of(4);
    let strips = Strips::new(if whole { count / 4 } else { count }, partials(count).min(parts));
    let Strips { parts, strip, lanes } = strips;
    let stage = |entry, groups| Dispatch {
        shader: Shader::new("norm", entry),
        operands: vec![Operand::Input(0), Operand::Output(0), Operand::Output(1)],
        params: [count, parts, strip, lanes, slot].map(|word| word as u32).to_vec(),
        groups,
    };
    let first = if whole { "partial_sums4" } else { "partial_sums" };
    vec![stage(first, grid(parts, 64)), stage("total", [1, 1, 1])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Site;
    use crate::base::rng::Key;
    use crate::kernels::testing::{for_each_gpu, run_dispatches};

    const NOT_FINITE: [f32; 4] = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

    #[test]
    fn one_thread_gives_the_bits_of_many() {
        for count in [0, 1, TASK - 1, TASK, 3 * TASK + 17] {
            let values = values(count, 0);
            assert_eq!(sum_of_squares(&values), fast(&values), "{count}");
        }
    }

    /// Values around 1, and `bad` of them not finite.
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

    /// Runs both stages with room for `parts` pairs, in the middle one of three slots.
    fn check(values: &[f32], parts: usize) {
        let expected = reference(values);
        // What rounding each of so many additions may cost at most.
        let rounding = values.len() as f64 * f64::EPSILON;
        assert_close("the fast version", fast(values), expected, rounding);
        for_each_gpu(|gpu, pipelines| {
            let who = format!("{} ({:?}), {} elements", gpu.name, gpu.checks, values.len());
            let starts = [vec![f32::NAN; 2 * parts], vec![0.5; 6]];
            let dispatches = dispatch(values.len(), parts, 1);
            let inputs = [bytemuck::cast_slice(values)];
            let got = run_dispatches(gpu, pipelines, "norm", &dispatches, &inputs, &starts);
            let result = (f64::from(got[1][2]), got[1][3] as u64);
            assert_close(&who, result, expected, 1e-5);
            assert_eq!([&got[1][..2], &got[1][4..]].concat(), [0.5; 4], "{who}: other slots");
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
