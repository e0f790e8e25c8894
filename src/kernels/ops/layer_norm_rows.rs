//! Layer normalization and its gradient on vectors of 4 with rows in registers. Twin of
//! `shaders/layer_norm_rows.wgsl`, and a variant of [`super::layer_norm`], which has the reference
//! and the tests.

use super::layer_norm_consts::with_consts;
use crate::dispatch::{ITERATIONS_MAX, Operand, WORKSPACE_VALUES_MAX, grid};
use crate::{Dispatch, OpCall, Shader, Variant};
use potluck_graph::Op;

/// Vectors of a row that an invocation keeps if workgroups can be large enough.
const ITEMS: usize = 4;

/// Maximum number of vectors of a row that an invocation keeps.
const ITEMS_MAX: usize = 8;

/// Workgroups that fill a large device, each with a block of rows.
const WORKGROUPS: usize = 512;

/// Minimum rows of a block.
const ROWS_MIN: usize = 16;

/// Minimum and maximum number of invocations of a workgroup. Between them, a workgroup has as many
/// as share a row.
const GROUP: [usize; 2] = [64, 256];

/// Returns the variant for a call with these operands and parameters; `None` for the gradients of
/// parameters, and if the rows are not whole vectors or too long for registers.
pub fn variant(call: &OpCall, operands: Vec<Operand>, params: Vec<u32>) -> Option<Variant> {
    let (rows, c) = call.rows_and_last(0);
    let entry = match call.op.root_op() {
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => "forward",
        Op::LayerNormGrad | Op::RmsNormGrad => "grad",
        _ => return None,
    };
    let width = c / 4;
    if !c.is_multiple_of(4) || width > GROUP[1] * ITEMS_MAX {
        return None;
    }
    let shader = with_consts(shader(entry, width, 0), call);
    let [group, lanes] = sizes(width);
    let groups = grid(rows.div_ceil(group / lanes), 1);
    let dispatch = Dispatch { shader, operands, params, groups };
    Some(Variant::new("layer_norm_rows", vec![dispatch]))
}

/// Returns the dispatch `dx` of [`variant`] for a gradient, extended by `sums` sums of each column
/// for the gradients of the parameters, which it writes to the workspace for each block of rows;
/// and the number of blocks and the rows of each. `None` if there are too few rows for two blocks,
/// or if invocations have too many vectors of a row to keep sums for each in registers.
pub fn with_sums(call: &OpCall, dx: Dispatch, sums: usize) -> Option<(Dispatch, [usize; 2])> {
    let (rows, c) = call.rows_and_last(0);
    let width = c / 4;
    let [group, lanes] = sizes(width);
    if width.div_ceil(lanes) > ITEMS {
        return None;
    }
    let each = group / lanes;
    let strip = rows.div_ceil(WORKGROUPS).max(ROWS_MIN).next_multiple_of(each);
    let blocks = rows.div_ceil(strip);
    // With fewer rows there are never more blocks than this.
    let blocks_max = rows.div_ceil(ROWS_MIN).min(WORKGROUPS);
    let values = sums * blocks_max * c;
    if blocks < 2 || strip.div_ceil(each) > ITERATIONS_MAX || values > WORKSPACE_VALUES_MAX {
        return None;
    }
    let shader = with_consts(shader("grad_affine", width, sums), call);
    let operands = [dx.operands, vec![Operand::workspace(values)]].concat();
    let mut params = dx.params;
    params[3] = strip as u32;
    Some((Dispatch { shader, operands, params, groups: grid(blocks, 1) }, [blocks, strip]))
}

/// Invocations of a workgroup, and the number of them that share a row of `width` vectors.
fn sizes(width: usize) -> [usize; 2] {
    let lanes = width.div_ceil(ITEMS).next_power_of_two().clamp(8, GROUP[1]);
    [lanes.max(GROUP[0]), lanes]
}

/// Returns the shader of an entry point for rows of `width` vectors and this many sums of each
/// column, without the constants of the op.
pub fn shader(entry: &'static str, width: usize, sums: usize) -> Shader {
    let [group, lanes] = sizes(width);
    let items = width.div_ceil(lanes);
    Shader::new("layer_norm_rows", entry)
        .with_const("GROUP", group as u32)
        .with_const("LANES", lanes as u32)
        .with_const("ITEMS", items as u32)
        .with_const("SUMS", sums as u32)
}
