//! Samples on the CPU that go through the time steps of a recurrent layer together.

use gemm::Parallelism;

use super::RecurrentSizes;
use crate::ops::host_product::{HostProduct, Matrix};

/// Samples that go through the time steps together.
#[derive(Clone, Copy)]
pub(crate) struct TimeSteps {
    pub sizes: RecurrentSizes,
    /// Parallelism of the products of a step.
    pub(super) parallelism: Parallelism,
}

impl TimeSteps {
    /// Adds the product of the previous step's hidden values with the weight, which is transposed
    /// `(h, columns)`, to the first columns of each row (4 h) of a step of `gates`.
    pub(crate) fn add_hidden(
        &self,
        step: usize,
        weight: &[f32],
        h0: Option<&[f32]>,
        y: &[f32],
        gates: &mut [f32],
    ) {
        let RecurrentSizes { b, t, h, .. } = self.sizes;
        let hidden = match (step, h0) {
            (0, None) => return,
            (0, Some(h0)) => Matrix::rows(h0, h),
            _ => Matrix::rows(&y[(step - 1) * h..], t * h),
        };
        let columns = self.sizes.columns();
        let weight = Matrix::rows(weight, columns);
        let gates = &mut gates[step * 4 * h..];
        self.add_product([b, columns, h], hidden, weight, gates, t * 4 * h);
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
        let columns = self.sizes.columns();
        let dz = Matrix::rows(&dz[step * columns..], t * columns);
        self.add_product([b, h, columns], dz, Matrix::rows(weight, h), dhidden, h);
    }

    /// Computes `c += a b` for `a (m, k)`, `b (k, n)` and `c` with rows `stride` elements apart.
    fn add_product(&self, sizes: [usize; 3], a: Matrix, b: Matrix, c: &mut [f32], stride: usize) {
        let parallelism = self.parallelism;
        let product = HostProduct { add: true, parallelism, ..HostProduct::new(sizes) };
        product.run(a, b, c, stride);
    }

    /// Returns the part of `values (b, t, h)` that a sample has in the previous time step, or in
    /// the first one its initial state from `state (b, h)`; `None` if that is zero.
    pub(super) fn previous<'a>(
        &self,
        sample: usize,
        step: usize,
        values: &'a [f32],
        state: Option<&'a [f32]>,
    ) -> Option<&'a [f32]> {
        let RecurrentSizes { t, h, .. } = self.sizes;
        if step == 0 {
            return state.map(|state| &state[sample * h..][..h]);
        }
        Some(&values[(sample * t + step - 1) * h..][..h])
    }
}
