//! CPU kernel of products of a few rows, such as those of a few tokens with weights: `a (m, k) b^T`
//! with `b (n, k)`. Each row of `b`, of which there are many more, is read from memory once, and
//! nothing is packed. Every sum has one order, so that a row has the same bits beside any others.

use rayon::prelude::*;

use super::sizes::Sizes;
use crate::simd::{mul_add, vectorized};
use pulp::Simd;

/// Rows of `a` at most: more are faster in packed tiles.
pub const ROWS_MAX: usize = 16;

/// Terms of a sum that are added at a time.
const LANES: usize = 16;

/// Multiply-adds per task: enough to outweigh the scheduling overhead. Of a single row of `a` more,
/// because these take as long as `b` is read.
const TASK: usize = 128 * 1024;
const TASK_OF_ONE: usize = 4 * TASK;

/// Rows of `b` that a block has at most; a task has a multiple of it.
const BLOCK_MAX: usize = 4;

/// Returns true for products that this kernel is made for.
pub fn suits(sizes: &Sizes) -> bool {
    let Sizes { batch, m, transpose_a, transpose_b, .. } = *sizes;
    batch == 1 && (1..=ROWS_MAX).contains(&m) && transpose_b && !transpose_a
}

/// Computes `c (m, n)`, added to its contents if `accumulate`.
pub fn product(sizes: &Sizes, accumulate: bool, a: &[f32], b: &[f32], c: &mut [f32]) {
    let &Sizes { m, n, k, .. } = sizes;
    let task = if m == 1 { TASK_OF_ONE } else { TASK };
    let columns = (task / (m * k).max(1)).clamp(1, n).next_multiple_of(BLOCK_MAX);
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
    /// Computes `b (n, k) a^T` with `a (m, k)`, in the largest blocks whose sums fit the registers.
    fn add_up<S>(k: usize, a: &[f32], b: &[f32], sums: &mut [f32]) {
        if a.len() == k {
            in_blocks::<S, 4, 1>(k, a, b, sums, block_4x1::<S>);
        } else if S::F32_LANES == LANES && S::REGISTER_COUNT >= 32 {
            in_blocks::<S, 4, 4>(k, a, b, sums, block_4x4::<S>);
        } else {
            in_blocks::<S, 2, 4>(k, a, b, sums, block_2x4::<S>);
        }
    }
}

/// Computes `b (n, k) a^T` with `a (m, k)` by `block`, which multiplies `B` rows of `b` with `A` of
/// `a`. The rows of a block are an equal part of all rows of `b` apart, so that each part is read
/// as it lies in memory, which is faster than neighbours in turns.
#[inline(always)]
fn in_blocks<S: Simd, const B: usize, const A: usize>(
    k: usize,
    a: &[f32],
    b: &[f32],
    sums: &mut [f32],
    block: impl Fn([&[f32]; B], [&[f32]; A]) -> [[f32; A]; B],
) {
    let (m, n) = (a.len() / k, b.len() / k);
    let (row_of_a, row_of_b) = (|row: usize| &a[row * k..][..k], |row: usize| &b[row * k..][..k]);
    let part = n / B;
    let whole = m - m % A;
    for first in 0..part {
        let rows: [usize; B] = std::array::from_fn(|nth| nth * part + first);
        for i in (0..whole).step_by(A) {
            let found = block(rows.map(row_of_b), std::array::from_fn(|nth| row_of_a(i + nth)));
            for (row, found) in rows.into_iter().zip(found) {
                sums[row * m + i..][..A].copy_from_slice(&found);
            }
        }
        for row in rows {
            for i in whole..m {
                let [[sum]] = block_1x1::<S>([row_of_b(row)], [row_of_a(i)]);
                sums[row * m + i] = sum;
            }
        }
    }
    for row in B * part..n {
        for i in 0..m {
            let [[sum]] = block_1x1::<S>([row_of_b(row)], [row_of_a(i)]);
            sums[row * m + i] = sum;
        }
    }
}

/// Defines a function that returns the products of rows of `b` with rows of `a` of as many terms.
macro_rules! block {
    ($name:ident, $rows_of_b:literal of $b:tt, $rows_of_a:literal of $a:tt, $sums:tt) => {
        #[inline(always)]
        fn $name<S: Simd>(
            b: [&[f32]; $rows_of_b],
            a: [&[f32]; $rows_of_a],
        ) -> [[f32; $rows_of_a]; $rows_of_b] {
            let sums = block!(@body S, b $b, a $a, $sums);
            std::array::from_fn(|row| std::array::from_fn(|i| sums[row * $rows_of_a + i]))
        }
    };
    (@body $S:ident, $b:ident [$($row_of_b:ident)+], $a:ident [$($row_of_a:ident)+],
        [$($sum:ident: $left:ident $right:ident),+]) => {{
        let [$($row_of_b),+] = $b.map(|row| row.as_chunks::<LANES>());
        let [$($row_of_a),+] = $a.map(|row| row.as_chunks::<LANES>());
        // Single arrays, and not an array of them, stay in registers.
        $(let mut $sum = [0.0f32; LANES];)+
        let vectors = $b[0].len() / LANES;
        {
            // One length for all, so that the loop has no checks.
            $(let $row_of_b = &$row_of_b.0[..vectors];)+
            $(let $row_of_a = &$row_of_a.0[..vectors];)+
            for at in 0..vectors {
                for lane in 0..LANES {
                    $($sum[lane] =
                        mul_add::<$S>($left[at][lane], $right[at][lane], $sum[lane]);)+
                }
            }
        }
        [$(total($sum, $left.1, $right.1)),+]
    }};
}

block!(block_1x1, 1 of [p], 1 of [w], [pw: p w]);
block!(block_4x1, 4 of [p q r s], 1 of [w], [pw: p w, qw: q w, rw: r w, sw: s w]);
block!(block_2x4, 2 of [p q], 4 of [w x y z], [
    pw: p w, px: p x, py: p y, pz: p z,
    qw: q w, qx: q x, qy: q y, qz: q z
]);
block!(block_4x4, 4 of [p q r s], 4 of [w x y z], [
    pw: p w, px: p x, py: p y, pz: p z,
    qw: q w, qx: q x, qy: q y, qz: q z,
    rw: r w, rx: r x, ry: r y, rz: r z,
    sw: s w, sx: s x, sy: s y, sz: s z
]);

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
