// Adds the parts of the gradient of a convolution by its weight, in the order of the parts.
// uses lib/index
// uses lib/store
//
//   dw[o, q, tap] = sum_part parts[part, o, q, tap]  (+ dw, if accumulating)
//
// dw is (o, c / groups, kh, kw), with kh kw taps; where the elements of a part are, the strides
// say. One invocation per weight, 4 bytes per part.

struct Params {
    count: u32,             // weights
    parts: u32,
    accumulate: u32,
    group_c: u32,
    taps: u32,
    part: u32,              // elements from a part to the next
    by_o: u32,              // .. from an output channel to the next
    by_c: u32,              // .. from an input channel
    by_tap: u32,            // .. from a tap
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> parts: array<f32>;
@group(0) @binding(1) var<storage, read_write> c: array<f32>;

@compute @workgroup_size(64)
fn add_parts(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let tap = at % p.taps;
    let q = at / p.taps % p.group_c;
    let o = at / (p.taps * p.group_c);
    var at_part = o * p.by_o + q * p.by_c + tap * p.by_tap;
    var total = parts[at_part];
    for (var part = 1u; part < p.parts; part++) {
        at_part += p.part;
        total += parts[at_part];
    }
    store(at, total);
}
