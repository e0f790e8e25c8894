// Sums over rows in one stage: terms are viewed as (outer, middle, width), where middle is reduced.
// uses lib/column_sum
//
//   columns   one invocation per column, where outer is 1; long sums are sums of sums over 64 rows,
//             to round less
//   tile      workgroups of GROUP have COLUMNS neighbouring columns, with LANES = GROUP / COLUMNS
//             invocations to each, which take every LANES-th row; the first adds their sums
//
// Prepended (src/kernels/ops/row_sums.rs): GROUP and COLUMNS; Value, which is f32, or vec4f for
// columns of vectors of 4, because a vector costs a software adapter little more than a value;
// FLOATS, their number in a Value; Sums, which is Value, or a vector or matrix of two;
// `term(row, at) -> Sums` with the bindings that it reads; and `put(at, sums)`, which writes to the
// outputs, or adds if p.accumulate. Each term is read once: 8 bytes per element of the gradients of
// layer norm.

// `word0` and the next are parameters of the terms.
struct Params {
    outer: u32,
    middle: u32,
    width: u32,
    accumulate: u32,
    word0: u32,
    word1: u32,
    word2: u32,
}
var<immediate> p: Params;

const BLOCK: u32 = 64u;
const LANES: u32 = GROUP / COLUMNS;

@compute @workgroup_size(GROUP)
fn columns(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let column = workgroup_of(group, groups) * GROUP + local;
    if (column >= p.width) { return; }
    var total = Sums();
    for (var block = 0u; block < p.middle; block += BLOCK) {
        var part = Sums();
        for (var row = block; row < min(block + BLOCK, p.middle); row++) {
            part += term(row, row * p.width + column);
        }
        total += part;
    }
    put(column, total);
}

@compute @workgroup_size(GROUP)
fn tile(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let tiles = (p.width + COLUMNS - 1u) / COLUMNS;
    let index = workgroup_of(group, groups);
    let o = index / tiles;
    // A folded grid may have more workgroups than there are tiles.
    if (o >= p.outer) { return; }
    let column = index % tiles * COLUMNS + local % COLUMNS;
    let end = (o + 1u) * p.middle;
    var part = Sums();
    if (column < p.width) {
        for (var row = o * p.middle + local / COLUMNS; row < end; row += LANES) {
            part += term(row, row * p.width + column);
        }
    }
    part = sum_of_column(part, local);
    if (local < COLUMNS && column < p.width) { put(o * p.width + column, part); }
}
