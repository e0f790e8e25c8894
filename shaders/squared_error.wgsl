// Squared error of a tensor against a target, and its gradient.
// uses lib/index
// uses lib/joined
// uses lib/span
//
//   squared_error       parts[r] = (sum_j (x[r, j] - target[r, j])^2, c)
//   squared_error_grad  dx = slope (x - target), where slope = 2 loss_scale
//
// x, target (n, c) with all trailing dimensions in c, parts (n, 2). squared_error: one
// invocation per row, 8 c bytes each; squared_error_group: one workgroup per row, every 256th
// element to an invocation. squared_error_grad: one invocation per 8 elements, 12 bytes each;
// squared_error_grad4: per 4 vectors of 4.

struct Params { n: u32, c: u32, slope: f32 }
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

const GROUP: u32 = 256u;
const LANES: u32 = GROUP;
alias Joined = f32;

fn join(a: Joined, b: Joined) -> Joined {
    return a + b;
}

@compute @workgroup_size(GROUP)
fn squared_error_group(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let row = workgroup_of(group, groups);
    if (row >= p.n) { return; }
    var sum = 0.0;
    for (var j = local; j < p.c; j += GROUP) {
        let difference = x[row * p.c + j] - wanted[row * p.c + j];
        sum += difference * difference;
    }
    sum = joined(sum, local);
    if (local == 0u) {
        parts[2u * row] = sum;
        parts[2u * row + 1u] = f32(p.c);
    }
}

@compute @workgroup_size(64)
fn squared_error_grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.n * p.c);
    for (var i = own.x; i < own.y; i += 64u) {
        dx[i] = p.slope * (x[i] - wanted[i]);
    }
}

@group(0) @binding(0) var<storage, read> x4: array<vec4f>;              // (n c / 4)
@group(0) @binding(1) var<storage, read> wanted4: array<vec4f>;         // (n c / 4)
@group(0) @binding(2) var<storage, read_write> dx4: array<vec4f>;       // (n c / 4)

@compute @workgroup_size(64)
fn squared_error_grad4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.n * p.c / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        dx4[i] = p.slope * (x4[i] - wanted4[i]);
    }
}
