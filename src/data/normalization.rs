//! Normalization of samples: means and standard deviations of the training part.

use rayon::prelude::*;

use super::{DataError, Samples, has_channels_last};

/// Samples that are read together for a sum: enough to keep all cores busy, in little memory.
const AT_A_TIME: usize = 4096;

/// Mean and standard deviation of some values: `(value - mean) / std` has mean 0 and deviation 1.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MeanStd {
    pub mean: f32,
    pub std: f32,
}

impl MeanStd {
    /// Leaves values as they are.
    pub const IDENTITY: Self = Self { mean: 0.0, std: 1.0 };

    /// Returns the normalized value.
    pub fn normalize(self, value: f32) -> f32 {
        (value - self.mean) / self.std
    }

    /// Returns the value whose normalization is `normalized`.
    pub fn restore(self, normalized: f32) -> f32 {
        normalized * self.std + self.mean
    }
}

/// Normalization of the features and the targets of samples.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Normalization {
    /// Per channel of a picture, per column of a table, or one for all values of other shapes.
    pub features: Vec<MeanStd>,
    /// Per value of a target; empty for classes.
    pub targets: Vec<MeanStd>,
}

impl Normalization {
    /// Measures the features of the samples `indices`, in f64 and in an order that does not depend
    /// on the number of threads. Constant features have the standard deviation 1.
    ///
    /// # Errors
    /// Returns `DataError` if a sample cannot be read.
    pub fn of_features(samples: &Samples, indices: &[usize]) -> Result<Vec<MeanStd>, DataError> {
        let zeros = vec![0.0; groups(&samples.shape)];
        let means = moments(samples, indices, &zeros, 1)?;
        let variances = moments(samples, indices, &means, 2)?;
        let mut scales = Vec::with_capacity(means.len());
        for (mean, variance) in means.into_iter().zip(variances) {
            scales.push(scale(mean, variance));
        }
        Ok(scales)
    }

    /// Measures target values, `width` per sample.
    pub fn of_targets(values: &[f32], width: usize, indices: &[usize]) -> Vec<MeanStd> {
        let count = indices.len() as f64;
        let mut scales = Vec::with_capacity(width);
        for column in 0..width {
            let value = |index: &usize| f64::from(values[index * width + column]);
            let mean = indices.iter().map(value).sum::<f64>() / count;
            let squares = indices.iter().map(|index| (value(index) - mean).powi(2));
            scales.push(scale(mean, squares.sum::<f64>() / count));
        }
        scales
    }

    /// Normalizes the features of a sample in place.
    pub fn apply(&self, features: &mut [f32]) {
        let per_group = features.len() / self.features.len().max(1);
        for (group, scale) in features.chunks_mut(per_group.max(1)).zip(&self.features) {
            for value in group {
                *value = scale.normalize(*value);
            }
        }
    }
}

/// Returns the number of consecutive groups of values of a sample that are normalized together.
pub fn groups(shape: &[usize]) -> usize {
    match shape {
        [columns] => *columns,
        // The values of a channel do not lie one after the other.
        _ if has_channels_last(shape) => 1,
        [channels, _, _] => *channels,
        _ => 1,
    }
}

/// Mean over all samples of `(value - mean)^power`, by group.
fn moments(
    samples: &Samples,
    indices: &[usize],
    means: &[f64],
    power: i32,
) -> Result<Vec<f64>, DataError> {
    let per_group = samples.width() / means.len();
    let count = (indices.len() * per_group) as f64;
    let mut sums = vec![0.0; means.len()];
    for part in indices.chunks(AT_A_TIME) {
        let found: Result<Vec<Vec<f64>>, DataError> =
            part.par_iter().map(|index| sums_of(samples, *index, means, power)).collect();
        for of_sample in found? {
            for (sum, addend) in sums.iter_mut().zip(of_sample) {
                *sum += addend;
            }
        }
    }
    Ok(sums.into_iter().map(|sum| sum / count).collect())
}

/// Sums of a sample's `(value - mean)^power`, by group.
fn sums_of(
    samples: &Samples,
    index: usize,
    means: &[f64],
    power: i32,
) -> Result<Vec<f64>, DataError> {
    let mut values = vec![0.0; samples.width()];
    samples.read(index, &mut values)?;
    let per_group = (values.len() / means.len()).max(1);
    let mut sums = Vec::with_capacity(means.len());
    for (group, mean) in values.chunks(per_group).zip(means) {
        sums.push(group.iter().map(|value| (f64::from(*value) - mean).powi(power)).sum());
    }
    Ok(sums)
}

fn scale(mean: f64, variance: f64) -> MeanStd {
    let std = variance.sqrt() as f32;
    // The deviation of constant values is at most a rounding error.
    let varies = f64::from(std) > f64::from(f32::EPSILON) * mean.abs() && std.is_normal();
    MeanStd { mean: mean as f32, std: if varies { std } else { 1.0 } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Features, Targets};

    fn samples(shape: &[usize], values: &[f32]) -> Samples {
        Samples {
            name: "test".into(),
            shape: shape.to_vec(),
            columns: Vec::new(),
            target_columns: Vec::new(),
            features: Features::Floats(values.to_vec()),
            targets: Targets::Absent,
            ids: None,
        }
    }

    #[test]
    fn columns_and_channels_are_normalized_by_the_chosen_samples() {
        let table = samples(&[2], &[1.0, 10.0, 3.0, 10.0, 99.0, 99.0]);
        let features = Normalization::of_features(&table, &[0, 1]).unwrap();
        assert_eq!(features, [MeanStd { mean: 2.0, std: 1.0 }, MeanStd { mean: 10.0, std: 1.0 }]);
        let normalization = Normalization { features, targets: Vec::new() };
        let mut row = [3.0, 12.0];
        normalization.apply(&mut row);
        assert_eq!(row, [1.0, 2.0]);

        let picture = samples(&[2, 1, 2], &[0.0, 4.0, 5.0, 5.0, 2.0, 2.0, 7.0, 7.0]);
        let features = Normalization::of_features(&picture, &[0, 1]).unwrap();
        assert_eq!(features[0], MeanStd { mean: 2.0, std: 2.0f32.sqrt() });
        assert_eq!(features[1], MeanStd { mean: 6.0, std: 1.0 });
    }

    /// An hour of times in seconds since 1970, of which f32 keeps every 128th.
    #[test]
    fn a_small_deviation_of_large_values_counts() {
        let times = samples(&[1], &[1.7e9, 1.7e9 + 2048.0]);
        let features = Normalization::of_features(&times, &[0, 1]).unwrap();
        assert_eq!(features[0].std, 1024.0);
        let constant = samples(&[1], &[1.7e9; 3]);
        assert_eq!(Normalization::of_features(&constant, &[0, 1, 2]).unwrap()[0].std, 1.0);
    }

    #[test]
    fn targets_come_back_from_their_normalized_values() {
        let targets = Normalization::of_targets(&[1.0, 100.0, 3.0, 300.0], 2, &[0, 1]);
        assert_eq!(targets[1], MeanStd { mean: 200.0, std: 100.0 });
        for value in [-5.0, 0.0, 250.0] {
            assert_eq!(targets[1].restore(targets[1].normalize(value)), value);
        }
    }
}
