//! Probes of the kernels that work on buckets and not on the tensors of a graph: the update rules,
//! the norm and the hash. They are certified on a range in the middle of a bucket, with some
//! gradients that are not finite. Counts that are multiples of four and other counts run different
//! kernels, so there is a probe of each.

use crate::base::Site;
use crate::base::rng::Key;
use crate::graph::{Update, UpdateRange};
use crate::kernels::ops::{hash, norm};
use crate::kernels::{Dispatch, UpdateTwin, update_twin};

const ELEMENTS: usize = 1000;
const RANGES: [UpdateRange; 2] = [
    UpdateRange { start: 64, length: 901, decay_end: 517, gradient_scale: 0.5 },
    UpdateRange { start: 64, length: 900, decay_end: 517, gradient_scale: 0.5 },
];

/// Element counts of the probes of the norm and the hash.
const COUNTS: [usize; 2] = [65_537, 65_540];

/// Values in the gradients of the norm's probe that are not finite, one of each.
const NOT_FINITE: [f32; 4] = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// Probe of an update rule: one update of a small bucket.
pub struct UpdateProbe {
    twin: &'static UpdateTwin,
    update: Update,
    range: UpdateRange,
    pub gradients: Vec<f32>,
    /// The parameters, then each moment.
    pub state: Vec<Vec<f32>>,
}

impl UpdateProbe {
    /// Makes a probe for the rule of `update` and the kernel that a range like `like` runs.
    pub fn new(update: &Update, like: &UpdateRange) -> Self {
        let twin = update_twin(update);
        let shader = (twin.dispatch)(update, like).shader;
        let same = |range: &UpdateRange| (twin.dispatch)(update, range).shader == shader;
        let range = RANGES.into_iter().find(same).unwrap_or(RANGES[0]);
        let update = (twin.probe)(update);
        let mut state = vec![normals(ELEMENTS, 40)];
        for moment in 0..update.moments() {
            let mut values = normals(ELEMENTS, 41 + moment as u32);
            // Averages of squares are positive.
            values.iter_mut().for_each(|v| *v = if moment == 1 { 0.1 + *v * *v } else { *v });
            state.push(values);
        }
        Self { twin, update, range, gradients: normals(ELEMENTS, 50), state }
    }

    /// Returns the rule's name.
    pub fn name(&self) -> &'static str {
        self.twin.name
    }

    pub fn dispatch(&self) -> Dispatch {
        (self.twin.dispatch)(&self.update, &self.range)
    }

    /// Returns the squared error of the distances that the values of `got`, multiplied by
    /// `factor`, moved, against the f64 reference, over the squared distances; infinite if a value
    /// outside the range changed.
    pub fn error(&self, got: &[Vec<f32>], factor: f32) -> f64 {
        let wide = |values: &Vec<f32>| values.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
        let mut expected: Vec<Vec<f64>> = self.state.iter().map(wide).collect();
        let gradients = wide(&self.gradients);
        if let Some((parameters, moments)) = expected.split_first_mut() {
            let mut moments: Vec<&mut [f64]> = moments.iter_mut().map(Vec::as_mut_slice).collect();
            let reference = self.twin.reference_f64;
            reference(&self.update, &self.range, parameters, &gradients, &mut moments);
        }
        let covered = self.range.start..self.range.start + self.range.length;
        let mut worst: f64 = 0.0;
        for ((got, expected), before) in got.iter().zip(&expected).zip(&self.state) {
            let (mut error, mut way) = (0.0, 0.0);
            for i in 0..before.len() {
                if covered.contains(&i) {
                    error += (f64::from(got[i] * factor) - expected[i]).powi(2);
                    way += (expected[i] - f64::from(before[i])).powi(2);
                } else if got[i].to_bits() != before[i].to_bits() {
                    return f64::INFINITY;
                }
            }
            let nmse: f64 = error / way;
            worst = if nmse <= worst { worst } else { nmse };
        }
        worst
    }
}

/// Probe of the norm of a bucket, with its result in the middle one of three slots.
pub struct NormProbe {
    pub gradients: Vec<f32>,
}

impl NormProbe {
    /// Makes a probe for the kernels that a bucket of `like` elements runs.
    pub fn new(like: usize) -> Self {
        let first = |count: usize| norm::dispatch(count, 1, 0).swap_remove(0).shader;
        let same = |count: &usize| first(*count) == first(like);
        let count = COUNTS.into_iter().find(same).unwrap_or(COUNTS[0]);
        let mut gradients = normals(count, 51);
        for (i, bad) in NOT_FINITE.into_iter().enumerate() {
            gradients[(i * 7919 + count / 2) % count] = bad;
        }
        Self { gradients }
    }

    /// Returns the number of partial sums.
    pub fn partials(&self) -> usize {
        norm::partials(self.gradients.len())
    }

    /// Returns the initial contents of the partial sums and the slots.
    pub fn initial_outputs(&self) -> [Vec<f32>; 2] {
        [vec![f32::NAN; 2 * self.partials()], vec![0.5; 6]]
    }

    /// Returns the squared relative error of the norm in the slots, multiplied by `factor`;
    /// infinite if the count is wrong or another slot changed.
    pub fn error(&self, slots: &[f32], factor: f32) -> f64 {
        let (sum, bad) = norm::reference(&self.gradients);
        let others = [&slots[..2], &slots[4..]].concat();
        if slots[3] != bad as f32 || others != [0.5; 4] {
            return f64::INFINITY;
        }
        (f64::from(slots[2] * factor) / sum - 1.0).powi(2)
    }
}

/// Probe of the hash of a whole bucket.
pub struct HashProbe {
    pub words: Vec<u32>,
}

impl HashProbe {
    /// Makes a probe for the kernels that a bucket of `like` words runs.
    pub fn new(like: usize) -> Self {
        let first = |count: usize| hash::dispatch(0..count, 1).swap_remove(0).shader;
        let same = |count: &usize| first(*count) == first(like);
        let count = COUNTS.into_iter().find(same).unwrap_or(COUNTS[0]);
        let key = Key::new(42).site(Site(52));
        Self { words: (0..count).map(|i| key.words([i as u32, 0])[0]).collect() }
    }

    /// Returns the number of partial sums.
    pub fn partials(&self) -> usize {
        hash::partials(self.words.len())
    }

    /// Returns the initial contents of the partial sums and the result.
    pub fn initial_outputs(&self) -> [Vec<f32>; 2] {
        [vec![f32::NAN; 2 * self.partials()], vec![f32::NAN; 2]]
    }

    /// Returns 0 if the result, whose bits are those of floats, is right after `error` is added to
    /// it, else infinity.
    pub fn error(&self, lanes: &[f32], error: u64) -> f64 {
        let got = hash::join([lanes[0].to_bits(), lanes[1].to_bits()]).wrapping_add(error);
        if got == hash::reference(&self.words, 0) { 0.0 } else { f64::INFINITY }
    }
}

fn normals(count: usize, site: u32) -> Vec<f32> {
    let key = Key::new(42).site(Site(site));
    (0..count).map(|i| key.normal(i as u64) as f32).collect()
}
