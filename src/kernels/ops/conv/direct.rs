//! CPU kernels of convolutions with few weights: tiles of sums in registers, over padded pictures.
//! For few weights, packing matrices would cost as much as multiplying them.

use rayon::prelude::*;

use super::channels::Channels;
use super::geometry::{ConvKind, Gather, Geometry};
use super::host::{PARTS, add_parts};
use super::micro::{self, PlaceSums, TermRuns, TermSums};
use super::panel::{self, PaddedPanel, PictureRows};
use crate::simd::{add_elements, vectorized};

/// The most weights of a call: all that the tiles of a row of places read should stay in the cache.
const WEIGHTS_MAX: usize = 1 << 18;

/// The most tasks of a picture: the rows of a task share the padded rows around them.
const BLOCKS: usize = 4;

/// Returns true if the kernels of this module compute the call.
pub fn fits(geometry: &Geometry) -> bool {
    if geometry.weights() > WEIGHTS_MAX {
        return false;
    }
    let channels = Channels::of(geometry);
    Gather::all(geometry).iter().all(|gather| {
        !gather.is_plain() && panel::elements(gather, 1, channels.read) <= panel::PANEL
    })
}

/// Returns the runs of terms of a group in a panel. Weights have the same order: run by run, and
/// within a run tap by tap.
fn runs(gather: &Gather, panel: &PaddedPanel, channels: &Channels, group: usize) -> TermRuns {
    let Channels { read, group_read, .. } = *channels;
    let [down, across] = gather.taps;
    // Neighbouring taps that read all channels are one run.
    let (along, length) = if panel.tap_steps[1] == read && group_read == read {
        (1, across * read)
    } else {
        (across, group_read)
    };
    let mut offsets = Vec::with_capacity(down * along);
    for ky in 0..down {
        for kx in 0..along {
            let tap = ky * panel.tap_steps[0] + kx * panel.tap_steps[1];
            offsets.push(tap + group * group_read);
        }
    }
    TermRuns { offsets, length }
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

/// Number of vectors of a block of columns, and of blocks.
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

/// Returns true if [`spread`] computes the call: a gradient by the input whose channels would leave
/// most of a vector empty, whereas the channels of a row of the kernel are contiguous.
fn is_spread(geometry: &Geometry) -> bool {
    let is_narrow = geometry.groups() == 1 && 2 * geometry.c <= micro::lanes();
    is_narrow && geometry.kind == ConvKind::InputGrad && geometry.options.dilation[1] == 1
}

/// Computes the gradient by the input from the contributions of each output to the places that it
/// reads: for each row of the kernel, all of its taps and channels, which are neighbours in a
/// picture.
fn spread(geometry: &Geometry, dy: &[f32], weight: &[f32], out: &mut [f32]) {
    let Geometry { c, o, kernel: [kh, kw], .. } = *geometry;
    let lanes = micro::lanes();
    let (vectors, blocks) = blocks(kw * c);
    let padded = vectors * blocks * lanes;
    // (rows of the kernel, blocks, o, columns of a block)
    let mut weights = vec![0.0; kh * padded * o];
    let width = vectors * lanes;
    for ky in 0..kh {
        // The columns of all blocks are the taps of the row, each with its channels.
        for column in 0..kw * c {
            let kx = column / c;
            let own = column % c;
            for channel in 0..o {
                let row = (ky * blocks + column / width) * o + channel;
                weights[row * width + column % width] =
                    weight[geometry.weight_at(channel, own, [ky, kx])];
            }
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
    /// Adds the contributions of a row of outputs, `step` elements apart, to a row of a picture.
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

/// Computes rows of the grid of a product in a picture; `out` begins with the row of the picture in
/// which the first of them would be without an offset.
fn compute_rows(
    gather: &Gather,
    channels: &Channels,
    packed: &Packed,
    source: &[f32],
    block: &PictureRows,
    out: &mut [f32],
) {
    let Channels { written, group_written, .. } = *channels;
    let count = gather.grid[1];
    let rows = block.rows.len();
    let line = |row: usize| gather.out_at([0, row, 0]) * written;
    if gather.taps.contains(&0) {
        for row in 0..rows {
            let places = out[line(row)..].chunks_mut(gather.out_step[1] * written);
            for place in places.take(count) {
                place[..written].fill(0.0);
            }
        }
        return;
    }
    panel::with(gather, channels.read, source, block, |panel| {
        for group in 0..channels.read / channels.group_read {
            let runs = runs(gather, panel, channels, group);
            for block in 0..packed.blocks {
                let size = runs.terms() * packed.width;
                let weights = &packed.weights[(group * packed.blocks + block) * size..][..size];
                let first = block * packed.width;
                for row in 0..rows {
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
/// The parts depend only on the sizes.
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
    // Sums are read and written once per block, so a block has several small pictures.
    let whole = panel::elements(&gather, rows, geometry.c);
    let several = match per_picture {
        1 => (panel::PANEL / whole).clamp(1, geometry.b.div_ceil(PARTS)),
        _ => 1,
    };
    let mut blocks = Vec::new();
    for first in (0..geometry.b).step_by(several) {
        for block in 0..per_picture {
            let row = block * rows;
            blocks.push(PictureRows {
                pictures: first..geometry.b.min(first + several),
                rows: row.min(gather.grid[0])..gather.grid[0].min(row + rows),
            });
        }
    }

    let each = blocks.len().div_ceil(PARTS);
    let parts: Vec<Vec<f32>> = blocks
        .par_chunks(each)
        .map(|blocks| {
            let mut sums = PartialSums::new(geometry);
            for block in blocks {
                sums.add(geometry, &gather, block, x, dy);
            }
            sums.values
        })
        .collect();
    let taps = geometry.taps();
    let c = geometry.group_c();
    let o = geometry.group_o();
    let padded = PartialSums::padded(o);
    add_parts(geometry, &parts, accumulate, out, |channel, at| {
        let term = (channel / o * taps + at % taps) * c + at / taps;
        term * padded + channel % o
    });
}

/// Sums of a part: (groups, taps, input channels, padded output channels).
struct PartialSums {
    values: Vec<f32>,
    /// Copy of the rows of dy of a group with zeros behind its channels, if they are no whole
    /// vectors.
    dy: Vec<f32>,
}

impl PartialSums {
    /// Output channels of a group, filled up to whole blocks.
    fn padded(o: usize) -> usize {
        let (vectors, blocks) = blocks(o);
        blocks * vectors * micro::lanes()
    }

    fn new(geometry: &Geometry) -> Self {
        let terms = geometry.groups() * geometry.taps() * geometry.group_c();
        let values = vec![0.0; terms * Self::padded(geometry.group_o())];
        Self { values, dy: Vec::new() }
    }

    /// Adds the contributions of rows of outputs of some pictures.
    fn add(
        &mut self,
        geometry: &Geometry,
        gather: &Gather,
        block: &PictureRows,
        x: &[f32],
        dy: &[f32],
    ) {
        let PictureRows { pictures, rows } = block;
        if rows.is_empty() {
            return;
        }
        let o = geometry.group_o();
        let width = geometry.out[1];
        let (vectors, blocks) = blocks(o);
        let padded = Self::padded(o);
        let channels = Channels::of(geometry);
        // Blocks of several pictures have all of their rows.
        let first = (pictures.start * geometry.out[0] + rows.start) * width * geometry.o;
        let places = pictures.len() * rows.len() * width;
        let dy = &dy[first..first + places * geometry.o];
        let Self { values, dy: copy } = self;
        panel::with(gather, geometry.c, x, block, |panel| {
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
