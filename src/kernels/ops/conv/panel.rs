//! Panels of padded pictures, which the direct CPU kernels of convolutions read without tests.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::geometry::Gather;

/// Elements of a panel of several rows: 256 KiB, which stay in the second-level cache.
pub(crate) const PANEL: usize = 64 * 1024;

thread_local! {
    static PADDED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Rows of the grid of a product, and the padded pictures that their taps read.
pub(crate) struct PaddedPanel<'a> {
    pub data: &'a [f32],
    /// Elements from a picture to the next.
    pub(crate) picture_step: usize,
    /// Elements from a row of the grid to the next, and from a place of a row to the next.
    pub steps: [usize; 2],
    /// Elements from a row of taps to the next, and from a tap to the next.
    pub(crate) tap_steps: [usize; 2],
}

/// Returns the height and the width of what so many rows of the grid read.
fn extent(gather: &Gather, rows: usize) -> [usize; 2] {
    [rows, gather.grid[1]].map(|count| count.max(1) - 1).into_iter().enumerate().fold(
        [0; 2],
        |mut all, (axis, last)| {
            let taps = gather.taps[axis].max(1) - 1;
            all[axis] = last * gather.step[axis] + taps * gather.tap_step[axis] + 1;
            all
        },
    )
}

/// Returns the number of elements that so many rows of the grid read.
pub fn elements(gather: &Gather, rows: usize, channels: usize) -> usize {
    let [height, width] = extent(gather, rows);
    height * width * channels
}

/// Returns the most rows of the grid whose panel is not too large, at least one.
pub(crate) fn rows_of(gather: &Gather, channels: usize) -> usize {
    let fits = |rows: &usize| elements(gather, *rows, channels) <= PANEL;
    (1..=gather.grid[0].max(1)).take_while(fits).last().unwrap_or(1)
}

/// Calls `body`, in parallel, for blocks of `rows` rows of the grids of products: with the number
/// of the product, the picture with the rows, and the part of `out`, whose places have so many
/// channels, in which they lie.
pub(crate) fn for_each_block(
    products: &[Gather],
    rows: usize,
    channels: usize,
    out: &mut [f32],
    body: impl Fn(usize, (usize, Range<usize>), &mut [f32]) + Sync,
) {
    let Some(Gather { out_size: [height, width], out_step: [step, _], .. }) = products.first()
    else {
        return;
    };
    let line = width * channels;
    out.par_chunks_mut(height * line).enumerate().for_each(|(b, out)| {
        out.par_chunks_mut(step * rows * line).enumerate().for_each(|(block, out)| {
            for (product, gather) in products.iter().enumerate() {
                let rows = block * rows..gather.grid[0].min((block + 1) * rows);
                if !rows.is_empty() && gather.grid[1] > 0 {
                    body(product, (b, rows), out);
                }
            }
        });
    });
}

/// Calls `body` with the panel of rows of the grid of these pictures, one behind the other: the
/// pictures themselves if no padding is read, or else a copy with their padding.
pub fn with(
    gather: &Gather,
    channels: usize,
    source: &[f32],
    (pictures, rows): (Range<usize>, Range<usize>),
    body: impl FnOnce(&PaddedPanel),
) {
    let ([height, width], size) = (extent(gather, rows.len()), gather.size);
    let top = gather.first[0] + (rows.start * gather.step[0]) as isize;
    let left = gather.first[1];
    let one = size[0] * size[1] * channels;
    let source = &source[pictures.start * one..pictures.end * one];
    let panel = |data, picture_step: usize, width: usize| {
        let by = |steps: [usize; 2]| [steps[0] * width * channels, steps[1] * channels];
        let (steps, tap_steps) = (by(gather.step), by(gather.tap_step));
        PaddedPanel { data, picture_step, steps, tap_steps }
    };
    let inside = |first: isize, count: usize, size: usize| {
        usize::try_from(first).ok().filter(|first| first + count <= size)
    };
    if let (Some(y), Some(x)) = (inside(top, height, size[0]), inside(left, width, size[1])) {
        return body(&panel(&source[(y * size[1] + x) * channels..], one, size[1]));
    }
    let mut padded = PADDED.take();
    let step = height * width * channels;
    if padded.len() < pictures.len() * step {
        padded.resize(pictures.len() * step, 0.0);
    }
    let line = size[1] * channels;
    for (picture, padded) in source.chunks_exact(one).zip(padded.chunks_exact_mut(step)) {
        for (y, to) in (top..).zip(padded.chunks_exact_mut(width * channels)) {
            match usize::try_from(y).ok().filter(|y| *y < size[0]) {
                Some(y) => copy_padded(&picture[y * line..][..line], left * channels as isize, to),
                None => to.fill(0.0),
            }
        }
    }
    body(&panel(&padded[..pictures.len() * step], step, width));
    PADDED.set(padded);
}

/// Copies the elements of a line from `first` on, with zeros in front of it and behind it.
fn copy_padded(line: &[f32], first: isize, to: &mut [f32]) {
    let before = first.min(0).unsigned_abs().min(to.len());
    let start = first.max(0).unsigned_abs().min(line.len());
    let count = (line.len() - start).min(to.len() - before);
    to[..before].fill(0.0);
    to[before..before + count].copy_from_slice(&line[start..start + count]);
    to[before + count..].fill(0.0);
}
