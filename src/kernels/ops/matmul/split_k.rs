//! Matrix products whose sums are split between workgroups: each computes a part of the terms of
//! its tile, and a second dispatch adds the parts in order and applies the epilogue. Twin of
//! `shaders/matmul_split_k.wgsl` behind `shaders/matmul_shared.wgsl` or a register tile.
//!
//! It is meant for GPUs and for long sums of few outputs: the gradient of a weight of (768, 768)
//! has 36 tiles of 128x128, fewer than a large GPU has cores. The parts cost 8 more bytes of
//! memory traffic per output and part.
//!
//! On adapters that run on a processor, register tiles are split for another reason: all tiles of a
//! part read the same rows of the second operand, which then stay in the processor's cache.

use super::shared::{self, Output, WorkgroupTile, put_row_sums};
use super::sizes::{OPERANDS, Sizes};
use super::tile::{RegisterTile, TILES, WORKGROUP};
use super::tiled_in_parts;
use crate::dispatch::{WORKSPACE_VALUES_MAX, grid};
use crate::ops::epilogue;
use crate::{Caps, Dispatch, OpCall, Operand, Shader};
use potluck_graph::Accumulation;

/// Numbers of workgroups that fill a large device, each with the fewest terms per part that it is
/// used for: about two per core, and about four, with which the last round of workgroups leaves
/// fewer cores idle.
const FILLS: [(usize, usize); 2] = [(256, 512), (512, 1024)];

/// The fewest terms of a sum that is split on a GPU: two parts.
pub(crate) const SPLIT_TERMS_MIN: usize = 2 * FILLS[0].1;

/// Invocations per workgroup that add parts.
const SIZE: u32 = 64;

/// Terms of a part on a processor, whose rows stay in its cache. Parts of 1,024 are 2.9 times as
/// fast as whole sums on llvmpipe and 2.1 times on SwiftShader for 49,152 terms, 1.1 times for
/// 4,096, and faster than parts of 256.
const CACHED_TERMS: usize = 1024;
/// The fewest terms of a sum that is split on a processor.
pub(crate) const CACHED_TERMS_MIN: usize = 2 * CACHED_TERMS;

/// Name of the kernel variant that splits the sums of the largest register tile.
pub(crate) const OF_REGISTERS: &str = "matmul_tile_16x16_split_k";

/// Names of the variants that split the sums of a tile in workgroup memory, each with the name of
/// the tile.
pub const SPLIT_TILES: [(&str, &str); 5] = [
    ("matmul_coop_large_deep_split_k", "matmul_coop_large_deep"),
    ("matmul_coop_large_split_k", "matmul_coop_large"),
    ("matmul_shared_128x128_split_k", "matmul_shared_128x128"),
    ("matmul_shared_128x128_by_terms_split_k", "matmul_shared_128x128_by_terms"),
    ("matmul_shared_64x64_split_k", "matmul_shared_64x64"),
];

/// A tile whose sums are split.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitK {
    /// Name of the kernel variant.
    pub name: &'static str,
    tile: Tile,
    count: usize,
    /// Parts for which there is workspace: with fewer terms there are never more than these.
    count_max: usize,
    /// Terms of each part but the last one; whole stages of a tile in workgroup memory.
    terms: usize,
}

#[derive(Clone, Copy, Debug)]
enum Tile {
    Workgroup(WorkgroupTile),
    Register(RegisterTile),
}

impl SplitK {
    /// Returns the split of the largest register tile; `None` if the product is smaller than the
    /// tile, or if the sums are too short.
    pub fn of_registers(sizes: &Sizes) -> Option<Self> {
        let [tile, ..] = TILES;
        let values = sizes.batch * sizes.m * sizes.n;
        let most = WORKSPACE_VALUES_MAX / values.max(1);
        if !sizes.fits(tile) || sizes.k < CACHED_TERMS_MIN || most < 2 {
            return None;
        }
        let terms = CACHED_TERMS.max(sizes.k.div_ceil(most));
        let name = OF_REGISTERS;
        let count = sizes.k.div_ceil(terms);
        let count_max = sizes.k.div_ceil(CACHED_TERMS).min(most);
        Some(Self { name, tile: Tile::Register(tile), count, count_max, terms })
    }

    /// Returns the splits of some tiles that are candidates for these sizes, the largest tile
    /// first.
    pub fn of(sizes: &Sizes, tiles: &[WorkgroupTile]) -> Vec<Self> {
        let mut splits = Vec::new();
        for (name, tile_name) in SPLIT_TILES {
            if let Some(tile) = tiles.iter().find(|tile| tile.name == tile_name) {
                splits.extend(Self::with_tile(name, *tile, sizes));
            }
        }
        splits
    }

    /// Returns the split of a tile; `None` if the product is smaller than the tile, if the tiles
    /// fill a device without splits, or if the sums are too short.
    fn with_tile(name: &'static str, tile: WorkgroupTile, sizes: &Sizes) -> Option<Self> {
        let is_whole = sizes.m >= tile.m as usize && sizes.n >= tile.n as usize;
        let tiles = tile.count(sizes).max(1);
        let values = sizes.values();
        let filling = FILLS.map(|(workgroups, terms)| (workgroups / tiles).min(sizes.k / terms));
        let most = WORKSPACE_VALUES_MAX / values.max(1);
        let count_max = filling[0].max(filling[1]).min(most);
        if !is_whole || count_max < 2 {
            return None;
        }
        let terms = sizes.k.div_ceil(count_max).next_multiple_of(tile.k as usize);
        let count = sizes.k.div_ceil(terms);
        Some(Self { name, tile: Tile::Workgroup(tile), count, count_max, terms })
    }

    /// Returns true if a device has enough registers for the tile.
    pub fn suits(&self, caps: &Caps) -> bool {
        match self.tile {
            Tile::Workgroup(tile) => tile.suits(caps),
            Tile::Register(_) => true,
        }
    }

    /// Returns the number of workgroups that compute parts.
    pub fn workgroups(&self, sizes: &Sizes) -> usize {
        let tiles = match self.tile {
            Tile::Workgroup(tile) => tile.count(sizes),
            Tile::Register(tile) => sizes.tile_count(tile).div_ceil(WORKGROUP as usize),
        };
        self.count * tiles
    }

    /// Returns true if the parts also have the sums over rows of a call.
    fn has_row_sums(&self, sizes: &Sizes) -> bool {
        sizes.row_sums && matches!(self.tile, Tile::Workgroup(_))
    }

    /// Returns the dispatches of a call: the parts, and their sums.
    pub fn dispatches(&self, call: &OpCall, sizes: &Sizes) -> Vec<Dispatch> {
        let values = sizes.batch * sizes.m * sizes.n;
        let row_sums = if self.has_row_sums(sizes) { sizes.m } else { 0 };
        let partials = Operand::workspace(self.count_max * (values + row_sums));
        let parts = [self.count, self.terms];
        let first = match self.tile {
            Tile::Workgroup(tile) => shared::dispatch_split_k(call, sizes, tile, parts, partials),
            Tile::Register(tile) => {
                let plain = OpCall {
                    op: call.op.root_op(),
                    accumulate: Accumulation::NONE,
                    ..call.clone()
                };
                let [a, b, _] = OPERANDS;
                let operands = vec![a, b, partials];
                Dispatch { operands, ..tiled_in_parts(&plain, *sizes, tile, parts) }
            }
        };
        let output = Output::of(call, &epilogue::steps(call), sizes.n, 2);
        let (value, store, lanes) =
            if output.vectors { ("vec4f", "store4", 4) } else { ("f32", "store", 1) };
        let put = format!("fn put(at: u32, total: Value) {{ {store}(at, total); }}\n");
        let put_sums = if row_sums > 0 {
            put_row_sums(Some((2, call.accumulates())))
                + "fn put_sum(at: u32, total: Value) { put_row_sums(4u * at, total); }\n"
        } else {
            "fn put_sum(at: u32, total: Value) {}\n".into()
        };
        let sums: &[Operand] = if row_sums > 0 { &[Operand::Output(1)] } else { &[] };
        let count = values / lanes;
        let row_sums = row_sums / lanes;
        let second = Dispatch {
            shader: Shader::new("matmul_split_k", "add_partials")
                .with_text(&format!("alias Value = {value};\n"))
                .with_text(&output.text)
                .with_text(&put)
                .with_text(&put_sums),
            operands: [&[partials, Operand::Output(0)][..], &output.operands, sums].concat(),
            params: vec![count as u32, self.count as u32, row_sums as u32],
            groups: grid(count + row_sums, SIZE),
        };
        vec![first, second]
    }
}
