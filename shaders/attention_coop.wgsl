// Attention and its gradient in mixed precision by cooperative matrices of MATRIX x MATRIX, with
// operands in f16 and sums in f32: the functions of attention.wgsl, which has the formulas.
// uses lib/attention
// uses lib/nan
// uses lib/rng
//
// A workgroup of UNITS subgroups, of SUBGROUP_MIN to SUBGROUP_MAX invocations, owns R = DOWN MATRIX
// rows of a head (queries in forward and grad_q, keys in grad_kv) and streams the other side past
// them, BLOCK rows at a time. A unit has MATRIX own rows, their products with SCORES matrices of
// each block, and EACH matrices of each sum; ACROSS units share own rows. Own rows are read once,
// into matrices; those of a block are converted to f16 in workgroup memory while the block before
// it is added. Scores go through workgroup memory, where the invocations, LANES for each own row,
// make weights and slopes of them. The columns of a head are filled up with zeros to WIDTH.
//
// Sums of y are weighted by a maximum that is raised only if a score is above it by RISE or more:
// then the sums go to workgroup memory and back, which all units do at a time. A weight is at most
// exp(RISE) until then. Factors of dropout and the scale are in the results, not in operands.
//
// Where a subgroup has fewer than SUBGROUP_MAX invocations there are more than UNITS, and the
// others do what a unit does again, with the same values: cooperative matrices are in no branch of
// a unit. Bytes read per pair of positions, from the cache: 8 D / R, in grad_q and grad_kv as well.
//
// Prepended: what lib/attention needs, which rounds nothing here, the constants in capitals, the
// types of matrices, how many sources own rows have, which are 2 in gradients (SOURCES), and how
// many operands are made of scores (PRODUCTS), and the entry point
// (src/kernels/ops/attention/coop.rs), which has the matrices.

const UNITS = DOWN * ACROSS;
const SIZE = UNITS * SUBGROUP_MAX;
const R = DOWN * MATRIX;
const BLOCK = ACROSS * SCORES * MATRIX;
const WIDTH = ACROSS * EACH * MATRIX;
const QUADS = WIDTH / 4u;
const PARTS = (D + 3u) / 4u;
const LANES_OF_ROW = min(SIZE / R, BLOCK / 4u);
// Padding puts neighbours in different banks; multiples of 16 bytes keep matrices aligned.
const ROW = WIDTH + 8u;
const COLUMN = R + 4u;
const PAIRS = R + 8u;
const RISE: f32 = 5.5;
const_assert LANES_OF_ROW > 0u && D <= WIDTH;

// Rows of a block of both streamed sources, or own ones on their way to matrices.
var<workgroup> rows: array<f16, max(R, 2u * BLOCK) * ROW>;
// Of each streamed row, its products with the own ones; columns of sums on their way to memory.
var<workgroup> scores: array<f32, SOURCES * BLOCK * COLUMN>;
// Weights or slopes of these.
var<workgroup> pairs: array<f16, PRODUCTS * BLOCK * PAIRS>;
// Of own rows: the factor of a raised maximum, the sum of the exponentials, and whether it is bad.
var<workgroup> factors: array<f32, R>;
var<workgroup> totals: array<f32, LANES_OF_ROW * R>;
var<workgroup> are_nan: array<u32, R>;
// 1 if the maximum of any own row was raised.
var<workgroup> is_raised: u32;
// lse and delta of the streamed queries.
var<workgroup> streamed_stats: array<vec2f, BLOCK>;

// Work of a workgroup: own rows of a head of a sample.
struct Block {
    sample: u32,
    head: u32,
    first: u32,       // of the rows
}

fn block_count(heads: u32) -> u32 {
    return p.b * heads * ((p.t + R - 1u) / R);
}

// Block `index` of so many heads of each sample; those of few pairs come last in each head.
fn block_of(index: u32, heads: u32, of_queries: bool) -> Block {
    let blocks = (p.t + R - 1u) / R;
    let of_all = index / blocks;
    let at = index % blocks;
    return Block(of_all / heads, of_all % heads, R * select(at, blocks - 1u - at, of_queries));
}

// Blocks of keys that queries from `first` on see.
fn key_blocks(first: u32) -> u32 {
    let end = select(p.t, min(first + R, p.t), CAUSAL != 0u);
    return (end + BLOCK - 1u) / BLOCK;
}

// The first query of the blocks that see keys from `first` on, and how many they are.

fn first_query(first: u32) -> u32 {
    return select(0u, first, CAUSAL != 0u);
}

fn query_blocks(first: u32) -> u32 {
    return (p.t - first_query(first) + BLOCK - 1u) / BLOCK;
}

// Four columns of a row of a source, number `n` of those that an invocation copies of rows from
// `first` on. In place of rows behind the last one comes the last one, whose scores do not count;
// columns behind a head's are zero.
fn load(source: u32, column: u32, first: u32, n: u32, local: u32) -> vec4f {
    let quad = n * SIZE + local;
    let at = column + min(first + quad / QUADS, p.t - 1u) * width_of(source);
    let part = quad % QUADS;
    let value = row_part(source, at, min(part, PARTS - 1u));
    return select(vec4f(0.0), value, part < PARTS);
}

// Puts them into one of `count` rows behind the first `begin` ones.
fn put(begin: u32, count: u32, n: u32, local: u32, value: vec4f) {
    let quad = n * SIZE + local;
    if (quad < count * QUADS) {
        let at = (begin + quad / QUADS) * ROW + 4u * (quad % QUADS);
        let four = vec4<f16>(value);
        rows[at] = four.x;
        rows[at + 1u] = four.y;
        rows[at + 2u] = four.z;
        rows[at + 3u] = four.w;
    }
}

fn put_own(source: u32, column: u32, first: u32, local: u32) {
    for (var n = 0u; n * SIZE < R * QUADS; n++) {
        put(0u, R, n, local, load(source, column, first, n, local));
    }
}

// lse and delta of a query, or of the last one.
fn load_stats(start: u32, i: u32) -> vec2f {
    return stats[start + min(i, p.t - 1u)];
}

// Products of an own row with four streamed ones.
fn four_scores(source: u32, quad: u32, row: u32) -> vec4f {
    let at = (source * BLOCK + 4u * quad) * COLUMN + row;
    return vec4f(scores[at], scores[at + COLUMN],
        scores[at + 2u * COLUMN], scores[at + 3u * COLUMN]);
}

fn put_pairs(product: u32, quad: u32, row: u32, values: vec4f) {
    let at = (product * BLOCK + 4u * quad) * PAIRS + row;
    let four = vec4<f16>(values);
    pairs[at] = four.x;
    pairs[at + PAIRS] = four.y;
    pairs[at + 2u * PAIRS] = four.z;
    pairs[at + 3u * PAIRS] = four.w;
}

// What the invocations of a query know of it: the maximum by which its sums are weighted, their
// own part of the sum of weights, and the largest magnitude of a score.
struct Query {
    highest: f32,
    total: f32,
    top: u32,
}

// Makes weights of the scores of a block of keys from `first` on; `may_raise` is false if there
// are no sums yet.
fn weigh(query: ptr<function, Query>, block: Block, first: u32, may_raise: bool, local: u32) {
    let row = local % R;
    let lane = local / R;
    if (lane < LANES_OF_ROW) {
        let i = block.first + row;
        var highest = LOWEST;
        var top = (*query).top;
        for (var quad = 0u; quad < BLOCK / 4u; quad++) {
            let counts = sees(i, first + 4u * quad + LANES);
            let s = select(vec4f(LOWEST), p.scale * four_scores(0u, quad, row), counts);
            highest = max(highest, largest(s));
            top = max(top, largest_magnitude(s));
        }
        (*query).top = top;
        let rises = highest > (*query).highest + RISE;
        let factor = select(1.0, exp(max((*query).highest - highest, -80.0)), rises);
        highest = select((*query).highest, highest, rises);
        (*query).highest = highest;
        if (lane == 0u) { factors[row] = factor; }
        if (rises && may_raise) { is_raised = 1u; }
        var total = vec4f(0.0);
        for (var quad = lane; quad < BLOCK / 4u; quad += LANES_OF_ROW) {
            let j = first + 4u * quad + LANES;
            var weights = exp_where(p.scale * four_scores(0u, quad, row) - highest, sees(i, j));
            total += weights;
            if (DROPOUT != 0u) {
                let kept = kept_four(block.sample, block.head, vec4u(i), j);
                weights = select(vec4f(0.0), weights, kept);
            }
            put_pairs(0u, quad, row, weights);
        }
        (*query).total = (*query).total * factor + ((total.x + total.y) + (total.z + total.w));
    }
}

// Multiplies columns of sums on their way by the factors of their queries.
fn raise(local: u32) {
    for (var n = local; n < ACROSS * MATRIX * R; n += SIZE) {
        scores[n / R * COLUMN + n % R] *= factors[n % R];
    }
}

// Stores lse, and keeps for all invocations what `put_weighted` needs.
fn finish(query: Query, block: Block, local: u32) {
    let row = local % R;
    let lane = local / R;
    if (lane < LANES_OF_ROW) { totals[local] = query.total; }
    workgroupBarrier();
    if (lane == 0u) {
        var total = totals[row];
        for (var n = 1u; n < LANES_OF_ROW; n++) { total += totals[n * R + row]; }
        let is_bad = query.top > NAN_ABOVE || bitcast<u32>(query.highest) == NAN_ABOVE
            || query.highest <= LOWEST;
        are_nan[row] = select(0u, 1u, is_bad);
        factors[row] = select(1.0, p.factor, DROPOUT != 0u) / total;
        let i = block.first + row;
        if (i < p.t) {
            let at = start_of_stats(block.sample, block.head) + i;
            new_lse[at] = nan_where(is_bad, query.highest + log(total));
        }
    }
    workgroupBarrier();
}

// Weights of scores: NaN where lse is.
fn weights_of(s: vec4f, logs: vec4f, counts: vec4<bool>) -> vec4f {
    let is_nan = (bitcast<vec4u>(logs) & vec4u(0x7FFFFFFFu)) > vec4u(NAN_ABOVE);
    return nan_where_bad(is_nan & counts, exp_where(s - logs, counts));
}

// Products of slopes of y with values, of pairs that are kept.
fn dropped(dp: vec4f, kept: vec4<bool>) -> vec4f {
    if (DROPOUT == 0u) { return dp; }
    return select(vec4f(0.0), p.factor * dp, kept);
}

// Makes slopes of the scores of a block of keys from `first` on; `own` are lse and delta.
fn slope_by_query(own: vec2f, block: Block, first: u32, local: u32) {
    let row = local % R;
    let i = block.first + row;
    for (var quad = local / R; quad < BLOCK / 4u; quad += LANES_OF_ROW) {
        let j = first + 4u * quad + LANES;
        let weights =
            weights_of(p.scale * four_scores(0u, quad, row), vec4f(own.x), sees(i, j));
        var kept = vec4<bool>(true);
        if (DROPOUT != 0u) { kept = kept_four(block.sample, block.head, vec4u(i), j); }
        let dp = dropped(four_scores(1u, quad, row), kept);
        put_pairs(0u, quad, row, weights * (dp - own.y));
    }
}

// Makes slopes and weights of the scores of a block of queries of a head, from `first` on.
fn slope_by_key(block: Block, head: u32, first: u32, local: u32) {
    let row = local % R;
    let j = block.first + row;
    for (var quad = local / R; quad < BLOCK / 4u; quad += LANES_OF_ROW) {
        let i = first + 4u * quad + LANES;
        let at = 4u * quad;
        let of_queries = array(streamed_stats[at], streamed_stats[at + 1u],
            streamed_stats[at + 2u], streamed_stats[at + 3u]);
        let logs = vec4f(of_queries[0].x, of_queries[1].x, of_queries[2].x, of_queries[3].x);
        let deltas = vec4f(of_queries[0].y, of_queries[1].y, of_queries[2].y, of_queries[3].y);
        let weights =
            weights_of(p.scale * four_scores(0u, quad, row), logs, seen_by(i, j));
        var kept = vec4<bool>(true);
        if (DROPOUT != 0u) { kept = kept_four(block.sample, head, i, vec4u(j)); }
        let dp = dropped(four_scores(1u, quad, row), kept);
        put_pairs(0u, quad, row, weights * (dp - deltas));
        put_pairs(1u, quad, row, select(vec4f(0.0), weights, kept));
    }
}

// Four columns of sums on their way: number `n` of an own row, and the vector of a head's columns
// that it is, if matrix `matrix` of each unit is on its way.

fn four_sums(n: u32, row: u32) -> vec4f {
    let at = 4u * n * COLUMN + row;
    return vec4f(scores[at], scores[at + COLUMN],
        scores[at + 2u * COLUMN], scores[at + 3u * COLUMN]);
}

fn part_of(n: u32, matrix: u32) -> u32 {
    let unit = n / (MATRIX / 4u);
    return (unit * EACH + matrix) * (MATRIX / 4u) + n % (MATRIX / 4u);
}

const FOURS = ACROSS * MATRIX / 4u;

// Stores columns of y.
fn put_weighted(matrix: u32, block: Block, local: u32) {
    let start = start_of(DY, block.sample, block.head);
    for (var at = local; at < R * FOURS; at += SIZE) {
        let row = at / FOURS;
        let part = part_of(at % FOURS, matrix);
        if (block.first + row < p.t && part < PARTS) {
            let value = factors[row] * four_sums(at % FOURS, row);
            let is_nan = are_nan[row] != 0u;
            put_y(start + (block.first + row) * p.heads * D, part, nan4_where(is_nan, value));
        }
    }
}

// Stores columns of gradients of a source, times a factor.
fn put_sums(source: u32, start: u32, matrix: u32, factor: f32, block: Block, local: u32) {
    for (var at = local; at < R * FOURS; at += SIZE) {
        let row = at / FOURS;
        let part = part_of(at % FOURS, matrix);
        if (block.first + row < p.t && part < PARTS) {
            let target_row = start + (block.first + row) * width_of(source);
            put_gradient(source, target_row, part, factor * four_sums(at % FOURS, row));
        }
    }
}
