// Attention over queries, keys and values in columns of one to three tensors, and its gradient.
// uses lib/attention
// uses lib/nan
// uses lib/rng
//
//   s_ij = scale q_i . k_j for j <= i, or if CAUSAL is 0 for all j
//   p_ij = exp(s_ij - lse_i)     y_i = sum_j m_ij p_ij v_j
//   delta_i = dy_i . y_i                  ds_ij = scale p_ij (m_ij dy_i . v_j - delta_i)
//   dq_i = sum_j ds_ij k_j                dk_j = sum_i ds_ij q_i     dv_j = sum_i m_ij p_ij dy_i
//
// lse_i is the logarithm of the sum over j of exp(s_ij), and m_ij is 1, or with dropout 0 or
// 1/(1 - dropout), drawn again wherever it is needed. No (t, t) matrix is stored: forward keeps a
// running maximum and sum (Milakov and Gimelshein 2018), the gradient computes p again from lse
// (Dao, Fu, Ermon, Rudra, Re 2022).
//
// A head has D columns; query head h reads head h / group of keys and values. One invocation takes
// 4 neighbouring positions of a head: queries in forward and grad_q, keys in grad_kv, of all the
// query heads that share them, one after the other. It walks over the other side 4 positions at a
// time, so everything is a product of 4x4 matrices, and a value is read once for 4 uses. Bytes read
// per pair of positions: 3 D (forward), 5 D (grad_q), 6 D (grad_kv), mostly from the cache.
//
// The gradient runs as delta, which stores lse_i and delta_i side by side for the others, grad_kv
// and grad_q.
//
// Prepended: what lib/attention needs. Of its vectors of 4 columns, a head has p.parts.
//
// An invocation keeps its sums only, and of at most 64 columns; it reads its own rows again each
// time, and wider heads take several invocations, each of which computes the scores. Loops over
// parts end at a parameter, so that no driver unrolls them into thousands of reads. All this bounds
// the time to compile (with everything kept and unrolled, minutes in llvmpipe at D = 128) and the
// registers, at about the same speed.

// An invocation has sums for one slab of vectors.
const SLAB: u32 = min(16u, (D + 3u) / 4u);
const SLABS: u32 = (D + 4u * SLAB - 1u) / (4u * SLAB);
// A column for each of four rows.

fn q_block(rows: vec4u, part: u32) -> mat4x4f {
    return mat4x4f(q_part(rows.x, part), q_part(rows.y, part),
        q_part(rows.z, part), q_part(rows.w, part));
}

fn k_block(rows: vec4u, part: u32) -> mat4x4f {
    return mat4x4f(k_part(rows.x, part), k_part(rows.y, part),
        k_part(rows.z, part), k_part(rows.w, part));
}

fn v_block(rows: vec4u, part: u32) -> mat4x4f {
    return mat4x4f(v_part(rows.x, part), v_part(rows.y, part),
        v_part(rows.z, part), v_part(rows.w, part));
}

fn dy_block(rows: vec4u, part: u32) -> mat4x4f {
    return mat4x4f(dy_part(rows.x, part), dy_part(rows.y, part),
        dy_part(rows.z, part), dy_part(rows.w, part));
}

// Work of one invocation: four positions of a head of a sample, and a slab of its columns.
struct Task {
    sample: u32,
    head: u32,
    first: u32,       // of the positions
    first_part: u32,  // of the slab
    parts: u32,       // in the slab
}

fn tasks(heads: u32) -> u32 {
    return p.b * heads * ((p.t + 3u) / 4u) * SLABS;
}

fn task_of(index: u32, heads: u32) -> Task {
    let blocks = (p.t + 3u) / 4u;
    let head_of_all = index / (blocks * SLABS);
    let first_part = (index % SLABS) * SLAB;
    return Task(head_of_all / heads, head_of_all % heads, 4u * ((index / SLABS) % blocks),
        first_part, min(SLAB, p.parts - first_part));
}

fn index_of(id: vec3u, groups: vec3u) -> u32 {
    return invocation_of(id, groups, 32u);
}

// Four positions from `first`, those past the end replaced by the last one.
fn four(first: u32) -> vec4u {
    return min(first + LANES, vec4u(p.t - 1u));
}

// The last block of keys that four queries from `first` on see, and the first one of queries that
// see the four keys.

fn last_key(first: u32) -> u32 {
    return select(p.t - 1u, first, CAUSAL != 0u);
}

fn first_query(first: u32) -> u32 {
    return select(0u, first, CAUSAL != 0u);
}

@compute @workgroup_size(32)
fn forward(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let index = index_of(id, groups);
    if (index >= tasks(p.heads)) { return; }
    let task = task_of(index, p.heads);
    let first = task.first;
    let i = first + LANES;
    let keys = start_of(K, task.sample, task.head);
    let values = start_of(V, task.sample, task.head);

    var sum: array<mat4x4f, SLAB>;
    for (var part = 0u; part < task.parts; part++) { sum[part] = mat4x4f(); }
    let own = start_of(Q, task.sample, task.head) + four(first) * p.q_width;
    var highest = vec4f(LOWEST);
    var total = vec4f(0.0);
    var top = vec4u(0u);
    for (var j = 0u; j <= last_key(first); j += 4u) {
        let k = keys + four(j) * p.k_width;
        var s = mat4x4f();  // a column of four scores for each query
        for (var part = 0u; part < p.parts; part++) {
            s += transpose(k_block(k, part)) * q_block(own, part);
        }
        s *= p.scale;
        let at = j + LANES;
        let counts_x = sees(i.x, at);
        let counts_y = sees(i.y, at);
        let counts_z = sees(i.z, at);
        let counts_w = sees(i.w, at);
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
        if (DROPOUT != 0u) {
            weights = drop_pairs(weights, kept_by_query(task.sample, task.head, i, at));
        }
        weights = operands(weights);
        let v = values + four(j) * p.v_width;
        for (var part = 0u; part < task.parts; part++) {
            sum[part] = times(sum[part], shrink) + v_block(v, task.first_part + part) * weights;
        }
    }

    let bad = are_bad(top, highest);
    let logarithms = nan_where_bad(bad, highest + log(total));
    let y_start = start_of(DY, task.sample, task.head);
    let stats_start = start_of_stats(task.sample, task.head);
    for (var lane = 0u; lane < min(4u, p.t - first); lane++) {
        if (task.first_part == 0u) { new_lse[stats_start + first + lane] = logarithms[lane]; }
        for (var part = 0u; part < task.parts; part++) {
            let value = sum[part][lane] / total[lane];
            let result = nan4_where(bad[lane], value);
            put_y(y_start + (first + lane) * p.heads * D, task.first_part + part, result);
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
    if (index >= tasks(p.heads) || index % SLABS != 0u) { return; }
    let task = task_of(index, p.heads);
    let rows = four(task.first);
    let deltas = deltas_of(start_of(DY, task.sample, task.head) + rows * (p.heads * D));
    let stats_start = start_of_stats(task.sample, task.head);
    for (var lane = 0u; lane < min(4u, p.t - task.first); lane++) {
        let at = stats_start + rows[lane];
        stats[at] = vec2f(lse[at], deltas[lane]);
    }
}

@compute @workgroup_size(32)
fn grad_kv(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let index = index_of(id, groups);
    let kv_heads = p.heads / p.group;
    if (index >= tasks(kv_heads)) { return; }
    let task = task_of(index, kv_heads);
    let first = task.first;
    let j = first + LANES;
    let first_head = task.head * p.group;
    let keys = start_of(K, task.sample, first_head);
    let values = start_of(V, task.sample, first_head);

    var dk: array<mat4x4f, SLAB>;
    var dv: array<mat4x4f, SLAB>;
    let own_k = keys + four(first) * p.k_width;
    let own_v = values + four(first) * p.v_width;
    for (var part = 0u; part < task.parts; part++) {
        dk[part] = mat4x4f();
        dv[part] = mat4x4f();
    }
    for (var head = first_head; head < first_head + p.group; head++) {
        let queries = start_of(Q, task.sample, head);
        let slopes = start_of(DY, task.sample, head);
        let stats_start = start_of_stats(task.sample, head);
        for (var i = first_query(first); i < p.t; i += 4u) {
            let rows = four(i);
            let q = queries + rows * p.q_width;
            let d = slopes + rows * (p.heads * D);
            var s = mat4x4f();   // a column of four queries for each key
            var dp = mat4x4f();
            for (var part = 0u; part < p.parts; part++) {
                s += transpose(q_block(q, part)) * k_block(own_k, part);
                dp += transpose(dy_block(d, part)) * v_block(own_v, part);
            }
            s *= p.scale;
            let at = i + LANES;
            let weights = weights_by_key(s, lse_of(stats_start + rows), at, j);
            var dropped = weights;
            if (DROPOUT != 0u) {
                let kept = kept_by_key(task.sample, head, rows, j);
                dropped = drop_pairs(weights, kept);
                dp = drop_pairs(dp, kept);
            }
            let deltas = delta_of(stats_start + rows);
            let slopes_of_weights = dp - mat4x4f(deltas, deltas, deltas, deltas);
            let ds = operands(product(slope_factor() * weights, slopes_of_weights));
            dropped = operands(dropped);
            for (var part = 0u; part < task.parts; part++) {
                dk[part] += q_block(q, task.first_part + part) * ds;
                dv[part] += dy_block(d, task.first_part + part) * dropped;
            }
        }
    }
    for (var part = 0u; part < task.parts; part++) { dk[part] = scaled(dk[part]); }
    for (var lane = 0u; lane < min(4u, p.t - first); lane++) {
        for (var part = 0u; part < task.parts; part++) {
            put_gradient(K, own_k[lane], task.first_part + part, dk[part][lane]);
            put_gradient(V, own_v[lane], task.first_part + part, dv[part][lane]);
        }
    }
}

@compute @workgroup_size(32)
fn grad_q(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let index = index_of(id, groups);
    if (index >= tasks(p.heads)) { return; }
    let task = task_of(index, p.heads);
    let first = task.first;
    let i = first + LANES;
    let keys = start_of(K, task.sample, task.head);
    let values = start_of(V, task.sample, task.head);

    let rows = four(first);
    let own = start_of(Q, task.sample, task.head) + rows * p.q_width;
    let own_dy = start_of(DY, task.sample, task.head) + rows * (p.heads * D);
    let own_stats = start_of_stats(task.sample, task.head) + rows;
    let own_lse = lse_of(own_stats);
    let deltas = delta_of(own_stats);
    var dq: array<mat4x4f, SLAB>;
    for (var part = 0u; part < task.parts; part++) { dq[part] = mat4x4f(); }
    for (var j = 0u; j <= last_key(first); j += 4u) {
        let k = keys + four(j) * p.k_width;
        let v = values + four(j) * p.v_width;
        var s = mat4x4f();   // a column of four keys for each query
        var dp = mat4x4f();
        for (var part = 0u; part < p.parts; part++) {
            s += transpose(k_block(k, part)) * q_block(own, part);
            dp += transpose(v_block(v, part)) * dy_block(own_dy, part);
        }
        s *= p.scale;
        let at = j + LANES;
        let weights = weights_by_query(s, own_lse, i, at);
        if (DROPOUT != 0u) { dp = drop_pairs(dp, kept_by_query(task.sample, task.head, i, at)); }
        let ds = operands(score_slopes_by_query(weights, dp, deltas));
        for (var part = 0u; part < task.parts; part++) {
            dq[part] += k_block(k, task.first_part + part) * ds;
        }
    }
    for (var part = 0u; part < task.parts; part++) { dq[part] = scaled(dq[part]); }
    for (var lane = 0u; lane < min(4u, p.t - first); lane++) {
        for (var part = 0u; part < task.parts; part++) {
            put_gradient(Q, own[lane], task.first_part + part, dq[part][lane]);
        }
    }
}
