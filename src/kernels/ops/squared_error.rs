//! Squared error against a target, and its gradient. Twin of `shaders/squared_error.wgsl`, which
//! has the formulas.

use rayon::prelude::*;

use crate::call_shapes::{C, KEPT, N, PROBE_ROWS, calls};
use crate::cpu_kernel::TASK;
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::simd::vectorized;
use crate::twin::{leading_axis, no_forward, normal_inputs};
use crate::{
    CallShape, Caps, Cost, DeviceClass, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin,
    Variant,
};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::SquaredError`] and its gradient.
pub static TWIN: Twin = Twin {
    name: "squared_error",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations,
    inputs: normal_inputs,
    forward: no_forward,
    independent_axes: leading_axis,
    probes,
    catalog,
};

/// Invocations per workgroup of the kernel with one workgroup per entry.
const GROUP: usize = 256;

/// Reference: `x (n, ..), target (n, ..) -> parts (n, 2)`, or `x, target -> dx (n, ..)`, which is
/// multiplied by the loss scale.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let x = inputs[0].floats();
    let target = inputs[1].floats();
    if let Op::SquaredErrorGrad = call.op {
        let slope = T::from_f64(f64::from(slope(call)));
        for i in 0..x.len() {
            outputs[0][i] = slope * (x[i] - target[i]);
        }
        return;
    }
    let (n, c) = entries(call);
    for row in 0..n {
        let entry = row * c..(row + 1) * c;
        let squares = entry.map(|i| (x[i] - target[i]) * (x[i] - target[i]));
        outputs[0][2 * row] = squares.sum();
        outputs[0][2 * row + 1] = T::from_f64(c as f64);
    }
}

/// Factor of differences in the gradient.
fn slope(call: &OpCall) -> f32 {
    2.0 * call.loss_scale
}

/// Number of entries of the leading dimension, and of elements per entry.
fn entries(call: &OpCall) -> (usize, usize) {
    let n = call.inputs[0].first().copied().unwrap_or(1);
    (n, call.input_len(0) / n.max(1))
}

/// CPU kernel: parallel over entries, or over elements for the gradient.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let x = inputs[0].floats();
    let target = inputs[1].floats();
    if let Op::SquaredErrorGrad = call.op {
        let slope = slope(call);
        let dx = outputs[0].par_chunks_mut(TASK);
        let tasks = (x.par_chunks(TASK), target.par_chunks(TASK), dx);
        tasks.into_par_iter().for_each(|(x, target, dx)| slopes(slope, x, target, dx));
        return;
    }
    let c = entries(call).1.max(1);
    let rows = (TASK / c).max(1);
    let parts = outputs[0].par_chunks_mut(2 * rows);
    let tasks = (x.par_chunks(rows * c), target.par_chunks(rows * c), parts);
    tasks.into_par_iter().for_each(|(x, target, parts)| {
        for (row, x) in x.chunks_exact(c).enumerate() {
            parts[2 * row] = sum_of_squares(x, &target[row * c..][..c]);
            parts[2 * row + 1] = c as f32;
        }
    });
}

vectorized! {
    /// Computes `dx[j] = slope (x[j] - target[j])`.
    fn slopes<S>(slope: f32, x: &[f32], target: &[f32], dx: &mut [f32]) {
        for ((dx, x), t) in dx.iter_mut().zip(x).zip(target) {
            *dx = slope * (x - t);
        }
    }

    /// Returns `sum_j (x[j] - target[j])^2`, computed in lanes.
    fn sum_of_squares<S>(x: &[f32], target: &[f32]) -> f32 {
        const LANES: usize = 8;
        let mut lanes = [0.0; LANES];
        let (x, target) = (x.chunks_exact(LANES), target.chunks_exact(LANES));
        let rest = x.remainder().iter().zip(target.remainder());
        let rest: f32 = rest.map(|(x, t)| (x - t) * (x - t)).sum();
        for (x, target) in x.zip(target) {
            let pairs = lanes.iter_mut().zip(x).zip(target);
            for ((sum, x), t) in pairs {
                *sum += (x - t) * (x - t);
            }
        }
        lanes.iter().sum::<f32>() + rest
    }
}

/// Static choice: one invocation per entry, or one workgroup if an invocation would exceed the
/// iteration limit; for the gradient, one invocation per 8 elements, or per 4 vectors of 4.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let (n, c) = entries(call);
    let by_groups = c > ITERATIONS_MAX || (c >= GROUP && caps.wants_gpu_variants());
    vec![match call.op {
        Op::SquaredError if by_groups => one(call, "squared_error_group", grid(n, 1)),
        Op::SquaredError => one(call, "squared_error", grid(n, 64)),
        _ if (n * c).is_multiple_of(4) => one(call, "squared_error_grad4", grid(n * c, 1024)),
        _ => one(call, "squared_error_grad", grid(n * c, 512)),
    }]
}

/// See [`Twin::iterations`]: those of the kernel for long entries, whose workgroups share one.
fn iterations(call: &OpCall) -> usize {
    match call.op {
        Op::SquaredError => entries(call).1.div_ceil(GROUP),
        _ => 0,
    }
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let (n, c) = entries(call);
    let mut ways = dispatch(call, &Caps { class: DeviceClass::Software, ..*caps });
    let other = match call.op {
        Op::SquaredError if (GROUP..=ITERATIONS_MAX).contains(&c) => {
            Some(one(call, "squared_error_group", grid(n, 1)))
        }
        Op::SquaredErrorGrad if ways[0].shader.entry != "squared_error_grad" => {
            Some(one(call, "squared_error_grad", grid(n * c, 512)))
        }
        _ => None,
    };
    ways.extend(other);
    // Sorted by entry point, the baseline comes first.
    ways.sort_by_key(|way| way.shader.entry);
    ways.into_iter().map(|way| Variant::new(way.shader.entry, vec![way])).collect()
}

fn one(call: &OpCall, entry: &'static str, groups: [u32; 3]) -> Dispatch {
    let (n, c) = entries(call);
    Dispatch {
        shader: Shader::new("squared_error", entry),
        operands: vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
        params: vec![n as u32, c as u32, slope(call).to_bits()],
        groups,
    }
}

/// Returns the cost: three FLOPs per element, two for the gradient.
pub fn cost(call: &OpCall) -> Cost {
    let flops = if let Op::SquaredError = call.op { 3.0 } else { 2.0 };
    Cost { flops: flops * call.input_len(0) as f64, bytes: Cost::moved(call) }
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let c = inputs[0][1..].iter().product::<usize>().min(KEPT);
    calls(op, PROBE_ROWS.map(|n| vec![vec![n, c]; 2]))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    [Op::SquaredError, Op::SquaredErrorGrad].map(|op| (op, vec![vec![N, C]; 2])).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{InputFill, generate};
    use crate::testing::gradient::check_gradient;
    use crate::testing::{self, check, check_loss_scale};
    use potluck_core::{HostTensor, Shape};

    #[test]
    fn errors_and_gradients_agree_everywhere() {
        for (dims, rows) in [
            (&[1, 1][..], 1),
            (&[3], 5),
            (&[1, 37], 7),
            (&[2, 5, 31], 3),
            (&[1, 700], 4),
            (&[1, 70_001], 2),
        ] {
            let x = (Shape::batched(dims), InputFill::Normal);
            let target = (Shape::batched(dims), InputFill::Scaled(0.5, 1.0));
            check(Op::SquaredError, &[x.clone(), target.clone()], rows);
            check(Op::SquaredErrorGrad, &[x, target], rows);
        }
    }

    #[test]
    fn the_loss_scale_multiplies_gradients() {
        for (dims, rows) in [(&[3][..], 5), (&[1, 37], 7), (&[2, 5, 30], 2)] {
            let shape = Shape::batched(dims);
            let values = |index| generate(InputFill::Normal, shape.elements(rows), index);
            let inputs = [0, 1].map(|index| (shape.clone(), values(index)));
            check_loss_scale(&Op::SquaredErrorGrad, &inputs, rows, &[0]);
        }
    }

    #[test]
    fn parts_are_a_sum_and_a_count() {
        let shape = Shape::batched(&[1, 3]);
        let x = (shape.clone(), HostTensor::Float(vec![1.0, 2.0, 3.0, 0.0, 0.0, 0.0]));
        let target = (shape, HostTensor::Float(vec![0.0, 4.0, 3.0, 1.0, 1.0, 1.0]));
        let parts = testing::reference(&Op::SquaredError, &[x, target], 2);
        assert_eq!(parts, [[5.0, 3.0, 3.0, 3.0]]);
    }

    #[test]
    fn the_gradient_is_the_derivative() {
        let shape = Shape::batched(&[2, 5]);
        let x = (shape.clone(), generate(InputFill::Normal, 30, 0));
        let target = (shape, generate(InputFill::Normal, 30, 1));
        let dx = testing::reference(&Op::SquaredErrorGrad, &[x.clone(), target.clone()], 3);
        let weights = [[1.0, 0.0].repeat(6)];
        check_gradient(&Op::SquaredError, &[x, target], 3, 0, &weights, &dx[0]);
    }
}
