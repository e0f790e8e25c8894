// Batch normalization over the rows of x (rows, c), by column (Ioffe and Szegedy 2015).
// uses lib/column_sum
// uses lib/span
//
//   forward_blocks  sums of d and of d^2 over each block of rows, with d = x - x[first row], which
//                   is close to the mean if the deviation is small beside it
//   statistics      mean and rstd = 1 / sqrt(variance + eps) of each column, and `samples` times
//                   the mean and the unbiased variance, which running averages accumulate
//   running         the same of running averages, in place of both, outside of training
//   normalize       y = (x - mean) rstd weight + bias
//   affine_blocks   sums of dy xhat and of dy over each block of rows, xhat = (x - mean) rstd
//   affine          dweight and dbias: the sums over the blocks
//   grad            dx = weight rstd (dy - (dbias + xhat dweight) / rows), without the second term
//                   outside of training
//
// Prepended: Value, f32 or vec4f for columns of vectors of 4; of them the (..blocks), `normalize`
// and `grad` process one each, that is `width` per row. Blocks have `strip` rows; their sums are
// added in order, every 16th by one invocation and then those of the 16. 4 to 12 bytes per element
// are moved.

struct Params {
    rows: u32,
    width: u32,             // Values per row
    c: u32,
    blocks: u32,
    strip: u32,
    training: u32,
    eps: f32,
    samples: f32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<Value>;                 // (rows, width)
// forward_blocks binds x, partials.
@group(0) @binding(1) var<storage, read_write> partials: array<Value>;    // (blocks, 2, width)
// statistics binds finished, x, new_stats, mean_sum, variance_sum.
@group(0) @binding(0) var<storage, read_write> finished: array<f32>;      // (blocks, 2, c)
@group(0) @binding(1) var<storage, read> first_row: array<f32>;           // (c), of (rows, c)
@group(0) @binding(2) var<storage, read_write> new_stats: array<f32>;     // (2, c): mean, rstd
@group(0) @binding(3) var<storage, read_write> mean_sum: array<f32>;      // (c)
@group(0) @binding(4) var<storage, read_write> variance_sum: array<f32>;  // (c)
// running binds its mean and variance, new_stats, mean_sum, variance_sum.
@group(0) @binding(0) var<storage, read> running_mean: array<f32>;        // (c)
@group(0) @binding(1) var<storage, read> running_variance: array<f32>;    // (c)
// normalize binds x, finished_stats, weight, bias, y.
@group(0) @binding(1) var<storage, read_write> finished_stats: array<Value>;  // (2, width)
@group(0) @binding(2) var<storage, read> weight: array<Value>;            // (width)
@group(0) @binding(3) var<storage, read> bias: array<Value>;              // (width)
@group(0) @binding(4) var<storage, read_write> y: array<Value>;           // (rows, width)
// affine_blocks binds x, stats, dy, affine_partials.
@group(0) @binding(1) var<storage, read> stats: array<Value>;             // (2, width)
@group(0) @binding(2) var<storage, read> dy: array<Value>;                // (rows, width)
@group(0) @binding(3) var<storage, read_write> affine_partials: array<Value>;  // (blocks, 2, width)
// affine binds finished, dweight, dbias.
@group(0) @binding(1) var<storage, read_write> dweight: array<f32>;       // (c)
@group(0) @binding(2) var<storage, read_write> dbias: array<f32>;         // (c)
// grad binds x, stats, dy, old_weight, sum_weight, sum_bias, dx.
@group(0) @binding(3) var<storage, read> old_weight: array<Value>;        // (width)
@group(0) @binding(4) var<storage, read> sum_weight: array<Value>;        // (width)
@group(0) @binding(5) var<storage, read> sum_bias: array<Value>;          // (width)
@group(0) @binding(6) var<storage, read_write> dx: array<Value>;          // (rows, width)

// Rows from the first to before the second of block `index / width`.
fn rows_of(index: u32) -> vec2u {
    let begin = index / p.width * p.strip;
    return vec2u(begin, min(begin + p.strip, p.rows));
}

// Place of the first of the two sums of block and column `index`.
fn place_of(index: u32) -> u32 {
    return index / p.width * 2u * p.width + index % p.width;
}

@compute @workgroup_size(64)
fn forward_blocks(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let index = invocation_of(id, groups, 64u);
    if (index >= p.blocks * p.width) { return; }
    let column = index % p.width;
    let own = rows_of(index);
    let origin = x[column];
    var sum = Value();
    var squares = Value();
    for (var row = own.x; row < own.y; row++) {
        let d = x[row * p.width + column] - origin;
        sum += d;
        squares += d * d;
    }
    partials[place_of(index)] = sum;
    partials[place_of(index) + p.width] = squares;
}

const GROUP: u32 = 256u;
const COLUMNS: u32 = 16u;
// Invocations that share a column.
const LANES: u32 = GROUP / COLUMNS;
alias Sums = vec2f;

// The two sums of a column over the blocks from `lane` on, every LANES-th.
fn sum_of_blocks(column: u32, lane: u32) -> vec2f {
    var sums = vec2f(0.0);
    for (var block = lane; block < p.blocks; block += LANES) {
        let at = 2u * block * p.c + column;
        sums += vec2f(finished[at], finished[at + p.c]);
    }
    return sums;
}

fn store_statistics(column: u32, mean: f32, variance: f32, unbiased: f32) {
    new_stats[column] = mean;
    new_stats[p.c + column] = 1.0 / sqrt(variance + p.eps);
    mean_sum[column] = p.samples * mean;
    variance_sum[column] = p.samples * unbiased;
}

@compute @workgroup_size(GROUP)
fn statistics(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let column = workgroup_of(group, groups) * COLUMNS + local % COLUMNS;
    var sums = vec2f(0.0);
    if (column < p.c) { sums = sum_of_blocks(column, local / COLUMNS); }
    sums = sum_of_column(sums, local);
    if (local >= COLUMNS || column >= p.c) { return; }
    let count = f32(p.rows);
    let squares = max(sums.y - sums.x * (sums.x / count), 0.0);
    let mean = first_row[column] + sums.x / count;
    store_statistics(column, mean, squares / count, squares / max(count - 1.0, 1.0));
}

@compute @workgroup_size(64)
fn running(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let column = invocation_of(id, groups, 64u);
    if (column >= p.c) { return; }
    let variance = running_variance[column];
    store_statistics(column, running_mean[column], variance, variance);
}

@compute @workgroup_size(64)
fn normalize(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.rows * p.width);
    for (var at = own.x; at < own.y; at += 64u) {
        let column = at % p.width;
        let xhat = (x[at] - finished_stats[column]) * finished_stats[p.width + column];
        y[at] = xhat * weight[column] + bias[column];
    }
}

@compute @workgroup_size(64)
fn affine_blocks(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let index = invocation_of(id, groups, 64u);
    if (index >= p.blocks * p.width) { return; }
    let column = index % p.width;
    let own = rows_of(index);
    let mean = stats[column];
    var of_weight = Value();
    var of_bias = Value();
    for (var row = own.x; row < own.y; row++) {
        let at = row * p.width + column;
        of_weight += dy[at] * (x[at] - mean);
        of_bias += dy[at];
    }
    affine_partials[place_of(index)] = of_weight * stats[p.width + column];
    affine_partials[place_of(index) + p.width] = of_bias;
}

@compute @workgroup_size(GROUP)
fn affine(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let column = workgroup_of(group, groups) * COLUMNS + local % COLUMNS;
    var sums = vec2f(0.0);
    if (column < p.c) { sums = sum_of_blocks(column, local / COLUMNS); }
    sums = sum_of_column(sums, local);
    if (local >= COLUMNS || column >= p.c) { return; }
    dweight[column] = sums.x;
    dbias[column] = sums.y;
}

@compute @workgroup_size(64)
fn grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.rows * p.width);
    let share = select(0.0, 1.0 / f32(p.rows), p.training == 1u);
    for (var at = own.x; at < own.y; at += 64u) {
        let column = at % p.width;
        let rstd = stats[p.width + column];
        let xhat = (x[at] - stats[column]) * rstd;
        let shared_part = (sum_bias[column] + xhat * sum_weight[column]) * share;
        dx[at] = old_weight[column] * rstd * (dy[at] - shared_part);
    }
}
