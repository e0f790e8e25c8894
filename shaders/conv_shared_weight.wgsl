// The gradient of a 2D convolution by its weight as products through workgroup memory, in parts.
//
//   parts[part, o, tap, q] = sum_place a[place, o] b[place + tap, q], over the places of the part
//
// a (b, oh, ow, o) is dy and b (b, h, w, channels) x; parts are (parts, o, taps, channels of a
// group rounded up to a multiple of 4), which shaders/conv_parts.wgsl adds. A
// workgroup computes a tile of BM channels of a by BN taps and channels of b for a part of the
// places. What a tap reads of a picture is gathered while the places before it are multiplied;
// places outside are zeros. 2 FLOPs per place and output on 4 (1 / BM + 1 / BN) bytes.
//
// Prepended (src/kernels/ops/conv/shared_weight.rs): the constants of the tile, and the operands
// with `a_some` and `b_some`, which return zeros for elements from the `count`th on.

struct Params {
    tiles: u32,             // in all products
    tiles_each: u32,        // in one
    tiles_down: u32,
    tiles_across: u32,      // in one row of tiles
    places: u32,            // b oh ow
    part: u32,              // .. of a part, a multiple of BK
    h: u32, w: u32, c: u32,
    oh: u32, ow: u32, o: u32,
    kw: u32,
    sh: u32, sw: u32,       // stride
    ph: u32, pw: u32,       // padding
    dh: u32, dw: u32,       // dilation
    group_c: u32, group_o: u32,
    groups: u32,
    width: u32,             // channels of a group of b, rounded up
    terms: u32,             // taps times these
}
var<immediate> p: Params;

@group(0) @binding(2) var<storage, read_write> parts: array<vec4f>;

const ROW_SUMS = 0u;
const A_BY_TERMS = false;
const B_BY_TERMS = false;

// A place of the output: its picture, row and column.
struct Place { picture: u32, i: u32, j: u32 }

fn place_of(number: u32) -> Place {
    return Place(number / (p.oh * p.ow), number / p.ow % p.oh, number % p.ow);
}

// The place so many places further.
fn moved(origin: Place, count: u32) -> Place {
    var to = origin;
    to.j += count;
    while (to.j >= p.ow) {
        to.j -= p.ow;
        to.i += 1u;
        if (to.i == p.oh) {
            to.i = 0u;
            to.picture += 1u;
        }
    }
    return to;
}

// Four channels that a tap, at these places, reads for a place; `count` is 0 behind the last place.
fn channels(to: Place, tap: vec2u, channel: u32, count: u32) -> vec4f {
    let y = to.i * p.sh + tap.x;
    let x = to.j * p.sw + tap.y;
    let is_inside = y < p.h && x < p.w;
    let at = ((to.picture * p.h + y) * p.w + x) * p.c + channel;
    return b_some(at, select(0u, count, is_inside));
}

// An invocation's blocks of the next stage, of places up to `end`: that of a begins at element
// `a_at` of the place, that of b is what `tap` reads for the places from `origin` on. `a_count` and
// `b_count` are the channels that there are, `a_term` and `b_term` the first places of the blocks
// within a stage.
struct Loader {
    end: u32,
    a_at: u32,
    a_count: u32,
    a_term: u32,
    origin: Place,
    tap: vec2u,
    channel: u32,
    b_count: u32,
    b_term: u32,
}

fn load_a(loader: ptr<function, Loader>, q: u32) -> mat4x4f {
    let first = q + (*loader).a_term;
    let places = left((*loader).end, first);
    let count = (*loader).a_count;
    let at = first * p.o + (*loader).a_at;
    return mat4x4f(
        a_some(at, select(0u, count, places > 0u)),
        a_some(at + p.o, select(0u, count, places > 1u)),
        a_some(at + 2u * p.o, select(0u, count, places > 2u)),
        a_some(at + 3u * p.o, select(0u, count, places > 3u)),
    );
}

fn load_b(loader: ptr<function, Loader>, q: u32) -> mat4x4f {
    let places = left((*loader).end, q + (*loader).b_term);
    let count = (*loader).b_count;
    let tap = (*loader).tap;
    let channel = (*loader).channel;
    let first = (*loader).origin;
    let second = moved(first, 1u);
    let third = moved(second, 1u);
    return mat4x4f(
        channels(first, tap, channel, select(0u, count, places > 0u)),
        channels(second, tap, channel, select(0u, count, places > 1u)),
        channels(third, tap, channel, select(0u, count, places > 2u)),
        channels(moved(third, 1u), tap, channel, select(0u, count, places > 3u)),
    );
}

fn advance(loader: ptr<function, Loader>) {
    (*loader).origin = moved((*loader).origin, BK);
}

// Stores four sums of an output channel, as far as it is one. `own` is the part.
fn store_four(group: u32, i: u32, j: u32, own: vec2u, totals: vec4f) {
    if (i >= p.group_o || j >= p.terms) { return; }
    parts[(((own.x * p.groups + group) * p.group_o + i) * p.terms + j) / 4u] = totals;
}

// Computes a tile; `unit` is the number of the subgroup, where that is known.
fn tile_of(index: u32, local: u32, unit: u32) {
    let product = index / p.tiles_each;
    let group = product % p.groups;
    let part = product / p.groups;
    let own = place(index % p.tiles_each) * vec2u(BM, BN);
    let begin = part * p.part;
    let end = min(p.places, begin + p.part);

    let a_copied = a_block(local);
    let b_copied = b_block(local);
    let i = own.x + a_copied.x;
    let j = own.y + b_copied.x;
    let number = j / p.width;
    let tap = vec2u(number / p.kw * p.dh - p.ph, number % p.kw * p.dw - p.pw);
    let own_channel = j % p.width;
    let b_count = select(left(p.group_c, own_channel), 0u, j >= p.terms);
    var loader = Loader(
        end, group * p.group_o + i, left(p.group_o, i), a_copied.y,
        place_of(begin + b_copied.y), tap, group * p.group_c + own_channel, b_count, b_copied.y,
    );
    compute(&loader, begin, end, group, own, vec2u(part, 0u), local, unit);
}

@compute @workgroup_size(SIZE)
fn weight_tile(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= p.tiles) { return; }
    tile_of(index, local, 0u);
}
