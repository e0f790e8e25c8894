//! Attention over packed queries, keys and values, and its gradient. Twin of
//! `shaders/attention.wgsl`, which has the formulas. Faster variants on GPUs: [`tiles`].

mod probes;
pub mod tiles;

use rayon::prelude::*;

use crate::dispatch::grid;
use crate::simd::{exp, mul_add, sum_of, vectorized};
use crate::{Caps, Cost, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_core::rng::{Key, drop_threshold, kept_factor, threefry2x32};
use potluck_graph::{AttentionOptions, Op};

/// Twin of [`Op::Attention`] and its gradient.
pub static TWIN: Twin = Twin {
    name: "attention",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: true,
    iterations,
    inputs: probes::inputs,
    forward: probes::forward,
    probes: probes::probes,
    catalog: probes::catalog,
};

/// Queries per block of `fast`: few enough to skip most of the keys after them, many enough for
/// efficient matrix products.
const BLOCK: usize = 32;

/// Columns of a head per invocation of the shader: its `SLAB` of 16 vectors.
const SLAB_COLUMNS: usize = 64;

/// Dimensions and parameters of a call, taken from its shapes and its op.
#[derive(Clone, Copy)]
struct AttentionSizes {
    b: usize,
    t: usize,
    c: usize,
    heads: usize,
    /// Columns per head.
    d: usize,
    scale: f64,
    /// True if a query sees no key behind its own position.
    causal: bool,
    /// Dropout of the probabilities; `None` if it is inactive in this pass.
    drop: Option<Dropout>,
}

/// Parameters of the dropout of probabilities.
#[derive(Clone, Copy)]
struct Dropout {
    /// Key of head 0 of the call.
    key: Key,
    threshold: u32,
    /// Factor of the kept probabilities.
    factor: f64,
}

impl AttentionSizes {
    fn of(call: &OpCall) -> Self {
        let (Op::Attention(options) | Op::AttentionGrad(options)) = call.op else {
            panic!("{} is not an attention", call.op);
        };
        let AttentionOptions { heads, first_head, causal, dropout, site } = *options;
        let [b, t, width] = call.inputs[0][..] else {
            panic!("{}: qkv is (b, t, 3c)", call.op);
        };
        let (c, d) = (width / 3, width / 3 / heads);
        let drop = (call.random.training && dropout > 0.0).then(|| Dropout {
            key: head_key(call.random.step_key.site(site), first_head),
            threshold: drop_threshold(dropout),
            factor: kept_factor(dropout),
        });
        let scale = 1.0 / (d as f64).sqrt();
        Self { b, t, c, heads, d, scale, causal, drop }
    }

    /// Returns the number of keys that query `i` sees, from the first on.
    fn keys(&self, i: usize) -> usize {
        if self.causal { i + 1 } else { self.t }
    }

    /// Returns the words of the shaders' `Params`.
    fn params(&self) -> Vec<u32> {
        let drop = self.drop.unwrap_or(Dropout { key: Key([0; 2]), threshold: 0, factor: 1.0 });
        let Key([key_0, key_1]) = drop.key;
        vec![
            self.b as u32,
            self.heads as u32,
            self.t as u32,
            (self.scale as f32).to_bits(),
            drop.threshold,
            (drop.factor as f32).to_bits(),
            key_0,
            key_1,
            self.d.div_ceil(4) as u32,
        ]
    }

    /// Returns the number of a pair of positions of a head, part of the counter of its random
    /// number.
    fn pair(&self, i: usize, j: usize) -> u32 {
        (i as u32).wrapping_mul(self.t as u32).wrapping_add(j as u32)
    }
}

/// Returns the key of a head, of that of head 0. Pairs are numbered per head, so that the heads'
/// masks differ at any number of tokens.
fn head_key(key: Key, h: usize) -> Key {
    let [first, second] = key.0;
    Key([first.wrapping_add(h as u32), second])
}

/// Reference: `qkv [, samples] -> y, lse`, or `qkv, y, lse, dy [, samples] -> dqkv`.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let sizes = AttentionSizes::of(call);
    let qkv = inputs[0].floats();
    for sample in 0..sizes.b {
        let id = sizes.drop.map_or(0, |_| inputs[inputs.len() - 1].ints()[sample]);
        for h in 0..sizes.heads {
            let head = Head { sizes, sample, id, h };
            match outputs {
                [y, lse] => reference_forward(&head, qkv, y, lse),
                [dqkv] => {
                    let [y, lse, dy] = [1, 2, 3].map(|i| inputs[i].floats());
                    reference_grad(&head, qkv, y, lse, dy, dqkv);
                }
                _ => panic!("{} has one output or two", call.op),
            }
        }
    }
}

/// One head of one sample.
#[derive(Clone, Copy)]
struct Head {
    sizes: AttentionSizes,
    sample: usize,
    /// Id of the sample, part of the counter of its random numbers.
    id: u32,
    h: usize,
}

impl Head {
    /// Returns the offset in `qkv` of the head's columns of query (`which` 0), key (1) or value
    /// (2) `i`.
    fn at(&self, which: usize, i: usize) -> usize {
        let AttentionSizes { t, c, d, .. } = self.sizes;
        (self.sample * t + i) * 3 * c + which * c + self.h * d
    }

    /// Returns the offset in `y` of the head's columns of row `i`.
    fn y_at(&self, i: usize) -> usize {
        let AttentionSizes { t, c, d, .. } = self.sizes;
        (self.sample * t + i) * c + self.h * d
    }

    /// Returns the index of position `i` in `lse`.
    fn lse_at(&self, i: usize) -> usize {
        (self.sample * self.sizes.heads + self.h) * self.sizes.t + i
    }

    /// Returns the scaled score of query `i` and key `j`.
    fn score<T: Float>(&self, qkv: &[T], i: usize, j: usize) -> T {
        let (q, k) = (self.at(0, i), self.at(1, j));
        let d = self.sizes.d;
        let product: T = qkv[q..q + d].iter().zip(&qkv[k..k + d]).map(|(q, k)| *q * *k).sum();
        product * T::from_f64(self.sizes.scale)
    }

    /// Returns the dropout factor of the probability of a pair; 1 without dropout.
    fn kept<T: Float>(&self, i: usize, j: usize) -> T {
        let Some(drop) = self.sizes.drop else { return T::one() };
        let word = head_key(drop.key, self.h).words([self.id, self.sizes.pair(i, j)])[0];
        if word >= drop.threshold { T::from_f64(drop.factor) } else { T::zero() }
    }
}

fn reference_forward<T: Float>(head: &Head, qkv: &[T], y: &mut [T], lse: &mut [T]) {
    for i in 0..head.sizes.t {
        let scores: Vec<T> = (0..head.sizes.keys(i)).map(|j| head.score(qkv, i, j)).collect();
        let highest = scores.iter().copied().fold(scores[0], T::max);
        let total: T = scores.iter().map(|s| (*s - highest).exp()).sum();
        lse[head.lse_at(i)] = highest + total.ln();
        for column in 0..head.sizes.d {
            let weighted = scores.iter().enumerate().map(|(j, s)| {
                (*s - highest).exp() / total * head.kept(i, j) * qkv[head.at(2, j) + column]
            });
            y[head.y_at(i) + column] = weighted.sum();
        }
    }
}

fn reference_grad<T: Float>(head: &Head, qkv: &[T], y: &[T], lse: &[T], dy: &[T], dqkv: &mut [T]) {
    let AttentionSizes { t, d, .. } = head.sizes;
    let scale = T::from_f64(head.sizes.scale);
    for i in 0..t {
        for which in 0..3 {
            dqkv[head.at(which, i)..head.at(which, i) + d].fill(T::zero());
        }
    }
    for i in 0..t {
        let dy = &dy[head.y_at(i)..head.y_at(i) + d];
        let delta: T = (0..d).map(|k| dy[k] * y[head.y_at(i) + k]).sum();
        for j in 0..head.sizes.keys(i) {
            let [q, k, v] = [head.at(0, i), head.at(1, j), head.at(2, j)];
            let probability = (head.score(qkv, i, j) - lse[head.lse_at(i)]).exp();
            let kept = head.kept::<T>(i, j);
            let dp: T = kept * (0..d).map(|k| dy[k] * qkv[v + k]).sum::<T>();
            let ds = scale * probability * (dp - delta);
            for column in 0..d {
                dqkv[q + column] += ds * qkv[k + column];
                dqkv[k + column] += ds * qkv[q + column];
                dqkv[v + column] += probability * kept * dy[column];
            }
        }
    }
}

/// CPU kernel: parallel over heads, each in blocks of queries: scores by a matrix product, then
/// the softmax or its gradient row by row, then the sums by matrix products. Every block stops at
/// the last key that its last query sees.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let sizes = AttentionSizes::of(call);
    let AttentionSizes { t, c, heads, d, .. } = sizes;
    let ids = sizes.drop.map(|_| inputs[inputs.len() - 1].ints());
    let head = |sample: usize, h: usize| {
        let id = ids.map_or(0, |ids| ids[sample]);
        // The slices that the head indexes below hold its own sample only.
        Head { sizes, sample: 0, id, h }
    };
    let qkv = inputs[0].floats().par_chunks(3 * t * c);
    match outputs {
        [y, lse] => {
            let samples = y.par_chunks_mut(t * c).zip(lse.par_chunks_mut(heads * t)).zip(qkv);
            samples.enumerate().for_each(|(sample, ((y, lse), qkv))| {
                let each = lse.par_chunks_mut(t).enumerate();
                let parts: Vec<Vec<f32>> =
                    each.map(|(h, lse)| forward_head(&head(sample, h), qkv, lse)).collect();
                for (h, part) in parts.iter().enumerate() {
                    put_columns(part, d, y, c, h * d);
                }
            });
        }
        [dqkv] => {
            let [y, lse, dy] = [1, 2, 3].map(|i| inputs[i].floats());
            let samples = dqkv.par_chunks_mut(3 * t * c).zip(qkv).zip(y.par_chunks(t * c));
            let samples = samples.zip(dy.par_chunks(t * c)).zip(lse.par_chunks(heads * t));
            samples.enumerate().for_each(|(sample, ((((dqkv, qkv), y), dy), lse))| {
                let each = lse.par_chunks(t).enumerate();
                let parts: Vec<[Vec<f32>; 3]> =
                    each.map(|(h, lse)| grad_head(&head(sample, h), qkv, y, lse, dy)).collect();
                for (h, part) in parts.iter().enumerate() {
                    for (which, part) in part.iter().enumerate() {
                        put_columns(part, d, dqkv, 3 * c, which * c + h * d);
                    }
                }
            });
        }
        _ => panic!("{} has one output or two", call.op),
    }
}

/// Copies rows of `d` values into columns `first` and following of rows of `width` values.
fn put_columns(from: &[f32], d: usize, to: &mut [f32], width: usize, first: usize) {
    for (from, to) in from.chunks_exact(d).zip(to.chunks_exact_mut(width)) {
        to[first..first + d].copy_from_slice(from);
    }
}

/// Returns `y (t, d)` of one head and writes its `lse`; `qkv` is that of its sample.
fn forward_head(head: &Head, qkv: &[f32], lse: &mut [f32]) -> Vec<f32> {
    let AttentionSizes { t, c, d, scale, .. } = head.sizes;
    let rows = |which: usize, i: usize| Matrix::rows(&qkv[head.at(which, i)..], 3 * c);
    let mut y = vec![0.0; t * d];
    let mut weights = vec![0.0; BLOCK.min(t) * t];
    for first in (0..t).step_by(BLOCK) {
        let end = t.min(first + BLOCK);
        let keys = head.sizes.keys(end - 1);
        let block = &mut weights[..(end - first) * keys];
        let factor = scale as f32;
        let scores = HeadProduct { m: end - first, n: keys, k: d, factor, add: false };
        scores.run(rows(0, first), rows(1, 0).transposed(), block, keys);
        for (i, row) in (first..end).zip(block.chunks_exact_mut(keys)) {
            let (seen, behind) = row.split_at_mut(head.sizes.keys(i));
            lse[i] = softmax(seen);
            behind.fill(0.0);
            drop_row(head, i, seen);
        }
        let sums = HeadProduct { m: end - first, n: d, k: keys, factor: 1.0, add: false };
        sums.run(Matrix::rows(block, keys), rows(2, 0), &mut y[first * d..], d);
    }
    y
}

/// Returns `dq, dk, dv (t, d)` of one head; `lse` is that of the head, the other slices are those
/// of its sample.
fn grad_head(head: &Head, qkv: &[f32], y: &[f32], lse: &[f32], dy: &[f32]) -> [Vec<f32>; 3] {
    let AttentionSizes { t, c, d, scale, .. } = head.sizes;
    let rows = |which: usize, i: usize| Matrix::rows(&qkv[head.at(which, i)..], 3 * c);
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0; t * d]);
    let [mut weights, mut scratch] = [(); 2].map(|()| vec![0.0; BLOCK.min(t) * t]);
    let mut kept = vec![1.0; t];
    for first in (0..t).step_by(BLOCK) {
        let end = t.min(first + BLOCK);
        let keys = head.sizes.keys(end - 1);
        let size = (end - first) * keys;
        let (p, ds) = (&mut weights[..size], &mut scratch[..size]);
        let dy_rows = Matrix::rows(&dy[head.y_at(first)..], c);
        let factor = scale as f32;
        let scores = HeadProduct { m: end - first, n: keys, k: d, factor, add: false };
        scores.run(rows(0, first), rows(1, 0).transposed(), p, keys);
        let slopes = HeadProduct { factor: 1.0, ..scores };
        slopes.run(dy_rows, rows(2, 0).transposed(), ds, keys);
        let each = p.chunks_exact_mut(keys).zip(ds.chunks_exact_mut(keys));
        for (i, (p, ds)) in (first..end).zip(each) {
            let (at, seen) = (head.y_at(i), head.sizes.keys(i));
            let (p, behind) = p.split_at_mut(seen);
            behind.fill(0.0);
            let (ds, behind) = ds.split_at_mut(seen);
            behind.fill(0.0);
            if head.sizes.drop.is_some() {
                kept[..seen].fill(1.0);
                drop_row(head, i, &mut kept[..seen]);
            }
            let row = HeadRow { lse: lse[i], y: &y[at..at + d], dy: &dy[at..at + d] };
            grad_row(row, factor, &kept[..seen], p, ds);
        }
        let by_query = HeadProduct { m: end - first, n: d, k: keys, factor: 1.0, add: false };
        by_query.run(Matrix::rows(ds, keys), rows(1, 0), &mut dq[first * d..], d);
        let by_key = HeadProduct { m: keys, n: d, k: end - first, factor: 1.0, add: true };
        by_key.run(Matrix::rows(ds, keys).transposed(), rows(0, first), &mut dk, d);
        by_key.run(Matrix::rows(p, keys).transposed(), dy_rows, &mut dv, d);
    }
    [dq, dk, dv]
}

/// Inputs of the gradient of a row of scores that belong to its query.
struct HeadRow<'a> {
    lse: f32,
    y: &'a [f32],
    dy: &'a [f32],
}

/// Multiplies row `i` by its dropout factors.
fn drop_row(head: &Head, i: usize, row: &mut [f32]) {
    if let Some(drop) = head.sizes.drop {
        let (key, first_pair) = (head_key(drop.key, head.h), head.sizes.pair(i, 0));
        drop_pairs(key, head.id, first_pair, drop.threshold, drop.factor as f32, row);
    }
}

vectorized! {
    /// Converts scores to probabilities; returns the logarithm of the sum of exponentials.
    fn softmax<S>(row: &mut [f32]) -> f32 {
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for value in row.iter_mut() {
            *value = exp::<S>(*value - highest);
        }
        let total = sum_of(row.len(), |j| row[j]);
        let share = 1.0 / total;
        for value in row {
            *value *= share;
        }
        highest + total.ln()
    }

    /// Converts scores in `p` to probabilities after dropout, and `dy . v` in `ds` to the
    /// gradient of the scores.
    fn grad_row<S>(row: HeadRow<'_>, scale: f32, kept: &[f32], p: &mut [f32], ds: &mut [f32]) {
        let delta = sum_of(row.y.len(), |k| row.y[k] * row.dy[k]);
        for ((p, ds), kept) in p.iter_mut().zip(ds).zip(kept) {
            let probability = exp::<S>(*p - row.lse);
            *ds = scale * probability * mul_add::<S>(*ds, *kept, -delta);
            *p = probability * *kept;
        }
    }

    /// Multiplies each value by the factor if its random number reaches the threshold, else by 0.
    fn drop_pairs<S>(
        key: Key,
        sample: u32,
        first_pair: u32,
        threshold: u32,
        factor: f32,
        row: &mut [f32],
    ) {
        for (j, value) in row.iter_mut().enumerate() {
            let pair = first_pair.wrapping_add(j as u32);
            let word = threefry2x32(key.0, [sample, pair])[0];
            *value *= if word >= threshold { factor } else { 0.0 };
        }
    }
}

/// A strided matrix view of a slice, which starts at its first element.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    values: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a view of rows that are `stride` elements apart.
    fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: stride, column_stride: 1 }
    }

    fn transposed(self) -> Self {
        Self { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    fn holds(&self, rows: usize, columns: usize) -> bool {
        (rows - 1) * self.row_stride + (columns - 1) * self.column_stride < self.values.len()
    }
}

/// Matrix product `out (m, n) = factor a (m, k) b (k, n)`, added to the contents of `out` if
/// `add`.
#[derive(Clone, Copy)]
struct HeadProduct {
    m: usize,
    n: usize,
    k: usize,
    factor: f32,
    add: bool,
}

impl HeadProduct {
    /// Computes the product on the calling thread; `out` has rows `stride` apart.
    fn run(self, a: Matrix, b: Matrix, out: &mut [f32], stride: usize) {
        let Self { m, n, k, factor, add } = self;
        assert!(m > 0 && n > 0 && k > 0 && a.holds(m, k) && b.holds(k, n));
        assert!((m - 1) * stride + n <= out.len() && n <= stride);
        // SAFETY: the last element of each matrix lies within its slice, as just asserted, and
        // `out` is borrowed mutably, so it overlaps neither `a` nor `b`.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                out.as_mut_ptr(),
                1,
                stride as isize,
                add,
                a.values.as_ptr(),
                a.column_stride as isize,
                a.row_stride as isize,
                b.values.as_ptr(),
                b.column_stride as isize,
                b.row_stride as isize,
                1.0,
                factor,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// Returns the static choice: tiles on GPUs, and elsewhere the plain kernel.
pub fn dispatch(call: &OpCall, caps: &Caps) -> Vec<Dispatch> {
    let sizes = AttentionSizes::of(call);
    match tiles::chosen(&sizes, caps) {
        Some(tile) => tiles::dispatches(call, &sizes, tile),
        None => plain(call),
    }
}

/// Returns one dispatch for the forward pass, or the three of the gradient, which must run in
/// this order (see the shader). An invocation processes 4 positions and up to 64 columns of a
/// head.
fn plain(call: &OpCall) -> Vec<Dispatch> {
    let sizes = AttentionSizes::of(call);
    let invocations = sizes.b * sizes.heads * sizes.t.div_ceil(4) * sizes.d.div_ceil(SLAB_COLUMNS);
    let run = |(entry, operands)| Dispatch {
        shader: shader("attention", &sizes, entry),
        operands,
        params: sizes.params(),
        groups: grid(invocations, 32),
    };
    entries(call, &sizes).into_iter().map(run).collect()
}

/// Returns the entry points that a call runs, in order, with their operands.
fn entries(call: &OpCall, sizes: &AttentionSizes) -> Vec<(&'static str, Vec<Operand>)> {
    use Operand::{Input, Output};
    // Without dropout, the first input is bound in place of the sample ids and not read.
    let samples = Input(if sizes.drop.is_some() { call.inputs.len() - 1 } else { 0 });
    if matches!(call.op, Op::Attention(_)) {
        return vec![("forward", vec![Input(0), samples, Output(0), Output(1)])];
    }
    let operands = [Input(0), samples, Input(2), Input(3), Output(0), Input(1)];
    ["delta", "grad_kv", "grad_q"].map(|entry| (entry, operands.to_vec())).to_vec()
}

/// Returns the shader of an entry point of a file, with what `shaders/lib/attention.wgsl` needs
/// prepended.
fn shader(file: &'static str, sizes: &AttentionSizes, entry: &'static str) -> Shader {
    let mut shader = Shader::new(file, entry)
        .with_const("D", sizes.d as u32)
        .with_const("CAUSAL", u32::from(sizes.causal))
        .with_const("DROPOUT", u32::from(sizes.drop.is_some()));
    // A binding has one type, so its accessor is chosen here and not by a condition in WGSL.
    let way = if sizes.d.is_multiple_of(4) { "vector" } else { "scalars" };
    for tensor in ["qkv", "dy", "y"] {
        let body = format!("{{ return {tensor}_{way}(row, part); }}");
        shader.header += &format!("fn {tensor}_part(row: u32, part: u32) -> vec4f {body}\n");
    }
    shader
}

/// Returns the cost: all pairs of positions count, or half of them if it is causal. The forward
/// pass has 2 products of `d` columns for each pair, the gradient 5; an exponential counts as 10
/// FLOPs.
pub fn cost(call: &OpCall) -> Cost {
    let AttentionSizes { b, t, heads, d, causal, .. } = AttentionSizes::of(call);
    let of_head = if causal { t * (t + 1) / 2 } else { t * t };
    let pairs = (b * heads * of_head) as f64;
    let products = if matches!(call.op, Op::Attention(_)) { 2.0 } else { 5.0 };
    Cost { flops: pairs * (2.0 * products * d as f64 + 10.0), bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: keys or queries by fours, with two passes over the parts of a head in
/// each. The tiles take fewer, but for the narrowest heads.
fn iterations(call: &OpCall) -> usize {
    let AttentionSizes { t, d, .. } = AttentionSizes::of(call);
    let parts = d.div_ceil(4);
    t.div_ceil(4) * (2 * parts + 1).max(4) + 4 * (parts + 1)
}

/// Returns the GPU kernel variants of the call: the plain one, and on GPUs the tiles that fit.
fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let sizes = AttentionSizes::of(call);
    let tiles = tiles::TILES.into_iter().filter(|tile| tile.fits(&sizes, caps));
    let tiled = tiles.map(|tile| Variant::new(tile.name, tiles::dispatches(call, &sizes, tile)));
    std::iter::once(Variant::new("attention", plain(call))).chain(tiled).collect()
}

#[cfg(test)]
mod tests;
