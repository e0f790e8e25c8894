// 2D convolution of every channel by itself, and its gradients, four channels at a time.
// uses lib/index
//
//   gathered      y[b, i, j, c] = sum_tap x[b, i, j + tap, c] w[tap, c], or dx alike from dy
//   weight_parts  parts[part, tap, c] = sum_b,i,j of x dy over the rows of the part
//
// x (b, h, w, c), y (b, oh, ow, c); w is (taps, c), as shaders/conv_weights.wgsl writes it, and c
// counts vectors of four channels. gathered: one invocation per vector of the result, 32 bytes per
// tap. weight_parts: one per vector of channels, tap and part, 32 bytes per place;
// shaders/conv_parts.wgsl adds the parts. `store4`, which stores a vector of the result, is
// prepended (src/kernels/ops/conv/depthwise.rs, src/kernels/ops/fused_vectors.rs).

struct Params {
    count: u32,             // vectors of the result
    h: u32, w: u32, c: u32,     // pictures that are read
    oh: u32, ow: u32,           // pictures that are written, or dy
    kh: u32, kw: u32,
    step_y: u32, step_x: u32,   // places that are read, from a row or column to the next
    // Tap k reads (place step + first + k tap) / divisor, if that is whole.
    divisor_y: u32, divisor_x: u32,
    first_y: u32, first_x: u32,
    tap_y: u32, tap_x: u32,
    lines: u32,             // rows of dy
    part: u32,              // .. of a part
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> w: array<vec4f>;

@compute @workgroup_size(64)
fn gathered(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let channel = at % p.c;
    let place = at / p.c;
    let picture = place / (p.oh * p.ow) * p.h;
    // Places above and on the left are beyond 2^31, and not inside either.
    let top = place / p.ow % p.oh * p.step_y + p.first_y;
    let left = place % p.ow * p.step_x + p.first_x;
    var total = vec4f();
    for (var ky = 0u; ky < p.kh; ky++) {
        let down = top + ky * p.tap_y;
        if (down >= p.h * p.divisor_y || down % p.divisor_y != 0u) { continue; }
        let line = (picture + down / p.divisor_y) * p.w;
        for (var kx = 0u; kx < p.kw; kx++) {
            let across = left + kx * p.tap_x;
            if (across >= p.w * p.divisor_x || across % p.divisor_x != 0u) { continue; }
            let by = operand4(w[(ky * p.kw + kx) * p.c + channel]);
            total += operand4(x[(line + across / p.divisor_x) * p.c + channel]) * by;
        }
    }
    store4(at, total);
}

@group(0) @binding(1) var<storage, read> dy: array<vec4f>;

@compute @workgroup_size(64)
fn weight_parts(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let channel = at % p.c;
    let tap = at / p.c % (p.kh * p.kw);
    let part = at / (p.c * p.kh * p.kw);
    let end = min(p.lines, (part + 1u) * p.part);
    var total = vec4f();
    for (var line = part * p.part; line < end; line++) {
        let y = line % p.oh * p.step_y + p.first_y + tap / p.kw * p.tap_y;
        if (y >= p.h) { continue; }
        let row = (line / p.oh * p.h + y) * p.w;
        var across = p.first_x + tap % p.kw * p.tap_x;
        for (var place = 0u; place < p.ow; place++) {
            if (across < p.w) {
                total += operand4(x[(row + across) * p.c + channel])
                    * operand4(dy[(line * p.ow + place) * p.c + channel]);
            }
            across += p.step_x;
        }
    }
    store4(at, total);
}
