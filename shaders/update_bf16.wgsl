// An update rule as in update.wgsl, with its moments in bfloat16: two in a word, rounded up or down
// at random. The prepended function `rule` is of one element (lib/value, lib/decay).
// uses lib/span
// uses lib/bf16_pair
// uses lib/rng
//
// One invocation per 4 words of the range's moments, 16 bytes moved per element, 20 of two moments,
// and about 60 integer operations for the random numbers.

struct Params {
    start: u32,
    length: u32,
    decay_end: u32,
    scale: f32,
    decay: f32,
    n0: f32,              // The numbers of the formula, in its order.
    n1: f32,
    n2: f32,
    n3: f32,
    n4: f32,
    n5: f32,
    n6: f32,
    rounding: Rounding,
}
var<immediate> p: Params;

// Values of a parameter and of its moments; of one moment, the second is nothing.
struct ElementState {
    parameter: Value,
    m: Value,
    v: Value,
}

@group(0) @binding(0) var<storage, read> gradients: array<f32>;            // (bucket)
@group(0) @binding(1) var<storage, read_write> parameters: array<f32>;     // (bucket)
@group(0) @binding(2) var<storage, read_write> m: array<u32>;              // (bucket / 2)
@group(0) @binding(3) var<storage, read_write> v: array<u32>;              // (bucket / 2)

// The first and the end of the words of an invocation, of those of the range.
fn own_words(group: vec3u, groups: vec3u, local: u32) -> vec2u {
    let words = (p.start + p.length + 1u) / 2u - p.start / 2u;
    return span(group, groups, local, 256u, words);
}

fn is_covered(i: u32) -> bool { return i >= p.start && i < p.start + p.length; }

@compute @workgroup_size(64)
fn one_moment_bf16(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = own_words(group, groups, local);
    for (var at = own.x; at < own.y; at += 64u) {
        let word = p.start / 2u + at;
        let random = rounding_words(p.rounding, 2u * word - p.start);
        var averages = m[word];
        for (var half = 0u; half < 2u; half++) {
            let i = 2u * word + half;
            if (!is_covered(i)) { continue; }
            let before = ElementState(parameters[i], bf16_of(averages, half), 0.0);
            let state = rule(before, p.scale * gradients[i], decay_at(i));
            parameters[i] = state.parameter;
            averages = with_bf16(averages, half, state.m, select(random[0], random[1], half == 1u));
        }
        m[word] = averages;
    }
}

@compute @workgroup_size(64)
fn two_moments_bf16(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = own_words(group, groups, local);
    for (var at = own.x; at < own.y; at += 64u) {
        let word = p.start / 2u + at;
        let words = rounding_words(p.rounding, 2u * word - p.start);
        var first = m[word];
        var second = v[word];
        for (var half = 0u; half < 2u; half++) {
            let i = 2u * word + half;
            if (!is_covered(i)) { continue; }
            let random = select(words[0], words[1], half == 1u);
            let before = ElementState(parameters[i], bf16_of(first, half), bf16_of(second, half));
            let state = rule(before, p.scale * gradients[i], decay_at(i));
            parameters[i] = state.parameter;
            first = with_bf16(first, half, state.m, random);
            second = with_bf16(second, half, state.v, random >> 16u);
        }
        m[word] = first;
        v[word] = second;
    }
}
