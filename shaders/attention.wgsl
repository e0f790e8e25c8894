// Causal attention over packed queries, keys and values, and its gradient.
// uses lib/nan
// uses lib/rng
//
//   s_ij = scale q_i . k_j for j <= i     p_ij = exp(s_ij - lse_i)     y_i = sum_j m_ij p_ij v_j
//   delta_i = dy_i . y_i                  ds_ij = scale p_ij (m_ij dy_i . v_j - delta_i)
//   dq_i = sum_j ds_ij k_j                dk_j = sum_i ds_ij q_i     dv_j = sum_i m_ij p_ij dy_i
//
// lse_i is the logarithm of the sum over j of exp(s_ij), and m_ij is 1, or with dropout 0 or
// 1/(1 - dropout), drawn again wherever it is needed. No (t, t) matrix is stored: forward keeps a
// running maximum and sum (Milakov and Gimelshein 2018), the gradient computes p again from lse
// (Dao, Fu, Ermon, Rudra, Re 2022).
//
// qkv is (b, t, 3c): queries in columns 0..c, keys in c..2c, values in 2c..3c; head h has columns
// h*D..(h+1)*D of each, D = c / heads. One invocation takes 4 neighbouring positions of a head:
// queries in forward and grad_q, keys in grad_kv. It walks over the other side 4 positions at a
// time, so everything is a product of 4x4 matrices, and a value is read once for 4 uses. Bytes read
// per pair of positions: 3 D (forward), 5 D (grad_q), 6 D (grad_kv), mostly from the cache.
//
// The gradient runs as delta, grad_kv, grad_q: delta stores delta_i for grad_kv in the first
// column of dq_i, which grad_q then overwrites.
//
// Prepended: the constants D, and DROPOUT, which is 1 if anything is dropped; and the functions
// qkv_part, dy_part and y_part, which call qkv_vector, dy_vector and y_vector if D is a multiple
// of 4, else qkv_scalars, dy_scalars and y_scalars.
//
// An invocation keeps its sums only, and of at most 64 columns; it reads its own rows again each
// time, and wider heads take several invocations, each of which computes the scores. Loops over
// parts end at a parameter, so that no driver unrolls them into thousands of reads. All this bounds
// the time to compile (with everything kept and unrolled, minutes in llvmpipe at D = 128) and the
// registers, at about the same speed.

struct Params {
    b: u32, heads: u32, t: u32, scale: f32,
    threshold: u32, factor: f32, key_0: u32, key_1: u32,
    parts: u32,
}
var<immediate> p: Params;

// Rows of D values are taken as vectors of 4, the last one filled up with zeros. There are p.parts
// of them; an invocation has sums for one slab of them.
const SLAB: u32 = min(16u, (D + 3u) / 4u);
const SLABS: u32 = (D + 4u * SLAB - 1u) / (4u * SLAB);
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

// A column for each of four rows.
fn qkv_block(rows: vec4u, part: u32) -> mat4x4f {
    return mat4x4f(qkv_part(rows.x, part), qkv_part(rows.y, part),
        qkv_part(rows.z, part), qkv_part(rows.w, part));
}

fn dy_block(rows: vec4u, part: u32) -> mat4x4f {
    return mat4x4f(dy_part(rows.x, part), dy_part(rows.y, part),
        dy_part(rows.z, part), dy_part(rows.w, part));
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

// Work of one invocation: four positions of a head of a sample, and a slab of its columns.
struct Task {
    sample: u32,
    head: u32,
    qkv: u32,         // where the head's row 0 starts in qkv,
    y: u32,           // in y,
    lse: u32,         // and in lse
    first: u32,       // of the positions
    first_part: u32,  // of the slab
    parts: u32,       // in the slab
}

fn tasks() -> u32 {
    return p.b * p.heads * ((p.t + 3u) / 4u) * SLABS;
}

fn task_of(index: u32) -> Task {
    let blocks = (p.t + 3u) / 4u;
    let head_of_all = index / (blocks * SLABS);
    let sample = head_of_all / p.heads;
    let head = head_of_all % p.heads;
    let first_row = sample * p.t * p.heads * D;
    let first_part = (index % SLABS) * SLAB;
    return Task(sample, head, 3u * first_row + head * D, first_row + head * D,
        head_of_all * p.t, 4u * ((index / SLABS) % blocks),
        first_part, min(SLAB, p.parts - first_part));
}

fn index_of(id: vec3u, groups: vec3u) -> u32 {
    return id.x + id.y * (groups.x * 32u);
}

// Four positions from `first`, those past the end replaced by the last one.
fn four(first: u32) -> vec4u {
    return min(first + LANES, vec4u(p.t - 1u));
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

// m of four pairs of positions of a head, which has a key of its own.
fn kept_four(task: Task, i: vec4u, j: vec4u) -> vec4f {
    let pairs = i * p.t + j;
    let key = vec2u(p.key_0 + task.head, p.key_1);
    let sample = samples[task.sample];
    let words = vec4u(
        threefry2x32(key, vec2u(sample, pairs.x)).x, threefry2x32(key, vec2u(sample, pairs.y)).x,
        threefry2x32(key, vec2u(sample, pairs.z)).x, threefry2x32(key, vec2u(sample, pairs.w)).x);
    return select(vec4f(0.0), vec4f(p.factor), words >= vec4u(p.threshold));
}

// m with a column for each of four queries.
fn kept_by_query(task: Task, i: vec4u, j: vec4u) -> mat4x4f {
    return mat4x4f(kept_four(task, vec4u(i.x), j), kept_four(task, vec4u(i.y), j),
        kept_four(task, vec4u(i.z), j), kept_four(task, vec4u(i.w), j));
}

@compute @workgroup_size(32)
fn forward(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let index = index_of(id, groups);
    if (index >= tasks()) { return; }
    let task = task_of(index);
    let first = task.first;
    let i = first + LANES;
    let c = p.heads * D;
    let width = 3u * c;

    var sum: array<mat4x4f, SLAB>;
    for (var part = 0u; part < task.parts; part++) { sum[part] = mat4x4f(); }
    let own = task.qkv + four(first) * width;
    var highest = vec4f(LOWEST);
    var total = vec4f(0.0);
    var top = vec4u(0u);
    for (var j = 0u; j <= first; j += 4u) {
        let k = task.qkv + c + four(j) * width;
        var s = mat4x4f();  // a column of four scores for each query
        for (var part = 0u; part < p.parts; part++) {
            s += transpose(qkv_block(k, part)) * qkv_block(own, part);
        }
        s *= p.scale;
        let at = j + LANES;
        let counts_x = at <= vec4u(i.x);
        let counts_y = at <= vec4u(i.y);
        let counts_z = at <= vec4u(i.z);
        let counts_w = at <= vec4u(i.w);
        let lowest = vec4f(LOWEST);
        let seen = mat4x4f(select(lowest, s[0], counts_x), select(lowest, s[1], counts_y),
            select(lowest, s[2], counts_z), select(lowest, s[3], counts_w));
        let higher = max(highest,
            vec4f(largest(seen[0]), largest(seen[1]), largest(seen[2]), largest(seen[3])));
        top = max(top, vec4u(largest_magnitude(seen[0]), largest_magnitude(seen[1]),
            largest_magnitude(seen[2]), largest_magnitude(seen[3])));
        let shrink = exp(max(highest - higher, vec4f(-80.0)));
        highest = higher;
        var weights = mat4x4f(
            exp_where(s[0] - higher.x, counts_x), exp_where(s[1] - higher.y, counts_y),
            exp_where(s[2] - higher.z, counts_z), exp_where(s[3] - higher.w, counts_w));
        total = total * shrink + vec4f(1.0) * weights;
        if (DROPOUT != 0u) { weights = product(weights, kept_by_query(task, i, at)); }
        for (var part = 0u; part < task.parts; part++) {
            let values = qkv_block(k + c, task.first_part + part);
            sum[part] = times(sum[part], shrink) + values * weights;
        }
    }

    let logarithms = nan_where_bad(highest + log(total), top, highest);
    total = nan_where_bad(total, top, highest);
    for (var lane = 0u; lane < min(4u, p.t - first); lane++) {
        if (task.first_part == 0u) { new_lse[task.lse + first + lane] = logarithms[lane]; }
        for (var part = 0u; part < task.parts; part++) {
            let value = sum[part][lane] / total[lane];
            put_y(task.y + (first + lane) * c, task.first_part + part, value);
        }
    }
}

// dy . y of four rows.
fn deltas_of(rows: vec4u) -> vec4f {
    var sums = vec4f(0.0);
    for (var part = 0u; part < p.parts; part++) {
        sums += vec4f(
            dot(dy_part(rows.x, part), y_part(rows.x, part)),
            dot(dy_part(rows.y, part), y_part(rows.y, part)),
            dot(dy_part(rows.z, part), y_part(rows.z, part)),
            dot(dy_part(rows.w, part), y_part(rows.w, part)));
    }
    return sums;
}

@compute @workgroup_size(32)
fn delta(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let index = index_of(id, groups);
    if (index >= tasks() || index % SLABS != 0u) { return; }
    let task = task_of(index);
    let rows = four(task.first);
    let c = p.heads * D;
    let deltas = deltas_of(task.y + rows * c);
    for (var lane = 0u; lane < min(4u, p.t - task.first); lane++) {
        dqkv[task.qkv + rows[lane] * 3u * c] = deltas[lane];
    }
}

@compute @workgroup_size(32)
fn grad_kv(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let index = index_of(id, groups);
    if (index >= tasks()) { return; }
    let task = task_of(index);
    let first = task.first;
    let j = first + LANES;
    let c = p.heads * D;
    let width = 3u * c;

    var dk: array<mat4x4f, SLAB>;
    var dv: array<mat4x4f, SLAB>;
    let own = task.qkv + c + four(first) * width;
    for (var part = 0u; part < task.parts; part++) {
        dk[part] = mat4x4f();
        dv[part] = mat4x4f();
    }
    for (var i = first; i < p.t; i += 4u) {
        let rows = four(i);
        let q = task.qkv + rows * width;
        let d = task.y + rows * c;
        var s = mat4x4f();   // a column of four queries for each key
        var dp = mat4x4f();
        for (var part = 0u; part < p.parts; part++) {
            s += transpose(qkv_block(q, part)) * qkv_block(own, part);
            dp += transpose(dy_block(d, part)) * qkv_block(own + c, part);
        }
        s *= p.scale;
        let at = i + LANES;
        let inside = at < vec4u(p.t);
        let l = task.lse + rows;
        let own_lse = vec4f(lse[l.x], lse[l.y], lse[l.z], lse[l.w]);
        // 1, or NaN for queries whose lse is.
        let one = vec4f(nan_where(magnitude_of(own_lse.x) > NAN_ABOVE, 1.0),
            nan_where(magnitude_of(own_lse.y) > NAN_ABOVE, 1.0),
            nan_where(magnitude_of(own_lse.z) > NAN_ABOVE, 1.0),
            nan_where(magnitude_of(own_lse.w) > NAN_ABOVE, 1.0));
        let weights = mat4x4f(
            one * exp_where(s[0] - own_lse, inside & (at >= vec4u(j.x))),
            one * exp_where(s[1] - own_lse, inside & (at >= vec4u(j.y))),
            one * exp_where(s[2] - own_lse, inside & (at >= vec4u(j.z))),
            one * exp_where(s[3] - own_lse, inside & (at >= vec4u(j.w))));
        var dropped = weights;
        if (DROPOUT != 0u) {
            let m = mat4x4f(kept_four(task, rows, vec4u(j.x)), kept_four(task, rows, vec4u(j.y)),
                kept_four(task, rows, vec4u(j.z)), kept_four(task, rows, vec4u(j.w)));
            dropped = product(weights, m);
            dp = product(dp, m);
        }
        let deltas = vec4f(dqkv[q.x], dqkv[q.y], dqkv[q.z], dqkv[q.w]);
        let ds = product(p.scale * weights, dp - mat4x4f(deltas, deltas, deltas, deltas));
        for (var part = 0u; part < task.parts; part++) {
            dk[part] += qkv_block(q, task.first_part + part) * ds;
            dv[part] += dy_block(d, task.first_part + part) * dropped;
        }
    }
    for (var lane = 0u; lane < min(4u, p.t - first); lane++) {
        for (var part = 0u; part < task.parts; part++) {
            put_dqkv(own[lane], task.first_part + part, dk[part][lane]);
            put_dqkv(own[lane] + c, task.first_part + part, dv[part][lane]);
        }
    }
}

@compute @workgroup_size(32)
fn grad_q(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let index = index_of(id, groups);
    if (index >= tasks()) { return; }
    let task = task_of(index);
    let first = task.first;
    let i = first + LANES;
    let c = p.heads * D;
    let width = 3u * c;

    let rows = four(first);
    let own = task.qkv + rows * width;
    let own_y = task.y + rows * c;
    let l = task.lse + rows;
    let own_lse = vec4f(lse[l.x], lse[l.y], lse[l.z], lse[l.w]);
    let deltas = deltas_of(own_y);
    var dq: array<mat4x4f, SLAB>;
    for (var part = 0u; part < task.parts; part++) { dq[part] = mat4x4f(); }
    for (var j = 0u; j <= first; j += 4u) {
        let k = task.qkv + c + four(j) * width;
        var s = mat4x4f();   // a column of four keys for each query
        var dp = mat4x4f();
        for (var part = 0u; part < p.parts; part++) {
            s += transpose(qkv_block(k, part)) * qkv_block(own, part);
            dp += transpose(qkv_block(k + c, part)) * dy_block(own_y, part);
        }
        s *= p.scale;
        let at = j + LANES;
        let weights = mat4x4f(
            exp_where(s[0] - own_lse.x, at <= vec4u(i.x)),
            exp_where(s[1] - own_lse.y, at <= vec4u(i.y)),
            exp_where(s[2] - own_lse.z, at <= vec4u(i.z)),
            exp_where(s[3] - own_lse.w, at <= vec4u(i.w)));
        if (DROPOUT != 0u) { dp = product(dp, kept_by_query(task, i, at)); }
        let ds = p.scale * mat4x4f(
            weights[0] * (dp[0] - deltas.x), weights[1] * (dp[1] - deltas.y),
            weights[2] * (dp[2] - deltas.z), weights[3] * (dp[3] - deltas.w));
        for (var part = 0u; part < task.parts; part++) {
            dq[part] += qkv_block(k, task.first_part + part) * ds;
        }
    }
    for (var lane = 0u; lane < min(4u, p.t - first); lane++) {
        for (var part = 0u; part < task.parts; part++) {
            put_dqkv(own[lane], task.first_part + part, dq[part][lane]);
        }
    }
}
