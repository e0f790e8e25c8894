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
// The last tiles down and across begin where a whole one ends at the matrix's edge, and store only
// what no other tile owns; so nothing is tested where operands are read. EDGES = 1: the matrix is
// smaller than a tile. EDGE_K = 1: k is no multiple of BK. SPLIT_K = 1: each part of the sum has
// tiles of its own, and c is (parts, batch, m, n); shaders/matmul_split_k.wgsl adds them.
//
// Prepended (src/kernels/ops/matmul/shared.rs): the constants in capitals, the operands `a` and
// `b` with `a_four` and `b_four`, which read elements `at` .. `at` + 3 of one, `a_some` and
// `b_some`, which return zeros for those from the `count`th on, and `store_some`
// (with src/kernels/ops/epilogue.rs), which stores the elements `begin` .. `end` - 1 of four.

struct Params {
    tiles: u32,             // in all matrices of c
    tiles_each: u32,        // in one
    tiles_down: u32,
    tiles_across: u32,      // in one row of tiles
    m: u32,
    n: u32,
    k: u32,
    batch: u32,             // products
    part: u32,              // terms of a part of the sum, a multiple of BK
}
var<immediate> p: Params;

const ACROSS = BN / COLUMNS;            // invocations in a row of the tile
const SLICE = BM / ROWS * ACROSS;       // invocations that each compute other outputs
const SIZE = SLICE * SPLIT;
const TERMS = BK / SPLIT;               // staged terms that an invocation adds
const A_QUADS = BM / 4u;
const B_QUADS = BN / 4u;
const K_QUADS = BK / 4u;
const A_BLOCKS = A_QUADS * K_QUADS;
const B_BLOCKS = B_QUADS * K_QUADS;
const ONE_BLOCK = A_BLOCKS + B_BLOCKS <= SIZE;  // an invocation copies a block of one operand only
const_assert A_BLOCKS <= SIZE && B_BLOCKS <= SIZE;
const_assert ACROSS % 8u == 0u && A_QUADS % 8u == 0u && (ROWS == 4u || A_QUADS % 16u == 0u);
const_assert TERMS == 16u && BK % SPLIT == 0u;
const_assert SPLIT == 1u || (ROWS == 4u && COLUMNS == 4u && BK >= BN);

// Rows of tiles that are walked together, down first: workgroups that run at a time then share
// rows of a and columns of b in the cache.
const STRIP = 8u;

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

// Row and column of a tile among those of its matrix.
fn place(tile: u32) -> vec2u {
    let first = tile / (STRIP * p.tiles_across) * STRIP;
    let height = min(STRIP, p.tiles_down - first);
    let within = tile - first * p.tiles_across;
    return vec2u(first + within % height, within / height);
}

// Number of elements from `at` on, of `size`.
fn left(size: u32, at: u32) -> u32 {
    return size - min(size, at);
}

// Rows i .. i + 3 of a for each of the terms q .. q + 3; the first element is a[at].
fn load_a(at: u32, i: u32, q: u32, is_whole: bool) -> mat4x4f {
    let row = select(p.k, p.m, TRANSPOSE_A == 1u);
    var lines: mat4x4f;
    if (is_whole) {
        lines = mat4x4f(a_four(at), a_four(at + row), a_four(at + 2u * row), a_four(at + 3u * row));
    } else {
        let count = select(left(p.k, q), left(p.m, i), TRANSPOSE_A == 1u);
        let rest = select(left(p.m, i), left(p.k, q), TRANSPOSE_A == 1u);
        lines = mat4x4f(
            a_some(at, select(0u, count, rest > 0u)),
            a_some(at + row, select(0u, count, rest > 1u)),
            a_some(at + 2u * row, select(0u, count, rest > 2u)),
            a_some(at + 3u * row, select(0u, count, rest > 3u)),
        );
    }
    if (TRANSPOSE_A == 1u) { return lines; }
    return transpose(lines);
}

// Columns j .. j + 3 of b for each of the terms q .. q + 3; the first element is b[at].
fn load_b(at: u32, q: u32, j: u32, is_whole: bool) -> mat4x4f {
    let row = select(p.n, p.k, TRANSPOSE_B == 1u);
    var lines: mat4x4f;
    if (is_whole) {
        lines = mat4x4f(b_four(at), b_four(at + row), b_four(at + 2u * row), b_four(at + 3u * row));
    } else {
        let count = select(left(p.n, j), left(p.k, q), TRANSPOSE_B == 1u);
        let rest = select(left(p.k, q), left(p.n, j), TRANSPOSE_B == 1u);
        lines = mat4x4f(
            b_some(at, select(0u, count, rest > 0u)),
            b_some(at + row, select(0u, count, rest > 1u)),
            b_some(at + 2u * row, select(0u, count, rest > 2u)),
            b_some(at + 3u * row, select(0u, count, rest > 3u)),
        );
    }
    if (TRANSPOSE_B == 0u) { return lines; }
    return transpose(lines);
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

// Every row of the result is a's element of that row times the row b.
fn outer(a: vec4f, b: vec4f) -> mat4x4f {
    return mat4x4f(a.x * b, a.y * b, a.z * b, a.w * b);
}

// Adds the products of a term, whose first quads of the invocation are at these places. Those
// half a tile further are not read if there are no such rows or columns.
fn add_term(sums: ptr<function, Sums>, a_at: u32, b_at: u32) {
    let a0 = a_tile[a_at];
    let a1 = a_tile[a_at + select(0u, A_QUADS / 2u, ROWS == 8u)];
    let b0 = b_tile[b_at];
    let b1 = b_tile[b_at + select(0u, ACROSS, COLUMNS == 8u)];
    (*sums).upper_left += outer(a0, b0);
    if (COLUMNS == 8u) { (*sums).upper_right += outer(a0, b1); }
    if (ROWS == 8u) { (*sums).lower_left += outer(a1, b0); }
    if (ROWS == 8u && COLUMNS == 8u) { (*sums).lower_right += outer(a1, b1); }
}

// Adds the terms `s` .. `s` + 3 of the invocation's slice, a multiple of 4. They have one swizzle,
// so that the places of the last three are constants away. `a_at` and `b_at` are the places of
// the slice's first term, `y` and `x` the quads within it with its swizzle.
fn add_terms(sums: ptr<function, Sums>, a_at: u32, y: u32, b_at: u32, x: u32, s: u32) {
    let a_first = a_at + (y ^ swizzle(s)) + s * A_QUADS;
    let b_first = b_at + (x ^ swizzle(s)) + s * B_QUADS;
    add_term(sums, a_first, b_first);
    add_term(sums, a_first + A_QUADS, b_first + B_QUADS);
    add_term(sums, a_first + 2u * A_QUADS, b_first + 2u * B_QUADS);
    add_term(sums, a_first + 3u * A_QUADS, b_first + 3u * B_QUADS);
}

// Stores four sums of row i of matrix z of c, as far as the tile owns them: what lies at `own` or
// behind it.
fn store_four(z: u32, i: u32, j: u32, own: vec2u, totals: vec4f) {
    if (i < own.x || (EDGES == 1u && i >= p.m)) { return; }
    let end = select(4u, min(4u, left(p.n, j)), EDGES == 1u);
    store_some((z * p.m + i) * p.n + j, left(own.y, j), end, totals);
}

// Stores an invocation's sums. Only one row has a store, and the other rows move up to it:
// compilers are slow on long texts.
fn store_all(z: u32, first: u32, j: u32, own: vec2u, sums: Sums) {
    var ul = sums.upper_left;
    var ur = sums.upper_right;
    var ll = sums.lower_left;
    var lr = sums.lower_right;
    for (var r = 0u; r < ROWS; r++) {
        let i = first + r % 4u + r / 4u * (BM / 2u);
        store_four(z, i, j, own, ul[0]);
        if (COLUMNS == 8u) { store_four(z, i, j + BN / 2u, own, ur[0]); }
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
    let matrix = index / p.tiles_each;
    let z = select(matrix, matrix % p.batch, SPLIT_K == 1u);
    let begin = select(0u, matrix / p.batch * p.part, SPLIT_K == 1u);
    let end = select(p.k, min(p.k, begin + p.part), SPLIT_K == 1u);
    let own = place(index % p.tiles_each) * vec2u(BM, BN);
    let row = select(min(own.x, p.m - BM), own.x, EDGES == 1u);
    let column = select(min(own.y, p.n - BN), own.y, EDGES == 1u);

    // The first invocations copy blocks of a, the last ones those of b.
    let reversed = SIZE - 1u - local;
    let a_block = block(local, A_QUADS, TRANSPOSE_A == 0u);
    let b_block = block(reversed, B_QUADS, TRANSPOSE_B == 1u);
    let a_put = a_block.y * A_QUADS + (a_block.x / 4u ^ swizzle(a_block.y));
    let b_put = b_block.y * B_QUADS + (b_block.x / 4u ^ swizzle(b_block.y));
    let i = row + a_block.x;
    let j = column + b_block.x;
    let copies_a = local < A_BLOCKS;
    let copies_b = reversed < B_BLOCKS;
    let a_term = begin + a_block.y;
    let b_term = begin + b_block.y;
    var a_at = z * p.m * p.k + select(i * p.k + a_term, a_term * p.m + i, TRANSPOSE_A == 1u);
    var b_at = z * p.k * p.n + select(b_term * p.n + j, j * p.k + b_term, TRANSPOSE_B == 1u);
    var a_next: mat4x4f;
    var b_next: mat4x4f;

    let slice = select(local / SLICE, 0u, SPLIT == 1u) * TERMS;
    let y = (local % SLICE / ACROSS) ^ swizzle(slice);
    let x = (local % ACROSS) ^ swizzle(slice);
    var sums: Sums;
    // A stage is read from memory while the one before it is added.
    for (var q = begin; ; q += BK) {
        let is_last = q >= end;
        if (!is_last) {
            let is_whole = EDGES == 0u && (EDGE_K == 0u || q + BK <= p.k);
            if (copies_a) { a_next = load_a(a_at, i, q + a_block.y, is_whole); }
            if (copies_b && !ONE_BLOCK) { b_next = load_b(b_at, q + b_block.y, j, is_whole); }
            if (copies_b && ONE_BLOCK) { a_next = load_b(b_at, q + b_block.y, j, is_whole); }
            a_at += select(BK, BK * p.m, TRANSPOSE_A == 1u);
            b_at += select(BK * p.n, BK, TRANSPOSE_B == 1u);
        }
        if (q > begin) {
            add_terms(&sums, slice * A_QUADS, y, slice * B_QUADS, x, 0u);
            add_terms(&sums, slice * A_QUADS, y, slice * B_QUADS, x, 4u);
            add_terms(&sums, slice * A_QUADS, y, slice * B_QUADS, x, 8u);
            add_terms(&sums, slice * A_QUADS, y, slice * B_QUADS, x, 12u);
            workgroupBarrier();
        }
        if (is_last) { break; }
        if (copies_a) { put_a(a_put, a_next); }
        if (copies_b && !ONE_BLOCK) { put_b(b_put, b_next); }
        if (copies_b && ONE_BLOCK) { put_b(b_put, a_next); }
        workgroupBarrier();
    }

    sums.upper_left = add_slices(local, sums.upper_left);
    if (local >= SLICE) { return; }
    let first = vec2u(row, column) + 4u * vec2u(local / ACROSS, local % ACROSS);
    store_all(matrix, first.x, first.y, own, sums);
}
