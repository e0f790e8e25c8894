// Stochastic gradient descent over a range of a bucket.
// uses lib/span
//
//   g = scale gradient + decay parameter        decay for elements before decay_end, else 0
//   sgd_plain     parameter -= lr g
//   sgd_momentum  m = momentum m + g;  parameter -= lr m
//
// One invocation per 8 elements of start .. start + length, 12 bytes moved each, 20 with momentum;
// sgd_plain4 and sgd_momentum4: per 4 vectors of 4, where start and length are multiples of 4.

struct Params {
    start: u32,
    length: u32,
    decay_end: u32,
    scale: f32,
    lr: f32,
    momentum: f32,
    decay: f32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> gradients: array<f32>;            // (bucket)
@group(0) @binding(1) var<storage, read_write> parameters: array<f32>;     // (bucket)
@group(0) @binding(2) var<storage, read_write> m: array<f32>;              // (bucket)

fn gradient(i: u32) -> f32 {
    let g = p.scale * gradients[i];
    if (i < p.decay_end) { return g + p.decay * parameters[i]; }
    return g;
}

@compute @workgroup_size(64)
fn sgd_plain(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.length);
    for (var at = own.x; at < own.y; at += 64u) {
        let i = p.start + at;
        parameters[i] -= p.lr * gradient(i);
    }
}

@compute @workgroup_size(64)
fn sgd_momentum(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.length);
    for (var at = own.x; at < own.y; at += 64u) {
        let i = p.start + at;
        let average = p.momentum * m[i] + gradient(i);
        m[i] = average;
        parameters[i] -= p.lr * average;
    }
}

@group(0) @binding(0) var<storage, read> gradients4: array<vec4f>;         // (bucket / 4)
@group(0) @binding(1) var<storage, read_write> parameters4: array<vec4f>;  // (bucket / 4)
@group(0) @binding(2) var<storage, read_write> m4: array<vec4f>;           // (bucket / 4)

fn gradient4(i: u32) -> vec4f {
    let decays = 4u * i + vec4u(0u, 1u, 2u, 3u) < vec4u(p.decay_end);
    let decay = select(vec4f(0.0), vec4f(p.decay), decays);
    return p.scale * gradients4[i] + decay * parameters4[i];
}

@compute @workgroup_size(64)
fn sgd_plain4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.length / 4u);
    for (var at = own.x; at < own.y; at += 64u) {
        let i = p.start / 4u + at;
        parameters4[i] -= p.lr * gradient4(i);
    }
}

@compute @workgroup_size(64)
fn sgd_momentum4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.length / 4u);
    for (var at = own.x; at < own.y; at += 64u) {
        let i = p.start / 4u + at;
        let average = p.momentum * m4[i] + gradient4(i);
        m4[i] = average;
        parameters4[i] -= p.lr * average;
    }
}
