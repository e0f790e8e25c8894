// Layer normalization with one workgroup of GROUP invocations per row; the formulas are those of
// layer_norm.wgsl.
//
//   forward  keeps the row in workgroup memory, so that mean and variance around it cost one read
//   grad     keeps g = weight dy and xhat
//
// 8 bytes per element moved (12 by grad), each once. Prepended constants: GROUP; the width C, for
// which a row must fit in workgroup memory; ADDS, which is not 0 if grad adds a residual; CENTERED,
// which is 0 if there is no mean. Sums are of every GROUP-th element, then over invocations.
// uses lib/joined

struct Params { rows: u32, c: u32, eps: f32, flag: u32 }
// `flag`: forward adds a bias.
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;                // (rows, C)
// forward binds x, weight, bias (weight again if there is none), y, stats.
@group(0) @binding(1) var<storage, read> weight: array<f32>;             // (C)
@group(0) @binding(2) var<storage, read> bias: array<f32>;             // (C)
@group(0) @binding(3) var<storage, read_write> y: array<f32>;          // (rows, C)
@group(0) @binding(4) var<storage, read_write> new_stats: array<f32>;  // (rows, 2): mean, rstd
// grad binds x, weight, stats, dy, dx, residual (dy again if there is none).
@group(0) @binding(2) var<storage, read> stats: array<f32>;            // (rows, 2)
@group(0) @binding(3) var<storage, read> dy: array<f32>;               // (rows, C)
@group(0) @binding(4) var<storage, read_write> dx: array<f32>;         // (rows, C)
@group(0) @binding(5) var<storage, read> residual: array<f32>;         // (rows, C)

var<workgroup> kept: array<f32, C>;
var<workgroup> kept_g: array<f32, C>;

const LANES: u32 = GROUP;
alias Joined = vec2f;

fn join(a: Joined, b: Joined) -> Joined {
    return a + b;
}

@compute @workgroup_size(GROUP)
fn forward(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let row = workgroup_of(group, groups);
    if (row >= p.rows) { return; }
    let start = row * C;

    var part = 0.0;
    for (var k = local; k < C; k += GROUP) {
        let value = x[start + k];
        kept[k] = value;
        part += value;
    }
    var mean = 0.0;
    if (CENTERED != 0u) { mean = joined(vec2f(part, 0.0), local).x / f32(C); }

    part = 0.0;
    for (var k = local; k < C; k += GROUP) {
        let centered = kept[k] - mean;
        part += centered * centered;
    }
    let rstd = 1.0 / sqrt(joined(vec2f(part, 0.0), local).x / f32(C) + p.eps);

    for (var k = local; k < C; k += GROUP) {
        var value = (kept[k] - mean) * rstd * weight[k];
        if (p.flag != 0u) { value += bias[k]; }
        y[start + k] = value;
    }
    if (local == 0u) {
        new_stats[2u * row] = mean;
        new_stats[2u * row + 1u] = rstd;
    }
}

@compute @workgroup_size(GROUP)
fn grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let row = workgroup_of(group, groups);
    if (row >= p.rows) { return; }
    let start = row * C;
    let mean = stats[2u * row];
    let rstd = stats[2u * row + 1u];

    var part = vec2f(0.0);  // of g, and of g xhat
    for (var k = local; k < C; k += GROUP) {
        let xhat = (x[start + k] - mean) * rstd;
        let g = weight[k] * dy[start + k];
        kept[k] = xhat;
        kept_g[k] = g;
        part += vec2f(g, g * xhat);
    }
    var means = joined(part, local) / f32(C);
    if (CENTERED == 0u) { means.x = 0.0; }
    for (var k = local; k < C; k += GROUP) {
        var value = rstd * (kept_g[k] - means.x - kept[k] * means.y);
        if (ADDS != 0u) { value += residual[start + k]; }
        dx[start + k] = value;
    }
}
