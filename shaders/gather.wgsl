// Entries along an axis by their places, and sums of entries by their places.
// uses lib/nan
// uses lib/index
//
//   gather   y[o, j, i] = x[o, place(o, j, i), i], 0 if x has no such place
//   clear    x[o, t, i] = 0
//   scatter  x[o, t, i] += sum over j of y[o, j, i] with place(o, j, i) = t
//
// x (outer, n, inner), y (outer, m, inner), and the places, whole numbers in floats, by strides:
// (m), (outer, m) or (outer, m, inner). inner counts Values, which are f32, or four neighbouring
// ones that have their place in common (prepended: src/kernels/ops/gather.rs).
//
// gather has one invocation per Value of y, and moves 12 bytes per float; clear one per Value of x.
// scatter has one per outer and inner, which alone writes the Values along the axis, so that sums
// have the order of j and no atomics are needed: 16 bytes per float of y.

struct Params {
    count: u32,             // invocations
    n: u32, m: u32, inner: u32,
    outer_stride: u32, stride: u32, inner_stride: u32,      // of the places
    first: u32, end: u32,   // the j of scatter
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<Value>;               // (outer, n, inner)
@group(0) @binding(1) var<storage, read> places: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<Value>;         // (outer, m, inner)
// scatter binds places, dy, dx; clear dx.
@group(0) @binding(0) var<storage, read> dy_places: array<f32>;
@group(0) @binding(1) var<storage, read> dy: array<Value>;
@group(0) @binding(2) var<storage, read_write> dx: array<Value>;
@group(0) @binding(0) var<storage, read_write> cleared: array<Value>;

// The place that a number names, p.n if it is none.
fn place_of(number: f32) -> u32 {
    let is_number = magnitude_of(number) <= NAN_ABOVE;
    let is_place = is_number && number >= 0.0 && number < f32(p.n);
    return select(p.n, min(u32(max(number, 0.0)), p.n - 1u), is_place);
}

@compute @workgroup_size(64)
fn gather(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let i = at % p.inner;
    let j = at / p.inner % p.m;
    let o = at / p.inner / p.m;
    let place = place_of(places[o * p.outer_stride + j * p.stride + i * p.inner_stride]);
    let source = select(0u, place, place < p.n);
    y[at] = select(Value(0.0), x[(o * p.n + source) * p.inner + i], place < p.n);
}

@compute @workgroup_size(64)
fn clear(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    cleared[at] = Value(0.0);
}

@compute @workgroup_size(64)
fn scatter(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let i = at % p.inner;
    let o = at / p.inner;
    let of_places = o * p.outer_stride + i * p.inner_stride;
    for (var j = p.first; j < p.end; j++) {
        let place = place_of(dy_places[of_places + j * p.stride]);
        if (place < p.n) {
            dx[(o * p.n + place) * p.inner + i] += dy[(o * p.m + j) * p.inner + i];
        }
    }
}
