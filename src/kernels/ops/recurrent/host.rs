//! The CPU kernels of recurrent layers: each thread takes some samples through all time steps, so
//! that threads wait for each other at the end only.

use gemm::Parallelism;
use rayon::prelude::*;

use super::{RecurrentSizes, gru, lstm};
use potluck_graph::Cell;

/// Fewest samples of a thread: a product of fewer reads the weight too often.
const SAMPLES_MIN: usize = 8;

/// Samples that go through the time steps together.
#[derive(Clone, Copy)]
pub(crate) struct TimeSteps {
    pub sizes: RecurrentSizes,
    /// That of the products of a step.
    parallelism: Parallelism,
}

/// Kernel of some samples: inputs and outputs are theirs.
type Compute = fn(&TimeSteps, &[&[f32]], &mut [&mut [f32]]);

/// Computes a layer, or its gradient.
pub fn compute(
    sizes: RecurrentSizes,
    is_forward: bool,
    inputs: &[&[f32]],
    outputs: &mut [&mut [f32]],
) {
    let compute: Compute = match (sizes.cell, is_forward) {
        (Cell::Lstm, true) => lstm::fast,
        (Cell::Lstm, false) => lstm::fast_grad,
        (Cell::Gru, true) => gru::fast,
        (Cell::Gru, false) => gru::fast_grad,
    };
    let mut inputs = inputs.to_vec();
    let transposed;
    // The weight, and the bias.
    let mut shared = 1..2;
    if is_forward {
        // Once, for all steps: a product packs rows of the weight, which are then in one piece.
        transposed = transpose(inputs[1], sizes.columns(), sizes.h);
        inputs[1] = &transposed;
        shared = 1..3;
    }
    let threads = rayon::current_num_threads();
    let parts = threads.min(sizes.b / SAMPLES_MIN).max(1);
    let parallelism = if parts < threads { Parallelism::Rayon(0) } else { Parallelism::None };
    let bound = |part: usize| part * sizes.b / parts;
    let of_parts = divide(outputs, sizes.b, (0..parts).map(|part| bound(part + 1) - bound(part)));
    of_parts.into_par_iter().enumerate().for_each(|(part, mut outputs)| {
        let (from, to) = (bound(part), bound(part + 1));
        let of_part = |index: usize| {
            if shared.contains(&index) {
                inputs[index]
            } else {
                let per_sample = inputs[index].len() / sizes.b;
                &inputs[index][from * per_sample..to * per_sample]
            }
        };
        let inputs: Vec<&[f32]> = (0..inputs.len()).map(of_part).collect();
        let sizes = RecurrentSizes { b: to - from, ..sizes };
        compute(&TimeSteps { sizes, parallelism }, &inputs, &mut outputs);
    });
}

/// Divides outputs of `b` samples into those of parts with these numbers of samples.
fn divide<'a>(
    outputs: &'a mut [&mut [f32]],
    b: usize,
    samples: impl Iterator<Item = usize>,
) -> Vec<Vec<&'a mut [f32]>> {
    let mut rests: Vec<&mut [f32]> = outputs.iter_mut().map(|output| &mut **output).collect();
    let per_sample: Vec<usize> = rests.iter().map(|rest| rest.len() / b).collect();
    let of_part = |samples: usize| {
        let take = |(rest, per_sample): (&mut &'a mut [f32], &usize)| {
            let (part, behind) = std::mem::take(rest).split_at_mut(samples * per_sample);
            *rest = behind;
            part
        };
        rests.iter_mut().zip(&per_sample).map(take).collect()
    };
    samples.map(of_part).collect()
}

/// Returns the transpose of a matrix.
fn transpose(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut transposed = vec![0.0; rows * columns];
    for (row, values) in matrix.chunks(columns).enumerate() {
        values.iter().enumerate().for_each(|(column, value)| {
            transposed[column * rows + row] = *value;
        });
    }
    transposed
}

impl TimeSteps {
    /// Adds the product of the hidden values of the step before with the weight, which is
    /// transposed `(h, columns)`, to the first columns of each row (4 h) of a step of `gates`.
    pub(crate) fn add_hidden(
        &self,
        step: usize,
        (weight, h0): (&[f32], Option<&[f32]>),
        y: &[f32],
        gates: &mut [f32],
    ) {
        let RecurrentSizes { b, t, h, .. } = self.sizes;
        let (hidden, stride) = match (step, h0) {
            (0, None) => return,
            (0, Some(h0)) => (h0, h),
            _ => (&y[(step - 1) * h..], t * h),
        };
        let (columns, out) = (self.sizes.columns(), Strided { at: step * 4 * h, row: t * 4 * h });
        self.multiply((b, columns, h), (hidden, stride), (weight, columns), (gates, out));
    }

    /// Adds the product of a step of `dz (b, t, gates h)` with the weight to `dhidden (b, h)`.
    pub(crate) fn add_to_hidden(
        &self,
        step: usize,
        weight: &[f32],
        dz: &[f32],
        dhidden: &mut [f32],
    ) {
        let RecurrentSizes { b, t, h, .. } = self.sizes;
        let (columns, out) = (self.sizes.columns(), Strided { at: 0, row: h });
        let dz = &dz[step * columns..];
        self.multiply((b, h, columns), (dz, t * columns), (weight, h), (dhidden, out));
    }

    /// Computes `c += a b` for `a (m, k)`, `b (k, n)`, with these distances of rows.
    fn multiply(
        &self,
        (m, n, k): (usize, usize, usize),
        (a, a_row): (&[f32], usize),
        (b, b_row): (&[f32], usize),
        (c, out): (&mut [f32], Strided),
    ) {
        let last = |rows: usize, row: usize, columns: usize| (rows - 1) * row + columns - 1;
        assert!(last(m, a_row, k) < a.len() && last(k, b_row, n) < b.len());
        assert!(out.at + last(m, out.row, n) < c.len() && out.row >= n);
        // SAFETY: all indices below (m, k), (k, n) and (m, n) are at most those of the last
        // elements, which are inside the slices; `c` is borrowed mutably, and its rows do not
        // overlap.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                c.as_mut_ptr().add(out.at),
                1,
                out.row as isize,
                true,
                a.as_ptr(),
                1,
                a_row as isize,
                b.as_ptr(),
                1,
                b_row as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                self.parallelism,
            );
        }
    }
}

/// Rows of a matrix in a longer list: the first element, and the distance of rows.
struct Strided {
    at: usize,
    row: usize,
}
