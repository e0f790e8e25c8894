//! Epilogues: the steps of an [`Op::Fused`] that a kernel applies to its finished values, and the
//! WGSL of `fn store(at: u32, total: f32)` that applies them, or of `store4`, which stores four
//! adjacent values as a vector. Every matrix product and every elementwise chain calls one of them
//! for its finished values.

use std::fmt::Write;

use crate::graph::{Binary, EpilogueOp, Op, Unary};
use crate::kernels::{OpCall, Operand, source};

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
    let (mut input, mut output) = (call.inputs.len() - operands, 1);
    let next = |count: &mut usize| {
        *count += 1;
        *count - 1
    };
    let numbered = epilogue.iter().map(|step| match *step {
        EpilogueOp::Binary(function) => EpilogueStep::Binary(function, next(&mut input)),
        EpilogueOp::Unary(function) => EpilogueStep::Unary(function),
        EpilogueOp::UnaryGrad(function) => EpilogueStep::UnaryGrad(function, next(&mut input)),
        EpilogueOp::Store => EpilogueStep::Store(next(&mut output)),
    });
    numbered.collect()
}

/// Returns an elementwise op as an epilogue step, after the index of the input that it
/// transforms; `None` for other ops.
pub fn as_step(op: &Op) -> Option<(usize, EpilogueStep)> {
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

/// Returns true if the rows of `n` values of a call's output can be stored as vectors: if they and
/// every operand that repeats are multiples of four.
pub fn stores_vectors(call: &OpCall, n: usize) -> bool {
    let is_whole = |step: &EpilogueStep| match *step {
        EpilogueStep::Binary(_, input) => call.input_len(input).is_multiple_of(4),
        _ => true,
    };
    n.is_multiple_of(4) && steps(call).iter().all(is_whole)
}

/// Returns the epilogue of a call with the binding of its output `c`, whose number is the one
/// before `first`: `store4` if by `vectors`, else `store`. Its text is made for the call, and does
/// not test whether it accumulates.
pub fn with_output(call: &OpCall, first: usize, vectors: bool) -> Epilogue {
    let width = if vectors { Width::Four } else { Width::One };
    let Epilogue { text, operands } = of_width(call, &steps(call), first, width);
    let output = binding("c", first - 1, Operand::Output(0), width);
    Epilogue { text: output + &text, operands }
}

/// Generates `store` for these steps, which writes the final value to `c`. It moves 4 bytes per
/// value, operand and stored value.
pub fn of_steps(call: &OpCall, steps: &[EpilogueStep], first: usize) -> Epilogue {
    of_width(call, steps, first, Width::One)
}

/// Number of adjacent values that are stored at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Width {
    One,
    Four,
}

impl Width {
    /// Returns the WGSL type of the values.
    fn element(self) -> &'static str {
        match self {
            Self::One => "f32",
            Self::Four => "vec4f",
        }
    }

    /// Returns the WGSL of a function of one value, applied to each of the values. `{}` stands for
    /// the component.
    fn each(self, one: &str) -> String {
        match self {
            Self::One => one.replace("{}", ""),
            Self::Four => {
                let all = [".x", ".y", ".z", ".w"].map(|component| one.replace("{}", component));
                format!("vec4f({})", all.join(", "))
            }
        }
    }
}

fn of_width(call: &OpCall, steps: &[EpilogueStep], first: usize, width: Width) -> Epilogue {
    let mut operands = Vec::new();
    let (mut bindings, mut body) = (String::new(), String::new());
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
            bindings += &binding(&name, first + operands.len(), operand, width);
            operands.push(operand);
        }
        body += &format!("    {}\n", statement(call, *step, &name, width));
    }
    let calls = |step: &EpilogueStep| match step {
        EpilogueStep::Unary(f) | EpilogueStep::UnaryGrad(f, _) => named(*f),
        EpilogueStep::Binary(..) | EpilogueStep::Store(_) => false,
    };
    let library = if steps.iter().any(calls) { source::snippet("elementwise") } else { "" };
    let head = match width {
        Width::One => "fn store(at: u32, total: f32) {\n",
        Width::Four => "fn store4(first: u32, total: vec4f) {\n    let at = first / 4u;\n",
    };
    let assign = if call.accumulate { "+=" } else { "=" };
    let text =
        format!("{library}{bindings}{head}    var v = total;\n{body}    c[at] {assign} v;\n}}\n");
    Epilogue { text, operands }
}

fn binding(name: &str, number: usize, operand: Operand, width: Width) -> String {
    let access = if operand.is_writable() { "read_write" } else { "read" };
    let element = width.element();
    format!("@group(0) @binding({number}) var<storage, {access}> {name}: array<{element}>;\n")
}

/// Returns the WGSL of one step on the value `v`; `name` is the variable of its binding, if it
/// has one.
fn statement(call: &OpCall, step: EpilogueStep, name: &str, width: Width) -> String {
    match step {
        EpilogueStep::Binary(function, input) => {
            let sign = match function {
                Binary::Add => "+",
                Binary::Mul => "*",
            };
            format!("v = v {sign} {name}[{}];", index(call, input, width))
        }
        EpilogueStep::Unary(Unary::Scale(factor))
        | EpilogueStep::UnaryGrad(Unary::Scale(factor), _) => {
            format!("v = {factor:?}f * v;")
        }
        EpilogueStep::Unary(function) => {
            format!("v = {};", width.each(&format!("{}_of(v{{}})", word(function))))
        }
        EpilogueStep::UnaryGrad(function, _) => {
            // Read whole: components of an element of a buffer would be read one by one.
            let one = format!("{}_grad_of({name}_x{{}}, v{{}})", word(function));
            format!("let {name}_x = {name}[at]; v = {};", width.each(&one))
        }
        EpilogueStep::Store(_) => format!("{name}[at] = v;"),
    }
}

/// Returns the WGSL index into an operand, which may repeat (broadcast). The period is a
/// constant, so that compilers need no division instruction.
fn index(call: &OpCall, input: usize, width: Width) -> String {
    let mut text = String::from("at");
    let period = call.input_len(input);
    if period != call.output_len(0) {
        let period = if width == Width::Four { period / 4 } else { period };
        write!(text, " % {period}u").expect("writing to a string never fails");
    }
    text
}

/// Returns true if the function is one of `shaders/lib/elementwise.wgsl`.
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
