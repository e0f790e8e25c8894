//! Sums over rows in one stage: by one invocation per column, or by workgroups whose invocations
//! share columns. Twin of `shaders/row_sums.wgsl`, and variants of [`super::sum`] and of gradients
//! of parameters such as in [`super::layer_norm`], which have the references and the tests.

use super::dispatch_parts::{as_words, push_new};
use super::row_blocks;
use super::row_terms::RowTerms;
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::{Caps, Dispatch, Shader, Variant};

/// Kernels of one stage.
#[derive(Clone, Copy)]
pub(crate) enum Way {
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
    if caps.wants_gpu_variants() {
        by_workgroups(name, terms, accumulate)
    } else {
        by_columns(name, terms, accumulate)
    }
}

/// Returns all variants that may win on a device with these capabilities, the baseline first: one
/// invocation per column, or workgroups whose invocations share columns if an invocation would
/// exceed the iteration limit, block loops included.
pub fn variants(name: &str, terms: &RowTerms, accumulate: bool, caps: &Caps) -> Vec<Variant> {
    let shared = tall(name, terms, accumulate);
    let baseline =
        if is_short(terms) { one(name, terms, accumulate, Way::Columns) } else { shared.clone() };
    let mut variants = vec![baseline];
    push_new(&mut variants, by_columns(name, terms, accumulate));
    push_new(&mut variants, shared);
    if caps.wants_gpu_variants() {
        push_new(&mut variants, by_workgroups(name, terms, accumulate));
    }
    variants
}

/// Returns the loop iterations of an invocation of the kernels for long sums, which are those of
/// software adapters above [`ITERATIONS_MAX`] rows.
pub(crate) fn iterations(terms: &RowTerms) -> usize {
    let share = if terms.has_vectors() { 32 } else { 16 };
    terms.middle.div_ceil(share)
}

fn is_short(terms: &RowTerms) -> bool {
    terms.middle <= ITERATIONS_MAX / 2
}

fn tall(name: &str, terms: &RowTerms, accumulate: bool) -> Variant {
    let way = if terms.has_vectors() { Way::Tall4 } else { Way::Tall };
    one(name, terms, accumulate, way)
}

/// Returns the variant of a kernel, named `name` with a suffix. [`Way::Columns`] requires that
/// `outer` is 1.
pub(crate) fn one(name: &str, terms: &RowTerms, accumulate: bool, way: Way) -> Variant {
    debug_assert!(terms.outer == 1 || !matches!(way, Way::Columns));
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
    let mut params = as_words(&[terms.outer, terms.middle, width, usize::from(accumulate)]);
    params.extend(as_words(&terms.words));
    let dispatch = Dispatch {
        shader,
        operands: [&terms.operands[..], &terms.outputs()].concat(),
        params,
        groups: grid(terms.outer * width.div_ceil(columns), 1),
    };
    Variant::new(format!("{name}_{suffix}"), vec![dispatch])
}
