// What the kernels of the cross-entropy share (cross_entropy.wgsl, which has the formulas, and
// cross_entropy_subgroups.wgsl) beside lib/classes: tensors, the logits of an invocation where a
// workgroup of 256 has a row, and the results of a row. Of a row 4 v bytes are read.

@group(0) @binding(0) var<storage, read> x: array<f32>;               // (n, v)
@group(0) @binding(2) var<storage, read_write> parts: array<f32>;     // (n, 2)
@group(0) @binding(3) var<storage, read_write> lse: array<f32>;       // (n)

// The lowest f32. A maximum begins with it, as the difference of two masked logits, which are minus
// infinity, would be NaN.
const LOWEST: f32 = -3.4028234e38;

// m and s of some logits of a row, their sum, and their largest magnitude.
struct Seen { m: f32, s: f32, sum: f32, top: u32 }

// What an invocation has seen of a row from `first` on: every 256th logit, each read once.
fn seen_by(local: u32, first: u32) -> Seen {
    let start = x[first + local];
    var m = max(start, LOWEST);
    var s = exp(start - m);
    var sum = start;
    var top = magnitude_of(start);
    for (var j = local + 256u; j < p.v; j += 256u) {
        let value = x[first + j];
        sum += value;
        top = max(top, magnitude_of(value));
        // Of the two terms the larger is exp(0).
        let smaller = exp(-abs(value - m));
        s = select(s + smaller, s * smaller + 1.0, value > m);
        m = max(m, value);
    }
    return Seen(m, s, sum, top);
}

// The parts of a row's loss: NaN if a logit is NaN, by the largest magnitude in the row, or plus
// infinity.
fn store_parts(row: u32, all: Seen, log_of_sum: f32) {
    let is_nan = all.top > NAN_ABOVE || bitcast<u32>(all.m) == NAN_ABOVE;
    lse[row] = nan_where(is_nan, all.m + log_of_sum);
    let column = targets[row] - p.first;
    let is_own = column < p.v;
    var loss = 0.0;
    if (is_own) { loss = log_of_sum - p.kept * (x[row * p.v + column] - all.m); }
    if (p.even > 0.0 && targets[row] < p.classes) {
        loss += select(0.0, (1.0 - p.kept) * all.m, is_own) - p.even * all.sum;
    }
    parts[2u * row] = nan_where(is_nan && is_own, loss);
    parts[2u * row + 1u] = select(0.0, 1.0, is_own);
}
