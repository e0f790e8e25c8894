// Activations in bfloat16: two in a word, the first in its low half. The same bits as
// src/kernels/bf16_words.rs.
// uses lib/span
//
//   pack     words[i] = round(x[2 i]) + 2^16 round(x[2 i + 1])     to nearest, ties to even
//   unpack   y[2 i], y[2 i + 1] = the halves of words[i]           exact
//
// One invocation per 8 words, 12 bytes moved per word. Names that end in 4: one per 4 vectors of 4
// words, where count is a multiple of 4. Floats are read and written as their bits, so that no
// compiler can drop a NaN or a subnormal number.

struct Params { count: u32 }                                       // words
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<vec2u>;          // (count)
@group(0) @binding(1) var<storage, read_write> words: array<u32>;  // (count)
@group(0) @binding(0) var<storage, read> packed: array<u32>;       // (count)
@group(0) @binding(1) var<storage, read_write> y: array<vec2u>;    // (count)

fn joined(low: vec4u, high: vec4u) -> vec4u {
    return nearest(low) | (nearest(high) << vec4u(16u));
}

// The upper half of each float, rounded. Infinity stays infinity, and NaN stays NaN: with its quiet
// bit, so that it has a bit left.
fn nearest(bits: vec4u) -> vec4u {
    let kept = bits >> vec4u(16u);
    let rounded = (bits + vec4u(0x7fffu) + (kept & vec4u(1u))) >> vec4u(16u);
    return select(rounded, kept | vec4u(0x40u), (bits & vec4u(0x7fffffffu)) > vec4u(0x7f800000u));
}

@compute @workgroup_size(64)
fn pack(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        let pair = x[i];
        words[i] = joined(vec4u(pair.x), vec4u(pair.y)).x;
    }
}

@compute @workgroup_size(64)
fn unpack(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 512u, p.count);
    for (var i = own.x; i < own.y; i += 64u) {
        let word = packed[i];
        y[i] = vec2u(word << 16u, word & 0xffff0000u);
    }
}

@group(0) @binding(0) var<storage, read> x4: array<vec4u>;          // (count / 2)
@group(0) @binding(1) var<storage, read_write> words4: array<vec4u>; // (count / 4)
@group(0) @binding(0) var<storage, read> packed4: array<vec4u>;     // (count / 4)
@group(0) @binding(1) var<storage, read_write> y4: array<vec4u>;    // (count / 2)

@compute @workgroup_size(64)
fn pack4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let a = x4[2u * i];
        let b = x4[2u * i + 1u];
        words4[i] = joined(vec4u(a.xz, b.xz), vec4u(a.yw, b.yw));
    }
}

@compute @workgroup_size(64)
fn unpack4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = span(group, groups, local, 256u, p.count / 4u);
    for (var i = own.x; i < own.y; i += 64u) {
        let low = packed4[i] << vec4u(16u);
        let high = packed4[i] & vec4u(0xffff0000u);
        y4[2u * i] = vec4u(low.x, high.x, low.y, high.y);
        y4[2u * i + 1u] = vec4u(low.z, high.z, low.w, high.w);
    }
}
