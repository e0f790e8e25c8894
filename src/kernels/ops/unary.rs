//! Elementwise functions of one tensor, and their gradients. Twin of `shaders/unary.wgsl`,
//! which has the formulas.

use std::f32::consts::FRAC_1_SQRT_2;

use pulp::Simd;
use rayon::prelude::*;

use super::epilogue;
use crate::call_shapes::{C, N, calls};
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::harness::InputFill;
use crate::simd::{erf, exp, ln, mul_add, tanh, vectorized};
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
                *y = value(*function, *x);
            }
        }
        Op::UnaryGrad(function) => {
            for ((dx, x), dy) in outputs[0].iter_mut().zip(x).zip(inputs[1].floats()) {
                *dx = gradient(*function, *x, *dy);
            }
        }
        other => panic!("{other} is not a unary function"),
    }
}

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

/// Returns `f(x)`.
pub(super) fn value<T: Float>(function: Unary, x: T) -> T {
    let half = T::from_f64(0.5);
    match function {
        // False for NaN, which `max` would replace.
        Unary::Relu if x <= T::zero() => T::zero(),
        Unary::Relu => x,
        Unary::Gelu => half * x * (T::one() + (x * T::from_f64(0.5f64.sqrt())).erf()),
        Unary::GeluTanh => {
            let u = T::from_f64(SQRT_2_OVER_PI) * (x + T::from_f64(CUBIC) * x * x * x);
            half * x * (T::one() + u.tanh())
        }
        Unary::Sigmoid => sigmoid(x),
        Unary::Tanh => x.tanh(),
        Unary::Silu => x * sigmoid(x),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Scale(factor) => T::from_f64(f64::from(factor)) * x,
    }
}

fn sigmoid<T: Float>(x: T) -> T {
    let e = (-x.abs()).exp();
    if x >= T::zero() { (T::one() + e).recip() } else { e / (T::one() + e) }
}

/// Returns the derivative of the sigmoid, which is that of both `x` and `-x`.
fn sigmoid_slope<T: Float>(x: T) -> T {
    let e = (-x.abs()).exp();
    e / ((T::one() + e) * (T::one() + e))
}

/// Returns `f'(x) dy`. The gradient of an inactive ReLU is 0, whatever `dy` is.
pub(super) fn gradient<T: Float>(function: Unary, x: T, dy: T) -> T {
    match function {
        Unary::Relu if x <= T::zero() => T::zero(),
        Unary::Relu if x.is_nan() => x,
        Unary::Relu => dy,
        _ => derivative(function, x) * dy,
    }
}

/// Returns `x` limited to `-limit ..= limit`; NaN for NaN.
fn bounded<T: Float>(x: T, limit: f64) -> T {
    let limit = T::from_f64(limit);
    if x > limit {
        limit
    } else if x < -limit {
        -limit
    } else {
        x
    }
}

/// Returns `f'(x)` of a function that is not a ReLU. Far from zero, where it is constant and its
/// factors overflow, it is that of a closer argument.
fn derivative<T: Float>(function: Unary, x: T) -> T {
    let half = T::from_f64(0.5);
    match function {
        Unary::Relu => gradient(function, x, T::one()),
        Unary::Gelu => {
            let x = bounded(x, 40.0);
            let distribution = half * (T::one() + (x * T::from_f64(0.5f64.sqrt())).erf());
            let density = T::from_f64(1.0 / std::f64::consts::TAU.sqrt()) * (-half * x * x).exp();
            distribution + x * density
        }
        Unary::GeluTanh => {
            let x = bounded(x, 20.0);
            let th = (T::from_f64(SQRT_2_OVER_PI) * (x + T::from_f64(CUBIC) * x * x * x)).tanh();
            let inner = T::from_f64(SQRT_2_OVER_PI) * (T::one() + T::from_f64(3.0 * CUBIC) * x * x);
            half * (T::one() + th) + half * x * (T::one() - th * th) * inner
        }
        Unary::Sigmoid => sigmoid_slope(x),
        Unary::Tanh => T::from_f64(4.0) * sigmoid_slope(x + x),
        Unary::Silu => {
            let x = bounded(x, 100.0);
            sigmoid(x) + x * sigmoid_slope(x)
        }
        Unary::Exp => x.exp(),
        Unary::Log => x.recip(),
        Unary::Sqrt => half / x.sqrt(),
        Unary::Scale(factor) => T::from_f64(f64::from(factor)),
    }
}

/// CPU kernel: parallel over tasks of `TASK` elements, each a vectorized loop.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let x = inputs[0].floats();
    let tasks = outputs[0].par_chunks_mut(TASK).zip(x.par_chunks(TASK));
    match call.op {
        Op::Unary(Unary::Scale(factor)) if call.accumulates() => {
            tasks.for_each(|(y, x)| add_scaled(*factor, x, y));
        }
        Op::Unary(function) => tasks.for_each(|(y, x)| values(*function, x, y)),
        Op::UnaryGrad(function) => {
            let tasks = tasks.zip(inputs[1].floats().par_chunks(TASK));
            tasks.for_each(|((dx, x), dy)| gradients(*function, x, dy, dx));
        }
        other => panic!("{other} is not a unary function"),
    }
}

/// Computes `y = f(x)` on the calling thread.
pub(super) fn values(function: Unary, x: &[f32], y: &mut [f32]) {
    match function {
        Unary::Relu => relu(x, y),
        Unary::Gelu => gelu(x, y),
        Unary::GeluTanh => gelu_tanh(x, y),
        Unary::Sigmoid => sigmoids(x, y),
        Unary::Tanh => tanhs(x, y),
        Unary::Silu => silu(x, y),
        Unary::Exp => exps(x, y),
        Unary::Log => lns(x, y),
        Unary::Sqrt => sqrts(x, y),
        Unary::Scale(factor) => scale(factor, x, y),
    }
}

/// Computes `dx = f'(x) dy` on the calling thread.
pub(super) fn gradients(function: Unary, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    match function {
        Unary::Relu => relu_grad(x, dy, dx),
        Unary::Gelu => gelu_grad(x, dy, dx),
        Unary::GeluTanh => gelu_tanh_grad(x, dy, dx),
        Unary::Sigmoid => sigmoid_grad(x, dy, dx),
        Unary::Tanh => tanh_grad(x, dy, dx),
        Unary::Silu => silu_grad(x, dy, dx),
        Unary::Exp => exp_grad(x, dy, dx),
        Unary::Log => ln_grad(x, dy, dx),
        Unary::Sqrt => sqrt_grad(x, dy, dx),
        Unary::Scale(factor) => scale(factor, dy, dx),
    }
}

/// Computes `y = f(x)`.
#[inline(always)]
fn map(x: &[f32], y: &mut [f32], f: impl Fn(f32) -> f32) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = f(*x);
    }
}

/// Computes `dx = f'(x) dy`.
#[inline(always)]
fn map_grad(x: &[f32], dy: &[f32], dx: &mut [f32], slope: impl Fn(f32) -> f32) {
    for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
        *dx = slope(*x) * *dy;
    }
}

/// Returns the argument of the tanh: `sqrt(2/pi) (x + 0.044715 x^3)`.
#[inline(always)]
fn inner<S: Simd>(x: f32) -> f32 {
    const LINEAR: f32 = SQRT_2_OVER_PI as f32;
    x * mul_add::<S>(x * x, LINEAR * CUBIC as f32, LINEAR)
}

/// Returns the sigmoid and its derivative.
#[inline(always)]
fn sigmoid_and_slope<S: Simd>(x: f32) -> (f32, f32) {
    // What is left of `exp` beyond 87 would not vanish in a product with a large argument.
    let e = if x.abs() > 87.0 { 0.0 } else { exp::<S>(-x.abs()) };
    let larger = 1.0 / (1.0 + e);
    (if x >= 0.0 { larger } else { e * larger }, e * larger * larger)
}

/// Returns `e^x`, infinite where it overflows.
#[inline(always)]
fn whole_exp<S: Simd>(x: f32) -> f32 {
    // The factors do not overflow where the product does, so that they need no limits.
    let root = exp::<S>(0.5 * x);
    root * root
}

vectorized! {
    fn relu<S>(x: &[f32], y: &mut [f32]) {
        // False for NaN, which `max` would replace.
        map(x, y, |x| if x <= 0.0 { 0.0 } else { x });
    }

    fn relu_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
            let active = if *x <= 0.0 { 0.0 } else { *dy };
            *dx = if x.is_nan() { *x } else { active };
        }
    }

    fn gelu<S>(x: &[f32], y: &mut [f32]) {
        map(x, y, |x| 0.5 * x * (1.0 + erf::<S>(x * FRAC_1_SQRT_2)));
    }

    fn gelu_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        const DENSITY: f32 = 0.398_942_3; // 1/sqrt(2 pi)
        map_grad(x, dy, dx, |x| {
            // Beyond 20 the density is 0 in f32.
            let x = x.clamp(-20.0, 20.0);
            let distribution = 0.5 * (1.0 + erf::<S>(x * FRAC_1_SQRT_2));
            mul_add::<S>(x * DENSITY, exp::<S>(-0.5 * x * x), distribution)
        });
    }

    fn gelu_tanh<S>(x: &[f32], y: &mut [f32]) {
        map(x, y, |x| 0.5 * x * (1.0 + tanh::<S>(inner::<S>(x))));
    }

    fn gelu_tanh_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        const LINEAR: f32 = SQRT_2_OVER_PI as f32;
        map_grad(x, dy, dx, |x| {
            // Beyond 10 the tanh is 1 in f32 and the slope 0.
            let x = x.clamp(-10.0, 10.0);
            let th = tanh::<S>(inner::<S>(x));
            let slope = mul_add::<S>(x * x, 3.0 * LINEAR * CUBIC as f32, LINEAR);
            mul_add::<S>(0.5 * x * (1.0 - th * th), slope, 0.5 * (1.0 + th))
        });
    }

    fn sigmoids<S>(x: &[f32], y: &mut [f32]) {
        map(x, y, |x| sigmoid_and_slope::<S>(x).0);
    }

    fn sigmoid_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        map_grad(x, dy, dx, |x| sigmoid_and_slope::<S>(x).1);
    }

    fn tanhs<S>(x: &[f32], y: &mut [f32]) {
        map(x, y, |x| tanh::<S>(x));
    }

    fn tanh_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        map_grad(x, dy, dx, |x| 4.0 * sigmoid_and_slope::<S>(2.0 * x).1);
    }

    fn silu<S>(x: &[f32], y: &mut [f32]) {
        map(x, y, |x| x * sigmoid_and_slope::<S>(x).0);
    }

    fn silu_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        map_grad(x, dy, dx, |x| {
            // Beyond 80 the slope of the sigmoid is less than 1e-34.
            let x = x.clamp(-80.0, 80.0);
            let (value, slope) = sigmoid_and_slope::<S>(x);
            mul_add::<S>(x, slope, value)
        });
    }

    fn exps<S>(x: &[f32], y: &mut [f32]) {
        map(x, y, |x| whole_exp::<S>(x));
    }

    fn exp_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        map_grad(x, dy, dx, |x| whole_exp::<S>(x));
    }

    fn lns<S>(x: &[f32], y: &mut [f32]) {
        map(x, y, |x| ln::<S>(x));
    }

    fn ln_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        map_grad(x, dy, dx, |x| 1.0 / x);
    }

    fn sqrts<S>(x: &[f32], y: &mut [f32]) {
        map(x, y, |x| x.sqrt());
    }

    fn sqrt_grad<S>(x: &[f32], dy: &[f32], dx: &mut [f32]) {
        map_grad(x, dy, dx, |x| 0.5 / x.sqrt());
    }

    fn scale<S>(factor: f32, x: &[f32], y: &mut [f32]) {
        map(x, y, |x| factor * x);
    }

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
    let vectors = call.output_len(0).is_multiple_of(4).then(|| vectors(call));
    let named = |way: Dispatch| {
        let lanes = if way.shader.entry.ends_with('4') { "4" } else { "" };
        Variant::new(format!("{}{lanes}", name(call)), vec![way])
    };
    std::iter::once(plain(call)).chain(vectors).map(named).collect()
}

/// Returns the baseline: one invocation per 8 elements.
fn plain(call: &OpCall) -> Dispatch {
    let entry = match function(call) {
        (Unary::Scale(_), _) => "scale",
        (_, false) => "values",
        (_, true) => "gradients",
    };
    one(call, entry, 512)
}

/// Returns the kernel with one invocation per 4 vectors of 4.
fn vectors(call: &OpCall) -> Dispatch {
    let entry = match function(call) {
        (Unary::Scale(_), _) => "scale4",
        (_, false) => "values4",
        (_, true) => "gradients4",
    };
    one(call, entry, 1024)
}

/// Returns the function, and true if the call computes its gradient.
fn function(call: &OpCall) -> (Unary, bool) {
    match call.op {
        Op::Unary(function) => (*function, false),
        Op::UnaryGrad(function) => (*function, true),
        other => panic!("{other} is not a unary function"),
    }
}

/// Returns the dispatch of an entry point whose workgroups process `size` elements each.
fn one(call: &OpCall, entry: &'static str, size: u32) -> Dispatch {
    let (function, gradient) = function(call);
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

/// Returns the name of the function, of a gradient with `_grad`.
fn name(call: &OpCall) -> String {
    match function(call) {
        (Unary::Scale(_), _) => "scale".into(),
        (function, false) => epilogue::word(function).into(),
        (function, true) => format!("{}_grad", epilogue::word(function)),
    }
}

/// Returns the WGSL of the function and its gradient.
fn text(function: Unary) -> String {
    if let Unary::Scale(_) = function {
        return "fn f(x: f32) -> f32 { return x; }\n\
            fn grad(x: f32, dy: f32) -> f32 { return dy; }\n"
            .into();
    }
    let word = epilogue::word(function);
    format!(
        "fn f(x: f32) -> f32 {{ return {word}_of(x); }}\n\
         fn grad(x: f32, dy: f32) -> f32 {{ return {word}_grad_of(x, dy); }}\n"
    )
}

/// Returns the cost: few FLOPs per element. The kernels are bound by memory bandwidth.
pub fn cost(call: &OpCall) -> Cost {
    let flops = match call.op {
        Op::Unary(function) => flops(*function, false),
        Op::UnaryGrad(function) => flops(*function, true),
        other => panic!("{other} is not a unary function"),
    };
    Cost::elementwise(call, flops)
}

/// Returns the FLOPs per element: about 20 for a GELU and the like, and for every derivative.
pub(super) fn flops(function: Unary, gradient: bool) -> f64 {
    if gradient || !matches!(function, Unary::Relu | Unary::Sqrt | Unary::Scale(_)) {
        20.0
    } else {
        1.0
    }
}

/// See [`Twin::inputs`]: positive ones for functions that are not defined below 0.
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let spec = InputSpec::normal(inputs);
    match op {
        Op::Unary(Unary::Log | Unary::Sqrt) | Op::UnaryGrad(Unary::Log | Unary::Sqrt) => {
            spec.with(0, POSITIVE)
        }
        _ => spec,
    }
}

/// Values for functions that are not defined below 0.
const POSITIVE: InputFill = InputFill::Uniform(0.05, 4.0);

/// Element counts of probes: two that are not multiples of four, and two that are.
const ELEMENTS: [usize; 4] = [1073, 1031, 1076, 1028];

/// See [`Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    calls(op, ELEMENTS.map(|count| vec![vec![count]; inputs.len()]))
}

/// All functions but the scale, which has an attribute.
pub(super) const FUNCTIONS: [Unary; 9] = [
    Unary::Relu,
    Unary::Gelu,
    Unary::GeluTanh,
    Unary::Sigmoid,
    Unary::Tanh,
    Unary::Silu,
    Unary::Exp,
    Unary::Log,
    Unary::Sqrt,
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
            let is_positive = matches!(function, Unary::Log | Unary::Sqrt);
            let fill = if is_positive { POSITIVE } else { InputFill::Scaled(3.0, 0.0) };
            let x = (Shape::batched(&[1, per_row]), fill);
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
