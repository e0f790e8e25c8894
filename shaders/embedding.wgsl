// Rows of a table by ids, and the gradient of the table.
// uses lib/index
//
//   embedding       y[t, j] = table[ids[t], j]
//   embedding_grad  dtable[r, j] = sum over the tokens t with ids[t] = r of dy[t, j]
//                   (+ dtable[r, j], if accumulating)
//
// ids (n), table (v, c), y (n, c). Ids beyond the table mean its last row. embedding: one
// invocation per element of y, 8 bytes each. embedding_grad: the rows of the table are dealt
// out to `parts`, row r to part r % parts; one invocation per (part, column) walks over all
// tokens in order and adds those of its part, so that nothing is added twice or in another order
// and no atomics are needed. It reads `parts` times the ids, and dy and its rows once. Before it,
// `clear` zeroes the table unless it accumulates.

struct Params { n: u32, c: u32, v: u32, parts: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> ids: array<u32>;              // (n)
@group(0) @binding(1) var<storage, read> table: array<f32>;            // (v, c)
@group(0) @binding(2) var<storage, read_write> y: array<f32>;          // (n, c)
// Gradients bind ids, dy, dtable.
@group(0) @binding(1) var<storage, read> dy: array<f32>;               // (n, c)
@group(0) @binding(2) var<storage, read_write> dtable: array<f32>;     // (v, c)

fn row_of(token: u32) -> u32 {
    return min(ids[token], p.v - 1u);
}

@compute @workgroup_size(64)
fn embedding(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.n * p.c) { y[i] = table[row_of(i / p.c) * p.c + i % p.c]; }
}

@compute @workgroup_size(64)
fn clear(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let i = index(id, groups);
    if (i < p.v * p.c) { dtable[i] = 0.0; }
}

@compute @workgroup_size(64)
fn embedding_grad(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let i = index(id, groups);
    if (i >= p.parts * p.c) { return; }
    let part = i / p.c;
    let column = i % p.c;
    for (var token = 0u; token < p.n; token++) {
        let row = row_of(token);
        if (row % p.parts == part) { dtable[row * p.c + column] += dy[token * p.c + column]; }
    }
}
