// Elementwise functions of one tensor, and their gradients.
// uses lib/elementwise
// uses lib/index
//
//   relu       y = max(x, 0)                      dx = dy where x > 0, else 0
//   gelu       y = x Phi(x)                       dx = dy (Phi(x) + x phi(x))
//   gelu_tanh  y = x (1 + tanh(u)) / 2            u = sqrt(2/pi) (x + 0.044715 x^3)
//   scale      y = factor x  (+ y, if accumulating)
//
// Phi and phi are the distribution function and the density of the standard normal. One
// invocation per element; 8 bytes moved per element, 12 by gradients.

struct Params { count: u32, factor: f32, accumulate: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;           // (count)
@group(0) @binding(1) var<storage, read_write> y: array<f32>;     // (count)
// Gradients bind x, dy, dx.
@group(0) @binding(1) var<storage, read> dy: array<f32>;          // (count)
@group(0) @binding(2) var<storage, read_write> dx: array<f32>;    // (count)

@compute @workgroup_size(64)
fn relu(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { y[i] = relu_of(x[i]); }
}

@compute @workgroup_size(64)
fn relu_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { dx[i] = relu_grad_of(x[i], dy[i]); }
}

@compute @workgroup_size(64)
fn gelu(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { y[i] = gelu_of(x[i]); }
}

@compute @workgroup_size(64)
fn gelu_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { dx[i] = gelu_grad_of(x[i], dy[i]); }
}

@compute @workgroup_size(64)
fn gelutanh(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { y[i] = gelutanh_of(x[i]); }
}

@compute @workgroup_size(64)
fn gelutanh_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { dx[i] = gelutanh_grad_of(x[i], dy[i]); }
}

@compute @workgroup_size(64)
fn scale(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i >= p.count) { return; }
    if (p.accumulate != 0u) { y[i] += p.factor * x[i]; } else { y[i] = p.factor * x[i]; }
}
