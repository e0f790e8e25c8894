//! Epilogues: the steps of an [`Op::Fused`] that a kernel applies to its finished values, and the
//! WGSL of `fn store(at: u32, total: f32)` that applies them. Matrix products and elementwise
//! chains call `store` for each finished value, or `store4` for four of them.

use std::fmt::Write;

use super::elements::{self, Called};
use crate::{OpCall, Operand, source};
use potluck_graph::{Binary, EpilogueOp, Op, Unary};

/// A generated `store` function and the operands that it binds.
#[derive(Clone, Debug, PartialEq)]
pub struct Epilogue {
    /// WGSL of `store` and of its bindings.
    pub text: String,
    /// Operands of these bindings, in binding order.
    pub operands: Vec<Operand>,
}

/// An [`EpilogueOp`] of a call with the index of the input that it reads or the output that it
/// writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EpilogueStep {
    Binary(Binary, usize),
    Unary(Unary),
    UnaryGrad(Unary, usize),
    Store(usize),
}

/// Returns the epilogue steps of a call in order; none if it is not fused.
pub fn steps(call: &OpCall) -> Vec<EpilogueStep> {
    let Op::Fused { epilogue, .. } = call.op else { return Vec::new() };
    let operands = epilogue.iter().filter(|step| step.has_operand()).count();
    let mut input = call.inputs.len() - operands;
    let mut output = 1;
    let mut steps = Vec::with_capacity(epilogue.len());
    for step in epilogue {
        steps.push(match *step {
            EpilogueOp::Binary(function) => EpilogueStep::Binary(function, input),
            EpilogueOp::Unary(function) => EpilogueStep::Unary(function),
            EpilogueOp::UnaryGrad(function) => EpilogueStep::UnaryGrad(function, input),
            EpilogueOp::Store => EpilogueStep::Store(output),
        });
        input += usize::from(step.has_operand());
        output += usize::from(matches!(step, EpilogueOp::Store));
    }
    steps
}

/// Returns an elementwise op as an epilogue step, after the index of the input that it
/// transforms; `None` for other ops.
pub(crate) fn as_step(op: &Op) -> Option<(usize, EpilogueStep)> {
    match *op {
        Op::Unary(function) => Some((0, EpilogueStep::Unary(function))),
        Op::UnaryGrad(function) => Some((1, EpilogueStep::UnaryGrad(function, 0))),
        Op::Binary(function) => Some((0, EpilogueStep::Binary(function, 1))),
        _ => None,
    }
}

/// Returns the epilogue of a call, with bindings numbered from `first`.
pub fn of(call: &OpCall, first: usize) -> Epilogue {
    match call.op {
        Op::Fused { .. } => of_steps(call, &steps(call), first),
        _ => Epilogue { text: source::snippet("store").to_string(), operands: Vec::new() },
    }
}

/// Generates `store` for these steps, which writes the final value to `c`, or adds it if the call
/// accumulates. It moves 4 bytes per value, operand and stored value.
pub(crate) fn of_steps(call: &OpCall, steps: &[EpilogueStep], first: usize) -> Epilogue {
    let mut operands = Vec::new();
    let mut bindings = String::new();
    let mut body = String::new();
    for step in steps {
        let name = format!("e{}", first + operands.len());
        let bound = match *step {
            EpilogueStep::Binary(_, input) | EpilogueStep::UnaryGrad(_, input) => {
                Some(Operand::Input(input))
            }
            EpilogueStep::Store(output) => Some(Operand::Output(output)),
            EpilogueStep::Unary(_) => None,
        };
        if let Some(operand) = bound {
            bindings += &binding(first + operands.len(), operand);
            operands.push(operand);
        }
        body += &format!("    {}\n", statement(call, *step, &name));
    }
    let library = library(steps);
    let store = format!("fn store(at: u32, total: f32) {{\n    var v = total;\n{body}");
    let assign = if call.accumulates() { "+=" } else { "=" };
    Epilogue { text: format!("{library}{bindings}{store}    c[at] {assign} v;\n}}\n"), operands }
}

/// WGSL of the binding of the output, for kernels whose file does not declare it.
pub(crate) fn output_binding(number: usize, element: &str) -> String {
    format!("@group(0) @binding({number}) var<storage, read_write> c: array<{element}>;\n")
}

fn binding(number: usize, operand: Operand) -> String {
    let access = if operand.is_writable() { "read_write" } else { "read" };
    format!("@group(0) @binding({number}) var<storage, {access}> e{number}: array<f32>;\n")
}

pub(crate) fn library(steps: &[EpilogueStep]) -> String {
    let called: Vec<Called> = steps.iter().filter_map(|step| called(*step)).collect();
    elements::library(&called)
}

/// Function of a step; `None` if it stores.
fn called(step: EpilogueStep) -> Option<Called> {
    match step {
        EpilogueStep::Unary(function) => Some(Called::Unary(function)),
        EpilogueStep::UnaryGrad(function, _) => Some(Called::UnaryGrad(function)),
        EpilogueStep::Binary(function, _) => Some(Called::Binary(function)),
        EpilogueStep::Store(_) => None,
    }
}

/// Returns the WGSL of one step on the value `v`; `name` is the variable of its binding, if it
/// has one.
fn statement(call: &OpCall, step: EpilogueStep, name: &str) -> String {
    let value = match step {
        EpilogueStep::Store(_) => return format!("{name}[at] = v;"),
        EpilogueStep::Unary(function) => Called::Unary(function).call(&["v"]),
        EpilogueStep::UnaryGrad(function, _) => {
            Called::UnaryGrad(function).call(&[&format!("{name}[at]"), "v"])
        }
        EpilogueStep::Binary(function, input) => {
            Called::Binary(function).call(&["v", &format!("{name}[{}]", index(call, input))])
        }
    };
    format!("v = {value};")
}

/// Returns the WGSL index into an operand, which may repeat (broadcast). The period is a
/// constant, so that compilers need no division instruction.
fn index(call: &OpCall, input: usize) -> String {
    let mut text = String::from("at");
    let period = call.input_len(input);
    if period != call.output_len(0) {
        write!(text, " % {period}u").expect("writing to a string never fails");
    }
    text
}
