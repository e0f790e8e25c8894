//! Matrix products whose sums are split between workgroups: each computes a part of the terms of
//! its tile, and a second dispatch adds the parts in order and applies the epilogue. Twin of
//! `shaders/matmul_split_k.wgsl` behind `shaders/matmul_shared.wgsl`.
//!
//! It is meant for GPUs and for long sums of few outputs: the gradient of a weight of (768, 768)
//! has 36 tiles of 128x128, fewer than a large GPU has cores. The parts cost 8 bytes per output
//! and part on top.

use super::shared::{self, Output, WorkgroupTile};
use super::sizes::Sizes;
use crate::dispatch::{WORKSPACE_VALUES_MAX, grid};
use crate::ops::epilogue;
use crate::{Dispatch, OpCall, Operand, Shader};

/// Workgroups that fill a large device, each with the fewest terms of a part for so many: about two
/// per core, and about four, with which the last round of workgroups leaves fewer cores idle.
const FILLS: [(usize, usize); 2] = [(256, 512), (512, 1024)];

/// Invocations per workgroup that add parts.
const SIZE: u32 = 64;

/// A tile in workgroup memory, and how its sums are split.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitK {
    /// Name of the kernel variant.
    pub name: &'static str,
    tile: WorkgroupTile,
    count: usize,
    /// Terms of each part but the last one: whole stages of the tile.
    terms: usize,
}

impl SplitK {
    /// Returns the splits that are candidates for these sizes, that of the largest tile first.
    pub fn of(sizes: &Sizes) -> impl Iterator<Item = Self> {
        let named = [
            ("matmul_shared_128x128_split_k", "matmul_shared_128x128"),
            ("matmul_shared_64x64_split_k", "matmul_shared_64x64"),
        ];
        named.into_iter().filter_map(|(name, tile)| {
            let tile = shared::TILES.into_iter().find(|known| known.name == tile)?;
            Self::with_tile(name, tile, sizes)
        })
    }

    /// Returns the split of a tile; `None` if there is less than a tile, if the tiles fill a device
    /// as they are, or if the sums are too short.
    fn with_tile(name: &'static str, tile: WorkgroupTile, sizes: &Sizes) -> Option<Self> {
        let is_whole = sizes.m >= tile.m as usize && sizes.n >= tile.n as usize;
        let tiles = tile.count(sizes).max(1);
        let values = sizes.batch * sizes.m * sizes.n;
        let filling = FILLS.map(|(workgroups, terms)| (workgroups / tiles).min(sizes.k / terms));
        let most = WORKSPACE_VALUES_MAX / values.max(1);
        let parts = filling[0].max(filling[1]).min(most);
        if !is_whole || parts < 2 {
            return None;
        }
        let terms = sizes.k.div_ceil(parts).next_multiple_of(tile.k as usize);
        Some(Self { name, tile, count: sizes.k.div_ceil(terms), terms })
    }

    /// Returns the number of workgroups that compute parts.
    pub fn workgroups(&self, sizes: &Sizes) -> usize {
        self.count * self.tile.count(sizes)
    }

    /// Returns the dispatches of a call: the parts, and their sums.
    pub fn dispatches(&self, call: &OpCall, sizes: &Sizes) -> Vec<Dispatch> {
        let values = sizes.batch * sizes.m * sizes.n;
        let partials = Operand::workspace(self.count * values);
        let parts = [self.count, self.terms];
        let first = shared::dispatch_split_k(call, sizes, self.tile, parts, partials);
        let output = Output::of(call, &epilogue::steps(call), sizes.n, 2);
        let (value, store, lanes) =
            if output.vectors { ("vec4f", "store4", 4) } else { ("f32", "store", 1) };
        let put = format!("fn put(at: u32, total: Value) {{ {store}(at, total); }}\n");
        let count = values / lanes;
        let second = Dispatch {
            shader: Shader::new("matmul_split_k", "add_partials")
                .with_text(&format!("alias Value = {value};\n"))
                .with_text(&output.text)
                .with_text(&put),
            operands: [&[partials, Operand::Output(0)][..], &output.operands].concat(),
            params: vec![count as u32, self.count as u32],
            groups: grid(count, SIZE),
        };
        vec![first, second]
    }
}
