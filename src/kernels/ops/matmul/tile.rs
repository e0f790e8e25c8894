//! Generator of the WGSL of register tiles: matrix products in which each invocation computes a
//! whole tile of the output in named variables.
//!
//! The text is generated because not every driver unrolls loops over private arrays: SwiftShader
//! reaches 0.55 GFLOP/s with loops and 5 with the text unrolled. There is no workgroup memory and
//! no barrier, which software adapters run slowly; operands are read directly from storage, and a
//! tile of m x n reads m + n values for m n multiplications. Scalar loads are deliberate: loading
//! four terms of the sum at once as a vector made both software adapters 2 to 5 times slower.
//!
//! Two things keep the text right and small:
//! - A tile that would cross the lower or right edge is moved inside, and stores only the rows
//!   and columns that no other tile owns. So loads need no guard, every output has one writer,
//!   and a tile fits any matrix that is at least as large as itself.
//! - Stores are generated for one row only, in a loop that moves the sums up by a row each time.
//!   A tile of 16 x 16 compiles in 0.2 s on llvmpipe this way, and in 6 s with all guarded stores
//!   unrolled.

use std::fmt::Write;

/// Invocations per workgroup: few, so that small products still have enough workgroups to fill a
/// device.
pub(crate) const WORKGROUP: u32 = 32;

/// Tile of the output that one invocation computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterTile {
    /// Name of the kernel variant, also used in labels.
    pub name: &'static str,
    /// Rows of the tile.
    pub m: usize,
    /// Columns of the tile.
    pub n: usize,
}

/// Available tiles, the largest first.
pub const TILES: [RegisterTile; 4] = [
    RegisterTile { name: "matmul_tile_16x16", m: 16, n: 16 },
    RegisterTile { name: "matmul_tile_16x8", m: 16, n: 8 },
    RegisterTile { name: "matmul_tile_8x8", m: 8, n: 8 },
    RegisterTile { name: "matmul_tile_4x4", m: 4, n: 4 },
];

/// Tiles for products of less than [`NARROW_MAX`] rows or columns, on software adapters: about
/// twice as fast there as one invocation per output.
pub const NARROW: [RegisterTile; 2] = [
    RegisterTile { name: "matmul_tile_1x8", m: 1, n: 8 },
    RegisterTile { name: "matmul_tile_8x1", m: 8, n: 1 },
];
/// Minimum number of rows and columns for one of [`TILES`].
pub(crate) const NARROW_MAX: usize = 4;

/// Head of the WGSL of every tile. Formula and shapes as in `matmul.wgsl`.
const HEAD: &str = "\
struct Params {
    tiles: u32,             // in all matrices, of all parts of the sums
    tiles_each: u32,        // in one
    tiles_across: u32,      // in one row of tiles
    m: u32,
    n: u32,
    k: u32,
    accumulate: u32,
    batch: u32,
    terms: u32,             // of a part of the sums, but the last one: k if they are not split
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
";

/// Returns the WGSL of a tile, with the entry point `tile`, for operands that are stored
/// transposed or not. Its `Params` are in `HEAD`, `store` is the text of the
/// [`epilogue`](crate::ops::epilogue), and m and n of the product must be at least m and n of the
/// tile. The products of several parts of the sums follow one another in the output.
pub fn text(tile: RegisterTile, transpose_a: bool, transpose_b: bool, store: &str) -> String {
    // Elements to the next row of a, to the next column of b, and to the next term of the sum.
    let (a_row, a_step) = if transpose_a { ("1u", "p.m") } else { ("p.k", "1u") };
    let (b_column, b_step) = if transpose_b { ("p.k", "1u") } else { ("1u", "p.n") };
    let RegisterTile { m, n, .. } = tile;
    let sums = sums(tile);
    let products = products(tile);
    let moves = moves(tile);
    let a_loads = loads("a", m, a_row);
    let b_loads = loads("b", n, b_column);
    let stores = stores(tile);
    format!(
        "{HEAD}{store}
@compute @workgroup_size({WORKGROUP})
fn tile(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {{
    let index = invocation_of(id, groups, {WORKGROUP}u);
    if (index >= p.tiles) {{ return; }}
    let z = index / p.tiles_each;
    let within = index % p.tiles_each;
    // What this tile owns starts at (row, column), what it computes at (i, j).
    let row = within / p.tiles_across * {m}u;
    let column = within % p.tiles_across * {n}u;
    let i = min(row, p.m - {m}u);
    let j = min(column, p.n - {n}u);
    let begin = z / p.batch * p.terms;
    let end = min(begin + p.terms, p.k);
    var a_at = z % p.batch * p.m * p.k + i * {a_row} + begin * {a_step};
    var b_at = z % p.batch * p.k * p.n + j * {b_column} + begin * {b_step};
{sums}    for (var q = begin; q < end; q++) {{
{a_loads}{b_loads}{products}        a_at += {a_step};
        b_at += {b_step};
    }}
    for (var r = 0u; r < {m}u; r++) {{
        if (i + r >= row) {{
            let at = (z * p.m + i + r) * p.n + j;
{stores}        }}
{moves}    }}
}}
"
    )
}

/// Returns the declarations of all sums, e.g. `var s1_2 = 0.0;` for row 1, column 2.
pub fn sums(tile: RegisterTile) -> String {
    lines(tile.m, |i, line| (0..tile.n).try_for_each(|j| write!(line, "    var s{i}_{j} = 0.0;")))
}

/// Returns the loads of an operand, e.g. `let a1 = operand(a[a_at + 1u * stride]);`, for each of
/// `count` rows or columns.
fn loads(operand: &str, count: usize, stride: &str) -> String {
    lines(count, |i, line| {
        let offset = if stride == "1u" { format!("{i}u") } else { format!("{i}u * {stride}") };
        write!(line, "        let {operand}{i} = operand({operand}[{operand}_at + {offset}]);")
    })
}

/// Returns the multiply-adds of all sums, e.g. `s1_2 += a1 * b2;`.
pub fn products(tile: RegisterTile) -> String {
    lines(tile.m, |i, line| {
        (0..tile.n).try_for_each(|j| write!(line, "        s{i}_{j} += a{i} * b{j};"))
    })
}

/// Stores of the first row of sums, except for columns that another tile owns.
fn stores(tile: RegisterTile) -> String {
    lines(tile.n, |j, line| {
        write!(line, "            if (j + {j}u >= column) {{ store(at + {j}u, s0_{j}); }}")
    })
}

/// Returns the moves of sums up by a row, e.g. `s0_2 = s1_2;`, for all rows but the last.
pub fn moves(tile: RegisterTile) -> String {
    lines(tile.m - 1, |i, line| {
        (0..tile.n).try_for_each(|j| write!(line, "        s{i}_{j} = s{}_{j};", i + 1))
    })
}

/// Returns a line of text for each index below `count`.
pub fn lines(
    count: usize,
    mut each: impl FnMut(usize, &mut String) -> Result<(), std::fmt::Error>,
) -> String {
    let mut text = String::new();
    for index in 0..count {
        each(index, &mut text).expect("writing to a string never fails");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_depends_on_transposes_and_size_and_is_of_bounded_length() {
        for tile in TILES.into_iter().chain(NARROW) {
            let mut texts: Vec<String> =
                [(false, false), (false, true), (true, false), (true, true)]
                    .map(|(a, b)| text(tile, a, b, ""))
                    .to_vec();
            assert!(texts.iter().all(|text| text.len() < 40_000), "{}", tile.name);
            texts.dedup();
            assert_eq!(texts.len(), 4);
            assert_eq!(texts[0].matches(" += a").count(), tile.m * tile.n);
        }
    }
}
