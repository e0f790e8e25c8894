//! Operands of matrix products in mixed precision and their rounding to f16, on GPUs and on the
//! host, where the oracle and the CPU kernels round the same values.
//!
//! Kernels without cooperative matrices round by integer arithmetic. The conversion of WGSL would
//! take fewer instructions, but drivers may omit it: Mesa's compiler replaces a value that is
//! converted to f16 and back by the value itself (llvmpipe of Mesa 26). Drivers may also choose the
//! rounding mode.

use std::borrow::Cow;

use rayon::prelude::*;

use crate::simd::vectorized;
use crate::{Float, OpCall, source};
use potluck_graph::Precision;

/// WGSL of `operand` and `operand4`, which round one operand and four.
pub(crate) fn operand_snippet(precision: Precision) -> &'static str {
    source::snippet(match precision {
        Precision::F32 => "operand_f32",
        Precision::Mixed => "operand_integer",
    })
}

/// Values that a task of the host rounds.
const TASK: usize = 1 << 14;

/// Returns the operands that a call on the host multiplies: these values, rounded to f16 in mixed
/// precision.
pub(crate) fn operands<'a, T: Float>(call: &OpCall, values: &'a [T]) -> Cow<'a, [T]> {
    match call.precision {
        Precision::F32 => Cow::Borrowed(values),
        Precision::Mixed => {
            let mut rounded = values.to_vec();
            rounded.par_chunks_mut(TASK).for_each(T::round_to_f16);
            Cow::Owned(rounded)
        }
    }
}

/// Bytes of the copy that [`operands`] makes of this number of values.
pub(crate) fn operand_bytes(call: &OpCall, values: usize) -> usize {
    match call.precision {
        Precision::F32 => 0,
        Precision::Mixed => values * size_of::<f32>(),
    }
}

/// Bits of the magnitudes of the smallest normal f16, of the largest one, and of infinity.
const NORMAL: u32 = 0x3880_0000;
const MAX: u32 = 0x477f_e000;
const INFINITY: u32 = 0x7f80_0000;

/// Rounds values to f16, to nearest, ties to even (IEEE 754 binary16), as
/// `shaders/lib/operand_integer.wgsl` does.
pub(crate) fn round_to_f16(values: &mut [f32]) {
    round_all(values);
}

vectorized! {
    fn round_all<S>(values: &mut [f32]) {
        for value in values {
            *value = rounded(*value);
        }
    }
}

#[inline(always)]
fn rounded(value: f32) -> f32 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let normal = magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1)) & 0xffff_e000;
    // Subnormals are multiples of 2^-24. The steps of larger values are not used.
    let steps = (f32::from_bits(magnitude) * 16_777_216.0).round_ties_even();
    let subnormal = (steps * 5.960_464_5e-8).to_bits();
    let finite = if magnitude < NORMAL { subnormal } else { normal };
    let number = if finite > MAX { INFINITY } else { finite };
    f32::from_bits(bits ^ magnitude | if magnitude > INFINITY { magnitude } else { number })
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::testing::for_each_gpu;
    use crate::{Caps, OwnedCall, RandomContext, harness};
    use potluck_core::HostTensor;
    use potluck_core::rng::Key;
    use potluck_graph::Op;

    /// All values between two neighbours of f16, and around each bound.
    fn values() -> Vec<f32> {
        let mut values = Vec::new();
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            if half.is_nan() {
                continue;
            }
            let (here, next) = (half.to_f32(), f16::from_bits(bits ^ 1).to_f32());
            let tie = (here + next) / 2.0;
            values.extend([here, tie, tie.next_up(), tie.next_down(), here.next_up()]);
        }
        values.extend([65519.996, 65520.0, -65520.0, 1e30, f32::MAX, f32::INFINITY]);
        values.extend([1e-8, 2.0f32.powi(-25), 2.0f32.powi(-25).next_up(), f32::MIN_POSITIVE]);
        values.retain(|value| !value.is_nan());
        values
    }

    #[test]
    fn the_host_rounds_to_the_nearest_half() {
        let mut got = values();
        round_to_f16(&mut got);
        for (value, got) in values().into_iter().zip(got) {
            let expected = f16::from_f32(value).to_f32();
            assert_eq!(got.to_bits(), expected.to_bits(), "{value:e}");
        }
        let mut nan = [f32::NAN, -f32::NAN];
        round_to_f16(&mut nan);
        assert!(nan.iter().all(|value| value.is_nan()));
    }

    /// The plain product of a column and 1 has the rounded values.
    #[test]
    fn kernels_round_to_the_nearest_half() {
        let mut given = values();
        given.push(f32::NAN);
        let op = Op::MatMul { transpose_a: false, transpose_b: false };
        let random = RandomContext { step_key: Key::new(1), training: true };
        let dims = vec![vec![given.len(), 1], vec![1, 1]];
        let mut owned_call = OwnedCall::new(op, dims, random).unwrap();
        owned_call.precision = Precision::Mixed;
        let call = owned_call.call();
        let inputs = [
            HostTensor::Float(given.iter().map(|value| f64::from(*value)).collect()),
            HostTensor::Float(vec![1.0]),
        ];
        let inputs: Vec<&HostTensor<f64>> = inputs.iter().collect();
        for_each_gpu(|gpu, pipelines| {
            let plain = &crate::ops::matmul::variants(&call, &Caps::of(gpu))[0];
            let run = harness::run_call(gpu, pipelines, &call, &plain.dispatches, &inputs, 0.0);
            let got = run.unwrap().swap_remove(0);
            for (value, got) in given.iter().zip(got) {
                let expected = f16::from_f32(*value).to_f32();
                let is_same = got == expected || got.is_nan() && expected.is_nan();
                assert!(is_same, "{value:e} is {got:e} on {}, not {expected:e}", gpu.name);
            }
        });
    }
}
