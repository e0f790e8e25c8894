// Squared error of a tensor against a target, and its gradient.
// uses lib/index
//
//   squared_error       parts[r] = (sum_j (x[r, j] - target[r, j])^2, c)
//   squared_error_grad  dx = 2 (x - target)
//
// x, target (n, c) with all trailing dimensions in c, parts (n, 2). squared_error: one
// invocation per row, 8 c bytes each. squared_error_grad: one per element, 12 bytes each.

struct Params { n: u32, c: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;               // (n, c)
@group(0) @binding(1) var<storage, read> wanted: array<f32>;          // (n, c)
@group(0) @binding(2) var<storage, read_write> parts: array<f32>;     // (n, 2)
// Gradients bind x, target, dx.
@group(0) @binding(2) var<storage, read_write> dx: array<f32>;        // (n, c)

@compute @workgroup_size(64)
fn squared_error(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let row = index(id, groups);
    if (row >= p.n) { return; }
    var sum = 0.0;
    for (var j = 0u; j < p.c; j++) {
        let difference = x[row * p.c + j] - wanted[row * p.c + j];
        sum += difference * difference;
    }
    parts[2u * row] = sum;
    parts[2u * row + 1u] = f32(p.c);
}

@compute @workgroup_size(64)
fn squared_error_grad(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let i = index(id, groups);
    if (i < p.n * p.c) { dx[i] = 2.0 * (x[i] - wanted[i]); }
}
