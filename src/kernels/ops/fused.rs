//! Fused ops: a root op and epilogue steps on its values in one kernel. The root is a matrix
//! product, a convolution, the gradient of layer norm (with which only a sum is fused), or the
//! first op of an elementwise chain, for which `shaders/fused.wgsl` is the kernel. [`epilogue`]
//! generates the WGSL of the steps.

mod probes;

use std::borrow::Cow;

use rayon::prelude::*;

use super::epilogue::{self, Epilogue, EpilogueStep};
use super::joint::twin_of;
use super::{binary, conv, elements, fused_vectors, layer_norm, matmul, unary};
use crate::dispatch::grid;
use crate::twin::{Forward, IndependentAxis, normal_inputs};
use crate::{Caps, Cost, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant, twin};
use potluck_core::arithmetic::gcd;
use potluck_core::{DType, HostTensorView, Shape};
use potluck_graph::{Accumulation, Binary, Op, shapes};
use probes::{catalog, probes};

/// Twin of [`Op::Fused`].
pub static TWIN: Twin = Twin {
    name: "fused",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations,
    inputs: normal_inputs,
    forward,
    independent_axes,
    probes,
    catalog,
};

/// Elements per rayon task of `fast`: few enough to stay in the first-level cache from step to
/// step.
const TASK: usize = 4096;

/// Root op of a call, and the number of inputs that are operands of the steps.
fn root_of<'a>(call: &OpCall<'a>) -> (&'a Op, usize) {
    let Op::Fused { root, epilogue } = call.op else { panic!("{} is not fused", call.op) };
    (root, epilogue.iter().filter(|step| step.has_operand()).count())
}

fn root_call<'a>(call: &OpCall<'a>) -> OpCall<'a> {
    let (op, operands) = root_of(call);
    let inputs = call.inputs[..call.inputs.len() - operands].to_vec();
    let typed: Vec<_> = inputs.iter().map(|dims| (Shape::fixed(dims), DType::F32)).collect();
    let outputs = shapes::outputs(op, &typed)
        .unwrap_or_else(|error| panic!("the shape rules have checked {op}: {error}"));
    let outputs = outputs.into_iter().map(|(shape, _)| shape.dims().to_vec()).collect();
    OpCall { op, inputs, outputs, accumulate: Accumulation::NONE, ..*call }
}

/// Bytes that the CPU kernel takes besides its tensors; 0 for another op.
pub(crate) fn host_bytes(call: &OpCall) -> usize {
    match call.op {
        Op::Fused { .. } => {
            let root = root_call(call);
            matmul::host_bytes(&root).max(conv::host_bytes(&root))
        }
        _ => 0,
    }
}

/// See [`Twin::forward`]: the forward op of the root op, whose inputs come first.
fn forward(op: &Op) -> Option<Forward> {
    (twin(op.root_op())?.forward)(op.root_op())
}

/// Returns the call with outputs in the shape of its root op, for kernels that read sizes from
/// there.
fn natural<'a>(call: &OpCall<'a>) -> OpCall<'a> {
    let outputs = vec![root_call(call).outputs[0].clone(); call.outputs.len()];
    OpCall { outputs, ..call.clone() }
}

/// Returns the input that an elementwise chain transforms, and all its steps with the root op
/// first; `None` if the root op is not elementwise.
fn chain(call: &OpCall) -> Option<(usize, Vec<EpilogueStep>)> {
    let (source, root) = epilogue::as_step(root_of(call).0)?;
    Some((source, [vec![root], epilogue::steps(call)].concat()))
}

/// Reference: the reference of the root op, then one plain loop per step.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let root = root_call(call);
    let mut values = vec![T::zero(); call.output_len(0)];
    let reference = match root.op {
        Op::MatMul { .. } => matmul::reference::<T>,
        Op::Conv2d(_) | Op::Conv2dInputGrad { .. } => conv::reference::<T>,
        Op::LayerNormGrad | Op::RmsNormGrad => layer_norm::reference::<T>,
        Op::Unary(_) | Op::UnaryGrad(_) => unary::reference::<T>,
        Op::Binary(_) => binary::reference::<T>,
        other => panic!("nothing is fused behind {other}"),
    };
    reference(&root, &inputs[..root.inputs.len()], &mut [values.as_mut_slice()]);
    for step in epilogue::steps(call) {
        match step {
            EpilogueStep::Unary(function) => {
                for v in &mut values {
                    *v = elements::value(function, *v);
                }
            }
            EpilogueStep::UnaryGrad(function, input) => {
                for (v, x) in values.iter_mut().zip(inputs[input].floats()) {
                    *v = elements::gradient(function, *x, *v);
                }
            }
            EpilogueStep::Binary(function, input) => {
                for (v, b) in values.iter_mut().zip(inputs[input].floats().iter().cycle()) {
                    *v = elements::value_of_two(function, *v, *b);
                }
            }
            EpilogueStep::Store(output) => outputs[output].copy_from_slice(&values),
        }
    }
    outputs[0].copy_from_slice(&values);
}

/// CPU kernel: a root op, and its steps in a second pass over its values; a chain in one pass.
/// Tasks of `TASK` elements run in parallel, and each step is the same loop as of the op that is
/// not fused.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let (source, steps) = match chain(call) {
        Some((source, steps)) => (Some(inputs[source].floats()), steps),
        None => {
            let root = root_call(call);
            (twin_of(&root).fast)(&root, &inputs[..root.inputs.len()], &mut outputs[..1]);
            (None, epilogue::steps(call))
        }
    };
    let operands: Vec<Cow<[f32]>> = steps.iter().map(|step| operand(*step, inputs)).collect();
    let mut tasks: Vec<Vec<&mut [f32]>> = Vec::new();
    tasks.resize_with(call.output_len(0).div_ceil(TASK), Vec::new);
    for output in outputs {
        for (task, part) in tasks.iter_mut().zip(output.chunks_mut(TASK)) {
            task.push(part);
        }
    }
    tasks.par_iter_mut().enumerate().for_each(|(task, parts)| {
        run_task(source, &steps, &operands, task * TASK, parts);
    });
}

/// Operand of a step, repeated until inner loops are long enough if it is short.
fn operand<'a>(step: EpilogueStep, inputs: &[HostTensorView<'a, f32>]) -> Cow<'a, [f32]> {
    match step {
        EpilogueStep::Binary(_, input) => binary::repeated(inputs[input].floats()),
        EpilogueStep::UnaryGrad(_, input) => inputs[input].floats().into(),
        EpilogueStep::Unary(_) | EpilogueStep::Store(_) => Cow::default(),
    }
}

/// Runs all steps on the elements from `start`; `parts` are the slices of each output for these
/// elements. The values are read from `source`, or else from the first output.
fn run_task(
    source: Option<&[f32]>,
    steps: &[EpilogueStep],
    operands: &[Cow<[f32]>],
    start: usize,
    parts: &mut [&mut [f32]],
) {
    let [y, kept @ ..] = parts else { return };
    let range = start..start + y.len();
    let mut source = source.map(|x| &x[range.clone()]);
    let mut before = [0.0; TASK];
    let before = &mut before[..range.len()];
    for (step, operand) in steps.iter().zip(operands) {
        if let EpilogueStep::Store(output) = *step {
            kept[output - 1].copy_from_slice(y);
            continue;
        }
        let x = match source.take() {
            Some(x) => x,
            None => {
                before.copy_from_slice(y);
                &*before
            }
        };
        match *step {
            EpilogueStep::Unary(function) => elements::values(function, x, y),
            EpilogueStep::UnaryGrad(function, _) => {
                elements::gradients(function, &operand[range.clone()], x, y);
            }
            EpilogueStep::Binary(function, _) => combine(function, start, x, operand, y),
            EpilogueStep::Store(_) => {}
        }
    }
}

/// Computes `y = f(x, b)`, where the first element of `x` is element `start` of the whole tensor,
/// over which `b` repeats.
fn combine(function: Binary, start: usize, mut x: &[f32], b: &[f32], mut y: &mut [f32]) {
    let mut at = start % b.len();
    while !x.is_empty() {
        let length = x.len().min(b.len() - at);
        let (part, rest) = y.split_at_mut(length);
        elements::combine(function, part, &x[..length], &b[at..at + length]);
        x = &x[length..];
        y = rest;
        at = 0;
    }
}

/// Static choice: the static choice of the root op, with the steps as its epilogue; for a chain,
/// vectors of 4 where lengths allow them.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let Some((source, steps)) = chain(call) else {
        return (twin_of(&root_call(call)).dispatch)(&natural(call), caps);
    };
    match elementwise4(call, source, &steps) {
        Some(vectors) => vec![vectors],
        None => vec![elementwise(call, source, &steps)],
    }
}

/// Returns the kernel variants of the root op, with the steps as their epilogue.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let Some((source, steps)) = chain(call) else {
        return (twin_of(&root_call(call)).variants)(&natural(call), caps);
    };
    let mut variants = vec![Variant::new("chain", vec![elementwise(call, source, &steps)])];
    if let Some(vectors) = elementwise4(call, source, &steps) {
        variants.push(Variant::new("chain4", vec![vectors]));
    }
    variants
}

fn elementwise(call: &OpCall, source: usize, steps: &[EpilogueStep]) -> Dispatch {
    let own = [Operand::Input(source), Operand::Output(0)];
    let Epilogue { text: store, operands } = epilogue::of_steps(call, steps, own.len());
    let count = call.output_len(0);
    Dispatch {
        shader: Shader::new("fused", "chain").with_text(&store),
        operands: [&own[..], &operands].concat(),
        params: vec![count as u32],
        groups: grid(count, 512),
    }
}

/// Kernel of a chain on vectors of 4; `None` if lengths are not multiples of 4.
fn elementwise4(call: &OpCall, source: usize, steps: &[EpilogueStep]) -> Option<Dispatch> {
    let own = [Operand::Input(source), Operand::Output(0)];
    let Epilogue { text: store, operands } = fused_vectors::of_steps(call, steps, own.len())?;
    let count = call.output_len(0);
    Some(Dispatch {
        shader: Shader::new("fused_vectors", "chain4").with_text(&store),
        operands: [&own[..], &operands].concat(),
        params: vec![(count / 4) as u32],
        groups: grid(count, 1024),
    })
}

/// Returns the cost: the FLOPs of the root op and of each step; every operand and output is moved
/// once.
pub fn cost(call: &OpCall) -> Cost {
    let root = root_call(call);
    let first_flops = twin(root.op).map_or(0.0, |twin| (twin.cost)(&root).flops);
    let each: f64 = epilogue::steps(call).into_iter().map(step_flops).sum();
    let flops = first_flops + each * call.output_len(0) as f64;
    Cost { flops, bytes: Cost::moved(call) }
}

fn step_flops(step: EpilogueStep) -> f64 {
    match step {
        EpilogueStep::Unary(function) => unary::flops(function, false),
        EpilogueStep::UnaryGrad(function, _) => unary::flops(function, true),
        EpilogueStep::Binary(..) => 1.0,
        EpilogueStep::Store(_) => 0.0,
    }
}

/// See [`Twin::iterations`]: the iterations of the root op; a chain has no loops.
fn iterations(call: &OpCall) -> usize {
    let root = root_call(call);
    if chain(call).is_some() { 0 } else { (twin_of(&root).iterations)(&root) }
}

/// See [`Twin::independent_axes`]: rows and columns of the root op.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let root = root_call(call);
    let axes = (twin_of(&root).independent_axes)(&root);
    let last = root.outputs[0].len().checked_sub(1);
    let mut found = Vec::new();
    if let Some(rows) = axes.iter().find(|axis| axis.outputs == [Some(0)]) {
        found.extend(axis_of_rows(call, &root, rows));
    }
    if last != Some(0)
        && let Some(columns) = axes.iter().find(|axis| axis.outputs == [last])
    {
        found.extend(axis_of_columns(call, &root, columns));
    }
    found
}

/// First axis of all outputs, given the root op's.
fn axis_of_rows(call: &OpCall, root: &OpCall, rows: &IndependentAxis) -> Option<IndependentAxis> {
    let count = call.output_len(0);
    let mut parts = rows.parts;
    let mut inputs = rows.inputs.clone();
    for operand in root.inputs.len()..call.inputs.len() {
        let length = call.input_len(operand);
        if length < count {
            // A smaller operand is repeated, in each part from its beginning.
            parts = gcd(parts, count / length);
            inputs.push(None);
        } else {
            inputs.push(Some(0));
        }
    }
    let axis = IndependentAxis::of(call, inputs, vec![Some(0); call.outputs.len()])?;
    Some(IndependentAxis { parts: gcd(parts, axis.parts), ..axis })
}

/// Last axis of all outputs, given the root op's, if all operands have it.
fn axis_of_columns(
    call: &OpCall,
    root: &OpCall,
    columns: &IndependentAxis,
) -> Option<IndependentAxis> {
    let width = root.outputs[0].last();
    let mut inputs = columns.inputs.clone();
    for dims in &call.inputs[root.inputs.len()..] {
        inputs.push(Some(last_axis(dims, width)?));
    }
    let mut outputs = Vec::new();
    for dims in &call.outputs {
        outputs.push(Some(last_axis(dims, width)?));
    }
    IndependentAxis::of(call, inputs, outputs)
}

/// The last axis of a tensor, if it has this length.
fn last_axis(dims: &[usize], length: Option<&usize>) -> Option<usize> {
    if dims.last() == length { dims.len().checked_sub(1) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::ShaderChecks;
    use crate::harness::{InputFill, generate};
    use crate::testing::{
        check, check_mixed, compare, for_each_gpu, on_gpu, reference as expected,
    };
    use crate::{OwnedCall, RandomContext};
    use potluck_core::HostTensor;
    use potluck_core::rng::Key;
    use potluck_graph::{Conv2dOptions, EpilogueOp, Precision, Unary};

    const ADD: EpilogueOp = EpilogueOp::Binary(Binary::Add);
    const MUL: EpilogueOp = EpilogueOp::Binary(Binary::Mul);

    /// Steps, and for each operand true if it is as large as the value: every kind of step, in
    /// kernels of up to 8 tensors.
    const CHAINS: [(&[EpilogueOp], &[bool]); 6] = [
        (
            &[
                EpilogueOp::Binary(Binary::Sub),
                EpilogueOp::Unary(Unary::Sigmoid),
                EpilogueOp::Binary(Binary::Maximum),
                EpilogueOp::Unary(Unary::Silu),
            ],
            &[true, false],
        ),
        (
            &[
                EpilogueOp::UnaryGrad(Unary::Tanh),
                EpilogueOp::UnaryGrad(Unary::Silu),
                EpilogueOp::Unary(Unary::Tanh),
                EpilogueOp::Binary(Binary::Div),
            ],
            &[true, true, false],
        ),
        (&[ADD, EpilogueOp::Store, EpilogueOp::Unary(Unary::Gelu), MUL], &[false, true]),
        (
            &[EpilogueOp::UnaryGrad(Unary::GeluTanh), ADD, EpilogueOp::Unary(Unary::Relu)],
            &[true, true],
        ),
        (
            &[
                EpilogueOp::Unary(Unary::Scale(-0.3)),
                EpilogueOp::Store,
                EpilogueOp::Unary(Unary::GeluTanh),
                EpilogueOp::UnaryGrad(Unary::Relu),
                EpilogueOp::Store,
                MUL,
            ],
            &[true, false],
        ),
        (
            &[EpilogueOp::UnaryGrad(Unary::Gelu), EpilogueOp::UnaryGrad(Unary::Scale(1.5e-3))],
            &[true, true],
        ),
    ];

    fn fused(root: Op, epilogue: &[EpilogueOp]) -> Op {
        Op::Fused { root: Box::new(root), epilogue: epilogue.to_vec() }
    }

    /// Shapes of the operands of a chain on values of shape `y`.
    fn operands(y: &Shape, whole: &[bool]) -> Vec<(Shape, InputFill)> {
        let shape = |whole: &bool| if *whole { y.clone() } else { Shape::fixed(&[y.last()]) };
        whole.iter().map(|whole| (shape(whole), InputFill::Normal)).collect()
    }

    /// Checks every implementation, including all variants on every adapter, not only the static
    /// choice.
    fn check_variants(op: &Op, inputs: &[(Shape, InputFill)]) {
        check(op.clone(), inputs, 1);
        check_named(op, inputs, &|_| true);
    }

    /// Checks the variants of these names on every adapter without checks, candidates or not.
    fn check_named(op: &Op, inputs: &[(Shape, InputFill)], is_named: &dyn Fn(&Variant) -> bool) {
        let fill = |(i, (shape, fill)): (usize, &(Shape, InputFill))| {
            (shape.clone(), generate(*fill, shape.elements(1), i))
        };
        let inputs: Vec<(Shape, HostTensor<f64>)> = inputs.iter().enumerate().map(fill).collect();
        let dims = inputs.iter().map(|(shape, _)| shape.resolve(1)).collect();
        let random = RandomContext { step_key: Key::new(0), training: true };
        let owned_call = OwnedCall::new(op.clone(), dims, random).unwrap();
        let call = owned_call.call();
        let expected = expected(op, &inputs, 1);
        for_each_gpu(|gpu, pipelines| {
            if gpu.checks == ShaderChecks::Enabled {
                return;
            }
            let mut every = variants(&call, &Caps::of(gpu).with_all_that_run());
            every.retain(is_named);
            assert!(!every.is_empty(), "{op} has no such variant");
            for Variant { name, dispatches } in every {
                let got = on_gpu(gpu, pipelines, &call, &dispatches, &inputs, f32::NAN);
                let wide = got.iter().map(|c| c.iter().map(|c| f64::from(*c)).collect());
                let what = format!("{name} of {op} on {}", gpu.name);
                compare(&what, &wide.collect::<Vec<_>>(), &expected);
            }
        });
    }

    /// Rows of a multiple of four values are stored as vectors.
    #[test]
    fn every_step_follows_in_vectors() {
        let stores_vectors = |variant: &Variant| {
            let text = crate::source::text(&variant.dispatches[0].shader);
            text.contains("fn store4(")
        };
        let is_tile = |variant: &Variant| variant.name == "matmul_shared_32x32";
        for ((epilogue, whole), (ta, tb)) in CHAINS.into_iter().zip(TRANSPOSES) {
            let [m, k, n] = [36, 5, 40];
            let behind = operands(&Shape::fixed(&[m, n]), whole);
            let inputs = [factors(&[], [m, k, n], ta, tb), behind].concat();
            let op = fused(product(ta, tb), epilogue);
            check_named(&op, &inputs, &|variant| is_tile(variant) && stores_vectors(variant));
        }
        // Of two rows of values, and of a single value.
        let op = fused(product(false, false), &[ADD, MUL]);
        let positions = (Shape::fixed(&[18, 40]), InputFill::Normal);
        let mut inputs = factors(&[], [36, 5, 40], false, false);
        inputs.extend([positions, (Shape::fixed(&[]), InputFill::Normal)]);
        check_named(&op, &inputs, &|variant| is_tile(variant) && stores_vectors(variant));
    }

    /// The dispatch that adds the parts of a long sum applies the steps, on vectors or not.
    #[test]
    fn every_step_follows_the_parts_of_a_sum() {
        for (index, (epilogue, whole)) in CHAINS.into_iter().enumerate() {
            let [m, k, n] = [64, 1024, 64 + index % 2];
            let behind = operands(&Shape::fixed(&[m, n]), whole);
            let inputs = [factors(&[], [m, k, n], false, true), behind].concat();
            let op = fused(product(false, true), epilogue);
            check_named(&op, &inputs, &|variant| variant.name == "matmul_shared_64x64_split_k");
        }
    }

    fn product(transpose_a: bool, transpose_b: bool) -> Op {
        Op::MatMul { transpose_a, transpose_b }
    }

    fn factors(
        batch: &[usize],
        [m, k, n]: [usize; 3],
        ta: bool,
        tb: bool,
    ) -> Vec<(Shape, InputFill)> {
        let a = if ta { [k, m] } else { [m, k] };
        let b = if tb { [n, k] } else { [k, n] };
        [a, b].map(|dims| (Shape::fixed(&[batch, &dims].concat()), InputFill::Normal)).to_vec()
    }

    const TRANSPOSES: [(bool, bool); 4] =
        [(false, false), (false, true), (true, false), (true, true)];

    /// `store` is the same text for all transpositions, so each chain is checked with a different
    /// one: hundreds of large tiles would take minutes to compile.
    #[test]
    fn every_step_follows_every_variant_of_a_product() {
        for ((epilogue, whole), (ta, tb)) in CHAINS.into_iter().zip(TRANSPOSES) {
            let [m, k, n] = [17, 5, 31];
            let y = Shape::fixed(&[m, n]);
            let inputs = [factors(&[], [m, k, n], ta, tb), operands(&y, whole)].concat();
            check_variants(&fused(product(ta, tb), epilogue), &inputs);
        }
    }

    #[test]
    fn steps_follow_batches_of_products_and_single_values() {
        for (epilogue, whole) in CHAINS {
            for (batch, [m, k, n]) in [(3, [19, 6, 21]), (2, [1, 3, 1])] {
                for (ta, tb) in TRANSPOSES {
                    let front = factors(&[batch], [m, k, n], ta, tb);
                    let behind = operands(&Shape::fixed(&[batch, m, n]), whole);
                    check(fused(product(ta, tb), epilogue), &[front, behind].concat(), 1);
                }
            }
        }
    }

    #[test]
    fn chains_begin_with_any_elementwise_op() {
        let y = Shape::batched(&[3, 5, 37]);
        let x = (y.clone(), InputFill::Scaled(2.0, 0.1));
        for (epilogue, whole) in CHAINS {
            for rows in [1, 2, 7] {
                let behind = |root: Op, own: &[(Shape, InputFill)]| {
                    check(fused(root, epilogue), &[own, &operands(&y, whole)].concat(), rows);
                };
                behind(Op::Unary(Unary::Gelu), std::slice::from_ref(&x));
                behind(Op::UnaryGrad(Unary::GeluTanh), &[x.clone(), x.clone()]);
                behind(Op::Binary(Binary::Mul), &[x.clone(), x.clone()]);
                behind(
                    Op::Binary(Binary::Add),
                    &[x.clone(), (Shape::fixed(&[37]), InputFill::Normal)],
                );
            }
        }
    }

    /// Chains on vectors of 4, of fewer and of more vectors than a workgroup has.
    #[test]
    fn chains_of_whole_vectors_agree() {
        for width in [4, 40, 300] {
            let y = Shape::batched(&[3, width]);
            let x = (y.clone(), InputFill::Scaled(2.0, 0.1));
            for (epilogue, whole) in CHAINS {
                let behind = |root: Op, own: &[(Shape, InputFill)]| {
                    check(fused(root, epilogue), &[own, &operands(&y, whole)].concat(), 5);
                };
                behind(Op::Unary(Unary::Gelu), std::slice::from_ref(&x));
                behind(Op::UnaryGrad(Unary::GeluTanh), &[x.clone(), x.clone()]);
                let row = (Shape::fixed(&[width]), InputFill::Normal);
                behind(Op::Binary(Binary::Add), &[x.clone(), row]);
                let value = (Shape::fixed(&[]), InputFill::Scaled(1.0, 2.0));
                behind(Op::Binary(Binary::Mul), &[x.clone(), value]);
            }
        }
    }

    #[test]
    fn vectors_that_an_operand_would_split_are_not_formed() {
        let ways = |count: usize, operand: usize| {
            let op = fused(Op::Unary(Unary::Relu), &[ADD]);
            let call = OpCall {
                op: &op,
                inputs: vec![vec![count], vec![operand]],
                outputs: vec![vec![count]],
                accumulate: Accumulation::NONE,
                precision: Precision::F32,
                loss_scale: 1.0,
                random: RandomContext { step_key: Key::new(0), training: true },
            };
            variants(&call, &Caps::EVERY).len()
        };
        assert_eq!([ways(24, 24), ways(24, 8), ways(24, 1)], [2; 3]);
        assert_eq!([ways(24, 6), ways(24, 2), ways(9, 9), ways(9, 1)], [1; 4]);
    }

    /// An operand may have any shape with the number of elements of the value, or of its last
    /// dimensions in another shape; every task of `fast` must find its offset in the operand.
    #[test]
    fn operands_are_read_in_order_whatever_their_shape() {
        let x = (Shape::batched(&[96, 33]), InputFill::Normal);
        let w = (Shape::fixed(&[33, 40]), InputFill::Normal);
        let op = fused(product(false, false), &[ADD, MUL, ADD]);
        let whole = (Shape::batched(&[1, 4, 24, 40]), InputFill::Normal);
        let positions = (Shape::fixed(&[24, 40]), InputFill::Normal);
        let all = (Shape::fixed(&[4, 24, 40]), InputFill::Normal);
        for rows in [1, 3] {
            check(
                op.clone(),
                &[x.clone(), w.clone(), whole.clone(), positions.clone(), all.clone()],
                rows,
            );
        }
        let long = (Shape::batched(&[3, 701]), InputFill::Normal);
        let bias = (Shape::fixed(&[701]), InputFill::Normal);
        let op = fused(Op::Unary(Unary::Relu), &[ADD, MUL]);
        check(op, &[long.clone(), bias, (Shape::fixed(&[]), InputFill::Normal)], 5);
    }

    #[test]
    fn steps_behind_a_product_in_mixed_precision_see_its_rounded_operands() {
        let op = fused(product(false, true), &[ADD, EpilogueOp::Unary(Unary::GeluTanh), MUL]);
        let dims: [&[usize]; 4] = [&[37, 20], &[68, 20], &[68], &[37, 68]];
        let inputs = dims.map(|dims| (Shape::fixed(dims), InputFill::Normal));
        check_mixed(op, &inputs, 1);
    }

    #[test]
    fn a_single_value_behind_a_convolution_is_certified_on_convolutions() {
        let root = Op::Conv2d(Conv2dOptions::default().with_stride(2));
        let op = fused(root, &[MUL]);
        let (x, w) = (vec![2, 9, 9, 12], vec![10, 12, 3, 3]);
        let found = probes::probes(&op, &[x.clone(), w.clone(), vec![1]]);
        assert!(!found.is_empty());
        assert!(found.iter().all(|(_, inputs)| inputs.len() == 3 && inputs[2] == [1]), "{found:?}");
        let inputs = [x, w, Vec::new()].map(|dims| (Shape::fixed(&dims), InputFill::Normal));
        check_variants(&op, &inputs);
    }

    #[test]
    fn operands_of_another_size_are_refused() {
        let refused = |epilogue: EpilogueOp, operand: Shape| {
            let op = fused(Op::Unary(Unary::Relu), &[epilogue]);
            let typed = [Shape::batched(&[2, 6]), operand].map(|shape| (shape, DType::F32));
            shapes::outputs(&op, &typed).is_err()
        };
        assert!(!refused(ADD, Shape::fixed(&[3])));
        assert!(!refused(EpilogueOp::UnaryGrad(Unary::Relu), Shape::batched(&[1, 12])));
        assert!(refused(ADD, Shape::fixed(&[5])));
        assert!(refused(ADD, Shape::batched(&[6])));
        assert!(refused(ADD, Shape::fixed(&[0])));
        assert!(refused(EpilogueOp::UnaryGrad(Unary::Relu), Shape::fixed(&[12])));
    }

    #[test]
    fn cost_counts_operands_and_what_is_kept() {
        let op =
            fused(product(false, false), &[ADD, EpilogueOp::Store, EpilogueOp::Unary(Unary::Gelu)]);
        let call = OpCall {
            op: &op,
            inputs: vec![vec![3, 4], vec![4, 5], vec![5]],
            outputs: vec![vec![3, 5]; 2],
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            loss_scale: 1.0,
            random: RandomContext { step_key: Key::new(0), training: true },
        };
        let bytes = 4.0 * (12 + 20 + 5 + 15 + 15) as f64;
        assert_eq!(cost(&call), Cost { flops: (2 * 3 * 4 * 5 + 15 + 20 * 15) as f64, bytes });
    }
}
