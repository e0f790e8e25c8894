// Adam with decoupled weight decay (Loshchilov and Hutter 2019) over a range of a bucket.
// uses lib/span
//
//   g = scale gradient
//   parameter -= decay parameter                decay = lr weight_decay before decay_end, else 0
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   parameter -= lr (m / correction1) / (sqrt(v / correction2) + eps)
//
// adamw: one invocation per 8 elements of start .. start + length, 28 bytes moved each. adamw4: per
// 4 vectors of 4, where start and length are multiples of 4.

struct Params {
    start: u32,
    length: u32,
    decay_end: u32,
    scale: f32,
    decay: f32,
    beta1: f32,
    rest1: f32,           // 1 - beta1
    beta2: f32,
    rest2: f32,           // 1 - beta2
    rate: f32,            // lr / correction1
    correction2: f32,
    eps: f32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> gradients: array<f32>;            // (bucket)
@group(0) @binding(1) var<storage, read_write> parameters: array<f32>;     // (bucket)
@group(0) @binding(2) var<storage, read_write> m: array<f32>;              // (bucket)
@group(0) @binding(3) var<storage, read_write> v: array<f32>;              // (bucket)

@compute @workgroup_size(64)
fn adamw(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.length);
    for (var at = own.x; at < own.y; at += 64u) {
        let i = p.start + at;
        let g = p.scale * gradients[i];
        let average = p.beta1 * m[i] + p.rest1 * g;
        let square = p.beta2 * v[i] + p.rest2 * g * g;
        m[i] = average;
        v[i] = square;
        var parameter = parameters[i];
        if (i < p.decay_end) { parameter -= p.decay * parameter; }
        parameters[i] = parameter - p.rate * average / (sqrt(square / p.correction2) + p.eps);
    }
}

@group(0) @binding(0) var<storage, read> gradients4: array<vec4f>;         // (bucket / 4)
@group(0) @binding(1) var<storage, read_write> parameters4: array<vec4f>;  // (bucket / 4)
@group(0) @binding(2) var<storage, read_write> m4: array<vec4f>;           // (bucket / 4)
@group(0) @binding(3) var<storage, read_write> v4: array<vec4f>;           // (bucket / 4)

@compute @workgroup_size(64)
fn adamw4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.length / 4u);
    for (var at = own.x; at < own.y; at += 64u) {
        let i = p.start / 4u + at;
        let g = p.scale * gradients4[i];
        let average = p.beta1 * m4[i] + p.rest1 * g;
        let square = p.beta2 * v4[i] + p.rest2 * g * g;
        m4[i] = average;
        v4[i] = square;
        var parameter = parameters4[i];
        let decays = 4u * i + vec4u(0u, 1u, 2u, 3u) < vec4u(p.decay_end);
        parameter -= select(vec4f(0.0), vec4f(p.decay), decays) * parameter;
        parameters4[i] = parameter - p.rate * average / (sqrt(square / p.correction2) + p.eps);
    }
}
