//! Common parts of the kernels of attention on GPUs: the entry points that a call runs, with their
//! bindings, and the WGSL that `shaders/lib/attention.wgsl` expects in front.

use super::AttentionSizes;
use crate::{OpCall, Operand, Shader};
use potluck_graph::{Op, Precision};

/// Entry point that a call runs, with its bindings.
pub(super) struct AttentionKernel {
    pub entry: &'static str,
    /// Variables of the shader in the order of their bindings.
    bindings: Vec<BoundVariable>,
}

/// Storage variable of the shaders, and the tensor that is bound to it.
type BoundVariable = (&'static str, Operand);

/// Tensors with queries, keys and values.
const TENSORS: [&str; 3] = ["x_0", "x_1", "x_2"];

/// Storage variables with their access and the type of their elements. The type is empty for rows
/// of heads, whose elements are vectors if all rows are whole vectors, or else floats.
const VARIABLES: [(&str, &str, &str); 12] = [
    ("x_0", "read", ""),
    ("x_1", "read", ""),
    ("x_2", "read", ""),
    ("samples", "read", "u32"),
    ("y", "read", ""),
    ("lse", "read", "f32"),
    ("dy", "read", ""),
    // Workspace: lse and delta of each query.
    ("stats", "read_write", "vec2f"),
    ("new_y", "read_write", "f32"),
    ("new_lse", "read_write", "f32"),
    ("d_0", "read_write", "f32"),
    ("d_1", "read_write", "f32"),
];

/// Kernels of a call, in the order in which they run.
pub(super) fn kernels(call: &OpCall, sizes: &AttentionSizes) -> Vec<AttentionKernel> {
    use Operand::{Input, Output};
    let mut read: Vec<BoundVariable> = Vec::new();
    for (input, variable) in TENSORS[..sizes.tensors].iter().enumerate() {
        read.push((*variable, Input(input)));
    }
    // Without dropout, the first input is bound instead of the sample ids, and not read.
    read.push(("samples", Input(if sizes.drop.is_some() { call.inputs.len() - 1 } else { 0 })));
    if matches!(call.op, Op::Attention(_)) {
        let own = [("new_y", Output(0)), ("new_lse", Output(1))];
        return vec![AttentionKernel::new("forward", &read, &own)];
    }
    let [y, lse, dy] = [0, 1, 2].map(|nth| Input(sizes.tensors + nth));
    let stats = ("stats", Operand::workspace(2 * sizes.b * sizes.heads * sizes.t));
    let [dq, dk, dv] = sizes.places.map(|place| Output(place.input));
    let mut of_keys = vec![("dy", dy), stats, ("d_0", dk)];
    if dv != dk {
        of_keys.push(("d_1", dv));
    }
    vec![
        AttentionKernel::new("delta", &[], &[("y", y), ("lse", lse), ("dy", dy), stats]),
        AttentionKernel::new("grad_kv", &read, &of_keys),
        AttentionKernel::new("grad_q", &read, &[("dy", dy), stats, ("d_0", dq)]),
    ]
}

impl AttentionKernel {
    /// Creates a kernel that binds the tensors and sample ids in `read` and the variables in `own`.
    fn new(entry: &'static str, read: &[BoundVariable], own: &[BoundVariable]) -> Self {
        Self { entry, bindings: [read, own].concat() }
    }

    pub(super) fn operands(&self) -> Vec<Operand> {
        self.bindings.iter().map(|(_, operand)| *operand).collect()
    }

    /// Number of heads of a sample that the kernel processes.
    pub(super) fn heads(&self, sizes: &AttentionSizes) -> usize {
        if self.entry == "grad_kv" { sizes.kv_heads() } else { sizes.heads }
    }

    fn binds(&self, name: &str) -> bool {
        self.bindings.iter().any(|(bound, _)| *bound == name)
    }

    /// Returns the shader of a file, with the WGSL prepended that `shaders/lib/attention.wgsl`
    /// needs. In mixed precision, operands are rounded as they are read, and weights and slopes by
    /// the functions of the file.
    pub(super) fn shader(&self, file: &'static str, sizes: &AttentionSizes) -> Shader {
        let mut shader = Shader::new(file, self.entry)
            .with_const("D", sizes.d as u32)
            .with_const("CAUSAL", u32::from(sizes.causal))
            .with_const("DROPOUT", u32::from(sizes.drop.is_some()))
            .with_const("MIXED", u32::from(sizes.precision == Precision::Mixed))
            .with_operands(sizes.precision);
        let has_vectors = sizes.has_vectors();
        shader.header += &self.declarations(if has_vectors { "vec4f" } else { "f32" });
        for (name, _, element) in VARIABLES {
            if element.is_empty() {
                shader.header += &part(name, has_vectors, name != "y");
            }
        }
        shader.header += &self.sources(sizes);
        shader.header += &self.put();
        shader
    }

    /// Declarations of all storage variables: the bound ones have the first binding numbers, in
    /// order, and the variables of the file's other entry points follow.
    fn declarations(&self, rows: &str) -> String {
        let mut names: Vec<&str> = self.bindings.iter().map(|(name, _)| *name).collect();
        for (name, ..) in VARIABLES {
            if !self.binds(name) {
                names.push(name);
            }
        }

        let mut text = String::new();
        for (number, wanted) in names.into_iter().enumerate() {
            let known = VARIABLES.iter().find(|(name, ..)| *name == wanted);
            let Some((name, access, element)) = known else { panic!("{wanted} is not declared") };
            let element = if element.is_empty() { rows } else { element };
            text += &format!(
                "@group(0) @binding({number}) var<storage, {access}> {name}: array<{element}>;\n"
            );
        }
        text
    }

    /// Returns the functions that read queries, keys, values and, if they are bound, gradients of
    /// `y`.
    fn sources(&self, sizes: &AttentionSizes) -> String {
        let mut text = String::new();
        let mut cases = String::new();
        for (source, place) in ["q", "k", "v"].into_iter().zip(sizes.places) {
            let tensor = TENSORS[place.input];
            text += &format!(
                "fn {source}_part(row: u32, part: u32) -> vec4f {{ \
                 return {tensor}_part(row, part); }}\n"
            );
            let name = source.to_uppercase();
            cases += &format!("        case {name}: {{ return {source}_part(row, part); }}\n");
        }
        if self.binds("dy") {
            cases += "        case DY: { return dy_part(row, part); }\n";
        }
        text + &format!(
            "fn row_part(source: u32, row: u32, part: u32) -> vec4f {{\n    switch source {{\n\
             {cases}        default: {{ return vec4f(); }}\n    }}\n}}\n"
        )
    }

    /// Function that writes gradients of queries, keys or values.
    fn put(&self) -> String {
        let values = if self.binds("d_1") {
            "if (source == V) { d_1[at] = value[lane]; } else { d_0[at] = value[lane]; }"
        } else {
            "d_0[at] = value[lane];"
        };
        format!(
            "fn put_gradient(source: u32, row: u32, part: u32, value: vec4f) {{\n    \
             for (var lane = 0u; lane < min(4u, D - 4u * part); lane++) {{\n        \
             let at = row + 4u * part + lane;\n        {values}\n    }}\n}}\n"
        )
    }
}

/// Returns the function that reads four columns of a row of a head, which starts at element `row`.
/// Columns behind the last one are zeros. Operands of products are rounded.
fn part(name: &str, has_vectors: bool, is_operand: bool) -> String {
    let signature = format!("fn {name}_part(row: u32, part: u32) -> vec4f");
    let mut value =
        if has_vectors { format!("{name}[row / 4u + part]") } else { "value".to_string() };
    if is_operand {
        value = format!("operand4({value})");
    }
    if has_vectors {
        return format!("{signature} {{ return {value}; }}\n");
    }
    format!(
        "{signature} {{\n    var value = vec4f(0.0);\n    \
         for (var lane = 0u; lane < min(4u, D - 4u * part); lane++) {{\n        \
         value[lane] = {name}[row + 4u * part + lane];\n    }}\n    return {value};\n}}\n"
    )
}

impl AttentionSizes {
    /// Returns true if all rows of heads are whole vectors of four.
    fn has_vectors(&self) -> bool {
        let mut columns = self.places.iter().flat_map(|place| [place.first, place.width]);
        self.d.is_multiple_of(4) && columns.all(|columns| columns.is_multiple_of(4))
    }
}
