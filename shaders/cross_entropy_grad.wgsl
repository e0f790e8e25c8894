// Gradient of the cross-entropy of logits with integer targets, also in the place of the logits.
// uses lib/classes
// uses lib/index
// uses lib/nan
// uses lib/run
//
//   dx[r, j] = loss_scale (exp(x[r, j] - lse[r]) - kept (j == target - first) - even), or 0 if the
//              target is ignored; kept = 1 and even = 0 without label smoothing
//
// x (n, v), the columns of the classes from first on; targets (n), lse (n) over all classes. A
// target that is no class is ignored, such as the largest u32.
//
// cross_entropy_grad: one invocation per 8 elements of a row, 8 bytes each; cross_entropy_grad4:
// per 8 vectors of 4. Prepended: x and x4, and the functions put and put4, which write dx.

@group(0) @binding(2) var<storage, read> lse_in: array<f32>;          // (n)

@compute @workgroup_size(64)
fn cross_entropy_grad(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let i = index(id, groups);
    if (i >= p.n * p.across) { return; }
    let row = i / p.across;
    let counts = targets[row] < p.classes;
    let column = targets[row] - p.first;
    let lse_of_row = lse_in[row];
    let is_nan = magnitude_of(lse_of_row) > NAN_ABOVE;
    let own = run(i % p.across, p.step, p.v);
    for (var j = own.x; j < own.y; j += p.step) {
        let hit = select(p.even, p.even + p.kept, j == column);
        let slope = p.loss_scale * (exp(x[row * p.v + j] - lse_of_row) - hit);
        put(row * p.v + j, select(0.0, nan_where(is_nan, slope), counts));
    }
}

@compute @workgroup_size(64)
fn cross_entropy_grad4(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let i = index(id, groups);
    if (i >= p.n * p.across) { return; }
    let row = i / p.across;
    let width = p.v / 4u;
    let counts = targets[row] < p.classes;
    let column = targets[row] - p.first;
    let lse_of_row = lse_in[row];
    let is_nan = magnitude_of(lse_of_row) > NAN_ABOVE;
    let own = run(i % p.across, p.step, width);
    for (var j = own.x; j < own.y; j += p.step) {
        let columns = 4u * j + vec4u(0u, 1u, 2u, 3u);
        let hits = select(vec4f(p.even), vec4f(p.even + p.kept), columns == vec4u(column));
        let probabilities = exp(x4[row * width + j] - lse_of_row);
        let slopes = nan4_where(is_nan, p.loss_scale * (probabilities - hits));
        put4(row * width + j, select(vec4f(0.0), slopes, counts));
    }
}
