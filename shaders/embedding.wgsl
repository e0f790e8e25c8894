// Rows of a table by ids, and the gradient of the table.
// uses lib/index
//
//   embedding       y[t, j] = table[ids[t] - first_row, j]
//   embedding_grad  dtable[r, j] = sum over the tokens t with ids[t] - first_row = r of dy[t, j]
//                   (+ dtable[r, j], if accumulating)
//
// ids (n), table (v, c), y (n, c). Ids of rows that the table has not mean zeros.
//
// embedding: one invocation per 8 elements of a row, `across` apart so that neighbours touch
// neighbours, 8 bytes each; embedding4: per 4 vectors of 4, where c is a multiple of 4.
//
// embedding_grad: one workgroup per `share` rows of the table, which it alone writes. Of every 2048
// tokens it lists those whose ids are among its rows, by 64 invocations that look at every 64th;
// then each adds their dy to its columns, in the order of the list, so that nothing is added twice
// or in another order and no atomics are needed. It reads the ids once per workgroup and dy once,
// and writes 4 bytes per element of the table and again for each token. embedding_grad4 is the
// same on vectors of 4 columns.

struct Params {
    first: u32,             // the tokens of embedding_grad are first .. n
    n: u32,
    c: u32,
    v: u32,
    across: u32,            // invocations per row of embedding
    share: u32,             // rows of the table per workgroup of embedding_grad
    accumulate: u32,
    first_row: u32,         // the id of row 0
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> ids: array<u32>;              // (n)
@group(0) @binding(1) var<storage, read> table: array<f32>;            // (v, c)
@group(0) @binding(2) var<storage, read_write> y: array<f32>;          // (n, c)
// Gradients bind ids, dy, dtable.
@group(0) @binding(1) var<storage, read> dy: array<f32>;               // (n, c)
@group(0) @binding(2) var<storage, read_write> dtable: array<f32>;     // (v, c)

// The row of a token: v or more if the table has it not.
fn row_of(token: u32) -> u32 {
    return ids[token] - p.first_row;
}

@compute @workgroup_size(64)
fn embedding(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i >= p.n * p.across) { return; }
    let token = i / p.across;
    let row = row_of(token);
    let has = row < p.v;
    let source = select(0u, row, has) * p.c;
    for (var k = i % p.across; k < p.c; k += p.across) {
        y[token * p.c + k] = select(0.0, table[source + k], has);
    }
}

@group(0) @binding(1) var<storage, read> table4: array<vec4f>;          // (v, c / 4)
@group(0) @binding(2) var<storage, read_write> y4: array<vec4f>;        // (n, c / 4)

@compute @workgroup_size(64)
fn embedding4(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i >= p.n * p.across) { return; }
    let token = i / p.across;
    let width = p.c / 4u;
    let row = row_of(token);
    let has = row < p.v;
    let source = select(0u, row, has) * width;
    for (var k = i % p.across; k < width; k += p.across) {
        y4[token * width + k] = select(vec4f(0.0), table4[source + k], has);
    }
}

var<workgroup> counts: array<u32, 64>;
var<workgroup> list: array<u32, 2048>;

// Lists the tokens from base on whose rows are from begin to end; returns their number.
fn note(base: u32, begin: u32, end: u32, local: u32) -> u32 {
    var word = 0u;
    for (var bit = 0u; bit < 32u; bit++) {
        let token = base + 64u * bit + local;
        if (token >= p.n) { break; }
        let row = row_of(token);
        word |= select(0u, 1u << bit, row >= begin && row < end);
    }
    counts[local] = countOneBits(word);
    workgroupBarrier();
    var place = 0u;
    var total = 0u;
    for (var other = 0u; other < 64u; other++) {
        place += select(0u, counts[other], other < local);
        total += counts[other];
    }
    for (var rest = word; rest != 0u; rest &= rest - 1u) {
        list[place] = base + 64u * firstTrailingBit(rest) + local;
        place += 1u;
    }
    workgroupBarrier();
    return total;
}

@compute @workgroup_size(64)
fn embedding_grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let begin = workgroup_of(group, groups) * p.share;
    if (begin >= p.v) { return; }
    let end = min(begin + p.share, p.v);
    if (p.accumulate == 0u) {
        for (var row = begin; row < end; row++) {
            for (var k = local; k < p.c; k += 64u) { dtable[row * p.c + k] = 0.0; }
        }
    }
    for (var base = p.first; base < p.n; base += 2048u) {
        let count = note(base, begin, end, local);
        for (var at = 0u; at < count; at++) {
            let token = list[at];
            let row = row_of(token);
            for (var k = local; k < p.c; k += 64u) {
                dtable[row * p.c + k] += dy[token * p.c + k];
            }
        }
        // Before the list is overwritten with the next tokens.
        workgroupBarrier();
    }
}

@group(0) @binding(1) var<storage, read> dy4: array<vec4f>;             // (n, c / 4)
@group(0) @binding(2) var<storage, read_write> dtable4: array<vec4f>;   // (v, c / 4)

@compute @workgroup_size(64)
fn embedding_grad4(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let width = p.c / 4u;
    let begin = workgroup_of(group, groups) * p.share;
    if (begin >= p.v) { return; }
    let end = min(begin + p.share, p.v);
    if (p.accumulate == 0u) {
        for (var row = begin; row < end; row++) {
            for (var k = local; k < width; k += 64u) { dtable4[row * width + k] = vec4f(0.0); }
        }
    }
    for (var base = p.first; base < p.n; base += 2048u) {
        let count = note(base, begin, end, local);
        for (var at = 0u; at < count; at++) {
            let token = list[at];
            let row = row_of(token);
            for (var k = local; k < width; k += 64u) {
                dtable4[row * width + k] += dy4[token * width + k];
            }
        }
        // Before the list is overwritten with the next tokens.
        workgroupBarrier();
    }
}
