// Stochastic gradient descent over a range of a bucket.
// uses lib/index
//
//   g = scale gradient + decay parameter        decay for elements before decay_end, else 0
//   sgd_plain     parameter -= lr g
//   sgd_momentum  m = momentum m + g;  parameter -= lr m
//
// One invocation per element of start .. start + length; 12 bytes moved, 20 with momentum.

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

// The place within the range.
fn gradient(i: u32) -> f32 {
    let g = p.scale * gradients[i];
    if (i < p.decay_end) { return g + p.decay * parameters[i]; }
    return g;
}

@compute @workgroup_size(64)
fn sgd_plain(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.length) { return; }
    let i = p.start + at;
    parameters[i] -= p.lr * gradient(i);
}

@compute @workgroup_size(64)
fn sgd_momentum(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let at = index(id, groups);
    if (at >= p.length) { return; }
    let i = p.start + at;
    let average = p.momentum * m[i] + gradient(i);
    m[i] = average;
    parameters[i] -= p.lr * average;
}
