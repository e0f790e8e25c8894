// Layer normalization on vectors of 4 with rows in registers, for GPUs; the formulas are those of
// layer_norm.wgsl.
// uses lib/column_sum
// uses lib/joined
//
//   forward  keeps the row, so that mean and variance around it cost one read
//   grad     keeps g = weight dy and xhat
//   grad_affine  does the same for a block of rows, and sums dy xhat, and dy if SUMS is 2, over the
//            block, for the gradients of weight and bias; shaders/row_blocks.wgsl adds blocks
//
// LANES invocations share a row, each with every LANES-th vector of it, at most ITEMS; a workgroup
// of GROUP has GROUP / LANES rows. 32 bytes per vector moved (48 by grad), each once.
//
// Prepended constants: GROUP; LANES, which divides it; ITEMS; ADDS, which is not 0 if grad adds a
// residual; CENTERED, which is 0 if there is no mean; SUMS, the sums of grad_affine for each
// column.

struct Params { rows: u32, c: u32, eps: f32, flag: u32 }
// `flag`: forward adds a bias; of grad_affine, the rows of a block.
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<vec4f>;                // (rows, c / 4)
// forward binds x, weight, bias (weight again if there is none), y, stats.
@group(0) @binding(1) var<storage, read> weight: array<vec4f>;           // (c / 4)
@group(0) @binding(2) var<storage, read> bias: array<vec4f>;             // (c / 4)
@group(0) @binding(3) var<storage, read_write> y: array<vec4f>;          // (rows, c / 4)
@group(0) @binding(4) var<storage, read_write> new_stats: array<vec2f>;  // (rows): mean, rstd
// grad binds x, weight, stats, dy, dx, residual (dy again if there is none).
@group(0) @binding(2) var<storage, read> stats: array<vec2f>;            // (rows)
@group(0) @binding(3) var<storage, read> dy: array<vec4f>;               // (rows, c / 4)
@group(0) @binding(4) var<storage, read_write> dx: array<vec4f>;         // (rows, c / 4)
@group(0) @binding(5) var<storage, read> residual: array<vec4f>;         // (rows, c / 4)
// grad_affine binds partials too, of each column the sum for the weight, and that for the bias.
@group(0) @binding(6) var<storage, read_write> partials: array<vec4f>;   // (blocks, c / 4, 1 or 2)

fn sum4(v: vec4f) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}

const COLUMNS: u32 = LANES;
alias Sums = vec4f;
alias Joined = vec2f;

fn join(a: Joined, b: Joined) -> Joined {
    return a + b;
}

// Place of an invocation: the number of its row, and of its first vector in it.
fn place_of(workgroup: u32, local: u32) -> vec2u {
    return vec2u(workgroup * (GROUP / LANES) + local / LANES, local % LANES);
}

// The value, or zeros behind the end of a row. Loads there are of its last vector, so that no load
// waits for a branch.
fn within(k: u32, end: u32, value: vec4f) -> vec4f {
    return select(vec4f(0.0), value, k < end);
}

@compute @workgroup_size(GROUP)
fn forward(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let place = place_of(workgroup_of(group, groups), local);
    // Invocations without a row take part in its barriers.
    let row = min(place.x, p.rows - 1u);
    let width = p.c / 4u;
    let end = select(0u, width, place.x < p.rows);
    let start = row * width;

    var kept: array<vec4f, ITEMS>;
    for (var i = 0u; i < ITEMS; i++) {
        let k = place.y + LANES * i;
        kept[i] = within(k, end, x[start + min(k, width - 1u)]);
    }
    var part = vec4f(0.0);
    for (var i = 0u; i < ITEMS; i++) { part += kept[i]; }
    var mean = 0.0;
    if (CENTERED != 0u) { mean = joined(vec2f(sum4(part), 0.0), local).x / f32(p.c); }

    part = vec4f(0.0);
    for (var i = 0u; i < ITEMS; i++) {
        kept[i] = within(place.y + LANES * i, end, kept[i] - mean);
        part += kept[i] * kept[i];
    }
    let variance = joined(vec2f(sum4(part), 0.0), local).x / f32(p.c);
    let rstd = 1.0 / sqrt(variance + p.eps);

    for (var i = 0u; i < ITEMS; i++) {
        let k = place.y + LANES * i;
        if (k < end) {
            var value = kept[i] * rstd * weight[k];
            if (p.flag != 0u) { value += bias[k]; }
            y[start + k] = value;
        }
    }
    if (place.y == 0u && place.x < p.rows) { new_stats[row] = vec2f(mean, rstd); }
}

// Sums over the rows of an invocation of dy xhat and of dy, for each of its vectors.
struct AffineSums {
    of_weight: array<vec4f, ITEMS>,
    of_bias: array<vec4f, ITEMS>,
}

// Computes dx of the row and the vectors of `place`, and adds to the sums, if the row is below
// `last`.
fn grad_row(place: vec2u, last: u32, sums: ptr<function, AffineSums>, local: u32) {
    let row = min(place.x, p.rows - 1u);
    let width = p.c / 4u;
    let end = select(0u, width, place.x < last);
    let start = row * width;
    let of_row = stats[row];

    var xhat: array<vec4f, ITEMS>;
    var g: array<vec4f, ITEMS>;
    for (var i = 0u; i < ITEMS; i++) {
        let k = place.y + LANES * i;
        let at = min(k, width - 1u);
        let slope = dy[start + at];
        xhat[i] = (x[start + at] - of_row.x) * of_row.y;
        g[i] = within(k, end, weight[at] * slope);
        if (SUMS > 0u) { (*sums).of_weight[i] += within(k, end, slope * xhat[i]); }
        if (SUMS == 2u) { (*sums).of_bias[i] += within(k, end, slope); }
    }
    var part = vec4f(0.0);      // of g
    var product = vec4f(0.0);   // of g xhat
    for (var i = 0u; i < ITEMS; i++) {
        part += g[i];
        product += g[i] * xhat[i];
    }
    var means = joined(vec2f(sum4(part), sum4(product)), local) / f32(p.c);
    if (CENTERED == 0u) { means.x = 0.0; }
    for (var i = 0u; i < ITEMS; i++) {
        let k = place.y + LANES * i;
        if (k < end) {
            var value = of_row.y * (g[i] - means.x - xhat[i] * means.y);
            if (ADDS != 0u) { value += residual[start + k]; }
            dx[start + k] = value;
        }
    }
}

@compute @workgroup_size(GROUP)
fn grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    var sums: AffineSums;
    grad_row(place_of(workgroup_of(group, groups), local), p.rows, &sums, local);
}

// The sum of `mine` over the rows of a workgroup, for the first invocations, those of a row.
fn sum_of_rows(mine: vec4f, local: u32) -> vec4f {
    if (GROUP == LANES) { return mine; }
    // The sum before it may still be read.
    workgroupBarrier();
    return sum_of_column(mine, local);
}

@compute @workgroup_size(GROUP)
fn grad_affine(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let block = workgroup_of(group, groups);
    let begin = block * p.flag;
    if (begin >= p.rows) { return; }
    let last = min(begin + p.flag, p.rows);
    var sums: AffineSums;
    for (var first = begin; first < last; first += GROUP / LANES) {
        grad_row(vec2u(first + local / LANES, local % LANES), last, &sums, local);
    }
    if (SUMS == 0u) { return; }
    for (var i = 0u; i < ITEMS; i++) {
        let of_weight = sum_of_rows(sums.of_weight[i], local);
        var of_bias = vec4f(0.0);
        if (SUMS == 2u) { of_bias = sum_of_rows(sums.of_bias[i], local); }
        let k = local % LANES + LANES * i;
        if (local < LANES && k < p.c / 4u) {
            let at = block * (p.c / 4u) + k;
            if (SUMS < 2u) {
                partials[at] = of_weight;
            } else {
                partials[2u * at] = of_weight;
                partials[2u * at + 1u] = of_bias;
            }
        }
    }
}
