//! Join of the losses over two sets of classes to the losses over both. Twin of
//! `shaders/join_cross_entropy.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::dispatch_parts::{all_tensors, as_words};
use crate::call_shapes::{N, PROBE_ROWS, calls};
use crate::dispatch::grid;
use crate::harness::InputFill;
use crate::twin::{InputSpec, leading_axis, no_forward, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::{ClassLoss, Op};

/// Twin of [`Op::JoinCrossEntropy`].
pub static TWIN: Twin = Twin {
    name: "join_cross_entropy",
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

/// Rows per rayon task of `fast`: enough to outweigh the scheduling overhead.
const TASK: usize = 512;

/// Reference: `parts (n, 2), lse (n), parts (n, 2), lse (n) -> parts (n, 2), lse (n)`.
pub fn reference<T: Float>(_: &OpCall, inputs: &[HostTensorView<'_, T>], outputs: &mut [&mut [T]]) {
    for row in 0..outputs[1].len() {
        let sides = [0, 2].map(|side| {
            let parts = &inputs[side].floats()[2 * row..];
            let lse = inputs[side + 1].floats()[row];
            ClassLoss { loss: wide(parts[0]), count: wide(parts[1]), lse: wide(lse) }
        });
        let ClassLoss { loss, count, lse } = ClassLoss::joined(sides.into_iter());
        outputs[0][2 * row] = T::from_f64(loss);
        outputs[0][2 * row + 1] = T::from_f64(count);
        outputs[1][row] = T::from_f64(lse);
    }
}

fn wide<T: Float>(value: T) -> f64 {
    value.to_f64().unwrap_or(f64::NAN)
}

/// CPU kernel: the reference, parallel over rows.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let [parts, lse] = outputs else { panic!("{} has 2 outputs", call.op) };
    let tasks = (parts.par_chunks_mut(2 * TASK), lse.par_chunks_mut(TASK)).into_par_iter();
    tasks.enumerate().for_each(|(task, (parts, lse))| {
        let mut own = Vec::with_capacity(inputs.len());
        for (index, input) in inputs.iter().enumerate() {
            let columns = if index % 2 == 0 { 2 } else { 1 };
            let values = &input.floats()[columns * task * TASK..][..columns * lse.len()];
            own.push(HostTensorView::Float(values));
        }
        reference(call, &own, &mut [parts, lse]);
    });
}

/// The only kernel: one invocation per row.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    let n = call.output_len(1);
    vec![Dispatch {
        shader: Shader::new("join_cross_entropy", "join_cross_entropy"),
        operands: all_tensors(call),
        params: as_words(&[n]),
        groups: grid(n, 64),
    }]
}

/// Returns the only variant.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    vec![Variant::new("join_cross_entropy", dispatch(call, caps))]
}

/// Returns the cost: about ten FLOPs per row.
pub fn cost(call: &OpCall) -> Cost {
    Cost { flops: 10.0 * call.output_len(1) as f64, bytes: Cost::moved(call) }
}

/// See [`Twin::inputs`]: counts are 0 or 1, and so are the losses.
fn inputs(_: &Op, inputs: &[Dims]) -> InputSpec {
    let parts = InputFill::Whole(2);
    InputSpec::normal(inputs).with(0, parts).with(2, parts)
}

fn shapes(n: usize) -> Vec<Dims> {
    vec![vec![n, 2], vec![n], vec![n, 2], vec![n]]
}

/// See [`Twin::probes`].
fn probes(op: &Op, _: &[Dims]) -> Vec<CallShape> {
    calls(op, PROBE_ROWS.map(shapes))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    vec![(Op::JoinCrossEntropy, shapes(N))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::generate;
    use crate::testing::{check_with, for_each_result, reference as expected};
    use potluck_core::{HostTensor, Shape};
    use potluck_graph::LossClasses;

    type Input = (Shape, HostTensor<f64>);

    fn side(loss_and_count: Vec<f64>, lse: Vec<f64>) -> [Input; 2] {
        [
            (Shape::batched(&[1, 2]), HostTensor::Float(loss_and_count)),
            (Shape::batched(&[1]), HostTensor::Float(lse)),
        ]
    }

    /// The losses over 3 and over 8 of 11 classes, with label smoothing, are that over all.
    #[test]
    fn joined_losses_are_those_over_all_classes() {
        let (n, v, cut) = (130, 11, 3);
        let HostTensor::Float(logits) = generate(InputFill::Scaled(4.0, 0.0), n * v, 0) else {
            panic!("logits are floats")
        };
        let targets = (Shape::batched(&[1]), generate(InputFill::Targets(v as u32), n, 1));
        let over = |first: usize, end: usize| {
            let own = logits.chunks_exact(v).flat_map(|row| row[first..end].to_vec());
            let x = (Shape::batched(&[1, end - first]), HostTensor::Float(own.collect()));
            let classes = LossClasses { first, all: v, smoothing: 0.1 };
            let inputs = [x, targets.clone()];
            let found = expected(&Op::CrossEntropy(classes), &inputs, n);
            found.try_into().unwrap_or_else(|_| panic!("parts and lse"))
        };
        let [parts_a, lse_a]: [Vec<f64>; 2] = over(0, cut);
        let [parts_b, lse_b] = over(cut, v);
        let sides = [side(parts_a, lse_a), side(parts_b, lse_b)].concat();
        check_with(Op::JoinCrossEntropy, &sides, n);
        let joined = expected(&Op::JoinCrossEntropy, &sides, n);
        for (joined, whole) in joined.iter().zip(over(0, v)) {
            let errors = joined.iter().zip(&whole).map(|(a, b)| (a - b).abs());
            assert!(errors.fold(0.0, f64::max) < 1e-12);
        }
    }

    /// By row: a NaN, plus infinity, no logit above minus infinity at all, on the side with the
    /// target, and on the other.
    #[test]
    fn losses_that_are_not_finite_are_those_over_all_classes() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let a = side(
            vec![1.0, 1.0, 0.0, 0.0, nan, 1.0, nan, 1.0, 0.0, 0.0],
            vec![nan, 0.5, -inf, -inf, -inf],
        );
        let b = side(
            vec![0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0],
            vec![0.5, inf, -inf, 1.5, 1.5],
        );
        let sides = [a, b].concat();
        let [parts, lse] = expected(&Op::JoinCrossEntropy, &sides, 5).try_into().unwrap();
        assert_eq!(
            parts.iter().step_by(2).map(|loss| loss.is_nan()).collect::<Vec<_>>(),
            [true, true, true, false, false]
        );
        assert_eq!((parts[6], parts[8], lse[3]), (inf, 1.0, 1.5));
        for_each_result(&Op::JoinCrossEntropy, &sides, 5, |who, found| {
            for (found, expected) in found.iter().flatten().zip(parts.iter().chain(&lse)) {
                let is_nan = found.to_bits() & 0x7FFF_FFFF > 0x7F80_0000;
                assert_eq!(is_nan, expected.is_nan(), "{who}: {found} for {expected}");
                assert!(is_nan || f64::from(*found) == *expected, "{who}: {found}, {expected}");
            }
        });
    }
}
