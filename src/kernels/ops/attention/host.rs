//! CPU kernel of attention and its gradient.

use std::borrow::Cow;

use rayon::prelude::*;

use super::reference::Head;
use super::{AttentionSizes, head_key};
use crate::ops::head_product::{put_columns, softmax};
use crate::ops::host_product::{HostProduct, Matrix};
use crate::simd::{exp, mul_add, sum_of, vectorized};
use crate::{OpCall, operands, round_to_f16};
use potluck_core::HostTensorView;
use potluck_core::rng::{Key, threefry2x32};
use potluck_graph::{Op, Precision};

/// Queries per block of `fast`: few enough to skip most of the keys behind them, and enough for
/// efficient matrix products.
const BLOCK: usize = 32;

/// CPU kernel: parallel over heads, each in blocks of queries: scores by a matrix product, then
/// the softmax or its gradient row by row, then the sums by matrix products. Every block stops at
/// the last key that its last query sees.
pub(super) fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let sizes = AttentionSizes::of(call);
    let AttentionSizes { b, t, heads, tensors, .. } = sizes;
    let row = t * sizes.c();
    let rounded: Vec<Cow<'_, [f32]>> =
        inputs[..tensors].iter().map(|x| operands(call, x.floats())).collect();
    let mut samples = Vec::new();
    for sample in 0..b {
        let tensors = rounded.iter().map(|x| part_of(x, b, sample)).collect();
        samples.push(Sample { sizes, id: sizes.sample_id(inputs, sample), tensors });
    }

    if matches!(call.op, Op::Attention(_)) {
        let [y, lse] = outputs else { panic!("{} has two outputs", call.op) };
        let each = y.par_chunks_mut(row).zip(lse.par_chunks_mut(heads * t)).zip(samples);
        each.for_each(|((y, lse), sample)| sample.forward(y, lse));
        return;
    }
    let y = inputs[tensors].floats();
    let lse = inputs[tensors + 1].floats();
    let dy = &*operands(call, inputs[tensors + 2].floats());
    let mut gradients: Vec<Vec<&mut [f32]>> = samples.iter().map(|_| Vec::new()).collect();
    for gradient in outputs.iter_mut() {
        let elements = gradient.len() / b;
        for (own, part) in gradients.iter_mut().zip(gradient.chunks_exact_mut(elements)) {
            own.push(part);
        }
    }
    samples.par_iter().zip(gradients).enumerate().for_each(|(nth, (sample, mut gradients))| {
        let y = part_of(y, b, nth);
        let lse = part_of(lse, b, nth);
        let dy = part_of(dy, b, nth);
        sample.gradient(y, lse, dy, &mut gradients);
    });
}

/// The part of `all` that belongs to one of `count` samples.
fn part_of(all: &[f32], count: usize, sample: usize) -> &[f32] {
    let elements = all.len() / count;
    &all[sample * elements..(sample + 1) * elements]
}

/// Tensors of one sample with its queries, keys and values.
struct Sample<'a> {
    sizes: AttentionSizes,
    id: u32,
    tensors: Vec<&'a [f32]>,
}

impl Sample<'_> {
    fn head(&self, h: usize) -> Head {
        // The slices that the head indexes hold its own sample only.
        Head { sizes: self.sizes, sample: 0, id: self.id, h }
    }

    /// Rows of the queries (`which` 0), keys (1) or values (2) of a head, from `i` on.
    fn rows(&self, head: &Head, which: usize, i: usize) -> Matrix<'_> {
        let place = self.sizes.places[which];
        Matrix::rows(&self.tensors[place.input][head.at(which, i)..], place.width)
    }

    fn forward(&self, y: &mut [f32], lse: &mut [f32]) {
        let AttentionSizes { t, d, .. } = self.sizes;
        let parts: Vec<Vec<f32>> =
            lse.par_chunks_mut(t).enumerate().map(|(h, lse)| self.forward_head(h, lse)).collect();
        for (h, part) in parts.iter().enumerate() {
            put_columns(part, d, y, self.sizes.c(), h * d);
        }
    }

    /// Writes the gradients of the sample by its tensors.
    fn gradient(&self, y: &[f32], lse: &[f32], dy: &[f32], gradients: &mut [&mut [f32]]) {
        let AttentionSizes { d, group, places, .. } = self.sizes;
        let parts: Vec<SharedGradients> = (0..self.sizes.kv_heads())
            .into_par_iter()
            .map(|kv_head| self.shared_gradients(kv_head, y, lse, dy))
            .collect();
        let [q, k, v] = places;
        for (kv_head, part) in parts.iter().enumerate() {
            for (nth, dq) in part.queries.iter().enumerate() {
                let first = q.first + (kv_head * group + nth) * d;
                put_columns(dq, d, gradients[q.input], q.width, first);
            }
            for (place, values) in [(k, &part.keys), (v, &part.values)] {
                let first = place.first + kv_head * d;
                put_columns(values, d, gradients[place.input], place.width, first);
            }
        }
    }

    /// Gradients of a head of keys and values, and of the queries that share it.
    fn shared_gradients(
        &self,
        kv_head: usize,
        y: &[f32],
        lse: &[f32],
        dy: &[f32],
    ) -> SharedGradients {
        let AttentionSizes { t, d, group, .. } = self.sizes;
        let mut gradients = SharedGradients {
            queries: Vec::new(),
            keys: vec![0.0; t * d],
            values: vec![0.0; t * d],
        };
        for h in kv_head * group..(kv_head + 1) * group {
            self.add_head(h, y, &lse[h * t..(h + 1) * t], dy, &mut gradients);
        }
        gradients
    }

    /// Returns `y (t, d)` of one head and writes its `lse`.
    fn forward_head(&self, h: usize, lse: &mut [f32]) -> Vec<f32> {
        let AttentionSizes { t, d, scale, .. } = self.sizes;
        let head = &self.head(h);
        let keys_of_head = self.rows(head, 1, 0);
        let values = self.rows(head, 2, 0);
        let mut y = vec![0.0; t * d];
        let mut weights = vec![0.0; BLOCK.min(t) * t];
        for first in (0..t).step_by(BLOCK) {
            let end = t.min(first + BLOCK);
            let keys = head.sizes.keys(end - 1);
            let block = &mut weights[..(end - first) * keys];
            let factor = scale as f32;
            let scores = HostProduct { factor, ..HostProduct::new([end - first, keys, d]) };
            scores.run(self.rows(head, 0, first), keys_of_head.transposed(), block, keys);
            for (i, row) in (first..end).zip(block.chunks_exact_mut(keys)) {
                let (seen, behind) = row.split_at_mut(head.sizes.keys(i));
                lse[i] = softmax(seen);
                behind.fill(0.0);
                drop_row(head, i, seen);
            }
            self.sizes.round(block);
            let sums = HostProduct::new([end - first, d, keys]);
            sums.run(Matrix::rows(block, keys), values, &mut y[first * d..], d);
        }
        y
    }

    /// Adds the gradients of a query head; `lse` belongs to the head, the other slices to its
    /// sample.
    fn add_head(
        &self,
        h: usize,
        y: &[f32],
        lse: &[f32],
        dy: &[f32],
        gradients: &mut SharedGradients,
    ) {
        let AttentionSizes { t, d, scale, .. } = self.sizes;
        let c = self.sizes.c();
        let head = &self.head(h);
        let keys_of_head = self.rows(head, 1, 0);
        let values = self.rows(head, 2, 0);
        let mut dq = vec![0.0; t * d];
        let mut weights = vec![0.0; BLOCK.min(t) * t];
        let mut slopes = vec![0.0; BLOCK.min(t) * t];
        let mut kept = vec![1.0; t];
        // In mixed precision the sums are scaled instead of the slopes, because f16 has fewer bits
        // for small slopes.
        let [slope_scale, sum_scale] = match self.sizes.precision {
            Precision::F32 => [scale as f32, 1.0],
            Precision::Mixed => [1.0, scale as f32],
        };
        for first in (0..t).step_by(BLOCK) {
            let end = t.min(first + BLOCK);
            let keys = head.sizes.keys(end - 1);
            let size = (end - first) * keys;
            let p = &mut weights[..size];
            let ds = &mut slopes[..size];
            let queries = self.rows(head, 0, first);
            let dy_rows = Matrix::rows(&dy[head.y_at(first)..], c);

            let pairs = HostProduct::new([end - first, keys, d]);
            let scores = HostProduct { factor: scale as f32, ..pairs };
            scores.run(queries, keys_of_head.transposed(), p, keys);
            pairs.run(dy_rows, values.transposed(), ds, keys);

            for (i, &lse) in (first..end).zip(&lse[first..end]) {
                let row = (i - first) * keys..(i - first + 1) * keys;
                let seen = head.sizes.keys(i);
                let (p, behind) = p[row.clone()].split_at_mut(seen);
                behind.fill(0.0);
                let (ds, behind) = ds[row].split_at_mut(seen);
                behind.fill(0.0);
                if head.sizes.drop.is_some() {
                    kept[..seen].fill(1.0);
                    drop_row(head, i, &mut kept[..seen]);
                }
                let at = head.y_at(i);
                let row = HeadRow { lse, y: &y[at..at + d], dy: &dy[at..at + d] };
                grad_row(row, slope_scale, &kept[..seen], p, ds);
            }
            self.sizes.round(p);
            self.sizes.round(ds);

            let by_query =
                HostProduct { factor: sum_scale, ..HostProduct::new([end - first, d, keys]) };
            by_query.run(Matrix::rows(ds, keys), keys_of_head, &mut dq[first * d..], d);
            let by_value = HostProduct { add: true, ..HostProduct::new([keys, d, end - first]) };
            let by_key = HostProduct { factor: sum_scale, ..by_value };
            by_key.run(Matrix::rows(ds, keys).transposed(), queries, &mut gradients.keys, d);
            by_value.run(Matrix::rows(p, keys).transposed(), dy_rows, &mut gradients.values, d);
        }
        gradients.queries.push(dq);
    }
}

impl AttentionSizes {
    /// Rounds weights or slopes to the precision of operands of products.
    fn round(&self, pairs: &mut [f32]) {
        if self.precision == Precision::Mixed {
            round_to_f16(pairs);
        }
    }
}

/// Gradients of a head of keys and values, `(t, d)` each, and of the queries that share it.
struct SharedGradients {
    /// By query head, in order.
    queries: Vec<Vec<f32>>,
    keys: Vec<f32>,
    values: Vec<f32>,
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
        let key = head_key(drop.key, head.h);
        let first_pair = head.sizes.pair(i, 0);
        drop_pairs(key, head.id, first_pair, drop.threshold, drop.factor as f32, row);
    }
}

vectorized! {
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
