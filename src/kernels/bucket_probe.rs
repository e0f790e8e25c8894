//! Probes of the kernels that work on buckets and not on the tensors of a graph: the update rules,
//! the norm and the hash. Counts that are multiples of four and other counts run different kernels,
//! so there is a probe of each.

use super::harness::Deviation;
use super::{Dispatch, Shader, bf16_moments, bf16_words, update_twin};
use potluck_core::rng::Key;
use potluck_core::{RunSeries, Site};
use potluck_graph::{MomentRounding, Update, UpdateRange};

/// Elements of the bucket of an update, and the updated ranges in its middle: several workgroups of
/// every kernel.
const ELEMENTS: usize = 2200;
const RANGES: [UpdateRange; 2] = [
    UpdateRange { start: 64, length: 2101, decay_end: 1117, gradient_scale: 0.5, rounding: None },
    UpdateRange { start: 64, length: 2100, decay_end: 1117, gradient_scale: 0.5, rounding: None },
];

/// Rounding of the moments of a probe: a slice of columns.
const ROUNDING: MomentRounding = MomentRounding {
    key: Key([0x1234_5678, 0x9abc_def0]),
    series: RunSeries { start: 0, elements: 2800, place: 3, run: 7, distance: 33 },
    number: 11,
};

/// The largest fraction of the moments of a range that may be rounded to the other side, because
/// their values in f32 and f64 are on different sides of the random number.
const OTHERWISE_MAX: f64 = 0.002;

/// Element counts of whole buckets.
const COUNTS: [usize; 2] = [65_537, 65_540];

/// Function that returns the deviation of the outputs of a probe, multiplied by a factor; infinite
/// if a value is wrong that must be exact.
pub(crate) type BucketErrorFn = Box<dyn Fn(&[Vec<f32>], f32) -> Deviation>;

/// Probe of a kernel that works on a bucket.
pub struct BucketProbe {
    /// Name of the kernel.
    pub name: &'static str,
    /// Words of the only input.
    pub input: Vec<u32>,
    pub dispatches: Vec<Dispatch>,
    /// Initial values of the outputs.
    pub starts: Vec<Vec<f32>>,
    pub error: BucketErrorFn,
}

impl BucketProbe {
    /// Makes a probe for the rule of `update` and the kernel that a range like `like` runs: one
    /// update of a small bucket. Its error is the squared error of the distances by which values
    /// moved, against the f64 reference, over the squared distances.
    pub(crate) fn of_update(update: &Update, like: &UpdateRange) -> Self {
        if like.rounding.is_some() {
            return Self::of_rounded_update(update);
        }
        let twin = update_twin(update);
        let shader = (twin.dispatch)(update, like).shader;
        let range = RANGES
            .into_iter()
            .find(|range| (twin.dispatch)(update, range).shader == shader)
            .unwrap_or(RANGES[0]);
        let update = (twin.probe)(update);
        let gradients = normals(ELEMENTS, 50);
        let starts = update_state(ELEMENTS, &update);
        let mut expected: Vec<Vec<f64>> = starts.iter().map(|values| widen(values)).collect();
        if let Some((parameters, moments)) = expected.split_first_mut() {
            let mut moments: Vec<&mut [f64]> = moments.iter_mut().map(Vec::as_mut_slice).collect();
            let reference = twin.reference_f64;
            reference(&update, &range, parameters, &widen(&gradients), &mut moments);
        }
        let before = starts.clone();
        Self {
            name: twin.name,
            input: gradients.iter().map(|gradient| gradient.to_bits()).collect(),
            dispatches: vec![(twin.dispatch)(&update, &range)],
            starts,
            error: Box::new(move |got, factor| {
                distance_error(&range, &before, &expected, got, factor)
            }),
        }
    }

    /// Does the same as [`BucketProbe::of_update`] with rounded moments, which must have the bits
    /// of the reference, with few exceptions.
    fn of_rounded_update(update: &Update) -> Self {
        let twin = update_twin(update);
        // From the second half of a word on.
        let range = UpdateRange { start: 65, rounding: Some(ROUNDING), ..RANGES[0] };
        let update = (twin.probe)(update);
        let gradients = normals(ELEMENTS, 50);
        let state = update_state(ELEMENTS, &update);
        let (parameters, moments) = state.split_first().expect("parameters come first");
        let parameters = vec![parameters.clone()];
        let mut starts = parameters.clone();
        let mut expected = Vec::with_capacity(moments.len());
        for values in moments {
            let words = bf16_words::to_nearest(values);
            starts.push(words.iter().map(|word| f32::from_bits(*word)).collect());
            expected.push(words);
        }
        let mut moved = widen(&parameters[0]);
        let kernel = twin.reference_f64;
        let wide = widen(&gradients);
        bf16_moments::update(kernel, &update, &range, &mut moved, &wide, &mut expected);
        let moved = vec![moved];
        Self {
            name: twin.name,
            input: gradients.iter().map(|gradient| gradient.to_bits()).collect(),
            dispatches: vec![(twin.dispatch)(&update, &range)],
            starts,
            error: Box::new(move |got, factor| {
                let (got_parameters, got_moments) = got.split_at(1);
                for (got, expected) in got_moments.iter().zip(&expected) {
                    let got: Vec<u32> = got.iter().map(|word| word.to_bits()).collect();
                    if rounded_otherwise(&range, &got, expected) > OTHERWISE_MAX {
                        return Deviation::WRONG;
                    }
                }
                distance_error(&range, &parameters, &moved, got_parameters, factor)
            }),
        }
    }
}

/// Returns the fraction of a range's moments, two in a word, that are one step above or below the
/// expected value; infinity if one is further away, or if one outside of the range changed.
pub(crate) fn rounded_otherwise(range: &UpdateRange, got: &[u32], expected: &[u32]) -> f64 {
    let covered = range.start..range.start + range.length;
    let mut otherwise = 0;
    for (word, (got, expected)) in got.iter().zip(expected).enumerate() {
        for half in 0..2 {
            let [got, expected] = [got, expected].map(|word| (word >> (16 * half)) as u16);
            match got.abs_diff(expected) {
                0 => {}
                1 if covered.contains(&(2 * word + half)) => otherwise += 1,
                _ => return f64::INFINITY,
            }
        }
    }
    f64::from(otherwise) / range.length as f64
}

/// Returns the largest deviation of the lists of an update: of the distances by which the values of
/// `got`, multiplied by `factor`, moved; infinite if a value outside the range changed.
fn distance_error(
    range: &UpdateRange,
    before: &[Vec<f32>],
    expected: &[Vec<f64>],
    got: &[Vec<f32>],
    factor: f32,
) -> Deviation {
    let covered = range.start..range.start + range.length;
    let mut worst = Deviation::default();
    for ((got, expected), before) in got.iter().zip(expected).zip(before) {
        for (i, before) in before.iter().enumerate() {
            if !covered.contains(&i) && got[i].to_bits() != before.to_bits() {
                return Deviation::WRONG;
            }
        }
        let moved = covered.clone().map(|i| {
            let error = f64::from(got[i] * factor) - expected[i];
            (error, expected[i] - f64::from(before[i]))
        });
        worst = worst.worst(Deviation::of_scale(moved));
    }
    worst
}

/// Returns the element count of a probe of a whole bucket that runs the same shader as a bucket of
/// `like` elements.
pub(crate) fn probe_count(like: usize, shader: impl Fn(usize) -> Shader) -> usize {
    for count in COUNTS {
        if shader(count) == shader(like) {
            return count;
        }
    }
    COUNTS[0]
}

/// Returns normally distributed parameters and moments; moments of squares are positive.
pub(crate) fn update_state(elements: usize, update: &Update) -> Vec<Vec<f32>> {
    let mut state = vec![normals(elements, 40)];
    for moment in 0..update.moments() {
        let is_of_squares = update.moment_of_squares() == Some(moment);
        let mut values = normals(elements, 41 + moment as u32);
        for v in &mut values {
            *v = if is_of_squares { 0.1 + *v * *v } else { *v };
        }
        state.push(values);
    }
    state
}

/// Returns normally distributed values; `site` selects the random stream.
pub fn normals(count: usize, site: u32) -> Vec<f32> {
    let key = Key::new(42).site(Site(site));
    (0..count).map(|i| key.normal(i as u64) as f32).collect()
}

pub(crate) fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}
