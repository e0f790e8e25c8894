//! Elementwise functions of one tensor, and their gradients. [`super::elements`] has the formulas.
//! Twin of `shaders/unary.wgsl`.

use rayon::prelude::*;

use super::elements::{self, Called};
use crate::call_shapes::{C, N, calls};
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::simd::{mul_add, vectorized};
use crate::twin::{InputSpec, leading_axis, no_forward, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::{Op, Unary};

/// Twin of [`Op::Unary`] and [`Op::UnaryGrad`].
pub static TWIN: Twin = Twin {
    name: "unary",
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
    independent_axes: leading_axis,
    probes,
    catalog,
};

/// Reference: `y = f(x)`, or `dx = f'(x) dy`.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let x = inputs[0].floats();
    match call.op {
        Op::Unary(Unary::Scale(factor)) => {
            let factor = T::from_f64(f64::from(*factor));
            for (y, x) in outputs[0].iter_mut().zip(x) {
                *y = if call.accumulates() { *y + factor * *x } else { factor * *x };
            }
        }
        Op::Unary(function) => {
            for (y, x) in outputs[0].iter_mut().zip(x) {
                *y = elements::value(*function, *x);
            }
        }
        Op::UnaryGrad(function) => {
            for ((dx, x), dy) in outputs[0].iter_mut().zip(x).zip(inputs[1].floats()) {
                *dx = elements::gradient(*function, *x, *dy);
            }
        }
        other => panic!("{other} is not a unary function"),
    }
}

/// CPU kernel: parallel over tasks of `TASK` elements, each a vectorized loop.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let x = inputs[0].floats().par_chunks(TASK);
    let result = outputs[0].par_chunks_mut(TASK);
    match call.op {
        Op::Unary(Unary::Scale(factor)) if call.accumulates() => {
            (x, result).into_par_iter().for_each(|(x, y)| add_scaled(*factor, x, y));
        }
        Op::Unary(function) => {
            (x, result).into_par_iter().for_each(|(x, y)| elements::values(*function, x, y));
        }
        Op::UnaryGrad(function) => {
            let tasks = (x, inputs[1].floats().par_chunks(TASK), result).into_par_iter();
            tasks.for_each(|(x, dy, dx)| elements::gradients(*function, x, dy, dx));
        }
        other => panic!("{other} is not a unary function"),
    }
}

vectorized! {
    fn add_scaled<S>(factor: f32, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = mul_add::<S>(factor, *x, *y);
        }
    }
}

/// Static choice: vectors of 4 if the number of elements is a multiple of 4. With them, scaling
/// took a fifth of the time of one invocation per element on SwiftShader, and half of it on
/// llvmpipe.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    let whole = call.output_len(0).is_multiple_of(4);
    vec![if whole { vectors(call) } else { plain(call) }]
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let name = name(call);
    let mut variants = vec![Variant::new(name.clone(), vec![plain(call)])];
    if call.output_len(0).is_multiple_of(4) {
        variants.push(Variant::new(format!("{name}4"), vec![vectors(call)]));
    }
    variants
}

/// Baseline: one invocation per 8 elements.
fn plain(call: &OpCall) -> Dispatch {
    let entry = match function(call.op) {
        (Unary::Scale(_), _) => "scale",
        (_, false) => "values",
        (_, true) => "gradients",
    };
    one(call, entry, 512)
}

/// Kernel with one invocation per 4 vectors of 4.
fn vectors(call: &OpCall) -> Dispatch {
    let entry = match function(call.op) {
        (Unary::Scale(_), _) => "scale4",
        (_, false) => "values4",
        (_, true) => "gradients4",
    };
    one(call, entry, 1024)
}

/// Function, and true if the op computes its gradient.
fn function(op: &Op) -> (Unary, bool) {
    match op {
        Op::Unary(function) => (*function, false),
        Op::UnaryGrad(function) => (*function, true),
        other => panic!("{other} is not a unary function"),
    }
}

/// Dispatch of an entry point whose workgroups process `size` elements each.
fn one(call: &OpCall, entry: &'static str, size: u32) -> Dispatch {
    let (function, gradient) = function(call.op);
    let factor = if let Unary::Scale(factor) = function { factor } else { 1.0 };
    let operands = if gradient {
        vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)]
    } else {
        vec![Operand::Input(0), Operand::Output(0)]
    };
    let count = call.output_len(0);
    Dispatch {
        shader: Shader::new("unary", entry).with_text(&text(function)),
        operands,
        params: vec![count as u32, factor.to_bits(), u32::from(call.accumulates())],
        groups: grid(count, size),
    }
}

/// Name of the function, with `_grad` for a gradient.
fn name(call: &OpCall) -> String {
    match function(call.op) {
        (Unary::Scale(_), _) => "scale".into(),
        (function, false) => function.name().into(),
        (function, true) => format!("{}_grad", function.name()),
    }
}

fn text(function: Unary) -> String {
    if let Unary::Scale(_) = function {
        return "fn f(x: f32) -> f32 { return x; }\n\
            fn grad(x: f32, dy: f32) -> f32 { return dy; }\n"
            .into();
    }
    let [value, gradient] = [Called::Unary(function), Called::UnaryGrad(function)];
    format!(
        "{}fn f(x: f32) -> f32 {{ return {}; }}\n\
         fn grad(x: f32, dy: f32) -> f32 {{ return {}; }}\n",
        elements::library(&[value, gradient]),
        value.call(&["x"]),
        gradient.call(&["x", "dy"])
    )
}

/// Returns the cost: few FLOPs per element. The kernels are bound by memory bandwidth.
pub fn cost(call: &OpCall) -> Cost {
    let (function, is_gradient) = function(call.op);
    Cost::elementwise(call, flops(function, is_gradient))
}

/// FLOPs per element: about 20 for a GELU and the like, and for every derivative.
pub(super) fn flops(function: Unary, gradient: bool) -> f64 {
    let is_one_instruction =
        matches!(function, Unary::Relu | Unary::Sqrt | Unary::Scale(_) | Unary::Offset(_));
    if gradient || !is_one_instruction { 20.0 } else { 1.0 }
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    elements::inputs_of(function(op).0.domain(), inputs)
}

/// Element counts of probes: two that are not multiples of four, and two that are.
const ELEMENTS: [usize; 4] = [1073, 1031, 1076, 1028];

/// See [`Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    calls(op, ELEMENTS.map(|count| vec![vec![count]; inputs.len()]))
}

/// Functions for which all kernel variants are tested: the functions of the models, and one with a
/// constant. The kernels of other functions differ in the formula only, and all formulas are tested
/// together.
const FUNCTIONS: [Unary; 10] = [
    Unary::Relu,
    Unary::Gelu,
    Unary::GeluTanh,
    Unary::Sigmoid,
    Unary::Tanh,
    Unary::Silu,
    Unary::Exp,
    Unary::Log,
    Unary::Sqrt,
    Unary::LeakyRelu(0.1),
];

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let x = vec![N, C];
    let mut calls = vec![(Op::Unary(Unary::Scale(0.5)), vec![x.clone()])];
    for function in FUNCTIONS {
        calls.push((Op::Unary(function), vec![x.clone()]));
        calls.push((Op::UnaryGrad(function), vec![x.clone(); 2]));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::InputFill;
    use crate::ops::elements::fill_of;
    use crate::testing::{check, for_each_result};
    use potluck_core::{HostTensor, Shape};

    #[test]
    fn functions_and_slopes_agree_everywhere() {
        agree(37);
    }

    #[test]
    fn vectors_of_four_agree_everywhere() {
        agree(300);
    }

    fn agree(per_row: usize) {
        for function in FUNCTIONS.into_iter().chain([Unary::Scale(-1.5)]) {
            let x = (Shape::batched(&[1, per_row]), fill_of(function.domain()));
            check(Op::Unary(function), std::slice::from_ref(&x), 5);
            if !matches!(function, Unary::Scale(_)) {
                let dy = (Shape::batched(&[1, per_row]), InputFill::Normal);
                check(Op::UnaryGrad(function), &[x.clone(), dy], 5);
            }
        }
    }

    #[test]
    fn many_tasks_cover_all_elements() {
        let x = (Shape::batched(&[TASK / 2 + 1]), InputFill::Normal);
        check(Op::Unary(Unary::Scale(2.0)), std::slice::from_ref(&x), 5);
        check(Op::UnaryGrad(Unary::Relu), &[x.clone(), x], 5);
    }

    #[test]
    fn large_arguments_stay_finite() {
        let x = (Shape::batched(&[1, 64]), InputFill::Scaled(40.0, 0.0));
        for function in [Unary::Gelu, Unary::GeluTanh, Unary::Sigmoid, Unary::Tanh, Unary::Silu] {
            check(Op::Unary(function), std::slice::from_ref(&x), 2);
            check(Op::UnaryGrad(function), &[x.clone(), x.clone()], 2);
        }
    }

    /// Arguments at which exponentials overflow or vanish, and where sums of them would lose all
    /// digits.
    #[test]
    fn far_and_tiny_arguments_have_their_limits() {
        let x = [200.0, -200.0, 1e30, -1e30, 1e-4, -1e-4, 30.0, -30.0];
        let expected = |function: Unary| match function {
            Unary::Sigmoid => [1.0, 0.0, 1.0, 0.0, 0.500025, 0.499975, 1.0, 9.357623e-14],
            Unary::Tanh => [1.0, -1.0, 1.0, -1.0, 1e-4, -1e-4, 1.0, -1.0],
            Unary::Silu => [200.0, 0.0, 1e30, 0.0, 5.00025e-5, -4.99975e-5, 30.0, -2.807287e-12],
            _ => {
                [f64::INFINITY, 0.0, f64::INFINITY, 0.0, 1.0001, 0.9999, 1.0686475e13, 9.357623e-14]
            }
        };
        let input = (Shape::fixed(&[8]), HostTensor::Float(x.to_vec()));
        for function in [Unary::Sigmoid, Unary::Tanh, Unary::Silu, Unary::Exp] {
            let expected = expected(function);
            for_each_result(&Op::Unary(function), std::slice::from_ref(&input), 1, |who, y| {
                for ((y, expected), x) in y[0].iter().zip(expected).zip(x) {
                    let (y, large) = (f64::from(*y), f64::from(f32::MAX));
                    // A driver may give the largest number in place of infinity.
                    let same = if expected > large {
                        y >= 0.99 * large
                    } else {
                        (y - expected).abs() <= 2e-6 * expected.abs() + 1e-30
                    };
                    assert!(same, "{function:?} of {x} by {who}: {y} for {expected}");
                }
            });
        }
    }

    /// Near 0, where a difference would lose all digits, at the ends of the domain, and far away.
    #[test]
    fn inverse_and_error_functions_are_exact_at_all_arguments() {
        let unit: [f32; 8] = [1e-6, -1e-6, 0.4999, -0.5001, 0.999_999, -0.999_999, 1.0, -1.0];
        let all = [1e-6, -1e-6, 0.4999, -0.5001, 3.0, -3.0, 1e7, f32::NEG_INFINITY];
        let above_one = [1.0, 1.000_001, 1.01, 2.0, 50.0, 1e5, 1e30, f32::INFINITY];
        let functions = [
            (Unary::Asin, unit),
            (Unary::Acos, unit),
            (Unary::Atanh, [1e-6, -1e-6, 0.4999, -0.5001, 0.999, -0.999, 0.0, 0.1]),
            (Unary::Asinh, all),
            (Unary::Acosh, above_one),
            (Unary::Erf, all),
            (Unary::Erfc, all),
        ];
        for (function, x) in functions {
            let wide = x.map(f64::from);
            let input = (Shape::fixed(&[8]), HostTensor::Float(wide.to_vec()));
            for_each_result(&Op::Unary(function), std::slice::from_ref(&input), 1, |who, y| {
                for (y, x) in y[0].iter().zip(wide) {
                    let (y, expected) = (f64::from(*y), elements::value(function, x));
                    let same = (y - expected).abs() <= 5e-6 * expected.abs() + 1e-30;
                    let same = same || (y.is_infinite() && y == expected);
                    assert!(same, "{function:?} of {x} by {who}: {y} for {expected}");
                }
            });
        }
        for exponent in [6.3, -2.5, 12.0, 32.0] {
            let x = [0.26, 3.617, 2.339, 3.3, 0.525, 0.01, 12.0, 1.000_1_f32].map(f64::from);
            let (function, input) = (Unary::Power(exponent), HostTensor::Float(x.to_vec()));
            let inputs = [(Shape::fixed(&[8]), input)];
            for_each_result(&Op::Unary(function), &inputs, 1, |who, y| {
                for (y, x) in y[0].iter().zip(x) {
                    let (y, expected) = (f64::from(*y), elements::value(function, x));
                    if !(1e-36..=1e36).contains(&expected) {
                        continue;
                    }
                    let error = (y - expected).abs() / expected;
                    let most = if exponent > 12.0 { 3e-6 } else { 1e-6 };
                    assert!(error <= most, "{function:?} of {x} by {who}: {y} for {expected}");
                }
            });
        }
        let below = [-1.5, -30.0, f64::NEG_INFINITY, f64::NAN];
        let beyond = [1.5, f64::INFINITY, -1.5, f64::NAN];
        for (function, x) in [(Unary::Asin, beyond), (Unary::Acos, beyond), (Unary::Acosh, below)] {
            let outside = [(Shape::fixed(&[4]), HostTensor::Float(x.to_vec()))];
            for_each_result(&Op::Unary(function), &outside, 1, |who, y| {
                assert!(y[0].iter().all(|y| y.is_nan()), "{function:?} by {who}: {y:?}");
            });
        }
    }

    #[test]
    fn outside_of_their_domain_functions_are_nan_and_infinite() {
        let x = vec![0.0, -0.0, -1.0, f64::NEG_INFINITY, f64::INFINITY];
        let input = (Shape::fixed(&[5]), HostTensor::Float(x));
        let ends = [(Unary::Log, f32::NEG_INFINITY), (Unary::Sqrt, 0.0)];
        for (function, at_zero) in ends {
            for_each_result(&Op::Unary(function), std::slice::from_ref(&input), 1, |who, y| {
                let y = &y[0];
                assert_eq!(y[..2], [at_zero; 2], "{function:?} by {who}");
                assert!(y[2].is_nan() && y[3].is_nan(), "{function:?} by {who}: {y:?}");
                assert_eq!(y[4], f32::INFINITY, "{function:?} by {who}");
            });
        }
    }
}
