// 2D convolution of pictures that are channels last, or its gradient by the input, as a product
// through workgroup memory.
//
//   c[place, o] = sum_tap,q a[place + tap, q] b[tap, q, o], for the channels of each group
//
// a (b, h, w, channels), c (b, oh, ow, o); b is (groups, taps, rows, columns), the weight as
// shaders/conv_weights.wgsl writes it, with zeros behind the channels of a group. A workgroup
// computes a tile of BM places by BN channels of a group. What a tap reads of a picture is gathered
// while the terms before it are multiplied; places outside are zeros. 2 FLOPs per term of an output
// on 4 (1 / BM + 1 / BN) bytes.
//
// Of the gradient by the input, the places with the same remainder by the stride (`divisor`) are a
// product of their own, because all of them read the same taps: every `tap_step`-th one. FLAT = 0:
// a stage of BK terms is of one tap, and `rows` a multiple of BK. FLAT = 1: `rows` is a multiple of
// 4, and a stage has several taps; there is one product then. EXACT = 1: `rows` are the channels
// of a group, so that none is tested.
//
// Prepended (src/kernels/ops/conv/shared.rs): these constants and those of the tile, the operand
// `a` with `a_some`, which returns zeros for elements from the `count`th on, and `store_some`
// (with src/kernels/ops/epilogue.rs), which stores the elements `begin` .. `end` - 1 of four.

struct Params {
    tiles: u32,             // in all products
    tiles_each: u32,        // in one
    tiles_down: u32,
    tiles_across: u32,      // in one row of tiles
    m: u32,                 // places of a product
    down: u32, across: u32, // rows and columns of them
    step_y: u32, step_x: u32,   // places that are read, from a row or column to the next
    h: u32, w: u32, c: u32,     // pictures that are read
    group_c: u32,
    kh: u32, kw: u32,
    // Tap k reads (remainder + first + k tap) / divisor, if that is whole.
    divisor_y: u32, divisor_x: u32,
    first_y: i32, first_x: i32,
    tap_y: i32, tap_x: i32,
    // Of taps for which it is, from one to the next.
    kernel_step_y: u32, kernel_step_x: u32,
    oh: u32, ow: u32, o: u32,   // pictures that are written
    group_o: u32,
    groups: u32,
    rows: u32,              // of b, per tap
    columns: u32,
}
var<immediate> p: Params;

@group(0) @binding(1) var<storage, read_write> b: array<vec4f>;

const ROW_SUMS = 0u;
const A_BY_TERMS = true;
const B_BY_TERMS = false;

// A row beyond the last place: far from any picture.
const NOWHERE = 0x40000000u;

// A place of the product: row and column of what its taps read, without their offsets, and the
// first element there.
struct Reader { y: u32, x: u32, at: u32 }

fn reader(row: u32, group: u32) -> Reader {
    let y = row / p.across % p.down * p.step_y;
    let x = row % p.across * p.step_x;
    let picture = row / (p.across * p.down) * p.h;
    let at = ((picture + y) * p.w + x) * p.c + group * p.group_c;
    return Reader(select(NOWHERE, y, row < p.m), x, at);
}

// Four channels of a place; `offset` is that of the tap, `delta` the elements to it, and `count`
// the channels from these on.
fn channels(given: Reader, offset: vec2u, delta: u32, count: u32) -> vec4f {
    let is_inside = given.y + offset.x < p.h && given.x + offset.y < p.w;
    return a_some(given.at + delta, select(0u, count, is_inside));
}

// Taps along an axis that read whole places: the first one, and how many there are.
fn taps(first: i32, tap: i32, divisor: u32, size: u32, step: u32) -> vec2u {
    for (var k = 0u; k < min(step, size); k++) {
        if ((first + i32(k) * tap) % i32(divisor) == 0) {
            return vec2u(k, (size - k + step - 1u) / step);
        }
    }
    return vec2u(0u);
}

// The taps of a product, a stage at a time: the tap of the stage, its first channel, and what the
// tap adds to a place. `begin` and `first` are those of the first tap, `count` the number of taps.
struct Walk {
    tap: vec2u,
    offset: vec2i,
    channel: u32,
    first: vec2u,
    begin: vec2i,
    step: vec2i,            // from the offset of a tap to the next
    count: u32,
}

fn walk_of(remainder: vec2u) -> Walk {
    let begin = vec2i(remainder) + vec2i(p.first_y, p.first_x);
    let tap = vec2i(p.tap_y, p.tap_x);
    let divisor = vec2i(i32(p.divisor_y), i32(p.divisor_x));
    let down = taps(begin.x, tap.x, p.divisor_y, p.kh, p.kernel_step_y);
    let across = taps(begin.y, tap.y, p.divisor_x, p.kw, p.kernel_step_x);
    let first = vec2u(down.x, across.x);
    let offset = (begin + vec2i(first) * tap) / divisor;
    let step = vec2i(i32(p.kernel_step_y), i32(p.kernel_step_x)) * tap / divisor;
    return Walk(first, offset, 0u, first, offset, step, down.y * across.y);
}

// The stage behind one.
fn further(walk: Walk) -> Walk {
    var next = walk;
    next.channel += BK;
    if (next.channel >= p.rows) {
        next.channel = 0u;
        next.tap.y += p.kernel_step_x;
        next.offset.y += next.step.y;
        if (next.tap.y >= p.kw) {
            next.tap = vec2u(next.tap.x + p.kernel_step_y, next.first.y);
            next.offset = vec2i(next.offset.x + next.step.x, next.begin.y);
        }
    }
    return next;
}

// An invocation's blocks of the next stage: its places, and the taps that they read, up to term
// `end`; `a_term` and `b_term` are the first ones of the blocks within a stage, and `b_at` the
// vector of the first row of b with the columns.
struct Loader {
    readers: array<Reader, 4>,
    walk: Walk,
    end: u32,
    a_term: u32,
    b_term: u32,
    b_at: u32,
}

// Offset of the tap, and the first channel, that the block of a reads in the stage from term q on.
fn source(loader: ptr<function, Loader>, q: u32) -> vec3u {
    let walk = (*loader).walk;
    let own = (*loader).a_term;
    if (FLAT == 0u) { return vec3u(vec2u(walk.offset), walk.channel + own); }
    let term = q + own;
    let number = term / p.rows;
    let tap = vec2i(i32(number / p.kw), i32(number % p.kw)) * vec2i(p.tap_y, p.tap_x);
    let offset = vec2u(vec2i(p.first_y, p.first_x) + tap);
    return vec3u(select(offset.x, NOWHERE, term >= (*loader).end), offset.y, term % p.rows);
}

fn load_a(loader: ptr<function, Loader>, q: u32) -> mat4x4f {
    let read = source(loader, q);
    let offset = read.xy;
    let delta = (offset.x * p.w + offset.y) * p.c + read.z;
    let count = select(left(p.group_c, read.z), 4u, EXACT == 1u);
    return transpose(mat4x4f(
        channels((*loader).readers[0], offset, delta, count),
        channels((*loader).readers[1], offset, delta, count),
        channels((*loader).readers[2], offset, delta, count),
        channels((*loader).readers[3], offset, delta, count),
    ));
}

fn load_b(loader: ptr<function, Loader>, q: u32) -> mat4x4f {
    let walk = (*loader).walk;
    let term = (*loader).b_term;
    // Terms behind the last one are those of a place that is nowhere.
    let line = select(
        (walk.tap.x * p.kw + walk.tap.y) * p.rows + walk.channel + term,
        min(q + term, (*loader).end - 4u),
        FLAT == 1u,
    );
    let width = p.columns / 4u;
    let at = (*loader).b_at + line * width;
    return mat4x4f(b[at], b[at + width], b[at + 2u * width], b[at + 3u * width]);
}

fn advance(loader: ptr<function, Loader>) {
    (*loader).walk = further((*loader).walk);
}

// Stores four sums of a place, as far as there are such channels. `own` is the remainder of the
// places.
fn store_four(group: u32, i: u32, j: u32, own: vec2u, totals: vec4f) {
    let y = i / p.across % p.down * p.divisor_y + own.x;
    let x = i % p.across * p.divisor_x + own.y;
    if (i >= p.m || y >= p.oh || x >= p.ow) { return; }
    let picture = i / (p.across * p.down) * p.oh;
    let at = ((picture + y) * p.ow + x) * p.o + group * p.group_o + j;
    store_some(at, 0u, min(4u, left(p.group_o, j)), totals);
}

// Computes a tile; `unit` is the number of the subgroup, where that is known.
fn tile_of(index: u32, local: u32, unit: u32) {
    let product = index / p.tiles_each;
    let group = product % p.groups;
    let remainder = vec2u(product / p.groups / p.divisor_x, product / p.groups % p.divisor_x);
    let own = place(index % p.tiles_each) * vec2u(BM, BN);
    let walk = walk_of(remainder);
    let flat_terms = p.kh * p.kw * p.rows;
    let end = select(walk.count * p.rows, flat_terms, FLAT == 1u);

    let a_copied = a_block(local);
    let b_copied = b_block(local);
    let row = own.x + a_copied.x;
    let readers = array<Reader, 4>(
        reader(row, group), reader(row + 1u, group), reader(row + 2u, group),
        reader(row + 3u, group),
    );
    let b_at = group * flat_terms * (p.columns / 4u) + (own.y + b_copied.x) / 4u;
    var loader = Loader(readers, walk, end, a_copied.y, b_copied.y, b_at);
    compute(&loader, 0u, end, group, own, remainder, local, unit);
}

@compute @workgroup_size(SIZE)
fn conv_tile(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let index = workgroup_of(group, groups);
    if (index >= p.tiles) { return; }
    tile_of(index, local, 0u);
}
