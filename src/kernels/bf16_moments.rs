//! Moments of the optimizer in bfloat16: two in a word, the first in its low half, rounded up or
//! down at random. `shaders/lib/bf16_pair.wgsl` computes the same bits.

use rayon::prelude::*;

use crate::bf16_words::{joined, widen};
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::simd::vectorized;
use crate::{Float, UpdateKernel};
use potluck_core::rng::{Key, threefry2x32};
use potluck_graph::{MomentRounding, Update, UpdateRange};

/// Parameters of a rounding, in the order of `Rounding` of the shaders.
pub(crate) fn rounding_params(rounding: &MomentRounding) -> [u32; 6] {
    let MomentRounding { key: Key([key0, key1]), series, number } = *rounding;
    let [number, run, distance, place] =
        [number, series.run, series.distance, series.place].map(|count| count as u32);
    [key0, key1, number, run, distance, place]
}

/// Workgroups of an update whose moments are rounded: one invocation per 4 words.
pub(crate) fn groups(range: &UpdateRange) -> [u32; 3] {
    grid((range.start + range.length).div_ceil(2) - range.start / 2, 256)
}

/// Rounds a value away from zero if the sum of `random` and its low 16 bits, for which bf16 has no
/// place, reaches 2^16, and else towards zero: away with a probability of its low bits / 2^16, so
/// that the mean is the value. A value of bf16 is unchanged; one above the largest may become
/// infinite.
#[inline(always)]
fn round_at_random(value: f32, random: u16) -> u16 {
    let bits = value.to_bits();
    // Infinity stays infinity, and NaN stays NaN: with its quiet bit, so that it has a bit left.
    let exact = (bits >> 16) | if bits & 0x7f_ffff == 0 { 0 } else { 0x40 };
    let is_finite = bits & 0x7f80_0000 != 0x7f80_0000;
    let up = bits.wrapping_add(u32::from(random)) >> 16;
    (if is_finite { up } else { exact }) as u16
}

vectorized! {
    /// Writes the words of pairs of values, rounded with bits of the random words from `shift` on.
    fn narrow<S>(values: &[f32], random: &[u32], shift: u32, words: &mut [u32]) {
        let pairs = values.as_chunks::<2>().0.iter().zip(random.as_chunks::<2>().0);
        for (word, ([low, high], random)) in words.iter_mut().zip(pairs) {
            let [of_low, of_high] = random.map(|random| (random >> shift) as u16);
            *word = joined([round_at_random(*low, of_low), round_at_random(*high, of_high)]);
        }
    }

    /// Writes the random words of counters from `first` on.
    fn draw<S>(key: [u32; 2], first: u32, blocks: &mut [[u32; 2]]) {
        for (at, block) in blocks.iter_mut().enumerate() {
            *block = threefry2x32(key, [first.wrapping_add(at as u32), 0]);
        }
    }
}

/// Writes the random words of elements of a range, from `first` on.
fn draw_words(rounding: &MomentRounding, first: usize, words: &mut [u32]) {
    let mut blocks = Vec::new();
    let mut rest = words;
    let mut element = first;
    while !rest.is_empty() {
        // Elements up to the end of a run are neighbours in the whole tensor.
        let place = rounding.place(element);
        let run = rounding.series.run;
        let left = (run - (rounding.number + element) % run).min(rest.len());
        blocks.resize((place + left).div_ceil(2) - place / 2, [0; 2]);
        draw(rounding.key.0, (place / 2) as u32, &mut blocks);
        let (own, others) = rest.split_at_mut(left);
        own.copy_from_slice(&blocks.as_flattened()[place % 2..place % 2 + left]);
        rest = others;
        element += left;
    }
}

/// Part of a range that a task updates.
struct UpdatePart<'a, T> {
    /// Its first element, relative to the start of the range.
    first: usize,
    parameters: &'a mut [T],
    gradients: &'a [T],
    /// Per moment: the words that hold its elements.
    words: Vec<&'a mut [u32]>,
}

/// Updates elements `range` of a bucket with `kernel`, in parallel: widens the moments, and rounds
/// the new ones at random. `parameters`, `gradients` and, as words, `moments` are whole buckets.
///
/// # Panics
/// If the range has no rounding.
pub(crate) fn update<T: Float>(
    kernel: UpdateKernel<T>,
    update: &Update,
    range: &UpdateRange,
    parameters: &mut [T],
    gradients: &[T],
    moments: &mut [Vec<u32>],
) {
    let rounding = range.rounding.expect("moments in bf16 are rounded");
    let end = range.start + range.length;
    let mut parameters = &mut parameters[range.start..end];
    let words = range.start / 2..end.div_ceil(2);
    let mut words: Vec<&mut [u32]> =
        moments.iter_mut().map(|moment| &mut moment[words.clone()]).collect();
    let mut parts = Vec::with_capacity(range.length / TASK + 2);
    let mut at = range.start;
    while at < end {
        // Tasks end at the end of a word.
        const { assert!(TASK.is_multiple_of(2)) };
        let stop = end.min((at / TASK + 1) * TASK);
        let (of_part, rest) = parameters.split_at_mut(stop - at);
        parameters = rest;
        let count = stop.div_ceil(2) - at / 2;
        let mut of_moments = Vec::with_capacity(words.len());
        for moment in &mut words {
            let (of_part, rest) = std::mem::take(moment).split_at_mut(count);
            of_moments.push(of_part);
            *moment = rest;
        }
        parts.push(UpdatePart {
            first: at - range.start,
            parameters: of_part,
            gradients: &gradients[at..stop],
            words: of_moments,
        });
        at = stop;
    }
    parts.into_par_iter().for_each(|part| update_part(kernel, update, range, &rounding, part));
}

/// See [`update`].
fn update_part<T: Float>(
    kernel: UpdateKernel<T>,
    update: &Update,
    range: &UpdateRange,
    rounding: &MomentRounding,
    part: UpdatePart<T>,
) {
    let UpdatePart { first, parameters, gradients, words } = part;
    let start = range.start + first;
    let length = parameters.len();
    // The first and the last word may have a half of another range, which is unchanged.
    let own = start % 2..start % 2 + length;
    let halves = 2 * (own.end.div_ceil(2));
    let mut values = vec![0.0; halves];
    let mut wide: Vec<Vec<T>> = Vec::with_capacity(words.len());
    for words in &words {
        widen(words, &mut values);
        wide.push(values.iter().map(|value| T::from_f64(f64::from(*value))).collect());
    }
    let mut moments: Vec<&mut [T]> =
        wide.iter_mut().map(|values| &mut values[own.clone()]).collect();
    let decay_end = range.decay_end.saturating_sub(start);
    let of_part = UpdateRange { start: 0, length, decay_end, ..*range };
    kernel(update, &of_part, parameters, gradients, &mut moments);
    let mut random = vec![0; halves];
    draw_words(rounding, first, &mut random[own]);
    for (moment, (words, wide)) in words.into_iter().zip(&wide).enumerate() {
        for (value, wide) in values.iter_mut().zip(wide) {
            *value = wide.as_f64() as f32;
        }
        narrow(&values, &random, 16 * moment as u32, words);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::bf16_words::{to_nearest, values};
    use crate::update_twin;
    use potluck_core::{RunSeries, TensorSlice};

    fn rounding(elements: usize, step: u64) -> MomentRounding {
        let series = TensorSlice::whole(&[elements]).series()[0];
        MomentRounding { key: Key::new(3).step(step), series, number: 0 }
    }

    fn range(start: usize, length: usize, rounding: MomentRounding) -> UpdateRange {
        let (decay_end, gradient_scale) = (start + length / 3, 0.5);
        UpdateRange { start, length, decay_end, gradient_scale, rounding: Some(rounding) }
    }

    fn adam(beta1: f32, beta2: f32) -> Update {
        Update::AdamW {
            lr: 0.01,
            beta1,
            beta2,
            eps: 1e-8,
            weight_decay: 0.1,
            correction1: 0.5,
            correction2: 0.5,
        }
    }

    #[test]
    fn the_mean_of_what_is_rounded_is_the_value() {
        let value = 1.001_f32;
        let key = Key::new(5);
        let draws = 20_000;
        let sum: f64 = (0..draws)
            .map(|draw| {
                let rounded = round_at_random(value, key.words([draw, 0])[0] as u16);
                let wide = bf16::from_bits(rounded).to_f64();
                assert!(wide == 1.0 || wide == 1.007_812_5, "{wide}");
                wide
            })
            .sum();
        // The standard deviation of the mean is below 2e-5.
        let mean = sum / f64::from(draws);
        assert!((mean - f64::from(value)).abs() < 1e-4, "{mean}");
        assert_eq!(round_at_random(-1.0, u16::MAX), bf16::NEG_ONE.to_bits());
        assert_eq!(round_at_random(f32::INFINITY, u16::MAX), bf16::INFINITY.to_bits());
        assert!(bf16::from_bits(round_at_random(f32::from_bits(0x7f80_0001), 0)).is_nan());
    }

    /// The mean of squares rises by less than half of the last place of bf16 in a step: rounded to
    /// nearest, it would not change.
    #[test]
    fn a_slow_running_average_reaches_its_value() {
        let elements = 512;
        let (mut parameters, gradients) = (vec![0.0f32; elements], vec![2.0f32; elements]);
        let mut moments = vec![to_nearest(&vec![0.0; elements]), to_nearest(&vec![0.5; elements])];
        let rule = adam(0.9, 0.999);
        let kernel = update_twin(&rule).fast;
        for step in 0..4000 {
            let range = range(0, elements, rounding(elements, step));
            update(kernel, &rule, &range, &mut parameters, &gradients, &mut moments);
        }
        // 1 - 0.5 * 0.999^4000
        let mean = values(&moments[1], elements).iter().sum::<f32>() / elements as f32;
        assert!((mean - 0.99).abs() < 0.01, "{mean}");
        assert!((bf16::from_f32(0.5 * 0.999 + 0.001).to_f32() - 0.5).abs() < 1e-9);
    }

    /// An element has the same random numbers for every division of a tensor.
    #[test]
    fn parts_of_a_range_and_slices_of_a_tensor_are_rounded_as_the_whole() {
        let (rows, columns) = (300, 129);
        let elements = rows * columns;
        let rule = adam(0.9, 0.99);
        let kernel = update_twin(&rule).fast;
        let start: Vec<f32> = (0..elements).map(|i| (i % 101) as f32 / 50.0 - 1.0).collect();
        let squares: Vec<f32> = start.iter().map(|value| value * value).collect();
        let run = |parameters: &[f32], squares: &[f32], ranges: &[UpdateRange]| {
            let mut moments = vec![to_nearest(parameters), to_nearest(squares)];
            let (mut updated, gradients) = (parameters.to_vec(), parameters.to_vec());
            for range in ranges {
                let range = UpdateRange { decay_end: 0, ..*range };
                update(kernel, &rule, &range, &mut updated, &gradients, &mut moments);
            }
            let elements = parameters.len();
            (updated, values(&moments[0], elements), values(&moments[1], elements))
        };
        let whole = rounding(elements, 1);
        let at_once = run(&start, &squares, &[range(0, elements, whole)]);
        let at = |start, length| range(start, length, MomentRounding { number: start, ..whole });
        let parts = [at(0, 64), at(64, 20_001), at(20_065, elements - 20_065)];
        assert_eq!(run(&start, &squares, &parts), at_once);

        let slice = TensorSlice::whole(&[rows, columns]);
        let slice = slice.with_ranges(1, &[3..10, 40..47, 77..84]).unwrap();
        let ranges: Vec<UpdateRange> = slice
            .series()
            .into_iter()
            .map(|series: RunSeries| {
                let rounding = MomentRounding { series, ..whole };
                range(series.start, series.elements, rounding)
            })
            .collect();
        assert!(ranges.len() > 1, "columns at two distances");
        let cut = run(&slice.cut(&start), &slice.cut(&squares), &ranges);
        assert_eq!(cut.0, slice.cut(&at_once.0));
        assert_eq!((cut.1, cut.2), (slice.cut(&at_once.1), slice.cut(&at_once.2)));
    }
}
