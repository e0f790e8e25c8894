//! Generator of the WGSL of register tiles of convolutions, for software adapters: products as in
//! [`crate::ops::matmul::tile`], with operands gathered from pictures. An invocation computes a
//! tile in named variables and reads its operands directly.
//!
//! In the forward pass and the gradient by the input, a row of a tile is a place of the result and
//! a column one of its channels. The loops over taps are outside: a row then has one test and one
//! address per tap, and the innermost loop reads neighbouring channels. In the gradient by the
//! input, places with the same remainder by the stride have tiles of their own, because all of them
//! read the same taps.
//!
//! In the gradient by the weight, a row is an output channel and a column a tap and input channel;
//! the sum over places is in parts, which `shaders/conv_parts.wgsl` adds.

use std::fmt::Write;

use super::channels::Channels;
use super::geometry::{ConvKind, Gather, Geometry};
use super::parts::{self, PartLayout};
use super::weights::WeightLayout;
use super::words;
use crate::dispatch::{ITERATIONS_MAX, WORKSPACE_VALUES_MAX, grid};
use crate::ops::epilogue::{self, Epilogue};
use crate::ops::matmul::tile::{RegisterTile, WORKGROUP, lines, moves, products, sums};
use crate::{Dispatch, OpCall, Operand, Shader};

/// Available tiles, the fastest first. Few channels have tiles of their own, because there the
/// tests and addresses of a tile's rows cost as much as its products.
pub const TILES: [RegisterTile; 7] = [
    RegisterTile { name: "conv_tile_16x16", m: 16, n: 16 },
    RegisterTile { name: "conv_tile_16x8", m: 16, n: 8 },
    RegisterTile { name: "conv_tile_16x6", m: 16, n: 6 },
    RegisterTile { name: "conv_tile_6x16", m: 6, n: 16 },
    RegisterTile { name: "conv_tile_8x8", m: 8, n: 8 },
    RegisterTile { name: "conv_tile_4x4", m: 4, n: 4 },
    RegisterTile { name: "conv_tile_8x1", m: 8, n: 1 },
];

/// Invocations that keep a software adapter busy.
const INVOCATIONS: usize = 128;

/// Sizes of a product in tiles.
struct Sizes2d {
    /// Rows and columns of a product.
    m: usize,
    n: usize,
    /// Number of products: groups, times remainders.
    count: usize,
}

impl Sizes2d {
    fn of(geometry: &Geometry) -> Self {
        let channels = Channels::of(geometry);
        match geometry.kind {
            ConvKind::WeightGrad => Self {
                m: geometry.group_o(),
                n: geometry.taps() * geometry.group_c(),
                count: geometry.groups(),
            },
            ConvKind::Forward | ConvKind::InputGrad => {
                let [down, across] = grid_of(geometry);
                let remainders = divisor(geometry);
                Self {
                    m: geometry.b * down * across,
                    n: channels.group_written,
                    count: geometry.groups() * remainders[0] * remainders[1],
                }
            }
        }
    }

    /// Number of tiles of a product, and of tiles in a row of them.
    fn tiles(&self, tile: RegisterTile) -> [usize; 2] {
        let across = self.n.div_ceil(tile.n);
        [self.m.div_ceil(tile.m) * across, across]
    }
}

/// Stride whose remainders have separate products: the convolution's in the gradient by the input,
/// or else 1.
pub fn divisor(geometry: &Geometry) -> [usize; 2] {
    match geometry.kind {
        ConvKind::InputGrad => geometry.options.stride,
        ConvKind::Forward | ConvKind::WeightGrad => [1; 2],
    }
}

/// Rows and columns of places of the largest product of a picture.
pub(crate) fn grid_of(geometry: &Geometry) -> [usize; 2] {
    match geometry.kind {
        ConvKind::InputGrad => Gather::input_grad(geometry, [0; 2]).grid,
        ConvKind::Forward | ConvKind::WeightGrad => geometry.out,
    }
}

/// Returns true if the call is at least as large as the tile, and if its weights fit the workspace.
pub fn fits(geometry: &Geometry, tile: RegisterTile) -> bool {
    let sizes = Sizes2d::of(geometry);
    let has_room = match geometry.kind {
        ConvKind::WeightGrad => geometry.weights() <= WORKSPACE_VALUES_MAX,
        _ => WeightLayout::new(geometry, [1, 1]).is_some(),
    };
    sizes.m >= tile.m && sizes.n >= tile.n && has_places(geometry) && has_room
}

/// Returns true if every remainder has places: false for a stride beyond the picture.
pub(crate) fn has_places(geometry: &Geometry) -> bool {
    let [down, across] = divisor(geometry);
    down <= geometry.size[0] && across <= geometry.size[1]
}

/// Returns true if there are enough invocations to keep a software adapter busy.
pub fn is_busy(geometry: &Geometry, tile: RegisterTile) -> bool {
    let sizes = Sizes2d::of(geometry);
    let parts = if geometry.kind == ConvKind::WeightGrad { part_count(geometry, tile) } else { 1 };
    sizes.tiles(tile)[0] * sizes.count * parts >= INVOCATIONS
}

/// Returns the dispatches of a call.
pub fn dispatches(call: &OpCall, geometry: &Geometry, tile: RegisterTile) -> Vec<Dispatch> {
    match geometry.kind {
        ConvKind::WeightGrad => weight_grad(call, geometry, tile),
        ConvKind::Forward | ConvKind::InputGrad => gathered(call, geometry, tile),
    }
}

/// Head of the WGSL of the forward pass and the gradient by the input.
const GATHERED_HEAD: &str = "\
struct Params {
    tiles: u32,             // in all products
    tiles_each: u32,        // in one
    tiles_across: u32,      // in one row of tiles
    m: u32,                 // places of a product
    down: u32, across: u32, // rows and columns of them
    step_y: u32, step_x: u32,   // places that are read, from a row or column to the next
    h: u32, w: u32, c: u32,     // pictures that are read
    group_c: u32,
    kh: u32, kw: u32,
    // Tap k reads (remainder + first + k tap) / divisor, if that is whole.
    divisor_y: u32, divisor_x: u32,
    first_y: i32, first_x: i32,
    tap_y: i32, tap_x: i32,
    oh: u32, ow: u32, o: u32,   // pictures that are written
    group_o: u32,
    groups: u32,
    accumulate: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> a: array<f32>;         // (b, h, w, c)
@group(0) @binding(1) var<storage, read_write> b: array<f32>;   // (groups, kh, kw, q, o)
@group(0) @binding(2) var<storage, read_write> c: array<f32>;   // (b, oh, ow, o)
";

fn gathered(call: &OpCall, geometry: &Geometry, tile: RegisterTile) -> Vec<Dispatch> {
    let Some(layout) = WeightLayout::new(geometry, [1, 1]) else { return Vec::new() };
    let Epilogue { text: store, operands } = epilogue::of(call, 3);
    let own = [Operand::Input(0), layout.workspace(), Operand::Output(0)];
    let sizes = Sizes2d::of(geometry);
    let [each, across] = sizes.tiles(tile);
    let [read, written] = gather_params(geometry);
    let tiles = words(&[each * sizes.count, each, across, sizes.m]);
    // Nothing is added to the contents of the output.
    let accumulate = vec![0];
    let product = Dispatch {
        shader: Shader::emitted(tile.name, "tile", gathered_text(tile, &store))
            .with_operands(call.precision),
        operands: [&own[..], &operands].concat(),
        params: [tiles, read, written, accumulate].concat(),
        groups: grid(each * sizes.count, WORKGROUP),
    };
    vec![layout.dispatch(geometry), product]
}

/// Returns the parameters of a gathered product: of the places that it reads, from their rows and
/// columns to the distance of taps, and of the pictures that it writes, with the groups.
pub(crate) fn gather_params(geometry: &Geometry) -> [Vec<u32>; 2] {
    let Channels { read, written, group_read, group_written } = Channels::of(geometry);
    let Geometry { size, out, kernel: [kh, kw], options, .. } = *geometry;
    let [down, across] = grid_of(geometry);
    let [divisor_y, divisor_x] = divisor(geometry);
    let is_forward = geometry.kind == ConvKind::Forward;
    let ([h, w], [oh, ow]) = if is_forward { (size, out) } else { (out, size) };
    let [step_y, step_x] = if is_forward { options.stride } else { [1; 2] };
    // The gradient reads against the order of the taps.
    let sign = if is_forward { 1 } else { -1 };
    let first = options.padding.map(|padding| -sign * padding as i32);
    let tap = options.dilation.map(|dilation| sign * dilation as i32);
    let mut reads = words(&[
        down, across, step_y, step_x, h, w, read, group_read, kh, kw, divisor_y, divisor_x,
    ]);
    reads.extend(first.map(|word| word as u32));
    reads.extend(tap.map(|word| word as u32));
    [reads, words(&[oh, ow, written, group_written, geometry.groups()])]
}

/// Returns the WGSL of a tile, with the entry point `tile`. There must be at least as many places
/// and channels of a group as the tile has rows and columns.
fn gathered_text(tile: RegisterTile, store: &str) -> String {
    let RegisterTile { m, n, .. } = tile;
    let rows = lines(m, |i, line| {
        write!(line, "    let place{i} = i + {i}u;")?;
        write!(line, "let y{i} = place{i} / p.across % p.down * p.step_y; ")?;
        write!(line, "let x{i} = place{i} % p.across * p.step_x; ")?;
        write!(line, "let picture{i} = place{i} / (p.across * p.down) * p.h;")
    });
    let rows_of_taps = lines(m, |i, line| {
        write!(line, "        let is{i} = y{i} + y < p.h; ")?;
        write!(line, "let row{i} = ((picture{i} + y{i} + y) * p.w + x{i}) * p.c + first;")
    });
    let addresses = lines(m, |i, line| {
        write!(line, "            let ok{i} = is{i} && x{i} + x < p.w; ")?;
        write!(line, "let at{i} = select(first, row{i} + x_at, ok{i});")
    });
    let loads = lines(m, |i, line| {
        write!(line, "                let a{i} = operand(select(0.0, a[at{i} + q], ok{i}));")
    }) + &lines(n, |j, line| {
        write!(line, "                let b{j} = operand(b[b_at + {j}u]);")
    });
    let stores = lines(n, |j, line| {
        write!(line, "            if (j + {j}u >= column) {{ store(at + {j}u, s0_{j}); }}")
    });
    let sums = sums(tile);
    let products = products(tile);
    let moves = moves(tile);
    format!(
        "{GATHERED_HEAD}{store}
@compute @workgroup_size({WORKGROUP})
fn tile(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {{
    let index = invocation_of(id, groups, {WORKGROUP}u);
    if (index >= p.tiles) {{ return; }}
    let product = index / p.tiles_each;
    let within = index % p.tiles_each;
    let group = product % p.groups;
    let remainder = product / p.groups;
    let remainder_y = remainder / p.divisor_x;
    let remainder_x = remainder % p.divisor_x;
    // What this tile owns starts at (row, column), what it computes at (i, j).
    let row = within / p.tiles_across * {m}u;
    let column = within % p.tiles_across * {n}u;
    let i = min(row, p.m - {m}u);
    let j = min(column, p.group_o - {n}u);
    let first = group * p.group_c;
{rows}{sums}    for (var ky = 0u; ky < p.kh; ky++) {{
        let down = i32(remainder_y) + p.first_y + i32(ky) * p.tap_y;
        if (down % i32(p.divisor_y) != 0) {{ continue; }}
        let y = u32(down / i32(p.divisor_y));
{rows_of_taps}        for (var kx = 0u; kx < p.kw; kx++) {{
            let across = i32(remainder_x) + p.first_x + i32(kx) * p.tap_x;
            if (across % i32(p.divisor_x) != 0) {{ continue; }}
            let x = u32(across / i32(p.divisor_x));
            let x_at = x * p.c;
{addresses}            var b_at = ((group * p.kh + ky) * p.kw + kx) * p.group_c * p.group_o + j;
            for (var q = 0u; q < p.group_c; q++) {{
{loads}{products}                b_at += p.group_o;
            }}
        }}
    }}
    for (var r = 0u; r < {m}u; r++) {{
        let place = i + r;
        let y = place / p.across % p.down * p.divisor_y + remainder_y;
        let x = place % p.across * p.divisor_x + remainder_x;
        if (place >= row && y < p.oh && x < p.ow) {{
            let picture = place / (p.across * p.down);
            let at = ((picture * p.oh + y) * p.ow + x) * p.o + group * p.group_o + j;
{stores}        }}
{moves}    }}
}}
"
    )
}

/// Head of the WGSL of the gradient by the weight.
const WEIGHT_HEAD: &str = "\
struct Params {
    tiles: u32,             // in all products and parts
    tiles_each: u32,        // in one
    tiles_across: u32,      // in one row of tiles
    groups: u32,
    terms: u32,             // taps and input channels of a group
    lines: u32,             // rows of outputs
    part: u32,              // .. of a part
    h: u32, w: u32, c: u32,
    oh: u32, ow: u32, o: u32,
    kw: u32,
    sh: u32, sw: u32,       // stride
    ph: u32, pw: u32,       // padding
    dh: u32, dw: u32,       // dilation
    group_c: u32, group_o: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;         // (b, h, w, c)
@group(0) @binding(1) var<storage, read> dy: array<f32>;        // (b, oh, ow, o)
@group(0) @binding(2) var<storage, read_write> c: array<f32>;   // (parts, o, terms)
";

/// Returns the number of parts of the sums: enough to keep a software adapter busy, and for at most
/// [`ITERATIONS_MAX`] iterations of each.
fn part_count(geometry: &Geometry, tile: RegisterTile) -> usize {
    let sizes = Sizes2d::of(geometry);
    let rows = geometry.b * geometry.out[0];
    let wanted = (2 * INVOCATIONS).div_ceil(sizes.tiles(tile)[0] * sizes.count);
    let least = (rows * (geometry.out[1] + 1)).div_ceil(ITERATIONS_MAX / 2);
    let most = WORKSPACE_VALUES_MAX / geometry.weights();
    wanted.max(least).min(rows).min(most).max(1)
}

fn weight_grad(call: &OpCall, geometry: &Geometry, tile: RegisterTile) -> Vec<Dispatch> {
    let Geometry { size: [h, w], c, out: [oh, ow], o, kernel, options, .. } = *geometry;
    let sizes = Sizes2d::of(geometry);
    let rows = geometry.b * oh;
    let parts_max = part_count(geometry, tile);
    let part = rows.div_ceil(parts_max);
    let parts = rows.div_ceil(part);
    let [each, across] = sizes.tiles(tile);
    let tiles = each * sizes.count * parts;
    // With fewer rows there are never more parts than this.
    let workspace = Operand::workspace(parts_max * geometry.weights());
    let [sh, sw] = options.stride;
    let [ph, pw] = options.padding;
    let [dh, dw] = options.dilation;
    let group_c = geometry.group_c();
    let mut params =
        words(&[tiles, each, across, geometry.groups(), sizes.n, rows, part, h, w, c, oh, ow, o]);
    params.extend(words(&[kernel[1], sh, sw, ph, pw, dh, dw, group_c, geometry.group_o()]));
    let product = Dispatch {
        shader: Shader::emitted(tile.name, "tile", weight_text(tile)).with_operands(call.precision),
        operands: vec![Operand::Input(0), Operand::Input(1), workspace],
        params,
        groups: grid(tiles, WORKGROUP),
    };
    let layout = PartLayout { part: geometry.weights(), o: sizes.n, c: 1, tap: group_c };
    vec![product, parts::add(call, parts, &layout, workspace)]
}

/// Returns the WGSL of a tile of the gradient by the weight, with the entry point `tile`. There
/// must be at least as many channels and terms as the tile has rows and columns.
fn weight_text(tile: RegisterTile) -> String {
    let RegisterTile { m, n, .. } = tile;
    let columns = lines(n, |j, line| {
        write!(line, "    let tap{j} = (j + {j}u) / p.group_c; ")?;
        write!(line, "let y{j} = tap{j} / p.kw * p.dh - p.ph; ")?;
        write!(line, "let x{j} = tap{j} % p.kw * p.dw - p.pw; ")?;
        write!(line, "let at{j} = (y{j} * p.w + x{j}) * p.c + (j + {j}u) % p.group_c;")
    });
    let tests = lines(n, |j, line| write!(line, "        let ok{j} = top + y{j} < p.h;"));
    let loads =
        lines(m, |i, line| write!(line, "            let a{i} = operand(dy[dy_at + {i}u]);"))
            + &lines(n, |j, line| {
                write!(line, "            let is{j} = ok{j} && left + x{j} < p.w; ")?;
                write!(
                    line,
                    "let b{j} = operand(select(0.0, x[select(0u, at + at{j}, is{j})], is{j}));"
                )
            });
    let stores = lines(n, |j, line| {
        write!(line, "            if (j + {j}u >= column) {{ c[at + {j}u] = s0_{j}; }}")
    });
    let sums = sums(tile);
    let products = products(tile);
    let moves = moves(tile);
    format!(
        "{WEIGHT_HEAD}
@compute @workgroup_size({WORKGROUP})
fn tile(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {{
    let index = invocation_of(id, groups, {WORKGROUP}u);
    if (index >= p.tiles) {{ return; }}
    let product = index / p.tiles_each;
    let within = index % p.tiles_each;
    let group = product % p.groups;
    let part = product / p.groups;
    // What this tile owns starts at (row, column), what it computes at (i, j).
    let row = within / p.tiles_across * {m}u;
    let column = within % p.tiles_across * {n}u;
    let i = min(row, p.group_o - {m}u);
    let j = min(column, p.terms - {n}u);
{columns}{sums}    let end = min(p.lines, (part + 1u) * p.part);
    for (var line = part * p.part; line < end; line++) {{
        let top = line % p.oh * p.sh;
        var at = (line / p.oh * p.h + top) * p.w * p.c + group * p.group_c;
        var dy_at = line * p.ow * p.o + group * p.group_o + i;
        var left = 0u;
{tests}        for (var place = 0u; place < p.ow; place++) {{
{loads}{products}            at += p.sw * p.c;
            dy_at += p.o;
            left += p.sw;
        }}
    }}
    for (var r = 0u; r < {m}u; r++) {{
        if (i + r >= row) {{
            let at = ((part * p.groups + group) * p.group_o + i + r) * p.terms + j;
{stores}        }}
{moves}    }}
}}
"
    )
}
