// Adam with decoupled weight decay (Loshchilov and Hutter 2019) over a range of a bucket.
// uses lib/index
//
//   g = scale gradient
//   parameter -= decay parameter                decay = lr weight_decay before decay_end, else 0
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   parameter -= lr (m / correction1) / (sqrt(v / correction2) + eps)
//
// One invocation per element of start .. start + length; 28 bytes moved.

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
fn adamw(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.length) { return; }
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
