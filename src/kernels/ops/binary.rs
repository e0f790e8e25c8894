//! Elementwise functions of two tensors, the second a suffix of the first, and their gradients.
//! [`super::elements`] has the formulas. Twin of `shaders/binary.wgsl`.

use std::borrow::Cow;

use rayon::prelude::*;

use super::dispatch_parts::{all_tensors, as_words};
use super::elements::{self, Called};
use crate::call_shapes::{C, N, calls};
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::twin::{IndependentAxis, InputSpec, no_forward, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::{Binary, BinarySide, Op};

/// Twin of [`Op::Binary`] and [`Op::BinaryGrad`].
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
    inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Minimum length of an inner loop of `fast`: shorter loops do not fill vector registers.
const LOOP: usize = 256;

/// Reference: `y[i] = f(a[i], b[i mod b's length])`, or a gradient.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let a = inputs[0].floats();
    let b = inputs[1].floats();
    let (function, by) = function(call.op);
    for (i, y) in outputs[0].iter_mut().enumerate() {
        let a = a[i];
        let b = b[i % b.len()];
        *y = match by {
            None => elements::value_of_two(function, a, b),
            Some(by) => elements::gradient_of_two(function, by, [a, b, inputs[2].floats()[i]]),
        };
    }
}

/// CPU kernel: parallel and without an integer division. `b` is repeated until inner loops are
/// long enough, and task sizes are multiples of its repeated length.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let a = inputs[0].floats();
    let b = inputs[1].floats();
    let (function, by) = function(call.op);
    if let Some(by) = by {
        return gradients(function, by, [a, b, inputs[2].floats()], outputs[0]);
    }
    if a.is_empty() {
        return;
    }
    if a.len() == b.len() {
        let tasks = (outputs[0].par_chunks_mut(TASK), a.par_chunks(TASK), b.par_chunks(TASK));
        tasks.into_par_iter().for_each(|(y, a, b)| elements::combine(function, y, a, b));
        return;
    }
    let period = repeated(b);
    let task = period.len() * TASK.div_ceil(period.len());
    let tasks = (outputs[0].par_chunks_mut(task), a.par_chunks(task));
    tasks.into_par_iter().for_each(|(y, a)| {
        for (y, a) in y.chunks_mut(period.len()).zip(a.chunks(period.len())) {
            elements::combine(function, y, a, &period);
        }
    });
}

/// Computes a gradient from `[a, b, dy]` in the same way as [`fast`] a function.
fn gradients(function: Binary, by: BinarySide, [a, b, dy]: [&[f32]; 3], d: &mut [f32]) {
    let period = repeated(b);
    let task = period.len() * TASK.div_ceil(period.len().max(1));
    let tasks = (d.par_chunks_mut(task), a.par_chunks(task), dy.par_chunks(task));
    tasks.into_par_iter().for_each(|(d, a, dy)| {
        let whole = period.len();
        for ((d, a), dy) in d.chunks_mut(whole).zip(a.chunks(whole)).zip(dy.chunks(whole)) {
            elements::combine_gradients(function, by, [a, &period, dy], d);
        }
    });
}

/// Returns `b`, repeated if it is shorter than [`LOOP`].
pub(super) fn repeated(b: &[f32]) -> Cow<'_, [f32]> {
    if b.is_empty() || b.len() >= LOOP {
        return b.into();
    }
    b.repeat(LOOP.div_ceil(b.len())).into()
}

/// Static choice: vectors of 4 where lengths allow them.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    vec![vectors(call).unwrap_or_else(|| plain(call))]
}

fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let mut variants = vec![Variant::new("binary", vec![plain(call)])];
    if let Some(way) = vectors(call) {
        variants.push(Variant::new("binary4", vec![way]));
    }
    variants
}

/// Baseline: one invocation per 8 elements.
fn plain(call: &OpCall) -> Dispatch {
    let entry = if let Op::BinaryGrad { .. } = call.op { "gradients" } else { "each" };
    one(call, entry, 512)
}

/// Returns the kernel with one invocation per 4 vectors of 4; `None` if a vector would have
/// elements of two repetitions of `b`.
fn vectors(call: &OpCall) -> Option<Dispatch> {
    let period = call.input_len(1);
    if !call.output_len(0).is_multiple_of(4) || (period != 1 && !period.is_multiple_of(4)) {
        return None;
    }
    let entry = match (call.op, period) {
        (Op::BinaryGrad { .. }, 1) => "gradients_value4",
        (Op::BinaryGrad { .. }, _) => "gradients4",
        (_, 1) => "value4",
        (..) => "each4",
    };
    Some(one(call, entry, 1024))
}

/// Dispatch of an entry point whose workgroups process `size` elements each.
fn one(call: &OpCall, entry: &'static str, size: u32) -> Dispatch {
    let count = call.output_len(0);
    let period = call.input_len(1);
    let [stride, stride4] = [64 % period, 64 % (period / 4).max(1)];
    Dispatch {
        shader: Shader::new("binary", entry).with_text(&text(call.op)),
        operands: all_tensors(call),
        params: as_words(&[count, period, stride, stride4]),
        groups: grid(count, size),
    }
}

/// WGSL of the function and of the gradient, of values and of vectors of 4.
fn text(op: &Op) -> String {
    let (function, by) = function(op);
    let by = by.unwrap_or(BinarySide::First);
    let [value, gradient] = [Called::Binary(function), Called::BinaryGrad(function, by)];
    format!(
        "{}fn f(a: f32, b: f32) -> f32 {{ return {}; }}\n\
         fn f4(a: vec4f, b: vec4f) -> vec4f {{ return {}; }}\n\
         fn grad(a: f32, b: f32, dy: f32) -> f32 {{ return {}; }}\n\
         fn grad4(a: vec4f, b: vec4f, dy: vec4f) -> vec4f {{ return {}; }}\n",
        elements::library(&[value, gradient]),
        value.call(&["a", "b"]),
        value.call4(&["a", "b"]),
        gradient.call(&["a", "b", "dy"]),
        gradient.call4(&["a", "b", "dy"])
    )
}

/// Returns the cost: one FLOP per element.
pub fn cost(call: &OpCall) -> Cost {
    Cost::elementwise(call, 1.0)
}

/// Function and side by which the op computes its gradient.
fn function(op: &Op) -> (Binary, Option<BinarySide>) {
    match *op {
        Op::Binary(function) => (function, None),
        Op::BinaryGrad { function, by } => (function, Some(by)),
        ref other => panic!("{other} is not a function of two tensors"),
    }
}

/// See [`Twin::independent_axes`]: the first axis, which `b` lacks if it repeats.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let is_broadcast = call.input_len(1) < call.input_len(0);
    IndependentAxis::leading(call, if is_broadcast { &[1] } else { &[] })
}

/// See [`Twin::probes`]. The second operand equals the first one, is one row that repeats, or one
/// value.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let mut sizes = Vec::new();
    for [rows, width] in [[9, 67], [67, 67], [9, 68], [67, 68]] {
        let first = vec![rows, width];
        let second = if inputs[0] == inputs[1] {
            first.clone()
        } else if inputs[1].iter().product::<usize>() == 1 {
            Vec::new()
        } else {
            vec![width]
        };
        let mut operands = vec![first.clone(), second];
        if let Op::BinaryGrad { .. } = op {
            operands.push(first);
        }
        sizes.push(operands);
    }
    calls(op, sizes)
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    elements::inputs_of(function(op).0.domain(), inputs)
}

/// Functions for which all kernel variants are tested; see `FUNCTIONS` in [`super::unary`].
const FUNCTIONS: [Binary; 5] =
    [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Maximum];

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let x = vec![N, C];
    let mut calls = Vec::new();
    for b in [x.clone(), vec![C], vec![]] {
        for function in FUNCTIONS {
            calls.push((Op::Binary(function), vec![x.clone(), b.clone()]));
        }
        let function = Binary::Maximum;
        for by in [BinarySide::First, BinarySide::Second] {
            let op = Op::BinaryGrad { function, by };
            calls.push((op, vec![x.clone(), b.clone(), x.clone()]));
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::InputFill;
    use crate::testing::{check, for_each_result};
    use potluck_core::{HostTensor, Shape};

    fn check_both(a: Shape, b: Shape, rows: usize) {
        let inputs = [(a.clone(), InputFill::Normal), (b, InputFill::Scaled(2.0, 0.5))];
        for function in FUNCTIONS {
            check(Op::Binary(function), &inputs, rows);
        }
        let [first, second] = inputs;
        let inputs = [first, second, (a, InputFill::Normal)];
        check(Op::BinaryGrad { function: Binary::Maximum, by: BinarySide::First }, &inputs, rows);
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

    /// Each side has half of the gradient where both are equal, whatever comes back.
    #[test]
    fn ties_share_the_gradient() {
        let floats = |values: &[f64]| (Shape::fixed(&[4]), HostTensor::Float(values.to_vec()));
        let a = floats(&[1.0, 2.0, -0.0, 3.0]);
        let (b, dy) = (floats(&[1.0, 1.0, 0.0, 4.0]), floats(&[3.0, 5.0, 7.0, f64::INFINITY]));
        let op = Op::BinaryGrad { function: Binary::Maximum, by: BinarySide::First };
        for_each_result(&op, &[a, b, dy], 1, |who, da| {
            assert_eq!(da[0], [1.5, 5.0, 3.5, 0.0], "by {who}");
        });
    }
}
