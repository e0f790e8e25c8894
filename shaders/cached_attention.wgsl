// Attention of single queries over a cache of keys and values.
//
//   y[row, h] = sum_j w[j] v[j] / sum_j w[j]      w[j] = exp(scale q[row, h] . k[j] - m)
//
// k = cache[s, h / group], v = cache[s, kv_heads + h / group], j from 0 to i, with
// place[row] = s t + i; m is the largest product so far (Milakov and Gimelshein 2018). A row
// without a place in the cache has zeros.
//
// One workgroup of KEYS per row, head, slab of at most SLAB values of it and split of its keys, of
// which it takes KEYS at a time: a product per invocation, then each of the slab's values by
// KEYS / lanes invocations, for every such key. 8 bytes moved per float of the keys that a query
// sees. Sums are in a fixed order.
//
// Several splits leave partial sums, which cached_attention_merge.wgsl adds: for every row, head
// and split the d values of sum_j w[j] v[j], then m and sum_j w[j], each in all floats of a Value.
// Of a split without keys that sum is -1.
//
// Prepended: KEYS and IS_SPLIT; lib/value, or lib/value4 where heads and columns are of whole
// vectors; all sizes are in Values.

struct Params {
    items: u32,
    heads: u32,
    group: u32,
    d: u32,
    lanes: u32,
    tokens: u32,
    places: u32,
    query_first: u32,
    query_width: u32,
    scale: f32,
    splits: u32,
    span: u32,              // keys of a split
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> q: array<Value>;        // (rows, query_width)
// (sequences, 2 heads / group, tokens, d)
@group(0) @binding(1) var<storage, read> cache: array<Value>;
@group(0) @binding(2) var<storage, read> places: array<u32>;     // (rows)
// (rows, heads d), or of several splits (rows, heads, splits, d + 2)
@group(0) @binding(3) var<storage, read_write> y: array<Value>;

const SLAB = 64u;
// Weights that each of 16 invocations reduces.
const EACH = KEYS / 16u;
// The lowest f32: a maximum begins with it.
const LOWEST: f32 = -3.4028234e38;

var<workgroup> weights: array<f32, KEYS>;
var<workgroup> parts: array<f32, 16>;
var<workgroup> sums: array<Value, KEYS>;

// The largest of the weights, which all invocations have written.
fn highest(local: u32) -> f32 {
    workgroupBarrier();
    if (local < 16u) {
        var m = weights[EACH * local];
        for (var i = 1u; i < EACH; i++) { m = max(m, weights[EACH * local + i]); }
        parts[local] = m;
    }
    workgroupBarrier();
    var m = parts[0];
    for (var i = 1u; i < 16u; i++) { m = max(m, parts[i]); }
    return m;
}

// The sum of the weights, which all invocations have written.
fn total(local: u32) -> f32 {
    workgroupBarrier();
    if (local < 16u) {
        var sum = 0.0;
        for (var i = 0u; i < EACH; i++) { sum += weights[EACH * local + i]; }
        parts[local] = sum;
    }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < 16u; i++) { sum += parts[i]; }
    return sum;
}

@compute @workgroup_size(KEYS)
fn attend(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let slabs = (p.d + SLAB - 1u) / SLAB;
    let item = workgroup_of(group, groups);
    if (item >= p.items) { return; }
    let split = item % p.splits;
    let slab = item / p.splits % slabs;
    let head = item / (p.splits * slabs) % p.heads;
    let row = item / (p.splits * slabs * p.heads);
    let place = places[row];
    let sequence = place / p.tokens;
    let all_keys = select(0u, place % p.tokens + 1u, place < p.places);
    let keys = min(all_keys, (split + 1u) * p.span);
    let kv_heads = p.heads / p.group;
    let own = sequence * 2u * kv_heads + head / p.group;
    let key_first = own * p.tokens * p.d;
    let value_first = (own + kv_heads) * p.tokens * p.d;
    let query = row * p.query_width + p.query_first + head * p.d;
    // This invocation's value of the head, and every which of the keys it sums up.
    let part = slab * SLAB + local % p.lanes;
    let stripes = KEYS / p.lanes;
    let stripe = local / p.lanes;
    var m = LOWEST;
    var of_own_keys = 0.0;
    var sum = Value();
    for (var first = split * p.span; first < keys; first += KEYS) {
        var score = LOWEST;
        let is_seen = first + local < keys;
        if (is_seen) {
            var product = 0.0;
            let key = key_first + (first + local) * p.d;
            for (var i = 0u; i < p.d; i++) {
                product += sum_of_value(q[query + i] * cache[key + i]);
            }
            score = p.scale * product;
        }
        weights[local] = score;
        let before = m;
        m = max(m, highest(local));
        let factor = exp(before - m);
        let weight = select(0.0, exp(score - m), is_seen);
        of_own_keys = of_own_keys * factor + weight;
        sum = sum * factor;
        weights[local] = weight;
        workgroupBarrier();
        let seen = min(KEYS, keys - first);
        if (stripe < stripes && part < p.d) {
            for (var j = stripe; j < seen; j += stripes) {
                sum += weights[j] * cache[value_first + (first + j) * p.d + part];
            }
        }
        workgroupBarrier();
    }
    weights[local] = of_own_keys;
    sums[local] = sum;
    let all = total(local);
    if (local >= p.lanes || part >= p.d) { return; }
    var result = Value();
    for (var i = 0u; i < stripes; i++) { result += sums[i * p.lanes + local]; }
    if (IS_SPLIT == 0u) {
        y[(row * p.heads + head) * p.d + part] = select(Value(), result / all, keys > 0u);
        return;
    }
    let partial = ((row * p.heads + head) * p.splits + split) * (p.d + 2u);
    y[partial + part] = result;
    if (part == 0u) {
        y[partial + p.d] = Value(m);
        y[partial + p.d + 1u] = Value(select(-1.0, all, keys > split * p.span));
    }
}
