// A tile of a product by cooperative matrices of MATRIX x MATRIX, with operands in f16 and sums in
// f32, for a file that lib/product_tile fits too: see there for what it has. Each of UNITS
// subgroups, of SUBGROUP_MIN to SUBGROUP_MAX invocations, computes 2 x 4 matrices of the tile; if
// there are more subgroups, the others do it again, for nothing: cooperative matrices ask for
// uniform control flow. A stage is STEPS times BK terms of BM rows of a and of BN
// columns of b, and terms are neighbours in workgroup memory. No bytes of storage are moved.
//
// Prepended (src/kernels/ops/matmul/shared.rs): the constants in capitals, and the types
// MatrixA, MatrixB and MatrixC.

const SIZE = UNITS * SUBGROUP_MAX;
const UNIT_ROWS = 2u * MATRIX;
const UNIT_COLUMNS = 4u * MATRIX;
const UNITS_ACROSS = BN / UNIT_COLUMNS;
const STAGE = STEPS * BK;
// Padding puts the rows of a matrix in different banks; 16 bytes keep them aligned.
const ROW = STAGE + 8u;
const PATCH = MATRIX * MATRIX;
const_assert UNITS * UNIT_ROWS * UNIT_COLUMNS == BM * BN && STAGE % MATRIX == 0u && STEPS <= 2u;

var<workgroup> a_tile: array<f16, BM * ROW>;
var<workgroup> b_tile: array<f16, BN * ROW>;
// A matrix of sums of each subgroup on its way to memory; sums of a after them.
var<workgroup> patches: array<f32, max(SIZE / SUBGROUP_MIN * PATCH, 4u * A_BLOCKS)>;

// Copies four terms of four rows, of which the first element has this place.
fn put_a(at: u32, terms: mat4x4f) {
    let rows = transpose(terms);
    for (var i = 0u; i < 4u; i++) {
        let row = vec4<f16>(rows[i]);
        a_tile[at + i * ROW] = row.x;
        a_tile[at + i * ROW + 1u] = row.y;
        a_tile[at + i * ROW + 2u] = row.z;
        a_tile[at + i * ROW + 3u] = row.w;
    }
}

fn put_b(at: u32, terms: mat4x4f) {
    let columns = transpose(terms);
    for (var j = 0u; j < 4u; j++) {
        let column = vec4<f16>(columns[j]);
        b_tile[at + j * ROW] = column.x;
        b_tile[at + j * ROW + 1u] = column.y;
        b_tile[at + j * ROW + 2u] = column.z;
        b_tile[at + j * ROW + 3u] = column.w;
    }
}

// Sum of the terms of four rows.
fn sum_of_terms(terms: mat4x4f) -> vec4f {
    return (terms[0] + terms[1]) + (terms[2] + terms[3]);
}

// Stores matrix `n` of each unit from its patch.
fn store_patches(n: u32, z: u32, corner: vec2u, own: vec2u, local: u32) {
    for (var quad = local; quad < UNITS * PATCH / 4u; quad += SIZE) {
        let unit = quad / (PATCH / 4u);
        let within = 4u * (quad % (PATCH / 4u));
        let row = unit / UNITS_ACROSS * UNIT_ROWS + n / 4u * MATRIX + within / MATRIX;
        let column = unit % UNITS_ACROSS * UNIT_COLUMNS + n % 4u * MATRIX + within % MATRIX;
        let at = 4u * quad;
        let totals = vec4f(patches[at], patches[at + 1u], patches[at + 2u], patches[at + 3u]);
        store_four(z, corner.x + row, corner.y + column, own, totals);
    }
}

// Blocks of a stage that an invocation copies, by the step, and the sums of its rows of a.
struct Copied {
    a_first: mat4x4f,
    a_second: mat4x4f,
    b_first: mat4x4f,
    b_second: mat4x4f,
    of_a: vec4f,
}

// Reads the stage from term q on, of the terms before `end`: zeros behind them.
fn load_stage(
    loader: ptr<function, Loader>, copied: ptr<function, Copied>, q: u32, end: u32, local: u32,
) {
    let copies_a = local < A_BLOCKS;
    let copies_b = SIZE - 1u - local < B_BLOCKS;
    (*copied).a_first = mat4x4f();
    (*copied).b_first = mat4x4f();
    if (q < end && copies_a) { (*copied).a_first = load_a(loader, q); }
    if (q < end && copies_b) { (*copied).b_first = load_b(loader, q); }
    advance(loader);
    if (STEPS == 2u) {
        (*copied).a_second = mat4x4f();
        (*copied).b_second = mat4x4f();
        if (q + BK < end && copies_a) { (*copied).a_second = load_a(loader, q + BK); }
        if (q + BK < end && copies_b) { (*copied).b_second = load_b(loader, q + BK); }
        advance(loader);
    }
    if (ROW_SUMS == 1u) {
        (*copied).of_a += sum_of_terms((*copied).a_first) + sum_of_terms((*copied).a_second);
    }
}

// Copies a stage to workgroup memory.
fn put_stage(copied: ptr<function, Copied>, local: u32) {
    let a_put = a_block(local).x * ROW + a_block(local).y;
    let b_put = b_block(local).x * ROW + b_block(local).y;
    if (local < A_BLOCKS) {
        put_a(a_put, (*copied).a_first);
        if (STEPS == 2u) { put_a(a_put + BK, (*copied).a_second); }
    }
    if (SIZE - 1u - local < B_BLOCKS) {
        put_b(b_put, (*copied).b_first);
        if (STEPS == 2u) { put_b(b_put + BK, (*copied).b_second); }
    }
}

// Computes the tile that begins at `corner` over the terms `begin` .. `end` - 1, and stores it;
// returns the sums of the rows of a that the invocation copied. `unit` is the number of the
// subgroup. `begin`, `end`, `z`, `corner` and `own` must be the same for the workgroup. Cooperative
// matrices are in no branch, because naga knows no value that all invocations have.
fn compute(
    loader: ptr<function, Loader>, begin: u32, end: u32, z: u32, corner: vec2u, own: vec2u,
    local: u32, unit: u32,
) -> vec4f {
    let a_at = unit % UNITS / UNITS_ACROSS * UNIT_ROWS * ROW;
    let b_at = unit % UNITS_ACROSS * UNIT_COLUMNS * ROW;
    var c00: MatrixC;
    var c01: MatrixC;
    var c02: MatrixC;
    var c03: MatrixC;
    var c10: MatrixC;
    var c11: MatrixC;
    var c12: MatrixC;
    var c13: MatrixC;
    var copied: Copied;
    load_stage(loader, &copied, begin, end, local);
    put_stage(&copied, local);
    workgroupBarrier();
    // A stage is read from memory while the one before it is added.
    for (var q = begin + STAGE; ; q += STAGE) {
        if (q < end) { load_stage(loader, &copied, q, end, local); }
        for (var k = 0u; k < STAGE; k += MATRIX) {
            let a0 = coopLoadT<MatrixA>(&a_tile[a_at + k], ROW);
            let a1 = coopLoadT<MatrixA>(&a_tile[a_at + MATRIX * ROW + k], ROW);
            let b0 = coopLoad<MatrixB>(&b_tile[b_at + k], ROW);
            let b1 = coopLoad<MatrixB>(&b_tile[b_at + MATRIX * ROW + k], ROW);
            let b2 = coopLoad<MatrixB>(&b_tile[b_at + 2u * MATRIX * ROW + k], ROW);
            let b3 = coopLoad<MatrixB>(&b_tile[b_at + 3u * MATRIX * ROW + k], ROW);
            c00 = coopMultiplyAdd(a0, b0, c00);
            c10 = coopMultiplyAdd(a1, b0, c10);
            c01 = coopMultiplyAdd(a0, b1, c01);
            c11 = coopMultiplyAdd(a1, b1, c11);
            c02 = coopMultiplyAdd(a0, b2, c02);
            c12 = coopMultiplyAdd(a1, b2, c12);
            c03 = coopMultiplyAdd(a0, b3, c03);
            c13 = coopMultiplyAdd(a1, b3, c13);
        }
        workgroupBarrier();
        if (q >= end) { break; }
        put_stage(&copied, local);
        workgroupBarrier();
    }
    // Only one matrix has a store, and the others move up to it: compilers are slow on long texts.
    for (var n = 0u; n < 8u; n++) {
        // Every argument of a store is a value of its own, as naga asks for.
        let sums = c00;
        coopStoreT(sums, &patches[unit * PATCH], MATRIX);
        workgroupBarrier();
        store_patches(n, z, corner, own, local);
        workgroupBarrier();
        c00 = c01;
        c01 = c02;
        c02 = c03;
        c03 = c10;
        c10 = c11;
        c11 = c12;
        c12 = c13;
    }
    return copied.of_a;
}

// Returns the sums of a over all terms: of quad `local` of its rows, if there is such a quad. `own`
// are those of an invocation, which are added in order.
fn sums_of_a(own: vec4f, local: u32) -> vec4f {
    workgroupBarrier();
    if (local < A_BLOCKS) {
        for (var i = 0u; i < 4u; i++) { patches[4u * local + i] = own[i]; }
    }
    workgroupBarrier();
    var total = vec4f(0.0);
    if (local < A_QUADS) {
        for (var n = 0u; n < K_QUADS; n++) {
            let at = 4u * (n * A_QUADS + local);
            total += vec4f(patches[at], patches[at + 1u], patches[at + 2u], patches[at + 3u]);
        }
    }
    return total;
}

@compute @workgroup_size(SIZE)
fn cooperative_tile(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_id) unit: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= p.tiles) { return; }
    tile_of(index, local, unit);
}
