// Dropout of elements, keyed by sample.
// uses lib/index
//
//   y[i] = factor x[i] where threefry2x32(key, (samples[s], e)).x >= threshold, else 0
//
// with s = i / elements the row of the batch and e = i % elements the place within it, so that
// what is dropped does not depend on how samples are put together. A threshold of 0 keeps all
// without drawing. One invocation per element; 8 bytes moved and about 110 integer operations.
// uses lib/rng

struct Params {
    count: u32,
    elements: u32,
    threshold: u32,
    factor: f32,
    key0: u32,
    key1: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;           // (count)
@group(0) @binding(1) var<storage, read> samples: array<u32>;     // (count / elements)
@group(0) @binding(2) var<storage, read_write> y: array<f32>;     // (count)

fn keeps(i: u32) -> bool {
    if (p.threshold == 0u) { return true; }
    let counter = vec2u(samples[i / p.elements], i % p.elements);
    return threefry2x32(vec2u(p.key0, p.key1), counter).x >= p.threshold;
}

@compute @workgroup_size(64)
fn dropout(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i >= p.count) { return; }
    if (keeps(i)) { y[i] = p.factor * x[i]; } else { y[i] = 0.0; }
}
