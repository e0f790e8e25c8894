//! Elementwise functions of two tensors, the second a suffix of the first. Twin of
//! `shaders/binary.wgsl`, which has the formulas.

use std::borrow::Cow;

use rayon::prelude::*;

use crate::base::HostTensorView;
use crate::graph::{Binary, Op};
use crate::kernels::call_shapes::{C, N, calls};
use crate::kernels::dispatch::grid;
use crate::kernels::twin::{no_forward, normal_inputs, short_loops};
use crate::kernels::{
    CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant,
};

/// Twin of [`Op::Binary`].
pub static TWIN: Twin = Twin {
    name: "binary",
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
    probes,
    catalog,
};

/// Elements per rayon task of `fast`: enough to outweigh the scheduling overhead.
const TASK: usize = 16 * 1024;

/// Minimum length of an inner loop of `fast`: shorter loops do not fill vector registers.
const LOOP: usize = 256;

/// Reference: `y[i] = a[i] + b[i mod b's length]`, or the product.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let (a, b) = (inputs[0].floats(), inputs[1].floats());
    let function = function(call);
    for (i, y) in outputs[0].iter_mut().enumerate() {
        *y = value(function, a[i], b[i % b.len()]);
    }
}

/// Returns `f(a, b)`.
pub(super) fn value<T: Float>(function: Binary, a: T, b: T) -> T {
    match function {
        Binary::Add => a + b,
        Binary::Mul => a * b,
    }
}

/// CPU kernel: parallel and without an integer division. `b` is repeated until inner loops are
/// long enough, and task sizes are multiples of its repeated length.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let (a, b) = (inputs[0].floats(), inputs[1].floats());
    if a.is_empty() {
        return;
    }
    if a.len() == b.len() {
        let tasks = outputs[0].par_chunks_mut(TASK).zip(a.par_chunks(TASK)).zip(b.par_chunks(TASK));
        return tasks.for_each(|((y, a), b)| combine(function(call), y, a, b));
    }
    let period = repeated(b);
    let task = period.len() * TASK.div_ceil(period.len());
    let tasks = outputs[0].par_chunks_mut(task).zip(a.par_chunks(task));
    tasks.for_each(|(y, a)| {
        for (y, a) in y.chunks_mut(period.len()).zip(a.chunks(period.len())) {
            combine(function(call), y, a, &period);
        }
    });
}

/// Returns `b`, repeated until loops over it are long enough.
pub(super) fn repeated(b: &[f32]) -> Cow<'_, [f32]> {
    match b.len() < LOOP && !b.is_empty() {
        true => b.repeat(LOOP.div_ceil(b.len())).into(),
        false => b.into(),
    }
}

/// Computes `y = f(a, b)` on the calling thread.
pub(super) fn combine(function: Binary, y: &mut [f32], a: &[f32], b: &[f32]) {
    let each = y.iter_mut().zip(a).zip(b);
    match function {
        Binary::Add => each.for_each(|((y, a), b)| *y = a + b),
        Binary::Mul => each.for_each(|((y, a), b)| *y = a * b),
    }
}

/// Static choice: vectors of 4 where lengths allow them.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    vec![vectors(call).unwrap_or_else(|| plain(call))]
}

/// Returns all GPU kernel variants of the call.
fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let plain = Variant::new("binary", vec![plain(call)]);
    let vectors = vectors(call).map(|way| Variant::new("binary4", vec![way]));
    std::iter::once(plain).chain(vectors).collect()
}

/// Returns the baseline: one invocation per 8 elements.
fn plain(call: &OpCall) -> Dispatch {
    let entry = match function(call) {
        Binary::Add => "add",
        Binary::Mul => "mul",
    };
    one(call, entry, 512)
}

/// Returns the kernel with one invocation per 4 vectors of 4; `None` if a vector would have
/// elements of two repetitions of `b`.
fn vectors(call: &OpCall) -> Option<Dispatch> {
    let (count, period) = (call.output_len(0), call.input_len(1));
    let entry = match (function(call), period) {
        (Binary::Add, 1) => "add_value4",
        (Binary::Mul, 1) => "mul_value4",
        (Binary::Add, _) => "add4",
        (Binary::Mul, _) => "mul4",
    };
    let fits = count.is_multiple_of(4) && (period == 1 || period.is_multiple_of(4));
    fits.then(|| one(call, entry, 1024))
}

/// Returns the dispatch of an entry point whose workgroups process `size` elements each.
fn one(call: &OpCall, entry: &'static str, size: u32) -> Dispatch {
    let (count, period) = (call.output_len(0), call.input_len(1));
    let strides = [64 % period, 64 % (period / 4).max(1)];
    let params = [count, period, strides[0], strides[1]];
    Dispatch {
        shader: Shader::new("binary", entry),
        operands: vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
        params: params.map(|word| word as u32).to_vec(),
        groups: grid(count, size),
    }
}

/// Returns the cost: one FLOP per element.
pub fn cost(call: &OpCall) -> Cost {
    Cost::elementwise(call, 1.0)
}

fn function(call: &OpCall) -> Binary {
    match call.op {
        Op::Binary(function) => *function,
        other => panic!("{other} is not a function of two tensors"),
    }
}

/// See [`Twin::probes`]. The second operand equals the first one, is one row that repeats, or one
/// value.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let is_value = inputs[1].iter().product::<usize>() == 1;
    let operands = |[rows, width]: [usize; 2]| {
        let first = vec![rows, width];
        let row = || if is_value { Vec::new() } else { vec![width] };
        let second = if inputs[0] == inputs[1] { first.clone() } else { row() };
        vec![first, second]
    };
    calls(op, [[9, 67], [67, 67], [9, 68], [67, 68]].map(operands))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let x = vec![N, C];
    let mut calls = Vec::new();
    for function in [Binary::Add, Binary::Mul] {
        calls.push((Op::Binary(function), vec![x.clone(); 2]));
        calls.push((Op::Binary(function), vec![x.clone(), vec![C]]));
        calls.push((Op::Binary(function), vec![x.clone(), vec![]]));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Shape;
    use crate::kernels::harness::InputFill;
    use crate::kernels::testing::check;

    fn check_both(a: Shape, b: Shape, rows: usize) {
        for function in [Binary::Add, Binary::Mul] {
            let inputs = [(a.clone(), InputFill::Normal), (b.clone(), InputFill::Scaled(2.0, 0.5))];
            check(Op::Binary(function), &inputs, rows);
        }
    }

    #[test]
    fn equal_shapes_combine_elementwise() {
        for rows in 1..=7 {
            let shape = Shape::batched(&[3, 5]);
            check_both(shape.clone(), shape, rows);
        }
        check_both(Shape::fixed(&[130, 257]), Shape::fixed(&[130, 257]), 1);
    }

    #[test]
    fn suffixes_repeat_over_leading_dimensions() {
        for rows in [1, 2, 7] {
            check_both(Shape::batched(&[1, 3, 65]), Shape::fixed(&[65]), rows);
            check_both(Shape::batched(&[1, 3, 65]), Shape::fixed(&[3, 65]), rows);
            check_both(Shape::batched(&[11, 2]), Shape::fixed(&[2]), rows);
            check_both(Shape::batched(&[37]), Shape::fixed(&[]), rows);
        }
    }

    /// Rows of fewer, as many and more vectors than a workgroup strides over, and single values.
    #[test]
    fn vectors_of_four_agree_everywhere() {
        for width in [4, 12, 256, 260, 1028] {
            check_both(Shape::batched(&[5, width]), Shape::fixed(&[width]), 3);
            check_both(Shape::batched(&[5, width]), Shape::batched(&[5, width]), 3);
            check_both(Shape::batched(&[5, width]), Shape::fixed(&[]), 3);
        }
        check_both(Shape::batched(&[4, 6]), Shape::fixed(&[6]), 3);
    }

    #[test]
    fn tasks_of_the_fast_version_start_at_a_period() {
        check_both(Shape::fixed(&[61, 701]), Shape::fixed(&[701]), 1);
        check_both(Shape::fixed(&[20_011, 3]), Shape::fixed(&[3]), 1);
    }
}
