//! The time steps of recurrent layers on GPUs: a dispatch per step.
//!
//! An invocation has one Value of hidden columns (a vector of 4, or a scalar if their number is no
//! multiple of 4) of a few samples: it reads each column of the matrix once for all of these. The
//! text of that loop is generated, because not every driver unrolls loops or keeps arrays in
//! registers. In the forward pass, the weight is transposed first, so that neighbouring invocations
//! read neighbouring elements.

use std::fmt::Write;

use super::RecurrentSizes;
use crate::dispatch::{WORKSPACE_VALUES_MAX, grid};
use crate::ops::copy;
use crate::{Caps, Dispatch, OpCall, Operand, Shader};
use potluck_graph::{Accumulation, Cell, Op, Precision};

/// Samples per invocation of the variants: for GPUs, and for adapters that run on a processor.
pub const ROWS: [usize; 2] = [1, 4];

const SIZE: u32 = 64;

/// Product of a time step with the values of the previous step, or of the next one in a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HiddenProduct {
    /// The step is the first one, or in a gradient the last one.
    None,
    /// With the initial state.
    State,
    /// With the adjacent step.
    Step,
}

/// Sums that an invocation computes: a Value of columns of each gate for each of its samples.
#[derive(Clone, Copy)]
struct InvocationSums {
    /// Samples of an invocation.
    rows: usize,
    /// Columns of a Value.
    lanes: usize,
    gates: usize,
    /// True if the rows of the matrix are the terms.
    is_transposed: bool,
}

/// Returns the dispatches of a call: the transposition of the weight, if there is one; then one per
/// time step, and last, for a gradient, the dispatch of the initial state.
pub fn dispatches(call: &OpCall, sizes: RecurrentSizes, rows: usize, caps: &Caps) -> Vec<Dispatch> {
    let kernel = Steps { call, sizes, rows };
    match call.op {
        Op::Recurrent { .. } => kernel.forward_pass(caps),
        _ => kernel.backward_pass(),
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

    fn forward_pass(&self, caps: &Caps) -> Vec<Dispatch> {
        let mut dispatches = self.transposition(caps);
        let matrix = if dispatches.is_empty() { Operand::Input(1) } else { self.workspace() };
        let has_state = self.call.inputs.len() > 3;
        for step in 0..self.sizes.t {
            let product = match step {
                0 if has_state => HiddenProduct::State,
                0 => HiddenProduct::None,
                _ => HiddenProduct::Step,
            };
            dispatches.push(self.forward(step, product, matrix));
        }
        dispatches
    }

    fn backward_pass(&self) -> Vec<Dispatch> {
        let steps = self.sizes.t;
        let mut dispatches = Vec::new();
        for step in (0..steps).rev() {
            let is_last = step == steps - 1;
            let product = if is_last { HiddenProduct::None } else { HiddenProduct::Step };
            dispatches.push(self.backward(step as u32, product, false));
        }
        // The step before the first one, in which only the hidden values have a gradient.
        dispatches.push(self.backward(u32::MAX, HiddenProduct::Step, true));
        dispatches
    }

    /// Returns the dispatches that write the transposed weight to the workspace; none if it is too
    /// large for the workspace.
    fn transposition(&self, caps: &Caps) -> Vec<Dispatch> {
        let columns = self.sizes.columns();
        let h = self.sizes.h;
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
        let mut dispatches = (copy::TWIN.dispatch)(&call, caps);
        for dispatch in &mut dispatches {
            for operand in &mut dispatch.operands {
                *operand = match operand {
                    Operand::Input(_) => Operand::Input(1),
                    _ => self.workspace(),
                };
            }
        }
        dispatches
    }

    fn forward(&self, step: usize, product: HiddenProduct, matrix: Operand) -> Dispatch {
        use Operand::{Input, Output};
        // Without a state, the inputs are bound in its place and not read.
        let has_state = self.call.inputs.len() > 3;
        let [h0, c0] = if has_state { [Input(3), Input(4)] } else { [Input(0); 2] };
        let mut operands = vec![Input(0), matrix, Input(2), h0];
        match self.sizes.cell {
            Cell::Lstm => operands.extend([c0, Output(0), Output(1), Output(2)]),
            Cell::Gru => operands.extend([Output(0), Output(1)]),
        }
        let sums = InvocationSums {
            rows: self.rows,
            lanes: self.lanes(),
            gates: self.sizes.cell.gates(),
            is_transposed: matrix != Input(1),
        };
        let shader = self.shader("forward", product, sums);
        self.step(shader, operands, step as u32, self.sizes.h, has_state)
    }

    fn backward(&self, step: u32, product: HiddenProduct, is_state: bool) -> Dispatch {
        use Operand::{Input, Output};
        let has_state = self.call.inputs.len() > 4;
        let state = Input(if has_state { 4 } else { 3 });
        let inputs = [Input(0), Input(1), Input(2), Input(3), state];
        let operands = [&inputs[..], &[0, 1, 2].map(Output)].concat();
        // The weight is (gates h, h): the rows of a product with the gates' gradients.
        let entry = if is_state { "state" } else { "backward" };
        let sums =
            InvocationSums { rows: self.rows, lanes: self.lanes(), gates: 1, is_transposed: true };
        let shader = self.shader(entry, product, sums);
        self.step(shader, operands, step, self.sizes.columns(), has_state)
    }

    fn shader(&self, entry: &'static str, product: HiddenProduct, sums: InvocationSums) -> Shader {
        let file = match self.sizes.cell {
            Cell::Lstm => "recurrent_lstm",
            Cell::Gru => "recurrent_gru",
        };
        Shader::new(file, entry)
            .with_text(&value_text(sums.lanes))
            .with_const("FROM_STATE", u32::from(product == HiddenProduct::State))
            .with_text(matrix_text(entry, sums.lanes, sums.is_transposed))
            .with_text(&sums.entry_point(entry, product))
    }

    fn step(
        &self,
        shader: Shader,
        operands: Vec<Operand>,
        step: u32,
        terms: usize,
        has_state: bool,
    ) -> Dispatch {
        let RecurrentSizes { b, t, h, .. } = self.sizes;
        let width = h / self.lanes();
        let terms = terms / self.lanes();
        let params =
            vec![b as u32, t as u32, width as u32, terms as u32, step, u32::from(has_state)];
        let groups = grid(b.div_ceil(self.rows) * width, SIZE);
        Dispatch { shader, operands, params, groups }
    }
}

/// Returns the WGSL of the type of a Value, and of the functions of gates, which call the functions
/// of the elementwise ops.
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

impl InvocationSums {
    /// Returns the WGSL of an entry point whose invocations compute the sums and finish each sample
    /// with them.
    fn entry_point(self, entry: &str, product: HiddenProduct) -> String {
        let Self { rows, lanes, gates, .. } = self;
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
                self.add_term(&mut text, lane);
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

    /// Appends the WGSL that adds the term of one lane of the operands to the sums.
    fn add_term(self, text: &mut String, lane: usize) {
        let Self { rows, lanes, gates, is_transposed } = self;
        let part =
            if lanes == 1 { String::new() } else { format!(".{}", ["x", "y", "z", "w"][lane]) };
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
}
