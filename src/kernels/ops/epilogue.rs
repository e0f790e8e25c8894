//! What follows a value in the same kernel: the steps of an [`Op::Fused`], and the WGSL of
//! `fn store(at: u32, total: f32)` that applies them, which every matrix product and every
//! elementwise chain calls with each finished value.

use std::fmt::Write;

use crate::graph::{Binary, EpilogueOp, Op, Unary};
use crate::kernels::{OpCall, Operand, source};

/// A `store` function and what it binds.
#[derive(Clone, Debug, PartialEq)]
pub struct Epilogue {
    /// WGSL of `store`, and of the bindings that it needs.
    pub text: String,
    /// What is bound there, in the order of the bindings.
    pub operands: Vec<Operand>,
}

/// A [`EpilogueOp`] of a call with the index of the input that it reads or the output that it writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EpilogueStep {
    Binary(Binary, usize),
    Unary(Unary),
    UnaryGrad(Unary, usize),
    Keep(usize),
}

/// The steps that follow the first op of a call, in order; none if it is not fused.
pub fn steps(call: &OpCall) -> Vec<EpilogueStep> {
    let Op::Fused { epilogue, .. } = call.op else { return Vec::new() };
    let operands = epilogue.iter().filter(|step| step.has_operand()).count();
    let (mut input, mut output) = (call.inputs.len() - operands, 1);
    let next = |count: &mut usize| {
        *count += 1;
        *count - 1
    };
    let numbered = epilogue.iter().map(|step| match *step {
        EpilogueOp::Binary(function) => EpilogueStep::Binary(function, next(&mut input)),
        EpilogueOp::Unary(function) => EpilogueStep::Unary(function),
        EpilogueOp::UnaryGrad(function) => EpilogueStep::UnaryGrad(function, next(&mut input)),
        EpilogueOp::Store => EpilogueStep::Keep(next(&mut output)),
    });
    numbered.collect()
}

/// The input that an elementwise op applies itself to, and the op as a step; `None` for others.
pub fn as_step(op: &Op) -> Option<(usize, EpilogueStep)> {
    match *op {
        Op::Unary(function) => Some((0, EpilogueStep::Unary(function))),
        Op::UnaryGrad(function) => Some((1, EpilogueStep::UnaryGrad(function, 0))),
        Op::Binary(function) => Some((0, EpilogueStep::Binary(function, 1))),
        _ => None,
    }
}

/// The epilogue of a call; its bindings are numbered from `first`.
pub fn of(call: &OpCall, first: usize) -> Epilogue {
    match call.op {
        Op::Fused { .. } => of_steps(call, &steps(call), first),
        _ => Epilogue { text: source::snippet("store").to_string(), operands: Vec::new() },
    }
}

/// `store` for these steps, which writes the last value to `c`. 4 bytes per value, operand and
/// kept value.
pub fn of_steps(call: &OpCall, steps: &[EpilogueStep], first: usize) -> Epilogue {
    let mut operands = Vec::new();
    let (mut bindings, mut body) = (String::new(), String::new());
    for step in steps {
        let name = format!("e{}", first + operands.len());
        let bound = match *step {
            EpilogueStep::Binary(_, input) | EpilogueStep::UnaryGrad(_, input) => {
                Some(Operand::Input(input))
            }
            EpilogueStep::Keep(output) => Some(Operand::Output(output)),
            EpilogueStep::Unary(_) => None,
        };
        if let Some(operand) = bound {
            bindings += &binding(first + operands.len(), operand);
            operands.push(operand);
        }
        body += &format!("    {}\n", statement(call, *step, &name));
    }
    let calls = |step: &EpilogueStep| matches!(step, EpilogueStep::Unary(f) | EpilogueStep::UnaryGrad(f, _) if named(*f));
    let library = if steps.iter().any(calls) { source::snippet("elementwise") } else { "" };
    let store = format!("fn store(at: u32, total: f32) {{\n    var v = total;\n{body}");
    Epilogue { text: format!("{library}{bindings}{store}    c[at] = v;\n}}\n"), operands }
}

fn binding(number: usize, operand: Operand) -> String {
    let access = if matches!(operand, Operand::Output(_)) { "read_write" } else { "read" };
    format!("@group(0) @binding({number}) var<storage, {access}> e{number}: array<f32>;\n")
}

/// One step on the value `v`; `name` is what it binds, if anything.
fn statement(call: &OpCall, step: EpilogueStep, name: &str) -> String {
    match step {
        EpilogueStep::Binary(function, input) => {
            let sign = match function {
                Binary::Add => "+",
                Binary::Mul => "*",
            };
            format!("v = v {sign} {name}[{}];", index(call, input))
        }
        EpilogueStep::Unary(Unary::Scale(factor))
        | EpilogueStep::UnaryGrad(Unary::Scale(factor), _) => {
            format!("v = {factor:?}f * v;")
        }
        EpilogueStep::Unary(function) => format!("v = {}_of(v);", word(function)),
        EpilogueStep::UnaryGrad(function, _) => {
            format!("v = {}_grad_of({name}[at], v);", word(function))
        }
        EpilogueStep::Keep(_) => format!("{name}[at] = v;"),
    }
}

/// Where an operand stands that may repeat. The period is a constant, which compilers divide by
/// without a division.
fn index(call: &OpCall, input: usize) -> String {
    let mut text = String::from("at");
    let period = call.input_len(input);
    if period != call.output_len(0) {
        write!(text, " % {period}u").expect("writing to a string never fails");
    }
    text
}

/// Whether a function is one of `shaders/lib/elementwise.wgsl`.
fn named(function: Unary) -> bool {
    !matches!(function, Unary::Scale(_))
}

fn word(function: Unary) -> &'static str {
    match function {
        Unary::Relu => "relu",
        Unary::Gelu => "gelu",
        Unary::GeluTanh => "gelutanh",
        Unary::Scale(_) => panic!("a scale is written out"),
    }
}
