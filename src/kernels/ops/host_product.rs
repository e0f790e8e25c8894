//! Matrix products on the host, by the crate `gemm`.
//!
//! The bits of a product depend on the instruction set only, not on the number of threads or the
//! sizes of caches: `gemm` adds up to 512 terms of a sum in one order. It would split longer sums
//! into parts whose lengths depend on the caches, so they are split here.

use gemm::Parallelism;

/// Maximum number of terms of a sum in a call of `gemm`, which does not split so few.
const TERMS_MAX: usize = 512;

/// A strided matrix view of a slice, which starts at its first element.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    values: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a view with these distances between adjacent elements of a column, and of a row.
    pub fn strided(values: &'a [f32], [row_stride, column_stride]: [usize; 2]) -> Self {
        Self { values, row_stride, column_stride }
    }

    /// Creates a view of rows that are `stride` elements apart.
    pub fn rows(values: &'a [f32], stride: usize) -> Self {
        Self::strided(values, [stride, 1])
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
pub struct HostProduct {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub factor: f32,
    pub add: bool,
    pub parallelism: Parallelism,
}

impl HostProduct {
    /// Returns the product of these sizes with the factor 1, on the calling thread.
    pub fn new([m, n, k]: [usize; 3]) -> Self {
        Self { m, n, k, factor: 1.0, add: false, parallelism: Parallelism::None }
    }

    /// Computes the product; `out` has rows `stride` apart.
    ///
    /// # Panics
    /// Panics if a size is 0, or if a slice is too short for its matrix.
    pub fn run(self, a: Matrix, b: Matrix, out: &mut [f32], stride: usize) {
        let Self { m, n, k, factor, add, parallelism } = self;
        assert!(m > 0 && n > 0 && k > 0 && a.holds(m, k) && b.holds(k, n), "{m} {n} {k}");
        assert!((m - 1) * stride + n <= out.len() && n <= stride, "{m} {n} {stride}");
        for first in (0..k).step_by(TERMS_MAX) {
            // SAFETY: the last element of each matrix lies within its slice, as just asserted, and
            // `out` is borrowed mutably, so it overlaps neither `a` nor `b`; it is initialized.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    TERMS_MAX.min(k - first),
                    out.as_mut_ptr(),
                    1,
                    stride as isize,
                    add || first > 0,
                    a.values.as_ptr().add(first * a.column_stride),
                    a.column_stride as isize,
                    a.row_stride as isize,
                    b.values.as_ptr().add(first * b.row_stride),
                    b.column_stride as isize,
                    b.row_stride as isize,
                    1.0,
                    factor,
                    false,
                    false,
                    false,
                    parallelism,
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes around the ones at which `gemm` divides its work, with long sums, of all layouts.
    #[test]
    fn bits_do_not_depend_on_threads() {
        let sizes = [
            [1, 300, 700],
            [7, 65, 33],
            [33, 257, 1500],
            [200, 130, 2049],
            [513, 40, 512],
            [64, 1, 3000],
        ];
        let values = |count: usize, step: f32| -> Vec<f32> {
            (0..count).map(|i| (i as f32 * step).sin()).collect()
        };
        for [m, n, k] in sizes {
            let (a, b) = (values(m * k, 0.37), values(k * n, 0.73));
            for [a_is_transposed, b_is_transposed] in [[false, false], [true, false], [false, true]]
            {
                let on = |threads: usize| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                    let mut out = vec![0.0; m * n];
                    let of = |values, is_transposed, rows, columns| {
                        if is_transposed {
                            Matrix::rows(values, rows).transposed()
                        } else {
                            Matrix::rows(values, columns)
                        }
                    };
                    let parallelism = Parallelism::Rayon(0);
                    let product = HostProduct { parallelism, ..HostProduct::new([m, n, k]) };
                    let (a, b) = (of(&a, a_is_transposed, m, k), of(&b, b_is_transposed, k, n));
                    pool.unwrap().install(|| product.run(a, b, &mut out, n));
                    out
                };
                let of_one = on(1);
                for threads in [2, 3, 7] {
                    assert!(on(threads) == of_one, "{m} {n} {k} with {threads} threads");
                }
            }
        }
    }
}
