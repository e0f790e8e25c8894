// An update rule with one or two moments over a range of a bucket. Its formula is the prepended
// function `rule`, of one element or of a vector of 4 (lib/value and lib/decay, or lib/value4 and
// lib/decay4); src/kernels/ops/update_rules.rs has the formulas.
// uses lib/span
//
//   state = rule(state, scale gradient, decay)       decay for elements before decay_end, else 0
//
// one_moment, two_moments: one invocation per 8 elements of start .. start + length, or per 4
// vectors of 4, where start and length are multiples of 4. 20 and 28 bytes moved per element.

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
}
var<immediate> p: Params;

// Values of a parameter and of its moments; of one moment, the second is nothing.
struct ElementState {
    parameter: Value,
    m: Value,
    v: Value,
}

@group(0) @binding(0) var<storage, read> gradients: array<Value>;          // (bucket)
@group(0) @binding(1) var<storage, read_write> parameters: array<Value>;   // (bucket)
@group(0) @binding(2) var<storage, read_write> m: array<Value>;            // (bucket)
@group(0) @binding(3) var<storage, read_write> v: array<Value>;            // (bucket)

// The first and the end of the values of an invocation, of those of the range.
fn own_values(group: vec3u, groups: vec3u, local: u32) -> vec2u {
    return span(group, groups, local, select(256u, 512u, FLOATS == 1u), p.length / FLOATS);
}

@compute @workgroup_size(64)
fn one_moment(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = own_values(group, groups, local);
    for (var at = own.x; at < own.y; at += 64u) {
        let i = p.start / FLOATS + at;
        let before = ElementState(parameters[i], m[i], Value());
        let state = rule(before, p.scale * gradients[i], decay_at(i));
        parameters[i] = state.parameter;
        m[i] = state.m;
    }
}

@compute @workgroup_size(64)
fn two_moments(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = own_values(group, groups, local);
    for (var at = own.x; at < own.y; at += 64u) {
        let i = p.start / FLOATS + at;
        let before = ElementState(parameters[i], m[i], v[i]);
        let state = rule(before, p.scale * gradients[i], decay_at(i));
        parameters[i] = state.parameter;
        m[i] = state.m;
        v[i] = state.v;
    }
}
