//! Samples on the CPU that go through the time steps of a recurrent layer together.

use gemm::Parallelism;

use super::RecurrentSizes;
use crate::ops::host_product::{HostProduct, Matrix};

/// Samples that go through the time steps together.
#[derive(Clone, Copy)]
pub(crate) struct TimeSteps {
    pub sizes: RecurrentSizes,
    /// That of the products of a step.
    pub(super) parallelism: Parallelism,
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
        let of_sizes = HostProduct::new([m, n, k]);
        let product = HostProduct { add: true, parallelism: self.parallelism, ..of_sizes };
        product.run(Matrix::rows(a, a_row), Matrix::rows(b, b_row), &mut c[out.at..], out.row);
    }
}

/// Rows of a matrix in a longer list: the first element, and the distance of rows.
struct Strided {
    at: usize,
    row: usize,
}
