// Group normalization of pictures or sequences with the channels last, and its gradient (Wu and He
// 2018).
// uses lib/index
// uses lib/joined
//
//   forward  y = weight (x - mean) rstd + bias     rstd = 1 / sqrt(variance + eps)
//   grad     dx = rstd (g - mean(g) - xhat mean(g xhat))
//            with g = weight dy, xhat = (x - mean) rstd
//
// Means and the variance are over all positions of a sample and over the channels of a group. The
// variance is taken around the mean in a second pass. The gradients of weight and bias are sums
// over rows (shaders/row_sums.wgsl).
//
// forward and grad: one workgroup of GROUP per sample and group; 8 bytes per element moved (12 by
// grad) and as many again from the cache. Sums are of every GROUP-th value of the group, then over
// invocations. forward_each and grad_each: one invocation per sample and group, for software
// adapters, where barriers are costly; sums are of sums over a position.
//
// Prepended (src/kernels/ops/group_norm.rs): lib/value or lib/value4, in which channels are
// counted, and GROUP.

struct Params {
    samples: u32,
    positions: u32,
    groups: u32,
    width: u32,             // values of a group at a position
    eps: f32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<Value>;                // (samples, positions, c)
@group(0) @binding(1) var<storage, read> weight: array<Value>;           // (c)
@group(0) @binding(2) var<storage, read> bias: array<Value>;             // (c)
@group(0) @binding(3) var<storage, read_write> y: array<Value>;          // (samples, positions, c)
@group(0) @binding(4) var<storage, read_write> new_stats: array<vec2f>;  // (samples, groups)
// grad binds x, weight, stats, dy, dx.
@group(0) @binding(2) var<storage, read> stats: array<vec2f>;            // (samples, groups)
@group(0) @binding(3) var<storage, read> dy: array<Value>;               // (samples, positions, c)
@group(0) @binding(4) var<storage, read_write> dx: array<Value>;         // (samples, positions, c)

const LANES: u32 = GROUP;
alias Joined = vec2f;

fn join(a: Joined, b: Joined) -> Joined {
    return a + b;
}

// A value of a group: its position in the sample, and its channel in the group.
struct Place { position: u32, channel: u32 }

fn first_place(local: u32) -> Place {
    return Place(local / p.width, local % p.width);
}

// The place of the value that comes GROUP after another one, without a division.
fn next_place(place: Place) -> Place {
    let channel = place.channel + GROUP % p.width;
    let over = channel >= p.width;
    let position = place.position + GROUP / p.width + select(0u, 1u, over);
    return Place(position, select(channel, channel - p.width, over));
}

@compute @workgroup_size(GROUP)
fn forward(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = workgroup_of(group, groups);
    if (own >= p.samples * p.groups) { return; }
    let c = p.groups * p.width;
    let channels = own % p.groups * p.width;
    let first = own / p.groups * p.positions * c + channels;
    let count = f32(p.positions * p.width * FLOATS);

    var part = 0.0;
    for (var at = first_place(local); at.position < p.positions; at = next_place(at)) {
        part += sum_of_value(x[first + at.position * c + at.channel]);
    }
    let mean = joined(vec2f(part, 0.0), local).x / count;

    part = 0.0;
    for (var at = first_place(local); at.position < p.positions; at = next_place(at)) {
        let centered = x[first + at.position * c + at.channel] - mean;
        part += sum_of_value(centered * centered);
    }
    let rstd = 1.0 / sqrt(joined(vec2f(part, 0.0), local).x / count + p.eps);

    for (var at = first_place(local); at.position < p.positions; at = next_place(at)) {
        let i = first + at.position * c + at.channel;
        let k = channels + at.channel;
        y[i] = (x[i] - mean) * rstd * weight[k] + bias[k];
    }
    if (local == 0u) { new_stats[own] = vec2f(mean, rstd); }
}

@compute @workgroup_size(GROUP)
fn grad(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let own = workgroup_of(group, groups);
    if (own >= p.samples * p.groups) { return; }
    let c = p.groups * p.width;
    let channels = own % p.groups * p.width;
    let first = own / p.groups * p.positions * c + channels;
    let of_group = stats[own];

    var part = vec2f(0.0);  // of g, and of g xhat
    for (var at = first_place(local); at.position < p.positions; at = next_place(at)) {
        let i = first + at.position * c + at.channel;
        let g = weight[channels + at.channel] * dy[i];
        part += vec2f(sum_of_value(g), sum_of_value(g * (x[i] - of_group.x)) * of_group.y);
    }
    let means = joined(part, local) / f32(p.positions * p.width * FLOATS);

    for (var at = first_place(local); at.position < p.positions; at = next_place(at)) {
        let i = first + at.position * c + at.channel;
        let xhat = (x[i] - of_group.x) * of_group.y;
        let g = weight[channels + at.channel] * dy[i];
        dx[i] = of_group.y * (g - means.x - xhat * means.y);
    }
}

// Where a group of a sample starts, and its first channel.
struct Span { first: u32, channels: u32 }

fn span_of(own: u32) -> Span {
    let channels = own % p.groups * p.width;
    return Span(own / p.groups * p.positions * p.groups * p.width + channels, channels);
}

@compute @workgroup_size(64)
fn forward_each(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let own = index(id, groups);
    if (own >= p.samples * p.groups) { return; }
    let span = span_of(own);
    let c = p.groups * p.width;
    let end = span.first + p.positions * c;
    let count = f32(p.positions * p.width * FLOATS);

    var total = 0.0;
    for (var row = span.first; row < end; row += c) {
        var part = Value();
        for (var k = 0u; k < p.width; k++) { part += x[row + k]; }
        total += sum_of_value(part);
    }
    let mean = total / count;

    total = 0.0;
    for (var row = span.first; row < end; row += c) {
        var part = Value();
        for (var k = 0u; k < p.width; k++) {
            let centered = x[row + k] - mean;
            part += centered * centered;
        }
        total += sum_of_value(part);
    }
    let rstd = 1.0 / sqrt(total / count + p.eps);

    for (var row = span.first; row < end; row += c) {
        for (var k = 0u; k < p.width; k++) {
            let channel = span.channels + k;
            y[row + k] = (x[row + k] - mean) * rstd * weight[channel] + bias[channel];
        }
    }
    new_stats[own] = vec2f(mean, rstd);
}

@compute @workgroup_size(64)
fn grad_each(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let own = index(id, groups);
    if (own >= p.samples * p.groups) { return; }
    let span = span_of(own);
    let c = p.groups * p.width;
    let end = span.first + p.positions * c;
    let of_group = stats[own];

    var totals = vec2f(0.0);  // of g, and of g xhat
    for (var row = span.first; row < end; row += c) {
        var part = Value();
        var product = Value();
        for (var k = 0u; k < p.width; k++) {
            let g = weight[span.channels + k] * dy[row + k];
            part += g;
            product += g * (x[row + k] - of_group.x);
        }
        totals += vec2f(sum_of_value(part), sum_of_value(product) * of_group.y);
    }
    let means = totals / f32(p.positions * p.width * FLOATS);

    for (var row = span.first; row < end; row += c) {
        for (var k = 0u; k < p.width; k++) {
            let xhat = (x[row + k] - of_group.x) * of_group.y;
            let g = weight[span.channels + k] * dy[row + k];
            dx[row + k] = of_group.y * (g - means.x - xhat * means.y);
        }
    }
}
