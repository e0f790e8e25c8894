// Cross-entropy of logits with integer targets; its gradient is cross_entropy_grad.wgsl.
// uses lib/classes
// uses lib/index
// uses lib/joined
// uses lib/loss
// uses lib/nan
//
//   m = max_j x[r, j];  s = sum_j exp(x[r, j] - m);  lse[r] = m + log(s)
//   cross_entropy       parts[r] = (log(s) - (x[r, target - first] - m), 1), or (0, 0) if the
//                       target is not among the columns
//   with label smoothing (Szegedy et al. 2016), where kept = 1 - smoothing, even = smoothing / v:
//                       parts[r] = (lse[r] - kept x[r, target - first] - even sum_j x[r, j], 1), or
//                       (-even sum_j x[r, j], 0)
//
// x (n, v), the columns of the classes from first on; targets (n), parts (n, 2), lse (n). A target
// that is no class is ignored, such as the largest u32.
//
// cross_entropy: one invocation per row, which reads it twice (8 v bytes), so that no sum crosses
// invocations. cross_entropy_group: one workgroup per row of at least 256, which reads it once
// (4 v bytes); m and s are those of what was seen so far (Milakov and Gimelshein 2018), of every
// 256th element by an invocation, then over invocations.

@compute @workgroup_size(64)
fn cross_entropy(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let row = index(id, groups);
    if (row >= p.n) { return; }
    let first = row * p.v;
    // All logits of a part of the classes may be minus infinity.
    var m = max(x[first], LOWEST);
    var sum = x[first];
    var top = magnitude_of(sum);
    for (var j = 1u; j < p.v; j++) {
        let value = x[first + j];
        m = max(m, value);
        sum += value;
        top = max(top, magnitude_of(value));
    }
    var s = 0.0;
    for (var j = 0u; j < p.v; j++) { s += exp(x[first + j] - m); }
    store_parts(row, Seen(m, s, sum, top), log(s));
}

const GROUP: u32 = 256u;
const LANES: u32 = GROUP;
alias Joined = Seen;

fn join(a: Seen, b: Seen) -> Seen {
    let larger = max(a.m, b.m);
    let s = a.s * exp(a.m - larger) + b.s * exp(b.m - larger);
    return Seen(larger, s, a.sum + b.sum, max(a.top, b.top));
}

@compute @workgroup_size(GROUP)
fn cross_entropy_group(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let row = workgroup_of(group, groups);
    if (row >= p.n) { return; }
    let all = joined(seen_by(local, row * p.v), local);
    if (local == 0u) { store_parts(row, all, log(all.s)); }
}
