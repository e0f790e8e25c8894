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

/// Operands of the kernels that read both inputs as they are.
const OPERANDS: [Operand; 3] = [Operand::Input(0), Operand::Input(1), Operand::Output(0)];

/// Tiles that keep a large GPU busy: a workgroup for each of its cores.
const WORKGROUPS_MIN: usize = 64;

/// Places of a part of the plain gradient by the weight, and the invocations that are enough.
const PART_MIN: usize = 64;
const INVOCATIONS: usize = 4096;

/// Reference: every pair of an output and a place that it reads, with every pair of their channels.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let geometry = Geometry::of(call);
    let [a, b] = [0, 1].map(|input| operands(call, inputs[input].floats()));
    let out = &mut *outputs[0];
    if !call.accumulates() {
        out.fill(T::zero());
    }
    let (c, o) = (geometry.group_c(), geometry.group_o());
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

/// Static choice: for single channels the kernel of its own; on adapters that run on a processor
/// the first register tile with enough invocations, on GPUs the largest tile in workgroup memory of
/// which there are enough and which no compiler spills there, or else the smallest one; one
/// invocation per output if there is none.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let geometry = Geometry::of(call);
    if let Some(dispatches) = depthwise::dispatches(call, &geometry) {
        return dispatches;
    }
    if caps.suits_hardware() {
        let suits = |(tile, _): &(WorkgroupTile, usize)| tile.suits(caps);
        let of_matrices: Vec<_> = cooperative_tiles(call, &geometry, caps).collect();
        let tiles: Vec<_> = if of_matrices.is_empty() {
            workgroup_tiles(&geometry, caps).filter(suits).collect()
        } else {
            of_matrices
        };
        let is_busy = |(_, workgroups): &&(_, usize)| *workgroups >= WORKGROUPS_MIN;
        let tile = tiles.iter().find(is_busy).or(tiles.last());
        return match tile {
            Some((tile, _)) => in_workgroup_memory(call, &geometry, *tile),
            None => naive(call),
        };
    }
    let tile = register_tiles(&geometry, caps).find(|tile| tile::is_busy(&geometry, *tile));
    tile.map_or_else(|| naive(call), |tile| tile::dispatches(call, &geometry, tile))
}

/// Returns the register tiles that are candidates: of two that fit, the larger one reads less.
fn register_tiles(geometry: &Geometry, caps: &Caps) -> impl Iterator<Item = RegisterTile> {
    let fits = move |tile: &RegisterTile| tile::fits(geometry, *tile);
    let tiles: &[RegisterTile] = if caps.suits_software() { &tile::TILES } else { &[] };
    tiles.iter().copied().filter(fits)
}

/// Returns the tiles in workgroup memory that are candidates, with their workgroups.
fn workgroup_tiles(
    geometry: &Geometry,
    caps: &Caps,
) -> impl Iterator<Item = (WorkgroupTile, usize)> {
    let tiles: &[WorkgroupTile] = if caps.suits_hardware() { &shared::TILES } else { &[] };
    tiles.iter().filter_map(move |tile| Some((*tile, workgroups(geometry, *tile)?)))
}

/// Returns the tiles of cooperative matrices that are candidates, with their workgroups.
fn cooperative_tiles(
    call: &OpCall,
    geometry: &Geometry,
    caps: &Caps,
) -> impl Iterator<Item = (WorkgroupTile, usize)> {
    let tiles = matmul::shared::cooperative_tiles(call, caps);
    tiles.into_iter().filter_map(move |tile| Some((tile, workgroups(geometry, tile)?)))
}

/// Returns the workgroups of a call in such tiles; `None` if the tile is no candidate.
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
    let naive = Variant::new("conv_naive", naive(call));
    let tiled = register_tiles(&geometry, caps)
        .map(|tile| Variant::new(tile.name, tile::dispatches(call, &geometry, tile)));
    let shared = workgroup_tiles(&geometry, caps)
        .chain(cooperative_tiles(call, &geometry, caps))
        .map(|(tile, _)| Variant::new(tile.name, in_workgroup_memory(call, &geometry, tile)));
    let depthwise = depthwise::dispatches(call, &geometry)
        .map(|dispatches| Variant::new("conv_depthwise", dispatches));
    std::iter::once(naive).chain(tiled).chain(shared).chain(depthwise).collect()
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

/// Returns the number of parts of the plain gradient by the weight: enough invocations, and loops
/// that end in time.
fn naive_parts(geometry: &Geometry) -> usize {
    let (places, weights) = (geometry.positions(), geometry.weights());
    let least = places.div_ceil(ITERATIONS_MAX / 4);
    let wanted = (INVOCATIONS / weights).min(places / PART_MIN);
    least.max(wanted).clamp(1, (WORKSPACE_VALUES_MAX / weights).max(1))
}

/// Returns the parameters of `shaders/conv.wgsl`.
fn params(geometry: &Geometry, count: usize, accumulate: bool, part: usize) -> Vec<u32> {
    let Geometry { size: [h, w], c, out: [oh, ow], o, kernel: [kh, kw], options, .. } = *geometry;
    let [[sh, sw], [ph, pw], [dh, dw]] = [options.stride, options.padding, options.dilation];
    let (group_c, group_o) = (geometry.group_c(), geometry.group_o());
    let (accumulate, places) = (usize::from(accumulate), geometry.positions());
    let sizes = [count, h, w, c, oh, ow, o, kh, kw, sh, sw, ph, pw, dh, dw];
    let more = [group_c, group_o, accumulate, places, part];
    sizes.iter().chain(&more).map(|word| *word as u32).collect()
}

/// Returns the bytes of the rounded operands of [`fast`]; 0 for another op.
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
    let [down, across] = geometry.kernel;
    let of_taps = |channels: usize| down * (1 + across * (1 + channels));
    match geometry.kind {
        ConvKind::Forward => of_taps(geometry.group_c()),
        ConvKind::InputGrad => of_taps(geometry.group_o()),
        ConvKind::WeightGrad => {
            let parts = naive_parts(&geometry);
            geometry.positions().div_ceil(parts).max(parts)
        }
    }
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
