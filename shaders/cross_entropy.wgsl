// Cross-entropy of logits with integer targets, and its gradient.
// uses lib/index
//
//   m = max_j x[r, j];  s = sum_j exp(x[r, j] - m);  lse[r] = m + log(s)
//   cross_entropy       parts[r] = (log(s) - (x[r, target] - m), 1), or (0, 0) if ignored
//   cross_entropy_grad  dx[r, j] = exp(x[r, j] - lse[r]) - (j == target), or 0 if ignored
//
// x (n, v), targets (n), parts (n, 2), lse (n). A target that is no class is ignored: IGNORED is
// the largest u32. cross_entropy: one invocation per row, which reads it twice (8 v bytes), so
// that no sum crosses invocations. cross_entropy_grad: one per element, 8 bytes each.

struct Params { n: u32, v: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;               // (n, v)
@group(0) @binding(1) var<storage, read> targets: array<u32>;         // (n)
@group(0) @binding(2) var<storage, read_write> parts: array<f32>;     // (n, 2)
@group(0) @binding(3) var<storage, read_write> lse: array<f32>;       // (n)
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
    for (var j = 1u; j < p.v; j++) { m = max(m, x[first + j]); }
    var s = 0.0;
    for (var j = 0u; j < p.v; j++) { s += exp(x[first + j] - m); }
    let log_s = log(s);
    lse[row] = m + log_s;
    let class_of_row = targets[row];
    if (class_of_row < p.v) {
        parts[2u * row] = log_s - (x[first + class_of_row] - m);
        parts[2u * row + 1u] = 1.0;
    } else {
        parts[2u * row] = 0.0;
        parts[2u * row + 1u] = 0.0;
    }
}

@compute @workgroup_size(64)
fn cross_entropy_grad(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let i = index(id, groups);
    if (i >= p.n * p.v) { return; }
    let row = i / p.v;
    let class_of_row = targets[row];
    if (class_of_row < p.v) {
        dx[i] = exp(x[i] - lse_in[row]) - select(0.0, 1.0, i % p.v == class_of_row);
    } else {
        dx[i] = 0.0;
    }
}
