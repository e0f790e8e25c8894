//! Attention of single queries over a cache of keys and values. Twin of
//! `shaders/cached_attention.wgsl`, which has the formulas.

mod merge;

use std::ops::Range;

use rayon::prelude::*;

use crate::call_shapes::{C, HEADS, N, PROBE_ROWS, calls};
use crate::dispatch::grid;
use crate::harness::InputFill;
use crate::ops::head_product::{put_columns, softmax};
use crate::ops::host_product::{HostProduct, Matrix};
use crate::twin::{IndependentAxis, InputSpec, no_forward};
use crate::{
    CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant, source,
};
use potluck_core::HostTensorView;
use potluck_graph::{CachedAttentionOptions, Op};

/// Twin of [`Op::CachedAttention`].
pub static TWIN: Twin = Twin {
    name: "cached_attention",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: true,
    iterations,
    inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Keys per iteration of a workgroup of the shader that processes all keys of a row and head.
const KEYS: usize = 256;

/// Keys per iteration of a workgroup if the keys of a row and head are split between workgroups.
const SPLIT_KEYS: usize = 64;

/// Rows and heads that keep a large device busy without splits. Behind 512 keys, 12 heads of one
/// row run at 1.25 times the speed with splits on an NVIDIA H200, and of 8 rows at 0.8.
const BUSY: usize = 64;

/// Workgroups that splits result in, if there are enough keys.
const FILLED: usize = 1024;

/// Division of the keys of a row and head between workgroups.
#[derive(Clone, Copy)]
struct KeySplit {
    /// Keys per iteration of a workgroup.
    keys: usize,
    splits: usize,
    /// Keys of a split.
    span: usize,
}

/// Values of a head per workgroup of the shader: its `SLAB`.
const SLAB: usize = 64;

/// Rows per task of `fast`: enough for products of matrices at full speed.
const BLOCK: usize = 32;

/// Positions of a sequence in the caches of probes and of the catalog: more keys than an iteration
/// of a workgroup has.
const PROBE_CONTEXT: usize = 300;

/// Dimensions of a call.
#[derive(Clone, Copy)]
struct CachedSizes {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
    sequences: usize,
    /// Positions of a sequence.
    tokens: usize,
    /// Columns of the tensor with the queries.
    width: usize,
    /// First column with queries.
    first: usize,
    scale: f64,
}

impl CachedSizes {
    fn of(call: &OpCall) -> Self {
        let Op::CachedAttention(CachedAttentionOptions { heads, first }) = *call.op else {
            panic!("{} is no attention over a cache", call.op);
        };
        let [sequences, both, tokens, d] = call.inputs[1][..] else {
            panic!("{}: the cache is (sequences, 2 kv_heads, t, d)", call.op);
        };
        let (rows, width) = call.rows_and_last(0);
        let scale = 1.0 / (d as f64).sqrt();
        Self { rows, heads, kv_heads: both / 2, d, sequences, tokens, width, first, scale }
    }

    /// Returns the number of keys that a row with this place sees; 0 if the place is outside the
    /// cache.
    fn keys(&self, place: u32) -> usize {
        let place = place as usize;
        if place < self.sequences * self.tokens { place % self.tokens + 1 } else { 0 }
    }

    /// The first element of the keys (`which` 0) or values (1) of a query head.
    fn at(&self, which: usize, place: u32, head: usize) -> usize {
        let shared = head / (self.heads / self.kv_heads);
        let of_sequence = place as usize / self.tokens * 2 * self.kv_heads;
        (of_sequence + which * self.kv_heads + shared) * self.tokens * self.d
    }

    /// Returns the floats of a value of the shader: 4 if heads and the columns of queries are whole
    /// vectors.
    fn lanes(&self) -> usize {
        let all = [self.d, self.width, self.first];
        if all.iter().all(|size| size.is_multiple_of(4)) { 4 } else { 1 }
    }

    /// Returns the keys of a split such that the splits fill a large device; `None` if rows and
    /// heads fill it without splits, or if there are too few keys.
    fn span(&self, lanes: usize) -> Option<usize> {
        let items = self.rows * self.heads * (self.d / lanes).div_ceil(SLAB);
        if items >= BUSY || self.tokens <= SPLIT_KEYS {
            return None;
        }
        let splits = FILLED.div_ceil(items).min(self.tokens.div_ceil(SPLIT_KEYS));
        Some(self.tokens.div_ceil(splits).next_multiple_of(SPLIT_KEYS))
    }

    /// The first element of the query of a row and head.
    fn query_at(&self, row: usize, head: usize) -> usize {
        row * self.width + self.first + head * self.d
    }
}

/// Reference: `q (b, n, ..), cache, places (b, n) -> y`.
fn reference<T: Float>(call: &OpCall, inputs: &[HostTensorView<'_, T>], outputs: &mut [&mut [T]]) {
    let sizes = CachedSizes::of(call);
    let CachedSizes { d, heads, .. } = sizes;
    let queries = inputs[0].floats();
    let cache = inputs[1].floats();
    for (row, place) in inputs[2].ints().iter().enumerate() {
        for head in 0..heads {
            let y = &mut outputs[0][(row * heads + head) * d..][..d];
            y.fill(T::zero());
            let query = &queries[sizes.query_at(row, head)..][..d];
            let mut scores = Vec::new();
            for key in 0..sizes.keys(*place) {
                let key = &cache[sizes.at(0, *place, head) + key * d..][..d];
                let product: T = query.iter().zip(key).map(|(q, k)| *q * *k).sum();
                scores.push(product * T::from_f64(sizes.scale));
            }
            let highest = scores.iter().copied().fold(T::neg_infinity(), T::max);
            let total: T = scores.iter().map(|score| (*score - highest).exp()).sum();
            for (key, score) in scores.iter().enumerate() {
                let weight = (*score - highest).exp() / total;
                let value = &cache[sizes.at(1, *place, head) + key * d..][..d];
                for (y, value) in y.iter_mut().zip(value) {
                    *y += weight * *value;
                }
            }
        }
    }
}

/// CPU kernel: parallel over blocks of rows that follow one another in a sequence, and over heads;
/// products of matrices, as without a cache.
fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let sizes = CachedSizes::of(call);
    let queries = inputs[0].floats();
    let cache = inputs[1].floats();
    let places = inputs[2].ints();
    let columns = sizes.heads * sizes.d;
    let mut rest = &mut *outputs[0];
    let mut blocks = Vec::new();
    for rows in blocks_of(&sizes, places) {
        let (y, behind) = rest.split_at_mut(rows.len() * columns);
        rest = behind;
        blocks.push((rows, y));
    }
    blocks.into_par_iter().for_each(|(rows, y)| {
        if sizes.keys(places[rows.start]) == 0 {
            return y.fill(0.0);
        }
        let parts: Vec<Vec<f32>> = (0..sizes.heads)
            .into_par_iter()
            .map(|head| block_of_head(&sizes, queries, cache, places, rows.clone(), head))
            .collect();
        for (head, part) in parts.iter().enumerate() {
            put_columns(part, sizes.d, y, columns, head * sizes.d);
        }
    });
}

/// Returns the rows in runs of neighbours, of at most [`BLOCK`], whose places follow one another
/// in one sequence; rows without a place are alone.
fn blocks_of(sizes: &CachedSizes, places: &[u32]) -> Vec<Range<usize>> {
    let mut blocks: Vec<Range<usize>> = Vec::new();
    for (row, &place) in places.iter().enumerate() {
        if let Some(block) = blocks.last_mut() {
            let is_next = places[row - 1].checked_add(1) == Some(place);
            // A row with one key is the first of its sequence.
            if is_next && sizes.keys(place) > 1 && block.len() < BLOCK {
                block.end = row + 1;
                continue;
            }
        }
        blocks.push(row..row + 1);
    }
    blocks
}

/// Returns `y (rows, d)` of a block of rows and a head.
fn block_of_head(
    sizes: &CachedSizes,
    queries: &[f32],
    cache: &[f32],
    places: &[u32],
    rows: Range<usize>,
    head: usize,
) -> Vec<f32> {
    let d = sizes.d;
    let place = places[rows.start];
    let keys = sizes.keys(places[rows.end - 1]);
    let of_cache = |which| Matrix::rows(&cache[sizes.at(which, place, head)..][..keys * d], d);
    let own = Matrix::rows(&queries[sizes.query_at(rows.start, head)..], sizes.width);
    let mut weights = vec![0.0; rows.len() * keys];
    let factor = sizes.scale as f32;
    let scores = HostProduct { factor, ..HostProduct::new([rows.len(), keys, d]) };
    scores.run(own, of_cache(0).transposed(), &mut weights, keys);
    for (row, weights) in rows.clone().zip(weights.chunks_exact_mut(keys)) {
        let (seen, behind) = weights.split_at_mut(sizes.keys(places[row]));
        softmax(seen);
        behind.fill(0.0);
    }
    let mut y = vec![0.0; rows.len() * d];
    let values = HostProduct::new([rows.len(), d, keys]);
    values.run(Matrix::rows(&weights, keys), of_cache(1), &mut y, d);
    y
}

/// Static choice: vectors of 4 if heads and columns are whole vectors; on GPUs keys are split if
/// there are few rows and heads.
fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let sizes = CachedSizes::of(call);
    let lanes = sizes.lanes();
    match sizes.span(lanes) {
        Some(span) if caps.wants_gpu_variants() => split(&sizes, lanes, span),
        _ => vec![whole(&sizes, lanes)],
    }
}

/// Returns all GPU kernel variants of the call: without splits, then with splits on GPUs.
fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let sizes = CachedSizes::of(call);
    let mut named = vec![(1, "cached_attention")];
    if sizes.lanes() == 4 {
        named.push((4, "cached_attention4"));
    }

    let mut variants = Vec::new();
    for (lanes, name) in &named {
        variants.push(Variant::new(*name, vec![whole(&sizes, *lanes)]));
    }
    for (lanes, name) in &named {
        if let Some(span) = sizes.span(*lanes)
            && caps.wants_gpu_variants()
        {
            variants.push(Variant::new(format!("{name}_split"), split(&sizes, *lanes, span)));
        }
    }
    variants
}

/// Dispatch in which a workgroup processes all keys of a row, head and slab.
fn whole(sizes: &CachedSizes, lanes: usize) -> Dispatch {
    let all = KeySplit { keys: KEYS, splits: 1, span: sizes.tokens };
    attend(sizes, lanes, all, Operand::Output(0))
}

/// Dispatches of splits of `span` keys: partial sums, and their sum.
fn split(sizes: &CachedSizes, lanes: usize, span: usize) -> Vec<Dispatch> {
    let splits = sizes.tokens.div_ceil(span);
    let partials = merge::partials(sizes, lanes, splits);
    let first = attend(sizes, lanes, KeySplit { keys: SPLIT_KEYS, splits, span }, partials);
    vec![first, merge::dispatch(sizes, lanes, splits)]
}

/// Dispatch of workgroups that each process the keys of a split.
fn attend(sizes: &CachedSizes, lanes: usize, split: KeySplit, out: Operand) -> Dispatch {
    let KeySplit { keys, splits, span } = split;
    let d = sizes.d / lanes;
    let items = sizes.rows * sizes.heads * d.div_ceil(SLAB) * splits;
    let mut params: Vec<u32> = [
        items,
        sizes.heads,
        sizes.heads / sizes.kv_heads,
        d,
        d.min(SLAB),
        sizes.tokens,
        sizes.sequences * sizes.tokens,
        sizes.first / lanes,
        sizes.width / lanes,
    ]
    .map(|word| word as u32)
    .to_vec();
    params.extend([(sizes.scale as f32).to_bits(), splits as u32, span as u32]);
    Dispatch {
        shader: Shader::new("cached_attention", "attend")
            .with_const("KEYS", keys as u32)
            .with_const("IS_SPLIT", u32::from(splits > 1))
            .with_text(source::values_of(lanes)),
        operands: vec![Operand::Input(0), Operand::Input(1), Operand::Input(2), out],
        params,
        groups: grid(items, 1),
    }
}

/// Returns an upper bound of the cost, with every row at the last position of its sequence: two
/// products of `d` columns for each key, and 10 FLOPs for an exponential; the bytes of all tensors.
fn cost(call: &OpCall) -> Cost {
    let CachedSizes { rows, heads, d, tokens, .. } = CachedSizes::of(call);
    let pairs = (rows * heads * tokens) as f64;
    Cost { flops: pairs * (4.0 * d as f64 + 10.0), bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: for every 256 keys, the columns of a head in the products and in the
/// values. Splits have fewer.
fn iterations(call: &OpCall) -> usize {
    let CachedSizes { d, tokens, .. } = CachedSizes::of(call);
    tokens.div_ceil(KEYS) * (d + d.min(SLAB) + 40) + KEYS
}

/// See [`Twin::inputs`].
fn inputs(_: &Op, inputs: &[Dims]) -> InputSpec {
    let places = (inputs[1][0] * inputs[1][2]) as u32;
    let spec =
        InputSpec { samples: Some(inputs[0][0]), unbatched: Some(1), ..InputSpec::normal(inputs) };
    spec.with(2, InputFill::Targets(places))
}

/// See [`Twin::independent_axes`]: rows.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    IndependentAxis::leading(call, &[1])
}

/// See [`Twin::probes`]: caches of a few sequences.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let width = inputs[0][2];
    let both = inputs[1][1];
    let d = inputs[1][3];
    let sizes = PROBE_ROWS
        .map(|rows| vec![vec![rows, 1, width], vec![2, both, PROBE_CONTEXT, d], vec![rows, 1]]);
    calls(op, sizes)
}

/// See [`Twin::catalog`]: packed as in a GPT, separate with shared keys as in a Llama, and heads
/// that are no whole vectors; each with many rows and with one row, whose keys are split.
fn catalog() -> Vec<CallShape> {
    let mut calls = Vec::new();
    for (heads, kv_heads, d, first, width) in
        [(HEADS, HEADS, C / HEADS, 0, 3 * C), (HEADS, HEADS / 2, C / HEADS, 0, C), (4, 4, 6, 6, 80)]
    {
        for rows in [N, 1] {
            let op = Op::CachedAttention(CachedAttentionOptions { heads, first });
            let cache = vec![3, 2 * kv_heads, PROBE_CONTEXT, d];
            calls.push((op, vec![vec![rows, 1, width], cache, vec![rows, 1]]));
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::generate;
    use crate::testing::{check_with, reference as expected};
    use potluck_core::{HostTensor, Shape};
    use potluck_graph::{AttentionOptions, IGNORE_INDEX};

    /// Returns random queries and a random cache with these places.
    fn given(width: usize, cache: [usize; 4], places: Vec<u32>) -> Vec<(Shape, HostTensor<f64>)> {
        let rows = places.len();
        vec![
            (Shape::batched(&[1, 1, width]), generate(InputFill::Normal, rows * width, 0)),
            (Shape::fixed(&cache), generate(InputFill::Normal, cache.iter().product(), 1)),
            (Shape::batched(&[1, 1]), HostTensor::Int(places)),
        ]
    }

    #[test]
    fn heads_and_caches_of_all_sizes_agree() {
        for (heads, kv_heads, d, tokens) in [
            (1, 1, 1, 1),
            (2, 2, 6, 7),
            (6, 2, 8, 40),
            (4, 1, 64, 300),
            (2, 1, 96, 600),
            (1, 1, 322, 5),
        ] {
            let last = 3 * tokens as u32 - 1;
            // Single places, no place, a run in one sequence, and a run across the end of one.
            let mut places = vec![last, 0, IGNORE_INDEX];
            places.extend((0..40).map(|i| (i + tokens as u32 / 2).min(last)));
            places.extend([last + 1, last]);
            let (first, width) = (d, heads * d + 2 * d);
            let op = Op::CachedAttention(CachedAttentionOptions { heads, first });
            // Also a few rows, whose keys are split.
            for places in [places[..5].to_vec(), places] {
                let rows = places.len();
                check_with(op.clone(), &given(width, [3, 2 * kv_heads, tokens, d], places), rows);
            }
        }
    }

    /// A row sees the same keys of its sequence in the cache as causal attention sees of a sample.
    #[test]
    fn rows_see_what_causal_attention_sees() {
        let (heads, kv_heads, d, t) = (4, 2, 3, 9);
        let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| heads * d);
        let tensor = |columns: usize, which| {
            (Shape::batched(&[1, t, columns]), generate(InputFill::Normal, t * columns, which))
        };
        let inputs = [tensor(q, 0), tensor(k, 1), tensor(v, 2)];
        let options = AttentionOptions::separate(heads, kv_heads, d);
        let whole = expected(&Op::Attention(options), &inputs, 1).remove(0);
        // (t, heads d) as (heads, t, d), the second of two sequences.
        let mut cache = vec![f64::NAN; 2 * 2 * kv_heads * t * d];
        for (which, (_, values)) in inputs[1..].iter().enumerate() {
            let HostTensor::Float(values) = values else { panic!("floats") };
            for (at, value) in values.iter().enumerate() {
                let (row, head, column) = (at / (kv_heads * d), at / d % kv_heads, at % d);
                let head = 2 * kv_heads + which * kv_heads + head;
                cache[(head * t + row) * d + column] = *value;
            }
        }
        let (Shape { .. }, queries) = inputs[0].clone();
        let places = (0..t as u32).map(|i| t as u32 + i).collect();
        let inputs = [
            (Shape::batched(&[1, 1, q]), queries),
            (Shape::fixed(&[2, 2 * kv_heads, t, d]), HostTensor::Float(cache)),
            (Shape::batched(&[1, 1]), HostTensor::Int(places)),
        ];
        let op = Op::CachedAttention(CachedAttentionOptions { heads, first: 0 });
        let found = expected(&op, &inputs, t).remove(0);
        for (found, whole) in found.iter().zip(&whole) {
            assert!((found - whole).abs() < 1e-12, "{found} and {whole}");
        }
    }
}
