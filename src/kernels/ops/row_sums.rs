//! Sums over rows in one stage: by one invocation per column, or by workgroups whose invocations
//! share columns. Twin of `shaders/row_sums.wgsl`, with variants of gradients of parameters that
//! every row uses, such as those of [`super::layer_norm`], which have the references and the tests.

use super::row_blocks;
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::{Caps, Dispatch, Operand, Shader, Variant};

/// Terms of sums over rows, viewed as (outer, middle, inner), where middle is reduced.
pub(crate) struct RowTerms {
    pub outer: usize,
    pub middle: usize,
    pub inner: usize,
    pub operands: Vec<Operand>,
    /// Number of sums of a column, 1 or 2: the outputs of the call.
    pub sums: usize,
    /// True if 4 neighbouring columns may be taken as a vector, where `inner` is a multiple of 4.
    pub(crate) vectors: bool,
    /// Parameters `word0`, `word1` and `word2` of the terms.
    pub words: [usize; 3],
    /// WGSL of the bindings of the operands and of `fn term(row: u32, at: u32) -> Sums`, the terms
    /// at index `at` of all in Values, which is in row `row`.
    pub text: String,
}

impl RowTerms {
    /// Returns true if columns are taken as vectors of 4.
    pub(crate) fn has_vectors(&self) -> bool {
        self.vectors && self.inner.is_multiple_of(4)
    }

    /// Returns WGSL of the types of a value in memory, of `lanes` floats, and of its sums.
    pub fn types(&self, lanes: usize) -> String {
        let (value, sums) = match (lanes, self.sums) {
            (1, 1) => ("f32", "f32"),
            (1, _) => ("f32", "vec2f"),
            (_, 1) => ("vec4f", "vec4f"),
            (..) => ("vec4f", "mat2x4f"),
        };
        format!("alias Value = {value};\nalias Sums = {sums};\nconst FLOATS: u32 = {lanes}u;\n")
    }

    /// Returns WGSL of `fn put(at: u32, sums: Sums)` and of the outputs, from this binding on.
    pub fn put(&self, first: usize) -> String {
        let outputs = (0..self.sums).map(|output| {
            let binding = first + output;
            format!(
                "@group(0) @binding({binding}) var<storage, read_write> y{output}: array<Value>;\n"
            )
        });
        let (before, after) = match self.sums {
            1 => ("y0[at]", "    y0[at] = total;\n"),
            _ => ("Sums(y0[at], y1[at])", "    y0[at] = total[0];\n    y1[at] = total[1];\n"),
        };
        outputs.collect::<String>()
            + "fn put(at: u32, sums: Sums) {\n    var total = sums;\n    if (p.accumulate != 0u) { \
               total += "
            + before
            + "; }\n"
            + after
            + "}\n"
    }

    /// Returns the operands of the outputs.
    pub fn outputs(&self) -> Vec<Operand> {
        (0..self.sums).map(Operand::Output).collect()
    }
}

/// Kernels of one stage.
#[derive(Clone, Copy)]
enum Way {
    /// One invocation per column.
    Columns,
    /// Four invocations to a vector of columns, for software adapters.
    Tile4,
    /// 32 invocations to each of 8 vectors of columns, for GPUs.
    Tall4,
    /// 16 invocations to each of 16 columns, for GPUs.
    Tall,
}

/// Static choice for software adapters: vectors of 4 if the width is a multiple of 4, else
/// scalars. For both gradients of layer norm of (1024, 768), on two busy cores of an AMD EPYC, the
/// vectors took 0.57 of the time of scalars on SwiftShader and 0.56 on llvmpipe.
pub(crate) fn by_columns(name: &str, terms: &RowTerms, accumulate: bool) -> Variant {
    let way = if terms.has_vectors() {
        if terms.middle <= ITERATIONS_MAX { Way::Tile4 } else { Way::Tall4 }
    } else if is_short(terms) {
        Way::Columns
    } else {
        Way::Tall
    };
    one(name, terms, accumulate, way)
}

/// Static choice for GPUs: two stages, or workgroups whose invocations share columns if there are
/// too few rows.
pub(crate) fn by_workgroups(name: &str, terms: &RowTerms, accumulate: bool) -> Variant {
    let blocks = row_blocks::variant(&format!("{name}_blocks"), terms, accumulate);
    blocks.unwrap_or_else(|| tall(name, terms, accumulate))
}

/// Returns the static choice of a device with these capabilities.
pub fn chosen(name: &str, terms: &RowTerms, accumulate: bool, caps: &Caps) -> Variant {
    if caps.suits_hardware() {
        by_workgroups(name, terms, accumulate)
    } else {
        by_columns(name, terms, accumulate)
    }
}

/// Returns all variants that may win on a device with these capabilities, the baseline first: one
/// invocation per column, unless it would exceed the iteration limit, block loops included.
pub fn variants(name: &str, terms: &RowTerms, accumulate: bool, caps: &Caps) -> Vec<Variant> {
    let baseline = if is_short(terms) { Way::Columns } else { Way::Tall };
    let mut ways = vec![one(name, terms, accumulate, baseline)];
    let blocks = caps.suits_hardware().then(|| by_workgroups(name, terms, accumulate));
    let others = [by_columns(name, terms, accumulate), tall(name, terms, accumulate)];
    for way in others.into_iter().chain(blocks) {
        if ways.iter().all(|known| known.name != way.name) {
            ways.push(way);
        }
    }
    ways
}

fn is_short(terms: &RowTerms) -> bool {
    terms.middle <= ITERATIONS_MAX / 2
}

fn tall(name: &str, terms: &RowTerms, accumulate: bool) -> Variant {
    let way = if terms.has_vectors() { Way::Tall4 } else { Way::Tall };
    one(name, terms, accumulate, way)
}

fn one(name: &str, terms: &RowTerms, accumulate: bool, way: Way) -> Variant {
    let (suffix, entry, lanes, group, columns) = match way {
        Way::Columns => ("columns", "columns", 1, 64, 64),
        Way::Tile4 => ("tile4", "tile", 4, 64, 16),
        Way::Tall4 => ("tall4", "tile", 4, 256, 8),
        Way::Tall => ("tall", "tile", 1, 256, 16),
    };
    let width = terms.inner / lanes;
    let shader = Shader::new("row_sums", entry)
        .with_const("GROUP", group)
        .with_const("COLUMNS", columns as u32)
        .with_text(&terms.types(lanes))
        .with_text(&terms.text)
        .with_text(&terms.put(terms.operands.len()));
    let dispatch = Dispatch {
        shader,
        operands: [&terms.operands[..], &terms.outputs()].concat(),
        params: [&[terms.middle, width, usize::from(accumulate)][..], &terms.words]
            .concat()
            .into_iter()
            .map(|word| word as u32)
            .collect(),
        groups: grid(width.div_ceil(columns), 1),
    };
    Variant::new(format!("{name}_{suffix}"), vec![dispatch])
}
