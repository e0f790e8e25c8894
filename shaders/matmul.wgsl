// The product of two matrices, or of each pair in two batches of them.
// uses lib/index
//
//   c[z, i, j] = sum_q a[z, i, q] b[z, q, j]  (+ c, if accumulating)
//
// c is (batch, m, n); a is (batch, m, k) or transposed (batch, k, m), b is (batch, k, n) or
// transposed (batch, n, k), as the strides define. One invocation per output, in the order of q:
// 2 k FLOPs on 8 k bytes. The tiles of src/kernels/ops/matmul/tile.rs compute the same faster.
// Prepended: `operand`, which rounds one in mixed precision, and `store`
// (src/kernels/ops/epilogue.rs).

struct Params {
    count: u32,             // batch m n
    m: u32,
    n: u32,
    k: u32,
    a_row: u32,             // elements from a[z, i, q] to a[z, i + 1, q]
    a_step: u32,            // .. to a[z, i, q + 1]
    b_step: u32,            // elements from b[z, q, j] to b[z, q + 1, j]
    b_column: u32,          // .. to b[z, q, j + 1]
    accumulate: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;

@compute @workgroup_size(64)
fn naive(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let j = at % p.n;
    let i = at / p.n % p.m;
    let z = at / (p.n * p.m);
    var a_at = z * p.m * p.k + i * p.a_row;
    var b_at = z * p.k * p.n + j * p.b_column;
    var total = 0.0;
    for (var q = 0u; q < p.k; q++) {
        total += operand(a[a_at]) * operand(b[b_at]);
        a_at += p.a_step;
        b_at += p.b_step;
    }
    store(at, total);
}
