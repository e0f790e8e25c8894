// The product of two matrices, or of each pair in two batches of them, through workgroup memory.
//
//   c[z, i, j] = sum_q a[z, i, q] b[z, q, j]  (+ c, if accumulating)
//
// c is (batch, m, n); a is (batch, m, k) or transposed (batch, k, m), b is (batch, k, n) or
// transposed (batch, n, k). A workgroup computes a tile of BM x BN outputs: it stages BK terms of
// the sum at a time, and each of its invocations multiplies ROWS rows by COLUMNS columns of them
// (4 or 8 each, in quads), while the next terms are prefetched from memory into registers.
// With SPLIT > 1 as many invocations share each output: each sums its slice of the BK terms, and
// the slices are added in order. 2 k FLOPs per output on 4 k (1 / BM + 1 / BN) bytes.
//
// Prepended (src/kernels/ops/matmul/shared.rs): the constants in capitals, the operands `a` and
// `b` with `a_four` and `b_four`, which read elements `at`, at + 1, .. at + 3 of one and return
// zeros for those from the `count`th on, and `store` (src/kernels/ops/epilogue.rs).

struct Params {
    tiles: u32,             // in all matrices
    tiles_each: u32,        // in one
    tiles_across: u32,      // in one row of tiles
    m: u32,
    n: u32,
    k: u32,
    accumulate: u32,
}
var<immediate> p: Params;

@group(0) @binding(2) var<storage, read_write> c: array<f32>;

const ACROSS = BN / COLUMNS;            // invocations in a row of the tile
const SLICE = BM / ROWS * ACROSS;       // invocations that each compute other outputs
const SIZE = SLICE * SPLIT;
const A_QUADS = BM / 4u;
const B_QUADS = BN / 4u;
const K_QUADS = BK / 4u;
const A_BLOCKS = A_QUADS * K_QUADS;
const B_BLOCKS = B_QUADS * K_QUADS;
const_assert A_BLOCKS <= SIZE && B_BLOCKS <= SIZE;
const_assert A_QUADS % 8u == 0u && B_QUADS % 8u == 0u;
const_assert BK / SPLIT % 4u == 0u;
const_assert SPLIT == 1u || (ROWS == 4u && COLUMNS == 4u && BK >= BN && BK % SPLIT == 0u);

// Four rows of a, four columns of b per element; see `swizzle` for their places.
var<workgroup> a_tile: array<vec4f, BK * A_QUADS>;
var<workgroup> b_tile: array<vec4f, BK * B_QUADS>;

// Swizzle against bank conflicts: a quad's place within the terms q .. q + 3 is XORed with this
// value, q a multiple of 4. So the writes of neighbouring invocations, which hold other terms of
// the same quad, go to different banks.
fn swizzle(q: u32) -> u32 {
    return (q / 4u * max(8u / K_QUADS, 1u)) % 8u;
}

// Block of four rows or columns and four terms that invocation `t` copies: its place across the
// terms, and its first term. Neighbouring invocations read neighbouring addresses.
fn block(t: u32, quads: u32, terms_are_neighbours: bool) -> vec2u {
    return 4u * select(
        vec2u(t % quads, t / quads),
        vec2u(t / K_QUADS, t % K_QUADS),
        terms_are_neighbours,
    );
}

// Elements `at` .. at + 3 of a stored row of a matrix; zeros outside of it.
fn a_line(z: u32, line: u32, at: u32) -> vec4f {
    let size = select(vec2u(p.m, p.k), vec2u(p.k, p.m), TRANSPOSE_A == 1u);
    if (line >= size.x || at >= size.y) { return vec4f(); }
    return a_four((z * size.x + line) * size.y + at, size.y - at);
}

fn b_line(z: u32, line: u32, at: u32) -> vec4f {
    let size = select(vec2u(p.k, p.n), vec2u(p.n, p.k), TRANSPOSE_B == 1u);
    if (line >= size.x || at >= size.y) { return vec4f(); }
    return b_four((z * size.x + line) * size.y + at, size.y - at);
}

// Rows i .. i + 3 of a for each of the terms q .. q + 3.
fn load_a(z: u32, i: u32, q: u32) -> mat4x4f {
    if (TRANSPOSE_A == 1u) {
        return mat4x4f(
            a_line(z, q, i), a_line(z, q + 1u, i), a_line(z, q + 2u, i), a_line(z, q + 3u, i),
        );
    }
    return transpose(mat4x4f(
        a_line(z, i, q), a_line(z, i + 1u, q), a_line(z, i + 2u, q), a_line(z, i + 3u, q),
    ));
}

// Columns j .. j + 3 of b for each of the terms q .. q + 3.
fn load_b(z: u32, q: u32, j: u32) -> mat4x4f {
    if (TRANSPOSE_B == 0u) {
        return mat4x4f(
            b_line(z, q, j), b_line(z, q + 1u, j), b_line(z, q + 2u, j), b_line(z, q + 3u, j),
        );
    }
    return transpose(mat4x4f(
        b_line(z, j, q), b_line(z, j + 1u, q), b_line(z, j + 2u, q), b_line(z, j + 3u, q),
    ));
}

fn put_a(at: u32, rows: mat4x4f) {
    a_tile[at] = rows[0];
    a_tile[at + A_QUADS] = rows[1];
    a_tile[at + 2u * A_QUADS] = rows[2];
    a_tile[at + 3u * A_QUADS] = rows[3];
}

fn put_b(at: u32, columns: mat4x4f) {
    b_tile[at] = columns[0];
    b_tile[at + B_QUADS] = columns[1];
    b_tile[at + 2u * B_QUADS] = columns[2];
    b_tile[at + 3u * B_QUADS] = columns[3];
}

// Adds the sums of all slices to those of the first one, in order, through a's tile.
fn add_slices(local: u32, own: mat4x4f) -> mat4x4f {
    let at = local % SLICE;
    var sums = own;
    for (var slice = 1u; slice < SPLIT; slice++) {
        workgroupBarrier();
        if (local / SLICE == slice) {
            a_tile[at] = sums[0];
            a_tile[at + SLICE] = sums[1];
            a_tile[at + 2u * SLICE] = sums[2];
            a_tile[at + 3u * SLICE] = sums[3];
        }
        workgroupBarrier();
        if (local < SLICE) {
            sums += mat4x4f(
                a_tile[at], a_tile[at + SLICE], a_tile[at + 2u * SLICE], a_tile[at + 3u * SLICE],
            );
        }
    }
    return sums;
}

// Sums of an invocation: its rows y and, if it has 8, those half a tile below; columns x alike.
struct Sums {
    upper_left: mat4x4f,
    upper_right: mat4x4f,
    lower_left: mat4x4f,
    lower_right: mat4x4f,
}

// Places of an invocation's quads in the tiles, for one term.
struct Places {
    upper: u32,
    lower: u32,
    left: u32,
    right: u32,
}

// Every row of the result is a's element of that row times the row b.
fn outer(a: vec4f, b: vec4f) -> mat4x4f {
    return mat4x4f(a.x * b, a.y * b, a.z * b, a.w * b);
}

// Adds the products of a term, `next` after that of the places.
fn add_term(sums: ptr<function, Sums>, at: Places, next: u32) {
    let a0 = a_tile[at.upper + next * A_QUADS];
    let b0 = b_tile[at.left + next * B_QUADS];
    // Not read if there are no such rows or columns.
    let a1 = a_tile[select(at.upper, at.lower, ROWS == 8u) + next * A_QUADS];
    let b1 = b_tile[select(at.left, at.right, COLUMNS == 8u) + next * B_QUADS];
    (*sums).upper_left += outer(a0, b0);
    if (COLUMNS == 8u) { (*sums).upper_right += outer(a0, b1); }
    if (ROWS == 8u) { (*sums).lower_left += outer(a1, b0); }
    if (ROWS == 8u && COLUMNS == 8u) { (*sums).lower_right += outer(a1, b1); }
}

// Adds four terms from `s` on, a multiple of 4. They have one swizzle, so that the places of the
// last three are constants away.
fn add_terms(sums: ptr<function, Sums>, y: u32, x: u32, s: u32) {
    let swap = swizzle(s);
    let at = Places(
        s * A_QUADS + (y ^ swap),
        s * A_QUADS + ((y + A_QUADS / 2u) ^ swap),
        s * B_QUADS + (x ^ swap),
        s * B_QUADS + ((x + ACROSS) ^ swap),
    );
    add_term(sums, at, 0u);
    add_term(sums, at, 1u);
    add_term(sums, at, 2u);
    add_term(sums, at, 3u);
}

fn store_four(z: u32, i: u32, j: u32, totals: vec4f) {
    if (i >= p.m) { return; }
    let at = (z * p.m + i) * p.n + j;
    if (j < p.n) { store(at, totals.x); }
    if (j + 1u < p.n) { store(at + 1u, totals.y); }
    if (j + 2u < p.n) { store(at + 2u, totals.z); }
    if (j + 3u < p.n) { store(at + 3u, totals.w); }
}

// Stores an invocation's sums. Only one row has a store, and the other rows move up to it:
// compilers are slow on long texts.
fn store_all(z: u32, first: u32, j: u32, sums: Sums) {
    var ul = sums.upper_left;
    var ur = sums.upper_right;
    var ll = sums.lower_left;
    var lr = sums.lower_right;
    for (var r = 0u; r < ROWS; r++) {
        let i = first + r % 4u + r / 4u * (BM / 2u);
        store_four(z, i, j, ul[0]);
        if (COLUMNS == 8u) { store_four(z, i, j + BN / 2u, ur[0]); }
        ul = mat4x4f(ul[1], ul[2], ul[3], ll[0]);
        ur = mat4x4f(ur[1], ur[2], ur[3], lr[0]);
        ll = mat4x4f(ll[1], ll[2], ll[3], ll[3]);
        lr = mat4x4f(lr[1], lr[2], lr[3], lr[3]);
    }
}

@compute @workgroup_size(SIZE)
fn shared_tile(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= p.tiles) { return; }
    let z = index / p.tiles_each;
    let row = index % p.tiles_each / p.tiles_across * BM;
    let column = index % p.tiles_each % p.tiles_across * BN;

    // The first invocations copy blocks of a, the last ones those of b.
    let reversed = SIZE - 1u - local;
    let a_block = block(local, A_QUADS, TRANSPOSE_A == 0u);
    let b_block = block(reversed, B_QUADS, TRANSPOSE_B == 1u);
    let a_put = a_block.y * A_QUADS + (a_block.x / 4u ^ swizzle(a_block.y));
    let b_put = b_block.y * B_QUADS + (b_block.x / 4u ^ swizzle(b_block.y));
    var a_next = mat4x4f();
    var b_next = mat4x4f();
    if (local < A_BLOCKS) { a_next = load_a(z, row + a_block.x, a_block.y); }
    if (reversed < B_BLOCKS) { b_next = load_b(z, b_block.y, column + b_block.x); }

    let y = local % SLICE / ACROSS;
    let x = local % ACROSS;
    let first = local / SLICE * (BK / SPLIT);
    var sums = Sums();
    for (var q = 0u; q < p.k; q += BK) {
        workgroupBarrier();
        if (local < A_BLOCKS) { put_a(a_put, a_next); }
        if (reversed < B_BLOCKS) { put_b(b_put, b_next); }
        workgroupBarrier();
        let next = q + BK;
        if (local < A_BLOCKS) { a_next = load_a(z, row + a_block.x, next + a_block.y); }
        if (reversed < B_BLOCKS) { b_next = load_b(z, next + b_block.y, column + b_block.x); }
        for (var s = first; s < first + BK / SPLIT; s += 4u) {
            add_terms(&sums, y, x, s);
        }
    }

    sums.upper_left = add_slices(local, sums.upper_left);
    if (local >= SLICE) { return; }
    store_all(z, row + 4u * y, column + 4u * x, sums);
}
