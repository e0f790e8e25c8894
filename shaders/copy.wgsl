// Moves elements between tensors of other layouts: permutes, slices, pads and concatenations.
// uses lib/index
// uses lib/run
//
//   y[y_base + i . y_strides] = x[x_base + (i - (0, .., 0, begin)) . x_strides]
//                               where begin <= i_last < end, else 0
//
// over all 5-dimensional i below dims, the last of which is separate from the other four (outer).
// One invocation per 8 elements of a run along the last dimension; divisions cost more than the
// moves. 8 bytes moved per element. strided4 moves vectors of 4 elements, and all its parameters
// count vectors: where runs, steps and bases are multiples of 4 and x's elements are neighbours.

struct Params {
    outer: vec4u,
    x_outer_strides: vec4u,
    y_outer_strides: vec4u,
    count: u32,             // invocations: across times the product of outer
    across: u32,            // invocations per run
    last: u32,
    x_stride: u32,          // of the last dimension; y's is 1
    x_base: u32,
    y_base: u32,
    begin: u32,
    end: u32,
    step: u32,              // elements from one of an invocation to its next
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(64)
fn strided(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let task = index(id, groups);
    if (task >= p.count) { return; }
    let own = run(task % p.across, p.step, p.last);
    var rest = task / p.across;
    var i: vec4u;
    i.w = rest % p.outer.w;
    rest /= p.outer.w;
    i.z = rest % p.outer.z;
    rest /= p.outer.z;
    i.y = rest % p.outer.y;
    i.x = rest / p.outer.y;
    let x_start = p.x_base + dot(i, p.x_outer_strides);
    let y_start = p.y_base + dot(i, p.y_outer_strides);
    for (var last = own.x; last < own.y; last += p.step) {
        var value = 0.0;
        if (last >= p.begin && last < p.end) {
            value = x[x_start + (last - p.begin) * p.x_stride];
        }
        y[y_start + last] = value;
    }
}

@group(0) @binding(0) var<storage, read> x4: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> y4: array<vec4f>;

@compute @workgroup_size(64)
fn strided4(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let task = index(id, groups);
    if (task >= p.count) { return; }
    let own = run(task % p.across, p.step, p.last);
    var rest = task / p.across;
    var i: vec4u;
    i.w = rest % p.outer.w;
    rest /= p.outer.w;
    i.z = rest % p.outer.z;
    rest /= p.outer.z;
    i.y = rest % p.outer.y;
    i.x = rest / p.outer.y;
    let x_start = p.x_base + dot(i, p.x_outer_strides);
    let y_start = p.y_base + dot(i, p.y_outer_strides);
    for (var last = own.x; last < own.y; last += p.step) {
        var value = vec4f(0.0);
        if (last >= p.begin && last < p.end) {
            value = x4[x_start + (last - p.begin) * p.x_stride];
        }
        y4[y_start + last] = value;
    }
}
