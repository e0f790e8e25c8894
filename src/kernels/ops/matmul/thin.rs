//! CPU kernel of products of a few rows, such as a few tokens with weights: `a (m, k) b^T` with
//! `b (n, k)`. Each row of `b`, which has many more rows, is read from memory once, and nothing is
//! packed. Every sum has one order, so that the bits of a row do not depend on the other rows.

use rayon::prelude::*;

use super::sizes::Sizes;
use crate::simd::prefetch;
use pulp::{Simd, WithSimd};

/// Rows of `a` at most: more are faster in packed tiles.
pub const ROWS_MAX: usize = 16;

/// Multiply-adds per task: enough to outweigh the scheduling overhead. For a single row of `a`
/// more, because reading `b` takes all of the time.
const TASK: usize = 128 * 1024;
const TASK_OF_ONE: usize = 4 * TASK;

/// Rows of `b` that are read at the same time; the rows of a task are a multiple of it.
const STREAMS: usize = 4;

/// The most rows of `a` that are multiplied with them in one pass.
const GROUP: usize = 4;

/// Returns true for products that this kernel supports.
pub fn suits(sizes: &Sizes) -> bool {
    let Sizes { batch, m, transpose_a, transpose_b, .. } = *sizes;
    batch == 1 && (1..=ROWS_MAX).contains(&m) && transpose_b && !transpose_a
}

/// Computes `c (m, n)`, added to its contents if `accumulate`.
pub fn product(sizes: &Sizes, accumulate: bool, a: &[f32], b: &[f32], c: &mut [f32]) {
    let &Sizes { m, n, k, .. } = sizes;
    let task = if m == 1 { TASK_OF_ONE } else { TASK };
    let columns = (task / (m * k).max(1)).clamp(1, n).next_multiple_of(STREAMS);
    // Transposed, so that the part of a task is contiguous.
    let mut sums = vec![0.0; n * m];
    sums.par_chunks_mut(columns * m)
        .zip(b.par_chunks(columns * k))
        .for_each(|(sums, b)| pulp::Arch::new().dispatch(ThinProduct { k, a, b, sums }));
    for (i, c) in c.chunks_exact_mut(n).enumerate() {
        for (c, sums) in c.iter_mut().zip(sums.chunks_exact(m)) {
            *c = if accumulate { *c + sums[i] } else { sums[i] };
        }
    }
}

/// Product `b (n, k) a^T` with `a (m, k)`, written to `sums (n, m)`.
struct ThinProduct<'a> {
    k: usize,
    a: &'a [f32],
    b: &'a [f32],
    sums: &'a mut [f32],
}

impl WithSimd for ThinProduct<'_> {
    type Output = ();

    /// Multiplies [`STREAMS`] rows of `b` at once, one from each equal part of its rows: each part
    /// is then read in the order of memory, which is faster than [`STREAMS`] neighbouring rows.
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let rows = self.b.len() / self.k;
        let rows_of_a = self.a.len() / self.k;
        let part = rows / STREAMS;
        for nth in 0..part {
            let streams: [usize; STREAMS] = std::array::from_fn(|stream| stream * part + nth);
            let mut first = 0;
            while first < rows_of_a {
                first += self.add_group(simd, streams, first);
            }
        }
        for row in STREAMS * part..rows {
            for i in 0..rows_of_a {
                self.add_block::<S, 1, 1>(simd, [row], i);
            }
        }
    }
}

impl ThinProduct<'_> {
    /// Multiplies rows of `b` with the next rows of `a`, in the largest blocks whose sums fit the
    /// registers; returns the number of rows of `a`.
    #[inline(always)]
    fn add_group<S: Simd>(&mut self, simd: S, rows: [usize; STREAMS], first: usize) -> usize {
        let [p, q, r, s] = rows;
        let left = self.a.len() / self.k - first;
        match left {
            GROUP.. if S::REGISTER_COUNT >= 32 => {
                self.add_block::<S, STREAMS, GROUP>(simd, rows, first);
            }
            GROUP.. => {
                self.add_block::<S, 2, GROUP>(simd, [p, q], first);
                self.add_block::<S, 2, GROUP>(simd, [r, s], first);
            }
            3 => self.add_block::<S, STREAMS, 3>(simd, rows, first),
            2 => self.add_block::<S, STREAMS, 2>(simd, rows, first),
            _ => self.add_block::<S, STREAMS, 1>(simd, rows, first),
        }
        left.min(GROUP)
    }

    /// Multiplies `B` rows of `b` with `A` rows of `a`, from the row `first` on.
    #[inline(always)]
    fn add_block<S: Simd, const B: usize, const A: usize>(
        &mut self,
        simd: S,
        rows: [usize; B],
        first: usize,
    ) {
        let k = self.k;
        let b = rows.map(|row| S::as_simd_f32s(&self.b[row * k..][..k]));
        let a: [_; A] = std::array::from_fn(|i| S::as_simd_f32s(&self.a[(first + i) * k..][..k]));
        // One length for all, so that the loop has no checks.
        let vectors = k / S::F32_LANES;
        let b_vectors = b.map(|row| &row.0[..vectors]);
        let a_vectors = a.map(|row| &row.0[..vectors]);
        let last = self.b.len() / k - 1;
        let next = rows.map(|row| &self.b[last.min(row + 1) * k..][..k]);
        let mut sums = [[simd.splat_f32s(0.0); A]; B];
        for at in 0..vectors {
            // Memory would be idle while rows of `b` are multiplied with several rows: the
            // processor prefetches only ahead of reads, and not across pages.
            if A > 1 {
                for row in next {
                    prefetch(row, at * S::F32_LANES);
                }
            }
            let own: [S::f32s; A] = std::array::from_fn(|i| a_vectors[i][at]);
            for (sums, row) in sums.iter_mut().zip(b_vectors) {
                for (sum, own) in sums.iter_mut().zip(own) {
                    *sum = simd.mul_add_e_f32s(row[at], own, *sum);
                }
            }
        }
        let rows_of_a = self.a.len() / k;
        for (nth, row) in rows.into_iter().enumerate() {
            for i in 0..A {
                let behind = b[nth].1.iter().zip(a[i].1);
                let rest: f32 = behind.map(|(weight, own)| weight * own).sum();
                self.sums[row * rows_of_a + first + i] = simd.reduce_sum_f32s(sums[nth][i]) + rest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_graph::Precision;

    fn sizes_of([m, n, k]: [usize; 3]) -> Sizes {
        Sizes {
            batch: 1,
            m,
            n,
            k,
            transpose_a: false,
            transpose_b: true,
            row_sums: false,
            precision: Precision::F32,
        }
    }

    #[test]
    fn products_of_all_numbers_of_rows_are_those_of_plain_loops() {
        let sizes = [
            (1, 1, 1),
            (1, 3, 40),
            (1, 9001, 65),
            (2, 1, 1),
            (3, 5, 15),
            (4, 300, 16),
            (7, 65, 33),
        ];
        for (m, n, k) in sizes.into_iter().chain([(16, 9, 1030)]) {
            let sizes = sizes_of([m, n, k]);
            assert!(suits(&sizes));
            let a: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.37).sin()).collect();
            let b: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.73).cos()).collect();
            for accumulate in [false, true] {
                let mut c = vec![0.5; m * n];
                product(&sizes, accumulate, &a, &b, &mut c);
                for (at, c) in c.iter().enumerate() {
                    let (i, j) = (at / n, at % n);
                    let (row, column) = (&a[i * k..][..k], &b[j * k..][..k]);
                    let terms = row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b));
                    let before = if accumulate { 0.5 } else { 0.0 };
                    let expected = before + terms.sum::<f64>();
                    let error = (f64::from(*c) - expected).abs();
                    assert!(error < 1e-4, "({i}, {j}) of {m} x {n}: {c} for {expected}");
                }
            }
        }
        let b: Vec<f32> = (0..50 * 70).map(|i| (i as f32 * 0.73).cos()).collect();
        let a: Vec<f32> = (0..7 * 70).map(|i| (i as f32 * 0.37).sin()).collect();
        let of_rows = |m| {
            let sizes = sizes_of([m, 50, 70]);
            let mut c = vec![0.0; m * 50];
            product(&sizes, false, &a[..m * 70], &b, &mut c);
            c
        };
        let all = of_rows(7);
        assert!((1..7).all(|m| of_rows(m) == all[..m * 50]), "rows depend on those beside them");
        let one = sizes_of([1, 9, 9]);
        assert!(suits(&one) && !suits(&Sizes { m: 17, ..one }));
        assert!(!suits(&Sizes { m: 4, transpose_b: false, ..one }));
    }
}
