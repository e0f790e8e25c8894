//! The cell of an LSTM (Hochreiter and Schmidhuber 1997, with forget gates of Gers et al. 2000), in
//! the form of PyTorch's `LSTM`: gates in the order i, f, g, o.
//!
//! ```text
//! i, f, o = sigmoid(z),  g = tanh(z)     with z = x_t + W h_(t-1) + bias
//! c_t = f c_(t-1) + i g,  h_t = o tanh(c_t)
//! ```

use super::RecurrentSizes;
use super::time_steps::TimeSteps;
use crate::Float;
use crate::simd::{add, sigmoid, tanh, vectorized};

/// Reference of one sample: `x, weight, bias [, h0, c0] -> y, gates, cells`.
pub fn reference<T: Float>(
    RecurrentSizes { t, h, .. }: RecurrentSizes,
    sample: usize,
    inputs: &[&[T]],
    outputs: &mut [&mut [T]],
) {
    let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
    let state = |index: usize| match inputs.get(index) {
        Some(state) => state[sample * h..][..h].to_vec(),
        None => vec![T::zero(); h],
    };
    let (mut hidden, mut cell) = (state(3), state(4));
    for row in sample * t..(sample + 1) * t {
        let z = |column: usize| {
            let product = (0..h).map(|k| weight[column * h + k] * hidden[k]).sum::<T>();
            x[row * 4 * h + column] + bias[column] + product
        };
        let z: Vec<T> = (0..4 * h).map(z).collect();
        for j in 0..h {
            let gate = |gate: usize| z[gate * h + j];
            let (i, f, o) = (logistic(gate(0)), logistic(gate(1)), logistic(gate(3)));
            let g = gate(2).tanh();
            cell[j] = f * cell[j] + i * g;
            hidden[j] = o * cell[j].tanh();
            for (at, gate) in [i, f, g, o].into_iter().enumerate() {
                outputs[1][row * 4 * h + at * h + j] = gate;
            }
        }
        outputs[0][row * h..][..h].copy_from_slice(&hidden);
        outputs[2][row * h..][..h].copy_from_slice(&cell);
    }
}

/// Returns the logistic function.
pub(crate) fn logistic<T: Float>(x: T) -> T {
    (T::one() + (-x).exp()).recip()
}

/// Reference of one sample: `gates, weight, cells, dy [, c0] -> dx, dh0, dc0`.
pub(crate) fn reference_grad<T: Float>(
    RecurrentSizes { t, h, .. }: RecurrentSizes,
    sample: usize,
    inputs: &[&[T]],
    outputs: &mut [&mut [T]],
) {
    let (gates, weight, cells, dy) = (inputs[0], inputs[1], inputs[2], inputs[3]);
    let (mut dhidden, mut dcell) = (vec![T::zero(); h], vec![T::zero(); h]);
    for row in (sample * t..(sample + 1) * t).rev() {
        let mut dz = vec![T::zero(); 4 * h];
        for j in 0..h {
            let gate = |gate: usize| gates[row * 4 * h + gate * h + j];
            let (i, f, g, o) = (gate(0), gate(1), gate(2), gate(3));
            let before = if row > sample * t {
                cells[(row - 1) * h + j]
            } else {
                inputs.get(4).map_or(T::zero(), |c0| c0[sample * h + j])
            };
            let squashed = cells[row * h + j].tanh();
            let dh = dy[row * h + j] + dhidden[j];
            let dc = dcell[j] + dh * o * (T::one() - squashed * squashed);
            dz[j] = dc * g * i * (T::one() - i);
            dz[h + j] = dc * before * f * (T::one() - f);
            dz[2 * h + j] = dc * i * (T::one() - g * g);
            dz[3 * h + j] = dh * squashed * o * (T::one() - o);
            dcell[j] = dc * f;
        }
        let product = |j: usize| (0..4 * h).map(|k| dz[k] * weight[k * h + j]).sum();
        dhidden = (0..h).map(product).collect();
        outputs[0][row * 4 * h..][..4 * h].copy_from_slice(&dz);
    }
    outputs[1][sample * h..][..h].copy_from_slice(&dhidden);
    outputs[2][sample * h..][..h].copy_from_slice(&dcell);
}

/// CPU kernel of `x, weight, bias [, h0, c0] -> y, gates, cells`, with the weight transposed.
pub fn fast(steps: &TimeSteps, inputs: &[&[f32]], outputs: &mut [&mut [f32]]) {
    let RecurrentSizes { b, t, h, .. } = steps.sizes;
    let [y, gates, cells] = outputs else { panic!("an LSTM has three outputs") };
    let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
    gates.copy_from_slice(x);
    for step in 0..t {
        steps.add_hidden(step, (weight, inputs.get(3).copied()), y, gates);
        for sample in 0..b {
            let row = sample * t + step;
            let (before, cells) = cells.split_at_mut(row * h);
            let before = match step {
                0 => inputs.get(4).map(|c0| &c0[sample * h..][..h]),
                _ => Some(&before[(row - 1) * h..]),
            };
            let gates = &mut gates[row * 4 * h..][..4 * h];
            cell(bias, before, gates, &mut cells[..h], &mut y[row * h..][..h]);
        }
    }
}

/// CPU kernel of `gates, weight, cells, dy [, c0] -> dx, dh0, dc0`.
pub(crate) fn fast_grad(steps: &TimeSteps, inputs: &[&[f32]], outputs: &mut [&mut [f32]]) {
    let RecurrentSizes { b, t, h, .. } = steps.sizes;
    let [dx, dhidden, dcell] = outputs else { panic!("a gradient of an LSTM has three outputs") };
    let (gates, weight, cells, dy) = (inputs[0], inputs[1], inputs[2], inputs[3]);
    dhidden.fill(0.0);
    dcell.fill(0.0);
    for step in (0..t).rev() {
        for sample in 0..b {
            let row = sample * t + step;
            let before = match step {
                0 => inputs.get(4).map(|c0| &c0[sample * h..][..h]),
                _ => Some(&cells[(row - 1) * h..][..h]),
            };
            let (dhidden, dcell) = (&mut dhidden[sample * h..][..h], &mut dcell[sample * h..][..h]);
            add(dhidden, &dy[row * h..][..h]);
            let (gates, cell) = (&gates[row * 4 * h..][..4 * h], &cells[row * h..][..h]);
            cell_grad(gates, (cell, before), dhidden, dcell, &mut dx[row * 4 * h..][..4 * h]);
        }
        dhidden.fill(0.0);
        steps.add_to_hidden(step, weight, dx, dhidden);
    }
}

vectorized! {
    /// Computes the gates of a sample in place of their arguments without bias, its cell from
    /// `before`, and its hidden values.
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
        match before {
            Some(before) => (0..h).for_each(|j| cell[j] = f[j] * before[j] + i[j] * g[j]),
            None => (0..h).for_each(|j| cell[j] = i[j] * g[j]),
        }
        for j in 0..h {
            hidden[j] = o[j] * tanh::<S>(cell[j]);
        }
    }

    /// Computes the gradient of the gates' arguments, and that of the cell before in place of that
    /// of the cell.
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
        match before {
            Some(before) => (0..h).for_each(|j| df[j] *= before[j]),
            None => df.fill(0.0),
        }
    }
}
