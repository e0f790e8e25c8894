//! Gradients of convolutions by their weight through workgroup memory, for GPUs. The sums over
//! places are long and the results few, so that the places are split between workgroups, and
//! `shaders/conv_parts.wgsl` adds the parts. Twin of `shaders/conv_shared_weight.wgsl`.

use super::geometry::Geometry;
use super::parts::{self, PartLayout};
use super::shared::TILES;
use crate::dispatch::{WORKSPACE_VALUES_MAX, grid};
use crate::ops::matmul::shared::{WorkgroupTile, operand};
use crate::{Dispatch, OpCall, Operand};

/// Workgroups that fill a large device, and the fewest places of a part.
const WORKGROUPS: usize = 256;
const PLACES_MIN: usize = 512;

/// A call in tiles of one size.
struct TiledWeight {
    tile: WorkgroupTile,
    /// Channels of a group, rounded up to whole vectors, and taps times these.
    width: usize,
    terms: usize,
    group_o: usize,
    groups: usize,
    /// Places of a part, and parts.
    part: usize,
    parts: usize,
}

impl TiledWeight {
    /// Returns the call; `None` if a part of it takes too much memory.
    fn new(geometry: &Geometry, tile: WorkgroupTile) -> Option<Self> {
        let width = geometry.group_c().next_multiple_of(4);
        let (terms, group_o) = (geometry.taps() * width, geometry.group_o());
        let most = WORKSPACE_VALUES_MAX / (geometry.o * terms);
        let mut tiled =
            Self { tile, width, terms, group_o, groups: geometry.groups(), part: 0, parts: 1 };
        let places = geometry.positions();
        let wanted = (WORKGROUPS / tiled.workgroups()).min(places / PLACES_MIN).min(most).max(1);
        tiled.part = places.div_ceil(wanted).next_multiple_of(tile.k as usize);
        tiled.parts = places.div_ceil(tiled.part);
        (most > 0).then_some(tiled)
    }

    /// Returns the tiles down and across a product.
    fn tiles(&self) -> [usize; 2] {
        let [m, n] = [self.tile.m, self.tile.n].map(|side| side as usize);
        [self.group_o.div_ceil(m), self.terms.div_ceil(n)]
    }

    fn workgroups(&self) -> usize {
        self.tiles().iter().product::<usize>() * self.groups * self.parts
    }
}

/// Returns the number of workgroups of a call; `None` if the tile is no candidate: all but the
/// smallest one must be more than half full down and across.
pub fn workgroups(geometry: &Geometry, tile: WorkgroupTile) -> Option<usize> {
    let tiled = TiledWeight::new(geometry, tile)?;
    let is_smallest = tile == TILES[TILES.len() - 1];
    let is_full = 2 * tiled.group_o > tile.m as usize && 2 * tiled.terms > tile.n as usize;
    (is_smallest || is_full).then(|| tiled.workgroups())
}

/// Returns the dispatches of a call: the parts, and their sums.
pub fn dispatches(call: &OpCall, geometry: &Geometry, tile: WorkgroupTile) -> Vec<Dispatch> {
    let Some(tiled) = TiledWeight::new(geometry, tile) else { return Vec::new() };
    let TiledWeight { width, terms, parts, .. } = tiled;
    let each = geometry.o * terms;
    let workspace = Operand::workspace(parts * each);
    let vectors = |all: usize, group: usize| all.is_multiple_of(4) && group.is_multiple_of(4);
    let shader = tile
        .shader("conv_shared_weight", "weight_tile", call.precision)
        .with_text(&operand("a", 0, vectors(geometry.o, geometry.group_o())))
        .with_text(&operand("b", 1, vectors(geometry.c, geometry.group_c())));
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
    let [[sh, sw], [ph, pw], [dh, dw]] = [options.stride, options.padding, options.dilation];
    let ([down, across], workgroups) = (tiled.tiles(), tiled.workgroups());
    let (group_c, group_o) = (geometry.group_c(), geometry.group_o());
    let places = geometry.positions();
    let tiles = [workgroups, down * across, down, across];
    let front = [places, tiled.part, h, w, c, oh, ow, o];
    let middle = [kernel[1], sh, sw, ph, pw, dh, dw, group_c, group_o];
    let behind = [tiled.groups, tiled.width, tiled.terms];
    tiles.iter().chain(&front).chain(&middle).chain(&behind).map(|word| *word as u32).collect()
}
