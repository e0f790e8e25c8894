// The gradient of an embedding's table with sums in registers; the formula is that of
// embedding.wgsl.
//
//   dtable[r, k] = sum over the tokens t with ids[t] - first_row = r of dy[t, k]
//                  (+ dtable[r, k], if accumulating)
//
// Workgroups of 256. One has the rows r of the table with r mod owners = its owner number, so that
// the most frequent ids, which are neighbours in many vocabularies, are of different workgroups;
// of these rows it has COLUMNS neighbouring columns, and alone writes them. Of every 2048 tokens it
// lists those whose ids are among its rows. A run of tokens of one row in this list is shared by
// LANES = 256 / COLUMNS invocations per column, each of which adds every LANES-th token in
// registers, 4 at a time, and the first adds these sums to the table: nothing is added twice or in
// another order, and no atomics are needed. It reads the ids once per workgroup and dy once, and
// reads and writes 4 bytes per element of the table for each run.
//
// Prepended: Value, which is f32, or vec4f for columns of vectors of 4; and COLUMNS, a power of
// two.

struct Params {
    first: u32,             // the tokens are first .. n
    n: u32,
    width: u32,             // columns, in Values
    v: u32,
    owners: u32,            // v, or 2^10 and more, so that r / owners has 21 bits
    accumulate: u32,
    first_row: u32,         // the id of row 0
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> ids: array<u32>;              // (n)
@group(0) @binding(1) var<storage, read> dy: array<Value>;             // (n, width)
@group(0) @binding(2) var<storage, read_write> dtable: array<Value>;   // (v, width)

const GROUP: u32 = 256u;
const NOTED: u32 = 2048u;
const TOKEN_BITS: u32 = 11u;
// Invocations that share a column.
const LANES: u32 = GROUP / COLUMNS;

var<workgroup> counts: array<u32, 256>;
var<workgroup> sums: array<u32, 16>;
// Tokens of the owner: number among the noted ones, and r / owners in the higher bits.
var<workgroup> list: array<u32, 2048>;
var<workgroup> tile: array<Value, 256>;

// The row of a token: v or more if the table has it not.
fn row_of(token: u32) -> u32 {
    return ids[token] - p.first_row;
}

// Lists the tokens from base on whose rows are the owner's; returns their number.
fn note(base: u32, owner: u32, local: u32) -> u32 {
    var word = 0u;
    for (var turn = 0u; turn < NOTED / GROUP; turn++) {
        let token = base + GROUP * turn + local;
        if (token < p.n) {
            let row = row_of(token);
            word |= select(0u, 1u << turn, row < p.v && row % p.owners == owner);
        }
    }
    counts[local] = countOneBits(word);
    workgroupBarrier();
    if (local < 16u) {
        var sum = 0u;
        for (var i = 0u; i < 16u; i++) { sum += counts[16u * local + i]; }
        sums[local] = sum;
    }
    workgroupBarrier();
    var place = 0u;
    var total = 0u;
    for (var i = 0u; i < 16u; i++) {
        let before = local / 16u * 16u + i;
        place += select(0u, sums[i], i < local / 16u) + select(0u, counts[before], before < local);
        total += sums[i];
    }
    for (var rest = word; rest != 0u; rest &= rest - 1u) {
        let number = GROUP * firstTrailingBit(rest) + local;
        list[place] = ((row_of(base + number) / p.owners) << TOKEN_BITS) | number;
        place += 1u;
    }
    workgroupBarrier();
    return total;
}

// The value of token number `at` in the list.
fn value_of(base: u32, at: u32, column: u32) -> Value {
    return dy[(base + (list[at] & (NOTED - 1u))) * p.width + column];
}

// The sum over the tokens at, at + LANES, .. below end of the list.
fn sum_of(base: u32, at: u32, end: u32, column: u32) -> Value {
    var sum = Value();
    var i = at;
    for (; i + 3u * LANES < end; i += 4u * LANES) {
        let first = value_of(base, i, column);
        let second = value_of(base, i + LANES, column);
        let third = value_of(base, i + 2u * LANES, column);
        let fourth = value_of(base, i + 3u * LANES, column);
        sum += (first + second) + (third + fourth);
    }
    for (; i < end; i += LANES) { sum += value_of(base, i, column); }
    return sum;
}

@compute @workgroup_size(256)
fn embedding_rows(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    let slices = (p.width + COLUMNS - 1u) / COLUMNS;
    let owner = index / slices;
    if (owner >= p.owners) { return; }
    let column = index % slices * COLUMNS + local % COLUMNS;
    let lane = local / COLUMNS;
    let writes = lane == 0u && column < p.width;
    if (p.accumulate == 0u && writes) {
        for (var row = owner; row < p.v; row += p.owners) {
            dtable[row * p.width + column] = Value();
        }
    }
    for (var base = p.first; base < p.n; base += NOTED) {
        let count = note(base, owner, local);
        var at = 0u;
        while (at < count) {
            let key = list[at] >> TOKEN_BITS;
            // The end of the run; an owner of one row has one run.
            var end = select(at + 1u, count, p.owners == p.v);
            while (end < count) {
                if (list[end] >> TOKEN_BITS != key) { break; }
                end += 1u;
            }
            var sum = Value();
            if (column < p.width) { sum = sum_of(base, at + lane, end, column); }
            tile[local] = sum;
            workgroupBarrier();
            if (writes) {
                for (var other = 1u; other < min(LANES, end - at); other++) {
                    sum += tile[other * COLUMNS + local];
                }
                dtable[(key * p.owners + owner) * p.width + column] += sum;
            }
            // Before the next run, or list, is written.
            workgroupBarrier();
            at = end;
        }
    }
}
