// A hash of 64 bits over a range of a buffer's words, which depends on their values and
// positions.
// uses lib/index
//
//   place = a(i + 0x9E3779B9)
//   hash  = sum over i in first .. first + count, per lane and modulo 2^32, of
//           (a(w[i] xor place), b(w[i] + (place rotated by 16) + 0x85EBCA77))
//
// a is the finalizer of MurmurHash3 (Appleby 2011) and b the `lowbias32` of Wellons (2018), both
// bijections, so that a word that changes alone always changes the hash. A sum may be taken in any
// order and in parts: the hashes of two halves of a range add up to the hash of the range.
//
// partial_sums: one workgroup of 64 per strip of neighbouring words, of which invocation l sums
// the words l, l + lanes, ..; neighbours read neighbours, 4 bytes per word. partial_sums4: on
// vectors of 4 words, in which strip is counted then, where first and count are multiples of 4.
// total: one workgroup, each of whose invocations sums a 256th of the partials; then the first
// one sums these sums.

struct Params {
    first: u32,
    count: u32,
    parts: u32,
    strip: u32,
    lanes: u32,             // 64, or all parts if those are fewer
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(0) var<storage, read> words4: array<vec4u>;
@group(0) @binding(1) var<storage, read_write> partials: array<vec2u>;     // (parts)
@group(0) @binding(2) var<storage, read_write> result: array<vec2u>;       // (1)

fn mix_a(word: u32) -> u32 {
    var h = word;
    h = (h ^ (h >> 16u)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13u)) * 0xC2B2AE35u;
    return h ^ (h >> 16u);
}

fn mix_b(word: u32) -> u32 {
    var h = word;
    h = (h ^ (h >> 16u)) * 0x7FEB352Du;
    h = (h ^ (h >> 15u)) * 0x846CA68Bu;
    return h ^ (h >> 16u);
}

fn term(i: u32, word: u32) -> vec2u {
    let place = mix_a(i + 0x9E3779B9u);
    let turned = (place << 16u) | (place >> 16u);
    return vec2u(mix_a(word ^ place), mix_b(word + turned + 0x85EBCA77u));
}

@compute @workgroup_size(64)
fn partial_sums(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let k = index(id, groups);
    if (k >= p.parts) { return; }
    var sum = vec2u(0u);
    let end = min((k / 64u + 1u) * p.strip, p.count);
    for (var at = k / 64u * p.strip + k % 64u; at < end; at += p.lanes) {
        let i = p.first + at;
        sum += term(i, words[i]);
    }
    partials[k] = sum;
}

@compute @workgroup_size(64)
fn partial_sums4(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let k = index(id, groups);
    if (k >= p.parts) { return; }
    var sum = vec2u(0u);
    let end = min((k / 64u + 1u) * p.strip, p.count / 4u);
    for (var at = k / 64u * p.strip + k % 64u; at < end; at += p.lanes) {
        let four = words4[p.first / 4u + at];
        let i = p.first + 4u * at;
        sum += term(i, four.x) + term(i + 1u, four.y);
        sum += term(i + 2u, four.z) + term(i + 3u, four.w);
    }
    partials[k] = sum;
}

var<workgroup> sums: array<vec2u, 256>;

@compute @workgroup_size(256)
fn total(@builtin(local_invocation_index) local: u32) {
    var sum = vec2u(0u);
    for (var k = local; k < p.parts; k += 256u) { sum += partials[k]; }
    sums[local] = sum;
    workgroupBarrier();
    if (local > 0u) { return; }
    for (var other = 1u; other < 256u; other++) { sum += sums[other]; }
    result[0] = sum;
}
