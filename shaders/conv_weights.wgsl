// The weight of a convolution in the order in which its products read it.
// uses lib/index
//
//   rows[group, tap, read, written] = w[o, c, tap]
//
// w is (o, c / groups, kh, kw), with kh kw taps. For the forward pass c is read and o is written,
// for the gradient by the input the other way round; both are those of the group. Behind the last
// channel that is read or written there are zeros, up to `rows` per tap and `columns`. One
// invocation per element, 8 bytes.

struct Params {
    count: u32,
    read: u32,              // channels of a group
    written: u32,
    rows: u32,              // the same with zeros
    columns: u32,
    taps: u32,
    by_read: u32,           // elements of w from a channel that is read to the next
    by_written: u32,
    by_group: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> w: array<f32>;
@group(0) @binding(1) var<storage, read_write> rows: array<f32>;

@compute @workgroup_size(64)
fn permute(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let written = at % p.columns;
    let read = at / p.columns % p.rows;
    let tap = at / (p.columns * p.rows) % p.taps;
    let group = at / (p.columns * p.rows * p.taps);
    let is_inside = written < p.written && read < p.read;
    let place = group * p.by_group + read * p.by_read + written * p.by_written + tap;
    rows[at] = select(0.0, w[select(0u, place, is_inside)], is_inside);
}
