// Attention and its gradient for GPUs with workgroup memory: the functions of
// attention.wgsl, which has the formulas, by tiles (Dao 2023, FlashAttention-2).
// uses lib/attention
// uses lib/nan
// uses lib/rng
//
// A workgroup of X * Y invocations owns R = 4 Y rows of a head (queries in forward and grad_q, keys
// in grad_kv) and streams W = 4 X rows of the other side past them, a tile of R x W pairs at a
// time. Invocation (x, y) has the pairs of the own rows y + Y i and the streamed rows x + X j, and
// the sums of the own rows y + Y i and of the vectors of 4 columns x and, with QUADS = 2, x + X: in
// both kinds of product it multiplies 4 rows by 4 columns from 8 vectors of workgroup memory. In
// the products over columns (scores) both operands are staged by up to 4 DEPTH columns; in those
// over rows (sums) the pairs lie in workgroup memory, and 4 DEPTH streamed rows are staged at a
// time.
//
// A workgroup has sums for 4 X QUADS columns; wider heads take several workgroups, each of which
// computes the scores. Bytes read per pair of positions, L = min(D, 4 X QUADS), from the cache:
// forward 4 (D + L) / R + 4 D / W, grad_q 4 (2 D + L) / R + 8 D / W,
// grad_kv 8 (D + L) / R + 8 D / W.
//
// Workgroup memory, for heads of any width:
//   64 invocations: at most 8192 bytes
//   128 invocations: at most 16384 bytes
//   256 invocations: at most 27136 bytes
//
// Registers: 32 of sums, 16 or 32 of pairs and 32 of operands per invocation, whether loops are
// unrolled or not, because loops index workgroup memory only. Loops over stages and within them end
// at what depends on a parameter, so that no driver unrolls them. Unrolled, the code of Intel's
// spills 303 times in the gradient of keys and values of width 64, and is twice as long.
//
// Prepended: what lib/attention needs, and the constants X, Y and QUADS.

const SIZE = X * Y;
const R = 4u * Y;
const W = 4u * X;
const PARTS = (D + 3u) / 4u;                     // vectors in a row
const DEPTH = min(8u, SIZE / 16u);               // what is staged, per row and in rows / 4
const STAGES = (PARTS + DEPTH - 1u) / DEPTH;     // of a product over columns
const STAGE = (PARTS + STAGES - 1u) / STAGES;    // vectors of a row in a stage
const STRIDE = STAGE | 1u;                       // odd: neighbouring rows lie in other banks
const SLICE = X * QUADS;                         // vectors for which a workgroup has sums
const SLICES = (PARTS + SLICE - 1u) / SLICE;
const STEP = 4u * DEPTH;                         // streamed rows in a stage of one over rows
const STEPS = W / STEP;
const OTHER = R * STRIDE;                        // where staged streamed rows start,
const SHARED = OTHER + W * STRIDE;               // what invocations of a row share,
const ROWS = 4u * SIZE;                          // and streamed rows behind the pairs
const_assert X % DEPTH == 0u && R % DEPTH == 0u && X % 8u == 0u;

// Vectors of rows, or pairs: see above. Pairs of an own row are vectors for x = 0, 1, .., each of
// them of the streamed rows x + X j.
var<workgroup> tile: array<vec4f, max(SHARED + SIZE, ROWS + STEP * SLICE)>;

// Work of a workgroup: own rows of a head of a sample, and a slice of the columns of the sums.
struct Block {
    sample: u32,
    head: u32,
    first: u32,       // of the rows
    first_part: u32,  // of the slice
}

// Sums of an invocation: a vector of 4 columns for each of its own rows, and with QUADS = 2 another
// one, of the columns 4 X further on.
struct Sums {
    left: mat4x4f,
    right: mat4x4f,
}

fn block_count(heads: u32) -> u32 {
    return p.b * heads * ((p.t + R - 1u) / R) * SLICES;
}

// Block `index` of so many heads of each sample. Blocks of few pairs come last in each head: the
// first rows as keys, the last ones as queries have the most.
fn block_of(index: u32, heads: u32, of_queries: bool) -> Block {
    let blocks = (p.t + R - 1u) / R;
    let of_all = index / (blocks * SLICES);
    let at = (index / SLICES) % blocks;
    return Block(of_all / heads, of_all % heads,
        R * select(at, blocks - 1u - at, of_queries), (index % SLICES) * SLICE);
}

// Vector n + local of what is staged, `parts` from each row, n a multiple of SIZE: its row's place
// among the staged ones, its number in the row, and where the row starts. Where whole runs of rows
// lie between an invocation's copies, only the first one takes divisions and a product.

fn is_regular(parts: u32) -> bool {
    return SIZE % (parts * DEPTH) == 0u;
}

fn place_of(n: u32, local: u32, parts: u32) -> u32 {
    if (is_regular(parts)) { return local / parts + n / parts; }
    return (n + local) / parts;
}

fn part_of(n: u32, local: u32, parts: u32) -> u32 {
    if (is_regular(parts)) { return local % parts; }
    return (n + local) % parts;
}

fn row_of(n: u32, local: u32, parts: u32, first: u32, apart: u32, width: u32) -> u32 {
    let last = (p.t - 1u) * width;
    if (is_regular(parts)) {
        let place = local / parts;
        let start = (first + place % DEPTH + place / DEPTH * apart) * width;
        return min(start + n / (parts * DEPTH) * apart * width, last);
    }
    let place = (n + local) / parts;
    return min((first + place % DEPTH + place / DEPTH * apart) * width, last);
}

// The part itself, or the last one of a head if there may be some behind it.
fn within(part: u32, parts: u32) -> u32 {
    if (PARTS % parts == 0u) { return part; }
    return min(part, PARTS - 1u);
}

// Copies `parts` vectors from `part` on of each of `rows` rows of a source to the tile, rows
// `stride` apart. Rows come in runs of DEPTH, which start `apart` rows from each other, from row
// `first` on of those that start at `column` in the source. In place of rows behind the last one
// comes the last one, whose scores do not count; vectors behind a head's are zero.
fn stage(
    source: u32, at: u32, rows: u32, parts: u32, stride: u32,
    column: u32, first: u32, apart: u32, part: u32, local: u32,
) {
    let width = width_of(source);
    for (var n = 0u; n < rows * parts; n += SIZE) {
        if (rows * parts % SIZE == 0u || n + local < rows * parts) {
            let place = place_of(n, local, parts);
            let next = part + part_of(n, local, parts);
            let row = row_of(n, local, parts, first, apart, width);
            let value = row_part(source, column + row, within(next, parts));
            tile[at + place * stride + next - part] =
                select(vec4f(0.0), value, PARTS % parts == 0u || next < PARTS);
        }
    }
}

// Column i of the result is a's element i times b.
fn outer(a: vec4f, b: vec4f) -> mat4x4f {
    return mat4x4f(a.x * b, a.y * b, a.z * b, a.w * b);
}

fn add_outer(sums: mat4x4f, a: mat4x4f, b: mat4x4f) -> mat4x4f {
    return sums + outer(a[0], b[0]) + outer(a[1], b[1]) + outer(a[2], b[2]) + outer(a[3], b[3]);
}

// Adds a stage of the products of an invocation's own rows and streamed rows.
fn add_stage(sums: mat4x4f, x: u32, y: u32) -> mat4x4f {
    var s = sums;
    for (var part = 0u; part < min(STAGE, p.parts); part++) {
        let own = y * STRIDE + part;
        let other = OTHER + x * STRIDE + part;
        let a = mat4x4f(tile[own], tile[own + Y * STRIDE],
            tile[own + 2u * Y * STRIDE], tile[own + 3u * Y * STRIDE]);
        let b = mat4x4f(tile[other], tile[other + X * STRIDE],
            tile[other + 2u * X * STRIDE], tile[other + 3u * X * STRIDE]);
        s = add_outer(s, transpose(a), transpose(b));
    }
    return s;
}

// Products of own rows of a source and streamed rows of another one, each from a row on of those
// that start at a column: a column for each of four own rows.
fn products(
    own_source: u32, own: u32, first: u32,
    other_source: u32, other: u32, other_first: u32, local: u32,
) -> mat4x4f {
    var s = mat4x4f();
    for (var part = 0u; part < p.parts; part += STAGE) {
        workgroupBarrier();
        stage(own_source, 0u, R, STAGE, STRIDE, own, first, DEPTH, part, local);
        stage(other_source, OTHER, W, STAGE, STRIDE, other, other_first, DEPTH, part, local);
        workgroupBarrier();
        s = add_stage(s, local % X, local / X);
    }
    return s;
}

// Stores an invocation's pairs as operands, a column for each own row.
fn put_pairs(pairs: mat4x4f, local: u32) {
    tile[local] = operand4(pairs[0]);
    tile[local + SIZE] = operand4(pairs[1]);
    tile[local + 2u * SIZE] = operand4(pairs[2]);
    tile[local + 3u * SIZE] = operand4(pairs[3]);
}

// Adds the staged streamed rows times their pairs with an invocation's own rows.
fn add_rows(sums: Sums, step: u32, local: u32) -> Sums {
    var s = sums;
    for (var n = 0u; n < select(DEPTH, 0u, p.t == 0u); n++) {
        let own = local / X * X + DEPTH * step + n;
        let pairs = transpose(mat4x4f(tile[own], tile[own + SIZE],
            tile[own + 2u * SIZE], tile[own + 3u * SIZE]));
        let other = ROWS + n * SLICE + local % X;
        let left = mat4x4f(tile[other], tile[other + DEPTH * SLICE],
            tile[other + 2u * DEPTH * SLICE], tile[other + 3u * DEPTH * SLICE]);
        s.left = add_outer(s.left, pairs, left);
        if (QUADS == 2u) {
            let right = mat4x4f(tile[other + X], tile[other + X + DEPTH * SLICE],
                tile[other + X + 2u * DEPTH * SLICE], tile[other + X + 3u * DEPTH * SLICE]);
            s.right = add_outer(s.right, pairs, right);
        }
    }
    return s;
}

// Adds a tile of pairs times streamed rows of a source.
fn add_source(
    sums: Sums, pairs: mat4x4f, source: u32, column: u32, first: u32, part: u32, local: u32,
) -> Sums {
    var s = sums;
    workgroupBarrier();
    put_pairs(pairs, local);
    for (var step = 0u; step < STEPS; step++) {
        if (step > 0u) { workgroupBarrier(); }
        stage(source, ROWS, STEP, SLICE, SLICE, column, first + DEPTH * step, X, part, local);
        workgroupBarrier();
        s = add_rows(s, step, local);
    }
    return s;
}

// The sum over the invocations of the same own rows, in order.
fn total_of_rows(values: vec4f, local: u32) -> vec4f {
    tile[SHARED + local] = values;
    workgroupBarrier();
    var total = tile[SHARED + local / X * X];
    for (var n = 1u; n < X; n++) { total += tile[SHARED + local / X * X + n]; }
    return total;
}

fn highest_of_rows(values: vec4f, local: u32) -> vec4f {
    tile[SHARED + local] = values;
    workgroupBarrier();
    var highest = tile[SHARED + local / X * X];
    for (var n = 1u; n < X; n++) { highest = max(highest, tile[SHARED + local / X * X + n]); }
    return highest;
}

// The end of the keys that a workgroup's queries from `first` on see, and the first query that sees
// its keys.

fn end_of_keys(first: u32) -> u32 {
    return select(p.t, min(first + R, p.t), CAUSAL != 0u);
}

fn first_query(first: u32) -> u32 {
    return select(0u, first, CAUSAL != 0u);
}

// Two parts of a row of y, the logarithm of the sum of its exponentials, and whether it is NaN.
struct RowOfY { i: u32, part: u32, left: vec4f, right: vec4f, logarithm: f32, is_bad: bool }

fn put_row_of_y(block: Block, row: RowOfY) {
    if (row.i >= p.t) { return; }
    let stats_start = start_of_stats(block.sample, block.head);
    if (row.part == 0u) { new_lse[stats_start + row.i] = row.logarithm; }
    let start = start_of(DY, block.sample, block.head) + row.i * p.heads * D;
    if (row.part < PARTS) { put_y(start, row.part, nan4_where(row.is_bad, row.left)); }
    if (QUADS == 2u && row.part + X < PARTS) {
        put_y(start, row.part + X, nan4_where(row.is_bad, row.right));
    }
}

@compute @workgroup_size(SIZE)
fn forward(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= block_count(p.heads)) { return; }
    let block = block_of(index, p.heads, true);
    let i = block.first + local / X + Y * LANES;
    let end = end_of_keys(block.first);
    let queries = start_of(Q, block.sample, block.head);
    let keys = start_of(K, block.sample, block.head);
    let values = start_of(V, block.sample, block.head);

    var sums = Sums();
    var highest = vec4f(LOWEST);
    var total = vec4f(0.0);
    var top = vec4u(0u);
    for (var first = 0u; first < end; first += W) {
        let s = p.scale * products(Q, queries, block.first, K, keys, first, local);
        let j = first + local % X + X * LANES;
        let counts_x = sees(i.x, j);
        let counts_y = sees(i.y, j);
        let counts_z = sees(i.z, j);
        let counts_w = sees(i.w, j);
        let lowest = vec4f(LOWEST);
        let seen = mat4x4f(select(lowest, s[0], counts_x), select(lowest, s[1], counts_y),
            select(lowest, s[2], counts_z), select(lowest, s[3], counts_w));
        top = max(top, vec4u(largest_magnitude(seen[0]), largest_magnitude(seen[1]),
            largest_magnitude(seen[2]), largest_magnitude(seen[3])));
        let own = vec4f(largest(seen[0]), largest(seen[1]), largest(seen[2]), largest(seen[3]));
        let higher = highest_of_rows(max(highest, own), local);
        let shrink = exp(max(highest - higher, vec4f(-80.0)));
        highest = higher;
        var weights = mat4x4f(
            exp_where(s[0] - higher.x, counts_x), exp_where(s[1] - higher.y, counts_y),
            exp_where(s[2] - higher.z, counts_z), exp_where(s[3] - higher.w, counts_w));
        total = total * shrink + vec4f(1.0) * weights;
        if (DROPOUT != 0u) {
            weights = drop_pairs(weights, kept_by_query(block.sample, block.head, i, j));
        }
        sums.left = times(sums.left, shrink);
        if (QUADS == 2u) { sums.right = times(sums.right, shrink); }
        sums = add_source(sums, weights, V, values, first, block.first_part, local);
    }

    workgroupBarrier();
    total = total_of_rows(total, local);
    workgroupBarrier();
    let seen_bad = select(vec4f(0.0), vec4f(1.0), top > vec4u(NAN_ABOVE));
    top = select(vec4u(0u), vec4u(0xFFFFFFFFu), total_of_rows(seen_bad, local) > vec4f(0.0));
    let bad = are_bad(top, highest);
    let logarithms = nan_where_bad(bad, highest + log(total));
    sums = Sums(times(sums.left, 1.0 / total), times(sums.right, 1.0 / total));
    let part = block.first_part + local % X;
    put_row_of_y(block, RowOfY(i.x, part, sums.left[0], sums.right[0], logarithms.x, bad.x));
    put_row_of_y(block, RowOfY(i.y, part, sums.left[1], sums.right[1], logarithms.y, bad.y));
    put_row_of_y(block, RowOfY(i.z, part, sums.left[2], sums.right[2], logarithms.z, bad.z));
    put_row_of_y(block, RowOfY(i.w, part, sums.left[3], sums.right[3], logarithms.w, bad.w));
}

// dy . y of an invocation's own rows.
fn deltas_of(block: Block, i: vec4u, local: u32) -> vec4f {
    let start = start_of(DY, block.sample, block.head);
    let rows = start + min(i, vec4u(p.t - 1u)) * (p.heads * D);
    var sums = vec4f(0.0);
    for (var part = local % X; part < PARTS; part += X) {
        sums += vec4f(
            dot(dy_part(rows.x, part), y_part(rows.x, part)),
            dot(dy_part(rows.y, part), y_part(rows.y, part)),
            dot(dy_part(rows.z, part), y_part(rows.z, part)),
            dot(dy_part(rows.w, part), y_part(rows.w, part)));
    }
    return total_of_rows(sums, local);
}

@compute @workgroup_size(SIZE)
fn delta(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= block_count(p.heads) || index % SLICES != 0u) { return; }
    let block = block_of(index, p.heads, true);
    let i = block.first + local / X + Y * LANES;
    let deltas = deltas_of(block, i, local);
    if (local % X != 0u) { return; }
    let stats_start = start_of_stats(block.sample, block.head);
    for (var lane = 0u; lane < 4u; lane++) {
        if (i[lane] < p.t) {
            let at = stats_start + i[lane];
            stats[at] = vec2f(lse[at], deltas[lane]);
        }
    }
}

fn put_row(source: u32, start: u32, i: u32, part: u32, left: vec4f, right: vec4f) {
    if (i >= p.t) { return; }
    let row = start + i * width_of(source);
    if (part < PARTS) { put_gradient(source, row, part, left); }
    if (QUADS == 2u && part + X < PARTS) { put_gradient(source, row, part + X, right); }
}

fn put_rows(source: u32, start: u32, i: vec4u, part: u32, sums: Sums) {
    put_row(source, start, i.x, part, sums.left[0], sums.right[0]);
    put_row(source, start, i.y, part, sums.left[1], sums.right[1]);
    put_row(source, start, i.z, part, sums.left[2], sums.right[2]);
    put_row(source, start, i.w, part, sums.left[3], sums.right[3]);
}

fn scaled_sums(sums: Sums) -> Sums {
    return Sums(scaled(sums.left), scaled(sums.right));
}

@compute @workgroup_size(SIZE)
fn grad_q(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= block_count(p.heads)) { return; }
    let block = block_of(index, p.heads, true);
    let i = block.first + local / X + Y * LANES;
    let end = end_of_keys(block.first);
    let queries = start_of(Q, block.sample, block.head);
    let keys = start_of(K, block.sample, block.head);
    let values = start_of(V, block.sample, block.head);
    let slopes = start_of(DY, block.sample, block.head);

    let own_stats = start_of_stats(block.sample, block.head) + min(i, vec4u(p.t - 1u));
    let own_lse = lse_of(own_stats);
    let deltas = delta_of(own_stats);
    var sums = Sums();
    for (var first = 0u; first < end; first += W) {
        let s = p.scale * products(Q, queries, block.first, K, keys, first, local);
        var dp = products(DY, slopes, block.first, V, values, first, local);
        let j = first + local % X + X * LANES;
        let weights = weights_by_query(s, own_lse, i, j);
        if (DROPOUT != 0u) { dp = drop_pairs(dp, kept_by_query(block.sample, block.head, i, j)); }
        let ds = score_slopes_by_query(weights, dp, deltas);
        sums = add_source(sums, ds, K, keys, first, block.first_part, local);
    }

    put_rows(Q, queries, i, block.first_part + local % X, scaled_sums(sums));
}

@compute @workgroup_size(SIZE)
fn grad_kv(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    let kv_heads = p.heads / p.group;
    if (index >= block_count(kv_heads)) { return; }
    let block = block_of(index, kv_heads, false);
    let j = block.first + local / X + Y * LANES;
    let first_head = block.head * p.group;
    let keys = start_of(K, block.sample, first_head);
    let values = start_of(V, block.sample, first_head);

    var dk = Sums();
    var dv = Sums();
    for (var head = first_head; head < first_head + p.group; head++) {
        let queries = start_of(Q, block.sample, head);
        let slopes = start_of(DY, block.sample, head);
        let stats_start = start_of_stats(block.sample, head);
        for (var first = first_query(block.first); first < p.t; first += W) {
            let s = p.scale * products(K, keys, block.first, Q, queries, first, local);
            var dp = products(V, values, block.first, DY, slopes, first, local);
            let i = first + local % X + X * LANES;
            let rows = stats_start + min(i, vec4u(p.t - 1u));
            let weights = weights_by_key(s, lse_of(rows), i, j);
            var dropped = weights;
            if (DROPOUT != 0u) {
                let kept = kept_by_key(block.sample, head, i, j);
                dropped = drop_pairs(weights, kept);
                dp = drop_pairs(dp, kept);
            }
            let deltas = delta_of(rows);
            let slopes_of_weights = dp - mat4x4f(deltas, deltas, deltas, deltas);
            let ds = product(slope_factor() * weights, slopes_of_weights);
            dv = add_source(dv, dropped, DY, slopes, first, block.first_part, local);
            dk = add_source(dk, ds, Q, queries, first, block.first_part, local);
        }
    }

    put_rows(K, keys, j, block.first_part + local % X, scaled_sums(dk));
    put_rows(V, values, j, block.first_part + local % X, dv);
}
