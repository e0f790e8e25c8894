//! Sums over rows in two stages: the first writes partial sums of blocks of rows to the workspace,
//! the second adds them. Twin of `shaders/row_blocks.wgsl`, and a variant of [`super::sum`] and of
//! gradients such as the weight's and the bias's in [`super::layer_norm`], which have the
//! references and the tests.
//!
//! It is meant for GPUs: a gradient of a bias of 768 values has too few columns to fill one.

use super::dispatch_parts::as_words;
use super::row_terms::RowTerms;
use crate::dispatch::{ITERATIONS_MAX, WORKSPACE_VALUES_MAX, grid};
use crate::{Dispatch, Operand, Shader, Variant};

/// Number of workgroups of the first stage that fills a large device.
const WORKGROUPS: usize = 1024;

/// Invocations of a workgroup.
const GROUP: usize = 256;

/// Minimum number of terms per invocation of a block: as many as it loads together.
const TERMS: usize = 4;

/// Returns the variant that writes the sums to the outputs; `None` if there are too few rows for
/// two blocks, or enough columns for one stage.
pub fn variant(name: &str, terms: &RowTerms, accumulate: bool) -> Option<Variant> {
    let RowTerms { outer, middle, inner, .. } = *terms;
    let [lanes, columns] = lanes_and_columns(terms);
    let width = inner / lanes;
    // Invocations that share a column.
    let share = GROUP / columns;
    let tiles = outer * width.div_ceil(columns);
    let blocks_max = (WORKGROUPS / tiles.max(1)).min(middle / (share * TERMS));
    if blocks_max < 2 {
        return None;
    }
    let strip = middle.div_ceil(blocks_max);
    let blocks = middle.div_ceil(strip);
    // With fewer rows there are never more blocks than this.
    let sums = terms.sums * outer * blocks_max * inner;
    if strip.div_ceil(share) > ITERATIONS_MAX || sums > WORKSPACE_VALUES_MAX {
        return None;
    }
    let workspace = Operand::workspace(sums);
    let first = Dispatch {
        operands: [&terms.operands[..], &[workspace]].concat(),
        ..stage("blocks", terms, [blocks, strip], accumulate)
    };
    Some(Variant::new(name, vec![first, totals(terms, [blocks, strip], accumulate)]))
}

/// Returns the dispatch that adds the sums of `blocks` blocks of `strip` rows each in the
/// workspace, and writes the totals to the outputs.
pub fn totals(terms: &RowTerms, [blocks, strip]: [usize; 2], accumulate: bool) -> Dispatch {
    let workspace = Operand::workspace(terms.sums * terms.outer * blocks * terms.inner);
    Dispatch {
        operands: [&[workspace][..], &terms.outputs()].concat(),
        ..stage("totals", terms, [blocks, strip], accumulate)
    }
}

/// Number of floats in a value, and of columns of a workgroup.
fn lanes_and_columns(terms: &RowTerms) -> [usize; 2] {
    if terms.has_vectors() { [4, 16] } else { [1, 32] }
}

/// Dispatch of a stage, without operands.
fn stage(
    entry: &'static str,
    terms: &RowTerms,
    [blocks, strip]: [usize; 2],
    accumulate: bool,
) -> Dispatch {
    let &RowTerms { outer, middle, inner, .. } = terms;
    let [lanes, columns] = lanes_and_columns(terms);
    let width = inner / lanes;
    let tiles = outer * width.div_ceil(columns);
    let number = terms.operands.len();
    let partials =
        format!("@group(0) @binding({number}) var<storage, read_write> partials: array<Sums>;\n");
    let mut params = as_words(&[outer, middle, width, blocks, strip, usize::from(accumulate)]);
    params.extend(as_words(&terms.words));
    Dispatch {
        shader: Shader::new("row_blocks", entry)
            .with_text(&terms.types(lanes))
            .with_const("COLUMNS", columns as u32)
            .with_text(&terms.text)
            .with_text(&partials)
            .with_text(&terms.put(1)),
        operands: Vec::new(),
        params,
        groups: grid(if entry == "blocks" { blocks * tiles } else { tiles }, 1),
    }
}
