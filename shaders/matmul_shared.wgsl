// The product of two matrices, or of each pair in two batches of them, through workgroup memory.
// uses lib/product_tile
//
//   c[z, i, j] = sum_q a[z, i, q] b[z, q, j]  (+ c, if accumulating)
//
// c is (batch, m, n); a is (batch, m, k) or transposed (batch, k, m), b is (batch, k, n) or
// transposed (batch, n, k). A workgroup computes a tile of BM x BN outputs: it stages BK terms of
// the sum at a time, and each of its invocations multiplies ROWS rows by COLUMNS columns of them
// (4 or 8 each, in quads), while the next terms are prefetched from memory into registers.
// With SPLIT > 1 as many invocations share each output. 2 k FLOPs per output on
// 4 k (1 / BM + 1 / BN) bytes.
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

// Rows of tiles that are walked together, down first: workgroups that run at a time then share
// rows of a and columns of b in the cache.
const STRIP = 8u;

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

// Stores four sums of row i of matrix z of c, as far as the tile owns them: what lies at `own` or
// behind it.
fn store_four(z: u32, i: u32, j: u32, own: vec2u, totals: vec4f) {
    if (i < own.x || (EDGES == 1u && i >= p.m)) { return; }
    let end = select(4u, min(4u, left(p.n, j)), EDGES == 1u);
    store_some((z * p.m + i) * p.n + j, left(own.y, j), end, totals);
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
    let a_put = a_block.y * A_QUADS + ((a_block.x / 4u) ^ swizzle(a_block.y));
    let b_put = b_block.y * B_QUADS + ((b_block.x / 4u) ^ swizzle(b_block.y));
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
