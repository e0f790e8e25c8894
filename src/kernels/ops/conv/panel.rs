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

/// Rows of the grid of a product in each of some pictures.
pub(crate) struct PictureRows {
    pub pictures: Range<usize>,
    pub rows: Range<usize>,
}

/// Padded pictures that the taps of some rows of the grid of a product read.
pub(crate) struct PaddedPanel<'a> {
    pub data: &'a [f32],
    /// Elements from a picture to the next.
    pub(crate) picture_step: usize,
    /// Elements from a row of the grid to the next, and from a place of a row to the next.
    pub steps: [usize; 2],
    /// Elements from a row of taps to the next, and from a tap to the next.
    pub(crate) tap_steps: [usize; 2],
}

impl<'a> PaddedPanel<'a> {
    /// Creates the panel of pictures with rows of `width` places.
    fn new(
        gather: &Gather,
        channels: usize,
        data: &'a [f32],
        picture_step: usize,
        width: usize,
    ) -> Self {
        let line = width * channels;
        Self {
            data,
            picture_step,
            steps: [gather.step[0] * line, gather.step[1] * channels],
            tap_steps: [gather.tap_step[0] * line, gather.tap_step[1] * channels],
        }
    }
}

/// Height and width of the places that `rows` rows of the grid read.
fn extent(gather: &Gather, rows: usize) -> [usize; 2] {
    let counts = [rows, gather.grid[1]];
    [0, 1].map(|axis| {
        let last_place = counts[axis].max(1) - 1;
        let last_tap = gather.taps[axis].max(1) - 1;
        last_place * gather.step[axis] + last_tap * gather.tap_step[axis] + 1
    })
}

/// Returns the number of elements that `rows` rows of the grid read.
pub fn elements(gather: &Gather, rows: usize, channels: usize) -> usize {
    let [height, width] = extent(gather, rows);
    height * width * channels
}

/// The most rows of the grid whose panel is not too large, at least one.
pub(crate) fn rows_of(gather: &Gather, channels: usize) -> usize {
    let mut rows = 1;
    while rows < gather.grid[0] && elements(gather, rows + 1, channels) <= PANEL {
        rows += 1;
    }
    rows
}

/// Calls `body`, in parallel, for blocks of `rows` rows of the grids of products: with the number
/// of the product, the rows and their picture, and the part of `out` in which they lie. Places of
/// `out` have `channels` channels.
pub(crate) fn for_each_block(
    products: &[Gather],
    rows: usize,
    channels: usize,
    out: &mut [f32],
    body: impl Fn(usize, &PictureRows, &mut [f32]) + Sync,
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
                    body(product, &PictureRows { pictures: b..b + 1, rows }, out);
                }
            }
        });
    });
}

/// Calls `body` with the panel of rows of the grid, picture by picture: the pictures themselves if
/// no padding is read, or else a copy with their padding.
pub fn with(
    gather: &Gather,
    channels: usize,
    source: &[f32],
    block: &PictureRows,
    body: impl FnOnce(&PaddedPanel),
) {
    let PictureRows { pictures, rows } = block;
    let [height, width] = extent(gather, rows.len());
    let size = gather.size;
    let top = gather.first[0] + (rows.start * gather.step[0]) as isize;
    let left = gather.first[1];
    let line = size[1] * channels;
    let one = size[0] * line;
    let source = &source[pictures.start * one..pictures.end * one];
    if let Some(y) = inside(top, height, size[0])
        && let Some(x) = inside(left, width, size[1])
    {
        let data = &source[y * line + x * channels..];
        return body(&PaddedPanel::new(gather, channels, data, one, size[1]));
    }

    let mut padded = PADDED.take();
    let step = height * width * channels;
    if padded.len() < pictures.len() * step {
        padded.resize(pictures.len() * step, 0.0);
    }
    for (picture, padded) in source.chunks_exact(one).zip(padded.chunks_exact_mut(step)) {
        for (y, to) in (top..).zip(padded.chunks_exact_mut(width * channels)) {
            match inside(y, 1, size[0]) {
                Some(y) => copy_padded(&picture[y * line..][..line], left * channels as isize, to),
                None => to.fill(0.0),
            }
        }
    }
    let data = &padded[..pictures.len() * step];
    body(&PaddedPanel::new(gather, channels, data, step, width));
    PADDED.set(padded);
}

/// Returns `first` if `count` places from there on are within a side of `size` places.
fn inside(first: isize, count: usize, size: usize) -> Option<usize> {
    let first = usize::try_from(first).ok()?;
    if first + count <= size { Some(first) } else { None }
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
