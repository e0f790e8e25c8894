//! Cross-entropy of logits with integer targets, and its gradient. Twin of
//! `shaders/cross_entropy.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::cross_entropy_subgroups;
use crate::call_shapes::{N, PROBE_ROWS, V, calls};
use crate::dispatch::{ITERATIONS_MAX, Runs, grid};
use crate::harness::InputFill;
use crate::simd::{LANES, exp, sum_of, vectorized};
use crate::twin::{Forward, InputSpec, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::CrossEntropy`] and its gradient.
pub static TWIN: Twin = Twin {
    name: "cross_entropy",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs,
    forward,
    probes,
    catalog,
};

/// Classes behind those of a shard, among the targets of its calls.
const OTHER_CLASSES: usize = 3;

/// Elements per rayon task of `fast`: enough to outweigh the scheduling overhead.
const TASK: usize = 4 * 1024;

/// Invocations per workgroup of the kernel with one workgroup per row; each processes at least
/// one element.
const GROUP: usize = 256;

/// Classes of a call: its logits are those from `first` on, of `all`.
#[derive(Clone, Copy)]
struct Classes {
    first: usize,
    all: usize,
}

impl Classes {
    fn of(call: &OpCall) -> Self {
        match call.op {
            Op::CrossEntropy { first } => {
                Self { first: *first, all: first + call.rows_and_last(0).1 }
            }
            Op::CrossEntropyGrad { first, classes } => Self { first: *first, all: *classes },
            other => panic!("{other} is not a cross-entropy"),
        }
    }

    /// Returns true if a target is a class, whoever has its logits.
    fn has(self, target: u32) -> bool {
        (target as usize) < self.all
    }

    /// Returns the index of a target among `v` logits, if it is one of their classes.
    fn own(self, target: u32, v: usize) -> Option<usize> {
        (target as usize).checked_sub(self.first).filter(|class| *class < v)
    }
}

/// Reference: `logits (n, v), targets (n) -> parts (n, 2), lse (n)`, or
/// `logits, targets, lse -> dlogits (n, v)`. A target that is no class is ignored, as is
/// [`potluck_graph::IGNORE_INDEX`].
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let v = call.rows_and_last(0).1;
    let classes = Classes::of(call);
    let rows = inputs[0].floats().chunks_exact(v).zip(inputs[1].ints()).enumerate();
    for (row, (x, &target)) in rows {
        let class = classes.own(target, v);
        if let Op::CrossEntropyGrad { .. } = call.op {
            let lse = inputs[2].floats()[row];
            let counts = classes.has(target);
            for (j, (dx, x)) in outputs[0][row * v..][..v].iter_mut().zip(x).enumerate() {
                let hit = if class == Some(j) { T::one() } else { T::zero() };
                *dx = if counts { (*x - lse).exp() - hit } else { T::zero() };
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

/// CPU kernel: parallel over rows.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let v = call.rows_and_last(0).1;
    let (logits, targets) = (inputs[0].floats(), inputs[1].ints());
    let classes = Classes::of(call);
    let rows = (TASK / v).max(1);
    let tasks = logits.par_chunks(rows * v).zip(targets.par_chunks(rows));
    match outputs {
        [dlogits] => {
            let lse = inputs[2].floats().par_chunks(rows);
            tasks.zip(lse).zip(dlogits.par_chunks_mut(rows * v)).for_each(|(((x, t), lse), dx)| {
                let rows = x.chunks_exact(v).zip(t).zip(lse).zip(dx.chunks_exact_mut(v));
                rows.for_each(|(((x, &target), &lse), dx)| {
                    gradient_row(x, classes.own(target, v), classes.has(target), lse, dx);
                });
            });
        }
        [parts, lse] => {
            let outputs = parts.par_chunks_mut(2 * rows).zip(lse.par_chunks_mut(rows));
            tasks.zip(outputs).for_each(|((x, t), (parts, lse))| {
                let rows = x.chunks_exact(v).zip(t).zip(parts.chunks_exact_mut(2)).zip(lse);
                rows.for_each(|(((x, &target), part), lse)| {
                    *lse = loss_row(x, classes.own(target, v), part);
                });
            });
        }
        other => panic!("{} has no {} outputs", call.op, other.len()),
    }
}

vectorized! {
    /// Writes `(loss, count)` of a row and returns its `lse`.
    fn loss_row<S>(x: &[f32], class: Option<usize>, part: &mut [f32]) -> f32 {
        let m = largest(x);
        let log_s = sum_of(x.len(), |j| exp::<S>(x[j] - m)).ln();
        part.copy_from_slice(&class.map_or([0.0; 2], |class| [log_s - (x[class] - m), 1.0]));
        m + log_s
    }

    fn gradient_row<S>(x: &[f32], class: Option<usize>, counts: bool, lse: f32, dx: &mut [f32]) {
        if !counts {
            return dx.fill(0.0);
        }
        dx.iter_mut().zip(x).for_each(|(dx, x)| *dx = exp::<S>(x - lse));
        if let Some(class) = class {
            dx[class] -= 1.0;
        }
    }
}

/// Returns the maximum, computed in lanes so that compilers vectorize the loop.
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

/// Static choice: vectors of 4 for gradients whose number of classes is a multiple of 4, else the
/// baseline.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let group = group(call).filter(|_| caps.suits_hardware());
    vec![group.or_else(|| vectors(call)).unwrap_or_else(|| plain(call))]
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let subgroups = of_groups(call).and_then(|way| cross_entropy_subgroups::way(way, caps));
    let others = [vectors(call), group(call), subgroups].into_iter().flatten();
    let named = |way: Dispatch| Variant::new(way.shader.entry, vec![way]);
    std::iter::once(plain(call)).chain(others).map(named).collect()
}

/// Returns the baseline: one invocation per row, or one workgroup if an invocation would exceed
/// the iteration limit; for the gradient, one invocation per 8 elements of a row.
fn plain(call: &OpCall) -> Dispatch {
    let (n, v) = call.rows_and_last(0);
    match call.op {
        Op::CrossEntropy { .. } if 2 * v > ITERATIONS_MAX => by_groups(call),
        Op::CrossEntropy { .. } => one(call, "cross_entropy", Runs::new(v), grid(n, 64)),
        _ => {
            let runs = Runs::new(v);
            one(call, "cross_entropy_grad", runs, grid(n * runs.across, 64))
        }
    }
}

/// Returns the gradient kernel with one invocation per 8 vectors of a row, if the number of
/// classes is a multiple of 4.
fn vectors(call: &OpCall) -> Option<Dispatch> {
    let (n, v) = call.rows_and_last(0);
    let runs = Runs::new(v / 4);
    let fits = v.is_multiple_of(4) && matches!(call.op, Op::CrossEntropyGrad { .. });
    fits.then(|| one(call, "cross_entropy_grad4", runs, grid(n * runs.across, 64)))
}

/// Returns the loss kernel with one workgroup per row, if rows are long enough and it is not the
/// baseline.
fn group(call: &OpCall) -> Option<Dispatch> {
    of_groups(call).filter(|_| 2 * call.rows_and_last(0).1 <= ITERATIONS_MAX)
}

/// Returns the loss kernel with one workgroup per row, if rows are long enough.
fn of_groups(call: &OpCall) -> Option<Dispatch> {
    let fits = call.rows_and_last(0).1 >= GROUP && matches!(call.op, Op::CrossEntropy { .. });
    fits.then(|| by_groups(call))
}

fn by_groups(call: &OpCall) -> Dispatch {
    let (n, v) = call.rows_and_last(0);
    one(call, "cross_entropy_group", Runs::new(v), grid(n, 1))
}

fn one(call: &OpCall, entry: &'static str, runs: Runs, groups: [u32; 3]) -> Dispatch {
    let (n, v) = call.rows_and_last(0);
    let Classes { first, all } = Classes::of(call);
    let last = match call.op {
        Op::CrossEntropy { .. } => [Operand::Output(0), Operand::Output(1)],
        _ => [Operand::Input(2), Operand::Output(0)],
    };
    Dispatch {
        shader: Shader::new("cross_entropy", entry),
        operands: vec![Operand::Input(0), Operand::Input(1), last[0], last[1]],
        params: [n, v, runs.across, runs.step, first, all].map(|word| word as u32).to_vec(),
        groups,
    }
}

/// Returns the cost: one exponential per logit, which is about 10 FLOPs, and two more FLOPs.
pub fn cost(call: &OpCall) -> Cost {
    Cost { flops: 12.0 * call.input_len(0) as f64, bytes: Cost::moved(call) }
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let own = inputs[0].last().map_or(1, |v| *v);
    let classes = match op {
        Op::CrossEntropy { first: 0 } => own,
        // Of a shard, classes before its own and behind them too.
        Op::CrossEntropy { first } => first + own + OTHER_CLASSES,
        Op::CrossEntropyGrad { classes, .. } => *classes,
        other => panic!("{other} is not a cross-entropy"),
    };
    InputSpec::normal(inputs).with(1, InputFill::Targets(classes as u32))
}

/// See [`Twin::forward`].
fn forward(op: &Op) -> Option<Forward> {
    let (inputs, outputs) = (vec![0, 1], vec![(1, 2)]);
    let Op::CrossEntropyGrad { first, .. } = op else { return None };
    Some(Forward { op: Op::CrossEntropy { first: *first }, inputs, outputs })
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let c = inputs[0].last().copied().unwrap_or(1);
    let rows = |n| [vec![vec![n, c]], vec![vec![n]; inputs.len() - 1]].concat();
    calls(op, PROBE_ROWS.map(rows))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    vec![
        (Op::CrossEntropy { first: 0 }, vec![vec![N, V], vec![N]]),
        // Rows that a workgroup shares.
        (Op::CrossEntropy { first: 0 }, vec![vec![N, GROUP + V], vec![N]]),
        (Op::CrossEntropyGrad { first: 0, classes: V }, vec![vec![N, V], vec![N], vec![N]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{InputFill, generate};
    use crate::testing::gradient::check_gradient;
    use crate::testing::{self, check_with};
    use potluck_core::{HostTensor, Shape};
    use potluck_graph::IGNORE_INDEX;

    const LOSS: Op = Op::CrossEntropy { first: 0 };

    type Input = (Shape, HostTensor<f64>);

    /// Returns logits and targets of `rows * n` rows.
    fn inputs(
        n: usize,
        v: usize,
        rows: usize,
        logits: InputFill,
        targets: InputFill,
    ) -> [Input; 2] {
        let count = rows * n;
        [
            (Shape::batched(&[n, v]), generate(logits, count * v, 0)),
            (Shape::batched(&[n]), generate(targets, count, 1)),
        ]
    }

    /// Returns the inputs of the gradient: those of the loss, and its `lse`.
    fn with_lse(inputs: &[Input; 2], rows: usize) -> [Input; 3] {
        let lse = testing::reference(&LOSS, inputs, rows).remove(1);
        [inputs[0].clone(), inputs[1].clone(), (inputs[1].0.clone(), HostTensor::Float(lse))]
    }

    /// Returns the gradient of logits over all classes.
    fn gradient(inputs: &[Input; 2]) -> Op {
        Op::CrossEntropyGrad { first: 0, classes: inputs[0].0.last() }
    }

    fn check_both(inputs: [Input; 2], rows: usize) {
        check_with(LOSS, &inputs, rows);
        check_with(gradient(&inputs), &with_lse(&inputs, rows), rows);
    }

    #[test]
    fn losses_and_gradients_agree_everywhere() {
        for (n, v, rows) in [
            (1, 1, 1),
            (3, 7, 2),
            (64, 65, 3),
            (1, 8, 5),
            (2, 256, 1),
            (1, 257, 3),
            (3, 300, 7),
            (1, 2500, 2),
            (1, 5003, 2),
            (1, 50_257, 3),
        ] {
            let targets = InputFill::Targets(v as u32);
            check_both(inputs(n, v, rows, InputFill::Normal, targets), rows);
        }
    }

    #[test]
    fn large_logits_stay_stable() {
        let logits = InputFill::Scaled(50.0, 1000.0);
        check_both(inputs(5, 33, 3, logits, InputFill::Targets(33)), 3);
        check_both(inputs(5, 33, 3, InputFill::Scaled(50.0, -1000.0), InputFill::Targets(33)), 3);
        for scale in [1000.0, -1000.0] {
            let logits = InputFill::Scaled(50.0, scale);
            check_with(LOSS, &inputs(2, 777, 3, logits, InputFill::Targets(777)), 3);
        }
    }

    #[test]
    fn targets_that_are_no_class_do_not_count() {
        let [logits, _] = inputs(1, 6, 4, InputFill::Normal, InputFill::Ids(6));
        let targets = (Shape::batched(&[1]), HostTensor::Int(vec![IGNORE_INDEX, 6, 1 << 31, 5]));
        let long = inputs(1, 600, 4, InputFill::Normal, InputFill::Ids(600));
        let masked = HostTensor::Int(vec![IGNORE_INDEX, 600, 1 << 31, 599]);
        check_both([long[0].clone(), (Shape::batched(&[1]), masked)], 4);
        let both = [logits, targets];
        check_both(both.clone(), 4);
        let parts = testing::reference(&LOSS, &both, 4).remove(0);
        assert_eq!(parts[..6], [0.0; 6]);
        assert!(parts[6] > 0.0 && parts[7] == 1.0, "{parts:?}");
        let dx = testing::reference(&gradient(&both), &with_lse(&both, 4), 4).remove(0);
        assert!(dx[..18].iter().all(|dx| *dx == 0.0) && dx[18..].iter().all(|dx| *dx != 0.0));
    }

    /// Classes from the middle of 30 and of 700: targets before them, among them, behind them, and
    /// of no class. The losses and gradients of all shards are those of one over all classes.
    #[test]
    fn shards_have_the_classes_from_their_first_on() {
        for (classes, cuts) in [(30, [0, 7, 8, 30]), (700, [0, 300, 301, 700])] {
            let (n, rows) = (13, 3);
            let [logits, (shape, _)] =
                inputs(n, classes, rows, InputFill::Normal, InputFill::Ids(1));
            let mut ids: Vec<u32> = (0..n * rows).map(|row| (row * 17 % classes) as u32).collect();
            ids[3] = IGNORE_INDEX;
            ids[4] = classes as u32;
            let targets = (shape, HostTensor::Int(ids));
            let whole = [logits.clone(), targets.clone()];
            let of_all = with_lse(&whole, rows);
            let HostTensor::Float(values) = &logits.1 else { panic!("logits are floats") };
            let dlogits = testing::reference(&gradient(&whole), &of_all, rows).remove(0);
            let mut counts = vec![0.0; n * rows];
            for cut in cuts.windows(2) {
                let (first, v) = (cut[0], cut[1] - cut[0]);
                let own = values.chunks_exact(classes).flat_map(|row| &row[first..first + v]);
                let own = HostTensor::Float(own.copied().collect());
                let own = (Shape::batched(&[n, v]), own);
                let loss = Op::CrossEntropy { first };
                check_with(loss.clone(), &[own.clone(), targets.clone()], rows);
                let inputs = [own.clone(), targets.clone(), of_all[2].clone()];
                let grad = Op::CrossEntropyGrad { first, classes };
                check_with(grad.clone(), &inputs, rows);
                let dx = testing::reference(&grad, &inputs, rows).remove(0);
                let expected = dlogits.chunks_exact(classes).flat_map(|row| &row[first..first + v]);
                assert!(dx.iter().eq(expected), "classes from {first} on");
                let parts = testing::reference(&loss, &[own, targets.clone()], rows).remove(0);
                counts
                    .iter_mut()
                    .zip(parts.chunks_exact(2))
                    .for_each(|(sum, part)| *sum += part[1]);
            }
            let expected = testing::reference(&LOSS, &whole, rows).remove(0);
            assert!(counts.iter().eq(expected.iter().skip(1).step_by(2)), "{counts:?}");
        }
    }

    #[test]
    fn equal_logits_cost_the_logarithm_of_the_classes() {
        let logits = (Shape::batched(&[1, 4]), HostTensor::Float(vec![2.5; 4]));
        let targets = (Shape::batched(&[1]), HostTensor::Int(vec![2]));
        let outputs = testing::reference(&LOSS, &[logits, targets], 1);
        assert!((outputs[0][0] - 4f64.ln()).abs() < 1e-12, "{outputs:?}");
    }

    #[test]
    fn the_gradient_is_the_derivative() {
        let both = inputs(2, 5, 3, InputFill::Normal, InputFill::Targets(5));
        let dx = testing::reference(&gradient(&both), &with_lse(&both, 3), 3);
        let weights = [[1.0, 0.0].repeat(6), vec![0.0; 6]];
        check_gradient(&LOSS, &both, 3, 0, &weights, &dx[0]);
    }
}
