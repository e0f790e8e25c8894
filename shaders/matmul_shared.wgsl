// The product of two matrices, or of each pair in two batches of them, through workgroup memory.
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
// ROW_SUMS = 1: the first tile of each row of tiles sums the transposed a over its terms too, (m),
// or (parts, m) behind c; m and n are multiples of 4.
//
// Prepended (src/kernels/ops/matmul/shared.rs): lib/product_tile or lib/product_coop and
// lib/tile_blocks, the constants in capitals, the operands `a` and
// `b` with `a_four` and `b_four`, which read elements `at` .. `at` + 3 of one, `a_some` and
// `b_some`, which return zeros for those from the `count`th on, and `store_some`
// (with src/kernels/ops/epilogue.rs), which stores the elements `begin` .. `end` - 1 of four, and
// `put_row_sums`, which stores four neighbouring sums of a.

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

const A_BY_TERMS = TRANSPOSE_A == 0u;
const B_BY_TERMS = TRANSPOSE_B == 1u;

// An invocation's blocks of the next stage: their first elements, row i of a, column j of b, and
// their first terms within a stage.
struct Loader {
    a_at: u32,
    b_at: u32,
    i: u32,
    j: u32,
    a_term: u32,
    b_term: u32,
}

// True if nothing of the stage from term q on lies outside of the matrices.
fn is_whole(q: u32) -> bool {
    return EDGES == 0u && (EDGE_K == 0u || q + BK <= p.k);
}

fn load_a(loader: ptr<function, Loader>, q: u32) -> mat4x4f {
    let at = (*loader).a_at;
    let row = select(p.k, p.m, TRANSPOSE_A == 1u);
    var lines: mat4x4f;
    if (is_whole(q)) {
        lines = mat4x4f(a_four(at), a_four(at + row), a_four(at + 2u * row), a_four(at + 3u * row));
    } else {
        let terms = left(p.k, q + (*loader).a_term);
        let rows = left(p.m, (*loader).i);
        let count = select(terms, rows, TRANSPOSE_A == 1u);
        let rest = select(rows, terms, TRANSPOSE_A == 1u);
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

fn load_b(loader: ptr<function, Loader>, q: u32) -> mat4x4f {
    let at = (*loader).b_at;
    let row = select(p.n, p.k, TRANSPOSE_B == 1u);
    var lines: mat4x4f;
    if (is_whole(q)) {
        lines = mat4x4f(b_four(at), b_four(at + row), b_four(at + 2u * row), b_four(at + 3u * row));
    } else {
        let terms = left(p.k, q + (*loader).b_term);
        let columns = left(p.n, (*loader).j);
        let count = select(columns, terms, TRANSPOSE_B == 1u);
        let rest = select(terms, columns, TRANSPOSE_B == 1u);
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

fn advance(loader: ptr<function, Loader>) {
    (*loader).a_at += select(BK, BK * p.m, TRANSPOSE_A == 1u);
    (*loader).b_at += select(BK * p.n, BK, TRANSPOSE_B == 1u);
}

// Stores four sums of row i of matrix z of c, as far as the tile owns them: what lies at `own` or
// behind it.
fn store_four(z: u32, i: u32, j: u32, own: vec2u, totals: vec4f) {
    if (i < own.x || (EDGES == 1u && i >= p.m)) { return; }
    let end = select(4u, min(4u, left(p.n, j)), EDGES == 1u);
    store_some((z * p.m + i) * p.n + j, left(own.y, j), end, totals);
}

// Computes a tile; `unit` is the number of the subgroup, where that is known.
fn tile_of(index: u32, local: u32, unit: u32) {
    let matrix = index / p.tiles_each;
    let z = select(matrix, matrix % p.batch, SPLIT_K == 1u);
    let begin = select(0u, matrix / p.batch * p.part, SPLIT_K == 1u);
    let end = select(p.k, min(p.k, begin + p.part), SPLIT_K == 1u);
    let own = place(index % p.tiles_each) * vec2u(BM, BN);
    let row = select(min(own.x, p.m - BM), own.x, EDGES == 1u);
    let column = select(min(own.y, p.n - BN), own.y, EDGES == 1u);

    let a_copied = a_block(local);
    let b_copied = b_block(local);
    let i = row + a_copied.x;
    let j = column + b_copied.x;
    let a_term = begin + a_copied.y;
    let b_term = begin + b_copied.y;
    let a_at = z * p.m * p.k + select(i * p.k + a_term, a_term * p.m + i, TRANSPOSE_A == 1u);
    let b_at = z * p.k * p.n + select(b_term * p.n + j, j * p.k + b_term, TRANSPOSE_B == 1u);
    var loader = Loader(a_at, b_at, i, j, a_copied.y, b_copied.y);
    let corner = vec2u(row, column);
    let of_a = compute(&loader, begin, end, matrix, corner, own, local, unit);
    if (ROW_SUMS == 1u && own.y == 0u) {
        let totals = sums_of_a(of_a, local);
        let first = row + 4u * local;
        if (local >= A_QUADS || first < own.x || first >= p.m) { return; }
        let parts = p.tiles / p.tiles_each;
        let begin_of_sums = select(0u, parts * p.m * p.n + matrix * p.m, SPLIT_K == 1u);
        put_row_sums(begin_of_sums + first, totals);
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
    tile_of(index, local, 0u);
}
