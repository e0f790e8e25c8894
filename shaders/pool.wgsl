// Pooling of pictures that are channels last, and the gradients.
// uses lib/index
//
//   max_pool       y[b, i, j, c] = max of x[b, i sh + ky dh - ph, j sw + kx dw - pw, c] over the
//                  window, places[b, i, j, c] = ky kw + kx of the first place that has it
//   max_pool_grad  dx[b, y, x, c] = sum of dy over the windows whose maximum is at that place
//   avg_pool       y[b, i, j, c] = sum of x over the window / (kh kw), with padding as zeros
//   avg_pool_grad  dx[b, y, x, c] = sum of dy over the windows with that place / (kh kw)
//
// x (b, h, w, c), y (b, oh, ow, c). One invocation per Value of the result: per channel, or per
// four neighbouring ones, which `Value` and `Bits` say (prepended: src/kernels/ops/pool.rs), and c
// counts those. 4 bytes are read per channel and place of a window, 8 by max_pool_grad.
//
// Where windows do not overlap and there is no padding, max_pool_grad_cells has one invocation per
// Value of dy, which writes its cell of dx, from its window to the next ones or to the edge: 8
// bytes are read per window and channel, and its picture, row and column are computed once.

struct Params {
    count: u32,             // Values of the result, or of dy of max_pool_grad_cells
    h: u32, w: u32, c: u32,
    oh: u32, ow: u32,
    kh: u32, kw: u32,
    sh: u32, sw: u32,       // stride
    ph: u32, pw: u32,       // padding
    dh: u32, dw: u32,       // dilation
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<Value>;               // x, or dy of avg_pool
@group(0) @binding(1) var<storage, read_write> y: array<Value>;         // y, or dx of avg_pool
@group(0) @binding(2) var<storage, read_write> places: array<Value>;
// The gradient of the maximum binds places, dy, dx.
@group(0) @binding(0) var<storage, read> known: array<Value>;
@group(0) @binding(1) var<storage, read> dy: array<Value>;
@group(0) @binding(2) var<storage, read_write> dx: array<Value>;

struct Place { picture: u32, row: u32, column: u32, channel: u32 }

// The place of a Value in pictures of so many rows and columns.
fn place_of(at: u32, rows: u32, columns: u32) -> Place {
    let place = at / p.c;
    return Place(place / (rows * columns), place / columns % rows, place % columns, at % p.c);
}

// Whole numbers in the order of the values: -0 as 0, a NaN above all others.
fn ranks(value: Value) -> Bits {
    let given = bitcast<Bits>(value);
    let bits = select(given, Bits(0u), given == Bits(0x80000000u));
    let ranked = select(bits | Bits(0x80000000u), ~bits, bits >= Bits(0x80000000u));
    return select(ranked, Bits(0xFFFFFFFFu), (bits & Bits(0x7FFFFFFFu)) > Bits(0x7F800000u));
}

@compute @workgroup_size(64)
fn max_pool(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let own = place_of(at, p.oh, p.ow);
    let picture = own.picture * p.h;
    // Places above and on the left are beyond 2^31, and not inside either.
    let top = own.row * p.sh - p.ph;
    let left = own.column * p.sw - p.pw;
    // No value has the rank 0, so that the first one is taken, whatever it is.
    var highest = Bits(0u);
    var best = Value(0.0);
    var best_place = Value(0.0);
    for (var ky = 0u; ky < p.kh; ky++) {
        let down = top + ky * p.dh;
        if (down >= p.h) { continue; }
        let line = (picture + down) * p.w;
        for (var kx = 0u; kx < p.kw; kx++) {
            let across = left + kx * p.dw;
            if (across >= p.w) { continue; }
            let value = x[(line + across) * p.c + own.channel];
            let rank = ranks(value);
            let wins = rank > highest;
            highest = select(highest, rank, wins);
            best = select(best, value, wins);
            best_place = select(best_place, Value(f32(ky * p.kw + kx)), wins);
        }
    }
    y[at] = best;
    places[at] = best_place;
}

// The windows with a place, along one axis: the first one, and the one behind the last.
fn windows(at: u32, span: u32, stride: u32, padding: u32, count: u32) -> vec2u {
    let place = at + padding;
    let first = select(0u, (place - span) / stride + 1u, place >= span);
    return vec2u(first, min(place / stride + 1u, count));
}

@compute @workgroup_size(64)
fn max_pool_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let own = place_of(at, p.h, p.w);
    let picture = own.picture * p.oh;
    let rows = windows(own.row, (p.kh - 1u) * p.dh + 1u, p.sh, p.ph, p.oh);
    let columns = windows(own.column, (p.kw - 1u) * p.dw + 1u, p.sw, p.pw, p.ow);
    var total = Value(0.0);
    for (var i = rows.x; i < rows.y; i++) {
        let down = own.row + p.ph - i * p.sh;
        if (down % p.dh != 0u) { continue; }
        let ky = down / p.dh;
        for (var j = columns.x; j < columns.y; j++) {
            let across = own.column + p.pw - j * p.sw;
            if (across % p.dw != 0u) { continue; }
            let kx = across / p.dw;
            let source = ((picture + i) * p.ow + j) * p.c + own.channel;
            total += select(Value(0.0), dy[source], known[source] == Value(f32(ky * p.kw + kx)));
        }
    }
    dx[at] = total;
}

@compute @workgroup_size(64)
fn max_pool_grad_cells(
    @builtin(global_invocation_id) id: vec3u,
    @builtin(num_workgroups) groups: vec3u,
) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let own = place_of(at, p.oh, p.ow);
    let picture = own.picture * p.h;
    let top = own.row * p.sh;
    let left = own.column * p.sw;
    // The last cells end with the picture.
    let bottom = select(top + p.sh, p.h, own.row + 1u == p.oh);
    let right = select(left + p.sw, p.w, own.column + 1u == p.ow);
    let best_place = known[at];
    let gradient = dy[at];
    for (var down = top; down < bottom; down++) {
        let line = (picture + down) * p.w;
        for (var across = left; across < right; across++) {
            let ky = down - top;
            let kx = across - left;
            // Outside of the window, -1 is the place of no maximum.
            let tap = select(-1.0, f32(ky * p.kw + kx), ky < p.kh && kx < p.kw);
            dx[(line + across) * p.c + own.channel] =
                select(Value(0.0), gradient, best_place == Value(tap));
        }
    }
}

@compute @workgroup_size(64)
fn avg_pool(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let own = place_of(at, p.oh, p.ow);
    let picture = own.picture * p.h;
    let top = own.row * p.sh - p.ph;
    let left = own.column * p.sw - p.pw;
    var total = Value(0.0);
    for (var ky = 0u; ky < p.kh; ky++) {
        let down = top + ky * p.dh;
        if (down >= p.h) { continue; }
        let line = (picture + down) * p.w;
        for (var kx = 0u; kx < p.kw; kx++) {
            let across = left + kx * p.dw;
            if (across < p.w) { total += x[(line + across) * p.c + own.channel]; }
        }
    }
    y[at] = total / f32(p.kh * p.kw);
}

@compute @workgroup_size(64)
fn avg_pool_grad(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let at = index(id, groups);
    if (at >= p.count) { return; }
    let own = place_of(at, p.h, p.w);
    let picture = own.picture * p.oh;
    let rows = windows(own.row, (p.kh - 1u) * p.dh + 1u, p.sh, p.ph, p.oh);
    let columns = windows(own.column, (p.kw - 1u) * p.dw + 1u, p.sw, p.pw, p.ow);
    var total = Value(0.0);
    for (var i = rows.x; i < rows.y; i++) {
        if ((own.row + p.ph - i * p.sh) % p.dh != 0u) { continue; }
        for (var j = columns.x; j < columns.y; j++) {
            if ((own.column + p.pw - j * p.sw) % p.dw != 0u) { continue; }
            total += x[((picture + i) * p.ow + j) * p.c + own.channel];
        }
    }
    y[at] = total / f32(p.kh * p.kw);
}
