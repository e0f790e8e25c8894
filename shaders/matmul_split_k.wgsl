// Adds the parts of matrix products whose sums are split between workgroups.
//
//   c[i] = sum_part partials[part, i], in the order of the parts  (+ c, if accumulating)
//
// Behind all parts may be the sums of each over its rows, which are added likewise.
//
// One invocation per value, or per vector of 4 neighbouring values; 4 bytes moved per value of
// every part, and those of the epilogue. Prepended (src/kernels/ops/matmul/split_k.rs): Value,
// which is f32 or vec4f, `put`, which stores a finished one by the epilogue of the call, and
// `put_sum`, which stores a sum over rows.

struct Params {
    count: u32,             // Values of c
    parts: u32,
    sums: u32,              // Values of sums over rows, of each part
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> partials: array<Value>;   // (parts, count + sums)

@compute @workgroup_size(64)
fn add_partials(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = invocation_of(id, groups, 64u);
    if (at >= p.count + p.sums) { return; }
    let is_sum = at >= p.count;
    let first = select(at, p.parts * p.count + at - p.count, is_sum);
    let step = select(p.count, p.sums, is_sum);
    var total = partials[first];
    for (var part = 1u; part < p.parts; part++) { total += partials[first + part * step]; }
    if (is_sum) { put_sum(at - p.count, total); } else { put(at, total); }
}
