// Elementwise functions of one tensor, and their gradients.
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

// The error function by 7.1.26 of Abramowitz and Stegun, |error| < 1.5e-7.
fn erf(v: f32) -> f32 {
    let a = abs(v);
    let t = 1.0 / (1.0 + 0.3275911 * a);
    let poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
        + 0.254829592) * t;
    return sign(v) * (1.0 - poly * exp(-a * a));
}

fn gelu_tanh_inner(v: f32) -> f32 {
    // Beyond 10 the tanh is 1 in f32, and some drivers overflow in its exponentials.
    return clamp(0.7978845608 * (v + 0.044715 * v * v * v), -10.0, 10.0);
}

@compute @workgroup_size(64)
fn relu(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { y[i] = max(x[i], 0.0); }
}

@compute @workgroup_size(64)
fn relu_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { dx[i] = select(0.0, dy[i], x[i] > 0.0); }
}

@compute @workgroup_size(64)
fn gelu(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { y[i] = 0.5 * x[i] * (1.0 + erf(x[i] * 0.7071067812)); }
}

@compute @workgroup_size(64)
fn gelu_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i >= p.count) { return; }
    let v = x[i];
    let distribution = 0.5 * (1.0 + erf(v * 0.7071067812));
    let density = 0.3989422804 * exp(-0.5 * v * v);
    dx[i] = dy[i] * (distribution + v * density);
}

@compute @workgroup_size(64)
fn gelutanh(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.count) { y[i] = 0.5 * x[i] * (1.0 + tanh(gelu_tanh_inner(x[i]))); }
}

@compute @workgroup_size(64)
fn gelutanh_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i >= p.count) { return; }
    let v = x[i];
    let th = tanh(gelu_tanh_inner(v));
    let slope = 0.7978845608 * (1.0 + 3.0 * 0.044715 * v * v);
    dx[i] = dy[i] * (0.5 * (1.0 + th) + 0.5 * v * (1.0 - th * th) * slope);
}

@compute @workgroup_size(64)
fn scale(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i >= p.count) { return; }
    if (p.accumulate != 0u) { y[i] += p.factor * x[i]; } else { y[i] = p.factor * x[i]; }
}
