//! Stochastic gradient descent over a range of a bucket. Twin of `shaders/sgd.wgsl`, which has the
//! formulas.

use rayon::prelude::*;

use super::dispatch_parts::{as_words, bucket_operands};
use super::sgd_bf16;
use super::update_parts::parts_of;
use crate::cpu_kernel::TASK;
use crate::dispatch::grid;
use crate::simd::vectorized;
use crate::{Dispatch, Float, Shader, UpdateTwin};
use potluck_graph::{Update, UpdateRange};

/// Twin of [`Update::Sgd`].
pub static TWIN: UpdateTwin = UpdateTwin {
    name: "sgd",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    flops,
    probe,
    catalog,
};

/// Returns `(lr, momentum, weight_decay)` of an update.
fn numbers(update: &Update) -> (f32, f32, f32) {
    match *update {
        Update::Sgd { lr, momentum, weight_decay } => (lr, momentum, weight_decay),
        other => panic!("{other:?} is not stochastic gradient descent"),
    }
}

/// Reference: updates elements `start .. start + length` of a bucket's `parameters`, and of its
/// `moments` (one list if there is momentum, else none). All slices are whole buckets.
pub fn reference<T: Float>(
    update: &Update,
    range: &UpdateRange,
    parameters: &mut [T],
    gradients: &[T],
    moments: &mut [&mut [T]],
) {
    let (lr, momentum, weight_decay) = numbers(update);
    let [scale, lr, momentum, weight_decay] = [range.gradient_scale, lr, momentum, weight_decay]
        .map(|number| T::from_f64(f64::from(number)));
    for i in range.start..range.start + range.length {
        let decay = if i < range.decay_end { weight_decay } else { T::zero() };
        let mut g = scale * gradients[i] + decay * parameters[i];
        if let [m] = moments {
            m[i] = momentum * m[i] + g;
            g = m[i];
        }
        parameters[i] -= lr * g;
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
    let (lr, momentum, decay) = numbers(update);
    let numbers = SgdNumbers { scale: range.gradient_scale, lr, momentum, decay };
    for (part, decays) in parts_of(range, parameters) {
        let numbers = if decays { numbers } else { SgdNumbers { decay: 0.0, ..numbers } };
        let parameters = parameters[part.clone()].par_chunks_mut(TASK);
        let gradients = gradients[part.clone()].par_chunks(TASK);
        match moments {
            [] => (parameters, gradients).into_par_iter().for_each(|(parameters, gradients)| {
                update_slice(numbers, parameters, gradients);
            }),
            [m, ..] => {
                let tasks = (parameters, gradients, m[part].par_chunks_mut(TASK));
                tasks.into_par_iter().for_each(|(parameters, gradients, m)| {
                    update_with_momentum(numbers, parameters, gradients, m);
                });
            }
        }
    }
}

/// Coefficients of the formulas.
#[derive(Clone, Copy)]
struct SgdNumbers {
    /// Factor of the gradients.
    scale: f32,
    lr: f32,
    momentum: f32,
    decay: f32,
}

vectorized! {
    fn update_slice<S>(numbers: SgdNumbers, parameters: &mut [f32], gradients: &[f32]) {
        let SgdNumbers { scale, lr, decay, .. } = numbers;
        for (parameter, g) in parameters.iter_mut().zip(gradients) {
            *parameter -= lr * (scale * g + decay * *parameter);
        }
    }

    fn update_with_momentum<S>(
        numbers: SgdNumbers,
        parameters: &mut [f32],
        gradients: &[f32],
        m: &mut [f32],
    ) {
        let SgdNumbers { scale, lr, momentum, decay } = numbers;
        for ((parameter, g), m) in parameters.iter_mut().zip(gradients).zip(m) {
            *m = momentum * *m + (scale * g + decay * *parameter);
            *parameter -= lr * *m;
        }
    }
}

/// Returns the dispatch: one invocation per 8 elements of the range, or per 4 vectors of 4; for a
/// range whose moment is rounded, the dispatch of `sgd_bf16`. Input 0 is the gradients, output 0
/// the parameters, output 1 the running average, if there is momentum.
pub fn dispatch(update: &Update, range: &UpdateRange) -> Dispatch {
    let (lr, momentum, weight_decay) = numbers(update);
    let operands = bucket_operands(update);
    let mut params = as_words(&[range.start, range.length, range.decay_end]);
    params.extend([range.gradient_scale, lr, momentum, weight_decay].map(f32::to_bits));
    if let Some(rounding) = &range.rounding {
        return sgd_bf16::dispatch(operands, params, range, rounding);
    }
    let vectors = range.start.is_multiple_of(4) && range.length.is_multiple_of(4);
    let entry = match (update.moments(), vectors) {
        (0, false) => "sgd_plain",
        (0, true) => "sgd_plain4",
        (_, false) => "sgd_momentum",
        (_, true) => "sgd_momentum4",
    };
    Dispatch {
        shader: Shader::new("sgd", entry),
        operands,
        params,
        groups: grid(range.length, if vectors { 1024 } else { 512 }),
    }
}

/// See [`UpdateTwin::flops`].
fn flops(update: &Update) -> f64 {
    if update.moments() == 0 { 5.0 } else { 7.0 }
}

/// See [`UpdateTwin::probe`].
fn probe(update: &Update) -> Update {
    let momentum = if update.moments() == 0 { 0.0 } else { 0.9 };
    Update::Sgd { lr: 0.1, momentum, weight_decay: 0.1 }
}

/// See [`UpdateTwin::catalog`].
fn catalog() -> Vec<Update> {
    [0.0, 0.9].map(|momentum| Update::Sgd { lr: 0.1, momentum, weight_decay: 0.1 }).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::update::check_update;

    /// Returns an update with numbers that f32 represents exactly, so that f64 must agree to the
    /// last digits.
    fn update(momentum: f32) -> Update {
        Update::Sgd { lr: 0.125, momentum, weight_decay: 0.0625 }
    }

    /// Two parameters, the first with weight decay; the expected values are from PyTorch's `SGD` in
    /// f64.
    #[test]
    fn three_steps_give_the_values_of_pytorch() {
        let range =
            UpdateRange { start: 0, length: 2, decay_end: 1, gradient_scale: 0.5, rounding: None };
        let expected = [
            (
                0.0,
                [
                    [0.43359375, -1.125],
                    [0.398956298828125, -1.375],
                    [0.5833394527435303, -1.390625],
                ],
            ),
            (
                0.875,
                [
                    [0.43359375, -1.125],
                    [0.340850830078125, -1.265625],
                    [0.444537878036499, -1.404296875],
                ],
            ),
        ];
        for (momentum, steps) in expected {
            let (mut parameters, mut m) = ([0.5, -1.25], [0.0, 0.0]);
            let gradients = [[1.0, -2.0], [0.5, 4.0], [-3.0, 0.25]];
            for (gradients, expected) in gradients.iter().zip(steps) {
                let mut moments: Vec<&mut [f64]> = vec![&mut m];
                moments.truncate(update(momentum).moments());
                reference(&update(momentum), &range, &mut parameters, gradients, &mut moments);
                let close = |i: usize| (parameters[i] - expected[i]).abs() < 1e-14;
                assert!(close(0) && close(1), "{parameters:?}, not {expected:?}");
            }
        }
    }

    #[test]
    fn ranges_within_a_bucket_agree_everywhere() {
        let ranges =
            [(0, 1, 0), (130, 701, 400), (130, 701, 100), (130, 701, 900), (5, 20_001, 17_000)];
        let vectors = [(0, 4, 3), (64, 4096, 2001), (128, 1028, 64), (4, 700, 5000)];
        for (start, length, decay_end) in ranges.into_iter().chain(vectors) {
            let range =
                UpdateRange { start, length, decay_end, gradient_scale: 0.3, rounding: None };
            for momentum in [0.0, 0.9] {
                let step = Update::Sgd { lr: 0.1, momentum, weight_decay: 0.2 };
                check_update(start + length + 77, &range, &[step; 3], &TWIN);
            }
        }
    }
}
