//! Elementwise chains on vectors of 4 adjacent values: the WGSL of
//! `fn store4(at: u32, total: vec4f)`, which applies the steps to vector `at`. Twin of
//! `shaders/fused_vectors.wgsl`, and a variant of [`super::fused`], which has the reference and the
//! tests. Matrix products in workgroup memory use the same text.

use super::elements::Called;
use super::epilogue::{Epilogue, EpilogueStep, library};
use crate::{OpCall, Operand};

/// Operand of a step: none, a tensor of vectors, or a single value.
#[derive(Clone, Copy, PartialEq)]
enum Bound {
    Nothing,
    Vectors(Operand),
    Value(Operand),
}

/// Generates `store4` for these steps, which writes the final vector to `c`, or adds it if the call
/// accumulates, with bindings numbered from `first`. It moves 16 bytes per vector, operand and
/// stored vector. `None` if the values, or the period of an operand that is more than one value,
/// are not whole vectors.
pub(crate) fn of_steps(call: &OpCall, steps: &[EpilogueStep], first: usize) -> Option<Epilogue> {
    if !call.output_len(0).is_multiple_of(4) {
        return None;
    }
    let mut bindings = String::new();
    let mut body = String::new();
    let mut operands = Vec::new();
    for step in steps {
        let bound = bound(call, *step);
        let number = first + operands.len();
        if !is_whole(call, bound) {
            return None;
        }
        if let Some((access, ty, operand)) = declaration(bound) {
            bindings +=
                &format!("@group(0) @binding({number}) var<storage, {access}> e{number}: {ty};\n");
            operands.push(operand);
        }
        body += &format!("    {}\n", statement(call, *step, bound, number));
    }
    let library = library(steps);
    let store = format!("fn store4(at: u32, total: vec4f) {{\n    var v = total;\n{body}");
    let assign = if call.accumulates() { "+=" } else { "=" };
    let text = format!("{library}{bindings}{store}    c[at] {assign} v;\n}}\n");
    Some(Epilogue { text, operands })
}

fn bound(call: &OpCall, step: EpilogueStep) -> Bound {
    match step {
        EpilogueStep::Binary(_, input) if call.input_len(input) == 1 => {
            Bound::Value(Operand::Input(input))
        }
        EpilogueStep::Binary(_, input) | EpilogueStep::UnaryGrad(_, input) => {
            Bound::Vectors(Operand::Input(input))
        }
        EpilogueStep::Store(output) => Bound::Vectors(Operand::Output(output)),
        EpilogueStep::Unary(_) => Bound::Nothing,
    }
}

/// Returns true if no vector of the tensor has elements of two of its repetitions.
fn is_whole(call: &OpCall, bound: Bound) -> bool {
    match bound {
        Bound::Vectors(Operand::Input(input)) => call.input_len(input).is_multiple_of(4),
        _ => true,
    }
}

/// Access, WGSL type and operand of a binding.
fn declaration(bound: Bound) -> Option<(&'static str, &'static str, Operand)> {
    match bound {
        Bound::Nothing => None,
        Bound::Value(operand) => Some(("read", "array<f32>", operand)),
        Bound::Vectors(operand @ Operand::Input(_)) => Some(("read", "array<vec4f>", operand)),
        Bound::Vectors(operand) => Some(("read_write", "array<vec4f>", operand)),
    }
}

/// WGSL of one step on the vector `v`, whose operand is binding `number`.
fn statement(call: &OpCall, step: EpilogueStep, bound: Bound, number: usize) -> String {
    let from = format!("from{number}");
    match step {
        EpilogueStep::Store(_) => format!("e{number}[at] = v;"),
        EpilogueStep::Unary(function) => format!("v = {};", Called::Unary(function).call4(&["v"])),
        EpilogueStep::UnaryGrad(function, _) => {
            let value = Called::UnaryGrad(function).call4(&[&from, "v"]);
            format!("let {from} = e{number}[at]; v = {value};")
        }
        EpilogueStep::Binary(function, input) => {
            let index = match call.input_len(input) {
                _ if matches!(bound, Bound::Value(_)) => "0u".to_string(),
                length if length == call.output_len(0) => "at".to_string(),
                // The period is a constant, so that compilers need no division instruction.
                period => format!("at % {}u", period / 4),
            };
            let value = Called::Binary(function).call4(&["v", &from]);
            format!("let {from} = vec4f(e{number}[{index}]); v = {value};")
        }
    }
}
