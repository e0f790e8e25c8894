//! Gradients of convolutions by their weight through workgroup memory, for GPUs. The sums over
//! places are long and the results few, so the places are split between workgroups, and
//! `shaders/conv_parts.wgsl` adds the parts. Twin of `shaders/conv_shared_weight.wgsl`.

use super::geometry::Geometry;
use super::parts::{self, PartLayout};
use super::shared::TILES;
use super::words;
use crate::dispatch::{WORKSPACE_VALUES_MAX, grid};
use crate::ops::matmul::shared::{WorkgroupTile, operand};
use crate::{Dispatch, OpCall, Operand};

/// Workgroups that fill a large device.
const WORKGROUPS: usize = 256;

/// The fewest places of a part.
const PLACES_MIN: usize = 512;

/// A call in tiles of one size.
struct TiledWeight {
    tile: WorkgroupTile,
    /// Input channels of a group, rounded up to whole vectors.
    width: usize,
    /// Taps times `width`.
    terms: usize,
    group_o: usize,
    groups: usize,
    /// Places of a part.
    part: usize,
    parts: usize,
    /// Parts for which there is workspace: with fewer places there are never more than these.
    parts_max: usize,
}

impl TiledWeight {
    /// A call; `None` if a part of it takes too much memory.
    fn new(geometry: &Geometry, tile: WorkgroupTile) -> Option<Self> {
        let width = geometry.group_c().next_multiple_of(4);
        let terms = geometry.taps() * width;
        let most = WORKSPACE_VALUES_MAX / (geometry.o * terms);
        if most == 0 {
            return None;
        }
        let whole = Self {
            tile,
            width,
            terms,
            group_o: geometry.group_o(),
            groups: geometry.groups(),
            part: 0,
            parts: 1,
            parts_max: 1,
        };
        let places = geometry.positions();
        let parts_max = (WORKGROUPS / whole.workgroups()).min(places / PLACES_MIN).min(most).max(1);
        let part = places.div_ceil(parts_max).next_multiple_of(tile.k as usize);
        Some(Self { part, parts: places.div_ceil(part), parts_max, ..whole })
    }

    /// Tiles down and across a product.
    fn tiles(&self) -> [usize; 2] {
        let down = self.group_o.div_ceil(self.tile.m as usize);
        let across = self.terms.div_ceil(self.tile.n as usize);
        [down, across]
    }

    fn workgroups(&self) -> usize {
        let [down, across] = self.tiles();
        down * across * self.groups * self.parts
    }
}

/// Returns the number of workgroups of a call; `None` if the tile is no candidate: all but the
/// smallest one must be more than half full down and across.
pub fn workgroups(geometry: &Geometry, tile: WorkgroupTile) -> Option<usize> {
    let tiled = TiledWeight::new(geometry, tile)?;
    let is_smallest = tile == TILES[TILES.len() - 1];
    let is_full = 2 * tiled.group_o > tile.m as usize && 2 * tiled.terms > tile.n as usize;
    if is_smallest || is_full { Some(tiled.workgroups()) } else { None }
}

/// Returns the dispatches of a call: the parts, and their sums.
pub fn dispatches(call: &OpCall, geometry: &Geometry, tile: WorkgroupTile) -> Vec<Dispatch> {
    let Some(tiled) = TiledWeight::new(geometry, tile) else { return Vec::new() };
    let TiledWeight { width, terms, parts, .. } = tiled;
    let each = geometry.o * terms;
    let workspace = Operand::workspace(tiled.parts_max * each);
    let a_vectors = geometry.o.is_multiple_of(4) && geometry.group_o().is_multiple_of(4);
    let b_vectors = geometry.c.is_multiple_of(4) && geometry.group_c().is_multiple_of(4);
    let shader = tile
        .shader("conv_shared_weight", "weight_tile", call.precision)
        .with_text(&operand("a", 0, a_vectors))
        .with_text(&operand("b", 1, b_vectors));
    let product = Dispatch {
        shader,
        operands: vec![Operand::Input(1), Operand::Input(0), workspace],
        params: params(geometry, &tiled),
        groups: grid(tiled.workgroups(), 1),
    };
    let layout = PartLayout { part: each, o: terms, c: 1, tap: width };
    vec![product, parts::add(call, parts, &layout, workspace)]
}

fn params(geometry: &Geometry, tiled: &TiledWeight) -> Vec<u32> {
    let Geometry { size: [h, w], c, out: [oh, ow], o, kernel, options, .. } = *geometry;
    let [sh, sw] = options.stride;
    let [ph, pw] = options.padding;
    let [dh, dw] = options.dilation;
    let [down, across] = tiled.tiles();
    let mut params = words(&[tiled.workgroups(), down * across, down, across]);
    params.extend(words(&[geometry.positions(), tiled.part, h, w, c, oh, ow, o]));
    params.extend(words(&[kernel[1], sh, sw, ph, pw, dh, dw]));
    params.extend(words(&[geometry.group_c(), geometry.group_o()]));
    params.extend(words(&[tiled.groups, tiled.width, tiled.terms]));
    params
}
