//! Convolutions and their gradients by the input through workgroup memory, for GPUs: the tiles of
//! matrix products ([`crate::ops::matmul::shared`]), whose first operand is gathered from
//! pictures. Twin of `shaders/conv_shared.wgsl`.
//!
//! The gathered matrix is never in memory as a whole. The weight is, in the order of the product's
//! terms and filled up with zeros to whole tiles, so that it is read in vectors without tests. The
//! loops over terms are the same as in the tiles of matrix products.

use super::channels::Channels;
use super::geometry::{ConvKind, Gather, Geometry};
use super::tile::{divisor, gather_params, grid_of, has_places};
use super::weights::WeightLayout;
use super::words;
use crate::ops::epilogue;
use crate::ops::matmul::shared::{Output, WorkgroupTile, operand, store_some, tile};
use crate::{Dispatch, OpCall, Operand, dispatch};

/// Available tiles, the largest first. A tile of 128x64, in which an invocation copies four rows
/// and four columns, is left out because AMD's compiler spills registers for it. The compilers of
/// Intel's and Apple's open drivers spill them for 128x128 in the forward pass, also by terms.
pub const TILES: [WorkgroupTile; 4] = [
    tile("conv_shared_128x128", [128, 128, 16], [8, 8]).with_registers(215),
    tile("conv_shared_64x64", [64, 64, 16], [8, 4]).with_registers(147),
    tile("conv_shared_64x64_by_terms", [64, 64, 16], [8, 4]).by_terms(),
    tile("conv_shared_32x32", [32, 32, 16], [4, 4]),
];

/// The most channels read of a group with which a stage has several taps.
pub(crate) const FLAT_MAX: usize = 12;

/// A call in tiles of one size.
struct Tiled<'a> {
    geometry: &'a Geometry,
    tile: WorkgroupTile,
    channels: Channels,
    layout: WeightLayout,
    is_flat: bool,
}

impl<'a> Tiled<'a> {
    /// Returns the call; `None` if its weights take too much memory, or if there are remainders
    /// without places.
    fn new(geometry: &'a Geometry, tile: WorkgroupTile) -> Option<Self> {
        let channels = Channels::of(geometry);
        let is_flat = channels.group_read <= FLAT_MAX && divisor(geometry) == [1; 2];
        let rows = if is_flat { 4 } else { tile.k as usize };
        let layout = WeightLayout::new(geometry, [rows, tile.n as usize])?;
        if !has_places(geometry) {
            return None;
        }
        Some(Self { geometry, tile, channels, layout, is_flat })
    }

    fn places(&self) -> usize {
        let [down, across] = grid_of(self.geometry);
        self.geometry.b * down * across
    }

    /// Tiles down and across a product, and the products.
    fn tiles(&self) -> [usize; 3] {
        let [down, across] = divisor(self.geometry);
        [
            self.places().div_ceil(self.tile.m as usize),
            self.channels.group_written.div_ceil(self.tile.n as usize),
            self.geometry.groups() * down * across,
        ]
    }

    /// Returns true if the tile is a candidate: all but the smallest one must be more than half
    /// full down and across.
    fn is_candidate(&self) -> bool {
        let is_smallest = self.tile == TILES[TILES.len() - 1];
        let is_filled = 2 * self.places() > self.tile.m as usize
            && 2 * self.channels.group_written > self.tile.n as usize;
        is_smallest || is_filled
    }

    /// Number of tiles of all products.
    fn workgroups(&self) -> usize {
        let [down, across, products] = self.tiles();
        down * across * products
    }
}

/// Returns the number of workgroups of a call; `None` if the tile is no candidate.
pub fn workgroups(geometry: &Geometry, tile: WorkgroupTile) -> Option<usize> {
    let tiled = Tiled::new(geometry, tile)?;
    if tiled.is_candidate() { Some(tiled.workgroups()) } else { None }
}

/// Returns the dispatches of a call: the weights, and the product.
pub fn dispatches(call: &OpCall, geometry: &Geometry, tile: WorkgroupTile) -> Vec<Dispatch> {
    let Some(tiled) = Tiled::new(geometry, tile) else { return Vec::new() };
    let Channels { read, written, group_read, group_written } = tiled.channels;
    let width = if written.is_multiple_of(4) { group_written } else { 1 };
    let output = Output::of(call, &epilogue::steps(call), width, 3);
    let vectors = read.is_multiple_of(4) && group_read.is_multiple_of(4);
    let shader = tile
        .shader("conv_shared", "conv_tile", call.precision)
        .with_const("FLAT", u32::from(tiled.is_flat))
        .with_const("EXACT", u32::from(group_read == tiled.layout.rows))
        .with_text(&operand("a", 0, vectors))
        .with_text(&output.text)
        .with_text(&store_some(output.vectors));
    let own = [Operand::Input(0), tiled.layout.workspace(), Operand::Output(0)];
    let product = Dispatch {
        shader,
        operands: [&own[..], &output.operands].concat(),
        params: params(&tiled),
        groups: dispatch::grid(tiled.workgroups(), 1),
    };
    vec![tiled.layout.dispatch(geometry), product]
}

fn params(tiled: &Tiled) -> Vec<u32> {
    let [down, across, _] = tiled.tiles();
    let kernel_step = match tiled.geometry.kind {
        ConvKind::Forward => [1; 2],
        _ => Gather::input_grad(tiled.geometry, [0; 2]).kernel_step.map(isize::unsigned_abs),
    };
    let tiles = [tiled.workgroups(), down * across, down, across, tiled.places()];
    let [read, written] = gather_params(tiled.geometry);
    let weights = [tiled.layout.rows, tiled.layout.columns];
    [words(&tiles), read, words(&kernel_step), written, words(&weights)].concat()
}
