// The product of a few rows and a matrix, or of each such pair in two batches of them.
//
//   c[z, i, j] = sum_q few[z, i, q] many[z, q, j]  (+ c, if accumulating)
//
// `few` and `many` are the operands of a product or, if it is the second one that has few
// columns, their transposes in exchanged places, as the strides define. A workgroup of 64
// invocations computes 64 / SLICES neighbouring outputs of a row; SLICES invocations share each,
// with the terms interleaved between them, and the first one adds their sums. Neighbouring
// invocations read neighbouring elements of `many`: terms if TERMS_ARE_NEIGHBOURS is 1, else
// columns. 2 k FLOPs per output on 8 k bytes, of which the 4 k of `many` are read from memory
// once if there are few rows. SLICES, TERMS_ARE_NEIGHBOURS and `store`
// (src/kernels/ops/epilogue.rs) are prepended.

struct Params {
    workgroups: u32,
    workgroups_across: u32, // in a row
    rows: u32,
    columns: u32,
    k: u32,
    few_row: u32,           // elements from few[z, i, q] to few[z, i + 1, q]
    few_step: u32,          // .. to few[z, i, q + 1]
    many_step: u32,         // elements from many[z, q, j] to many[z, q + 1, j]
    many_column: u32,       // .. to many[z, q, j + 1]
    c_row: u32,
    c_column: u32,
    accumulate: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> few: array<f32>;
@group(0) @binding(1) var<storage, read> many: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;

const SIZE = 64u;
const COLUMNS = SIZE / SLICES;
var<workgroup> sums: array<f32, SIZE>;

@compute @workgroup_size(SIZE)
fn vector(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= p.workgroups) { return; }
    let row = index / p.workgroups_across;
    let z = row / p.rows;
    let i = row % p.rows;
    let along = TERMS_ARE_NEIGHBOURS == 1u;
    let slice = select(local / COLUMNS, local % SLICES, along);
    let column = select(local % COLUMNS, local / SLICES, along);
    let j = index % p.workgroups_across * COLUMNS + column;
    // Sums of the same output are this far from each other.
    let apart = select(COLUMNS, 1u, along);

    var total = 0.0;
    if (j < p.columns) {
        var few_at = z * p.rows * p.k + i * p.few_row + slice * p.few_step;
        var many_at = z * p.k * p.columns + slice * p.many_step + j * p.many_column;
        for (var q = slice; q < p.k; q += SLICES) {
            total += few[few_at] * many[many_at];
            few_at += SLICES * p.few_step;
            many_at += SLICES * p.many_step;
        }
    }
    sums[local] = total;
    workgroupBarrier();
    if (slice != 0u || j >= p.columns) { return; }
    for (var other = 1u; other < SLICES; other++) { total += sums[local + other * apart]; }
    store(z * p.rows * p.columns + i * p.c_row + j * p.c_column, total);
}
