// The values of LANES neighbouring invocations of a workgroup of GROUP, joined for all of them:
// INNER at a time and then the results of these, in an order that never changes, with two barriers.
// A file that uses it has GROUP, LANES, which divides it and is a multiple of 8, the type Joined,
// and `join(a: Joined, b: Joined) -> Joined`. No bytes of storage are moved.

const INNER: u32 = select(16u, 8u, LANES < 128u);
const OUTER: u32 = LANES / INNER;

var<workgroup> parts_of_all: array<Joined, GROUP>;
var<workgroup> joined_parts: array<Joined, GROUP / INNER>;

// All invocations of the workgroup must call it. The barrier of the next call is behind all that
// reads here.
fn joined(mine: Joined, local: u32) -> Joined {
    parts_of_all[local] = mine;
    workgroupBarrier();
    if (local < GROUP / INNER) {
        let first = local / OUTER * LANES + local % OUTER;
        var part = parts_of_all[first];
        for (var i = 1u; i < INNER; i++) { part = join(part, parts_of_all[first + i * OUTER]); }
        joined_parts[local] = part;
    }
    workgroupBarrier();
    let first = local / LANES * OUTER;
    var whole = joined_parts[first];
    for (var i = 1u; i < OUTER; i++) { whole = join(whole, joined_parts[first + i]); }
    return whole;
}
