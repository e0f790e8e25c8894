//! Rotary position embedding that pairs the halves of a head, and its inverse. Twin of
//! `shaders/rotary.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::dispatch_parts::lanes_of;
use crate::call_shapes::{B, C, HEADS, T, calls};
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::simd::vectorized;
use crate::twin::{IndependentAxis, no_forward, normal_inputs, short_loops};
use crate::{
    CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant, source,
};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::Rotary`].
pub static TWIN: Twin = Twin {
    name: "rotary",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs: normal_inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Token counts of probes: a few, and more than a workgroup has invocations.
const TOKENS: [usize; 2] = [5, 67];

/// Dimensions of a call.
struct RotarySizes {
    /// Rows, of all samples.
    rows: usize,
    /// Positions in the table.
    tokens: usize,
    heads: usize,
    /// Pairs of a head.
    half: usize,
    sign: f64,
}

impl RotarySizes {
    fn of(call: &OpCall) -> Self {
        let Op::Rotary { inverse } = *call.op else { panic!("{} is not rotary", call.op) };
        let (rows, columns) = call.rows_and_last(0);
        let (tokens, d) = call.rows_and_last(1);
        let sign = if inverse { -1.0 } else { 1.0 };
        Self { rows, tokens, heads: columns / d, half: d / 2, sign }
    }

    fn pairs(&self) -> usize {
        self.rows * self.heads * self.half
    }
}

/// Reference: `x (b, t, heads d), table (t, d) -> y`.
fn reference<T: Float>(call: &OpCall, inputs: &[HostTensorView<'_, T>], outputs: &mut [&mut [T]]) {
    let sizes = RotarySizes::of(call);
    rotate_rows(&sizes, inputs[1].floats(), 0, inputs[0].floats(), outputs[0]);
}

/// Rotates rows by the cosines and sines of their positions; `first` is the index of the first row.
#[inline(always)]
fn rotate_rows<T: Float>(sizes: &RotarySizes, table: &[T], first: usize, x: &[T], y: &mut [T]) {
    let d = 2 * sizes.half;
    let rows = x.chunks(sizes.heads * d).zip(y.chunks_mut(sizes.heads * d));
    for (row, (x, y)) in (first..).zip(rows) {
        let angles = &table[row % sizes.tokens * d..][..d];
        rotate(sizes, angles, x, y);
    }
}

/// Rotates the heads of one row by the cosines and sines of its position.
#[inline(always)]
fn rotate<T: Float>(sizes: &RotarySizes, angles: &[T], x: &[T], y: &mut [T]) {
    let sign = T::from_f64(sizes.sign);
    let (cosines, sines) = angles.split_at(sizes.half);
    for (x, y) in x.chunks_exact(angles.len()).zip(y.chunks_exact_mut(angles.len())) {
        let (first, second) = x.split_at(sizes.half);
        let (y_first, y_second) = y.split_at_mut(sizes.half);
        for i in 0..sizes.half {
            let sine = sign * sines[i];
            y_first[i] = first[i] * cosines[i] - second[i] * sine;
            y_second[i] = second[i] * cosines[i] + first[i] * sine;
        }
    }
}

/// CPU kernel: parallel over tasks of whole rows.
fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let sizes = RotarySizes::of(call);
    let row = sizes.heads * 2 * sizes.half;
    let rows = (TASK / row).max(1);
    let x = inputs[0].floats().par_chunks(rows * row);
    let tasks = (x, outputs[0].par_chunks_mut(rows * row)).into_par_iter().enumerate();
    tasks.for_each(|(task, (x, y))| {
        rotate_task(&sizes, inputs[1].floats(), task * rows, x, y);
    });
}

vectorized! {
    fn rotate_task<S>(
        sizes: &RotarySizes,
        table: &[f32],
        first: usize,
        x: &[f32],
        y: &mut [f32],
    ) {
        rotate_rows(sizes, table, first, x, y);
    }
}

/// Static choice: vectors of 4 if half the width of a head is a multiple of 4.
fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    vec![one(call, lanes(call))]
}

fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let mut variants = vec![Variant::new("rotary", vec![one(call, 1)])];
    if lanes(call) == 4 {
        variants.push(Variant::new("rotary4", vec![one(call, 4)]));
    }
    variants
}

fn lanes(call: &OpCall) -> usize {
    lanes_of(RotarySizes::of(call).half)
}

fn one(call: &OpCall, lanes: usize) -> Dispatch {
    let sizes = RotarySizes::of(call);
    let pairs = sizes.pairs() / lanes;
    Dispatch {
        shader: Shader::new("rotary", "rotate").with_text(source::values_of(lanes)),
        operands: vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
        params: vec![
            pairs as u32,
            (sizes.half / lanes) as u32,
            sizes.heads as u32,
            sizes.tokens as u32,
            (sizes.sign as f32).to_bits(),
        ],
        groups: grid(pairs, 512),
    }
}

/// Cost: six FLOPs for each pair.
fn cost(call: &OpCall) -> Cost {
    Cost::elementwise(call, 3.0)
}

/// See [`Twin::independent_axes`]: samples, which may have a table each.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let has_tables = call.inputs[1].len() > 2;
    IndependentAxis::leading(call, if has_tables { &[] } else { &[1] })
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let columns = inputs[0][2];
    let d = inputs[1][1];
    calls(op, TOKENS.map(|t| vec![vec![2, t, columns], vec![t, d]]))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let mut calls = Vec::new();
    // Heads whose halves are whole vectors, and heads whose halves are not.
    for (columns, d) in [(C, C / HEADS), (3 * 6, 6)] {
        for inverse in [false, true] {
            calls.push((Op::Rotary { inverse }, vec![vec![B, T, columns], vec![T, d]]));
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{InputFill, generate};
    use crate::testing::gradient::check_gradient;
    use crate::testing::{check, reference as expected};
    use potluck_core::{HostTensor, Shape};

    #[test]
    fn heads_of_every_width_agree() {
        for (t, heads, d) in [(1, 1, 2), (5, 3, 6), (7, 2, 8), (33, 1, 64), (130, 3, 20)] {
            let x = (Shape::batched(&[1, t, heads * d]), InputFill::Normal);
            let table = (Shape::fixed(&[t, d]), InputFill::Normal);
            for inverse in [false, true] {
                check(Op::Rotary { inverse }, &[x.clone(), table.clone()], 3);
            }
        }
    }

    #[test]
    fn a_quarter_turn_swaps_the_halves_and_the_inverse_turns_back() {
        let x = (Shape::batched(&[1, 1, 4]), HostTensor::Float(vec![1.0, 2.0, 3.0, 4.0]));
        let table = (Shape::fixed(&[1, 4]), HostTensor::Float(vec![0.0, 0.0, 1.0, 1.0]));
        let turned =
            expected(&Op::Rotary { inverse: false }, &[x.clone(), table.clone()], 1).remove(0);
        assert_eq!(turned, [-3.0, -4.0, 1.0, 2.0]);
        let turned = (x.0, HostTensor::Float(turned));
        let back = expected(&Op::Rotary { inverse: true }, &[turned, table], 1).remove(0);
        assert_eq!(back, [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn the_inverse_is_the_gradient() {
        let (t, d, rows) = (3, 4, 2);
        let x = (Shape::batched(&[1, t, 2 * d]), generate(InputFill::Normal, rows * t * 2 * d, 0));
        let table = (Shape::fixed(&[t, d]), generate(InputFill::Normal, t * d, 1));
        let dy = generate(InputFill::Normal, rows * t * 2 * d, 2);
        let HostTensor::Float(weights) = &dy else { panic!("floats") };
        let weights = [weights.clone()];
        let given = (x.0.clone(), dy.clone());
        let dx = expected(&Op::Rotary { inverse: true }, &[given, table.clone()], rows);
        check_gradient(&Op::Rotary { inverse: false }, &[x, table], rows, 0, &weights, &dx[0]);
    }
}
