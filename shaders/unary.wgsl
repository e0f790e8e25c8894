// Elementwise functions of one tensor, and their gradients.
// uses lib/span
//
//   values      y = f(x)
//   gradients   dx = grad(x, dy)
//   scale       y = factor x  (+ y, if accumulating)
//
// One invocation per 8 elements, 8 bytes moved per element, 12 by gradients. Names that end in 4:
// one per 4 vectors of 4, where count is a multiple of 4.
//
// Prepended (src/kernels/ops/unary.rs, from the table in src/graph/elements.rs): `f(x)` and
// `grad(x, dy)`, a function and its gradient.

struct Params { count: u32, factor: f32, accumulate: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;           // (count)
@group(0) @binding(1) var<storage, read_write> y: array<f32>;     // (count)
// Gradients bind x, dy, dx.
@group(0) @binding(1) var<storage, read> dy: array<f32>;          // (count)
@group(0) @binding(2) var<storage, read_write> dx: array<f32>;    // (count)

@compute @workgroup_size(64)
fn values(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        y[i] = f(x[i]);
    }
}

@compute @workgroup_size(64)
fn gradients(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        dx[i] = grad(x[i], dy[i]);
    }
}

@compute @workgroup_size(64)
fn scale(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        if (p.accumulate != 0u) { y[i] += p.factor * x[i]; } else { y[i] = p.factor * x[i]; }
    }
}

@group(0) @binding(0) var<storage, read> x4: array<vec4f>;        // (count / 4)
@group(0) @binding(1) var<storage, read_write> y4: array<vec4f>;  // (count / 4)
@group(0) @binding(1) var<storage, read> dy4: array<vec4f>;       // (count / 4)
@group(0) @binding(2) var<storage, read_write> dx4: array<vec4f>; // (count / 4)

@compute @workgroup_size(64)
fn values4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let v = x4[i];
        y4[i] = vec4f(f(v.x), f(v.y), f(v.z), f(v.w));
    }
}

@compute @workgroup_size(64)
fn gradients4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let v = x4[i];
        let d = dy4[i];
        dx4[i] = vec4f(grad(v.x, d.x), grad(v.y, d.y), grad(v.z, d.z), grad(v.w, d.w));
    }
}

@compute @workgroup_size(64)
fn scale4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        if (p.accumulate != 0u) { y4[i] += p.factor * x4[i]; } else { y4[i] = p.factor * x4[i]; }
    }
}
