//! The cell of an LSTM (Hochreiter and Schmidhuber 1997, with forget gates of Gers et al. 2000), in
//! the form of PyTorch's `LSTM`: gates in the order i, f, g, o.
//!
//! ```text
//! i, f, o = sigmoid(z),  g = tanh(z)     with z = x_t + W h_(t-1) + bias
//! c_t = f c_(t-1) + i g,  h_t = o tanh(c_t)
//! ```

use super::time_steps::TimeSteps;
use super::{RecurrentSizes, initial_state};
use crate::Float;
use crate::simd::{add, sigmoid, tanh, vectorized};

/// Reference of one sample: `x, weight, bias [, h0, c0] -> y, gates, cells`.
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
    let mut cell = initial_state(inputs.get(4), sample, h);
    for row in sample * t..(sample + 1) * t {
        let x = &inputs[0][row * 4 * h..][..4 * h];
        let mut z = vec![T::zero(); 4 * h];
        for (column, z) in z.iter_mut().enumerate() {
            let product = (0..h).map(|k| weight[column * h + k] * hidden[k]).sum::<T>();
            *z = x[column] + bias[column] + product;
        }

        let gates = &mut outputs[1][row * 4 * h..][..4 * h];
        for j in 0..h {
            let i = logistic(z[j]);
            let f = logistic(z[h + j]);
            let g = z[2 * h + j].tanh();
            let o = logistic(z[3 * h + j]);
            cell[j] = f * cell[j] + i * g;
            hidden[j] = o * cell[j].tanh();
            gates[j] = i;
            gates[h + j] = f;
            gates[2 * h + j] = g;
            gates[3 * h + j] = o;
        }
        outputs[0][row * h..][..h].copy_from_slice(&hidden);
        outputs[2][row * h..][..h].copy_from_slice(&cell);
    }
}

pub(crate) fn logistic<T: Float>(x: T) -> T {
    (T::one() + (-x).exp()).recip()
}

/// Reference of one sample: `gates, weight, cells, dy [, c0] -> dx, dh0, dc0`.
pub(crate) fn reference_grad<T: Float>(
    sizes: RecurrentSizes,
    sample: usize,
    inputs: &[&[T]],
    outputs: &mut [&mut [T]],
) {
    let RecurrentSizes { t, h, .. } = sizes;
    let weight = inputs[1];
    let cells = inputs[2];
    let dy = inputs[3];
    let c0 = initial_state(inputs.get(4), sample, h);
    let mut dhidden = vec![T::zero(); h];
    let mut dcell = vec![T::zero(); h];
    for row in (sample * t..(sample + 1) * t).rev() {
        let gates = &inputs[0][row * 4 * h..][..4 * h];
        let previous = if row > sample * t { &cells[(row - 1) * h..][..h] } else { &c0[..] };
        let mut dz = vec![T::zero(); 4 * h];
        for j in 0..h {
            let i = gates[j];
            let f = gates[h + j];
            let g = gates[2 * h + j];
            let o = gates[3 * h + j];
            let squashed = cells[row * h + j].tanh();
            let dh = dy[row * h + j] + dhidden[j];
            let dc = dcell[j] + dh * o * (T::one() - squashed * squashed);
            dz[j] = dc * g * i * (T::one() - i);
            dz[h + j] = dc * previous[j] * f * (T::one() - f);
            dz[2 * h + j] = dc * i * (T::one() - g * g);
            dz[3 * h + j] = dh * squashed * o * (T::one() - o);
            dcell[j] = dc * f;
        }
        for (j, dhidden) in dhidden.iter_mut().enumerate() {
            *dhidden = (0..4 * h).map(|k| dz[k] * weight[k * h + j]).sum();
        }
        outputs[0][row * 4 * h..][..4 * h].copy_from_slice(&dz);
    }
    outputs[1][sample * h..][..h].copy_from_slice(&dhidden);
    outputs[2][sample * h..][..h].copy_from_slice(&dcell);
}

/// CPU kernel of `x, weight, bias [, h0, c0] -> y, gates, cells`, with the weight transposed.
pub fn fast(steps: &TimeSteps, inputs: &[&[f32]], outputs: &mut [&mut [f32]]) {
    let RecurrentSizes { b, t, h, .. } = steps.sizes;
    let [y, gates, cells] = outputs else { panic!("an LSTM has three outputs") };
    let weight = inputs[1];
    let bias = inputs[2];
    let h0 = inputs.get(3).copied();
    let c0 = inputs.get(4).copied();
    gates.copy_from_slice(inputs[0]);
    for step in 0..t {
        steps.add_hidden(step, weight, h0, y, gates);
        for sample in 0..b {
            let row = sample * t + step;
            let (earlier, cells) = cells.split_at_mut(row * h);
            let previous = steps.previous(sample, step, earlier, c0);
            let gates = &mut gates[row * 4 * h..][..4 * h];
            cell(bias, previous, gates, &mut cells[..h], &mut y[row * h..][..h]);
        }
    }
}

/// CPU kernel of `gates, weight, cells, dy [, c0] -> dx, dh0, dc0`.
pub(crate) fn fast_grad(steps: &TimeSteps, inputs: &[&[f32]], outputs: &mut [&mut [f32]]) {
    let RecurrentSizes { b, t, h, .. } = steps.sizes;
    let [dx, dhidden, dcell] = outputs else { panic!("a gradient of an LSTM has three outputs") };
    let gates = inputs[0];
    let weight = inputs[1];
    let cells = inputs[2];
    let dy = inputs[3];
    let c0 = inputs.get(4).copied();
    dhidden.fill(0.0);
    dcell.fill(0.0);
    for step in (0..t).rev() {
        for sample in 0..b {
            let row = sample * t + step;
            let previous = steps.previous(sample, step, cells, c0);
            let gates = &gates[row * 4 * h..][..4 * h];
            let cell = &cells[row * h..][..h];
            let dhidden = &mut dhidden[sample * h..][..h];
            let dcell = &mut dcell[sample * h..][..h];
            let dx = &mut dx[row * 4 * h..][..4 * h];
            add(dhidden, &dy[row * h..][..h]);
            cell_grad(gates, (cell, previous), dhidden, dcell, dx);
        }
        dhidden.fill(0.0);
        steps.add_to_hidden(step, weight, dx, dhidden);
    }
}

vectorized! {
    /// Replaces the arguments without bias of a sample in `gates` by its gates, and computes its
    /// cell state from the previous one, `before`, and its hidden values.
    fn cell<S>(
        bias: &[f32],
        before: Option<&[f32]>,
        gates: &mut [f32],
        cell: &mut [f32],
        hidden: &mut [f32],
    ) {
        let h = hidden.len();
        let (i, rest) = gates.split_at_mut(h);
        let (f, rest) = rest.split_at_mut(h);
        let (g, o) = rest.split_at_mut(h);
        let o = &mut o[..h];
        for j in 0..h {
            i[j] = sigmoid::<S>(i[j] + bias[j]);
            f[j] = sigmoid::<S>(f[j] + bias[h + j]);
            g[j] = tanh::<S>(g[j] + bias[2 * h + j]);
            o[j] = sigmoid::<S>(o[j] + bias[3 * h + j]);
        }
        if let Some(before) = before {
            for j in 0..h {
                cell[j] = f[j] * before[j] + i[j] * g[j];
            }
        } else {
            for j in 0..h {
                cell[j] = i[j] * g[j];
            }
        }
        for j in 0..h {
            hidden[j] = o[j] * tanh::<S>(cell[j]);
        }
    }

    /// Computes the gradient of the gates' arguments. In `dcell`, the gradient of the cell state
    /// becomes the gradient of the previous one. `cells` are both states.
    fn cell_grad<S>(
        gates: &[f32],
        cells: (&[f32], Option<&[f32]>),
        dhidden: &[f32],
        dcell: &mut [f32],
        dx: &mut [f32],
    ) {
        let h = dhidden.len();
        let (cell, before) = cells;
        let (i, f, g, o) = (&gates[..h], &gates[h..2 * h], &gates[2 * h..3 * h], &gates[3 * h..]);
        let (di, rest) = dx.split_at_mut(h);
        let (df, rest) = rest.split_at_mut(h);
        let (dg, rest) = rest.split_at_mut(h);
        let d_o = &mut rest[..h];
        for j in 0..h {
            let squashed = tanh::<S>(cell[j]);
            let dc = dcell[j] + dhidden[j] * o[j] * (1.0 - squashed * squashed);
            di[j] = dc * g[j] * i[j] * (1.0 - i[j]);
            df[j] = dc * f[j] * (1.0 - f[j]);
            dg[j] = dc * i[j] * (1.0 - g[j] * g[j]);
            d_o[j] = dhidden[j] * squashed * o[j] * (1.0 - o[j]);
            dcell[j] = dc * f[j];
        }
        if let Some(before) = before {
            for j in 0..h {
                df[j] *= before[j];
            }
        } else {
            df.fill(0.0);
        }
    }
}
