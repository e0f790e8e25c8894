//! Softmax over the last dimension, and its gradient. Twin of `shaders/softmax.wgsl`, which has the
//! formulas.

use rayon::prelude::*;

use super::dispatch_parts::{all_tensors, as_words, lanes_of, push_new, suffix};
use crate::call_shapes::{C, N, PROBE_ROWS, V, calls};
use crate::cpu_kernel::COSTLY_TASK;
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::simd::{exp, largest, sum_of, vectorized};
use crate::twin::{Forward, IndependentAxis, normal_inputs};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Shader, Twin, Variant, source};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::Softmax`] and its gradient.
pub static TWIN: Twin = Twin {
    name: "softmax",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations,
    inputs: normal_inputs,
    forward,
    independent_axes,
    probes,
    catalog,
};

/// Minimum values (floats or vectors) of a row for workgroups of 256 invocations instead of 64.
const WIDE: usize = 512;

/// Reference: `x -> y`, or `y, dy -> dx`.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let c = call.rows_and_last(0).1;
    for (row, out) in outputs[0].chunks_mut(c).enumerate() {
        let x = &inputs[0].floats()[row * c..][..c];
        if let Op::SoftmaxGrad = call.op {
            let y = x;
            let dy = &inputs[1].floats()[row * c..][..c];
            let sum: T = (0..c).map(|k| y[k] * dy[k]).sum();
            for k in 0..c {
                out[k] = y[k] * (dy[k] - sum);
            }
            continue;
        }

        let m = x.iter().copied().fold(x[0], T::max);
        for k in 0..c {
            out[k] = (x[k] - m).exp();
        }
        let sum: T = out.iter().copied().sum();
        for y in out {
            *y /= sum;
        }
    }
}

/// CPU kernel: parallel over tasks of whole rows, each row in vectorized loops.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let c = call.rows_and_last(0).1;
    let task = (COSTLY_TASK / c).max(1) * c;
    let first = inputs[0].floats().par_chunks(task);
    let result = outputs[0].par_chunks_mut(task);
    match call.op {
        Op::SoftmaxGrad => {
            let tasks = (first, inputs[1].floats().par_chunks(task), result);
            tasks.into_par_iter().for_each(|(y, dy, dx)| grad_rows(y, dy, dx, c));
        }
        _ => (first, result).into_par_iter().for_each(|(x, y)| forward_rows(x, y, c)),
    }
}

vectorized! {
    fn forward_rows<S>(x: &[f32], y: &mut [f32], c: usize) {
        for (x, y) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)) {
            let m = largest(x);
            for (y, x) in y.iter_mut().zip(x) {
                let far = *x - m;
                // `exp` returns a small positive number where the result underflows.
                *y = if far < -87.0 { 0.0 } else { exp::<S>(far) };
            }
            let sum = sum_of(c, |k| y[k]);
            for y in y {
                *y /= sum;
            }
        }
    }

    fn grad_rows<S>(y: &[f32], dy: &[f32], dx: &mut [f32], c: usize) {
        for ((y, dy), dx) in y.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c)) {
            let sum = sum_of(c, |k| y[k] * dy[k]);
            for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = y * (dy - sum);
            }
        }
    }
}

/// Static choice: one workgroup per row on GPUs, and one invocation on software adapters; vectors
/// of 4 if the row length is a multiple of 4.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let lanes = lanes(call);
    vec![if caps.wants_gpu_variants() { by_groups(call, lanes) } else { plain(call, lanes) }]
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let lanes = lanes(call);
    let mut variants = vec![named(plain(call, 1), 1)];
    if lanes == 4 {
        push_new(&mut variants, named(plain(call, 4), 4));
    }
    if caps.wants_gpu_variants() {
        push_new(&mut variants, named(by_groups(call, lanes), lanes));
    }
    variants
}

fn named(way: Dispatch, lanes: usize) -> Variant {
    Variant::new(format!("softmax_{}{}", way.shader.entry, suffix(lanes)), vec![way])
}

fn lanes(call: &OpCall) -> usize {
    lanes_of(call.rows_and_last(0).1)
}

/// Returns the kernel with one invocation per row, or one workgroup if an invocation would exceed
/// the iteration limit.
fn plain(call: &OpCall, lanes: usize) -> Dispatch {
    let (rows, c) = call.rows_and_last(0);
    if 3 * c / lanes > ITERATIONS_MAX {
        return by_groups(call, lanes);
    }
    let entry = if let Op::SoftmaxGrad = call.op { "grad" } else { "forward" };
    one(call, entry, lanes, grid(rows, 64))
}

fn by_groups(call: &OpCall, lanes: usize) -> Dispatch {
    let rows = call.rows_and_last(0).0;
    let entry = if let Op::SoftmaxGrad = call.op { "grad_group" } else { "forward_group" };
    one(call, entry, lanes, grid(rows, 1))
}

fn one(call: &OpCall, entry: &'static str, lanes: usize, groups: [u32; 3]) -> Dispatch {
    let (rows, c) = call.rows_and_last(0);
    let width = c / lanes;
    Dispatch {
        shader: Shader::new("softmax", entry)
            .with_text(source::values_of(lanes))
            .with_const("GROUP", if width < WIDE { 64 } else { 256 }),
        operands: all_tensors(call),
        params: as_words(&[rows, width]),
        groups,
    }
}

/// See [`Twin::iterations`]: a row in three passes, by a workgroup if it is too long for one
/// invocation.
fn iterations(call: &OpCall) -> usize {
    let c = call.rows_and_last(0).1;
    if 3 * c > ITERATIONS_MAX { 3 * (c / 64) } else { 3 * c }
}

/// Returns the cost: one exponential per element, which is about 10 FLOPs, and three more FLOPs.
pub fn cost(call: &OpCall) -> Cost {
    Cost::elementwise(call, if let Op::SoftmaxGrad = call.op { 4.0 } else { 13.0 })
}

/// See [`Twin::forward`].
fn forward(op: &Op) -> Option<Forward> {
    let Op::SoftmaxGrad = op else { return None };
    Some(Forward { op: Op::Softmax, inputs: vec![0], outputs: vec![(0, 0)] })
}

/// See [`Twin::independent_axes`]: rows.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    if call.inputs[0].len() < 2 { Vec::new() } else { IndependentAxis::leading(call, &[]) }
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let c = inputs[0].last().copied().unwrap_or(1);
    calls(op, PROBE_ROWS.map(|rows| vec![vec![rows, c]; inputs.len()]))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let mut calls = Vec::new();
    // Rows of floats, rows of vectors, and rows for larger workgroups.
    for c in [V, C, 16 * C + 1] {
        let x = vec![N, c];
        calls.push((Op::Softmax, vec![x.clone()]));
        calls.push((Op::SoftmaxGrad, vec![x; 2]));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{InputFill, generate};
    use crate::testing::gradient::check_gradient;
    use crate::testing::{check, check_with, for_each_result, reference as expected};
    use potluck_core::{HostTensor, Shape};

    type Input = (Shape, HostTensor<f64>);

    fn logits(n: usize, c: usize, rows: usize, fill: InputFill) -> Input {
        (Shape::batched(&[n, c]), generate(fill, rows * n * c, 0))
    }

    /// Inputs of the gradient: the softmax, and a random `dy`.
    fn gradient_inputs(x: &Input, rows: usize) -> [Input; 2] {
        let y = expected(&Op::Softmax, std::slice::from_ref(x), rows).remove(0);
        let dy = generate(InputFill::Normal, y.len(), 1);
        [(x.0.clone(), HostTensor::Float(y)), (x.0.clone(), dy)]
    }

    #[test]
    fn rows_of_every_width_agree() {
        for (n, c, rows) in
            [(1, 2, 3), (3, 7, 2), (64, 65, 3), (1, 8, 5), (2, 512, 1), (1, 777, 3), (1, 5004, 2)]
        {
            let x = logits(n, c, rows, InputFill::Scaled(2.0, 0.0));
            check_with(Op::Softmax, std::slice::from_ref(&x), rows);
            check_with(Op::SoftmaxGrad, &gradient_inputs(&x, rows), rows);
        }
        check(Op::Softmax, &[(Shape::batched(&[2, 3, 1]), InputFill::Normal)], 2);
    }

    #[test]
    fn large_values_stay_stable() {
        for offset in [1000.0, -1000.0] {
            for c in [33, 600] {
                let x = logits(5, c, 3, InputFill::Scaled(50.0, offset));
                check_with(Op::Softmax, &[x], 3);
            }
        }
    }

    /// Rows of several widths with values that are not finite at their ends.
    #[test]
    fn masked_values_are_zero_and_other_infinities_nan() {
        let (low, inf) = (f64::NEG_INFINITY, f64::INFINITY);
        for c in [5, 8, 600] {
            let row = |first: f64, others: f64| {
                let mut row = vec![others; c];
                (row[0], row[c - 1]) = (first, first);
                row
            };
            let rows =
                [row(low, 1.0), row(f64::NAN, 1.0), row(inf, 1.0), row(low, low), row(1.0, low)];
            let x = (Shape::fixed(&[5, c]), HostTensor::Float(rows.concat()));
            for_each_result(&Op::Softmax, &[x], 1, |who, outputs| {
                let rows: Vec<&[f32]> = outputs[0].chunks(c).collect();
                let (share, ends) = (1.0 / (c as f32 - 2.0), [0, c - 1]);
                assert!(ends.iter().all(|end| rows[0][*end] == 0.0), "{c} by {who}");
                assert!((rows[0][1] - share).abs() < 1e-5 * share, "{c} by {who}");
                assert!(rows[1..4].concat().iter().all(|y| y.is_nan()), "{c} by {who}");
                assert!((rows[4][0] - 0.5).abs() < 1e-6 && rows[4][1] == 0.0, "{c} by {who}");
            });
        }
    }

    #[test]
    fn the_gradient_is_the_derivative() {
        let x = logits(2, 5, 3, InputFill::Normal);
        let [y, dy] = gradient_inputs(&x, 3);
        let HostTensor::Float(weights) = &dy.1 else { panic!("floats") };
        let weights = [weights.clone()];
        let dx = expected(&Op::SoftmaxGrad, &[y, dy.clone()], 3);
        check_gradient(&Op::Softmax, &[x], 3, 0, &weights, &dx[0]);
    }
}
