//! The gradient of an embedding's table with sums in registers. Twin of
//! `shaders/embedding_rows.wgsl`, and a variant of [`super::embedding`], which has the reference
//! and the tests.
//!
//! It is meant for GPUs: many workgroups share the columns of a row and the tokens of a frequent
//! id, at the price of barriers.

use super::dispatch_parts::{as_words, lanes_of};
use super::embedding::EmbeddingTable;
use crate::dispatch::{ITERATIONS_MAX, Operand, grid};
use crate::{Dispatch, OpCall, Shader, Variant};

/// Maximum number of workgroups among which the rows of the table are divided: enough to fill a
/// device, and few enough that it stays cheap for each of them to read all ids. The shader needs
/// 2^10 or more where the table has more rows.
pub(crate) const OWNERS_MAX: usize = 1024;

/// Tokens that a workgroup lists in one round.
const NOTED: usize = 2048;

/// Upper bounds of the loop iterations of an invocation per `NOTED` tokens: if all have the
/// workgroup's only row, which at least 4 invocations share, and if each row differs from the
/// previous one.
const ITERATIONS: [usize; 2] = [64 + NOTED / 4, 64 + 3 * NOTED];

/// Number of values (floats or vectors) of a row, and of a workgroup.
fn row(v: usize, c: usize) -> (usize, usize) {
    let width = c / lanes_of(c);
    // Rows of a small table are divided further, so that there are enough workgroups.
    let columns_max = if v <= OWNERS_MAX { 16 } else { 64 };
    (width, width.next_power_of_two().clamp(4, columns_max))
}

/// Number of workgroups for a table; each reads all ids.
pub(super) fn workgroups(table: EmbeddingTable) -> usize {
    let (width, columns) = row(table.rows, table.columns);
    table.rows.min(OWNERS_MAX) * width.div_ceil(columns)
}

/// Returns the variant for a gradient.
pub fn variant(call: &OpCall) -> Variant {
    let table = EmbeddingTable::of(call);
    let EmbeddingTable { first: first_row, rows: v, columns: c } = table;
    let (width, columns) = row(v, c);
    let value = if c.is_multiple_of(4) { "vec4f" } else { "f32" };
    let shader = Shader::new("embedding_rows", "embedding_rows")
        .with_text(&format!("alias Value = {value};\n"))
        .with_const("COLUMNS", columns as u32);
    let n = call.input_len(0);
    let owners = v.min(OWNERS_MAX);
    let rounds = ITERATIONS_MAX / ITERATIONS[usize::from(v > OWNERS_MAX)];
    let tokens = rounds * NOTED;
    let mut dispatches = Vec::new();
    for first in (0..n.max(1)).step_by(tokens) {
        let end = n.min(first + tokens);
        let accumulate = usize::from(call.accumulates() || first > 0);
        dispatches.push(Dispatch {
            shader: shader.clone(),
            operands: vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
            params: as_words(&[first, end, width, v, owners, accumulate, first_row]),
            groups: grid(workgroups(table), 1),
        });
    }
    Variant::new("embedding_grad_rows", dispatches)
}
