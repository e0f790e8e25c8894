//! Small matrix products of the heads of attention and the softmax between them, on the thread that
//! calls.

use crate::simd::{exp, sum_of, vectorized};

/// A strided matrix view of a slice, which starts at its first element.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    values: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a view of rows that are `stride` elements apart.
    pub fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: stride, column_stride: 1 }
    }

    pub fn transposed(self) -> Self {
        Self { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    fn holds(&self, rows: usize, columns: usize) -> bool {
        (rows - 1) * self.row_stride + (columns - 1) * self.column_stride < self.values.len()
    }
}

/// Matrix product `out (m, n) = factor a (m, k) b (k, n)`, added to the contents of `out` if
/// `add`.
#[derive(Clone, Copy)]
pub struct HeadProduct {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub factor: f32,
    pub add: bool,
}

impl HeadProduct {
    /// Computes the product on the calling thread; `out` has rows `stride` apart.
    pub fn run(self, a: Matrix, b: Matrix, out: &mut [f32], stride: usize) {
        let Self { m, n, k, factor, add } = self;
        assert!(m > 0 && n > 0 && k > 0 && a.holds(m, k) && b.holds(k, n));
        assert!((m - 1) * stride + n <= out.len() && n <= stride);
        // SAFETY: the last element of each matrix lies within its slice, as just asserted, and
        // `out` is borrowed mutably, so it overlaps neither `a` nor `b`.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                out.as_mut_ptr(),
                1,
                stride as isize,
                add,
                a.values.as_ptr(),
                a.column_stride as isize,
                a.row_stride as isize,
                b.values.as_ptr(),
                b.column_stride as isize,
                b.row_stride as isize,
                1.0,
                factor,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// Copies rows of `d` values into columns `first` and following of rows of `width` values.
pub fn put_columns(from: &[f32], d: usize, to: &mut [f32], width: usize, first: usize) {
    for (from, to) in from.chunks_exact(d).zip(to.chunks_exact_mut(width)) {
        to[first..first + d].copy_from_slice(from);
    }
}

vectorized! {
    /// Converts scores to probabilities; returns the logarithm of the sum of exponentials.
    pub fn softmax<S>(row: &mut [f32]) -> f32 {
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
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
