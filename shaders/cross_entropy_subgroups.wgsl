// Cross-entropy of rows of at least 256 logits by subgroup operations, for GPUs; the formulas are
// those of cross_entropy.wgsl.
// uses lib/classes
// uses lib/loss
// uses lib/nan
//
// One workgroup of 256 invocations per row, which reads it once (4 v bytes). m and s of what an
// invocation has seen are joined to those of its subgroup, and these behind the only barrier to
// those of the row, in the order of the subgroups. Subgroups have at least 4 invocations; nothing
// else is assumed of their size, nor of which invocations they have.

var<workgroup> seen: array<vec3f, 64>;      // m, s and sum of each subgroup
var<workgroup> tops: array<u32, 64>;        // largest magnitude of each subgroup

@compute @workgroup_size(256)
fn cross_entropy_subgroups(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let row = workgroup_of(group, groups);
    if (row >= p.n) { return; }
    let own = seen_by(local, row * p.v);
    let largest = subgroupMax(own.m);
    let s_of_all = subgroupAdd(own.s * exp(own.m - largest));
    let sum_of_all = subgroupAdd(own.sum);
    let top = subgroupMax(own.top);
    if (lane == 0u) {
        seen[subgroup] = vec3f(largest, s_of_all, sum_of_all);
        tops[subgroup] = top;
    }
    workgroupBarrier();
    if (local > 0u) { return; }
    var m = seen[0].x;
    var highest = tops[0];
    for (var i = 1u; i < subgroups; i++) {
        m = max(m, seen[i].x);
        highest = max(highest, tops[i]);
    }
    var s = 0.0;
    var sum = 0.0;
    for (var i = 0u; i < subgroups; i++) {
        s += seen[i].y * exp(seen[i].x - m);
        sum += seen[i].z;
    }
    store_parts(row, Seen(m, s, sum, highest), log(s));
}
