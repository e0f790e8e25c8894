//! Matrix products through workgroup memory: which tiles there are, and what is put in front of
//! `shaders/matmul_shared.wgsl` for each.
//!
//! Where the register tiles of [`super::tile`] read every operand from memory once per
//! invocation, here a whole workgroup reads it once: that is what a GPU with hundreds of
//! gigabytes per second and tens of TFLOP/s needs, and what software adapters, where a barrier
//! is costly and all memory is cache, run slower than register tiles.
//!
//! The kernel is a file and not emitted text: its sums are matrices of 4 x 4, so that a step of
//! 8 x 8 per invocation stands there in four lines and needs no driver to unroll it. Sums in
//! arrays and loops over them run at a quarter of that speed on SwiftShader and at 0.6 of it on
//! llvmpipe; sixteen named vectors, which is what drivers make of the matrices, at the same speed.

use super::sizes::{OPERANDS, Sizes};
use crate::kernels::ops::epilogue::{self, Epilogue};
use crate::kernels::{Dispatch, OpCall, Shader, dispatch};

/// The part of the output that a workgroup computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// For people: in labels and lists of variants.
    pub name: &'static str,
    /// Rows.
    pub m: u32,
    /// Columns.
    pub n: u32,
    /// Terms of the sum that are staged at a time.
    pub k: u32,
    /// Rows of an invocation, 4 or 8.
    pub rows: u32,
    /// Columns of an invocation, 4 or 8.
    pub columns: u32,
    /// Invocations that share each output, slice by slice of the terms.
    pub split: u32,
}

/// The tiles that calls choose among, the largest first.
pub const TILES: [Tile; 5] = [
    tile("matmul_shared_128x128", [128, 128, 16], [8, 8], 1),
    tile("matmul_shared_128x64", [128, 64, 16], [8, 8], 1),
    tile("matmul_shared_64x64", [64, 64, 16], [8, 4], 1),
    tile("matmul_shared_32x32", [32, 32, 16], [4, 4], 1),
    tile("matmul_shared_32x32_split", [32, 32, 64], [4, 4], 4),
];

/// The most tiles in a product whose sums are split: with more, a device is busy without.
const SPLIT_TILES_MAX: usize = 512;
/// The least terms for each time that a split sum is staged.
const SPLIT_STAGES_MIN: usize = 4;

const fn tile(name: &'static str, [m, n, k]: [u32; 3], each: [u32; 2], split: u32) -> Tile {
    let [rows, columns] = each;
    Tile { name, m, n, k, rows, columns, split }
}

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub transposed: bool,
    /// Whether its rows, as stored, are multiples of four elements, so that it can be read as
    /// vectors.
    pub vectors: bool,
}

impl Tile {
    /// Whether the tile is worth a try: products that fill less than half of one leave most
    /// invocations without work.
    pub fn fits(self, sizes: &Sizes) -> bool {
        let (down, across) = self.tiles(sizes);
        let few = sizes.batch * down * across <= SPLIT_TILES_MAX;
        let long = sizes.k >= SPLIT_STAGES_MIN * self.k as usize;
        let filled = 2 * sizes.m > self.m as usize && 2 * sizes.n > self.n as usize;
        filled && (self.split == 1 || (few && long))
    }

    /// Tiles down and across one product.
    fn tiles(self, sizes: &Sizes) -> (usize, usize) {
        (sizes.m.div_ceil(self.m as usize), sizes.n.div_ceil(self.n as usize))
    }
}

/// The shader of a tile for operands that lie so; `store` is that of
/// [`epilogue`].
pub fn shader(tile: Tile, a: Layout, b: Layout, store: &str) -> Shader {
    let Tile { m, n, k, rows, columns, split, .. } = tile;
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

/// The binding of an operand, and how four of its neighbouring elements are read.
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

/// How a call runs with a tile, of any size.
pub fn dispatch(call: &OpCall, sizes: &Sizes, tile: Tile) -> Dispatch {
    let (down, across) = tile.tiles(sizes);
    let tiles = sizes.batch * down * across;
    let &Sizes { m, n, k, transpose_a, transpose_b, .. } = sizes;
    // A stored row ends where the next begins, and matrices of a batch lie one behind the other:
    // with rows of multiples of four, every four elements start at a multiple of four.
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
