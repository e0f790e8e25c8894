// Softmax of rows of c values, and its gradient.
// uses lib/index
// uses lib/joined
// uses lib/nan
//
//   forward  y = exp(x - m) / s      m = max_j x[j];  s = sum_j exp(x[j] - m)
//   grad     dx = y (dy - sum_j y[j] dy[j])
//
// A value of minus infinity has the result 0; a row with NaN or plus infinity, or of minus infinity
// alone, is NaN.
//
// forward and grad: one invocation per row, which is read twice and written twice, from the cache
// but for the first reading. forward_group and grad_group: one workgroup of GROUP per row; 12 bytes
// per element moved, 4 of them from the cache (20 and 8 by grad). Sums are of every GROUP-th value,
// then over invocations.
//
// Prepended (src/kernels/ops/softmax.rs): lib/value or lib/value4, of which a row has p.width, and
// GROUP.

struct Params { rows: u32, width: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<Value>;             // (rows, width)
@group(0) @binding(1) var<storage, read_write> y: array<Value>;       // (rows, width)
// Gradients bind the softmax in the place of x, dy, dx.
@group(0) @binding(1) var<storage, read> dy: array<Value>;            // (rows, width)
@group(0) @binding(2) var<storage, read_write> dx: array<Value>;      // (rows, width)

// The lowest f32. A maximum begins with it, as the difference of two masked values, which are minus
// infinity, would be NaN.
const LOWEST: f32 = -3.4028234e38;

// True if a row is NaN, by its largest value, the sum of its exponentials and its largest
// magnitude: that is the one of NaN or of plus infinity, unless all that is infinite is negative.
fn is_nan_row(m: f32, s: f32, top: u32) -> bool {
    return top > NAN_ABOVE || bitcast<u32>(m) == NAN_ABOVE || bitcast<u32>(s) == 0u;
}

@compute @workgroup_size(64)
fn forward(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let row = index(id, groups);
    if (row >= p.rows) { return; }
    let first = row * p.width;
    let end = first + p.width;
    var m = LOWEST;
    var top = 0u;
    for (var i = first; i < end; i++) {
        let value = x[i];
        m = max(m, max_of_value(value));
        top = max(top, top_of_value(value));
    }
    var s = 0.0;
    for (var i = first; i < end; i++) {
        let e = exp(x[i] - m);
        s += sum_of_value(e);
        y[i] = e;
    }
    let is_nan = is_nan_row(m, s, top);
    let factor = 1.0 / s;
    for (var i = first; i < end; i++) { y[i] = nan_value_where(is_nan, y[i] * factor); }
}

@compute @workgroup_size(64)
fn grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let row = index(id, groups);
    if (row >= p.rows) { return; }
    let first = row * p.width;
    let end = first + p.width;
    var sum = 0.0;
    for (var i = first; i < end; i++) { sum += sum_of_value(x[i] * dy[i]); }
    for (var i = first; i < end; i++) { dx[i] = x[i] * (dy[i] - sum); }
}

const LANES: u32 = GROUP;

// Of values of a row: the largest one, the sum of exp(x - m), and the largest magnitude.
struct Joined { m: f32, s: f32, top: u32 }

fn join(a: Joined, b: Joined) -> Joined {
    let m = max(a.m, b.m);
    let s = a.s * exp(max(a.m - m, -88.0)) + b.s * exp(max(b.m - m, -88.0));
    return Joined(m, s, max(a.top, b.top));
}

@compute @workgroup_size(GROUP)
fn forward_group(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let row = workgroup_of(group, groups);
    if (row >= p.rows) { return; }
    let first = row * p.width;
    let end = first + p.width;
    var own = Joined(LOWEST, 0.0, 0u);
    for (var i = first + local; i < end; i += GROUP) {
        let value = x[i];
        let m = max(own.m, max_of_value(value));
        own = join(own, Joined(m, sum_of_value(exp(value - m)), top_of_value(value)));
    }
    let all = joined(own, local);
    let is_nan = is_nan_row(all.m, all.s, all.top);
    let factor = 1.0 / all.s;
    for (var i = first + local; i < end; i += GROUP) {
        y[i] = nan_value_where(is_nan, exp(x[i] - all.m) * factor);
    }
}

@compute @workgroup_size(GROUP)
fn grad_group(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let row = workgroup_of(group, groups);
    if (row >= p.rows) { return; }
    let first = row * p.width;
    let end = first + p.width;
    var part = 0.0;
    for (var i = first + local; i < end; i += GROUP) { part += sum_of_value(x[i] * dy[i]); }
    let sum = joined(Joined(0.0, part, 0u), local).s;
    for (var i = first + local; i < end; i += GROUP) { dx[i] = x[i] * (dy[i] - sum); }
}
