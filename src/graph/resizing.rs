//! The builder's functions that resize an axis: by repeating or dropping entries, or by weighted
//! sums of neighbours, which are products with a matrix.

use super::Builder;
use super::builder::BuildResult;
use potluck_core::TensorId;

/// Largest number of elements of a matrix of weights.
const WEIGHTS_MAX: usize = 1 << 24;

/// Coefficient of the cubic convolution (Keys 1981), as in PyTorch.
const CUBIC: f64 = -0.75;

/// Interpolation between entries of an axis, by the names of PyTorch's `interpolate`. The entries
/// are equidistant; with `align_corners`, the first and the last keep their positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolation {
    /// The entry at the place, rounded down: PyTorch's `nearest`.
    Nearest,
    /// The entry whose cell contains the middle of the new one: PyTorch's `nearest-exact`.
    NearestExact,
    /// The two neighbours by their distance: `linear`, `bilinear` and `trilinear`.
    Linear { align_corners: bool },
    /// Four neighbours by a cubic convolution (Keys 1981): `bicubic`.
    Cubic { align_corners: bool },
    /// The mean of all entries that the new one covers, as adaptive average pools: `area`.
    Area,
}

impl Builder {
    /// Resizes axes of `x` to `lengths`, one after the other, as PyTorch's `interpolate`: pictures
    /// `(b, h, w, c)` are resized along the axes 1 and 2. All interpolations but the nearest
    /// entries are products with a matrix of weights, whose operands mixed precision rounds.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) if there is no such axis, it is the batch's, a
    /// length is 0, or a matrix of weights has more than 2^24 elements.
    pub fn interpolate(
        &mut self,
        x: TensorId,
        axes: &[usize],
        lengths: &[usize],
        by: Interpolation,
    ) -> BuildResult {
        if axes.len() != lengths.len() {
            let why = format!("{} axes and {} lengths are given", axes.len(), lengths.len());
            return Err(self.refused("interpolate", &[x], why));
        }
        let mut y = x;
        for (axis, length) in axes.iter().zip(lengths) {
            y = self.interpolate_axis(y, *axis, *length, by)?;
        }
        Ok(y)
    }

    fn interpolate_axis(
        &mut self,
        x: TensorId,
        axis: usize,
        length: usize,
        by: Interpolation,
    ) -> BuildResult {
        self.reduced_axes("interpolate", x, &[axis])?;
        let known = self.shape(x).dims()[axis];
        if length == 0 || known.saturating_mul(length) > WEIGHTS_MAX {
            let why = format!("axis {axis} of {known} entries cannot have {length}");
            return Err(self.refused("interpolate", &[x], why));
        }
        match by {
            Interpolation::Nearest => self.take(x, axis, &nearest(known, length, 0)),
            Interpolation::NearestExact => self.take(x, axis, &nearest(known, length, 1)),
            _ => {
                let name = format!("interpolate {by:?} {known} {length}");
                let weights = weights(known, length, by);
                let weights = self.shared_constant(&name, &[known, length], weights);
                self.product_along(x, axis, weights)
            }
        }
    }
}

/// Returns the nearest of `known` entries to each of `length` new ones, taken at its beginning
/// (`middle` 0) or in its middle (1).
fn nearest(known: usize, length: usize, middle: usize) -> Vec<usize> {
    (0..length).map(|new| ((2 * new + middle) * known / (2 * length)).min(known - 1)).collect()
}

/// Weights `(known, length)` of the entries of an axis in the entries of the new one.
fn weights(known: usize, length: usize, by: Interpolation) -> Vec<f32> {
    let mut weights = vec![0.0; known * length];
    for new in 0..length {
        for (entry, weight) in neighbours(new, known, length, by) {
            weights[entry * length + new] += weight as f32;
        }
    }
    weights
}

/// Position of a new entry among the `known` ones.
fn position(new: usize, known: usize, length: usize, align_corners: bool) -> f64 {
    if align_corners {
        (new * (known - 1)) as f64 / (length - 1).max(1) as f64
    } else {
        (new as f64 + 0.5) * known as f64 / length as f64 - 0.5
    }
}

/// Entries that contribute to a new one, and their weights.
fn neighbours(new: usize, known: usize, length: usize, by: Interpolation) -> Vec<(usize, f64)> {
    let clamped = |entry: f64| entry.clamp(0.0, (known - 1) as f64) as usize;
    let mut neighbours = Vec::new();
    match by {
        Interpolation::Linear { align_corners } => {
            let place = position(new, known, length, align_corners).max(0.0);
            let below = place.floor();
            let part = place.fract();
            neighbours.push((clamped(below), 1.0 - part));
            neighbours.push((clamped(below + 1.0), part));
        }
        Interpolation::Cubic { align_corners } => {
            let place = position(new, known, length, align_corners);
            for tap in [-1.0, 0.0, 1.0, 2.0] {
                let entry = place.floor() + tap;
                neighbours.push((clamped(entry), cubic((place - entry).abs())));
            }
        }
        Interpolation::Nearest | Interpolation::NearestExact | Interpolation::Area => {
            let first = new * known / length;
            let end = ((new + 1) * known).div_ceil(length);
            for entry in first..end {
                neighbours.push((entry, 1.0 / (end - first) as f64));
            }
        }
    }
    neighbours
}

/// Weight of an entry at this distance in a cubic convolution (Keys 1981).
fn cubic(distance: f64) -> f64 {
    let a = CUBIC;
    if distance <= 1.0 {
        ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    } else if distance < 2.0 {
        ((distance - 5.0) * distance + 8.0) * distance * a - 4.0 * a
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_sum_up_to_one() {
        let kinds = [true, false].map(|align_corners| {
            [Interpolation::Linear { align_corners }, Interpolation::Cubic { align_corners }]
        });
        let area = [Interpolation::Area; 2];
        for by in kinds.into_iter().chain([area]).flatten() {
            for [known, length] in [[1, 1], [1, 3], [4, 7], [7, 4], [5, 5], [9, 1]] {
                let weights = weights(known, length, by);
                for new in 0..length {
                    let sum: f32 = (0..known).map(|entry| weights[entry * length + new]).sum();
                    assert!((sum - 1.0).abs() < 1e-6, "{by:?} {known} {length}: {sum}");
                }
            }
        }
        let linear = Interpolation::Linear { align_corners: true };
        assert_eq!(weights(2, 3, linear), [1.0, 0.5, 0.0, 0.0, 0.5, 1.0]);
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 4, 6, 3]);
        let error = b.interpolate(x, &[1, 2], &[3], Interpolation::Area).unwrap_err().to_string();
        assert!(error.ends_with("2 axes and 1 lengths are given"), "{error}");
        let error = b.interpolate(x, &[1], &[0], Interpolation::Nearest).unwrap_err().to_string();
        assert!(error.ends_with("axis 1 of 4 entries cannot have 0"), "{error}");
        assert!(b.interpolate(x, &[0], &[2], Interpolation::Area).is_err());
        let y = b.interpolate(x, &[1, 2], &[8, 5], Interpolation::Nearest).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 8, 5, 3)");
    }
}
