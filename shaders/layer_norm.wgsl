// Layer normalization of rows of c values, and its gradient (Ba, Kiros, Hinton 2016); without a
// mean, if CENTERED is 0, the root mean square normalization (Zhang and Sennrich 2019).
// uses lib/index
//
//   forward   y = weight (x - mean) rstd + bias     rstd = 1 / sqrt(variance + eps)
//   grad      dx = rstd (g - mean(g) - xhat mean(g xhat))
//             with g = weight dy, xhat = (x - mean) rstd  (+ residual, if ADDS is not 0)
//
// The gradients of weight and bias are sums over rows (shaders/row_sums.wgsl).
//
// The variance is taken around the mean in a second pass over the row, so that it is right also
// where the mean is large. Long sums are sums of sums over 64 values, to round less.
//
// One invocation per row, 8 bytes per element moved (12 by grad) and as many again from the cache.
// forward4 and grad4 work on vectors of 4 neighbouring values, where c is a multiple of 4, because
// a vector costs a software adapter little more than a value.

// ADDS and CENTERED are prepended.

struct Params { rows: u32, c: u32, eps: f32, flag: u32 }
// `flag`: forward adds a bias.
var<immediate> p: Params;

const BLOCK: u32 = 64u;

@group(0) @binding(0) var<storage, read> x: array<f32>;              // (rows, c)
// forward binds x, weight, bias (weight again if there is none), y, stats.
@group(0) @binding(1) var<storage, read> weight: array<f32>;           // (c)
@group(0) @binding(2) var<storage, read> bias: array<f32>;           // (c)
@group(0) @binding(3) var<storage, read_write> y: array<f32>;        // (rows, c)
@group(0) @binding(4) var<storage, read_write> new_stats: array<f32>;  // (rows, 2): mean, rstd
// grad binds x, weight, stats, dy, dx, residual (dy again if there is none).
@group(0) @binding(2) var<storage, read> stats: array<f32>;          // (rows, 2)
@group(0) @binding(3) var<storage, read> dy: array<f32>;             // (rows, c)
@group(0) @binding(4) var<storage, read_write> dx: array<f32>;       // (rows, c)
@group(0) @binding(5) var<storage, read> residual: array<f32>;       // (rows, c)

@compute @workgroup_size(64)
fn forward(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let row = index(id, groups);
    if (row >= p.rows) { return; }
    let start = row * p.c;
    let end = start + p.c;

    var mean = 0.0;
    if (CENTERED != 0u) {
        var total = 0.0;
        for (var block = start; block < end; block += BLOCK) {
            var part = 0.0;
            for (var i = block; i < min(block + BLOCK, end); i++) { part += x[i]; }
            total += part;
        }
        mean = total / f32(p.c);
    }

    var squares = 0.0;
    for (var block = start; block < end; block += BLOCK) {
        var part = 0.0;
        for (var i = block; i < min(block + BLOCK, end); i++) {
            let centered = x[i] - mean;
            part += centered * centered;
        }
        squares += part;
    }
    let rstd = 1.0 / sqrt(squares / f32(p.c) + p.eps);

    for (var k = 0u; k < p.c; k++) {
        var value = (x[start + k] - mean) * rstd * weight[k];
        if (p.flag != 0u) { value += bias[k]; }
        y[start + k] = value;
    }
    new_stats[2u * row] = mean;
    new_stats[2u * row + 1u] = rstd;
}

@compute @workgroup_size(64)
fn grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let row = index(id, groups);
    if (row >= p.rows) { return; }
    let start = row * p.c;
    let mean = stats[2u * row];
    let rstd = stats[2u * row + 1u];

    var sums = vec2f(0.0);  // of g, and of g xhat
    for (var block = 0u; block < p.c; block += BLOCK) {
        var part = vec2f(0.0);
        for (var k = block; k < min(block + BLOCK, p.c); k++) {
            let g = weight[k] * dy[start + k];
            part += vec2f(g, g * (x[start + k] - mean) * rstd);
        }
        sums += part;
    }
    var means = sums / f32(p.c);
    if (CENTERED == 0u) { means.x = 0.0; }

    for (var k = 0u; k < p.c; k++) {
        let xhat = (x[start + k] - mean) * rstd;
        var value = rstd * (weight[k] * dy[start + k] - means.x - xhat * means.y);
        if (ADDS != 0u) { value += residual[start + k]; }
        dx[start + k] = value;
    }
}

@group(0) @binding(0) var<storage, read> x4: array<vec4f>;             // (rows, c / 4)
@group(0) @binding(1) var<storage, read> weight4: array<vec4f>;          // (c / 4)
@group(0) @binding(2) var<storage, read> bias4: array<vec4f>;          // (c / 4)
@group(0) @binding(3) var<storage, read_write> y4: array<vec4f>;       // (rows, c / 4)
@group(0) @binding(3) var<storage, read> dy4: array<vec4f>;            // (rows, c / 4)
@group(0) @binding(4) var<storage, read_write> dx4: array<vec4f>;      // (rows, c / 4)
@group(0) @binding(5) var<storage, read> residual4: array<vec4f>;      // (rows, c / 4)

fn sum4(v: vec4f) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}

@compute @workgroup_size(64)
fn forward4(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let row = index(id, groups);
    if (row >= p.rows) { return; }
    let width = p.c / 4u;
    let start = row * width;
    let end = start + width;

    var mean = 0.0;
    if (CENTERED != 0u) {
        var totals = vec4f(0.0);
        for (var i = start; i < end; i++) { totals += x4[i]; }
        mean = sum4(totals) / f32(p.c);
    }

    var squares = vec4f(0.0);
    for (var i = start; i < end; i++) {
        let centered = x4[i] - mean;
        squares += centered * centered;
    }
    let rstd = 1.0 / sqrt(sum4(squares) / f32(p.c) + p.eps);

    if (p.flag != 0u) {
        for (var k = 0u; k < width; k++) {
            y4[start + k] = (x4[start + k] - mean) * rstd * weight4[k] + bias4[k];
        }
    } else {
        for (var k = 0u; k < width; k++) {
            y4[start + k] = (x4[start + k] - mean) * rstd * weight4[k];
        }
    }
    new_stats[2u * row] = mean;
    new_stats[2u * row + 1u] = rstd;
}

@compute @workgroup_size(64)
fn grad4(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let row = index(id, groups);
    if (row >= p.rows) { return; }
    let width = p.c / 4u;
    let start = row * width;
    let mean = stats[2u * row];
    let rstd = stats[2u * row + 1u];

    var sums = vec4f(0.0);          // of g
    var products = vec4f(0.0);      // of g xhat
    for (var k = 0u; k < width; k++) {
        let g = weight4[k] * dy4[start + k];
        sums += g;
        products += g * (x4[start + k] - mean) * rstd;
    }
    var mean_g = 0.0;
    if (CENTERED != 0u) { mean_g = sum4(sums) / f32(p.c); }
    let mean_g_xhat = sum4(products) / f32(p.c);

    for (var k = 0u; k < width; k++) {
        let xhat = (x4[start + k] - mean) * rstd;
        var value = rstd * (weight4[k] * dy4[start + k] - mean_g - xhat * mean_g_xhat);
        if (ADDS != 0u) { value += residual4[start + k]; }
        dx4[start + k] = value;
    }
}
