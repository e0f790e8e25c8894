//! Shaders of the gradient of the cross-entropy, which is written to a tensor of its own or
//! replaces the logits. Twin of `shaders/cross_entropy_grad.wgsl`; [`super::cross_entropy`] has the
//! reference and the CPU kernel.

use crate::Shader;

/// WGSL in front of the gradient: the bindings of the logits and of their gradient, and the
/// functions that write the gradient.
const INTO_ANOTHER: &str = "\
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(0) var<storage, read> x4: array<vec4f>;
@group(0) @binding(3) var<storage, read_write> dx: array<f32>;
@group(0) @binding(3) var<storage, read_write> dx4: array<vec4f>;
fn put(at: u32, value: f32) { dx[at] = value; }
fn put4(at: u32, value: vec4f) { dx4[at] = value; }
";

/// The same for a gradient that replaces the logits.
const IN_PLACE: &str = "\
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(0) var<storage, read_write> x4: array<vec4f>;
fn put(at: u32, value: f32) { x[at] = value; }
fn put4(at: u32, value: vec4f) { x4[at] = value; }
";

/// Returns the shader of an entry point with the operands `logits, targets, lse, dlogits`.
pub fn into_another(entry: &'static str) -> Shader {
    Shader::new("cross_entropy_grad", entry).with_text(INTO_ANOTHER)
}

/// Returns the shader of an entry point with the operands `logits, targets, lse`, which replaces
/// the logits.
pub fn in_place(entry: &'static str) -> Shader {
    Shader::new("cross_entropy_grad", entry).with_text(IN_PLACE)
}
