//! 2D convolutions and their gradients, over pictures that are channels last. Twin of
//! `shaders/conv.wgsl`, which has the formulas.

mod channels;
pub(crate) mod depthwise;
mod depthwise_host;
mod direct;
pub(crate) mod geometry;
mod host;
mod micro;
mod panel;
pub mod parts;
mod probes;
pub mod shared;
pub(crate) mod shared_weight;
pub mod tile;
pub mod weights;

use crate::dispatch::{ITERATIONS_MAX, WORKSPACE_VALUES_MAX, grid};
use crate::ops::epilogue::{self, Epilogue};
use crate::ops::matmul;
use crate::ops::matmul::shared::WorkgroupTile;
use crate::ops::matmul::tile::RegisterTile;
use crate::twin::{IndependentAxis, no_forward, normal_inputs};
use crate::{
    Caps, Cost, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant, operand_bytes, operands,
};
use geometry::{ConvKind, Geometry};
use host::fast;
use parts::PartLayout;
use potluck_core::HostTensorView;
use potluck_graph::Op;
pub(crate) use probes::probes_with_channels;
use probes::{catalog, probes};

/// Twin of [`potluck_graph::Op::Conv2d`] and its gradients.
pub static TWIN: Twin = Twin {
    name: "conv",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: true,
    iterations,
    inputs: normal_inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Operands of the kernels that read both inputs directly.
const OPERANDS: [Operand; 3] = [Operand::Input(0), Operand::Input(1), Operand::Output(0)];

/// Tiles that keep a large GPU busy: a workgroup for each of its cores.
const WORKGROUPS_MIN: usize = 64;

/// The fewest places of a part of the plain gradient by the weight.
const PART_MIN: usize = 64;

/// Invocations of the plain gradient by the weight that keep a device busy.
const INVOCATIONS: usize = 4096;

/// Reference: every pair of an output and a place that it reads, with every pair of their channels.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let geometry = Geometry::of(call);
    let a = operands(call, inputs[0].floats());
    let b = operands(call, inputs[1].floats());
    let out = &mut *outputs[0];
    if !call.accumulates() {
        out.fill(T::zero());
    }
    let c = geometry.group_c();
    let o = geometry.group_o();
    geometry.for_each_pair(|y, x, place| {
        for channel in 0..geometry.o {
            let y = y * geometry.o + channel;
            for own in 0..c {
                let x = x * geometry.c + channel / o * c + own;
                let w = geometry.weight_at(channel, own, place);
                match geometry.kind {
                    ConvKind::Forward => out[y] += a[x] * b[w],
                    ConvKind::InputGrad => out[x] += a[y] * b[w],
                    ConvKind::WeightGrad => out[w] += a[x] * b[y],
                }
            }
        }
    });
}

/// Static choice: for single channels the kernel of `depthwise`; on adapters that run on a
/// processor the first register tile with enough invocations; on GPUs the largest tile in workgroup
/// memory for which the device has enough registers and which gives enough workgroups, or else the
/// smallest tile; one
/// invocation per output if there is no tile.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let geometry = Geometry::of(call);
    if let Some(dispatches) = depthwise::dispatches(call, &geometry) {
        return dispatches;
    }
    if caps.wants_gpu_variants() {
        let mut tiles = candidates(&geometry, &matmul::shared::cooperative_tiles(call, caps));
        if tiles.is_empty() {
            tiles = candidates(&geometry, &shared::TILES);
            tiles.retain(|(tile, _)| tile.suits(caps));
        }
        let busy = tiles.iter().find(|(_, workgroups)| *workgroups >= WORKGROUPS_MIN);
        return match busy.or(tiles.last()) {
            Some((tile, _)) => in_workgroup_memory(call, &geometry, *tile),
            None => naive(call),
        };
    }
    for tile in register_tiles(&geometry, caps) {
        if tile::is_busy(&geometry, tile) {
            return tile::dispatches(call, &geometry, tile);
        }
    }
    naive(call)
}

/// Register tiles that are candidates, the fastest first.
fn register_tiles(geometry: &Geometry, caps: &Caps) -> Vec<RegisterTile> {
    if !caps.wants_cpu_driver_variants() {
        return Vec::new();
    }
    tile::TILES.into_iter().filter(|tile| tile::fits(geometry, *tile)).collect()
}

/// Tiles in workgroup memory that are candidates, with their workgroups.
fn candidates(geometry: &Geometry, tiles: &[WorkgroupTile]) -> Vec<(WorkgroupTile, usize)> {
    let mut candidates = Vec::new();
    for tile in tiles {
        if let Some(workgroups) = workgroups(geometry, *tile) {
            candidates.push((*tile, workgroups));
        }
    }
    candidates
}

/// Workgroups of a call in such tiles; `None` if the tile is no candidate.
fn workgroups(geometry: &Geometry, tile: WorkgroupTile) -> Option<usize> {
    match geometry.kind {
        ConvKind::WeightGrad => shared_weight::workgroups(geometry, tile),
        ConvKind::Forward | ConvKind::InputGrad => shared::workgroups(geometry, tile),
    }
}

fn in_workgroup_memory(call: &OpCall, geometry: &Geometry, tile: WorkgroupTile) -> Vec<Dispatch> {
    match geometry.kind {
        ConvKind::WeightGrad => shared_weight::dispatches(call, geometry, tile),
        ConvKind::Forward | ConvKind::InputGrad => shared::dispatches(call, geometry, tile),
    }
}

/// Returns the GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let geometry = Geometry::of(call);
    let mut variants = vec![Variant::new("conv_naive", naive(call))];
    for tile in register_tiles(&geometry, caps) {
        variants.push(Variant::new(tile.name, tile::dispatches(call, &geometry, tile)));
    }
    let mut tiles = Vec::new();
    if caps.wants_gpu_variants() {
        tiles.extend(shared::TILES);
    }
    tiles.extend(matmul::shared::cooperative_tiles(call, caps));
    for (tile, _) in candidates(&geometry, &tiles) {
        variants.push(Variant::new(tile.name, in_workgroup_memory(call, &geometry, tile)));
    }
    if let Some(dispatches) = depthwise::dispatches(call, &geometry) {
        variants.push(Variant::new("conv_depthwise", dispatches));
    }
    variants
}

/// Returns the plain kernel: one invocation per output, or for the gradient by the weight one per
/// weight and part of the places.
fn naive(call: &OpCall) -> Vec<Dispatch> {
    let geometry = Geometry::of(call);
    let entry = match geometry.kind {
        ConvKind::Forward => "forward",
        ConvKind::InputGrad => "input_grad",
        ConvKind::WeightGrad => "weight_grad",
    };
    let places = geometry.positions();
    let parts = naive_parts(&geometry);
    let has_room = parts * geometry.weights() <= WORKSPACE_VALUES_MAX;
    if geometry.kind != ConvKind::WeightGrad || !has_room {
        let Epilogue { text, operands } = epilogue::of(call, OPERANDS.len());
        let count = call.output_len(0);
        let shader = Shader::new("conv", entry).with_operands(call.precision).with_text(&text);
        let operands = [&OPERANDS[..], &operands].concat();
        let params = params(&geometry, count, call.accumulates(), places);
        return vec![Dispatch { shader, operands, params, groups: grid(count, 64) }];
    }
    let count = parts * geometry.weights();
    let workspace = Operand::workspace(count);
    let text = crate::source::snippet("store");
    let first = Dispatch {
        shader: Shader::new("conv", entry).with_operands(call.precision).with_text(text),
        operands: vec![Operand::Input(0), Operand::Input(1), workspace],
        params: params(&geometry, count, false, places.div_ceil(parts)),
        groups: grid(count, 64),
    };
    vec![first, parts::add(call, parts, &PartLayout::of_weight(&geometry), workspace)]
}

/// Returns the number of parts of the plain gradient by the weight: for enough invocations, and for
/// at most [`ITERATIONS_MAX`] iterations of each.
fn naive_parts(geometry: &Geometry) -> usize {
    let places = geometry.positions();
    let weights = geometry.weights();
    let least = places.div_ceil(ITERATIONS_MAX / 4);
    let wanted = (INVOCATIONS / weights).min(places / PART_MIN);
    least.max(wanted).clamp(1, (WORKSPACE_VALUES_MAX / weights).max(1))
}

/// Parameters of `shaders/conv.wgsl`.
fn params(geometry: &Geometry, count: usize, accumulate: bool, part: usize) -> Vec<u32> {
    let Geometry { size: [h, w], c, out: [oh, ow], o, kernel: [kh, kw], options, .. } = *geometry;
    let [sh, sw] = options.stride;
    let [ph, pw] = options.padding;
    let [dh, dw] = options.dilation;
    let mut params = words(&[count, h, w, c, oh, ow, o, kh, kw, sh, sw, ph, pw, dh, dw]);
    params.extend(words(&[geometry.group_c(), geometry.group_o()]));
    params.extend(words(&[usize::from(accumulate), geometry.positions(), part]));
    params
}

fn words(sizes: &[usize]) -> Vec<u32> {
    sizes.iter().map(|size| *size as u32).collect()
}

/// Bytes of the rounded operands of [`fast`]; 0 for another op.
pub(crate) fn host_bytes(call: &OpCall) -> usize {
    match call.op {
        Op::Conv2d(_) | Op::Conv2dInputGrad { .. } | Op::Conv2dWeightGrad { .. } => {
            operand_bytes(call, call.input_len(0) + call.input_len(1))
        }
        _ => 0,
    }
}

/// Returns the cost: a multiplication and an addition per output, tap and channel of its group, as
/// if there were no padding.
pub fn cost(call: &OpCall) -> Cost {
    let geometry = Geometry::of(call);
    let terms = geometry.group_c() as f64 * geometry.taps() as f64;
    let flops = 2.0 * geometry.positions() as f64 * geometry.o as f64 * terms;
    Cost { flops, bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: the taps and channels of the longest sum, or the places of a part.
pub(crate) fn iterations(call: &OpCall) -> usize {
    let geometry = Geometry::of(call);
    let channels = match geometry.kind {
        ConvKind::Forward => geometry.group_c(),
        ConvKind::InputGrad => geometry.group_o(),
        ConvKind::WeightGrad => {
            let parts = naive_parts(&geometry);
            return geometry.positions().div_ceil(parts).max(parts);
        }
    };
    let [down, across] = geometry.kernel;
    down * (1 + across * (1 + channels))
}

/// See [`Twin::independent_axes`]: pictures, or output channels of the gradient by the weight.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    match call.op {
        Op::Conv2dWeightGrad { options, .. } if options.groups == 1 => {
            IndependentAxis::of(call, vec![None, Some(3)], vec![Some(0)]).into_iter().collect()
        }
        Op::Conv2dWeightGrad { .. } => Vec::new(),
        _ => IndependentAxis::leading(call, &[1]),
    }
}

#[cfg(test)]
mod tests;
