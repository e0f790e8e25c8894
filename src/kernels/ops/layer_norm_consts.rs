//! Constants of the shaders of layer normalization and its gradient: see [`super::layer_norm`].

use crate::{OpCall, Shader};
use potluck_graph::Op;

/// Returns a shader of this op with the constants `ADDS`, for a gradient that adds a residual, and
/// `CENTERED`, for a normalization that subtracts the mean.
pub(super) fn with_consts(shader: Shader, call: &OpCall) -> Shader {
    let centered = u32::from(is_centered(call.op));
    shader.with_const("ADDS", u32::from(adds(call))).with_const("CENTERED", centered)
}

/// Returns true if an op subtracts the mean: layer normalization and its gradient, also with a
/// sum, but not root mean square normalization.
pub(super) fn is_centered(op: &Op) -> bool {
    !matches!(op.root_op(), Op::RmsNorm { .. } | Op::RmsNormGrad)
}

/// Returns true if the call is a gradient with a fused sum, which adds its last input.
pub(super) fn adds(call: &OpCall) -> bool {
    call.op.root_op() != call.op
}
