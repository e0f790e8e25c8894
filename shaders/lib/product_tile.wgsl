// A tile of a product in workgroup memory, which a workgroup computes: stages of BK terms of BM
// rows of a and of BN columns of b, and the sums of an invocation, ROWS rows by COLUMNS columns of
// them (4 or 8 each, in quads). With SPLIT > 1 as many invocations share each output: each sums its
// slice of the BK terms, and the slices are added in order. No bytes of storage are moved.
//
// BY_TERMS = 1: the terms of a stage are a loop that no compiler unrolls, for GPUs with few
// registers; the sums are the same. IN_BLOCKS = 1: 32 neighbouring invocations multiply 4 quads of
// rows by 8 of columns, in place of whole rows of the tile. They read fewer vectors of workgroup
// memory, which gains where reads of one vector by several invocations are one access. ROW_SUMS =
// 1: a is summed over its terms on its way to workgroup memory, see `sums_of_a`.
//
// A file that it is prepended to has Params with `tiles`, `tiles_down` and `tiles_across`, the
// constants A_BY_TERMS and B_BY_TERMS, true if the terms of a row or column are neighbours in
// memory, and
//   struct Loader                               where an invocation's blocks of the next stage are
//   load_a(loader: ptr<function, Loader>, q: u32) -> mat4x4f    four rows for each of four terms
//   load_b(loader: ptr<function, Loader>, q: u32) -> mat4x4f    four columns for each of them
//   advance(loader: ptr<function, Loader>)                      to the next stage
//   store_four(z: u32, i: u32, j: u32, own: vec2u, totals: vec4f)   four sums of a row
// where q is the first term of the stage, and `own`, `z` are what `store_all` was given. Prepended
// is `operand4`, which rounds what is multiplied in mixed precision.

const ACROSS = BN / COLUMNS;            // invocations in a row of the tile
const SLICE = BM / ROWS * ACROSS;       // invocations that each compute other outputs
const SIZE = SLICE * SPLIT;
const TERMS = BK / SPLIT;               // staged terms that an invocation adds
const ONE_BLOCK = A_BLOCKS + B_BLOCKS <= SIZE;  // an invocation copies a block of one operand only
const_assert ACROSS % 8u == 0u && A_QUADS % 8u == 0u && (ROWS == 4u || A_QUADS % 16u == 0u);
const_assert TERMS == 16u && BK % SPLIT == 0u;
const_assert SPLIT == 1u || (ROWS == 4u && COLUMNS == 4u && BK >= BN);
const_assert ROW_SUMS == 0u || !A_BY_TERMS;
const_assert IN_BLOCKS == 0u || (SPLIT == 1u && SLICE / ACROSS % 4u == 0u);

// Four rows of a, four columns of b per element; see `swizzle` for their places.
var<workgroup> a_tile: array<vec4f, BK * A_QUADS>;
var<workgroup> b_tile: array<vec4f, BK * B_QUADS>;

// Swizzle against bank conflicts: a quad's place within the terms q .. q + 3 is XORed with this
// value, q a multiple of 4. So the writes of neighbouring invocations, which hold other terms of
// the same quad, go to different banks.
fn swizzle(q: u32) -> u32 {
    return (q / 4u * max(8u / K_QUADS, 1u)) % 8u;
}

// Place in a tile of so many quads of the first vector of a block.
fn put_at(copied: vec2u, quads: u32) -> u32 {
    return copied.y * quads + ((copied.x / 4u) ^ swizzle(copied.y));
}

// Rows and columns of an invocation's first sums within the tile, in quads.
fn own_quads(local: u32) -> vec2u {
    if (IN_BLOCKS == 0u) { return vec2u(local % SLICE / ACROSS, local % ACROSS); }
    let down = local / 8u % 4u + 4u * (local / (4u * ACROSS));
    return vec2u(down, local % 8u + 8u * (local / 32u % (ACROSS / 8u)));
}

fn put_a(at: u32, rows: mat4x4f) {
    a_tile[at] = operand4(rows[0]);
    a_tile[at + A_QUADS] = operand4(rows[1]);
    a_tile[at + 2u * A_QUADS] = operand4(rows[2]);
    a_tile[at + 3u * A_QUADS] = operand4(rows[3]);
}

fn put_b(at: u32, columns: mat4x4f) {
    b_tile[at] = operand4(columns[0]);
    b_tile[at + B_QUADS] = operand4(columns[1]);
    b_tile[at + 2u * B_QUADS] = operand4(columns[2]);
    b_tile[at + 3u * B_QUADS] = operand4(columns[3]);
}

// Adds the sums of all slices to those of the first one, in order, through a's tile: those of the
// first SLICE invocations are then whole.
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

// Sums of an invocation: its rows y and, if it has 8, those half a tile below; columns x alike. And
// of the rows of a that it copies.
struct Sums {
    upper_left: mat4x4f,
    upper_right: mat4x4f,
    lower_left: mat4x4f,
    lower_right: mat4x4f,
    of_a: vec4f,
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

// Adds the terms of a stage of the invocation's slice, see `add_terms`.
fn add_stage(sums: ptr<function, Sums>, a_at: u32, y: u32, b_at: u32, x: u32) {
    if (BY_TERMS == 0u) {
        add_terms(sums, a_at, y, b_at, x, 0u);
        add_terms(sums, a_at, y, b_at, x, 4u);
        add_terms(sums, a_at, y, b_at, x, 8u);
        add_terms(sums, a_at, y, b_at, x, 12u);
        return;
    }
    // The bound depends on a parameter, so that no compiler knows it.
    for (var s = 0u; s < select(TERMS, 0u, p.tiles == 0u); s++) {
        let quad = swizzle(s);
        add_term(sums, a_at + (y ^ quad) + s * A_QUADS, b_at + (x ^ quad) + s * B_QUADS);
    }
}

// Returns an invocation's sums of the terms `begin` .. `end` - 1. Both must be the same for all
// invocations of the workgroup.
fn multiply(loader: ptr<function, Loader>, begin: u32, end: u32, local: u32) -> Sums {
    let copies_a = local < A_BLOCKS;
    let copies_b = SIZE - 1u - local < B_BLOCKS;
    let a_put = put_at(a_block(local), A_QUADS);
    let b_put = put_at(b_block(local), B_QUADS);
    var a_next: mat4x4f;
    var b_next: mat4x4f;

    let slice = select(local / SLICE, 0u, SPLIT == 1u) * TERMS;
    let own = own_quads(local) ^ vec2u(swizzle(slice));
    var sums: Sums;
    // A stage is read from memory while the one before it is added.
    for (var q = begin; ; q += BK) {
        let is_last = q >= end;
        if (!is_last) {
            if (copies_a) { a_next = load_a(loader, q); }
            if (ROW_SUMS == 1u && copies_a) {
                sums.of_a += (a_next[0] + a_next[1]) + (a_next[2] + a_next[3]);
            }
            if (copies_b && !ONE_BLOCK) { b_next = load_b(loader, q); }
            if (copies_b && ONE_BLOCK) { a_next = load_b(loader, q); }
            advance(loader);
        }
        if (q > begin) {
            add_stage(&sums, slice * A_QUADS, own.x, slice * B_QUADS, own.y);
            workgroupBarrier();
        }
        if (is_last) { break; }
        if (copies_a) { put_a(a_put, a_next); }
        if (copies_b && !ONE_BLOCK) { put_b(b_put, b_next); }
        if (copies_b && ONE_BLOCK) { put_b(b_put, a_next); }
        workgroupBarrier();
    }
    if (SPLIT > 1u) { sums.upper_left = add_slices(local, sums.upper_left); }
    return sums;
}

// Returns the sums of a over all terms: of quad `local` of its rows, if there is such a quad. `own`
// are those of an invocation, which are added in order through a's tile.
fn sums_of_a(own: vec4f, local: u32) -> vec4f {
    workgroupBarrier();
    if (local < A_BLOCKS) { a_tile[local] = own; }
    workgroupBarrier();
    var total = vec4f(0.0);
    if (local < A_QUADS) {
        for (var n = 0u; n < K_QUADS; n++) { total += a_tile[n * A_QUADS + local]; }
    }
    return total;
}

// Stores an invocation's sums of the tile that begins at `corner`. Only one row has a store, and
// the other rows move up to it: compilers are slow on long texts.
fn store_all(z: u32, corner: vec2u, own: vec2u, sums: Sums, local: u32) {
    if (local >= SLICE) { return; }
    let first = corner + 4u * own_quads(local);
    let j = first.y;
    var ul = sums.upper_left;
    var ur = sums.upper_right;
    var ll = sums.lower_left;
    var lr = sums.lower_right;
    for (var r = 0u; r < ROWS; r++) {
        let i = first.x + r % 4u + r / 4u * (BM / 2u);
        store_four(z, i, j, own, ul[0]);
        if (COLUMNS == 8u) { store_four(z, i, j + BN / 2u, own, ur[0]); }
        ul = mat4x4f(ul[1], ul[2], ul[3], ll[0]);
        ur = mat4x4f(ur[1], ur[2], ur[3], lr[0]);
        ll = mat4x4f(ll[1], ll[2], ll[3], ll[3]);
        lr = mat4x4f(lr[1], lr[2], lr[3], lr[3]);
    }
}

// Computes the tile that begins at `corner` over the terms `begin` .. `end` - 1, and stores it;
// returns the sums of the rows of a that the invocation copied.
fn compute(
    loader: ptr<function, Loader>, begin: u32, end: u32, z: u32, corner: vec2u, own: vec2u,
    local: u32, unit: u32,
) -> vec4f {
    let sums = multiply(loader, begin, end, local);
    store_all(z, corner, own, sums, local);
    return sums.of_a;
}
