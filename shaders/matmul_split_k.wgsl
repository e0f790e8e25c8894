// Adds the parts of matrix products whose sums are split between workgroups.
//
//   c[i] = sum_part partials[part, i], in the order of the parts  (+ c, if accumulating)
//
// One invocation per value, or per vector of 4 neighbouring values; 4 bytes moved per value of
// every part, and those of the epilogue. Prepended (src/kernels/ops/matmul/split_k.rs): Value,
// which is f32 or vec4f, and `put`, which stores a finished one by the epilogue of the call.

struct Params {
    count: u32,             // Values of c
    parts: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> partials: array<Value>;   // (parts, count)

@compute @workgroup_size(64)
fn add_partials(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = invocation_of(id, groups, 64u);
    if (at >= p.count) { return; }
    var total = partials[at];
    for (var part = 1u; part < p.parts; part++) { total += partials[part * p.count + at]; }
    put(at, total);
}
