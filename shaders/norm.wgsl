// The sum of squares of a bucket of gradients, and how many of them are not finite.
// uses lib/index
//
//   partial_sums  partials[64 g + l] = (sum, not finite) over the elements l, l + lanes, ..
//                 of the strip from g strip to (g + 1) strip
//   total         results[slot] = (sum, not finite) over partials[0 .. parts]
//
// Elements that are not finite (all exponent bits set) add nothing to the sum. All sums are in a
// fixed order. partial_sums: one workgroup of 64 per strip, neighbours read neighbours; 4 bytes
// per element. partial_sums4: on vectors of 4, in which strip is counted then, where count is a
// multiple of 4. total: one workgroup, each of whose invocations sums a 256th of the partials;
// then the first one sums these sums.

struct Params {
    count: u32,
    parts: u32,
    strip: u32,
    lanes: u32,             // 64, or all parts if those are fewer
    slot: u32,
}
var<immediate> p: Params;

// Read as integers: a driver that takes no float to be a NaN or infinite may drop a test of one.
@group(0) @binding(0) var<storage, read> gradients: array<u32>;          // (count)
@group(0) @binding(1) var<storage, read_write> partials: array<f32>;     // (parts, 2)
@group(0) @binding(2) var<storage, read_write> results: array<f32>;      // (slots, 2)

const NORM_EXPONENT: u32 = 0x7F800000u;
var<workgroup> sums: array<f32, 256>;
var<workgroup> counts: array<u32, 256>;

@compute @workgroup_size(64)
fn partial_sums(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let k = index(id, groups);
    if (k >= p.parts) { return; }
    var sum = 0.0;
    var bad = 0u;
    let end = min((k / 64u + 1u) * p.strip, p.count);
    for (var i = k / 64u * p.strip + k % 64u; i < end; i += p.lanes) {
        let bits = gradients[i];
        if ((bits & NORM_EXPONENT) == NORM_EXPONENT) {
            bad += 1u;
        } else {
            let value = bitcast<f32>(bits);
            sum += value * value;
        }
    }
    partials[2u * k] = sum;
    partials[2u * k + 1u] = f32(bad);
}

@group(0) @binding(0) var<storage, read> gradients4: array<vec4u>;       // (count / 4)

@compute @workgroup_size(64)
fn partial_sums4(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let k = index(id, groups);
    if (k >= p.parts) { return; }
    var sum = vec4f(0.0);
    var bad = vec4u(0u);
    let end = min((k / 64u + 1u) * p.strip, p.count / 4u);
    for (var i = k / 64u * p.strip + k % 64u; i < end; i += p.lanes) {
        let bits = gradients4[i];
        let is_bad = (bits & vec4u(NORM_EXPONENT)) == vec4u(NORM_EXPONENT);
        bad += select(vec4u(0u), vec4u(1u), is_bad);
        // The integers are replaced before they become floats.
        let values = bitcast<vec4f>(select(bits, vec4u(0u), is_bad));
        sum += values * values;
    }
    partials[2u * k] = (sum.x + sum.y) + (sum.z + sum.w);
    partials[2u * k + 1u] = f32(bad.x + bad.y + bad.z + bad.w);
}

@compute @workgroup_size(256)
fn total(@builtin(local_invocation_index) local: u32) {
    var sum = 0.0;
    var bad = 0u;
    for (var k = local; k < p.parts; k += 256u) {
        sum += partials[2u * k];
        bad += u32(partials[2u * k + 1u]);
    }
    sums[local] = sum;
    counts[local] = bad;
    workgroupBarrier();
    if (local > 0u) { return; }
    for (var other = 1u; other < 256u; other++) {
        sum += sums[other];
        bad += counts[other];
    }
    results[2u * p.slot] = sum;
    results[2u * p.slot + 1u] = f32(bad);
}
