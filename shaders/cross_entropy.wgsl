// Cross-entropy of logits with integer targets, and its gradient.
// uses lib/index
// uses lib/loss
// uses lib/nan
// uses lib/run
//
//   m = max_j x[r, j];  s = sum_j exp(x[r, j] - m);  lse[r] = m + log(s)
//   cross_entropy       parts[r] = (log(s) - (x[r, target - first] - m), 1), or (0, 0) if the
//                       target is not among the columns
//   cross_entropy_grad  dx[r, j] = exp(x[r, j] - lse[r]) - (j == target - first), or 0 if ignored
//
// x (n, v), the columns of the classes from first on; targets (n), parts (n, 2), lse (n). A target
// that is no class is ignored, such as the largest u32.
//
// cross_entropy: one invocation per row, which reads it twice (8 v bytes), so that no sum crosses
// invocations. cross_entropy_group: one workgroup per row of at least 256, which reads it once
// (4 v bytes); m and s are those of what was seen so far (Milakov and Gimelshein 2018), of every
// 256th element by an invocation, then of halves in an order that never changes.
//
// cross_entropy_grad: one invocation per 8 elements of a row, 8 bytes each; cross_entropy_grad4:
// per 8 vectors of 4.

// Gradients bind x, targets, lse, dx.
@group(0) @binding(2) var<storage, read> lse_in: array<f32>;          // (n)
@group(0) @binding(3) var<storage, read_write> dx: array<f32>;        // (n, v)

@compute @workgroup_size(64)
fn cross_entropy(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let row = index(id, groups);
    if (row >= p.n) { return; }
    let first = row * p.v;
    var m = x[first];
    var top = magnitude_of(m);
    for (var j = 1u; j < p.v; j++) {
        let value = x[first + j];
        m = max(m, value);
        top = max(top, magnitude_of(value));
    }
    var s = 0.0;
    for (var j = 0u; j < p.v; j++) { s += exp(x[first + j] - m); }
    store_parts(row, m, log(s), top);
}

var<workgroup> seen: array<vec2f, 256>;     // m, s
var<workgroup> tops: array<u32, 256>;       // largest magnitudes

@compute @workgroup_size(256)
fn cross_entropy_group(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let row = workgroup_of(group, groups);
    if (row >= p.n) { return; }
    let first = row * p.v;
    let own = seen_by(local, first);
    seen[local] = vec2f(own.m, own.s);
    tops[local] = own.top;
    workgroupBarrier();
    for (var width = 128u; width > 0u; width /= 2u) {
        if (local < width) {
            let a = seen[local];
            let b = seen[local + width];
            let larger = max(a.x, b.x);
            let sum = a.y * exp(a.x - larger) + b.y * exp(b.x - larger);
            seen[local] = vec2f(larger, sum);
            tops[local] = max(tops[local], tops[local + width]);
        }
        workgroupBarrier();
    }
    if (local == 0u) { store_parts(row, seen[0].x, log(seen[0].y), tops[0]); }
}

// The factor of a row's exponentials: 1, or NaN if its lse is.
fn factor_of(lse_of_row: f32) -> f32 {
    return nan_where(magnitude_of(lse_of_row) > NAN_ABOVE, 1.0);
}

@compute @workgroup_size(64)
fn cross_entropy_grad(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let i = index(id, groups);
    if (i >= p.n * p.across) { return; }
    let row = i / p.across;
    let counts = targets[row] < p.classes;
    let column = targets[row] - p.first;
    let lse_of_row = lse_in[row];
    let factor = factor_of(lse_of_row);
    let own = run(i % p.across, p.step, p.v);
    for (var j = own.x; j < own.y; j += p.step) {
        let hit = select(0.0, 1.0, j == column);
        let probability = factor * exp(x[row * p.v + j] - lse_of_row);
        dx[row * p.v + j] = select(0.0, probability - hit, counts);
    }
}

@group(0) @binding(0) var<storage, read> x4: array<vec4f>;              // (n, v / 4)
@group(0) @binding(3) var<storage, read_write> dx4: array<vec4f>;       // (n, v / 4)

@compute @workgroup_size(64)
fn cross_entropy_grad4(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let i = index(id, groups);
    if (i >= p.n * p.across) { return; }
    let row = i / p.across;
    let width = p.v / 4u;
    let counts = targets[row] < p.classes;
    let column = targets[row] - p.first;
    let lse_of_row = lse_in[row];
    let factor = factor_of(lse_of_row);
    let own = run(i % p.across, p.step, width);
    for (var j = own.x; j < own.y; j += p.step) {
        let columns = 4u * j + vec4u(0u, 1u, 2u, 3u);
        let hits = select(vec4f(0.0), vec4f(1.0), columns == vec4u(column));
        let probabilities = factor * exp(x4[row * width + j] - lse_of_row);
        dx4[row * width + j] = select(vec4f(0.0), probabilities - hits, counts);
    }
}
