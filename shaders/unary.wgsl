// Elementwise functions of one tensor, and their gradients.
// uses lib/elementwise
// uses lib/span
//
//   relu       y = max(x, 0)                      dx = dy where x > 0, else 0 (NaN where x is)
//   gelu       y = x Phi(x)                       dx = dy (Phi(x) + x phi(x))
//   gelu_tanh  y = x (1 + tanh(u)) / 2            u = sqrt(2/pi) (x + 0.044715 x^3)
//   scale      y = factor x  (+ y, if accumulating)
//
// Phi and phi are the distribution function and the density of the standard normal. One
// invocation per 8 elements, 8 bytes moved per element, 12 by gradients. Names that end in 4: one
// per 4 vectors of 4, where count is a multiple of 4.

struct Params { count: u32, factor: f32, accumulate: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;           // (count)
@group(0) @binding(1) var<storage, read_write> y: array<f32>;     // (count)
// Gradients bind x, dy, dx.
@group(0) @binding(1) var<storage, read> dy: array<f32>;          // (count)
@group(0) @binding(2) var<storage, read_write> dx: array<f32>;    // (count)

@compute @workgroup_size(64)
fn relu(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        y[i] = relu_of(x[i]);
    }
}

@compute @workgroup_size(64)
fn relu_grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        dx[i] = relu_grad_of(x[i], dy[i]);
    }
}

@compute @workgroup_size(64)
fn gelu(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        y[i] = gelu_of(x[i]);
    }
}

@compute @workgroup_size(64)
fn gelu_grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        dx[i] = gelu_grad_of(x[i], dy[i]);
    }
}

@compute @workgroup_size(64)
fn gelutanh(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        y[i] = gelutanh_of(x[i]);
    }
}

@compute @workgroup_size(64)
fn gelutanh_grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        dx[i] = gelutanh_grad_of(x[i], dy[i]);
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
fn relu4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let v = x4[i];
        y4[i] = vec4f(relu_of(v.x), relu_of(v.y), relu_of(v.z), relu_of(v.w));
    }
}

@compute @workgroup_size(64)
fn relu_grad4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let v = x4[i];
        let d = dy4[i];
        let front = vec2f(relu_grad_of(v.x, d.x), relu_grad_of(v.y, d.y));
        dx4[i] = vec4f(front, relu_grad_of(v.z, d.z), relu_grad_of(v.w, d.w));
    }
}

@compute @workgroup_size(64)
fn gelu4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let v = x4[i];
        y4[i] = vec4f(gelu_of(v.x), gelu_of(v.y), gelu_of(v.z), gelu_of(v.w));
    }
}

@compute @workgroup_size(64)
fn gelu_grad4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let v = x4[i];
        let d = dy4[i];
        let front = vec2f(gelu_grad_of(v.x, d.x), gelu_grad_of(v.y, d.y));
        dx4[i] = vec4f(front, gelu_grad_of(v.z, d.z), gelu_grad_of(v.w, d.w));
    }
}

@compute @workgroup_size(64)
fn gelutanh4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let v = x4[i];
        y4[i] = vec4f(gelutanh_of(v.x), gelutanh_of(v.y), gelutanh_of(v.z), gelutanh_of(v.w));
    }
}

@compute @workgroup_size(64)
fn gelutanh_grad4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let v = x4[i];
        let d = dy4[i];
        let front = vec2f(gelutanh_grad_of(v.x, d.x), gelutanh_grad_of(v.y, d.y));
        dx4[i] = vec4f(front, gelutanh_grad_of(v.z, d.z), gelutanh_grad_of(v.w, d.w));
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
