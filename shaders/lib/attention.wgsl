// What the two kernels of attention share (attention.wgsl, which has the formulas, and
// attention_tiles.wgsl): parameters, tensors, reading them by vectors, the softmax of four scores
// and the dropout mask of four pairs. 16 bytes are moved per vector.
//
// Prepended: the constants D, columns per head, CAUSAL, which is 0 if queries see all keys, and
// DROPOUT, which is 1 if anything is dropped; and the functions qkv_part, dy_part and y_part, which
// call qkv_vector, dy_vector and y_vector if D is a multiple of 4, else qkv_scalars, dy_scalars and
// y_scalars.

struct Params {
    b: u32, heads: u32, t: u32, scale: f32,
    threshold: u32, factor: f32, key_0: u32, key_1: u32,
    parts: u32,
}
var<immediate> p: Params;

const LOWEST: f32 = -3.4e38;
const LANES: vec4u = vec4u(0u, 1u, 2u, 3u);

// samples are those of the dropout; without it another buffer is bound and not read. Of a tensor
// that is declared as scalars and as vectors, an entry point uses one of the two.
@group(0) @binding(0) var<storage, read> qkv: array<f32>;            // (b, t, 3c)
@group(0) @binding(0) var<storage, read> qkv_vectors: array<vec4f>;  // (b, t, 3c/4)
@group(0) @binding(1) var<storage, read> samples: array<u32>;        // (b)
// forward binds qkv, samples, y, lse.
@group(0) @binding(2) var<storage, read_write> new_y: array<f32>;    // (b, t, c)
@group(0) @binding(3) var<storage, read_write> new_lse: array<f32>;  // (b, h, t)
// Gradients bind qkv, samples, lse, dy, dqkv, y.
@group(0) @binding(2) var<storage, read> lse: array<f32>;            // (b, h, t)
@group(0) @binding(3) var<storage, read> dy: array<f32>;             // (b, t, c)
@group(0) @binding(3) var<storage, read> dy_vectors: array<vec4f>;   // (b, t, c/4)
@group(0) @binding(4) var<storage, read_write> dqkv: array<f32>;     // (b, t, 3c)
@group(0) @binding(5) var<storage, read> y: array<f32>;              // (b, t, c)
@group(0) @binding(5) var<storage, read> y_vectors: array<vec4f>;    // (b, t, c/4)

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

// Rows of D values are taken as vectors of 4, the last one filled up with zeros.

fn qkv_vector(row: u32, part: u32) -> vec4f {
    return qkv_vectors[row / 4u + part];
}

fn dy_vector(row: u32, part: u32) -> vec4f {
    return dy_vectors[row / 4u + part];
}

fn y_vector(row: u32, part: u32) -> vec4f {
    return y_vectors[row / 4u + part];
}

fn qkv_scalars(row: u32, part: u32) -> vec4f {
    var value = vec4f(0.0);
    for (var lane = 0u; lane < min(4u, D - 4u * part); lane++) {
        value[lane] = qkv[row + 4u * part + lane];
    }
    return value;
}

fn dy_scalars(row: u32, part: u32) -> vec4f {
    var value = vec4f(0.0);
    for (var lane = 0u; lane < min(4u, D - 4u * part); lane++) {
        value[lane] = dy[row + 4u * part + lane];
    }
    return value;
}

fn y_scalars(row: u32, part: u32) -> vec4f {
    var value = vec4f(0.0);
    for (var lane = 0u; lane < min(4u, D - 4u * part); lane++) {
        value[lane] = y[row + 4u * part + lane];
    }
    return value;
}

fn put_y(row: u32, part: u32, value: vec4f) {
    for (var lane = 0u; lane < min(4u, D - 4u * part); lane++) {
        new_y[row + 4u * part + lane] = value[lane];
    }
}

fn put_dqkv(row: u32, part: u32, value: vec4f) {
    for (var lane = 0u; lane < min(4u, D - 4u * part); lane++) {
        dqkv[row + 4u * part + lane] = value[lane];
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

// NaN where the largest magnitude of a query's scores is that of a NaN, or where its highest score
// is infinite: exp and max may have returned numbers.
fn nan_where_bad(value: vec4f, top: vec4u, highest: vec4f) -> vec4f {
    let bad = (top > vec4u(NAN_ABOVE)) | (bitcast<vec4u>(highest) == vec4u(NAN_ABOVE))
        | (highest <= vec4f(LOWEST));
    return bitcast<vec4f>(select(bitcast<vec4u>(value), vec4u(0x7FC00000u), bad));
}

// exp(x) where `counts`, else 0; the arguments are far from overflow where it counts.
fn exp_where(x: vec4f, counts: vec4<bool>) -> vec4f {
    return select(vec4f(0.0), exp(max(x, vec4f(-80.0))), counts);
}

// lse of four queries.
fn lse_of(at: vec4u) -> vec4f {
    return vec4f(lse[at.x], lse[at.y], lse[at.z], lse[at.w]);
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

// Slopes of scores with a column for each of four queries, from those of the weights.
fn score_slopes_by_query(weights: mat4x4f, dp: mat4x4f, deltas: vec4f) -> mat4x4f {
    return p.scale * mat4x4f(
        weights[0] * (dp[0] - deltas.x), weights[1] * (dp[1] - deltas.y),
        weights[2] * (dp[2] - deltas.z), weights[3] * (dp[3] - deltas.w));
}

// m of four pairs of positions of a head of a sample; each head has a key of its own.
fn kept_four(sample: u32, head: u32, i: vec4u, j: vec4u) -> vec4f {
    let pairs = i * p.t + j;
    let key = vec2u(p.key_0 + head, p.key_1);
    let id = samples[sample];
    let words = vec4u(
        threefry2x32(key, vec2u(id, pairs.x)).x, threefry2x32(key, vec2u(id, pairs.y)).x,
        threefry2x32(key, vec2u(id, pairs.z)).x, threefry2x32(key, vec2u(id, pairs.w)).x);
    return select(vec4f(0.0), vec4f(p.factor), words >= vec4u(p.threshold));
}

// m with a column for each of four queries.
fn kept_by_query(sample: u32, head: u32, i: vec4u, j: vec4u) -> mat4x4f {
    return mat4x4f(
        kept_four(sample, head, vec4u(i.x), j), kept_four(sample, head, vec4u(i.y), j),
        kept_four(sample, head, vec4u(i.z), j), kept_four(sample, head, vec4u(i.w), j));
}

// m with a column for each of four keys.
fn kept_by_key(sample: u32, head: u32, i: vec4u, j: vec4u) -> mat4x4f {
    return mat4x4f(
        kept_four(sample, head, i, vec4u(j.x)), kept_four(sample, head, i, vec4u(j.y)),
        kept_four(sample, head, i, vec4u(j.z)), kept_four(sample, head, i, vec4u(j.w)));
}
