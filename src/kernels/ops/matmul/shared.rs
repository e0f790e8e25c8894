//! Matrix products through workgroup memory: the available tiles, and the WGSL that is prepended
//! to `shaders/matmul_shared.wgsl` for each.
//!
//! With the register tiles of [`super::tile`], every invocation reads its operands from memory;
//! here a whole workgroup reads them once. A GPU with hundreds of gigabytes per second and tens
//! of TFLOP/s needs this. Software adapters, where a barrier is costly and all memory is cache,
//! run it slower than register tiles.
//!
//! The kernel is a file and not generated text: its sums are matrices of 4 x 4, so that a step of
//! 8 x 8 per invocation takes four lines and needs no driver to unroll it. Sums in arrays and
//! loops over them run at a quarter of that speed on SwiftShader and at 0.6 of it on llvmpipe;
//! sixteen named vectors, to which drivers lower the matrices, run at the same speed.

use super::sizes::{OPERANDS, Sizes};
use crate::kernels::ops::epilogue::{self, Epilogue};
use crate::kernels::{Dispatch, OpCall, Shader, dispatch};

/// Tile of the output that one workgroup computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkgroupTile {
    /// Name of the kernel variant, also used in labels.
    pub name: &'static str,
    /// Rows of the tile.
    pub m: u32,
    /// Columns of the tile.
    pub n: u32,
    /// Terms of the sum that are staged at a time.
    pub k: u32,
    /// Rows per invocation, 4 or 8.
    pub rows: u32,
    /// Columns per invocation, 4 or 8.
    pub columns: u32,
    /// Invocations that share each output; each of them sums one slice of the staged terms.
    pub split: u32,
}

/// Available tiles, the largest first.
pub const TILES: [WorkgroupTile; 5] = [
    tile("matmul_shared_128x128", [128, 128, 16], [8, 8], 1),
    tile("matmul_shared_128x64", [128, 64, 16], [8, 8], 1),
    tile("matmul_shared_64x64", [64, 64, 16], [8, 4], 1),
    tile("matmul_shared_32x32", [32, 32, 16], [4, 4], 1),
    tile("matmul_shared_32x32_split", [32, 32, 64], [4, 4], 4),
];

/// Maximum number of tiles of a product with split sums: with more, a device is busy without
/// splitting.
const SPLIT_TILES_MAX: usize = 512;
/// Minimum number of stages (`WorkgroupTile::k` terms each) of a split sum.
const SPLIT_STAGES_MIN: usize = 4;

const fn tile(
    name: &'static str,
    [m, n, k]: [u32; 3],
    each: [u32; 2],
    split: u32,
) -> WorkgroupTile {
    let [rows, columns] = each;
    WorkgroupTile { name, m, n, k, rows, columns, split }
}

/// Memory layout of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub transposed: bool,
    /// True if its rows, as stored, are multiples of four elements, so that it can be read as
    /// vectors.
    pub vectors: bool,
}

impl WorkgroupTile {
    /// Returns true if the tile is a candidate: products that fill at most half of it, down or
    /// across, leave most invocations without work.
    pub fn fits(self, sizes: &Sizes) -> bool {
        let (down, across) = self.tiles(sizes);
        let few = sizes.batch * down * across <= SPLIT_TILES_MAX;
        let long = sizes.k >= SPLIT_STAGES_MIN * self.k as usize;
        let filled = 2 * sizes.m > self.m as usize && 2 * sizes.n > self.n as usize;
        filled && (self.split == 1 || (few && long))
    }

    /// Returns the number of tiles of all products.
    pub fn count(self, sizes: &Sizes) -> usize {
        let (down, across) = self.tiles(sizes);
        sizes.batch * down * across
    }

    /// Returns the number of tiles down and across one product.
    fn tiles(self, sizes: &Sizes) -> (usize, usize) {
        (sizes.m.div_ceil(self.m as usize), sizes.n.div_ceil(self.n as usize))
    }
}

/// Returns the shader of a tile for operands with these layouts; `store` is that of [`epilogue`].
pub fn shader(tile: WorkgroupTile, a: Layout, b: Layout, store: &str) -> Shader {
    let WorkgroupTile { m, n, k, rows, columns, split, .. } = tile;
    let constants = [
        ("BM", m),
        ("BN", n),
        ("BK", k),
        ("ROWS", rows),
        ("COLUMNS", columns),
        ("SPLIT", split),
        ("TRANSPOSE_A", u32::from(a.transposed)),
        ("TRANSPOSE_B", u32::from(b.transposed)),
    ];
    let shader = Shader::new("matmul_shared", "shared_tile");
    let shader =
        constants.iter().fold(shader, |shader, (name, value)| shader.with_const(name, *value));
    let operands = [operand("a", 0, a.vectors), operand("b", 1, b.vectors)].concat();
    shader.with_text(&operands).with_text(store)
}

/// Returns the WGSL of the binding of an operand, and of the function that reads four adjacent
/// elements of it.
fn operand(name: &str, binding: usize, vectors: bool) -> String {
    let (element, body) = match vectors {
        true => ("vec4f", format!("    return {name}[at / 4u];\n")),
        false => {
            let one = |(offset, field): (usize, char)| {
                format!("    if (count > {offset}u) {{ four.{field} = {name}[at + {offset}u]; }}\n")
            };
            let rest: String = (1..4).zip("yzw".chars()).map(one).collect();
            let first = format!("    var four = vec4f({name}[at], 0.0, 0.0, 0.0);\n");
            ("f32", first + &rest + "    return four;\n")
        }
    };
    format!(
        "@group(0) @binding({binding}) var<storage, read> {name}: array<{element}>;\n\
         fn {name}_four(at: u32, count: u32) -> vec4f {{\n{body}}}\n"
    )
}

/// Returns the dispatch of a call with a tile of any size.
pub fn dispatch(call: &OpCall, sizes: &Sizes, tile: WorkgroupTile) -> Dispatch {
    let (down, across) = tile.tiles(sizes);
    let tiles = sizes.batch * down * across;
    let &Sizes { m, n, k, transpose_a, transpose_b, .. } = sizes;
    // Stored rows are contiguous, and so are the matrices of a batch: if rows are multiples of
    // four, every group of four elements starts at a multiple of four.
    let layout = |transposed, rows, columns| {
        let row: usize = if transposed { rows } else { columns };
        Layout { transposed, vectors: row.is_multiple_of(4) }
    };
    let [a, b] = [layout(transpose_a, m, k), layout(transpose_b, k, n)];
    let Epilogue { text: store, operands } = epilogue::of(call, OPERANDS.len());
    let params = [tiles, down * across, across, m, n, k, usize::from(call.accumulate)];
    Dispatch {
        shader: shader(tile, a, b, &store),
        operands: [&OPERANDS[..], &operands].concat(),
        params: params.map(|word| word as u32).to_vec(),
        groups: dispatch::grid(tiles, 1),
    }
}
