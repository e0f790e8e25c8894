//! Recurrent layers over time, LSTM and GRU, and their gradients. Twin of
//! `shaders/recurrent_lstm.wgsl` and `shaders/recurrent_gru.wgsl`, which have the formulas.
//!
//! A layer's product with its inputs is one [`Op::MatMul`] for all time steps. The rest of each
//! step is the product with the hidden state and the gates: one dispatch in `steps`, or one call
//! of the `gemm` crate and a vectorized loop in `lstm` or `gru`.

mod gru;
mod host;
mod lstm;
mod steps;
mod time_steps;

use crate::call_shapes::{B, C, T, calls};
use crate::harness::InputFill;
use crate::twin::{IndependentAxis, InputSpec, no_forward};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::{Cell, Op};

/// Twin of [`Op::Recurrent`] and its gradient.
pub static TWIN: Twin = Twin {
    name: "recurrent",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: true,
    iterations,
    inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Sizes of a call: samples, time steps, hidden values, and the cell.
#[derive(Clone, Copy, Debug)]
struct RecurrentSizes {
    b: usize,
    t: usize,
    h: usize,
    cell: Cell,
}

impl RecurrentSizes {
    fn of(call: &OpCall) -> Self {
        let (cell, hidden) = match call.op {
            Op::Recurrent { cell } => (*cell, &call.outputs[0]),
            Op::RecurrentGrad { cell } => (*cell, &call.inputs[3]),
            other => panic!("{other} is not recurrent"),
        };
        Self { b: hidden[0], t: hidden[1], h: hidden[2], cell }
    }

    /// Columns of the product with the hidden state.
    fn columns(&self) -> usize {
        self.cell.gates() * self.h
    }
}

/// Initial state of a sample, of `h` values: zeros if the op has no such input.
fn initial_state<T: Float>(state: Option<&&[T]>, sample: usize, h: usize) -> Vec<T> {
    match state {
        Some(state) => state[sample * h..][..h].to_vec(),
        None => vec![T::zero(); h],
    }
}

/// Reference; see [`Op::Recurrent`] and [`Op::RecurrentGrad`].
fn reference<T: Float>(call: &OpCall, inputs: &[HostTensorView<'_, T>], outputs: &mut [&mut [T]]) {
    let inputs: Vec<&[T]> = inputs.iter().map(|input| input.floats()).collect();
    let sizes = RecurrentSizes::of(call);
    let is_forward = matches!(call.op, Op::Recurrent { .. });
    for sample in 0..sizes.b {
        match (sizes.cell, is_forward) {
            (Cell::Lstm, true) => lstm::reference(sizes, sample, &inputs, outputs),
            (Cell::Lstm, false) => lstm::reference_grad(sizes, sample, &inputs, outputs),
            (Cell::Gru, true) => gru::reference(sizes, sample, &inputs, outputs),
            (Cell::Gru, false) => gru::reference_grad(sizes, sample, &inputs, outputs),
        }
    }
}

/// CPU kernel: per time step one product by the `gemm` crate, and the gates of each sample in a
/// vectorized loop.
fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let inputs: Vec<&[f32]> = inputs.iter().map(|input| input.floats()).collect();
    let is_forward = matches!(call.op, Op::Recurrent { .. });
    host::compute(RecurrentSizes::of(call), is_forward, &inputs, outputs);
}

/// Static choice: on GPUs a row per invocation, so that there are enough invocations.
fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let rows = if caps.wants_cpu_driver_variants() { steps::ROWS[1] } else { steps::ROWS[0] };
    steps::dispatches(call, RecurrentSizes::of(call), rows, caps)
}

fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let mut variants = Vec::new();
    for rows in steps::ROWS {
        let name = format!("{}_{rows}_rows", call.op);
        let dispatches = steps::dispatches(call, RecurrentSizes::of(call), rows, caps);
        variants.push(Variant::new(name, dispatches));
    }
    variants
}

/// Returns the cost: the products with the hidden state and about 30 operations per value and
/// gate, counted in the first time step too.
fn cost(call: &OpCall) -> Cost {
    let sizes = RecurrentSizes::of(call);
    let values = (sizes.b * sizes.t * sizes.columns()) as f64;
    // The weight is read again in each further time step.
    let again = 4.0 * ((sizes.t - 1) * sizes.h * sizes.columns()) as f64;
    let flops = (2.0 * sizes.h as f64 + 30.0) * values;
    Cost { flops, bytes: Cost::moved(call) + again }
}

/// See [`Twin::iterations`].
fn iterations(call: &OpCall) -> usize {
    RecurrentSizes::of(call).columns()
}

/// Samples of the probe whose arguments of the functions of gates are far from 0, so that many
/// exponentials overflow.
const FAR_SAMPLES: usize = 3;

/// Samples of the probe whose arguments are near 0, where differences of exponentials cancel.
const TINY_SAMPLES: usize = 2;

/// See [`Twin::inputs`]. Sums over many hidden values stay where gates are neither open nor
/// closed, and gates are from 0 to 1; except in two probes.
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let scale = (inputs[1].last().copied().unwrap_or(1) as f32).sqrt().recip();
    let mut spec = InputSpec::normal(inputs).with(1, InputFill::Scaled(scale, 0.0));
    let size = match inputs[0][0] {
        FAR_SAMPLES => 200.0,
        TINY_SAMPLES => 1e-6,
        _ => 1.0,
    };
    let scaled = InputFill::Scaled(size, 0.0);
    match op {
        Op::RecurrentGrad { cell } => {
            spec = spec.with(0, InputFill::Uniform(0.05, 0.95));
            // The hidden values of a GRU are its own results.
            if *cell == Cell::Lstm {
                spec = spec.with(2, scaled);
            }
        }
        _ => {
            spec = spec.with(0, scaled);
            if size < 1.0 {
                for input in 2..inputs.len() {
                    spec = spec.with(input, scaled);
                }
            }
        }
    }
    spec
}

/// Inputs of an op on `b` samples of `t` time steps and `h` hidden values.
fn sized(op: &Op, [b, t, h]: [usize; 3], has_state: bool) -> Vec<Dims> {
    let (Op::Recurrent { cell } | Op::RecurrentGrad { cell }) = op else { return Vec::new() };
    let columns = cell.gates() * h;
    let weight = vec![columns, h];
    let (mut inputs, states) = match op {
        Op::Recurrent { .. } => (vec![vec![b, t, columns], weight, vec![columns]], cell.states()),
        _ => (vec![vec![b, t, 4 * h], weight, vec![b, t, h], vec![b, t, h]], 1),
    };
    if has_state {
        inputs.extend(vec![vec![b, h]; states]);
    }
    inputs
}

/// See [`Twin::independent_axes`]: samples.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let is_gradient = matches!(call.op, Op::RecurrentGrad { .. });
    IndependentAxis::leading(call, if is_gradient { &[1] } else { &[1, 2] })
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let least = if matches!(op, Op::Recurrent { .. }) { 3 } else { 4 };
    let has_state = inputs.len() > least;
    let h = if inputs[1].last().is_some_and(|h| h.is_multiple_of(4)) { 12 } else { 11 };
    // The last one has more than a workgroup in each dispatch.
    let sizes = [[TINY_SAMPLES, 3, h], [FAR_SAMPLES, 6, h], [5, 3, h], [90, 2, h]];
    calls(op, sizes.map(|sizes| sized(op, sizes, has_state)))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let mut calls = Vec::new();
    for cell in [Cell::Lstm, Cell::Gru] {
        for op in [Op::Recurrent { cell }, Op::RecurrentGrad { cell }] {
            for has_state in [false, true] {
                for h in [C, C - 1] {
                    calls.push((op.clone(), sized(&op, [B, T / 8, h], has_state)));
                }
            }
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, check, check_with};
    use crate::{OwnedCall, RandomContext};
    use potluck_core::rng::Key;
    use potluck_core::{HostTensor, Shape};

    const CELLS: [Cell; 2] = [Cell::Lstm, Cell::Gru];

    type Values = Vec<(Shape, HostTensor<f64>)>;

    /// Inputs of a layer of `t` steps and `h` hidden values.
    fn layer(cell: Cell, [b, t, h]: [usize; 3], has_state: bool) -> Values {
        let columns = cell.gates() * h;
        let mut shapes = vec![
            (Shape::batched(&[1, t, columns]), 1.0),
            (Shape::fixed(&[columns, h]), (h as f32).sqrt().recip()),
            (Shape::fixed(&[columns]), 0.5),
        ];
        let states = if has_state { cell.states() } else { 0 };
        shapes.extend(vec![(Shape::batched(&[1, h]), 0.7); states]);
        let value = |(i, (shape, scale)): (usize, (Shape, f32))| {
            let fill = InputFill::Scaled(scale, 0.0);
            let values = testing::generate(fill, shape.elements(b), i);
            (shape, values)
        };
        shapes.into_iter().enumerate().map(value).collect()
    }

    /// Inputs of the gradient of a layer, with a random `dy`.
    fn gradient_inputs(cell: Cell, forward: &Values, b: usize) -> Values {
        let mut outputs = testing::reference(&Op::Recurrent { cell }, forward, b);
        let h = forward[1].0.last();
        let t = forward[0].0.dims()[1];
        let hidden = Shape::batched(&[1, t, h]);
        let floats = |values: &mut Vec<f64>| HostTensor::Float(std::mem::take(values));
        let gates = (Shape::batched(&[1, t, 4 * h]), floats(&mut outputs[1]));
        let values = match cell {
            Cell::Lstm => floats(&mut outputs[2]),
            Cell::Gru => floats(&mut outputs[0]),
        };
        let dy = testing::generate(InputFill::Normal, hidden.elements(b), 9);
        let weight = forward[1].clone();
        let mut inputs = vec![gates, weight, (hidden.clone(), values), (hidden, dy)];
        inputs.extend(forward[3..].last().cloned());
        inputs
    }

    fn check_layer(cell: Cell, [b, t, h]: [usize; 3], has_state: bool) {
        let forward = layer(cell, [b, t, h], has_state);
        check_with(Op::Recurrent { cell }, &forward, b);
        check_with(Op::RecurrentGrad { cell }, &gradient_inputs(cell, &forward, b), b);
    }

    #[test]
    fn every_size_agrees() {
        for cell in CELLS {
            for sizes in [[1, 1, 1], [3, 4, 5], [9, 3, 8], [2, 5, 20], [19, 3, 4]] {
                for has_state in [false, true] {
                    check_layer(cell, sizes, has_state);
                }
            }
        }
    }

    #[test]
    fn more_samples_than_a_workgroup_agree() {
        for cell in CELLS {
            check_layer(cell, [70, 3, 33], true);
            check_layer(cell, [70, 3, 36], false);
        }
    }

    /// Near 0, a tanh of exponentials would be a difference of nearly equal numbers.
    #[test]
    fn tiny_arguments_agree() {
        for cell in CELLS {
            let mut inputs = layer(cell, [2, 3, 4], true);
            for (index, (_, values)) in inputs.iter_mut().enumerate() {
                if let HostTensor::Float(values) = values
                    && index != 1
                {
                    for value in values {
                        *value *= 1e-6;
                    }
                }
            }
            check_with(Op::Recurrent { cell }, &inputs, 2);
        }
    }

    /// Saturated gates, where exponentials are 0 or infinite.
    #[test]
    fn far_arguments_agree() {
        for cell in CELLS {
            let mut inputs = layer(cell, [2, 3, 4], true);
            if let HostTensor::Float(x) = &mut inputs[0].1 {
                x.iter_mut().enumerate().for_each(|(i, x)| *x *= [1.0, 200.0][i % 2]);
            }
            check_with(Op::Recurrent { cell }, &inputs, 2);
        }
    }

    /// A weight that is too large for the workspace is read as it is.
    #[test]
    fn a_weight_beyond_the_workspace_agrees() {
        let h = 2052;
        let inputs = layer(Cell::Lstm, [1, 2, h], false);
        let op = Op::Recurrent { cell: Cell::Lstm };
        let random = RandomContext { step_key: Key::new(1), training: true };
        let owned = OwnedCall::new(
            op,
            sized(&Op::Recurrent { cell: Cell::Lstm }, [1, 2, h], false),
            random,
        );
        let call = owned.unwrap();
        assert_eq!(dispatch(&call.call(), &Caps::EVERY).len(), 2);
        check_with(Op::Recurrent { cell: Cell::Lstm }, &inputs, 1);
    }

    #[test]
    fn there_is_a_dispatch_per_time_step_and_one_more() {
        for cell in CELLS {
            for op in [Op::Recurrent { cell }, Op::RecurrentGrad { cell }] {
                let sizes = sized(&op, [4, 7, 8], false);
                let random = RandomContext { step_key: Key::new(1), training: true };
                let owned = OwnedCall::new(op, sizes, random).unwrap();
                let call = owned.call();
                for variant in variants(&call, &Caps::EVERY) {
                    assert_eq!(variant.dispatches.len(), 7 + 1, "{}", variant.name);
                }
            }
        }
    }

    #[test]
    fn a_state_that_is_all_zeros_is_none() {
        let shapes = |state: bool| {
            let mut inputs = vec![
                (Shape::batched(&[1, 3, 8]), InputFill::Normal),
                (Shape::fixed(&[8, 2]), InputFill::Normal),
                (Shape::fixed(&[8]), InputFill::Normal),
            ];
            inputs.extend(vec![
                (Shape::batched(&[1, 2]), InputFill::Scaled(0.0, 0.0));
                2 * usize::from(state)
            ]);
            inputs
        };
        check(Op::Recurrent { cell: Cell::Lstm }, &shapes(true), 2);
        let values = |state| -> Values {
            let generate = |(i, (shape, fill)): (usize, (Shape, InputFill))| {
                (shape.clone(), testing::generate(fill, shape.elements(2), i))
            };
            shapes(state).into_iter().enumerate().map(generate).collect()
        };
        let of = |state| testing::reference(&Op::Recurrent { cell: Cell::Lstm }, &values(state), 2);
        assert_eq!(of(true), of(false));
    }
}
