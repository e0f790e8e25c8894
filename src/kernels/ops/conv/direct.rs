//! CPU kernels of convolutions with few weights: tiles of sums in registers, over padded pictures.
//! Where weights are few, packing matrices would cost as much as multiplying them.

use std::ops::Range;

use rayon::prelude::*;

use super::channels::Channels;
use super::geometry::{ConvKind, Gather, Geometry};
use super::host::{PARTS, add_parts};
use super::micro::{self, PlaceSums, TermRuns, TermSums};
use super::panel::{self, PaddedPanel};
use crate::simd::{add_elements, vectorized};

/// Weights at most: all that the tiles of a row of places read should stay in the cache.
const WEIGHTS_MAX: usize = 1 << 18;

/// Tasks of a picture at most: rows that one computes share the padded rows around them.
const BLOCKS: usize = 4;

/// Returns true if the call is computed here.
pub fn fits(geometry: &Geometry) -> bool {
    let channels = Channels::of(geometry);
    let gathers = Gather::all(geometry);
    let is_small = |gather: &Gather| panel::elements(gather, 1, channels.read) <= panel::PANEL;
    geometry.weights() <= WEIGHTS_MAX
        && !gathers.iter().any(Gather::is_plain)
        && gathers.iter().all(is_small)
}

/// Returns the runs of terms of a group in a panel, and the order of its weights: for each run the
/// taps in it.
fn runs(gather: &Gather, panel: &PaddedPanel, channels: &Channels, group: usize) -> TermRuns {
    let Channels { read, group_read, .. } = *channels;
    let [down, across] = gather.taps;
    // Neighbouring taps that read all channels are one run.
    let (along, length) = if panel.tap_steps[1] == read && group_read == read {
        (1, across * read)
    } else {
        (across, group_read)
    };
    let offset = |at: usize| {
        let (ky, kx) = (at / along, at % along);
        ky * panel.tap_steps[0] + kx * panel.tap_steps[1] + group * group_read
    };
    TermRuns { offsets: (0..down * along).map(offset).collect(), length }
}

/// Weights of a product, (groups, blocks of columns, taps, channels read, columns of a block), with
/// zeros behind the last column.
struct Packed {
    weights: Vec<f32>,
    vectors: usize,
    /// Columns of a block.
    width: usize,
    blocks: usize,
}

/// Returns the number of vectors of a block of columns, and of blocks.
fn blocks(columns: usize) -> (usize, usize) {
    let lanes = micro::lanes();
    let vectors = if columns > lanes { 2 } else { 1 };
    (vectors, columns.div_ceil(vectors * lanes))
}

impl Packed {
    fn new(geometry: &Geometry, gather: &Gather, weight: &[f32]) -> Self {
        let Channels { group_read, group_written, .. } = Channels::of(geometry);
        let (vectors, blocks) = blocks(group_written);
        let width = vectors * micro::lanes();
        let terms = gather.tap_count() * group_read;
        let mut weights = vec![0.0; geometry.groups() * blocks * terms * width];
        geometry.for_each_weight(gather, |place| {
            let block = (place.group * blocks + place.written / width) * terms;
            let term = block + place.tap * group_read + place.read;
            weights[term * width + place.written % width] = weight[place.at];
        });
        Self { weights, vectors, width, blocks }
    }
}

/// Computes the forward pass or the gradient by the input.
pub fn gathered(geometry: &Geometry, source: &[f32], weight: &[f32], out: &mut [f32]) {
    if is_spread(geometry) {
        return spread(geometry, source, weight, out);
    }
    let channels = Channels::of(geometry);
    let all = Gather::all(geometry);
    let packed: Vec<Packed> =
        all.iter().map(|gather| Packed::new(geometry, gather, weight)).collect();
    let fitting = all.iter().map(|gather| panel::rows_of(gather, channels.read)).min().unwrap_or(1);
    // Rows of the grids that a task computes.
    let rows = all[0].grid[0].div_ceil(BLOCKS).max(fitting.min(4)).min(fitting);
    panel::for_each_block(&all, rows, channels.written, out, |product, block, out| {
        compute_rows(&all[product], &channels, &packed[product], source, block, out);
    });
}

/// Returns true if the gradient by the input is computed by [`spread`]: if its channels would leave
/// most of a vector empty, and those of a row of the kernel do not.
fn is_spread(geometry: &Geometry) -> bool {
    let is_narrow = geometry.groups() == 1 && 2 * geometry.c <= micro::lanes();
    is_narrow && geometry.kind == ConvKind::InputGrad && geometry.options.dilation[1] == 1
}

/// Computes the gradient by the input from what each output gives to the places that it reads: for
/// each row of the kernel, all of its taps and channels, which are neighbours in a picture.
fn spread(geometry: &Geometry, dy: &[f32], weight: &[f32], out: &mut [f32]) {
    let (c, o, [kh, kw]) = (geometry.c, geometry.o, geometry.kernel);
    let lanes = micro::lanes();
    let (vectors, blocks) = blocks(kw * c);
    let padded = vectors * blocks * lanes;
    // (rows of the kernel, blocks, o, columns of a block)
    let mut weights = vec![0.0; kh * padded * o];
    let width = vectors * lanes;
    for (ky, kx) in (0..kh).flat_map(|ky| (0..kw).map(move |kx| (ky, kx))) {
        for (own, channel) in (0..c).flat_map(|own| (0..o).map(move |channel| (own, channel))) {
            let (block, column) = ((kx * c + own) / width, (kx * c + own) % width);
            let at = ((ky * blocks + block) * o + channel) * width + column;
            weights[at] = weight[geometry.weight_at(channel, own, [ky, kx])];
        }
    }
    let runs = TermRuns { offsets: vec![0], length: o };
    let picture = geometry.size[0] * geometry.size[1] * c;
    let line = geometry.out[1] * o;
    out.par_chunks_mut(picture).enumerate().for_each_init(Vec::new, |values, (b, out)| {
        out.fill(0.0);
        values.resize(geometry.out[1] * padded, 0.0);
        let gather = Gather::forward(geometry);
        for row in 0..geometry.out[0] {
            let dy = &dy[(b * geometry.out[0] + row) * line..][..line];
            for ky in 0..kh {
                let Some(y) = gather.read(0, row, ky) else { continue };
                for block in 0..blocks {
                    let size = o * width;
                    pulp::Arch::new().dispatch(PlaceSums {
                        x: dy,
                        step: o,
                        count: geometry.out[1],
                        runs: &runs,
                        weights: &weights[(ky * blocks + block) * size..][..size],
                        vectors,
                        columns: width,
                        out: &mut values[block * width..],
                        out_step: padded,
                    });
                }
                let to = &mut out[y * geometry.size[1] * c..][..geometry.size[1] * c];
                add_spread(geometry, values, padded, to);
            }
        }
    });
}

vectorized! {
    /// Adds what the outputs of a row give, `step` elements apart, to a row of a picture.
    fn add_spread<S>(geometry: &Geometry, values: &[f32], step: usize, to: &mut [f32]) {
        let (c, stride) = (geometry.c, geometry.options.stride[1]);
        let length = geometry.kernel[1] * c;
        for (j, values) in values.chunks_exact(step).enumerate() {
            let (at, padding) = (j * stride * c, geometry.options.padding[1] * c);
            let before = padding.saturating_sub(at).min(length);
            let start = (at + before).saturating_sub(padding).min(to.len());
            let count = (length - before).min(to.len() - start);
            add_elements(&mut to[start..start + count], &values[before..before + count]);
        }
    }
}

/// Computes rows of the grid of a product; `out` begins with the row of the picture in which the
/// first of them would be without an offset.
fn compute_rows(
    gather: &Gather,
    channels: &Channels,
    packed: &Packed,
    source: &[f32],
    (b, rows): (usize, Range<usize>),
    out: &mut [f32],
) {
    let Channels { written, group_written, .. } = *channels;
    let count = gather.grid[1];
    let line = |row: usize| gather.out_at([0, row, 0]) * written;
    if gather.taps.contains(&0) {
        for row in 0..rows.len() {
            let places = out[line(row)..].chunks_mut(gather.out_step[1] * written).take(count);
            places.for_each(|place| place[..written].fill(0.0));
        }
        return;
    }
    panel::with(gather, channels.read, source, (b..b + 1, rows.clone()), |panel| {
        for group in 0..channels.read / channels.group_read {
            let runs = runs(gather, panel, channels, group);
            for block in 0..packed.blocks {
                let size = runs.terms() * packed.width;
                let weights = &packed.weights[(group * packed.blocks + block) * size..][..size];
                let first = block * packed.width;
                for row in 0..rows.len() {
                    let sums = PlaceSums {
                        x: &panel.data[row * panel.steps[0]..],
                        step: panel.steps[1],
                        count,
                        runs: &runs,
                        weights,
                        vectors: packed.vectors,
                        columns: packed.width.min(group_written - first),
                        out: &mut out[line(row) + group * group_written + first..],
                        out_step: gather.out_step[1] * written,
                    };
                    pulp::Arch::new().dispatch(sums);
                }
            }
        }
    });
}

/// Computes the gradient by the weight: partial sums of blocks of rows of places, added in order.
/// The parts depend on the sizes alone.
pub(crate) fn weight_grad(
    geometry: &Geometry,
    accumulate: bool,
    x: &[f32],
    dy: &[f32],
    out: &mut [f32],
) {
    let gather = Gather::forward(geometry);
    let rows = panel::rows_of(&gather, geometry.c);
    let per_picture = gather.grid[0].div_ceil(rows);
    // Blocks of rows in even parts.
    let rows = gather.grid[0].div_ceil(per_picture);
    // Sums are read and written once per block, so small pictures are taken several at a time.
    let whole = panel::elements(&gather, rows, geometry.c);
    let several = match per_picture {
        1 => (panel::PANEL / whole).clamp(1, geometry.b.div_ceil(PARTS)),
        _ => 1,
    };
    let count = geometry.b.div_ceil(several) * per_picture;
    let blocks: Vec<(Range<usize>, Range<usize>)> = (0..count)
        .map(|at| {
            let (first, row) = (at / per_picture * several, at % per_picture * rows);
            let rows = row.min(gather.grid[0])..gather.grid[0].min(row + rows);
            (first..geometry.b.min(first + several), rows)
        })
        .collect();
    let each = count.div_ceil(PARTS);
    let parts: Vec<Vec<f32>> = blocks
        .par_chunks(each)
        .map(|blocks| {
            let mut sums = PartialSums::new(geometry);
            for block in blocks {
                sums.add(geometry, &gather, block.clone(), x, dy);
            }
            sums.values
        })
        .collect();
    let (taps, c, o) = (geometry.taps(), geometry.group_c(), geometry.group_o());
    let padded = PartialSums::padded(o);
    add_parts(geometry, &parts, accumulate, out, |channel, at| {
        let term = (channel / o * taps + at % taps) * c + at / taps;
        term * padded + channel % o
    });
}

/// Sums of a part: (groups, taps, input channels, padded output channels).
struct PartialSums {
    values: Vec<f32>,
    /// Rows of dy of a group with zeros behind its channels, if they are no whole vectors.
    dy: Vec<f32>,
}

impl PartialSums {
    /// Returns the output channels of a group, filled up to whole blocks.
    fn padded(o: usize) -> usize {
        let (vectors, blocks) = blocks(o);
        blocks * vectors * micro::lanes()
    }

    fn new(geometry: &Geometry) -> Self {
        let terms = geometry.groups() * geometry.taps() * geometry.group_c();
        let values = vec![0.0; terms * Self::padded(geometry.group_o())];
        Self { values, dy: Vec::new() }
    }

    /// Adds what rows of outputs of a picture contribute.
    fn add(
        &mut self,
        geometry: &Geometry,
        gather: &Gather,
        (pictures, rows): (Range<usize>, Range<usize>),
        x: &[f32],
        dy: &[f32],
    ) {
        if rows.is_empty() {
            return;
        }
        let (o, width) = (geometry.group_o(), geometry.out[1]);
        let (vectors, blocks) = blocks(o);
        let (padded, channels) = (Self::padded(o), Channels::of(geometry));
        // Blocks of several pictures have all of their rows.
        let first = (pictures.start * geometry.out[0] + rows.start) * width * geometry.o;
        let places = pictures.len() * rows.len() * width;
        let dy = &dy[first..first + places * geometry.o];
        let Self { values, dy: copy } = self;
        panel::with(gather, geometry.c, x, (pictures.clone(), rows.clone()), |panel| {
            for group in 0..geometry.groups() {
                let (dy, dy_step) = if padded == o {
                    (&dy[group * o..], geometry.o)
                } else {
                    copy.clear();
                    for place in dy.chunks_exact(geometry.o) {
                        copy.extend_from_slice(&place[group * o..(group + 1) * o]);
                        copy.resize(copy.len() + padded - o, 0.0);
                    }
                    (&copy[..], padded)
                };
                let runs = runs(gather, panel, &channels, group);
                let size = runs.terms() * padded;
                let sums = &mut values[group * size..(group + 1) * size];
                for block in 0..blocks {
                    let column = block * padded / blocks;
                    pulp::Arch::new().dispatch(TermSums {
                        x: panel.data,
                        steps: [panel.picture_step, panel.steps[0], panel.steps[1]],
                        counts: [pictures.len(), rows.len(), width],
                        runs: &runs,
                        dy: &dy[column..],
                        dy_step,
                        vectors,
                        sums: &mut sums[column..],
                        sums_step: padded,
                    });
                }
            }
        });
    }
}
