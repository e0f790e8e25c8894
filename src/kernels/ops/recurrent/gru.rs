//! The cell of a GRU (Cho et al. 2014) in the form of PyTorch's `GRU`: gates in the order r, z, n,
//! with the reset gate behind the product with the hidden state.
//!
//! ```text
//! r, z = sigmoid(x_t + W h_(t-1) + bias)
//! n    = tanh(x_t + r p)                 with p = W h_(t-1) + bias
//! h_t  = (1 - z) n + z h_(t-1)
//! ```

use super::lstm::logistic;
use super::time_steps::TimeSteps;
use super::{RecurrentSizes, initial_state};
use crate::Float;
use crate::simd::{add, sigmoid, tanh, vectorized};

/// Reference of one sample: `x, weight, bias [, h0] -> y, gates` with r, z, n and p in `gates`.
pub fn reference<T: Float>(
    sizes: RecurrentSizes,
    sample: usize,
    inputs: &[&[T]],
    outputs: &mut [&mut [T]],
) {
    let RecurrentSizes { t, h, .. } = sizes;
    let weight = inputs[1];
    let bias = inputs[2];
    let mut hidden = initial_state(inputs.get(3), sample, h);
    for row in sample * t..(sample + 1) * t {
        let mut product = vec![T::zero(); 3 * h];
        for (column, product) in product.iter_mut().enumerate() {
            let sum = (0..h).map(|k| weight[column * h + k] * hidden[k]).sum::<T>();
            *product = bias[column] + sum;
        }

        let x = &inputs[0][row * 3 * h..][..3 * h];
        let gates = &mut outputs[1][row * 4 * h..][..4 * h];
        for j in 0..h {
            let r = logistic(x[j] + product[j]);
            let z = logistic(x[h + j] + product[h + j]);
            let p = product[2 * h + j];
            let n = (x[2 * h + j] + r * p).tanh();
            hidden[j] = (T::one() - z) * n + z * hidden[j];
            gates[j] = r;
            gates[h + j] = z;
            gates[2 * h + j] = n;
            gates[3 * h + j] = p;
        }
        outputs[0][row * h..][..h].copy_from_slice(&hidden);
    }
}

/// Reference of one sample: `gates, weight, y, dy [, h0] -> dx, dproduct, dh0`.
pub(crate) fn reference_grad<T: Float>(
    sizes: RecurrentSizes,
    sample: usize,
    inputs: &[&[T]],
    outputs: &mut [&mut [T]],
) {
    let RecurrentSizes { t, h, .. } = sizes;
    let weight = inputs[1];
    let y = inputs[2];
    let dy = inputs[3];
    let h0 = initial_state(inputs.get(4), sample, h);
    let mut dhidden = vec![T::zero(); h];
    for row in (sample * t..(sample + 1) * t).rev() {
        let gates = &inputs[0][row * 4 * h..][..4 * h];
        let previous = if row > sample * t { &y[(row - 1) * h..][..h] } else { &h0[..] };
        let dx = &mut outputs[0][row * 3 * h..][..3 * h];
        let mut dproduct = vec![T::zero(); 3 * h];
        for j in 0..h {
            let r = gates[j];
            let z = gates[h + j];
            let n = gates[2 * h + j];
            let p = gates[3 * h + j];
            let dh = dy[row * h + j] + dhidden[j];
            let dn = dh * (T::one() - z) * (T::one() - n * n);
            let dr = dn * p * r * (T::one() - r);
            let dz = dh * (previous[j] - n) * z * (T::one() - z);
            dx[j] = dr;
            dx[h + j] = dz;
            dx[2 * h + j] = dn;
            dproduct[j] = dr;
            dproduct[h + j] = dz;
            dproduct[2 * h + j] = dn * r;
            dhidden[j] = dh * z;
        }
        for (j, dhidden) in dhidden.iter_mut().enumerate() {
            *dhidden += (0..3 * h).map(|k| dproduct[k] * weight[k * h + j]).sum::<T>();
        }
        outputs[1][row * 3 * h..][..3 * h].copy_from_slice(&dproduct);
    }
    outputs[2][sample * h..][..h].copy_from_slice(&dhidden);
}

/// CPU kernel of `x, weight, bias [, h0] -> y, gates`, with the weight transposed.
pub fn fast(steps: &TimeSteps, inputs: &[&[f32]], outputs: &mut [&mut [f32]]) {
    let RecurrentSizes { b, t, h, .. } = steps.sizes;
    let [y, gates] = outputs else { panic!("a GRU has two outputs") };
    let x = inputs[0];
    let weight = inputs[1];
    let bias = inputs[2];
    let h0 = inputs.get(3).copied();
    // The product is computed in the place of r, z and n.
    gates.fill(0.0);
    for step in 0..t {
        steps.add_hidden(step, weight, h0, y, gates);
        for sample in 0..b {
            let row = sample * t + step;
            let (earlier, hidden) = y.split_at_mut(row * h);
            let previous = steps.previous(sample, step, earlier, h0);
            let x = &x[row * 3 * h..][..3 * h];
            let gates = &mut gates[row * 4 * h..][..4 * h];
            cell(x, bias, previous, gates, &mut hidden[..h]);
        }
    }
}

/// CPU kernel of `gates, weight, y, dy [, h0] -> dx, dproduct, dh0`.
pub(crate) fn fast_grad(steps: &TimeSteps, inputs: &[&[f32]], outputs: &mut [&mut [f32]]) {
    let RecurrentSizes { b, t, h, .. } = steps.sizes;
    let [dx, dproduct, dhidden] = outputs else { panic!("a gradient of a GRU has three outputs") };
    let gates = inputs[0];
    let weight = inputs[1];
    let y = inputs[2];
    let dy = inputs[3];
    let h0 = inputs.get(4).copied();
    dhidden.fill(0.0);
    for step in (0..t).rev() {
        for sample in 0..b {
            let row = sample * t + step;
            let previous = steps.previous(sample, step, y, h0);
            let dhidden = &mut dhidden[sample * h..][..h];
            add(dhidden, &dy[row * h..][..h]);
            let gates = &gates[row * 4 * h..][..4 * h];
            let dx = &mut dx[row * 3 * h..][..3 * h];
            let dproduct = &mut dproduct[row * 3 * h..][..3 * h];
            cell_grad(gates, previous, dhidden, dx, dproduct);
        }
        steps.add_to_hidden(step, weight, dproduct, dhidden);
    }
}

vectorized! {
    /// Replaces the products without bias of a sample in `gates` by its gates, and computes its
    /// hidden values from the previous ones, `before`.
    fn cell<S>(
        x: &[f32],
        bias: &[f32],
        before: Option<&[f32]>,
        gates: &mut [f32],
        hidden: &mut [f32],
    ) {
        let h = hidden.len();
        let (r, rest) = gates.split_at_mut(h);
        let (z, rest) = rest.split_at_mut(h);
        let (n, p) = rest.split_at_mut(h);
        let p = &mut p[..h];
        for j in 0..h {
            r[j] = sigmoid::<S>(x[j] + r[j] + bias[j]);
            z[j] = sigmoid::<S>(x[h + j] + z[j] + bias[h + j]);
            p[j] = n[j] + bias[2 * h + j];
            n[j] = tanh::<S>(x[2 * h + j] + r[j] * p[j]);
            hidden[j] = (1.0 - z[j]) * n[j];
        }
        if let Some(before) = before {
            for j in 0..h {
                hidden[j] += z[j] * before[j];
            }
        }
    }

    /// Computes the gradients of `x` and of the product with the hidden state. In `dhidden`, the
    /// gradient of the hidden values becomes the direct part of the gradient of the previous ones.
    fn cell_grad<S>(
        gates: &[f32],
        before: Option<&[f32]>,
        dhidden: &mut [f32],
        dx: &mut [f32],
        dproduct: &mut [f32],
    ) {
        let h = dhidden.len();
        let (r, z, n, p) = (&gates[..h], &gates[h..2 * h], &gates[2 * h..3 * h], &gates[3 * h..]);
        for j in 0..h {
            let before = before.map_or(0.0, |before| before[j]);
            let dn = dhidden[j] * (1.0 - z[j]) * (1.0 - n[j] * n[j]);
            dx[j] = dn * p[j] * r[j] * (1.0 - r[j]);
            dx[h + j] = dhidden[j] * (before - n[j]) * z[j] * (1.0 - z[j]);
            dx[2 * h + j] = dn;
            dproduct[2 * h + j] = dn * r[j];
            dhidden[j] *= z[j];
        }
        dproduct[..2 * h].copy_from_slice(&dx[..2 * h]);
    }
}
