// 2D convolution of pictures that are channels last, and its gradients.
// uses lib/index
//
//   forward      y[b, i, j, o] = sum_ky,kx,q x[b, y, x, q] w[o, q, ky, kx]
//                with y = i sh + ky dh - ph and x = j sw + kx dw - pw
//   input_grad   dx[b, y, x, q] = sum of dy[b, i, j, o] w[o, q, ky, kx] over terms of that place
//   weight_grad  dw[o, q, ky, kx] = sum_b,i,j dy[b, i, j, o] x[b, y, x, q] (+ dw, if accumulating)
//
// x (b, h, w, c), w (o, c / groups, kh, kw), y (b, oh, ow, o); q counts the channels of the
// group of o. Places outside of the picture are zeros. One invocation per output, in the order of
// the formulas, 8 bytes per term. weight_grad: one per weight and part of the places; parts are
// (parts, o, c / groups, kh, kw), which shaders/conv_parts.wgsl adds. `store` is prepended:
// src/kernels/ops/epilogue.rs.

struct Params {
    count: u32,             // outputs
    h: u32, w: u32, c: u32,
    oh: u32, ow: u32, o: u32,
    kh: u32, kw: u32,
    sh: u32, sw: u32,       // stride
    ph: u32, pw: u32,       // padding
    dh: u32, dw: u32,       // dilation
    group_c: u32, group_o: u32,
    accumulate: u32,
    places: u32,            // b oh ow
    part: u32,              // places of a part
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> a: array<f32>;         // x, or dy
@group(0) @binding(1) var<storage, read> b: array<f32>;         // w, or dy
@group(0) @binding(2) var<storage, read_write> c: array<f32>;   // y, dx, or parts of dw

@compute @workgroup_size(64)
fn forward(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let channel = at % p.o;
    let place = at / p.o;
    let first = channel / p.group_o * p.group_c;
    let picture = place / (p.oh * p.ow) * p.h;
    // Places above and on the left are beyond 2^31, and not inside either.
    let top = place / p.ow % p.oh * p.sh - p.ph;
    let left = place % p.ow * p.sw - p.pw;
    var total = 0.0;
    for (var ky = 0u; ky < p.kh; ky++) {
        let y = top + ky * p.dh;
        if (y >= p.h) { continue; }
        for (var kx = 0u; kx < p.kw; kx++) {
            let x = left + kx * p.dw;
            if (x >= p.w) { continue; }
            let source = ((picture + y) * p.w + x) * p.c + first;
            let by = (channel * p.group_c * p.kh + ky) * p.kw + kx;
            for (var q = 0u; q < p.group_c; q++) {
                total += operand(a[source + q]) * operand(b[by + q * p.kh * p.kw]);
            }
        }
    }
    store(at, total);
}

@compute @workgroup_size(64)
fn input_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let channel = at % p.c;
    let place = at / p.c;
    let first = channel / p.group_c * p.group_o;
    let picture = place / (p.h * p.w) * p.oh;
    let y = place / p.w % p.h + p.ph;
    let x = place % p.w + p.pw;
    let taps = p.kh * p.kw;
    var total = 0.0;
    for (var ky = 0u; ky < p.kh; ky++) {
        let down = y - ky * p.dh;
        if (down >= p.oh * p.sh || down % p.sh != 0u) { continue; }
        for (var kx = 0u; kx < p.kw; kx++) {
            let across = x - kx * p.dw;
            if (across >= p.ow * p.sw || across % p.sw != 0u) { continue; }
            let source = ((picture + down / p.sh) * p.ow + across / p.sw) * p.o + first;
            let by = (first * p.group_c + channel % p.group_c) * taps + ky * p.kw + kx;
            for (var q = 0u; q < p.group_o; q++) {
                total += operand(a[source + q]) * operand(b[by + q * p.group_c * taps]);
            }
        }
    }
    store(at, total);
}

@compute @workgroup_size(64)
fn weight_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let taps = p.kh * p.kw;
    let weights = p.o * p.group_c * taps;
    let part = at / weights;
    let kx = at % p.kw;
    let ky = at / p.kw % p.kh;
    let own = at / taps % p.group_c;
    let channel = at % weights / (p.group_c * taps);
    let first = channel / p.group_o * p.group_c + own;
    let end = min(p.places, (part + 1u) * p.part);
    var total = 0.0;
    for (var place = part * p.part; place < end; place++) {
        let y = place / p.ow % p.oh * p.sh + ky * p.dh - p.ph;
        let x = place % p.ow * p.sw + kx * p.dw - p.pw;
        if (y >= p.h || x >= p.w) { continue; }
        let picture = place / (p.oh * p.ow) * p.h;
        let source = ((picture + y) * p.w + x) * p.c + first;
        total += operand(a[source]) * operand(b[place * p.o + channel]);
    }
    store(at, total);
}
