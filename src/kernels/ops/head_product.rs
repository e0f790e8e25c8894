//! Softmax of the scores of a head of attention on the calling thread, and copies of the columns of
//! a head into rows of all heads.

use crate::simd::{exp, largest, sum_of, vectorized};

/// Copies rows of `d` values into columns `first` and following of rows of `width` values.
pub fn put_columns(from: &[f32], d: usize, to: &mut [f32], width: usize, first: usize) {
    for (from, to) in from.chunks_exact(d).zip(to.chunks_exact_mut(width)) {
        to[first..first + d].copy_from_slice(from);
    }
}

vectorized! {
    /// Converts scores to probabilities; returns the logarithm of the sum of exponentials.
    pub fn softmax<S>(row: &mut [f32]) -> f32 {
        let highest = largest(row);
        for value in row.iter_mut() {
            *value = exp::<S>(*value - highest);
        }
        let total = sum_of(row.len(), |j| row[j]);
        let share = 1.0 / total;
        for value in row {
            *value *= share;
        }
        highest + libm::logf(total)
    }
}
