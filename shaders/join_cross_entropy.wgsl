// Joins the losses of rows over some classes each to those over both, as ClassLoss::joined does.
// uses lib/index
// uses lib/nan
//
//   m = max(lse_a, lse_b);  s = exp(lse_a - m) + exp(lse_b - m);  lse[r] = m + log(s)
//   parts[r] = (sum of the losses, sum of the counts), where lse takes the place of the lse of the
//              classes in the loss of those that have the target, which is infinite if their
//              logits are all minus infinity
//
// parts_a, parts_b, parts (n, 2) with the loss and the count of its target; lse_a, lse_b, lse (n).
// One invocation per row, 36 bytes each.

struct Params { n: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> parts_a: array<f32>;         // (n, 2)
@group(0) @binding(1) var<storage, read> lse_a: array<f32>;           // (n)
@group(0) @binding(2) var<storage, read> parts_b: array<f32>;         // (n, 2)
@group(0) @binding(3) var<storage, read> lse_b: array<f32>;           // (n)
@group(0) @binding(4) var<storage, read_write> parts: array<f32>;     // (n, 2)
@group(0) @binding(5) var<storage, read_write> lse: array<f32>;       // (n)

const MINUS_INFINITY: u32 = 0xFF800000u;

// The loss of a row over all classes, of that over those whose lse is `own`; `above` is log(s) and
// m - own.
fn loss_of(loss: f32, count: f32, own: f32, above: vec2f, is_nan: bool) -> f32 {
    if (count == 0.0) { return loss; }
    let is_empty = bitcast<u32>(own) == MINUS_INFINITY && !is_nan;
    let moved = loss + (above.x + above.y);
    return bitcast<f32>(select(bitcast<u32>(moved), NAN_ABOVE, is_empty));
}

@compute @workgroup_size(64)
fn join_cross_entropy(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let row = index(id, groups);
    if (row >= p.n) { return; }
    let a = lse_a[row];
    let b = lse_b[row];
    let m = max(a, b);
    let log_s = log(1.0 + exp(min(a, b) - m));
    // NaN, plus infinity, or no logit above minus infinity on either side.
    let largest = max(magnitude_of(a), magnitude_of(b));
    let is_nan = largest > NAN_ABOVE || bitcast<u32>(a) == NAN_ABOVE
        || bitcast<u32>(b) == NAN_ABOVE
        || min(bitcast<u32>(a), bitcast<u32>(b)) == MINUS_INFINITY;
    let count_a = parts_a[2u * row + 1u];
    let count_b = parts_b[2u * row + 1u];
    let loss_a = loss_of(parts_a[2u * row], count_a, a, vec2f(log_s, m - a), is_nan);
    let loss_b = loss_of(parts_b[2u * row], count_b, b, vec2f(log_s, m - b), is_nan);
    parts[2u * row] = nan_where(is_nan && count_a + count_b > 0.0, loss_a + loss_b);
    parts[2u * row + 1u] = count_a + count_b;
    lse[row] = nan_where(is_nan, m + log_s);
}
