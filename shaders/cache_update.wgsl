// Writes the keys and values of rows to their places in a cache.
//
//   cache[s, h, i] = keys[row, h]      cache[s, kv_heads + h, i] = values[row, h]
//
// place[row] = s t + i. What has no place in the cache is not kept, and the rest of it stays.
//
// One invocation per value of keys and of values; 8 bytes moved per float.
//
// Prepended: lib/value, or lib/value4 where heads and columns are of whole vectors; all sizes are
// in Values.
// uses lib/index

struct Params {
    count: u32,
    kv_heads: u32,
    d: u32,
    tokens: u32,
    places: u32,
    key_first: u32,
    key_width: u32,
    value_first: u32,
    value_width: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> keys: array<Value>;     // (rows, key_width)
@group(0) @binding(1) var<storage, read> values: array<Value>;   // (rows, value_width)
@group(0) @binding(2) var<storage, read> places: array<u32>;     // (rows)
// (sequences, 2 kv_heads, tokens, d)
@group(0) @binding(3) var<storage, read_write> cache: array<Value>;

@compute @workgroup_size(64)
fn update(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let half = p.kv_heads * p.d;
    let row = at / (2u * half);
    let column = at % (2u * half);
    let place = places[row];
    if (place >= p.places) { return; }
    let head = column / p.d;
    let sequence = place / p.tokens;
    let first = ((sequence * 2u * p.kv_heads + head) * p.tokens + place % p.tokens) * p.d;
    var value: Value;
    if (column < half) {
        value = keys[row * p.key_width + p.key_first + column];
    } else {
        value = values[row * p.value_width + p.value_first + column - half];
    }
    cache[first + column % p.d] = value;
}
