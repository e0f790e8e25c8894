// The product of a few rows and a matrix, or of each such pair in two batches of them.
//
//   c[z, i, j] = sum_q few[z, i, q] many[z, q, j]  (+ c, if accumulating)
//
// `few` and `many` are the operands of a product or, if it is the second one that has few
// columns, their transposes in exchanged places, as the strides define. A workgroup computes all
// rows of 4 QUADS neighbouring columns, so that `many` is read from memory once. Each of its
// invocations multiplies four terms of four columns at a time; SLICES invocations share a quad of
// columns, with the terms interleaved between them, and a tree adds their sums. Neighbouring
// invocations read neighbouring addresses: terms if TERMS_ARE_NEIGHBOURS is 1, else columns.
// 2 k FLOPs per output on 4 k / rows bytes of `many`.
//
// Prepended (src/kernels/ops/matmul/vector.rs): the constants in capitals, where ROWS is the next
// power of two; the operands, with `many_some`, which reads the elements `at` .. `at` + 3, and
// `few_terms`, which reads four terms from element `at` on, both with zeros for those from the
// `count`th on; `operand4`, which rounds them in mixed precision; and `store`
// (src/kernels/ops/epilogue.rs).

struct Params {
    workgroups: u32,
    workgroups_across: u32, // for one matrix
    rows: u32,
    columns: u32,
    k: u32,
    few_row: u32,           // elements from few[z, i, q] to few[z, i + 1, q]
    few_step: u32,          // .. to few[z, i, q + 1]
    c_row: u32,
    c_column: u32,
}
var<immediate> p: Params;

const SIZE = QUADS * SLICES;
const_assert ROWS * 4u * QUADS <= SIZE;
var<workgroup> parts: array<vec4f, ROWS * SIZE>;

// Elements from one row of `many`, as stored, to the next one, and how many rows there are.
fn line_length() -> u32 { return select(p.columns, p.k, TERMS_ARE_NEIGHBOURS == 1u); }
fn lines() -> u32 { return select(p.k, p.columns, TERMS_ARE_NEIGHBOURS == 1u); }

// Elements `at` .. `at` + 3 of a stored row of `many`; zeros outside of it.
fn line(z: u32, index: u32, at: u32) -> vec4f {
    let count = select(0u, line_length() - min(line_length(), at), index < lines());
    return operand4(many_some((z * lines() + index) * line_length() + at, count));
}

// Terms q .. q + 3 of row i; zeros behind the last one.
fn terms(z: u32, i: u32, q: u32) -> vec4f {
    let at = z * p.rows * p.k + min(i, p.rows - 1u) * p.few_row + q * p.few_step;
    return operand4(few_terms(at, p.k - q));
}

// Sums of four columns, by the number of the row.
struct Sums {
    r0: vec4f,
    r1: vec4f,
    r2: vec4f,
    r3: vec4f,
    r4: vec4f,
    r5: vec4f,
    r6: vec4f,
    r7: vec4f,
}

// Products of the terms of a row with those of four columns.
fn products(terms: vec4f, lines: mat4x4f) -> vec4f {
    if (TERMS_ARE_NEIGHBOURS == 1u) { return terms * lines; }
    return lines * terms;
}

fn add(sums: ptr<function, Sums>, z: u32, q: u32, lines: mat4x4f) {
    (*sums).r0 += products(terms(z, 0u, q), lines);
    if (ROWS > 1u) {
        (*sums).r1 += products(terms(z, 1u, q), lines);
    }
    if (ROWS > 2u) {
        (*sums).r2 += products(terms(z, 2u, q), lines);
        (*sums).r3 += products(terms(z, 3u, q), lines);
    }
    if (ROWS > 4u) {
        (*sums).r4 += products(terms(z, 4u, q), lines);
        (*sums).r5 += products(terms(z, 5u, q), lines);
        (*sums).r6 += products(terms(z, 6u, q), lines);
        (*sums).r7 += products(terms(z, 7u, q), lines);
    }
}

fn put(sums: Sums, at: u32) {
    parts[at] = sums.r0;
    if (ROWS > 1u) {
        parts[at + SIZE] = sums.r1;
    }
    if (ROWS > 2u) {
        parts[at + 2u * SIZE] = sums.r2;
        parts[at + 3u * SIZE] = sums.r3;
    }
    if (ROWS > 4u) {
        parts[at + 4u * SIZE] = sums.r4;
        parts[at + 5u * SIZE] = sums.r5;
        parts[at + 6u * SIZE] = sums.r6;
        parts[at + 7u * SIZE] = sums.r7;
    }
}

@compute @workgroup_size(SIZE)
fn vector(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= p.workgroups) { return; }
    let z = index / p.workgroups_across;
    let along = TERMS_ARE_NEIGHBOURS == 1u;
    let slice = select(local / QUADS, local % SLICES, along);
    let quad = select(local % QUADS, local / SLICES, along);
    let first = index % p.workgroups_across * 4u * QUADS;
    let j = first + 4u * quad;

    var sums: Sums;
    for (var q = 4u * slice; q < p.k; q += 4u * SLICES) {
        let from_column = select(vec2u(q, j), vec2u(j, q), along);
        let lines = mat4x4f(
            line(z, from_column.x, from_column.y),
            line(z, from_column.x + 1u, from_column.y),
            line(z, from_column.x + 2u, from_column.y),
            line(z, from_column.x + 3u, from_column.y),
        );
        add(&sums, z, q, lines);
    }

    let place = slice * QUADS + quad;
    put(sums, place);
    for (var half = SLICES / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (slice < half) {
            for (var r = 0u; r < ROWS; r++) {
                parts[r * SIZE + place] += parts[r * SIZE + place + half * QUADS];
            }
        }
    }
    workgroupBarrier();
    let i = local / (4u * QUADS);
    let column = local % (4u * QUADS);
    if (i >= p.rows || first + column >= p.columns) { return; }
    let total = parts[i * SIZE + column / 4u][column % 4u];
    store(z * p.rows * p.columns + i * p.c_row + (first + column) * p.c_column, total);
}
