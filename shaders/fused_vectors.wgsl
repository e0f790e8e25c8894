// A chain of elementwise functions in one kernel, on vectors of 4 neighbouring values.
// uses lib/span
//
//   c[i] = f(x[i])
//
// `store4` is prepended (src/kernels/ops/fused_vectors.rs), as `store` is to shaders/fused.wgsl.
// One workgroup of 64 per 256 vectors, 4 per invocation, as in shaders/unary.wgsl; 32 bytes moved
// per vector, and 16 per operand and intermediate vector.

struct Params { count: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<vec4f>;         // (count)
@group(0) @binding(1) var<storage, read_write> c: array<vec4f>;   // (count)

@compute @workgroup_size(64)
fn chain4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        store4(i, x[i]);
    }
}
