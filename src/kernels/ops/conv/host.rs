//! CPU kernels of convolutions: blocks of rows are gathered into a small panel per thread and
//! multiplied by the `gemm` crate; convolutions of single channels or with few weights are computed
//! directly.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use crate::ops::host_product::{HostProduct, Matrix};

use super::channels::Channels;
use super::geometry::{ConvKind, Gather, Geometry};
use super::{depthwise_host, direct};
use crate::{OpCall, operands};
use potluck_core::HostTensorView;

/// Elements of a panel: 256 KiB, which stay in the second-level cache.
const PANEL: usize = 64 * 1024;

/// The fewest rows of a panel, unless a call has fewer: for few rows, packing the weights would
/// cost as much as multiplying by them.
const ROWS_MIN: usize = 128;

/// The fewest tasks of a call, unless it has fewer blocks of 16 rows.
const TASKS_MIN: usize = 16;

/// Elements of all partial sums of the gradient by the weight.
const PARTIALS: usize = 1 << 21;

/// Partial sums of the gradient by the weight without matrices, unless there are fewer blocks of
/// rows of places.
pub(super) const PARTS: usize = 16;

/// The fewest places of a partial sum of the gradient by the weight.
const PART_MIN: usize = 256;

thread_local! {
    /// The panel of this thread, and the rows of a product before they are moved to their places.
    static BUFFERS: RefCell<[Vec<f32>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// CPU kernel on all threads. The order of sums does not depend on the number of threads.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let geometry = Geometry::of(call);
    let accumulate = call.accumulates();
    let a = &*operands(call, inputs[0].floats());
    let b = &*operands(call, inputs[1].floats());
    let out = &mut *outputs[0];
    if geometry.is_depthwise() {
        return depthwise_host::fast(&geometry, accumulate, a, b, out);
    }
    let is_direct = direct::fits(&geometry);
    match geometry.kind {
        ConvKind::WeightGrad if is_direct => direct::weight_grad(&geometry, accumulate, a, b, out),
        ConvKind::WeightGrad => weight_grad(&geometry, accumulate, a, b, out),
        _ if is_direct => direct::gathered(&geometry, a, b, out),
        ConvKind::Forward | ConvKind::InputGrad => gathered(&geometry, a, b, out),
    }
}

/// Computes the forward pass or the gradient by the input.
fn gathered(geometry: &Geometry, source: &[f32], weight: &[f32], out: &mut [f32]) {
    let channels = Channels::of(geometry);
    let all = Gather::all(geometry);
    let mut products = Vec::new();
    for gather in &all {
        let weights = permuted(geometry, gather, weight);
        products.push(Product { gather, channels, weights });
    }
    if let [product] = products.as_slice()
        && product.gather.is_whole()
    {
        let [down, across] = product.gather.grid;
        let rows = product.task_rows(geometry.b * down * across);
        out.par_chunks_mut(rows * channels.written).enumerate().for_each(|(task, out)| {
            let first = task * rows;
            product.compute(source, first..first + out.len() / channels.written, out);
        });
        return;
    }
    // Each product writes to every few places of a picture, so a task is a whole picture.
    let picture = geometry.size[0] * geometry.size[1] * geometry.c;
    out.par_chunks_mut(picture).enumerate().for_each(|(b, out)| {
        for product in &products {
            product.compute_picture(source, b, out);
        }
    });
}

/// Returns the weights of a product, (groups, taps, channels read, channels written), with the
/// channels of a group.
fn permuted(geometry: &Geometry, gather: &Gather, weight: &[f32]) -> Vec<f32> {
    let mut all = Vec::with_capacity(geometry.weights() / geometry.taps() * gather.tap_count());
    geometry.for_each_weight(gather, |place| all.push(weight[place.at]));
    all
}

/// A gathered product with its weights.
struct Product<'a> {
    gather: &'a Gather,
    channels: Channels,
    weights: Vec<f32>,
}

impl Product<'_> {
    fn terms(&self) -> usize {
        self.gather.tap_count() * self.channels.group_read
    }

    fn panel_rows(&self) -> usize {
        (PANEL / self.terms().max(1)).max(ROWS_MIN)
    }

    /// Rows of a task, given the number of all rows.
    fn task_rows(&self, all: usize) -> usize {
        all.div_ceil(TASKS_MIN).next_multiple_of(16).min(self.panel_rows())
    }

    /// Computes these rows of the product, which are contiguous in `out`.
    fn compute(&self, source: &[f32], rows: Range<usize>, out: &mut [f32]) {
        let Channels { read, written, group_read, group_written } = self.channels;
        let taps = self.gather.tap_count();
        if taps == 0 {
            return out.fill(0.0);
        }
        let slab = (PANEL / rows.len().max(1) / group_read).clamp(1, taps);
        for group in 0..read / group_read {
            let weights = &self.weights[group * self.terms() * group_written..];
            for first in (0..taps).step_by(slab) {
                let taps = first..taps.min(first + slab);
                let k = taps.len() * group_read;
                let b = &weights[first * group_read * group_written..][..k * group_written];
                let columns = group * group_read..(group + 1) * group_read;
                let block = Block { gather: self.gather, channels: read, columns, taps };
                block.with(source, rows.clone(), |a| {
                    let of_sizes = HostProduct::new([rows.len(), group_written, k]);
                    let product = HostProduct { add: first > 0, ..of_sizes };
                    let b = Matrix::rows(b, group_written);
                    product.run(a, b, &mut out[group * group_written..], written);
                });
            }
        }
    }

    /// Computes the places of the product in picture `b`, whose values are `out`.
    fn compute_picture(&self, source: &[f32], b: usize, out: &mut [f32]) {
        let written = self.channels.written;
        let rows = self.gather.grid[0] * self.gather.grid[1];
        let mut values = BUFFERS.with_borrow_mut(|[_, values]| std::mem::take(values));
        for first in (0..rows).step_by(self.panel_rows()) {
            let count = self.panel_rows().min(rows - first);
            values.resize(count * written, 0.0);
            let first = b * rows + first;
            self.compute(source, first..first + count, &mut values);
            for (row, values) in (first..).zip(values.chunks_exact(written)) {
                let [_, i, j] = self.gather.place(row);
                let at = self.gather.out_at([0, i, j]) * written;
                out[at..at + written].copy_from_slice(values);
            }
        }
        BUFFERS.with_borrow_mut(|buffers| buffers[1] = values);
    }
}

/// The terms of a gathered product: some channels of the places that some taps read.
struct Block<'a> {
    gather: &'a Gather,
    /// Channels of the pictures that are read.
    channels: usize,
    columns: Range<usize>,
    taps: Range<usize>,
}

impl Block<'_> {
    /// Calls `body` with the matrix of these rows: the pictures themselves if the product reads
    /// them as they are, or else the panel of this thread.
    fn with(&self, source: &[f32], rows: Range<usize>, body: impl FnOnce(Matrix)) {
        if self.gather.is_plain() {
            let start = rows.start * self.channels + self.columns.start;
            return body(Matrix::rows(&source[start..], self.channels));
        }
        let width = self.taps.len() * self.columns.len();
        BUFFERS.with_borrow_mut(|[panel, _]| {
            if panel.len() < rows.len() * width {
                panel.resize(rows.len() * width, 0.0);
            }
            let panel = &mut panel[..rows.len() * width];
            for (row, to) in rows.zip(panel.chunks_exact_mut(width)) {
                self.fill(source, row, to);
            }
            body(Matrix::rows(panel, width));
        });
    }

    /// Gathers the terms of a row.
    fn fill(&self, source: &[f32], row: usize, to: &mut [f32]) {
        let across = self.gather.taps[1];
        let [b, i, j] = self.gather.place(row);
        let mut tap = self.taps.start;
        let mut rest = to;
        while tap < self.taps.end {
            let [ky, kx] = self.gather.tap(tap);
            let end = self.taps.end.min(tap - kx + across);
            let (line, behind) = rest.split_at_mut((end - tap) * self.columns.len());
            match self.gather.read(0, i, ky) {
                Some(y) => {
                    let width = self.gather.size[1] * self.channels;
                    let row = (b * self.gather.size[0] + y) * width;
                    self.fill_line(&source[row..row + width], j, kx..end - tap + kx, line);
                }
                None => line.fill(0.0),
            }
            tap = end;
            rest = behind;
        }
    }

    /// Gathers the elements of a row of a picture that taps of one row of the kernel read.
    fn fill_line(&self, line: &[f32], j: usize, taps: Range<usize>, to: &mut [f32]) {
        let gather = self.gather;
        let wide = self.columns.len();
        let first =
            gather.first[1] + (j * gather.step[1] + taps.start * gather.tap_step[1]) as isize;
        if gather.tap_step[1] == 1 && wide == self.channels {
            // Neighbouring taps read neighbouring places, all of their channels.
            let before = first.min(0).unsigned_abs().min(taps.len());
            let from = first.max(0).unsigned_abs();
            let inside = (gather.size[1].saturating_sub(from)).min(taps.len() - before);
            let (zeros, rest) = to.split_at_mut(before * wide);
            let (values, behind) = rest.split_at_mut(inside * wide);
            zeros.fill(0.0);
            values.copy_from_slice(&line[(from * wide).min(line.len())..][..inside * wide]);
            return behind.fill(0.0);
        }
        for (tap, to) in taps.zip(to.chunks_exact_mut(wide)) {
            match gather.read(1, j, tap) {
                Some(x) => {
                    let at = x * self.channels + self.columns.start;
                    to.copy_from_slice(&line[at..at + wide]);
                }
                None => to.fill(0.0),
            }
        }
    }
}

/// Writes to each weight the sum of the partial sums at its place, in their order, or adds it. The
/// arguments of `place` are a channel that is written, and the number of one of its weights.
pub(super) fn add_parts(
    geometry: &Geometry,
    parts: &[Vec<f32>],
    accumulate: bool,
    out: &mut [f32],
    place: impl Fn(usize, usize) -> usize + Sync,
) {
    let channel_weights = geometry.group_c() * geometry.taps();
    out.par_chunks_mut(channel_weights).enumerate().for_each(|(channel, weights)| {
        for (at, to) in weights.iter_mut().enumerate() {
            let place = place(channel, at);
            let sum: f32 = parts.iter().map(|part| part[place]).sum();
            *to = if accumulate { *to + sum } else { sum };
        }
    });
}

/// A part of the gradient by the weight: the sums over some places for some taps of a group.
struct WeightPart {
    group: usize,
    taps: Range<usize>,
    places: Range<usize>,
}

/// Computes the gradient by the weight: parts of it on all threads, whose sums are then added in
/// order. The parts depend only on the sizes.
fn weight_grad(geometry: &Geometry, accumulate: bool, x: &[f32], dy: &[f32], out: &mut [f32]) {
    let taps = geometry.taps();
    let c = geometry.group_c();
    let o = geometry.group_o();
    let positions = geometry.positions();
    let parts = (PARTIALS / geometry.weights()).min(positions / PART_MIN).clamp(1, TASKS_MIN);
    let terms = positions.div_ceil(parts);
    // With few parts, each tap is a task too.
    let slab = if parts * geometry.groups() < TASKS_MIN { 1 } else { taps };
    let gather = Gather::forward(geometry);
    let mut all = Vec::new();
    for group in 0..geometry.groups() {
        for first_tap in (0..taps).step_by(slab) {
            for first in (0..positions).step_by(terms) {
                let taps = first_tap..taps.min(first_tap + slab);
                let places = first..positions.min(first + terms);
                all.push(WeightPart { group, taps, places });
            }
        }
    }
    let sums: Vec<Vec<f32>> =
        all.par_iter().map(|part| part.compute(geometry, &gather, x, dy)).collect();

    let mut is_first = vec![!accumulate; taps * geometry.groups()];
    for (part, sums) in all.iter().zip(&sums) {
        for (at, tap) in part.taps.clone().enumerate() {
            let replaces = std::mem::take(&mut is_first[part.group * taps + tap]);
            let place = gather.tap(tap);
            for channel in 0..c {
                let sums = &sums[(at * c + channel) * o..][..o];
                for (column, sum) in sums.iter().enumerate() {
                    let to = &mut out[geometry.weight_at(part.group * o + column, channel, place)];
                    *to = if replaces { *sum } else { *to + sum };
                }
            }
        }
    }
}

impl WeightPart {
    /// Sums of a part: (taps, input channels, output channels) of its group.
    fn compute(&self, geometry: &Geometry, gather: &Gather, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let c = geometry.group_c();
        let o = geometry.group_o();
        let terms = self.taps.len() * c;
        let columns = self.group * c..(self.group + 1) * c;
        let block = Block { gather, channels: geometry.c, columns, taps: self.taps.clone() };
        let mut sums = vec![0.0; terms * o];
        let rows = (PANEL / terms).clamp(16, 4096);
        for first in self.places.clone().step_by(rows) {
            let rows = first..self.places.end.min(first + rows);
            let count = rows.len();
            block.with(x, rows, |a| {
                let of_sizes = HostProduct::new([terms, o, count]);
                let product = HostProduct { add: first > self.places.start, ..of_sizes };
                let b = Matrix::rows(&dy[first * geometry.o + self.group * o..], geometry.o);
                product.run(a.transposed(), b, &mut sums, o);
            });
        }
        sums
    }
}
