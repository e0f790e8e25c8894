//! Cross-entropy of logits with integer targets, and its gradient. Twin of
//! `shaders/cross_entropy.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::dispatch_parts::as_words;
use super::{cross_entropy_grad, cross_entropy_subgroups};
use crate::call_shapes::{N, PROBE_ROWS, V, calls};
use crate::cpu_kernel::COSTLY_TASK;
use crate::dispatch::{ITERATIONS_MAX, Runs, grid};
use crate::harness::InputFill;
use crate::simd::{exp, largest, sum_of, vectorized};
use crate::twin::{Forward, InputSpec, leading_axis, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::{LossClasses, Op};

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
    independent_axes: leading_axis,
    probes,
    catalog,
};

/// Invocations per workgroup of the kernel with one workgroup per row; each processes at least
/// one element.
const GROUP: usize = 256;

fn classes_of(call: &OpCall) -> LossClasses {
    match call.op {
        Op::CrossEntropy(classes) | Op::CrossEntropyGrad(classes) => *classes,
        other => panic!("{other} is not a cross-entropy"),
    }
}

/// Target of a row of logits.
#[derive(Clone, Copy)]
struct RowTarget {
    /// True if the target is a class, also if the logits of this class are in another call.
    counts: bool,
    /// Index of the target among the logits, if they have its class.
    own: Option<usize>,
}

impl RowTarget {
    /// Creates the target of a row of `v` logits.
    fn new(classes: LossClasses, target: u32, v: usize) -> Self {
        let target = target as usize;
        let own = target.checked_sub(classes.first).filter(|class| *class < v);
        Self { counts: target < classes.all, own }
    }
}

/// Attributes of a call of the gradient.
#[derive(Clone, Copy)]
struct GradientOf {
    classes: LossClasses,
    /// Loss scale.
    scale: f32,
}

/// Reference: `logits (n, v), targets (n) -> parts (n, 2), lse (n)`, or
/// `logits, targets, lse -> dlogits (n, v)`. A target that is no class is ignored, as is
/// [`potluck_graph::IGNORE_INDEX`]. The loss scale multiplies the gradient.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let v = call.rows_and_last(0).1;
    let classes = classes_of(call);
    let smoothing = T::from(classes.smoothing).unwrap_or_else(T::nan);
    let kept = T::one() - smoothing;
    let even = smoothing / T::from(classes.all).unwrap_or_else(T::nan);
    let scale = T::from_f64(f64::from(call.loss_scale));
    let targets = inputs[1].ints();
    for (row, x) in inputs[0].floats().chunks_exact(v).enumerate() {
        let RowTarget { counts, own } = RowTarget::new(classes, targets[row], v);
        if let Op::CrossEntropyGrad { .. } = call.op {
            let lse = inputs[2].floats()[row];
            let dx = &mut outputs[0][row * v..][..v];
            for j in 0..v {
                let hit = if own == Some(j) { kept + even } else { even };
                dx[j] = if counts { scale * ((x[j] - lse).exp() - hit) } else { T::zero() };
            }
            continue;
        }

        // The logits of a part of the classes may all be minus infinity.
        let m = x.iter().copied().fold(x[0], T::max).max(T::min_value());
        let s: T = x.iter().map(|x| (*x - m).exp()).sum();
        let lse = m + s.ln();
        let mut part = [T::zero(); 2];
        if let Some(class) = own {
            part = [lse - kept * x[class], T::one()];
        }
        if counts && smoothing > T::zero() {
            part[0] -= even * x.iter().copied().sum::<T>();
        }
        outputs[0][2 * row..][..2].copy_from_slice(&part);
        outputs[1][row] = lse;
    }
}

/// CPU kernel: parallel over rows.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let v = call.rows_and_last(0).1;
    let classes = classes_of(call);
    let rows = (COSTLY_TASK / v).max(1);
    let logits = inputs[0].floats().par_chunks(rows * v);
    let targets = inputs[1].ints().par_chunks(rows);
    match outputs {
        [dlogits] => {
            let lse = inputs[2].floats().par_chunks(rows);
            let of = GradientOf { classes, scale: call.loss_scale };
            let tasks = (logits, targets, lse, dlogits.par_chunks_mut(rows * v));
            tasks.into_par_iter().for_each(|(x, targets, lse, dx)| {
                dx.copy_from_slice(x);
                gradient_of_rows(dx, v, of, targets, lse);
            });
        }
        [parts, lse] => {
            let parts = parts.par_chunks_mut(2 * rows);
            let tasks = (logits, targets, parts, lse.par_chunks_mut(rows));
            tasks.into_par_iter().for_each(|(x, targets, parts, lse)| {
                for (row, x) in x.chunks_exact(v).enumerate() {
                    let target = RowTarget::new(classes, targets[row], v);
                    lse[row] = loss_row(x, classes, target, &mut parts[2 * row..][..2]);
                }
            });
        }
        other => panic!("{} has no {} outputs", call.op, other.len()),
    }
}

/// Replaces rows of `v` logits by their gradients.
fn gradient_of_rows(x: &mut [f32], v: usize, of: GradientOf, targets: &[u32], lse: &[f32]) {
    for (row, x) in x.chunks_exact_mut(v).enumerate() {
        gradient_of_row(x, of, RowTarget::new(of.classes, targets[row], v), lse[row]);
    }
}

/// Replaces rows of logits by the gradient of a call, given the targets and `lse` of the rows: the
/// reference, in any precision.
pub(super) fn reference_in_place<T: Float>(
    call: &OpCall,
    logits: &mut [T],
    targets: &[u32],
    lse: &[T],
) {
    let given = logits.to_vec();
    let inputs =
        [HostTensorView::Float(&given), HostTensorView::Int(targets), HostTensorView::Float(lse)];
    reference(call, &inputs, &mut [logits]);
}

/// Computes the same as [`reference_in_place`], parallel over rows.
pub(super) fn fast_in_place(call: &OpCall, logits: &mut [f32], targets: &[u32], lse: &[f32]) {
    let v = call.rows_and_last(0).1;
    let of = GradientOf { classes: classes_of(call), scale: call.loss_scale };
    let rows = (COSTLY_TASK / v).max(1);
    let tasks = (logits.par_chunks_mut(rows * v), targets.par_chunks(rows), lse.par_chunks(rows));
    tasks.into_par_iter().for_each(|(x, targets, lse)| gradient_of_rows(x, v, of, targets, lse));
}

vectorized! {
    /// Writes `(loss, count)` of a row and returns its `lse`.
    fn loss_row<S>(x: &[f32], classes: LossClasses, target: RowTarget, part: &mut [f32]) -> f32 {
        let m = largest(x);
        // The logits of a part of the classes may all be minus infinity.
        let log_s = if m == f32::NEG_INFINITY {
            f32::NEG_INFINITY
        } else {
            libm::logf(sum_of(x.len(), |j| exp::<S>(x[j] - m)))
        };
        let (kept, even) = (classes.kept(), classes.even());
        let mut smoothed = 0.0;
        if even > 0.0 && target.counts {
            let sum = sum_of(x.len(), |j| x[j]);
            // The loss of the target counts from the largest logit, which may be infinite.
            let above = if target.own.is_some() { classes.smoothing * m } else { 0.0 };
            smoothed = above - even * sum;
        }
        let of_own = |class: usize| [log_s - kept * (x[class] - m), 1.0];
        let [loss, count] = target.own.map_or([0.0; 2], of_own);
        part.copy_from_slice(&[loss + smoothed, count]);
        m + log_s
    }

    /// Replaces the logits of a row by the gradient of its loss.
    fn gradient_of_row<S>(x: &mut [f32], of: GradientOf, target: RowTarget, lse: f32) {
        if !target.counts {
            return x.fill(0.0);
        }
        let GradientOf { classes, scale } = of;
        let even = classes.even();
        for x in x.iter_mut() {
            *x = scale * (exp::<S>(*x - lse) - even);
        }
        if let Some(class) = target.own {
            // The same as if the scale, a power of two, multiplied the difference.
            x[class] -= scale * classes.kept();
        }
    }
}

/// Static choice: vectors of 4 for gradients whose number of classes is a multiple of 4, else the
/// baseline.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    if caps.wants_gpu_variants()
        && let Some(way) = group(call)
    {
        return vec![way];
    }
    vec![vectors(call).unwrap_or_else(|| plain(call))]
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let mut ways = vec![plain(call)];
    ways.extend(vectors(call));
    ways.extend(group(call));
    if let Some(way) = of_groups(call) {
        ways.extend(cross_entropy_subgroups::way(way, caps));
    }
    ways.into_iter().map(|way| Variant::new(way.shader.entry, vec![way])).collect()
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
    if !v.is_multiple_of(4) || !matches!(call.op, Op::CrossEntropyGrad { .. }) {
        return None;
    }
    let runs = Runs::new(v / 4);
    Some(one(call, "cross_entropy_grad4", runs, grid(n * runs.across, 64)))
}

/// Returns the loss kernel with one workgroup per row, if rows are long enough and it is not the
/// baseline.
fn group(call: &OpCall) -> Option<Dispatch> {
    if 2 * call.rows_and_last(0).1 > ITERATIONS_MAX { None } else { of_groups(call) }
}

/// Loss kernel with one workgroup per row, if rows are long enough.
fn of_groups(call: &OpCall) -> Option<Dispatch> {
    let fits = call.rows_and_last(0).1 >= GROUP && matches!(call.op, Op::CrossEntropy { .. });
    if fits { Some(by_groups(call)) } else { None }
}

fn by_groups(call: &OpCall) -> Dispatch {
    let (n, v) = call.rows_and_last(0);
    one(call, "cross_entropy_group", Runs::new(v), grid(n, 1))
}

fn one(call: &OpCall, entry: &'static str, runs: Runs, groups: [u32; 3]) -> Dispatch {
    let (n, v) = call.rows_and_last(0);
    let classes = classes_of(call);
    let is_loss = matches!(call.op, Op::CrossEntropy { .. });
    let last = if is_loss {
        [Operand::Output(0), Operand::Output(1)]
    } else {
        [Operand::Input(2), Operand::Output(0)]
    };
    let shader = if is_loss {
        Shader::new("cross_entropy", entry)
    } else {
        cross_entropy_grad::into_another(entry)
    };
    let mut params = as_words(&[n, v, runs.across, runs.step, classes.first, classes.all]);
    params.extend([classes.kept(), classes.even(), call.loss_scale].map(f32::to_bits));
    Dispatch {
        shader,
        operands: vec![Operand::Input(0), Operand::Input(1), last[0], last[1]],
        params,
        groups,
    }
}

/// Returns the kernel of a gradient that replaces its input 0, the logits, with the operands
/// `logits, targets, lse`: the baseline if `is_plain`, else on vectors of 4 where they fit.
pub(super) fn in_place(call: &OpCall, is_plain: bool) -> Dispatch {
    let chosen = if is_plain { None } else { vectors(call) };
    let mut dispatch = chosen.unwrap_or_else(|| plain(call));
    dispatch.shader = cross_entropy_grad::in_place(dispatch.shader.entry);
    dispatch.operands.pop();
    dispatch
}

/// Returns the cost: one exponential per logit, which is about 10 FLOPs, and two more FLOPs.
pub fn cost(call: &OpCall) -> Cost {
    Cost { flops: 12.0 * call.input_len(0) as f64, bytes: Cost::moved(call) }
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let (Op::CrossEntropy(classes) | Op::CrossEntropyGrad(classes)) = op else {
        panic!("{op} is not a cross-entropy")
    };
    InputSpec::normal(inputs).with(1, InputFill::Targets(classes.all as u32))
}

/// See [`Twin::forward`].
fn forward(op: &Op) -> Option<Forward> {
    let &Op::CrossEntropyGrad(classes) = op else { return None };
    Some(Forward { op: Op::CrossEntropy(classes), inputs: vec![0, 1], outputs: vec![(1, 2)] })
}

/// See [`Twin::probes`].
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let c = inputs[0].last().copied().unwrap_or(1);
    calls(op, PROBE_ROWS.map(|n| [vec![vec![n, c]], vec![vec![n]; inputs.len() - 1]].concat()))
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let few = LossClasses { smoothing: 0.1, ..LossClasses::whole(V) };
    // Enough for one workgroup per row.
    let many = LossClasses { smoothing: 0.1, ..LossClasses::whole(GROUP + V) };
    vec![
        (Op::CrossEntropy(few), vec![vec![N, few.all], vec![N]]),
        (Op::CrossEntropy(many), vec![vec![N, many.all], vec![N]]),
        (Op::CrossEntropyGrad(few), vec![vec![N, few.all], vec![N], vec![N]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{InputFill, generate};
    use crate::testing::gradient::check_gradient;
    use crate::testing::{self, check_loss_scale, check_with};
    use potluck_core::{HostTensor, Shape};
    use potluck_graph::IGNORE_INDEX;

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

    fn loss(inputs: &[Input; 2]) -> Op {
        Op::CrossEntropy(LossClasses::whole(inputs[0].0.last()))
    }

    /// Inputs of the gradient: the inputs of the loss, and its `lse`.
    fn with_lse(inputs: &[Input; 2], rows: usize) -> [Input; 3] {
        let lse = testing::reference(&loss(inputs), inputs, rows).remove(1);
        [inputs[0].clone(), inputs[1].clone(), (inputs[1].0.clone(), HostTensor::Float(lse))]
    }

    fn gradient(inputs: &[Input; 2]) -> Op {
        Op::CrossEntropyGrad(LossClasses::whole(inputs[0].0.last()))
    }

    #[test]
    fn the_loss_scale_multiplies_gradients() {
        for (n, v, rows) in [(3, 7, 2), (1, 8, 5), (1, 257, 3), (2, 300, 3)] {
            let targets = InputFill::Targets(v as u32);
            let with_lse = with_lse(&inputs(n, v, rows, InputFill::Normal, targets), rows);
            let classes = LossClasses { smoothing: 0.3, ..LossClasses::whole(v) };
            check_loss_scale(&Op::CrossEntropyGrad(classes), &with_lse, rows, &[0]);
        }
    }

    /// Without and with label smoothing.
    fn check_both(inputs: [Input; 2], rows: usize) {
        let with_lse = with_lse(&inputs, rows);
        for smoothing in [0.0, 0.3] {
            let classes = LossClasses { smoothing, ..LossClasses::whole(inputs[0].0.last()) };
            check_with(Op::CrossEntropy(classes), &inputs, rows);
            check_with(Op::CrossEntropyGrad(classes), &with_lse, rows);
        }
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
            let inputs = inputs(2, 777, 3, logits, InputFill::Targets(777));
            check_with(loss(&inputs), &inputs, 3);
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
        let parts = testing::reference(&loss(&both), &both, 4).remove(0);
        assert_eq!(parts[..6], [0.0; 6]);
        assert!(parts[6] > 0.0 && parts[7] == 1.0, "{parts:?}");
        let dx = testing::reference(&gradient(&both), &with_lse(&both, 4), 4).remove(0);
        assert!(dx[..18].iter().all(|dx| *dx == 0.0) && dx[18..].iter().all(|dx| *dx != 0.0));
    }

    /// Classes from the middle of 30 and of 700: targets before them, among them, behind them, and
    /// of no class. The losses and gradients of all shards equal those over all classes.
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
                let all = LossClasses::whole(classes);
                let loss = Op::CrossEntropy(LossClasses { first, ..all });
                check_with(loss.clone(), &[own.clone(), targets.clone()], rows);
                let smoothed = LossClasses { first, smoothing: 0.1, ..all };
                check_with(Op::CrossEntropy(smoothed), &[own.clone(), targets.clone()], rows);
                let inputs = [own.clone(), targets.clone(), of_all[2].clone()];
                let grad = Op::CrossEntropyGrad(LossClasses { first, ..all });
                check_with(grad.clone(), &inputs, rows);
                check_with(Op::CrossEntropyGrad(smoothed), &inputs, rows);
                let dx = testing::reference(&grad, &inputs, rows).remove(0);
                let expected = dlogits.chunks_exact(classes).flat_map(|row| &row[first..first + v]);
                assert!(dx.iter().eq(expected), "classes from {first} on");
                let parts = testing::reference(&loss, &[own, targets.clone()], rows).remove(0);
                counts
                    .iter_mut()
                    .zip(parts.chunks_exact(2))
                    .for_each(|(sum, part)| *sum += part[1]);
            }
            let expected = testing::reference(&loss(&whole), &whole, rows).remove(0);
            assert!(counts.iter().eq(expected.iter().skip(1).step_by(2)), "{counts:?}");
        }
    }

    #[test]
    fn equal_logits_cost_the_logarithm_of_the_classes() {
        let logits = (Shape::batched(&[1, 4]), HostTensor::Float(vec![2.5; 4]));
        let targets = (Shape::batched(&[1]), HostTensor::Int(vec![2]));
        for smoothing in [0.0, 0.1, 1.0] {
            let op = Op::CrossEntropy(LossClasses { smoothing, ..LossClasses::whole(4) });
            let outputs = testing::reference(&op, &[logits.clone(), targets.clone()], 1);
            assert!((outputs[0][0] - 4f64.ln()).abs() < 1e-12, "{outputs:?}");
        }
    }

    /// `-sum_j q_j log(p_j)` with the probabilities `q = (1 - s) [target] + s / v`.
    #[test]
    fn label_smoothing_divides_a_part_of_the_probability_among_all_classes() {
        let x: [f64; 5] = [0.5, -1.0, 2.0, 3.5, -0.25];
        let (target, s) = (3, 0.25);
        let lse = x.iter().map(|x| x.exp()).sum::<f64>().ln();
        let q = |j: usize| s / 5.0 + if j == target { 1.0 - s } else { 0.0 };
        let expected: f64 = (0..5).map(|j| q(j) * (lse - x[j])).sum();
        let logits = (Shape::batched(&[1, 5]), HostTensor::Float(x.to_vec()));
        let targets = (Shape::batched(&[1]), HostTensor::Int(vec![target as u32]));
        let op = Op::CrossEntropy(LossClasses { smoothing: 0.25, ..LossClasses::whole(5) });
        let outputs = testing::reference(&op, &[logits, targets], 1);
        assert!((outputs[0][0] - expected).abs() < 1e-12, "{outputs:?}, not {expected}");
        assert_eq!(outputs[0][1], 1.0);
    }

    #[test]
    fn the_gradient_is_the_derivative() {
        let both = inputs(2, 5, 3, InputFill::Normal, InputFill::Targets(5));
        for smoothing in [0.0, 0.2] {
            let classes = LossClasses { smoothing, ..LossClasses::whole(5) };
            let gradient = Op::CrossEntropyGrad(classes);
            let dx = testing::reference(&gradient, &with_lse(&both, 3), 3);
            let weights = [[1.0, 0.0].repeat(6), vec![0.0; 6]];
            check_gradient(&Op::CrossEntropy(classes), &both, 3, 0, &weights, &dx[0]);
        }
    }
}
