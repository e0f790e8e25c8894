//! CPU kernel of products of a few rows, such as those of a few tokens with weights: `a (m, k) b^T`
//! with `b (n, k)`. Each row of `b`, of which there are many more, is read from memory once, and
//! nothing is packed.

use rayon::prelude::*;

use super::sizes::Sizes;
use crate::simd::{mul_add, sum_of, vectorized};
use pulp::Simd;

/// Rows of `a` at most: more are faster in packed tiles.
pub const ROWS_MAX: usize = 16;

/// Rows of `a` that are multiplied at a time, whose sums fit the registers.
const ROWS: usize = 4;

/// Terms of a sum that are added at a time.
const LANES: usize = 16;

/// Multiply-adds per task: enough to outweigh the scheduling overhead.
const TASK: usize = 128 * 1024;

/// Returns true for products that this kernel is made for.
pub fn suits(sizes: &Sizes) -> bool {
    let Sizes { batch, m, transpose_a, transpose_b, .. } = *sizes;
    batch == 1 && (2..=ROWS_MAX).contains(&m) && transpose_b && !transpose_a
}

/// Computes `c (m, n)`, added to its contents if `accumulate`.
pub fn product(sizes: &Sizes, accumulate: bool, a: &[f32], b: &[f32], c: &mut [f32]) {
    let &Sizes { m, n, k, .. } = sizes;
    let columns = (TASK / (m * k).max(1)).clamp(1, n);
    // Transposed, so that a task has its part of it.
    let mut sums = vec![0.0; n * m];
    let tasks = sums.par_chunks_mut(columns * m).zip(b.par_chunks(columns * k));
    tasks.for_each(|(sums, b)| add_up(k, a, b, sums));
    for (i, c) in c.chunks_exact_mut(n).enumerate() {
        for (c, sums) in c.iter_mut().zip(sums.chunks_exact(m)) {
            *c = if accumulate { *c + sums[i] } else { sums[i] };
        }
    }
}

vectorized! {
    /// Computes `b (n, k) a^T` with `a (m, k)`.
    fn add_up<S>(k: usize, a: &[f32], b: &[f32], sums: &mut [f32]) {
        let m = a.len() / k;
        for (sums, row) in sums.chunks_exact_mut(m).zip(b.chunks_exact(k)) {
            let mut fours = sums.chunks_exact_mut(ROWS);
            let mut rows = a.chunks_exact(ROWS * k);
            for (sums, rows) in fours.by_ref().zip(rows.by_ref()) {
                sums.copy_from_slice(&four_dots::<S>(rows, row));
            }
            let rest = rows.remainder().chunks_exact(k);
            for (sum, a) in fours.into_remainder().iter_mut().zip(rest) {
                *sum = sum_of(k, |i| a[i] * row[i]);
            }
        }
    }
}

/// Returns the products of four rows with one of as many terms.
#[inline(always)]
fn four_dots<S: Simd>(rows: &[f32], row: &[f32]) -> [f32; ROWS] {
    let k = row.len();
    let (a, behind) = rows.split_at(k);
    let (b, behind) = behind.split_at(k);
    let (c, d) = behind.split_at(k);
    let ((row, last), (a, last_a)) = (row.as_chunks::<LANES>(), a.as_chunks::<LANES>());
    let ((b, last_b), (c, last_c)) = (b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    let (d, last_d) = d.as_chunks::<LANES>();
    // Four arrays, and not one of four, stay in registers.
    let [mut of_a, mut of_b, mut of_c, mut of_d] = [[0.0f32; LANES]; ROWS];
    for ((((w, a), b), c), d) in row.iter().zip(a).zip(b).zip(c).zip(d) {
        for lane in 0..LANES {
            of_a[lane] = mul_add::<S>(w[lane], a[lane], of_a[lane]);
            of_b[lane] = mul_add::<S>(w[lane], b[lane], of_b[lane]);
            of_c[lane] = mul_add::<S>(w[lane], c[lane], of_c[lane]);
            of_d[lane] = mul_add::<S>(w[lane], d[lane], of_d[lane]);
        }
    }
    [
        total(of_a, last, last_a),
        total(of_b, last, last_b),
        total(of_c, last, last_c),
        total(of_d, last, last_d),
    ]
}

/// Returns the sum of lanes and of the products of what is behind the last whole vector.
#[inline(always)]
fn total(lanes: [f32; LANES], last: &[f32], of_row: &[f32]) -> f32 {
    let rest: f32 = last.iter().zip(of_row).map(|(w, a)| w * a).sum();
    sum_of(LANES, |lane| lanes[lane]) + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_all_numbers_of_rows_are_those_of_plain_loops() {
        for (m, n, k) in [(2, 1, 1), (3, 5, 15), (4, 300, 16), (7, 65, 33), (16, 9, 1030)] {
            let sizes = Sizes { batch: 1, m, n, k, transpose_a: false, transpose_b: true };
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
        let one = Sizes { batch: 1, m: 1, n: 9, k: 9, transpose_a: false, transpose_b: true };
        assert!(!suits(&one) && !suits(&Sizes { m: 17, ..one }));
        assert!(!suits(&Sizes { m: 4, transpose_b: false, ..one }));
    }
}
