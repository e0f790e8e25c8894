//! Update rules with one or two moments over a range of a bucket, on one skeleton. Twin of
//! `shaders/update.wgsl`; `super::update_rules` has the formulas.

use rayon::prelude::*;

use super::dispatch_parts::{as_words, bucket_operands};
use super::update_bf16;
use super::update_parts::parts_of;
use super::update_rules::{ElementState, NUMBERS_MAX, RuleNumbers, UpdateFormula, with_rule};
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::simd::vectorized;
use crate::source::{snippet, values_of};
use crate::{Dispatch, Float, Shader, UpdateTwin};
use potluck_graph::{Update, UpdateRange};

/// Twin of [`Update::Nesterov`], [`Update::Adam`], [`Update::RmsProp`] and [`Update::Lion`].
pub static TWIN: UpdateTwin = UpdateTwin {
    name: "update",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    flops,
    probe,
    catalog,
};

/// Reference: updates elements `start .. start + length` of a bucket's `parameters`, and of its one
/// or two `moments`. All slices are whole buckets.
pub fn reference<T: Float>(
    update: &Update,
    range: &UpdateRange,
    parameters: &mut [T],
    gradients: &[T],
    moments: &mut [&mut [T]],
) {
    with_rule!(update, rule => reference_of(rule, update, range, parameters, gradients, moments));
}

fn reference_of<T: Float>(
    rule: impl UpdateFormula,
    update: &Update,
    range: &UpdateRange,
    parameters: &mut [T],
    gradients: &[T],
    moments: &mut [&mut [T]],
) {
    let RuleNumbers { decay, numbers } = RuleNumbers::of(update);
    let numbers = numbers.map(T::from_f64);
    let scale = T::from_f64(range.gradient_scale.into());
    for i in range.start..range.start + range.length {
        let decay = if i < range.decay_end { T::from_f64(decay) } else { T::zero() };
        let second = if let [_, v] = &*moments { v[i] } else { T::zero() };
        let before = ElementState(parameters[i], moments[0][i], second);
        let after = rule.step(before, scale * gradients[i], decay, &numbers);
        parameters[i] = after.0;
        moments[0][i] = after.1;
        if let [_, v] = moments {
            v[i] = after.2;
        }
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
    with_rule!(update, rule => fast_of(rule, update, range, parameters, gradients, moments));
}

fn fast_of(
    rule: impl UpdateFormula,
    update: &Update,
    range: &UpdateRange,
    parameters: &mut [f32],
    gradients: &[f32],
    moments: &mut [&mut [f32]],
) {
    let RuleNumbers { decay, numbers } = RuleNumbers::of(update);
    let scale = range.gradient_scale;
    let numbers = numbers.map(|number| number as f32);
    for (part, decays) in parts_of(range, parameters) {
        let decay = if decays { decay as f32 } else { 0.0 };
        let numbers = SliceNumbers { scale, decay, numbers };
        let parameters = parameters[part.clone()].par_chunks_mut(TASK);
        let gradients = gradients[part.clone()].par_chunks(TASK);
        match moments {
            [m] => {
                let tasks = (parameters, gradients, m[part].par_chunks_mut(TASK));
                tasks.into_par_iter().for_each(|(parameters, gradients, m)| {
                    update_one(rule, numbers, parameters, gradients, m);
                });
            }
            [m, v] => {
                let m = m[part.clone()].par_chunks_mut(TASK);
                let tasks = (parameters, gradients, m, v[part].par_chunks_mut(TASK));
                tasks.into_par_iter().for_each(|(parameters, gradients, m, v)| {
                    update_two(rule, numbers, parameters, gradients, m, v);
                });
            }
            _ => panic!("the rules here keep one or two moments, not {}", moments.len()),
        }
    }
}

/// Factor of the gradients, weight decay, and coefficients of the formula.
#[derive(Clone, Copy)]
struct SliceNumbers {
    scale: f32,
    decay: f32,
    numbers: [f32; NUMBERS_MAX],
}

vectorized! {
    /// Updates one slice in a loop without branches, with one moment.
    fn update_one<S, R: UpdateFormula>(
        rule: R,
        of_slice: SliceNumbers,
        parameters: &mut [f32],
        gradients: &[f32],
        m: &mut [f32],
    ) {
        let SliceNumbers { scale, decay, numbers } = of_slice;
        for ((parameter, g), m) in parameters.iter_mut().zip(gradients).zip(m) {
            let before = ElementState(*parameter, *m, 0.0);
            let ElementState(new, average, _) = rule.step(before, scale * g, decay, &numbers);
            *parameter = new;
            *m = average;
        }
    }

    /// The same with two moments.
    fn update_two<S, R: UpdateFormula>(
        rule: R,
        of_slice: SliceNumbers,
        parameters: &mut [f32],
        gradients: &[f32],
        m: &mut [f32],
        v: &mut [f32],
    ) {
        let SliceNumbers { scale, decay, numbers } = of_slice;
        for (((parameter, g), m), v) in parameters.iter_mut().zip(gradients).zip(m).zip(v) {
            let before = ElementState(*parameter, *m, *v);
            let ElementState(new, first, second) = rule.step(before, scale * g, decay, &numbers);
            *parameter = new;
            *m = first;
            *v = second;
        }
    }
}

/// Returns the dispatch: one invocation per 8 elements of the range, or per 4 vectors of 4; for a
/// range whose moments are rounded, the dispatch of `update_bf16`. Input 0 is the gradients, output
/// 0 the parameters, and the following outputs are the moments.
pub fn dispatch(update: &Update, range: &UpdateRange) -> Dispatch {
    let operands = bucket_operands(update);
    let params = params(update, range);
    if let Some(rounding) = &range.rounding {
        return update_bf16::dispatch(update, operands, params, range, rounding);
    }
    let vectors = range.start.is_multiple_of(4) && range.length.is_multiple_of(4);
    let entry = if update.moments() == 1 { "one_moment" } else { "two_moments" };
    Dispatch {
        shader: with_formula(Shader::new("update", entry), update, if vectors { 4 } else { 1 }),
        operands,
        params,
        groups: grid(range.length, if vectors { 1024 } else { 512 }),
    }
}

/// Returns a shader of the skeleton with the formula of an update on values of `lanes` floats.
pub(super) fn with_formula(shader: Shader, update: &Update, lanes: usize) -> Shader {
    let decay = snippet(if lanes == 4 { "decay4" } else { "decay" });
    let rule = with_rule!(update, rule => rule.wgsl());
    shader.with_text(values_of(lanes)).with_text(decay).with_text(&rule)
}

fn params(update: &Update, range: &UpdateRange) -> Vec<u32> {
    let RuleNumbers { decay, numbers } = RuleNumbers::of(update);
    let mut params = as_words(&[range.start, range.length, range.decay_end]);
    params.push(range.gradient_scale.to_bits());
    params.push((decay as f32).to_bits());
    params.extend(numbers.map(|number| (number as f32).to_bits()));
    params
}

/// See [`UpdateTwin::flops`].
fn flops(update: &Update) -> f64 {
    match update {
        Update::Adam { .. } => 15.0,
        Update::RmsProp { momentum: 0.0, .. } => 11.0,
        Update::RmsProp { .. } => 13.0,
        Update::Lion { .. } => 11.0,
        _ => 9.0,
    }
}

/// See [`UpdateTwin::probe`].
fn probe(update: &Update) -> Update {
    match *update {
        Update::Adam { .. } => example_of_adam(0.271, 0.029_701),
        Update::RmsProp { momentum, .. } => example_of_rms_prop(momentum.min(0.9)),
        Update::Lion { .. } => LION,
        _ => NESTEROV,
    }
}

/// See [`UpdateTwin::catalog`].
fn catalog() -> Vec<Update> {
    vec![
        NESTEROV,
        example_of_adam(0.1, 0.01),
        example_of_rms_prop(0.0),
        example_of_rms_prop(0.9),
        LION,
    ]
}

const NESTEROV: Update = Update::Nesterov { lr: 0.1, momentum: 0.9, weight_decay: 0.1 };
const LION: Update = Update::Lion { lr: 0.1, beta1: 0.9, beta2: 0.95, weight_decay: 0.1 };

/// Returns an update of Adam with these corrections and a large step.
fn example_of_adam(correction1: f32, correction2: f32) -> Update {
    Update::Adam {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1,
        correction2,
    }
}

fn example_of_rms_prop(momentum: f32) -> Update {
    Update::RmsProp { lr: 0.1, alpha: 0.9, eps: 1e-8, momentum, weight_decay: 0.1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::update_rules::Lion;
    use crate::testing::update::check_update;

    /// Learning rate and weight decay of the tests against given values; all numbers are exact in
    /// f32, so that f64 must agree to the last digits.
    const LR: f32 = 0.125;
    const DECAY: f32 = 0.0625;
    const EPS: f32 = 1.0 / 1_048_576.0;

    /// Runs three steps of two parameters, the first with weight decay, and compares the
    /// parameters.
    fn check_three_steps(step: impl Fn(i32) -> Update, expected: [[f64; 2]; 3]) {
        let range =
            UpdateRange { start: 0, length: 2, decay_end: 1, gradient_scale: 0.5, rounding: None };
        let (mut parameters, mut m, mut v) = ([0.5, -1.25], [0.0; 2], [0.0; 2]);
        let gradients = [[1.0, -2.0], [0.5, 4.0], [-3.0, 0.25]];
        for (t, (gradients, expected)) in (1..).zip(gradients.iter().zip(expected)) {
            let step = step(t);
            let mut moments: Vec<&mut [f64]> = vec![&mut m, &mut v];
            moments.truncate(step.moments());
            reference::<f64>(&step, &range, &mut parameters, gradients, &mut moments);
            let close = |i: usize| (parameters[i] - expected[i]).abs() < 1e-12;
            assert!(close(0) && close(1), "{step:?}: {parameters:?}, not {expected:?}");
        }
    }

    /// Expected values from PyTorch's `SGD`, `Adam` and `RMSprop` in f64.
    #[test]
    fn three_steps_give_the_values_of_pytorch() {
        let rms_prop = |momentum| Update::RmsProp {
            lr: LR,
            alpha: 0.984375,
            eps: EPS,
            momentum,
            weight_decay: DECAY,
        };
        check_three_steps(
            |_| Update::Nesterov { lr: LR, momentum: 0.875, weight_decay: DECAY },
            [
                [0.37548828125, -1.015625],
                [0.26055192947387695, -1.388671875],
                [0.5376390074379742, -1.525634765625],
            ],
        );
        check_three_steps(
            |t| Update::Adam {
                lr: LR,
                beta1: 0.875,
                beta2: 0.984375,
                eps: EPS,
                weight_decay: DECAY,
                correction1: 1.0 - 0.875f32.powi(t),
                correction2: 1.0 - 0.984375f32.powi(t),
            },
            [
                [0.37500022439355396, -1.1250001192091759],
                [0.25823603803870476, -1.1723226018956878],
                [0.3009291158589801, -1.2130010280547805],
            ],
        );
        check_three_steps(
            |_| rms_prop(0.0),
            [
                [-0.4999856389930062, -0.25000762933632403],
                [-0.8833008105175757, -1.1458325855517009],
                [0.0563585064953781, -1.2021746114223277],
            ],
        );
        check_three_steps(
            |_| rms_prop(0.875),
            [
                [-0.4999856389930062, -0.25000762933632403],
                [-1.758288244636456, -0.27083926122098456],
                [-1.9159497538801449, -0.3454089649906893],
            ],
        );
    }

    /// Expected values from the paper's algorithm, computed separately in f64.
    #[test]
    fn three_steps_of_lion_give_the_values_of_its_paper() {
        check_three_steps(
            |_| Update::Lion { lr: LR, beta1: 0.875, beta2: 0.984375, weight_decay: DECAY },
            [[0.37109375, -1.125], [0.243194580078125, -1.25], [0.36629462242126465, -1.375]],
        );
        let nothing = ElementState(1.0, 0.0, 0.0);
        let numbers = RuleNumbers::of(&LION).numbers;
        let ElementState(parameter, ..) = Lion.step(nothing, 0.0, 0.0, &numbers);
        assert_eq!(parameter, 1.0, "the sign of 0 is 0");
    }

    #[test]
    fn ranges_within_a_bucket_agree_everywhere() {
        let ranges =
            [(0, 1, 0), (130, 701, 400), (130, 701, 100), (130, 701, 900), (5, 20_001, 17_000)];
        let vectors = [(0, 4, 3), (64, 4096, 2001), (128, 1028, 64), (4, 700, 5000)];
        for (start, length, decay_end) in ranges.into_iter().chain(vectors) {
            let range =
                UpdateRange { start, length, decay_end, gradient_scale: 0.3, rounding: None };
            for step in catalog() {
                check_update(start + length + 77, &range, &[step; 3], &TWIN);
            }
        }
    }
}
