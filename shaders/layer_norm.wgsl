// Layer normalization of rows of c values, and its gradients (Ba, Kiros, Hinton 2016).
// uses lib/index
//
//   forward    y = gain (x - mean) r + bias       r = 1 / sqrt(variance + eps)
//   grad       dx = r (g - mean(g) - xhat mean(g xhat))     g = gain dy, xhat = (x - mean) r
//   gain_grad  dgain = sum over rows of dy xhat   (+ dgain, if accumulating)
//
// The variance is taken around the mean in a second pass over the row, so that it is right also
// where the mean is large. Long sums are sums of sums over 64 values, to round less.
//
// forward and grad: one invocation per row, 8 bytes per element moved (12 by grad) and as many
// again from the cache. gain_grad: one invocation per column, 8 bytes per element.

struct Params { rows: u32, c: u32, eps: f32, flag: u32 }
// `flag`: forward adds a bias; gain_grad adds to what dgain holds.
var<immediate> p: Params;

const BLOCK: u32 = 64u;

@group(0) @binding(0) var<storage, read> x: array<f32>;              // (rows, c)
// forward binds x, gain, bias (gain again if there is none), y, stats.
@group(0) @binding(1) var<storage, read> gain: array<f32>;           // (c)
@group(0) @binding(2) var<storage, read> bias: array<f32>;           // (c)
@group(0) @binding(3) var<storage, read_write> y: array<f32>;        // (rows, c)
@group(0) @binding(4) var<storage, read_write> new_stats: array<f32>;  // (rows, 2): mean, r
// grad binds x, gain, stats, dy, dx.
@group(0) @binding(2) var<storage, read> stats: array<f32>;          // (rows, 2)
@group(0) @binding(3) var<storage, read> dy: array<f32>;             // (rows, c)
@group(0) @binding(4) var<storage, read_write> dx: array<f32>;       // (rows, c)
// gain_grad binds x, stats, dy, dgain.
@group(0) @binding(1) var<storage, read> row_stats: array<f32>;      // (rows, 2)
@group(0) @binding(2) var<storage, read> dy_in: array<f32>;          // (rows, c)
@group(0) @binding(3) var<storage, read_write> dgain: array<f32>;    // (c)

@compute @workgroup_size(64)
fn forward(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let row = index(id, groups);
    if (row >= p.rows) { return; }
    let start = row * p.c;
    let end = start + p.c;

    var total = 0.0;
    for (var block = start; block < end; block += BLOCK) {
        var part = 0.0;
        for (var i = block; i < min(block + BLOCK, end); i++) { part += x[i]; }
        total += part;
    }
    let mean = total / f32(p.c);

    var squares = 0.0;
    for (var block = start; block < end; block += BLOCK) {
        var part = 0.0;
        for (var i = block; i < min(block + BLOCK, end); i++) {
            let centered = x[i] - mean;
            part += centered * centered;
        }
        squares += part;
    }
    let r = 1.0 / sqrt(squares / f32(p.c) + p.eps);

    for (var k = 0u; k < p.c; k++) {
        var value = (x[start + k] - mean) * r * gain[k];
        if (p.flag != 0u) { value += bias[k]; }
        y[start + k] = value;
    }
    new_stats[2u * row] = mean;
    new_stats[2u * row + 1u] = r;
}

@compute @workgroup_size(64)
fn grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let row = index(id, groups);
    if (row >= p.rows) { return; }
    let start = row * p.c;
    let mean = stats[2u * row];
    let r = stats[2u * row + 1u];

    var sums = vec2f(0.0);  // of g, and of g xhat
    for (var block = 0u; block < p.c; block += BLOCK) {
        var part = vec2f(0.0);
        for (var k = block; k < min(block + BLOCK, p.c); k++) {
            let g = gain[k] * dy[start + k];
            part += vec2f(g, g * (x[start + k] - mean) * r);
        }
        sums += part;
    }
    let means = sums / f32(p.c);

    for (var k = 0u; k < p.c; k++) {
        let xhat = (x[start + k] - mean) * r;
        dx[start + k] = r * (gain[k] * dy[start + k] - means.x - xhat * means.y);
    }
}

@compute @workgroup_size(64)
fn gain_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let column = index(id, groups);
    if (column >= p.c) { return; }
    var total = 0.0;
    for (var block = 0u; block < p.rows; block += BLOCK) {
        var part = 0.0;
        for (var row = block; row < min(block + BLOCK, p.rows); row++) {
            let xhat = (x[row * p.c + column] - row_stats[2u * row]) * row_stats[2u * row + 1u];
            part += dy_in[row * p.c + column] * xhat;
        }
        total += part;
    }
    if (p.flag != 0u) { total += dgain[column]; }
    dgain[column] = total;
}
