//! AdamW (Adam with decoupled weight decay) over a range of a bucket. Twin of
//! `shaders/adamw.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::adamw_bf16;
use super::dispatch_parts::{as_words, bucket_operands};
use super::update_parts::parts_of;
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::simd::vectorized;
use crate::{Dispatch, Float, Shader, UpdateTwin};
use potluck_graph::{Update, UpdateRange};

/// Twin of [`Update::AdamW`].
pub static TWIN: UpdateTwin = UpdateTwin {
    name: "adamw",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    flops,
    probe,
    catalog,
};

/// Coefficients of the formulas.
#[derive(Clone, Copy)]
struct Numbers {
    /// Factor of the gradients.
    scale: f64,
    /// `lr * weight_decay`
    decay: f64,
    beta1: f64,
    beta2: f64,
    /// `lr / correction1`
    rate: f64,
    correction2: f64,
    eps: f64,
}

impl Numbers {
    fn new(update: &Update, range: &UpdateRange) -> Self {
        let Update::AdamW { lr, beta1, beta2, eps, weight_decay, correction1, correction2 } =
            *update
        else {
            panic!("{update:?} is not AdamW")
        };
        let lr = f64::from(lr);
        Self {
            scale: range.gradient_scale.into(),
            decay: lr * f64::from(weight_decay),
            beta1: beta1.into(),
            beta2: beta2.into(),
            rate: lr / f64::from(correction1),
            correction2: correction2.into(),
            eps: eps.into(),
        }
    }
}

/// Reference: updates elements `start .. start + length` of a bucket's `parameters`, and of its
/// two `moments`: the running averages of gradients and of their squares. All slices are whole
/// buckets.
pub fn reference<T: Float>(
    update: &Update,
    range: &UpdateRange,
    parameters: &mut [T],
    gradients: &[T],
    moments: &mut [&mut [T]],
) {
    let numbers = Numbers::new(update, range);
    let [m, v] = moments else { panic!("AdamW keeps two moments, not {}", moments.len()) };
    let [beta1, beta2] = [numbers.beta1, numbers.beta2].map(T::from_f64);
    for i in range.start..range.start + range.length {
        let g = T::from_f64(numbers.scale) * gradients[i];
        if i < range.decay_end {
            parameters[i] -= T::from_f64(numbers.decay) * parameters[i];
        }
        m[i] = beta1 * m[i] + T::from_f64(1.0 - numbers.beta1) * g;
        v[i] = beta2 * v[i] + T::from_f64(1.0 - numbers.beta2) * g * g;
        let deviation = (v[i] / T::from_f64(numbers.correction2)).sqrt() + T::from_f64(numbers.eps);
        parameters[i] -= T::from_f64(numbers.rate) * m[i] / deviation;
    }
}

/// CPU kernel: the reference in f32, in parallel.
pub fn fast(
    update: &Update,
    range: &UpdateRange,
    parameters: &mut [f32],
    gradients: &[f32],
    moments: &mut [&mut [f32]],
) {
    let numbers = Numbers::new(update, range);
    let [m, v] = moments else { panic!("AdamW keeps two moments, not {}", moments.len()) };
    for (part, decays) in parts_of(range, parameters) {
        let numbers = if decays { numbers } else { Numbers { decay: 0.0, ..numbers } };
        let parameters = parameters[part.clone()].par_chunks_mut(TASK);
        let gradients = gradients[part.clone()].par_chunks(TASK);
        let m = m[part.clone()].par_chunks_mut(TASK);
        let v = v[part].par_chunks_mut(TASK);
        let tasks = (parameters, gradients, m, v).into_par_iter();
        tasks.for_each(|(parameters, gradients, m, v)| {
            update_slice(numbers, parameters, gradients, m, v);
        });
    }
}

vectorized! {
    /// Updates one slice in a loop without branches.
    fn update_slice<S>(
        numbers: Numbers,
        parameters: &mut [f32],
        gradients: &[f32],
        m: &mut [f32],
        v: &mut [f32],
    ) {
        let [beta1, rest1] = [numbers.beta1, 1.0 - numbers.beta1].map(|beta| beta as f32);
        let [beta2, rest2] = [numbers.beta2, 1.0 - numbers.beta2].map(|beta| beta as f32);
        let [scale, decay, rate] = [numbers.scale, numbers.decay, numbers.rate].map(|n| n as f32);
        let [correction2, eps] = [numbers.correction2, numbers.eps].map(|number| number as f32);
        for (((parameter, g), m), v) in parameters.iter_mut().zip(gradients).zip(m).zip(v) {
            let g = scale * g;
            *m = beta1 * *m + rest1 * g;
            *v = beta2 * *v + rest2 * g * g;
            let decayed = *parameter - decay * *parameter;
            *parameter = decayed - rate * *m / ((*v / correction2).sqrt() + eps);
        }
    }
}

/// Returns the dispatch: one invocation per 8 elements of the range, or per 4 vectors of 4; for a
/// range whose moments are rounded, the dispatch of `adamw_bf16`. Input 0 is the gradients, output
/// 0 the parameters, outputs 1 and 2 the running averages.
pub fn dispatch(update: &Update, range: &UpdateRange) -> Dispatch {
    let operands = bucket_operands(update);
    let params = params(update, range);
    if let Some(rounding) = &range.rounding {
        return adamw_bf16::dispatch(operands, params, range, rounding);
    }
    let vectors = range.start.is_multiple_of(4) && range.length.is_multiple_of(4);
    Dispatch {
        shader: Shader::new("adamw", if vectors { "adamw4" } else { "adamw" }),
        operands,
        params,
        groups: grid(range.length, if vectors { 1024 } else { 512 }),
    }
}

fn params(update: &Update, range: &UpdateRange) -> Vec<u32> {
    let numbers = Numbers::new(update, range);
    let floats = [
        numbers.scale,
        numbers.decay,
        numbers.beta1,
        1.0 - numbers.beta1,
        numbers.beta2,
        1.0 - numbers.beta2,
        numbers.rate,
        numbers.correction2,
        numbers.eps,
    ];
    let mut params = as_words(&[range.start, range.length, range.decay_end]);
    params.extend(floats.map(|number| (number as f32).to_bits()));
    params
}

/// See [`UpdateTwin::flops`].
fn flops(_: &Update) -> f64 {
    15.0
}

/// See [`UpdateTwin::probe`].
fn probe(_: &Update) -> Update {
    example(0.271, 0.029_701)
}

/// See [`UpdateTwin::catalog`].
fn catalog() -> Vec<Update> {
    vec![example(0.1, 0.01)]
}

/// Returns an update with these corrections and a large step.
fn example(correction1: f32, correction2: f32) -> Update {
    Update::AdamW {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1,
        correction2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::update::check_update;

    /// Update of step `t`, counted from 1.
    fn update(t: i32, lr: f32, [beta1, beta2]: [f32; 2], eps: f32, weight_decay: f32) -> Update {
        let correction1 = 1.0 - beta1.powi(t);
        let correction2 = 1.0 - beta2.powi(t);
        Update::AdamW { lr, beta1, beta2, eps, weight_decay, correction1, correction2 }
    }

    /// Two parameters, the first with weight decay; the expected values are from PyTorch's `AdamW`
    /// in f64. All numbers are exact in f32, so that f64 must agree to the last digits.
    #[test]
    fn three_steps_give_the_values_of_pytorch() {
        let range =
            UpdateRange { start: 0, length: 2, decay_end: 1, gradient_scale: 0.5, rounding: None };
        let expected = [
            [0.37109398841812435, -1.1250001192091759],
            [0.2519700444256976, -1.1723226018956878],
            [0.29573756390689065, -1.2130010280547805],
        ];
        let (mut parameters, mut m, mut v) = ([0.5, -1.25], [0.0; 2], [0.0; 2]);
        let gradients = [[1.0, -2.0], [0.5, 4.0], [-3.0, 0.25]];
        for (t, (gradients, expected)) in (1..).zip(gradients.iter().zip(expected)) {
            let step = update(t, 0.125, [0.875, 0.984375], 1.0 / 1_048_576.0, 0.0625);
            reference::<f64>(&step, &range, &mut parameters, gradients, &mut [&mut m, &mut v]);
            let close = |i: usize| (parameters[i] - expected[i]).abs() < 1e-12;
            assert!(close(0) && close(1), "{parameters:?}, not {expected:?}");
        }
        assert!((v[0] - 0.039902687072753906).abs() < 1e-14, "{v:?}");
        assert!((m[1] - 0.138671875).abs() < 1e-14, "{m:?}");
    }

    #[test]
    fn ranges_within_a_bucket_agree_everywhere() {
        let steps = [1, 2, 3].map(|t| update(t, 0.01, [0.9, 0.99], 1e-8, 0.5));
        let ranges =
            [(0, 1, 0), (130, 701, 400), (130, 701, 100), (130, 701, 900), (5, 20_001, 17_000)];
        let vectors = [(0, 4, 3), (64, 4096, 2001), (128, 1028, 64), (4, 700, 5000)];
        for (start, length, decay_end) in ranges.into_iter().chain(vectors) {
            let range =
                UpdateRange { start, length, decay_end, gradient_scale: 0.3, rounding: None };
            check_update(start + length + 77, &range, &steps, &TWIN);
        }
    }
}
