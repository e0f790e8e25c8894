//! CPU kernels of convolutions of single channels: sums of a vector of channels in registers, over
//! padded pictures.

use pulp::Simd;
use rayon::prelude::*;

use super::geometry::{ConvKind, Gather, Geometry};
use super::host::{PARTS, add_parts};
use super::panel::{self, PaddedPanel, PictureRows};

/// Places of a tile, whose sums are in registers.
const PLACES: usize = 8;

/// Taps of a tile of the gradient by the weight, whose sums are in registers.
const TAPS: usize = 4;

/// Computes a call on all threads. The order of sums does not depend on the number of threads.
pub fn fast(geometry: &Geometry, accumulate: bool, a: &[f32], b: &[f32], out: &mut [f32]) {
    match geometry.kind {
        ConvKind::Forward | ConvKind::InputGrad => gathered(geometry, a, b, out),
        ConvKind::WeightGrad => weight_grad(geometry, accumulate, a, b, out),
    }
}

/// Computes the forward pass or the gradient by the input, in blocks of rows of pictures.
fn gathered(geometry: &Geometry, source: &[f32], weight: &[f32], out: &mut [f32]) {
    let c = geometry.c;
    let all = Gather::all(geometry);
    let weights: Vec<Vec<f32>> =
        all.iter().map(|gather| by_taps(geometry, gather, weight)).collect();
    let rows = all.iter().map(|gather| panel::rows_of(gather, c)).min().unwrap_or(1);
    panel::for_each_block(&all, rows, c, out, |product, block, out| {
        compute_rows(&all[product], c, &weights[product], source, block, out);
    });
}

/// Weights `(c, 1, kh, kw)` as (taps of the product, c).
fn by_taps(geometry: &Geometry, gather: &Gather, weight: &[f32]) -> Vec<f32> {
    let mut all = vec![0.0; gather.tap_count() * geometry.c];
    geometry.for_each_weight(gather, |place| {
        all[place.tap * geometry.c + place.group] = weight[place.at];
    });
    all
}

fn offsets(gather: &Gather, panel: &PaddedPanel) -> Vec<usize> {
    let mut offsets = Vec::with_capacity(gather.tap_count());
    for ky in 0..gather.taps[0] {
        for kx in 0..gather.taps[1] {
            offsets.push(ky * panel.tap_steps[0] + kx * panel.tap_steps[1]);
        }
    }
    offsets
}

/// Computes rows of the grid of a product in a picture; `out` begins with the row of the picture in
/// which the first of them would be without an offset.
fn compute_rows(
    gather: &Gather,
    c: usize,
    weights: &[f32],
    source: &[f32],
    block: &PictureRows,
    out: &mut [f32],
) {
    panel::with(gather, c, source, block, |panel| {
        let offsets = offsets(gather, panel);
        for row in 0..block.rows.len() {
            pulp::Arch::new().dispatch(ChannelSums {
                x: &panel.data[row * panel.steps[0]..],
                step: panel.steps[1],
                count: gather.grid[1],
                offsets: &offsets,
                weights,
                c,
                out: &mut out[gather.out_at([0, row, 0]) * c..],
                out_step: gather.out_step[1] * c,
            });
        }
    });
}

/// Sums over the taps for every channel of `count` places of a row, `step` elements apart in `x`
/// and `out_step` in `out`.
struct ChannelSums<'a> {
    x: &'a [f32],
    step: usize,
    count: usize,
    offsets: &'a [usize],
    /// (taps, c)
    weights: &'a [f32],
    c: usize,
    out: &'a mut [f32],
    out_step: usize,
}

impl pulp::WithSimd for ChannelSums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let whole = self.count - self.count % PLACES;
        for first in (0..self.c).step_by(S::F32_LANES) {
            let is_whole = first + S::F32_LANES <= self.c;
            for begin in (0..whole).step_by(PLACES) {
                if is_whole {
                    self.tile::<S, PLACES, true>(simd, first, begin)
                } else {
                    self.tile::<S, PLACES, false>(simd, first, begin)
                }
            }
            for begin in whole..self.count {
                if is_whole {
                    self.tile::<S, 1, true>(simd, first, begin)
                } else {
                    self.tile::<S, 1, false>(simd, first, begin)
                }
            }
        }
    }
}

/// Returns the first elements of a slice as a vector: all lanes if `WHOLE`, or else `lanes` of
/// them and zeros.
#[inline(always)]
fn load<S: Simd, const WHOLE: bool>(simd: S, from: &[f32], lanes: usize) -> S::f32s {
    if WHOLE {
        S::as_simd_f32s(&from[..S::F32_LANES]).0[0]
    } else {
        simd.partial_load_f32s(&from[..lanes])
    }
}

/// Stores the lanes of a vector that [`load`] reads.
#[inline(always)]
fn store<S: Simd, const WHOLE: bool>(simd: S, to: &mut [f32], lanes: usize, value: S::f32s) {
    if WHOLE {
        S::as_mut_simd_f32s(&mut to[..S::F32_LANES]).0[0] = value;
    } else {
        simd.partial_store_f32s(&mut to[..lanes], value);
    }
}

impl ChannelSums<'_> {
    /// Computes a vector of channels, or the rest of them, of `P` places.
    #[inline(always)]
    fn tile<S: Simd, const P: usize, const WHOLE: bool>(
        &mut self,
        simd: S,
        first: usize,
        begin: usize,
    ) {
        let lanes = self.c - first;
        let mut sums = [simd.splat_f32s(0.0); P];
        for (tap, offset) in self.offsets.iter().enumerate() {
            let by = load::<S, WHOLE>(simd, &self.weights[tap * self.c + first..], lanes);
            for (place, sum) in sums.iter_mut().enumerate() {
                let at = (begin + place) * self.step + offset + first;
                *sum = simd.mul_add_e_f32s(load::<S, WHOLE>(simd, &self.x[at..], lanes), by, *sum);
            }
        }
        for (place, sum) in sums.iter().enumerate() {
            let to = &mut self.out[(begin + place) * self.out_step + first..];
            store::<S, WHOLE>(simd, to, lanes, *sum);
        }
    }
}

/// Computes the gradient by the weight: partial sums over blocks of rows of outputs, added in
/// order. The parts depend only on the sizes.
fn weight_grad(geometry: &Geometry, accumulate: bool, x: &[f32], dy: &[f32], out: &mut [f32]) {
    let taps = geometry.taps();
    let c = geometry.c;
    let gather = Gather::forward(geometry);
    let height = geometry.out[0];
    let rows = panel::rows_of(&gather, c);
    let mut blocks = Vec::new();
    for b in 0..geometry.b {
        for first in (0..height).step_by(rows) {
            let rows = first..height.min(first + rows);
            blocks.push(PictureRows { pictures: b..b + 1, rows });
        }
    }

    let parts: Vec<Vec<f32>> = blocks
        .par_chunks(blocks.len().div_ceil(PARTS))
        .map(|blocks| {
            let mut sums = vec![0.0; taps * c];
            for block in blocks {
                add_block(geometry, &gather, block, x, dy, &mut sums);
            }
            sums
        })
        .collect();
    add_parts(geometry, &parts, accumulate, out, |channel, tap| tap * c + channel);
}

/// Adds the products of x and dy over rows of outputs of a picture to the sums (taps, c).
fn add_block(
    geometry: &Geometry,
    gather: &Gather,
    block: &PictureRows,
    x: &[f32],
    dy: &[f32],
    sums: &mut [f32],
) {
    let c = geometry.c;
    let [height, width] = geometry.out;
    let first = (block.pictures.start * height + block.rows.start) * width * c;
    panel::with(gather, c, x, block, |panel| {
        pulp::Arch::new().dispatch(TapSums {
            x: panel.data,
            steps: panel.steps,
            counts: [block.rows.len(), width],
            offsets: &offsets(gather, panel),
            dy: &dy[first..][..block.rows.len() * width * c],
            c,
            sums,
        });
    });
}

/// Sums (taps, c) to which the products of x and dy over rows of places are added.
struct TapSums<'a> {
    x: &'a [f32],
    /// Elements from a row of places to the next, and from a place to the next.
    steps: [usize; 2],
    counts: [usize; 2],
    offsets: &'a [usize],
    /// (places, c)
    dy: &'a [f32],
    c: usize,
    sums: &'a mut [f32],
}

impl pulp::WithSimd for TapSums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let taps = self.offsets.len();
        let whole = taps - taps % TAPS;
        for first in (0..self.c).step_by(S::F32_LANES) {
            let is_whole = first + S::F32_LANES <= self.c;
            for tap in (0..whole).step_by(TAPS) {
                if is_whole {
                    self.tile::<S, TAPS, true>(simd, first, tap)
                } else {
                    self.tile::<S, TAPS, false>(simd, first, tap)
                }
            }
            for tap in whole..taps {
                if is_whole {
                    self.tile::<S, 1, true>(simd, first, tap)
                } else {
                    self.tile::<S, 1, false>(simd, first, tap)
                }
            }
        }
    }
}

impl TapSums<'_> {
    /// Adds to the sums of `T` taps for a vector of channels, or the rest of them.
    #[inline(always)]
    fn tile<S: Simd, const T: usize, const WHOLE: bool>(
        &mut self,
        simd: S,
        first: usize,
        tap: usize,
    ) {
        let lanes = self.c - first;
        let mut offsets = [0; T];
        offsets.copy_from_slice(&self.offsets[tap..tap + T]);
        let mut own = [simd.splat_f32s(0.0); T];
        for row in 0..self.counts[0] {
            for place in 0..self.counts[1] {
                let from = (row * self.counts[1] + place) * self.c + first;
                let dy = load::<S, WHOLE>(simd, &self.dy[from..], lanes);
                let at = row * self.steps[0] + place * self.steps[1] + first;
                for (sum, offset) in own.iter_mut().zip(offsets) {
                    let x = load::<S, WHOLE>(simd, &self.x[at + offset..], lanes);
                    *sum = simd.mul_add_e_f32s(x, dy, *sum);
                }
            }
        }
        for (at, own) in own.iter().enumerate() {
            let to = &mut self.sums[(tap + at) * self.c + first..];
            let sum = simd.add_f32s(*own, load::<S, WHOLE>(simd, to, lanes));
            store::<S, WHOLE>(simd, to, lanes, sum);
        }
    }
}
