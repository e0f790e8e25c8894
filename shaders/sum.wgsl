// Sums over neighbouring axes, and the inverse, which repeats values over new axes. Tensors are
// viewed as (outer, middle, inner), where middle is reduced or inserted.
// uses lib/index
//
//   columns    y[o, i] = sum_m x[o, m, i]  (+ y, if accumulating): one invocation per output,
//              in the order of m; 4 bytes read per element
//   tree       the same with one workgroup per output: invocation j sums x[o, j + 256 m, i], and
//              two stages of 16 sum the 256 parts, in an order that never changes
//   tile4      the same on vectors of 4 outputs, where inner is a multiple of 4: one workgroup per
//              16 vectors of columns of one o, 4 invocations to each, which take every 4th m
//   tall       for hardware: one workgroup per 16 columns, 16 invocations to each; and tall4: per 8
//              vectors of columns, 32 to each
//   broadcast  y[o, m, i] = x[o, i]: one invocation per output; 4 bytes written per element

struct Params { count: u32, middle: u32, inner: u32, accumulate: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;     // (count)

fn store(at: u32, total: f32) {
    if (p.accumulate != 0u) { y[at] += total; } else { y[at] = total; }
}

@compute @workgroup_size(64)
fn columns(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    var next = (at / p.inner) * p.middle * p.inner + at % p.inner;
    var total = 0.0;
    for (var m = 0u; m < p.middle; m++) {
        total += x[next];
        next += p.inner;
    }
    store(at, total);
}

var<workgroup> parts: array<f32, 256>;
var<workgroup> sixteenths: array<f32, 16>;

@compute @workgroup_size(256)
fn tree(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) j: u32,
) {
    let at = workgroup_of(group, groups);
    var total = 0.0;
    if (at < p.count) {
        let start = (at / p.inner) * p.middle * p.inner + at % p.inner;
        for (var m = j; m < p.middle; m += 256u) { total += x[start + m * p.inner]; }
    }
    parts[j] = total;
    workgroupBarrier();
    if (j < 16u) {
        total = 0.0;
        for (var part = 0u; part < 16u; part++) { total += parts[16u * j + part]; }
        sixteenths[j] = total;
    }
    workgroupBarrier();
    if (j == 0u && at < p.count) {
        total = 0.0;
        for (var part = 0u; part < 16u; part++) { total += sixteenths[part]; }
        store(at, total);
    }
}

@group(0) @binding(0) var<storage, read> x4: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> y4: array<vec4f>;  // (count / 4)
var<workgroup> parts4: array<vec4f, 256>;

fn store4(at: u32, total: vec4f) {
    if (p.accumulate != 0u) { y4[at] += total; } else { y4[at] = total; }
}

// Place of a workgroup: the o whose columns it sums, and the number of its first one, where it has
// `across` of the `width` columns of an o.
fn tile_of(group: vec3u, groups: vec3u, width: u32, across: u32) -> vec2u {
    let index = workgroup_of(group, groups);
    let tiles = (width + across - 1u) / across;
    return vec2u(index / tiles, index % tiles * across);
}

@compute @workgroup_size(64)
fn tile4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) j: u32,
) {
    let width = p.inner / 4u;
    let tile = tile_of(group, groups, width, 16u);
    // A folded grid may have more workgroups than there are tiles.
    if (tile.x * p.inner >= p.count) { return; }
    let column = tile.y + j % 16u;
    var total = vec4f(0.0);
    if (column < width) {
        let start = tile.x * p.middle * width + column;
        for (var m = j / 16u; m < p.middle; m += 4u) { total += x4[start + m * width]; }
    }
    parts4[j] = total;
    workgroupBarrier();
    if (j >= 16u || column >= width) { return; }
    for (var other = j + 16u; other < 64u; other += 16u) { total += parts4[other]; }
    store4(tile.x * width + column, total);
}

@compute @workgroup_size(256)
fn tall4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) j: u32,
) {
    let width = p.inner / 4u;
    let tile = tile_of(group, groups, width, 8u);
    if (tile.x * p.inner >= p.count) { return; }
    let column = tile.y + j % 8u;
    var total = vec4f(0.0);
    if (column < width) {
        let start = tile.x * p.middle * width + column;
        for (var m = j / 8u; m < p.middle; m += 32u) { total += x4[start + m * width]; }
    }
    parts4[j] = total;
    workgroupBarrier();
    if (j >= 8u || column >= width) { return; }
    for (var other = j + 8u; other < 256u; other += 8u) { total += parts4[other]; }
    store4(tile.x * width + column, total);
}

@compute @workgroup_size(256)
fn tall(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) j: u32,
) {
    let tile = tile_of(group, groups, p.inner, 16u);
    if (tile.x * p.inner >= p.count) { return; }
    let column = tile.y + j % 16u;
    var total = 0.0;
    if (column < p.inner) {
        let start = tile.x * p.middle * p.inner + column;
        for (var m = j / 16u; m < p.middle; m += 16u) { total += x[start + m * p.inner]; }
    }
    parts[j] = total;
    workgroupBarrier();
    if (j >= 16u || column >= p.inner) { return; }
    for (var other = j + 16u; other < 256u; other += 16u) { total += parts[other]; }
    store(tile.x * p.inner + column, total);
}

@compute @workgroup_size(64)
fn broadcast(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    y[at] = x[at / (p.middle * p.inner) * p.inner + at % p.inner];
}
