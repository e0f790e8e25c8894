//! Cross-entropy of logits with integer targets, and its gradient. Twin of
//! `shaders/cross_entropy.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::dispatch::grid;
use super::simd::{LANES, exp, sum_of, vectorized};
use super::{Arg, Call, Cost, Dispatch, Operand, Real, Shader};
use crate::graph::Op;

/// Elements per task of the fast version: enough to outweigh handing it to a thread.
const TASK: usize = 4 * 1024;

/// `logits (n, v), targets (n) -> parts (n, 2), lse (n)`, or
/// `logits, targets, lse -> dlogits (n, v)`. A target that is no class is ignored, as is
/// [`crate::graph::IGNORED`].
pub fn reference<T: Real>(call: &Call, inputs: &[Arg<'_, T>], outputs: &mut [&mut [T]]) {
    let v = call.rows_and_last(0).1;
    let rows = inputs[0].floats().chunks_exact(v).zip(inputs[1].ints()).enumerate();
    for (row, (x, &target)) in rows {
        let class = Some(target as usize).filter(|class| *class < v);
        if let Op::CrossEntropyGrad = call.op {
            let lse = inputs[2].floats()[row];
            for (j, (dx, x)) in outputs[0][row * v..][..v].iter_mut().zip(x).enumerate() {
                let hit = if class == Some(j) { T::one() } else { T::zero() };
                *dx = if class.is_some() { (*x - lse).exp() - hit } else { T::zero() };
            }
            continue;
        }
        let m = x.iter().copied().fold(x[0], T::max);
        let log_s = x.iter().map(|x| (*x - m).exp()).sum::<T>().ln();
        let part = class.map_or([T::zero(); 2], |class| [log_s - (x[class] - m), T::one()]);
        outputs[0][2 * row..][..2].copy_from_slice(&part);
        outputs[1][row] = m + log_s;
    }
}

/// In parallel over rows.
pub fn fast(call: &Call, inputs: &[Arg<'_, f32>], outputs: &mut [&mut [f32]]) {
    let v = call.rows_and_last(0).1;
    let (logits, targets) = (inputs[0].floats(), inputs[1].ints());
    let rows = (TASK / v).max(1);
    let tasks = logits.par_chunks(rows * v).zip(targets.par_chunks(rows));
    match outputs {
        [dlogits] => {
            let lse = inputs[2].floats().par_chunks(rows);
            tasks.zip(lse).zip(dlogits.par_chunks_mut(rows * v)).for_each(|(((x, t), lse), dx)| {
                let rows = x.chunks_exact(v).zip(t).zip(lse).zip(dx.chunks_exact_mut(v));
                rows.for_each(|(((x, &target), &lse), dx)| gradient_row(x, target, lse, dx));
            });
        }
        [parts, lse] => {
            let outputs = parts.par_chunks_mut(2 * rows).zip(lse.par_chunks_mut(rows));
            tasks.zip(outputs).for_each(|((x, t), (parts, lse))| {
                let rows = x.chunks_exact(v).zip(t).zip(parts.chunks_exact_mut(2)).zip(lse);
                rows.for_each(|(((x, &target), part), lse)| *lse = loss_row(x, target, part));
            });
        }
        other => panic!("{} has no {} outputs", call.op, other.len()),
    }
}

vectorized! {
    /// Writes `(loss, count)` of a row and gives its `lse`.
    fn loss_row<S>(x: &[f32], target: u32, part: &mut [f32]) -> f32 {
        let m = largest(x);
        let log_s = sum_of(x.len(), |j| exp::<S>(x[j] - m)).ln();
        let class = x.get(target as usize);
        part.copy_from_slice(&class.map_or([0.0; 2], |x| [log_s - (x - m), 1.0]));
        m + log_s
    }

    fn gradient_row<S>(x: &[f32], target: u32, lse: f32, dx: &mut [f32]) {
        if target as usize >= x.len() {
            return dx.fill(0.0);
        }
        dx.iter_mut().zip(x).for_each(|(dx, x)| *dx = exp::<S>(x - lse));
        dx[target as usize] -= 1.0;
    }
}

/// The maximum, by lanes, so that it becomes vector instructions.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let mut lanes = [x[0]; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(m, x)| *m = if x > m { *x } else { *m });
    }
    lanes.iter().chain(rest).fold(x[0], |m, x| m.max(*x))
}

/// One invocation per row; the gradient takes one per element.
pub fn dispatch(call: &Call) -> Vec<Dispatch> {
    let (n, v) = call.rows_and_last(0);
    let (entry, last, invocations) = match call.op {
        Op::CrossEntropy => ("cross_entropy", [Operand::Output(0), Operand::Output(1)], n),
        _ => ("cross_entropy_grad", [Operand::Input(2), Operand::Output(0)], n * v),
    };
    vec![Dispatch {
        shader: Shader::new("cross_entropy", entry),
        operands: vec![Operand::Input(0), Operand::Input(1), last[0], last[1]],
        params: vec![n as u32, v as u32],
        groups: grid(invocations, 64),
    }]
}

/// About 10 FLOPs per exponential, one of which each logit takes.
pub fn cost(call: &Call) -> Cost {
    Cost { flops: 12.0 * call.input_len(0) as f64, bytes: Cost::moved(call) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Shape;
    use crate::graph::IGNORED;
    use crate::kernels::testing::gradient::check_gradient;
    use crate::kernels::testing::{self, Values, check_with};
    use crate::kernels::testing::{Fill, values};

    type Input = (Shape, Values);

    /// Logits and targets of `rows * n` rows.
    fn inputs(n: usize, v: usize, rows: usize, logits: Fill, targets: Fill) -> [Input; 2] {
        let count = rows * n;
        [
            (Shape::batched(&[n, v]), values(logits, count * v, 0)),
            (Shape::batched(&[n]), values(targets, count, 1)),
        ]
    }

    /// The inputs of the gradient: those of the loss, and its `lse`.
    fn with_lse(inputs: &[Input; 2], rows: usize) -> [Input; 3] {
        let lse = testing::reference(&Op::CrossEntropy, inputs, rows).remove(1);
        [inputs[0].clone(), inputs[1].clone(), (inputs[1].0.clone(), Values::Float(lse))]
    }

    fn check_both(inputs: [Input; 2], rows: usize) {
        check_with(Op::CrossEntropy, &inputs, rows);
        check_with(Op::CrossEntropyGrad, &with_lse(&inputs, rows), rows);
    }

    #[test]
    fn losses_and_gradients_agree_everywhere() {
        for (n, v, rows) in [(1, 1, 1), (3, 7, 2), (64, 65, 3), (1, 8, 5), (1, 5003, 2)] {
            let targets = Fill::Targets(v as u32);
            check_both(inputs(n, v, rows, Fill::Normal, targets), rows);
        }
    }

    #[test]
    fn large_logits_stay_stable() {
        let logits = Fill::Scaled(50.0, 1000.0);
        check_both(inputs(5, 33, 3, logits, Fill::Targets(33)), 3);
        check_both(inputs(5, 33, 3, Fill::Scaled(50.0, -1000.0), Fill::Targets(33)), 3);
    }

    #[test]
    fn targets_that_are_no_class_do_not_count() {
        let [logits, _] = inputs(1, 6, 4, Fill::Normal, Fill::Ids(6));
        let targets = (Shape::batched(&[1]), Values::Int(vec![IGNORED, 6, 1 << 31, 5]));
        let both = [logits, targets];
        check_both(both.clone(), 4);
        let parts = testing::reference(&Op::CrossEntropy, &both, 4).remove(0);
        assert_eq!(parts[..6], [0.0; 6]);
        assert!(parts[6] > 0.0 && parts[7] == 1.0, "{parts:?}");
        let dx = testing::reference(&Op::CrossEntropyGrad, &with_lse(&both, 4), 4).remove(0);
        assert!(dx[..18].iter().all(|dx| *dx == 0.0) && dx[18..].iter().all(|dx| *dx != 0.0));
    }

    #[test]
    fn equal_logits_cost_the_logarithm_of_the_classes() {
        let logits = (Shape::batched(&[1, 4]), Values::Float(vec![2.5; 4]));
        let targets = (Shape::batched(&[1]), Values::Int(vec![2]));
        let outputs = testing::reference(&Op::CrossEntropy, &[logits, targets], 1);
        assert!((outputs[0][0] - 4f64.ln()).abs() < 1e-12, "{outputs:?}");
    }

    #[test]
    fn the_gradient_is_the_derivative() {
        let both = inputs(2, 5, 3, Fill::Normal, Fill::Targets(5));
        let dx = testing::reference(&Op::CrossEntropyGrad, &with_lse(&both, 3), 3);
        let weights = [[1.0, 0.0].repeat(6), vec![0.0; 6]];
        check_gradient(&Op::CrossEntropy, &both, 3, 0, &weights, &dx[0]);
    }
}
