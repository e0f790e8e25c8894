//! Elementwise functions of one tensor, and their gradients. Twin of `shaders/unary.wgsl`,
//! which has the formulas.

use std::f32::consts::FRAC_1_SQRT_2;

use pulp::Simd;
use rayon::prelude::*;

use crate::base::HostTensorView;
use crate::graph::{Op, Unary};
use crate::kernels::call_shapes::{C, N, calls};
use crate::kernels::dispatch::grid;
use crate::kernels::simd::{erf, exp, mul_add, tanh, vectorized};
use crate::kernels::twin::{no_forward, normal_inputs, short_loops};
use crate::kernels::{
    CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant,
};

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
    inputs: normal_inputs,
    forward: no_forward,
    probes,
    catalog,
};

/// Elements per rayon task of `fast`: enough to outweigh the scheduling overhead.
const TASK: usize = 16 * 1024;

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
                *y = if call.accumulate { *y + factor * *x } else { factor * *x };
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
        Unary::Scale(factor) => T::from_f64(f64::from(factor)) * x,
    }
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
        Unary::Scale(factor) => T::from_f64(f64::from(factor)),
    }
}

/// CPU kernel: parallel over tasks of `TASK` elements, each a vectorized loop.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let x = inputs[0].floats();
    let tasks = outputs[0].par_chunks_mut(TASK).zip(x.par_chunks(TASK));
    match call.op {
        Op::Unary(Unary::Scale(factor)) if call.accumulate => {
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
        Unary::Scale(factor) => scale(factor, x, y),
    }
}

/// Computes `dx = f'(x) dy` on the calling thread.
pub(super) fn gradients(function: Unary, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    match function {
        Unary::Relu => relu_grad(x, dy, dx),
        Unary::Gelu => gelu_grad(x, dy, dx),
        Unary::GeluTanh => gelu_tanh_grad(x, dy, dx),
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
    let named = |way: Dispatch| Variant::new(way.shader.entry, vec![way]);
    std::iter::once(plain(call)).chain(vectors).map(named).collect()
}

/// Returns the baseline: one invocation per 8 elements.
fn plain(call: &OpCall) -> Dispatch {
    let entry = match function(call) {
        (Unary::Relu, false) => "relu",
        (Unary::Relu, true) => "relu_grad",
        (Unary::Gelu, false) => "gelu",
        (Unary::Gelu, true) => "gelu_grad",
        (Unary::GeluTanh, false) => "gelutanh",
        (Unary::GeluTanh, true) => "gelutanh_grad",
        (Unary::Scale(_), _) => "scale",
    };
    one(call, entry, 512)
}

/// Returns the kernel with one invocation per 4 vectors of 4.
fn vectors(call: &OpCall) -> Dispatch {
    let entry = match function(call) {
        (Unary::Relu, false) => "relu4",
        (Unary::Relu, true) => "relu_grad4",
        (Unary::Gelu, false) => "gelu4",
        (Unary::Gelu, true) => "gelu_grad4",
        (Unary::GeluTanh, false) => "gelutanh4",
        (Unary::GeluTanh, true) => "gelutanh_grad4",
        (Unary::Scale(_), _) => "scale4",
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
    let operands = match gradient {
        false => vec![Operand::Input(0), Operand::Output(0)],
        true => vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
    };
    let count = call.output_len(0);
    Dispatch {
        shader: Shader::new("unary", entry),
        operands,
        params: vec![count as u32, factor.to_bits(), u32::from(call.accumulate)],
        groups: grid(count, size),
    }
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

/// Returns the FLOPs per element: about 20 for a GELU and for every derivative.
pub(super) fn flops(function: Unary, gradient: bool) -> f64 {
    if gradient || matches!(function, Unary::Gelu | Unary::GeluTanh) { 20.0 } else { 1.0 }
}

/// Element counts of probes: two that are not multiples of four, and two that are.
const ELEMENTS: [usize; 4] = [1073, 1031, 1076, 1028];

/// See [`Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    calls(op, ELEMENTS.map(|count| vec![vec![count]; inputs.len()]))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let x = vec![N, C];
    let mut calls = vec![(Op::Unary(Unary::Scale(0.5)), vec![x.clone()])];
    for function in [Unary::Relu, Unary::Gelu, Unary::GeluTanh] {
        calls.push((Op::Unary(function), vec![x.clone()]));
        calls.push((Op::UnaryGrad(function), vec![x.clone(); 2]));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Shape;
    use crate::kernels::harness::InputFill;
    use crate::kernels::testing::check;

    #[test]
    fn functions_and_slopes_agree_everywhere() {
        agree(37);
    }

    #[test]
    fn vectors_of_four_agree_everywhere() {
        agree(300);
    }

    fn agree(per_row: usize) {
        let x = (Shape::batched(&[1, per_row]), InputFill::Scaled(3.0, 0.0));
        for function in [Unary::Relu, Unary::Gelu, Unary::GeluTanh, Unary::Scale(-1.5)] {
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
        for function in [Unary::Gelu, Unary::GeluTanh] {
            check(Op::Unary(function), std::slice::from_ref(&x), 2);
            check(Op::UnaryGrad(function), &[x.clone(), x.clone()], 2);
        }
    }
}
