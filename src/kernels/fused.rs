//! An op and steps on its values, in one kernel: a matrix product with an epilogue, or a chain of
//! elementwise ops, which is `shaders/fused.wgsl`. What the steps are on a GPU is in
//! [`epilogue`].

use std::borrow::Cow;

use rayon::prelude::*;

use super::dispatch::grid;
use super::epilogue::{self, Epilogue, Step};
use super::{Arg, Call, Cost, Dispatch, Operand, Real, Shader, Variant, binary, matmul, unary};
use crate::base::{DType, Shape};
use crate::graph::{Binary, Op, shapes};

/// Elements per task of the fast version: they stay in the first cache from step to step.
const TASK: usize = 4096;

/// The op at the front of a call, and how many of the inputs are operands of the steps.
fn first_of<'a>(call: &Call<'a>) -> (&'a Op, usize) {
    match call.op {
        Op::Fused { first, then } => (first, then.iter().filter(|s| s.has_operand()).count()),
        other => panic!("{other} is not fused"),
    }
}

/// The call of the first op alone.
fn first_call<'a>(call: &Call<'a>) -> Call<'a> {
    let (op, operands) = first_of(call);
    let inputs = call.inputs[..call.inputs.len() - operands].to_vec();
    let typed: Vec<_> = inputs.iter().map(|dims| (Shape::fixed(dims), DType::F32)).collect();
    let outputs = shapes::outputs(op, &typed)
        .unwrap_or_else(|error| panic!("the shape rules have checked {op}: {error}"));
    let outputs = outputs.iter().map(|(shape, _)| shape.dims().to_vec()).collect();
    Call { op, inputs, outputs, accumulate: false, random: call.random }
}

/// The call with outputs as its first op shapes them, for kernels that read sizes from there.
fn natural<'a>(call: &Call<'a>) -> Call<'a> {
    let outputs = vec![first_call(call).outputs[0].clone(); call.outputs.len()];
    Call { outputs, ..call.clone() }
}

/// The input that the values of an elementwise chain come from, and all its steps; `None` if the
/// first op is not elementwise.
fn chain(call: &Call) -> Option<(usize, Vec<Step>)> {
    let (source, first) = epilogue::as_step(first_of(call).0)?;
    Some((source, [vec![first], epilogue::steps(call)].concat()))
}

/// The reference of the first op, then one plain loop per step.
pub fn reference<T: Real>(call: &Call, inputs: &[Arg<'_, T>], outputs: &mut [&mut [T]]) {
    let first = first_call(call);
    let mut values = vec![T::zero(); call.output_len(0)];
    let reference = match first.op {
        Op::MatMul { .. } => matmul::reference::<T>,
        Op::Unary(_) | Op::UnaryGrad(_) => unary::reference::<T>,
        Op::Binary(_) => binary::reference::<T>,
        other => panic!("nothing is fused behind {other}"),
    };
    reference(&first, inputs, &mut [values.as_mut_slice()]);
    for step in epilogue::steps(call) {
        let each = values.iter_mut().enumerate();
        match step {
            Step::Unary(function) => each.for_each(|(_, v)| *v = unary::value(function, *v)),
            Step::UnaryGrad(function, input) => {
                let x = inputs[input].floats();
                each.for_each(|(i, v)| *v *= unary::slope(function, x[i]));
            }
            Step::Binary(function, input) => {
                let b = inputs[input].floats();
                each.for_each(|(i, v)| *v = binary::value(function, *v, b[i % b.len()]));
            }
            Step::Keep(output) => outputs[output].copy_from_slice(&values),
        }
    }
    outputs[0].copy_from_slice(&values);
}

/// A product, and its steps in a second pass over it; a chain in one pass. Tasks of [`TASK`]
/// elements run in parallel, and a step is the loop that computes the op where it is not fused.
pub fn fast(call: &Call, inputs: &[Arg<'_, f32>], outputs: &mut [&mut [f32]]) {
    let (source, steps) = match chain(call) {
        Some((source, steps)) => (Some(inputs[source].floats()), steps),
        None => {
            let first = first_call(call);
            matmul::fast(&first, &inputs[..first.inputs.len()], &mut outputs[..1]);
            (None, epilogue::steps(call))
        }
    };
    let operands: Vec<Cow<[f32]>> = steps.iter().map(|step| operand(*step, inputs)).collect();
    let mut tasks: Vec<Vec<&mut [f32]>> = Vec::new();
    tasks.resize_with(call.output_len(0).div_ceil(TASK), Vec::new);
    for output in outputs {
        let parts = tasks.iter_mut().zip(output.chunks_mut(TASK));
        parts.for_each(|(task, part)| task.push(part));
    }
    tasks.par_iter_mut().enumerate().for_each(|(task, parts)| {
        run_task(source, &steps, &operands, task * TASK, parts);
    });
}

/// What a step reads, repeated until inner loops are long enough if it is short.
fn operand<'a>(step: Step, inputs: &[Arg<'a, f32>]) -> Cow<'a, [f32]> {
    match step {
        Step::Binary(_, input) => binary::repeated(inputs[input].floats()),
        Step::UnaryGrad(_, input) => inputs[input].floats().into(),
        Step::Unary(_) | Step::Keep(_) => Cow::default(),
    }
}

/// All steps on the elements from `start`: `parts` are theirs of each output. Values come from
/// `source`, or else stand in the first output.
fn run_task(
    source: Option<&[f32]>,
    steps: &[Step],
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
        if let Step::Keep(output) = *step {
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
            Step::Unary(function) => unary::values(function, x, y),
            Step::UnaryGrad(function, _) => {
                unary::gradients(function, &operand[range.clone()], x, y);
            }
            Step::Binary(function, _) => combine(function, start, x, operand, y),
            Step::Keep(_) => {}
        }
    }
}

/// `y = f(x, b)` where the first element of `x` is element `start` of the whole, over which `b`
/// repeats.
fn combine(function: Binary, start: usize, mut x: &[f32], b: &[f32], mut y: &mut [f32]) {
    let mut at = start % b.len();
    while !x.is_empty() {
        let length = x.len().min(b.len() - at);
        let (part, rest) = y.split_at_mut(length);
        binary::combine(function, part, &x[..length], &b[at..at + length]);
        (x, y, at) = (&x[length..], rest, 0);
    }
}

/// As the first op is dispatched, with the steps as its epilogue.
pub fn dispatch(call: &Call) -> Vec<Dispatch> {
    match chain(call) {
        Some((source, steps)) => vec![elementwise(call, source, &steps)],
        None => matmul::dispatch(&natural(call)),
    }
}

/// The variants of the first op, with the steps as their epilogue.
pub fn variants(call: &Call) -> Vec<Variant> {
    match chain(call) {
        Some(_) => vec![Variant::new("chain", dispatch(call))],
        None => matmul::variants(&natural(call)),
    }
}

fn elementwise(call: &Call, source: usize, steps: &[Step]) -> Dispatch {
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

/// The FLOPs of the first op and of each step; every operand and output is moved once.
pub fn cost(call: &Call) -> Cost {
    let first = first_call(call);
    let first_flops = match first.op {
        Op::MatMul { .. } => matmul::cost(&first).flops,
        Op::Binary(_) => binary::cost(&first).flops,
        _ => unary::cost(&first).flops,
    };
    let flops = |step: &Step| match *step {
        Step::Unary(function) => unary::flops(function, false),
        Step::UnaryGrad(function, _) => unary::flops(function, true),
        Step::Binary(..) => 1.0,
        Step::Keep(_) => 0.0,
    };
    let each: f64 = epilogue::steps(call).iter().map(flops).sum();
    let flops = first_flops + each * call.output_len(0) as f64;
    Cost { flops, bytes: Cost::moved(call) }
}
