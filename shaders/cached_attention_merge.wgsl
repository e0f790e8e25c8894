// Adds the partial sums of attention over a cache whose keys are split between workgroups.
//
//   y[row, h] = sum_s f[s] sum[s] / sum_s f[s] total[s]      f[s] = exp(m[s] - max_s m[s])
//
// sum, m and total are those that cached_attention.wgsl leaves for every split s with keys; others
// have a total of -1. A row without a place has only such, and zeros.
//
// One invocation per Value of y; 4 bytes moved per float of every partial sum.
//
// Prepended: lib/value, or lib/value4; all sizes are in Values.

struct Params {
    count: u32,             // Values of y
    d: u32,
    splits: u32,
}
var<immediate> p: Params;

// (rows, heads, splits, d + 2)
@group(0) @binding(0) var<storage, read_write> partials: array<Value>;
@group(0) @binding(1) var<storage, read_write> y: array<Value>;  // (rows, heads d)

@compute @workgroup_size(64)
fn merge(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = invocation_of(id, groups, 64u);
    if (at >= p.count) { return; }
    let part = at % p.d;
    let first = at / p.d * p.splits * (p.d + 2u);
    // Splits with keys come first.
    var seen = 0u;
    var m = partials[first + p.d];
    for (var split = 0u; split < p.splits; split++) {
        let own = first + split * (p.d + 2u);
        if (max_of_value(partials[own + p.d + 1u]) < 0.0) { break; }
        m = max(m, partials[own + p.d]);
        seen = split + 1u;
    }
    var sum = Value();
    var total = Value();
    for (var split = 0u; split < seen; split++) {
        let own = first + split * (p.d + 2u);
        let factor = exp(partials[own + p.d] - m);
        sum += factor * partials[own + part];
        total += factor * partials[own + p.d + 1u];
    }
    y[at] = select(Value(), sum / total, seen > 0u);
}
