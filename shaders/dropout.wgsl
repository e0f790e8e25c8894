// Dropout of elements, keyed by sample.
// uses lib/span
//
//   y[i] = factor x[i] where threefry2x32(key, (samples[s], e)).x >= threshold, else 0
//
// with s = i / elements the row of the batch and e the place within it, so that the mask of a
// sample does not depend on the composition of the batch. Where x has columns from first on, of all
// that there are, e is the place of the element among all. A threshold of 0 keeps
// all without drawing. dropout: one invocation per 8 elements, 8 bytes moved and about 110
// integer operations each; dropout4: per 4 vectors of 4, where count is a multiple of 4.
// uses lib/rng

struct Params {
    count: u32,
    elements: u32,
    threshold: u32,
    factor: f32,
    key0: u32,
    key1: u32,
    width: u32,             // columns that x has
    first: u32,
    all: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;           // (count)
@group(0) @binding(1) var<storage, read> samples: array<u32>;     // (count / elements)
@group(0) @binding(2) var<storage, read_write> y: array<f32>;     // (count)

fn keeps(i: u32) -> bool {
    if (p.threshold == 0u) { return true; }
    let e = i % p.elements;
    let place = e / p.width * p.all + p.first + e % p.width;
    let counter = vec2u(samples[i / p.elements], place);
    return threefry2x32(vec2u(p.key0, p.key1), counter).x >= p.threshold;
}

@compute @workgroup_size(64)
fn dropout(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        if (keeps(i)) { y[i] = p.factor * x[i]; } else { y[i] = 0.0; }
    }
}

@group(0) @binding(0) var<storage, read> x4: array<vec4f>;        // (count / 4)
@group(0) @binding(2) var<storage, read_write> y4: array<vec4f>;  // (count / 4)

@compute @workgroup_size(64)
fn dropout4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let at = 4u * i;
        let kept = vec4<bool>(keeps(at), keeps(at + 1u), keeps(at + 2u), keeps(at + 3u));
        y4[i] = select(vec4f(0.0), p.factor * x4[i], kept);
    }
}
