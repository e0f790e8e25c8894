//! Count of the passes that a device has run, on GPUs. Twin of `shaders/passes.wgsl`.

use crate::{Dispatch, Operand, Shader};

/// Returns the dispatch that counts one pass in its output, of one word.
pub(crate) fn dispatch() -> Dispatch {
    Dispatch {
        shader: Shader::new("passes", "passes"),
        operands: vec![Operand::Output(0)],
        params: vec![1],
        groups: [1, 1, 1],
    }
}
