//! CPU kernel of products of a few rows, such as those of a few tokens with weights: `a (m, k) b^T`
//! with `b (n, k)`. Each row of `b`, of which there are many more, is read from memory once, and
//! nothing is packed. Every sum has one order, so that a row has the same bits beside any others.

use rayon::prelude::*;

use super::sizes::Sizes;
use crate::simd::{mul_add, vectorized};
use pulp::Simd;

/// Rows of `a` at most: more are faster in packed tiles.
pub const ROWS_MAX: usize = 16;

/// Rows of `a` that are multiplied with two of `b` at a time, whose sums fit the registers.
const ROWS: usize = 4;

/// Rows of `b` that are multiplied with a single one of `a` at a time.
const OF_ONE: usize = 4;

/// Terms of a sum that are added at a time.
const LANES: usize = 16;

/// Multiply-adds per task: enough to outweigh the scheduling overhead. Of a single row of `a` more,
/// because these take as long as `b` is read.
const TASK: usize = 128 * 1024;
const TASK_OF_ONE: usize = 4 * TASK;

/// Returns true for products that this kernel is made for.
pub fn suits(sizes: &Sizes) -> bool {
    let Sizes { batch, m, transpose_a, transpose_b, .. } = *sizes;
    batch == 1 && (1..=ROWS_MAX).contains(&m) && transpose_b && !transpose_a
}

/// Computes `c (m, n)`, added to its contents if `accumulate`.
pub fn product(sizes: &Sizes, accumulate: bool, a: &[f32], b: &[f32], c: &mut [f32]) {
    let &Sizes { m, n, k, .. } = sizes;
    let task = if m == 1 { TASK_OF_ONE } else { TASK };
    let columns = (task / (m * k).max(1)).clamp(1, n);
    // Transposed, so that a task has its part of it.
    let mut sums = vec![0.0; n * m];
    let tasks = sums.par_chunks_mut(columns * m).zip(b.par_chunks(columns * k));
    if m == 1 {
        tasks.for_each(|(sums, b)| add_up_one(k, a, b, sums));
    } else {
        tasks.for_each(|(sums, b)| add_up(k, a, b, sums));
    }
    for (i, c) in c.chunks_exact_mut(n).enumerate() {
        for (c, sums) in c.iter_mut().zip(sums.chunks_exact(m)) {
            *c = if accumulate { *c + sums[i] } else { sums[i] };
        }
    }
}

vectorized! {
    /// Computes `b (n, k) a` with `a (k)`, which is bound by the reading of `b`: by four rows at a
    /// time that are a quarter of all apart, so that each quarter is read as it lies in memory.
    fn add_up_one<S>(k: usize, a: &[f32], b: &[f32], sums: &mut [f32]) {
        let quarter = sums.len() / OF_ONE;
        let row = |index: usize| &b[index * k..][..k];
        for first in 0..quarter {
            let rows: [usize; OF_ONE] = std::array::from_fn(|nth| nth * quarter + first);
            let found = dots_of_one::<S>(a, rows.map(row));
            for (row, sum) in rows.into_iter().zip(found) {
                sums[row] = sum;
            }
        }
        for (index, sum) in sums.iter_mut().enumerate().skip(OF_ONE * quarter) {
            *sum = dot::<S>(a, row(index));
        }
    }

    /// Computes `b (n, k) a^T` with `a (m, k)`.
    fn add_up<S>(k: usize, a: &[f32], b: &[f32], sums: &mut [f32]) {
        let m = a.len() / k;
        let n = b.len() / k;
        // Pairs of rows that are half of all apart: each half is read as it lies in memory, which
        // is faster than two neighbours in turns. The middle one of an odd number is its own pair.
        let half = n.div_ceil(2);
        for first in 0..half {
            let second = if first + half < n { first + half } else { first };
            let pair = [first, second].map(|row| &b[row * k..][..k]);
            for (block, rows) in a.chunks(ROWS * k).enumerate() {
                let places = [first, second].map(|row| row * m + block * ROWS);
                if rows.len() == ROWS * k {
                    for (place, found) in places.into_iter().zip(dots::<S>(rows, pair)) {
                        sums[place..][..ROWS].copy_from_slice(&found);
                    }
                    continue;
                }
                for (place, row) in places.into_iter().zip(pair) {
                    for (sum, a) in sums[place..].iter_mut().zip(rows.chunks_exact(k)) {
                        *sum = dot::<S>(a, row);
                    }
                }
            }
        }
    }
}

/// Returns the product of two rows.
#[inline(always)]
fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, last_a), (b, last_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] = mul_add::<S>(a[lane], b[lane], lanes[lane]);
        }
    }
    total(lanes, last_b, last_a)
}

/// Returns the products of a row with each of four of as many terms.
#[inline(always)]
fn dots_of_one<S: Simd>(a: &[f32], rows: [&[f32]; OF_ONE]) -> [f32; OF_ONE] {
    let (a, last_a) = a.as_chunks::<LANES>();
    let [(p, last_p), (q, last_q), (r, last_r), (s, last_s)] =
        rows.map(|row| row.as_chunks::<LANES>());
    // Single arrays, and not an array of them, stay in registers.
    let [mut of_p, mut of_q, mut of_r, mut of_s] = [[0.0f32; LANES]; OF_ONE];
    for ((((a, p), q), r), s) in a.iter().zip(p).zip(q).zip(r).zip(s) {
        for lane in 0..LANES {
            of_p[lane] = mul_add::<S>(a[lane], p[lane], of_p[lane]);
            of_q[lane] = mul_add::<S>(a[lane], q[lane], of_q[lane]);
            of_r[lane] = mul_add::<S>(a[lane], r[lane], of_r[lane]);
            of_s[lane] = mul_add::<S>(a[lane], s[lane], of_s[lane]);
        }
    }
    [
        total(of_p, last_p, last_a),
        total(of_q, last_q, last_a),
        total(of_r, last_r, last_a),
        total(of_s, last_s, last_a),
    ]
}

/// Returns the products of four rows with each of two of as many terms.
#[inline(always)]
fn dots<S: Simd>(rows: &[f32], [v, w]: [&[f32]; 2]) -> [[f32; ROWS]; 2] {
    let k = v.len();
    let (a, behind) = rows.split_at(k);
    let (b, behind) = behind.split_at(k);
    let (c, d) = behind.split_at(k);
    let ((v, last_v), (w, last_w)) = (v.as_chunks::<LANES>(), w.as_chunks::<LANES>());
    let ((a, last_a), (b, last_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let ((c, last_c), (d, last_d)) = (c.as_chunks::<LANES>(), d.as_chunks::<LANES>());
    // Single arrays, and not an array of them, stay in registers.
    let [mut va, mut vb, mut vc, mut vd] = [[0.0f32; LANES]; ROWS];
    let [mut wa, mut wb, mut wc, mut wd] = [[0.0f32; LANES]; ROWS];
    for (((((v, w), a), b), c), d) in v.iter().zip(w).zip(a).zip(b).zip(c).zip(d) {
        for lane in 0..LANES {
            va[lane] = mul_add::<S>(v[lane], a[lane], va[lane]);
            vb[lane] = mul_add::<S>(v[lane], b[lane], vb[lane]);
            vc[lane] = mul_add::<S>(v[lane], c[lane], vc[lane]);
            vd[lane] = mul_add::<S>(v[lane], d[lane], vd[lane]);
            wa[lane] = mul_add::<S>(w[lane], a[lane], wa[lane]);
            wb[lane] = mul_add::<S>(w[lane], b[lane], wb[lane]);
            wc[lane] = mul_add::<S>(w[lane], c[lane], wc[lane]);
            wd[lane] = mul_add::<S>(w[lane], d[lane], wd[lane]);
        }
    }
    [
        [
            total(va, last_v, last_a),
            total(vb, last_v, last_b),
            total(vc, last_v, last_c),
            total(vd, last_v, last_d),
        ],
        [
            total(wa, last_w, last_a),
            total(wb, last_w, last_b),
            total(wc, last_w, last_c),
            total(wd, last_w, last_d),
        ],
    ]
}

/// Returns the sum of lanes and of the products of what is behind the last whole vector.
#[inline(always)]
fn total(lanes: [f32; LANES], last: &[f32], of_row: &[f32]) -> f32 {
    let rest: f32 = last.iter().zip(of_row).map(|(w, a)| w * a).sum();
    // Halves are added as vectors, which a loop over all lanes is not.
    let mut eight = [0.0; LANES / 2];
    for (lane, sum) in eight.iter_mut().enumerate() {
        *sum = lanes[lane] + lanes[lane + LANES / 2];
    }
    let [a, b, c, d, e, f, g, h] = eight;
    ((a + e) + (c + g)) + ((b + f) + (d + h)) + rest
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let b: Vec<f32> = (0..50 * 70).map(|i| (i as f32 * 0.73).cos()).collect();
        let a: Vec<f32> = (0..7 * 70).map(|i| (i as f32 * 0.37).sin()).collect();
        let of_rows = |m| {
            let sizes = Sizes { batch: 1, m, n: 50, k: 70, transpose_a: false, transpose_b: true };
            let mut c = vec![0.0; m * 50];
            product(&sizes, false, &a[..m * 70], &b, &mut c);
            c
        };
        let all = of_rows(7);
        assert!((1..7).all(|m| of_rows(m) == all[..m * 50]), "rows depend on those beside them");
        let one = Sizes { batch: 1, m: 1, n: 9, k: 9, transpose_a: false, transpose_b: true };
        assert!(suits(&one) && !suits(&Sizes { m: 17, ..one }));
        assert!(!suits(&Sizes { m: 4, transpose_b: false, ..one }));
    }
}
