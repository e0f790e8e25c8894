// Sums over rows in two stages, for GPUs, where few workgroups that have columns to themselves
// would leave a device idle. Terms are viewed as (outer, middle, width), where middle is reduced.
// uses lib/column_sum
//
//   blocks    partials[o, b, i] = sum of term[o, m, i] over the rows m of block b, from b strip to
//             (b + 1) strip
//   totals    y[o, i] = sum over b of partials[o, b, i]  (+ y, if accumulating)
//
// Prepended (src/kernels/ops/row_sums.rs): COLUMNS, a power of two; Value, which is f32, or vec4f
// for columns of vectors of 4; FLOATS, their number in a Value; Sums, which is Value, or a vector
// or matrix of two;
// `term(row, at) -> Sums` with the bindings that it reads, and `partials` behind them; and
// `put(at, sums)`, which writes to the outputs, or adds if p.accumulate. Workgroups of 256 have
// COLUMNS neighbouring columns of an o, in the first stage of a block. LANES = 256 / COLUMNS
// invocations share a column: each takes every LANES-th row, 4 at a time, and the first adds their
// sums. Nothing is added twice or in another order. Each term is read once, and 4 bytes per element
// of the partial sums written and read.

// `word0` and the next are parameters of the terms.
struct Params {
    outer: u32,
    middle: u32,
    width: u32,
    blocks: u32,
    strip: u32,
    accumulate: u32,
    word0: u32,
    word1: u32,
    word2: u32,
}
var<immediate> p: Params;

// totals binds what blocks, or grad_affine of layer_norm_rows.wgsl, has written, and the outputs
// (outer, width).
@group(0) @binding(0) var<storage, read_write> finished: array<Sums>;    // (outer, blocks, width)

const GROUP: u32 = 256u;
// Invocations that share a column.
const LANES: u32 = GROUP / COLUMNS;

@compute @workgroup_size(GROUP)
fn blocks(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let tiles = (p.width + COLUMNS - 1u) / COLUMNS;
    let index = workgroup_of(group, groups);
    // o and the block in it.
    let place = index / tiles;
    if (place >= p.outer * p.blocks) { return; }
    let column = index % tiles * COLUMNS + local % COLUMNS;
    let first = place / p.blocks * p.middle;
    let begin = place % p.blocks * p.strip;
    let end = first + min(begin + p.strip, p.middle);
    var sum = Sums();
    if (column < p.width) {
        var row = first + begin + local / COLUMNS;
        for (; row + 3u * LANES < end; row += 4u * LANES) {
            let at = row * p.width + column;
            let step = LANES * p.width;
            let one = term(row, at);
            let two = term(row + LANES, at + step);
            let three = term(row + 2u * LANES, at + 2u * step);
            let four = term(row + 3u * LANES, at + 3u * step);
            sum += (one + two) + (three + four);
        }
        for (; row < end; row += LANES) { sum += term(row, row * p.width + column); }
    }
    sum = sum_of_column(sum, local);
    if (local < COLUMNS && column < p.width) { partials[place * p.width + column] = sum; }
}

@compute @workgroup_size(GROUP)
fn totals(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let tiles = (p.width + COLUMNS - 1u) / COLUMNS;
    let index = workgroup_of(group, groups);
    let o = index / tiles;
    if (o >= p.outer) { return; }
    let column = index % tiles * COLUMNS + local % COLUMNS;
    var sum = Sums();
    if (column < p.width) {
        for (var block = local / COLUMNS; block < p.blocks; block += LANES) {
            sum += finished[(o * p.blocks + block) * p.width + column];
        }
    }
    sum = sum_of_column(sum, local);
    if (local >= COLUMNS || column >= p.width) { return; }
    put(o * p.width + column, sum);
}
