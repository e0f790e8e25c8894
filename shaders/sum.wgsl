// Sums over neighbouring axes, and the inverse, which repeats values over new axes. Tensors are
// viewed as (outer, middle, inner), where middle is reduced or inserted. Other kernels of sums are
// in row_sums.wgsl and row_blocks.wgsl.
// uses lib/index
// uses lib/joined
//
//   columns    y[o, i] = sum_m x[o, m, i]  (+ y, if accumulating): one invocation per output,
//              in the order of m; 4 bytes read per element
//   tree       the same with one workgroup per output: invocation j sums x[o, j + GROUP m, i]
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

const GROUP: u32 = 256u;
const LANES: u32 = GROUP;
alias Joined = f32;

fn join(a: Joined, b: Joined) -> Joined {
    return a + b;
}

@compute @workgroup_size(GROUP)
fn tree(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) j: u32,
) {
    let at = workgroup_of(group, groups);
    var total = 0.0;
    if (at < p.count) {
        let start = (at / p.inner) * p.middle * p.inner + at % p.inner;
        for (var m = j; m < p.middle; m += GROUP) { total += x[start + m * p.inner]; }
    }
    total = joined(total, j);
    if (j == 0u && at < p.count) { store(at, total); }
}

@compute @workgroup_size(64)
fn broadcast(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    y[at] = x[at / (p.middle * p.inner) * p.inner + at % p.inner];
}
