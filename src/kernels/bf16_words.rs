//! Values in bfloat16: two in a word, the first in its low half. `shaders/bf16.wgsl` computes the
//! same bits.

use crate::simd::vectorized;

/// Words of values, rounded to nearest.
pub(crate) fn to_nearest(values: &[f32]) -> Vec<u32> {
    let mut words = Vec::with_capacity(values.len().div_ceil(2));
    for pair in values.chunks(2) {
        let high = pair.get(1).copied().unwrap_or(0.0);
        words.push(joined([pair[0], high].map(nearest)));
    }
    words
}

/// Words of values; `None` if one of them is no value of bf16.
pub(crate) fn words_of(values: &[f32]) -> Option<Vec<u32>> {
    if values.iter().all(|value| value.to_bits().is_multiple_of(1 << 16)) {
        Some(to_nearest(values))
    } else {
        None
    }
}

/// Values of the first `elements` halves of words.
pub(crate) fn values(words: &[u32], elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; 2 * words.len()];
    widen(words, &mut values);
    values.truncate(elements);
    values
}

#[inline(always)]
pub(crate) fn joined([low, high]: [u16; 2]) -> u32 {
    u32::from(low) | (u32::from(high) << 16)
}

/// Rounds a value to nearest, ties to even. Infinity stays infinity, and NaN stays NaN: with its
/// quiet bit, so that it has a bit left.
#[inline(always)]
fn nearest(value: f32) -> u16 {
    let bits = value.to_bits();
    let kept = bits >> 16;
    let rounded = bits.wrapping_add(0x7fff + (kept & 1)) >> 16;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    (if is_nan { kept | 0x40 } else { rounded }) as u16
}

vectorized! {
    /// Writes the two values of every word.
    pub(crate) fn widen<S>(words: &[u32], values: &mut [f32]) {
        for (pair, word) in values.as_chunks_mut::<2>().0.iter_mut().zip(words) {
            *pair = [word << 16, word & 0xffff_0000].map(f32::from_bits);
        }
    }

    /// Writes the words of pairs of values, rounded to nearest.
    pub(crate) fn narrow<S>(values: &[f32], words: &mut [u32]) {
        for (word, pair) in words.iter_mut().zip(values.as_chunks::<2>().0) {
            *word = joined(pair.map(nearest));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn words_hold_two_values_and_say_what_was_rounded() {
        let words = to_nearest(&[1.0, -2.5, 0.75]);
        assert_eq!(words, [0xc020_3f80, 0x3f40]);
        assert_eq!(values(&words, 3), [1.0, -2.5, 0.75]);
        assert_eq!(words_of(&values(&words, 3)), Some(words));
        assert_eq!(words_of(&[1.0, 1.000_000_1]), None);
        // To nearest, ties to even.
        assert_eq!(to_nearest(&[1.0 + 0.003_906_25, 1.0 + 3.0 * 0.003_906_25]), [0x3f82_3f80]);
    }

    #[test]
    fn rounding_is_that_of_ieee_754() {
        // Every exponent and sign, with mantissas around the places where rounding turns.
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits((u32::from(upper) << 16) | lower);
                let expected = bf16::from_f32(value);
                assert_eq!(nearest(value), expected.to_bits(), "{value:e}");
            }
        }
    }
}
