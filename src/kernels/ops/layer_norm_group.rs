//! Layer normalization and its gradient with one workgroup per row, which reads the row once. Twin
//! of `shaders/layer_norm_group.wgsl`, and a variant of [`super::layer_norm`], which has the
//! reference and the tests.
//!
//! This variant is meant for hardware, where adjacent invocations read adjacent values; on a
//! software adapter the barriers cost more than reading rows again.

use super::layer_norm_consts::with_consts;
use crate::dispatch::{Operand, grid};
use crate::{Dispatch, OpCall, Shader, Variant};
use potluck_graph::Op;

/// Bytes of workgroup memory that every device provides.
const WORKGROUP_BYTES: usize = 16 * 1024;

/// Minimum row width for workgroups of 256 invocations.
const WIDE: usize = 2048;

/// Returns the variant for a call with these operands and parameters; `None` for the gradients of
/// parameters, and if a row does not fit in workgroup memory.
pub fn variant(call: &OpCall, operands: Vec<Operand>, params: Vec<u32>) -> Option<Variant> {
    let (rows, c) = call.rows_and_last(0);
    let group = if c < WIDE { 64 } else { 256 };
    let (entry, arrays) = match call.op.root_op() {
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => ("forward", 1),
        Op::LayerNormGrad | Op::RmsNormGrad => ("grad", 2),
        _ => return None,
    };
    // The rows, and for the reductions two floats of each invocation and of each eight of them.
    if 4 * arrays * c + 8 * (group + group / 8) > WORKGROUP_BYTES {
        return None;
    }
    let shader = Shader::new("layer_norm_group", entry);
    let shader = shader.with_const("GROUP", group as u32).with_const("C", c as u32);
    let shader = with_consts(shader, call);
    let dispatch = Dispatch { shader, operands, params, groups: grid(rows, 1) };
    Some(Variant::new("layer_norm_group", vec![dispatch]))
}
