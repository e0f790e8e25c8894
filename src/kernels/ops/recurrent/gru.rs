//! The cell of a GRU (Cho et al. 2014) in the form of PyTorch's `GRU`: gates in the order r, z, n,
//! with the reset gate behind the product with the hidden state.
//!
//! ```text
//! r, z = sigmoid(x_t + W h_(t-1) + bias)
//! n    = tanh(x_t + r p)                 with p = W h_(t-1) + bias
//! h_t  = (1 - z) n + z h_(t-1)
//! ```

use super::RecurrentSizes;
use super::lstm::logistic;
use super::time_steps::TimeSteps;
use crate::Float;
use crate::simd::{add, sigmoid, tanh, vectorized};

/// Reference of one sample: `x, weight, bias [, h0] -> y, gates` with r, z, n and p in `gates`.
pub fn reference<T: Float>(
    RecurrentSizes { t, h, .. }: RecurrentSizes,
    sample: usize,
    inputs: &[&[T]],
    outputs: &mut [&mut [T]],
) {
    let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
    let mut hidden = match inputs.get(3) {
        Some(state) => state[sample * h..][..h].to_vec(),
        None => vec![T::zero(); h],
    };
    for row in sample * t..(sample + 1) * t {
        let product = |column: usize| {
            bias[column] + (0..h).map(|k| weight[column * h + k] * hidden[k]).sum::<T>()
        };
        let product: Vec<T> = (0..3 * h).map(product).collect();
        for j in 0..h {
            let x = |gate: usize| x[row * 3 * h + gate * h + j];
            let r = logistic(x(0) + product[j]);
            let z = logistic(x(1) + product[h + j]);
            let p = product[2 * h + j];
            let n = (x(2) + r * p).tanh();
            hidden[j] = (T::one() - z) * n + z * hidden[j];
            for (at, gate) in [r, z, n, p].into_iter().enumerate() {
                outputs[1][row * 4 * h + at * h + j] = gate;
            }
        }
        outputs[0][row * h..][..h].copy_from_slice(&hidden);
    }
}

/// Reference of one sample: `gates, weight, y, dy [, h0] -> dx, dproduct, dh0`.
pub(crate) fn reference_grad<T: Float>(
    RecurrentSizes { t, h, .. }: RecurrentSizes,
    sample: usize,
    inputs: &[&[T]],
    outputs: &mut [&mut [T]],
) {
    let (gates, weight, y, dy) = (inputs[0], inputs[1], inputs[2], inputs[3]);
    let mut dhidden = vec![T::zero(); h];
    for row in (sample * t..(sample + 1) * t).rev() {
        let mut dproduct = vec![T::zero(); 3 * h];
        for j in 0..h {
            let gate = |gate: usize| gates[row * 4 * h + gate * h + j];
            let (r, z, n, p) = (gate(0), gate(1), gate(2), gate(3));
            let before = if row > sample * t {
                y[(row - 1) * h + j]
            } else {
                inputs.get(4).map_or(T::zero(), |h0| h0[sample * h + j])
            };
            let dh = dy[row * h + j] + dhidden[j];
            let dn = dh * (T::one() - z) * (T::one() - n * n);
            let dr = dn * p * r * (T::one() - r);
            let dz = dh * (before - n) * z * (T::one() - z);
            for (at, (dx, dp)) in [(dr, dr), (dz, dz), (dn, dn * r)].into_iter().enumerate() {
                outputs[0][row * 3 * h + at * h + j] = dx;
                dproduct[at * h + j] = dp;
            }
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
    let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
    // The product is computed where r, z and n will be.
    gates.fill(0.0);
    for step in 0..t {
        steps.add_hidden(step, (weight, inputs.get(3).copied()), y, gates);
        for sample in 0..b {
            let row = sample * t + step;
            let (before, hidden) = y.split_at_mut(row * h);
            let before = match step {
                0 => inputs.get(3).map(|h0| &h0[sample * h..][..h]),
                _ => Some(&before[(row - 1) * h..]),
            };
            let (x, gates) = (&x[row * 3 * h..][..3 * h], &mut gates[row * 4 * h..][..4 * h]);
            cell(x, bias, before, gates, &mut hidden[..h]);
        }
    }
}

/// CPU kernel of `gates, weight, y, dy [, h0] -> dx, dproduct, dh0`.
pub(crate) fn fast_grad(steps: &TimeSteps, inputs: &[&[f32]], outputs: &mut [&mut [f32]]) {
    let RecurrentSizes { b, t, h, .. } = steps.sizes;
    let [dx, dproduct, dhidden] = outputs else { panic!("a gradient of a GRU has three outputs") };
    let (gates, weight, y, dy) = (inputs[0], inputs[1], inputs[2], inputs[3]);
    dhidden.fill(0.0);
    for step in (0..t).rev() {
        for sample in 0..b {
            let row = sample * t + step;
            let before = match step {
                0 => inputs.get(4).map(|h0| &h0[sample * h..][..h]),
                _ => Some(&y[(row - 1) * h..][..h]),
            };
            let dhidden = &mut dhidden[sample * h..][..h];
            add(dhidden, &dy[row * h..][..h]);
            let columns = row * 3 * h..(row + 1) * 3 * h;
            let (dx, dproduct) = (&mut dx[columns.clone()], &mut dproduct[columns]);
            cell_grad(&gates[row * 4 * h..][..4 * h], before, dhidden, dx, dproduct);
        }
        steps.add_to_hidden(step, weight, dproduct, dhidden);
    }
}

vectorized! {
    /// Computes the gates of a sample in place of their products without bias, and its hidden
    /// values from those `before`.
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
            (0..h).for_each(|j| hidden[j] += z[j] * before[j]);
        }
    }

    /// Computes the gradients of `x` and of the product with the hidden state, and the direct part
    /// of that of the hidden values before in place of that of the hidden values.
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
