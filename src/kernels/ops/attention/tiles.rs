//! Attention by tiles in workgroup memory: the available tiles, and the constants that are
//! prepended to `shaders/attention_tiles.wgsl` for each.
//!
//! The plain kernel keeps its operands in registers, which suits processors and spills on GPUs;
//! each of its invocations reads all operands from memory. Here a workgroup reads them once, and an
//! invocation keeps 16 to 32 sums of each result. Software adapters, where a barrier is costly and
//! all memory is cache, run it slower, so it is no candidate there.

use super::AttentionSizes;
use super::shaders::{AttentionKernel, kernels};
use crate::dispatch::grid;
use crate::{Caps, Dispatch, OpCall};

/// Size of the workgroups of attention by tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionTile {
    /// Name of the kernel variant: the number of queries of a workgroup.
    pub name: &'static str,
    /// Invocations of a workgroup.
    pub invocations: u32,
    /// The most bytes of workgroup memory that an entry point needs, for heads of any width.
    pub workgroup_bytes: u32,
}

/// Available tiles, the smallest first, which fits every call. Small ones give short sequences
/// more workgroups, large ones read less.
pub const TILES: [AttentionTile; 3] = [
    tile("attention_tiles_32", 64, 8_192),
    tile("attention_tiles_64", 128, 16_384),
    tile("attention_tiles_128", 256, 27_136),
];

const fn tile(name: &'static str, invocations: u32, workgroup_bytes: u32) -> AttentionTile {
    AttentionTile { name, invocations, workgroup_bytes }
}

/// Workgroups that keep a large GPU busy.
const WORKGROUPS_MIN: usize = 64;

/// Invocations of a workgroup and the columns of its sums, the constants of the shader.
struct TileArrangement {
    /// Invocations across, which share own rows.
    x: u32,
    /// Invocations down, with four own rows each.
    y: u32,
    /// Vectors of 4 columns for which an invocation has sums.
    quads: u32,
}

impl AttentionTile {
    /// Returns true if the tile is a candidate on a device with these capabilities: on a GPU, if
    /// its memory suffices, and if the call has at least half as many queries as the tile.
    pub(super) fn fits(self, sizes: &AttentionSizes, caps: &Caps) -> bool {
        let queries = self.arrangement("forward", sizes.d).rows();
        let is_filled = self == TILES[0] || 2 * sizes.t >= queries;
        let has_room = self.workgroup_bytes <= caps.workgroup_bytes;
        caps.wants_gpu_variants() && has_room && is_filled
    }

    /// Returns the arrangement for an entry point and heads of `d` columns. For more than 32
    /// columns, an entry point with two results has fewer columns of each per invocation, which
    /// would otherwise need too many registers.
    fn arrangement(self, entry: &str, d: usize) -> TileArrangement {
        let (x, quads) = match (entry, d) {
            (_, ..=32) => (8, 1),
            ("grad_kv", _) => (16, 1),
            _ => (8, 2),
        };
        TileArrangement { x, y: self.invocations / x, quads }
    }
}

impl TileArrangement {
    /// The own rows of a workgroup.
    fn rows(&self) -> usize {
        4 * self.y as usize
    }

    /// Number of workgroups for this number of heads of each sample.
    fn workgroups(&self, sizes: &AttentionSizes, heads: usize) -> usize {
        let columns = (4 * self.x * self.quads) as usize;
        let blocks = sizes.t.div_ceil(self.rows()) * sizes.d.div_ceil(columns);
        sizes.b * heads * blocks
    }
}

/// Returns the tile that is chosen without measuring: the largest portable one with a workgroup for
/// each core of a large GPU, or else the smallest; `None` if none is a candidate.
pub(super) fn chosen(sizes: &AttentionSizes, caps: &Caps) -> Option<AttentionTile> {
    let [small, medium, _] = TILES;
    for tile in [medium, small] {
        let workgroups = tile.arrangement("forward", sizes.d).workgroups(sizes, sizes.heads);
        if tile.fits(sizes, caps) && workgroups >= WORKGROUPS_MIN {
            return Some(tile);
        }
    }
    if small.fits(sizes, caps) { Some(small) } else { None }
}

/// Dispatches of a call with a tile of any size.
pub(super) fn dispatches(
    call: &OpCall,
    sizes: &AttentionSizes,
    tile: AttentionTile,
) -> Vec<Dispatch> {
    kernels(call, sizes).into_iter().map(|kernel| dispatch(sizes, tile, kernel)).collect()
}

pub(super) fn dispatch(
    sizes: &AttentionSizes,
    tile: AttentionTile,
    kernel: AttentionKernel,
) -> Dispatch {
    let arrangement = tile.arrangement(kernel.entry, sizes.d);
    let TileArrangement { x, y, quads } = arrangement;
    Dispatch {
        shader: kernel
            .shader("attention_tiles", sizes)
            .with_const("X", x)
            .with_const("Y", y)
            .with_const("QUADS", quads),
        params: sizes.params(),
        groups: grid(arrangement.workgroups(sizes, kernel.heads(sizes)), 1),
        operands: kernel.operands(),
    }
}
