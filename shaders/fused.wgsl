// A chain of elementwise functions in one kernel.
//
//   c[i] = f(x[i])
//
// `store` is prepended (src/kernels/ops/epilogue.rs): it applies the functions in sequence, reads
// their operands, stores intermediate values and writes the last one to c. One workgroup of 64
// per 512 elements, 8 per invocation, as in shaders/binary.wgsl; 8 bytes moved per element, and 4
// per operand and intermediate value.

struct Params { count: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;           // (count)
@group(0) @binding(1) var<storage, read_write> c: array<f32>;     // (count)

@compute @workgroup_size(64)
fn chain(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let start = workgroup_of(group, groups) * 512u + local;
    let end = min(start + 512u, p.count);
    for (var i = start; i < end; i += 64u) {
        store(i, x[i]);
    }
}
