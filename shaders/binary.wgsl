// Elementwise functions of two tensors, the second broadcast over the leading dimensions.
// uses lib/span
//
//   y[i] = f(a[i], b[i mod period])          gradients   d[i] = grad(a[i], b[i mod period], dy[i])
//
// One workgroup of 64 per 512 elements, 8 per invocation, because software adapters pay more for
// an invocation than for an element; 8 bytes moved per element and 4 per element of b. Names that
// end in 4: 4 vectors of 4 per invocation, where count and period are multiples of 4, or b is one
// value (value4). Prepended (src/kernels/ops/binary.rs, from the table in src/graph/elements.rs): f
// and a gradient, and f4 and grad4 of vectors.

struct Params {
    count: u32,
    period: u32,
    stride: u32,            // 64 mod period
    stride4: u32,           // 64 mod (period / 4), for vectors
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> a: array<f32>;           // (count)
@group(0) @binding(1) var<storage, read> b: array<f32>;           // (period)
@group(0) @binding(2) var<storage, read_write> y: array<f32>;     // (count)

// The elements of an invocation are first, first + 64, .. below end, so that neighbouring
// invocations touch neighbouring elements.
fn first(group: vec3u, groups: vec3u, local: u32) -> u32 {
    return workgroup_of(group, groups) * 512u + local;
}

fn end(first: u32) -> u32 {
    return min(first + 512u, p.count);
}

// The index into b for the element that comes 64 after that of index j.
fn next(j: u32) -> u32 {
    let after = j + p.stride;
    return select(after, after - p.period, after >= p.period);
}

@compute @workgroup_size(64)
fn each(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let start = first(group, groups, local);
    var j = start % p.period;
    for (var i = start; i < end(start); i += 64u) {
        y[i] = f(a[i], b[j]);
        j = next(j);
    }
}

// gradients bind a, b, dy, d.
@group(0) @binding(2) var<storage, read> dy: array<f32>;          // (count)
@group(0) @binding(3) var<storage, read_write> d: array<f32>;     // (count)

@compute @workgroup_size(64)
fn gradients(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let start = first(group, groups, local);
    var j = start % p.period;
    for (var i = start; i < end(start); i += 64u) {
        d[i] = grad(a[i], b[j], dy[i]);
        j = next(j);
    }
}

@group(0) @binding(0) var<storage, read> a4: array<vec4f>;        // (count / 4)
@group(0) @binding(1) var<storage, read> b4: array<vec4f>;        // (period / 4)
@group(0) @binding(2) var<storage, read_write> y4: array<vec4f>;  // (count / 4)
@group(0) @binding(2) var<storage, read> dy4: array<vec4f>;       // (count / 4)
@group(0) @binding(3) var<storage, read_write> d4: array<vec4f>;  // (count / 4)

// The index into b4 for the vector that comes 64 after that of index j.
fn next4(j: u32) -> u32 {
    let after = j + p.stride4;
    return select(after, after - p.period / 4u, after >= p.period / 4u);
}

@compute @workgroup_size(64)
fn each4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    var j = own.x % (p.period / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        y4[i] = f4(a4[i], b4[j]);
        j = next4(j);
    }
}

@compute @workgroup_size(64)
fn value4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    let value = vec4f(b[0]);
    for (var i = own.x; i < own.y; i += 64u) { y4[i] = f4(a4[i], value); }
}

@compute @workgroup_size(64)
fn gradients4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    var j = own.x % (p.period / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        d4[i] = grad4(a4[i], b4[j], dy4[i]);
        j = next4(j);
    }
}

@compute @workgroup_size(64)
fn gradients_value4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    let value = vec4f(b[0]);
    for (var i = own.x; i < own.y; i += 64u) { d4[i] = grad4(a4[i], value, dy4[i]); }
}
