//! The time steps of recurrent layers on GPUs: a dispatch per step.
//!
//! An invocation has one Value of hidden columns (a vector of 4, or one where their number is no
//! multiple of 4) of a few samples: it reads each column of the matrix once for all of these. The
//! text of that loop is generated, because not every driver unrolls loops or keeps arrays in
//! registers. Forward, the weight is transposed first, so that neighbours read neighbours.

use std::fmt::Write;

use super::RecurrentSizes;
use crate::dispatch::{WORKSPACE_VALUES_MAX, grid};
use crate::ops::copy;
use crate::{Caps, Dispatch, OpCall, Operand, Shader};
use potluck_graph::{Accumulation, Cell, Op, Precision};

/// Samples per invocation of the variants: for GPUs, and for adapters that run on a processor.
pub const ROWS: [usize; 2] = [1, 4];

const SIZE: u32 = 64;

/// Product of a time step with the values of the step before it (or after it, in a gradient).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HiddenProduct {
    /// There is none: it is the first step.
    None,
    /// With the initial state.
    State,
    /// With the step before.
    Step,
}

/// Returns the dispatches of a call: where the weight is transposed, this one; then one per time
/// step, and behind those of a gradient that of the initial state.
pub fn dispatches(call: &OpCall, sizes: RecurrentSizes, rows: usize, caps: &Caps) -> Vec<Dispatch> {
    let steps = 0..sizes.t;
    let kernel = Steps { call, sizes, rows };
    match call.op {
        Op::Recurrent { .. } => {
            let transposition = kernel.transposition(caps);
            let matrix =
                if transposition.is_empty() { Operand::Input(1) } else { kernel.workspace() };
            let first =
                if call.inputs.len() > 3 { HiddenProduct::State } else { HiddenProduct::None };
            let product = |step| if step == 0 { first } else { HiddenProduct::Step };
            let step = |step| kernel.forward(step, product(step), matrix);
            transposition.into_iter().chain(steps.map(step)).collect()
        }
        _ => {
            let last = sizes.t - 1;
            let product =
                |step| if step == last { HiddenProduct::None } else { HiddenProduct::Step };
            let step = |step: usize| kernel.backward(step as u32, product(step), false);
            // The step before the first one, of which only the hidden values have a gradient.
            let state = kernel.backward(u32::MAX, HiddenProduct::Step, true);
            steps.rev().map(step).chain([state]).collect()
        }
    }
}

struct Steps<'a> {
    call: &'a OpCall<'a>,
    sizes: RecurrentSizes,
    rows: usize,
}

impl Steps<'_> {
    fn lanes(&self) -> usize {
        if self.sizes.h.is_multiple_of(4) { 4 } else { 1 }
    }

    fn workspace(&self) -> Operand {
        Operand::workspace(self.sizes.columns() * self.sizes.h)
    }

    /// Returns the dispatches that write the transposed weight to the workspace; none if it is too
    /// large for that.
    fn transposition(&self, caps: &Caps) -> Vec<Dispatch> {
        let (columns, h) = (self.sizes.columns(), self.sizes.h);
        if columns * h > WORKSPACE_VALUES_MAX {
            return Vec::new();
        }
        let op = Op::Permute { axes: vec![1, 0] };
        let call = OpCall {
            op: &op,
            inputs: vec![vec![columns, h]],
            outputs: vec![vec![h, columns]],
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            loss_scale: self.call.loss_scale,
            random: self.call.random,
        };
        let operand = |operand| match operand {
            Operand::Input(_) => Operand::Input(1),
            _ => self.workspace(),
        };
        let moved = |dispatch: Dispatch| {
            let operands = dispatch.operands.into_iter().map(operand).collect();
            Dispatch { operands, ..dispatch }
        };
        (copy::TWIN.dispatch)(&call, caps).into_iter().map(moved).collect()
    }

    fn forward(&self, step: usize, product: HiddenProduct, matrix: Operand) -> Dispatch {
        use Operand::{Input, Output};
        // Without a state, the inputs are bound in its place and not read.
        let has_state = self.call.inputs.len() > 3;
        let state = |index: usize| Input(if has_state { index } else { 0 });
        let mut operands = vec![Input(0), matrix, Input(2), state(3)];
        match self.sizes.cell {
            Cell::Lstm => operands.extend([state(4), Output(0), Output(1), Output(2)]),
            Cell::Gru => operands.extend([Output(0), Output(1)]),
        }
        let gates = self.sizes.cell.gates();
        let is_transposed = matrix != Input(1);
        let shader = self.shader("forward", product, (gates, is_transposed));
        self.step(shader, operands, step as u32, (self.sizes.h, has_state))
    }

    fn backward(&self, step: u32, product: HiddenProduct, is_state: bool) -> Dispatch {
        use Operand::{Input, Output};
        let has_state = self.call.inputs.len() > 4;
        let state = Input(if has_state { 4 } else { 3 });
        let inputs = [Input(0), Input(1), Input(2), Input(3), state];
        let operands = [&inputs[..], &[0, 1, 2].map(Output)].concat();
        // The weight is (gates h, h): the rows of a product with the gates' gradients.
        let entry = if is_state { "state" } else { "backward" };
        let shader = self.shader(entry, product, (1, true));
        self.step(shader, operands, step, (self.sizes.columns(), has_state))
    }

    fn shader(&self, entry: &'static str, product: HiddenProduct, matrix: (usize, bool)) -> Shader {
        let file = match self.sizes.cell {
            Cell::Lstm => "recurrent_lstm",
            Cell::Gru => "recurrent_gru",
        };
        let lanes = self.lanes();
        let text = entry_point(entry, (self.rows, lanes), product, matrix);
        Shader::new(file, entry)
            .with_text(&value_text(lanes))
            .with_const("FROM_STATE", u32::from(product == HiddenProduct::State))
            .with_text(matrix_text(entry, lanes, matrix.1))
            .with_text(&text)
    }

    fn step(
        &self,
        shader: Shader,
        operands: Vec<Operand>,
        step: u32,
        (terms, has_state): (usize, bool),
    ) -> Dispatch {
        let RecurrentSizes { b, t, h, .. } = self.sizes;
        let (width, terms) = (h / self.lanes(), terms / self.lanes());
        let params = [b, t, width, terms].map(|size| size as u32);
        Dispatch {
            shader,
            operands,
            params: params.into_iter().chain([step, u32::from(has_state)]).collect(),
            groups: grid(b.div_ceil(self.rows) * width, SIZE),
        }
    }
}

/// Returns the type of a Value, and the functions of gates, which are those of the elementwise ops.
fn value_text(lanes: usize) -> String {
    let value = if lanes == 4 { "vec4f" } else { "f32" };
    let mut text = format!("alias Value = {value};\n");
    for (name, of_float) in [("sigmoid", "sigmoid_of"), ("squash", "tanh_of")] {
        let of_value = match lanes {
            4 => format!(
                "vec4f({})",
                ["x", "y", "z", "w"].map(|lane| format!("{of_float}(v.{lane})")).join(", ")
            ),
            _ => format!("{of_float}(v)"),
        };
        let _ = writeln!(text, "fn {name}(v: Value) -> Value {{ return {of_value}; }}");
    }
    text
}

/// Returns the binding of the matrix.
fn matrix_text(entry: &str, lanes: usize, is_transposed: bool) -> &'static str {
    match (entry, is_transposed, lanes) {
        ("forward", true, _) => {
            "@group(0) @binding(1) var<storage, read_write> matrix: array<Value>;\n"
        }
        ("forward", false, 4) => {
            "@group(0) @binding(1) var<storage, read> weight: array<f32>;
fn weight_at(gate: u32, column: u32, k: u32) -> Value {
    let h = 4u * p.width;
    let at = (gate * h + 4u * column) * h + k;
    return vec4f(weight[at], weight[at + h], weight[at + 2u * h], weight[at + 3u * h]);
}
"
        }
        ("forward", false, _) => {
            "@group(0) @binding(1) var<storage, read> weight: array<f32>;
fn weight_at(gate: u32, column: u32, k: u32) -> Value {
    return weight[(gate * p.width + column) * p.width + k];
}
"
        }
        _ => "@group(0) @binding(1) var<storage, read> matrix: array<Value>;\n",
    }
}

/// Returns the WGSL of an entry point whose invocations compute the sums of a Value of columns of
/// each gate for `rows` samples, and finish each sample with them. `matrix` is the number of gates,
/// and whether the rows of the matrix are the terms.
fn entry_point(
    entry: &str,
    (rows, lanes): (usize, usize),
    product: HiddenProduct,
    (gates, is_transposed): (usize, bool),
) -> String {
    let mut text = format!(
        "@compute @workgroup_size({SIZE})
fn {entry}(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {{
    let index = invocation_of(id, groups, {SIZE}u);
    let column = index % p.width;
    let s0 = index / p.width * {rows}u;
    if (s0 >= p.b) {{ return; }}
"
    );
    for row in 0..rows {
        if row > 0 {
            let _ = writeln!(text, "    let s{row} = min(s0 + {row}u, p.b - 1u);");
        }
        for gate in 0..gates {
            let _ = writeln!(text, "    var a{row}_{gate} = Value();");
        }
    }
    if product != HiddenProduct::None {
        text += "    for (var q = 0u; q < p.terms; q++) {\n";
        let operand = if entry == "forward" { "hidden" } else { "slope" };
        for row in 0..rows {
            let _ = writeln!(text, "        let v{row} = {operand}(s{row}, q);");
        }
        for lane in 0..lanes {
            add_term(&mut text, (rows, lanes), lane, (gates, is_transposed));
        }
        text += "    }\n";
    }
    for row in 0..rows {
        let sums: Vec<String> = (0..gates).map(|gate| format!("a{row}_{gate}")).collect();
        let call = format!("finish_{entry}(s{row}, column, {});", sums.join(", "));
        let _ = match row {
            0 => writeln!(text, "    {call}"),
            _ => writeln!(text, "    if (s0 + {row}u < p.b) {{ {call} }}"),
        };
    }
    text + "}\n"
}

/// Adds the term of one lane of the operands to the sums of all rows and gates.
fn add_term(
    text: &mut String,
    (rows, lanes): (usize, usize),
    lane: usize,
    (gates, is_transposed): (usize, bool),
) {
    let part = if lanes == 1 { String::new() } else { format!(".{}", ["x", "y", "z", "w"][lane]) };
    let _ = writeln!(text, "        {{");
    let _ = writeln!(text, "            let k = {lanes}u * q + {lane}u;");
    for gate in 0..gates {
        let value = if is_transposed {
            format!("matrix[(k * {gates}u + {gate}u) * p.width + column]")
        } else {
            format!("weight_at({gate}u, column, k)")
        };
        let _ = writeln!(text, "            let w{gate} = {value};");
        for row in 0..rows {
            let _ = writeln!(text, "            a{row}_{gate} += w{gate} * v{row}{part};");
        }
    }
    text.push_str("        }\n");
}
