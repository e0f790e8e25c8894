// The sum of squares of a bucket of gradients, and how many of them are not finite.
// uses lib/index
// uses lib/joined
//
//   partial_sums  partials[64 g + l] = (sum, not finite) over the elements l, l + lanes, ..
//                 of the strip from g strip to (g + 1) strip
//   group_sums    partials[g] = (sum, not finite) over that strip
//   total         results[slot] = (sum, not finite) over the partials of that slot
//
// A slot has `stride` pairs: the number of its partials, and these. Elements that are not finite
// (all exponent bits set) add nothing to the sum. All sums are in a fixed order. partial_sums: one
// workgroup of 64 per strip, neighbours read neighbours; 4 bytes per element. group_sums is for
// GPUs: one workgroup of 256 per strip. Names that end in 4: on vectors of 4, in which strip is
// counted then, where count is a multiple of 4. total: one workgroup per slot, each of whose
// invocations sums a 256th of the partials.

struct Params {
    count: u32,
    parts: u32,
    strip: u32,
    lanes: u32,             // 64, or all parts if those are fewer
    slot: u32,
    slots: u32,
    stride: u32,
}
var<immediate> p: Params;

// Read as integers: a driver that takes no float to be a NaN or infinite may drop a test of one.
@group(0) @binding(0) var<storage, read> gradients: array<u32>;          // (count)
@group(0) @binding(1) var<storage, read_write> partials: array<f32>;     // (slots, stride, 2)
@group(0) @binding(2) var<storage, read_write> results: array<f32>;      // (slots, 2)

const NORM_EXPONENT: u32 = 0x7F800000u;

const GROUP: u32 = 256u;
const LANES: u32 = GROUP;

// A sum of squares, and the number of elements that are not finite.
struct Joined { sum: f32, bad: u32 }

fn join(a: Joined, b: Joined) -> Joined {
    return Joined(a.sum + b.sum, a.bad + b.bad);
}

// Notes partial sum k of the slot and, with the first one, their number.
fn note(k: u32, sum: f32, bad: u32) {
    let base = 2u * p.slot * p.stride;
    if (k == 0u) { partials[base] = f32(p.parts); }
    partials[base + 2u * (k + 1u)] = sum;
    partials[base + 2u * (k + 1u) + 1u] = f32(bad);
}

// Those of every `step`th gradient from `first` on.
fn summed(first: u32, end: u32, step: u32) -> Joined {
    var sum = 0.0;
    var bad = 0u;
    for (var i = first; i < end; i += step) {
        let bits = gradients[i];
        if ((bits & NORM_EXPONENT) == NORM_EXPONENT) {
            bad += 1u;
        } else {
            let value = bitcast<f32>(bits);
            sum += value * value;
        }
    }
    return Joined(sum, bad);
}

@group(0) @binding(0) var<storage, read> gradients4: array<vec4u>;       // (count / 4)

// Those of every `step`th vector of gradients.
fn summed4(first: u32, end: u32, step: u32) -> Joined {
    var sum = vec4f(0.0);
    var bad = vec4u(0u);
    for (var i = first; i < end; i += step) {
        let bits = gradients4[i];
        let is_bad = (bits & vec4u(NORM_EXPONENT)) == vec4u(NORM_EXPONENT);
        bad += select(vec4u(0u), vec4u(1u), is_bad);
        // The integers are replaced before they become floats.
        let values = bitcast<vec4f>(select(bits, vec4u(0u), is_bad));
        sum += values * values;
    }
    return Joined((sum.x + sum.y) + (sum.z + sum.w), bad.x + bad.y + bad.z + bad.w);
}

@compute @workgroup_size(64)
fn partial_sums(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let k = index(id, groups);
    if (k >= p.parts) { return; }
    let end = min((k / 64u + 1u) * p.strip, p.count);
    let own = summed(k / 64u * p.strip + k % 64u, end, p.lanes);
    note(k, own.sum, own.bad);
}

@compute @workgroup_size(64)
fn partial_sums4(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let k = index(id, groups);
    if (k >= p.parts) { return; }
    let end = min((k / 64u + 1u) * p.strip, p.count / 4u);
    let own = summed4(k / 64u * p.strip + k % 64u, end, p.lanes);
    note(k, own.sum, own.bad);
}

@compute @workgroup_size(GROUP)
fn group_sums(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let part = workgroup_of(group, groups);
    if (part >= p.parts) { return; }
    let end = min((part + 1u) * p.strip, p.count);
    let own = summed(part * p.strip + local, end, GROUP);
    let all = joined(own, local);
    if (local == 0u) { note(part, all.sum, all.bad); }
}

@compute @workgroup_size(GROUP)
fn group_sums4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let part = workgroup_of(group, groups);
    if (part >= p.parts) { return; }
    let end = min((part + 1u) * p.strip, p.count / 4u);
    let own = summed4(part * p.strip + local, end, GROUP);
    let all = joined(own, local);
    if (local == 0u) { note(part, all.sum, all.bad); }
}

@compute @workgroup_size(GROUP)
fn total(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let slot = workgroup_of(group, groups);
    if (slot >= p.slots) { return; }
    let base = 2u * slot * p.stride;
    var sum = 0.0;
    var bad = 0u;
    for (var k = local; k + 1u < p.stride && f32(k) < partials[base]; k += GROUP) {
        sum += partials[base + 2u * (k + 1u)];
        bad += u32(partials[base + 2u * (k + 1u) + 1u]);
    }
    let all = joined(Joined(sum, bad), local);
    if (local > 0u) { return; }
    results[2u * slot] = all.sum;
    results[2u * slot + 1u] = f32(all.bad);
}
