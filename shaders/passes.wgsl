// Count of the passes that a device has run.
//
//   count[0] = count[0] + passes
//
// count (1). One invocation; 4 bytes are read and written.

struct Params { passes: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> count: array<u32>;   // (1)

@compute @workgroup_size(1)
fn passes() {
    count[0] += p.passes;
}
