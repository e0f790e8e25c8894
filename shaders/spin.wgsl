// Busy loop for tests of deadlines: a chain of dependent operations.
// uses lib/index
//
//   words[i] = 4096 steps of xorshift from i
//
// words (n). One invocation per element; 4 bytes each. The loop is short, because some drivers
// end loops by themselves: the number of workgroups determines the time.

struct Params { n: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> words: array<u32>;   // (n)

@compute @workgroup_size(64)
fn spin(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let i = index(id, groups);
    var word = i + 1u;
    for (var step = 0u; step < 4096u; step++) {
        word ^= word << 13u;
        word ^= word >> 17u;
        word ^= word << 5u;
    }
    if (i < p.n) { words[i] = word; }
}
