// What the two kernels of attention share (attention.wgsl, which has the formulas, and
// attention_tiles.wgsl): parameters, tensors, reading them by vectors, the softmax of four scores
// and the dropout mask of four pairs. 16 bytes are moved per vector.
//
// Prepended: the constants D, columns per head, CAUSAL, which is 0 if queries see all keys,
// DROPOUT, which is 1 if anything is dropped, and MIXED, which is 1 in mixed precision; the
// functions that round operands; the storage variables, which are bound in another order for each
// entry point; and the functions that read and write rows of heads by parts, vectors of 4 columns
// of which the last one is filled up with zeros: q_part, k_part, v_part, y_part and dy_part, which
// round all but y, row_part for any source, and put_gradient.
//
//   x_0, x_1, x_2   tensors (b, t, ..) with queries, keys and values in their columns
//   samples         (b), those of the dropout; without it another buffer is bound and not read
//   new_y, y, dy    (b, t, heads D)
//   new_lse, lse    (b, heads, t)
//   stats           (b, heads, t) of lse and delta, workspace
//   d_0, d_1        gradients of the tensors with queries, or keys, and of those with values

struct Params {
    b: u32, heads: u32, t: u32, scale: f32,
    threshold: u32, factor: f32, key_0: u32, key_1: u32,
    parts: u32, group: u32, q_width: u32, k_width: u32,
    v_width: u32, q_first: u32, k_first: u32, v_first: u32,
}
var<immediate> p: Params;

const LOWEST: f32 = -3.4e38;
const LANES: vec4u = vec4u(0u, 1u, 2u, 3u);

// Sources of rows.
const Q: u32 = 0u;
const K: u32 = 1u;
const V: u32 = 2u;
const DY: u32 = 3u;

// Elements from a row of a source to the next.
fn width_of(source: u32) -> u32 {
    switch source {
        case Q: { return p.q_width; }
        case K: { return p.k_width; }
        case V: { return p.v_width; }
        default: { return p.heads * D; }
    }
}

// Where row 0 of a query head of a sample starts in a source.
fn start_of(source: u32, sample: u32, head: u32) -> u32 {
    let row = sample * p.t * width_of(source);
    switch source {
        case Q: { return row + p.q_first + head * D; }
        case K: { return row + p.k_first + head / p.group * D; }
        case V: { return row + p.v_first + head / p.group * D; }
        default: { return row + head * D; }
    }
}

// Where the statistics of a query head of a sample start.
fn start_of_stats(sample: u32, head: u32) -> u32 {
    return (sample * p.heads + head) * p.t;
}

// Which of four keys a query sees.
fn sees(i: u32, j: vec4u) -> vec4<bool> {
    if (CAUSAL != 0u) { return j <= vec4u(i); }
    return j < vec4u(p.t);
}

// By which of four queries a key is seen.
fn seen_by(i: vec4u, j: u32) -> vec4<bool> {
    if (CAUSAL != 0u) { return (i < vec4u(p.t)) & (i >= vec4u(j)); }
    return i < vec4u(p.t);
}

// Writes four columns of a row of y.
fn put_y(row: u32, part: u32, value: vec4f) {
    for (var lane = 0u; lane < min(4u, D - 4u * part); lane++) {
        new_y[row + 4u * part + lane] = value[lane];
    }
}

// Each column times one factor.
fn times(m: mat4x4f, factors: vec4f) -> mat4x4f {
    return mat4x4f(m[0] * factors.x, m[1] * factors.y, m[2] * factors.z, m[3] * factors.w);
}

// Element by element.
fn product(a: mat4x4f, b: mat4x4f) -> mat4x4f {
    return mat4x4f(a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]);
}

fn largest(v: vec4f) -> f32 {
    return max(max(v.x, v.y), max(v.z, v.w));
}

// The largest bits without the sign, which are NaN's if one of the four is NaN.
fn largest_magnitude(v: vec4f) -> u32 {
    let bits = bitcast<vec4u>(v) & vec4u(0x7FFFFFFFu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// True where the largest magnitude of a query's scores is that of a NaN, or where its highest score
// is infinite: exp and max may have returned numbers.
fn are_bad(top: vec4u, highest: vec4f) -> vec4<bool> {
    return (top > vec4u(NAN_ABOVE)) | (bitcast<vec4u>(highest) == vec4u(NAN_ABOVE))
        | (highest <= vec4f(LOWEST));
}

fn nan_where_bad(bad: vec4<bool>, value: vec4f) -> vec4f {
    return bitcast<vec4f>(select(bitcast<vec4u>(value), vec4u(0x7FC00000u), bad));
}

// exp(x) where `counts`, else 0; the arguments are far from overflow where it counts.
fn exp_where(x: vec4f, counts: vec4<bool>) -> vec4f {
    return select(vec4f(0.0), exp(max(x, vec4f(-80.0))), counts);
}

// lse of four queries.
fn lse_of(at: vec4u) -> vec4f {
    return vec4f(stats[at.x].x, stats[at.y].x, stats[at.z].x, stats[at.w].x);
}

// delta of four queries.
fn delta_of(at: vec4u) -> vec4f {
    return vec4f(stats[at.x].y, stats[at.y].y, stats[at.z].y, stats[at.w].y);
}

// 1, or NaN where a value is NaN.
fn one_or_nan(v: vec4f) -> vec4f {
    return vec4f(nan_where(magnitude_of(v.x) > NAN_ABOVE, 1.0),
        nan_where(magnitude_of(v.y) > NAN_ABOVE, 1.0),
        nan_where(magnitude_of(v.z) > NAN_ABOVE, 1.0),
        nan_where(magnitude_of(v.w) > NAN_ABOVE, 1.0));
}

// Weights of scores with a column of four keys for each of four queries, whose lse it takes.
fn weights_by_query(s: mat4x4f, logs: vec4f, i: vec4u, j: vec4u) -> mat4x4f {
    return mat4x4f(
        exp_where(s[0] - logs.x, sees(i.x, j)), exp_where(s[1] - logs.y, sees(i.y, j)),
        exp_where(s[2] - logs.z, sees(i.z, j)), exp_where(s[3] - logs.w, sees(i.w, j)));
}

// Weights of scores with a column of four queries for each of four keys: none of queries behind the
// last one, NaN where a query's lse is.
fn weights_by_key(s: mat4x4f, logs: vec4f, i: vec4u, j: vec4u) -> mat4x4f {
    let one = one_or_nan(logs);
    return mat4x4f(
        one * exp_where(s[0] - logs, seen_by(i, j.x)),
        one * exp_where(s[1] - logs, seen_by(i, j.y)),
        one * exp_where(s[2] - logs, seen_by(i, j.z)),
        one * exp_where(s[3] - logs, seen_by(i, j.w)));
}

// Weights or slopes as operands of products.
fn operands(m: mat4x4f) -> mat4x4f {
    return mat4x4f(operand4(m[0]), operand4(m[1]), operand4(m[2]), operand4(m[3]));
}

// Factor of slopes of scores. In mixed precision their sums with rows have it in place of them, by
// `scaled`, because f16 has fewer bits for small slopes.
fn slope_factor() -> f32 {
    if (MIXED == 1u) { return 1.0; }
    return p.scale;
}

fn scaled(sums: mat4x4f) -> mat4x4f {
    if (MIXED == 1u) { return p.scale * sums; }
    return sums;
}

// Slopes of scores with a column for each of four queries, from those of the weights.
fn score_slopes_by_query(weights: mat4x4f, dp: mat4x4f, deltas: vec4f) -> mat4x4f {
    return slope_factor() * mat4x4f(
        weights[0] * (dp[0] - deltas.x), weights[1] * (dp[1] - deltas.y),
        weights[2] * (dp[2] - deltas.z), weights[3] * (dp[3] - deltas.w));
}

// Which of four pairs of positions of a head of a sample are kept; each head has a key of its own.
fn kept_four(sample: u32, head: u32, i: vec4u, j: vec4u) -> vec4<bool> {
    let pairs = i * p.t + j;
    let key = vec2u(p.key_0 + head, p.key_1);
    let id = samples[sample];
    let words = vec4u(
        threefry2x32(key, vec2u(id, pairs.x)).x, threefry2x32(key, vec2u(id, pairs.y)).x,
        threefry2x32(key, vec2u(id, pairs.z)).x, threefry2x32(key, vec2u(id, pairs.w)).x);
    return words >= vec4u(p.threshold);
}

// m of 4 x 4 pairs, a bit for each that is kept: four neighbouring ones for each of four queries,
// or for each of four keys. One row at a time, by a loop that no driver unrolls, because 16 numbers
// at once take more registers than some GPUs have beside the sums.

fn kept_by_query(sample: u32, head: u32, i: vec4u, j: vec4u) -> u32 {
    var rows = i;
    var bits = 0u;
    for (var row = 0u; row < select(4u, 0u, p.t == 0u); row++) {
        bits |= bits_of(kept_four(sample, head, vec4u(rows.x), j)) << (4u * row);
        rows = rows.yzwx;
    }
    return bits;
}

fn kept_by_key(sample: u32, head: u32, i: vec4u, j: vec4u) -> u32 {
    var rows = j;
    var bits = 0u;
    for (var row = 0u; row < select(4u, 0u, p.t == 0u); row++) {
        bits |= bits_of(kept_four(sample, head, i, vec4u(rows.x))) << (4u * row);
        rows = rows.yzwx;
    }
    return bits;
}

fn bits_of(kept: vec4<bool>) -> u32 {
    let bits = select(vec4u(0u), vec4u(1u, 2u, 4u, 8u), kept);
    return bits.x | bits.y | bits.z | bits.w;
}

// Values times m, of which `kept` has the bits, column by column.
fn drop_pairs(values: mat4x4f, kept: u32) -> mat4x4f {
    return mat4x4f(drop_four(values[0], kept), drop_four(values[1], kept >> 4u),
        drop_four(values[2], kept >> 8u), drop_four(values[3], kept >> 12u));
}

fn drop_four(values: vec4f, kept: u32) -> vec4f {
    let is_kept = (vec4u(kept) & vec4u(1u, 2u, 4u, 8u)) != vec4u(0u);
    return values * select(vec4f(0.0), vec4f(p.factor), is_kept);
}
