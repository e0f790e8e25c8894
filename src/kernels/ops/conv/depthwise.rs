//! Convolutions of single channels and their gradients on GPUs, with four channels per invocation:
//! as a matrix product, each channel would have a single row or column. Twin of
//! `shaders/conv_depthwise.wgsl`.

use super::geometry::{ConvKind, Geometry};
use super::parts::{self, PartLayout};
use super::words;
use crate::dispatch::{ITERATIONS_MAX, WORKSPACE_VALUES_MAX, grid};
use crate::ops::{epilogue, fused_vectors};
use crate::{Dispatch, OpCall, Operand, Shader};

/// Invocations of the gradient by the weight that keep a device busy.
const INVOCATIONS: usize = 16_384;

/// The fewest rows of places per invocation of the gradient by the weight.
const LINES_MIN: usize = 4;

/// Returns the dispatches of a call; `None` unless it is a convolution of single channels, whose
/// number is a multiple of four.
pub fn dispatches(call: &OpCall, geometry: &Geometry) -> Option<Vec<Dispatch>> {
    let fits = geometry.is_depthwise() && geometry.c.is_multiple_of(4);
    if !fits || geometry.weights() > WORKSPACE_VALUES_MAX {
        return None;
    }
    match geometry.kind {
        ConvKind::WeightGrad => Some(weight_grad(call, geometry)),
        ConvKind::Forward | ConvKind::InputGrad => gathered(call, geometry),
    }
}

fn gathered(call: &OpCall, geometry: &Geometry) -> Option<Vec<Dispatch>> {
    let Geometry { c, kernel: [kh, kw], .. } = *geometry;
    let epilogue = fused_vectors::of_steps(call, &epilogue::steps(call), 3)?;
    let weights = Operand::workspace(geometry.weights());
    // (c, taps) as one group with no channels that are read, to (taps, c).
    let count = geometry.weights();
    let taps = kh * kw;
    let permute = Dispatch {
        shader: Shader::new("conv_weights", "permute"),
        operands: vec![Operand::Input(1), weights],
        params: words(&[count, 1, c, 1, c, taps, 0, taps, 0]),
        groups: grid(count, 64),
    };
    let vectors = call.output_len(0) / 4;
    let own = [Operand::Input(0), weights, Operand::Output(0)];
    let product = Dispatch {
        shader: Shader::new("conv_depthwise", "gathered")
            .with_operands(call.precision)
            .with_text(&epilogue::output_binding(2, "vec4f"))
            .with_text(&epilogue.text),
        operands: [&own[..], &epilogue.operands].concat(),
        params: params(geometry, vectors, [0; 2]),
        groups: grid(vectors, 64),
    };
    Some(vec![permute, product])
}

fn weight_grad(call: &OpCall, geometry: &Geometry) -> Vec<Dispatch> {
    let lines = geometry.b * geometry.out[0];
    let vectors = geometry.weights() / 4;
    let wanted = INVOCATIONS.div_ceil(vectors).min(lines / LINES_MIN);
    let least = (lines * (geometry.out[1] + 1)).div_ceil(ITERATIONS_MAX / 2);
    let most = WORKSPACE_VALUES_MAX / geometry.weights();
    let count_max = wanted.max(least).min(most).max(1);
    let part = lines.div_ceil(count_max);
    let count = lines.div_ceil(part);
    // With fewer lines there are never more parts than this.
    let workspace = Operand::workspace(count_max * geometry.weights());
    let product = Dispatch {
        shader: Shader::new("conv_depthwise", "weight_parts")
            .with_operands(call.precision)
            .with_text(&epilogue::output_binding(2, "vec4f"))
            .with_text("fn store4(at: u32, total: vec4f) { c[at] = total; }\n"),
        operands: vec![Operand::Input(0), Operand::Input(1), workspace],
        params: params(geometry, count * vectors, [lines, part]),
        groups: grid(count * vectors, 64),
    };
    let layout = PartLayout { part: geometry.weights(), o: 1, c: 0, tap: geometry.c };
    vec![product, parts::add(call, count, &layout, workspace)]
}

fn params(geometry: &Geometry, count: usize, [lines, part]: [usize; 2]) -> Vec<u32> {
    let Geometry { size, out, kernel: [kh, kw], options, .. } = *geometry;
    let is_grad = geometry.kind == ConvKind::InputGrad;
    let ([h, w], [oh, ow]) = if is_grad { (out, size) } else { (size, out) };
    let (step, divisor) = if is_grad { ([1; 2], options.stride) } else { (options.stride, [1; 2]) };
    // The gradient reads against the order of the taps.
    let mut first = options.padding.map(|padding| (padding as u32).wrapping_neg());
    let mut tap = options.dilation.map(|dilation| dilation as u32);
    if is_grad {
        first = first.map(u32::wrapping_neg);
        tap = tap.map(u32::wrapping_neg);
    }
    let mut params = words(&[count, h, w, geometry.c / 4, oh, ow, kh, kw]);
    params.extend(words(&step));
    params.extend(words(&divisor));
    params.extend(first);
    params.extend(tap);
    params.extend(words(&[lines, part]));
    params
}
