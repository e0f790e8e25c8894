// Rotary positions in halves (Su et al. 2021), of each head of each row, and their inverse.
//
//   y[i] = x[i] cos[t, i] - sign x[i + h] sin[t, i]
//   y[i + h] = x[i + h] cos[t, i] + sign x[i] sin[t, i]     i < h = d / 2
//
// t is the position of the row in its sample; sign is 1, or -1 for the inverse, which is the
// gradient. The table (tokens, d) has the cosines of a position, then its sines.
//
// One workgroup of 64 per 512 pairs, 8 per invocation, because software adapters pay more for an
// invocation than for an element; 16 bytes moved per pair, and the table mostly from the cache.
// Prepended: lib/value, or lib/value4 where h is a multiple of 4; all sizes are in Values.

struct Params {
    pairs: u32,
    half: u32,
    heads: u32,
    tokens: u32,
    sign: f32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<Value>;      // (rows, heads, 2 half)
@group(0) @binding(1) var<storage, read> table: array<Value>;  // (tokens, 2 half)
@group(0) @binding(2) var<storage, read_write> y: array<Value>;

@compute @workgroup_size(64)
fn rotate(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let first = workgroup_of(group, groups) * 512u + local;
    for (var pair = first; pair < min(first + 512u, p.pairs); pair += 64u) {
        let head = pair / p.half;
        let i = pair % p.half;
        let at = 2u * head * p.half + i;
        let angle = 2u * (head / p.heads % p.tokens) * p.half + i;
        let cosine = table[angle];
        let sine = p.sign * table[angle + p.half];
        let a = x[at];
        let b = x[at + p.half];
        y[at] = a * cosine - b * sine;
        y[at + p.half] = b * cosine + a * sine;
    }
}
