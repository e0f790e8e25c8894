//! Sizes of a convolution, derived from its call, and the places that its windows read.

use super::channels::Channels;
use crate::OpCall;
use potluck_core::arithmetic::gcd;
use potluck_graph::{Conv2dOptions, Op};

/// Result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvKind {
    Forward,
    InputGrad,
    WeightGrad,
}

/// Sizes of a convolution of pictures `x (b, h, w, c)` to `y (b, oh, ow, o)`, or of one of its
/// gradients.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub kind: ConvKind,
    pub b: usize,
    /// Height and width of the pictures.
    pub size: [usize; 2],
    pub c: usize,
    /// Height and width of the output.
    pub out: [usize; 2],
    pub o: usize,
    pub kernel: [usize; 2],
    pub options: Conv2dOptions,
}

impl Geometry {
    /// Returns the sizes of a call, whose outputs have the shape of the root op's outputs.
    ///
    /// # Panics
    /// Panics if the op is no convolution.
    pub fn of(call: &OpCall) -> Self {
        let first = &call.inputs[0];
        let second = &call.inputs[1];
        let result = &call.outputs[0];
        let (kind, options, [x, w, y]) = match *call.op.root_op() {
            Op::Conv2d(options) => (ConvKind::Forward, options, [first, second, result]),
            Op::Conv2dInputGrad { options, .. } => {
                (ConvKind::InputGrad, options, [result, second, first])
            }
            Op::Conv2dWeightGrad { options, .. } => {
                (ConvKind::WeightGrad, options, [first, result, second])
            }
            ref other => panic!("{other} is no convolution"),
        };
        Self {
            kind,
            b: x[0],
            size: [x[1], x[2]],
            c: x[3],
            out: [y[1], y[2]],
            o: y[3],
            kernel: [w[2], w[3]],
            options,
        }
    }

    pub fn groups(&self) -> usize {
        self.options.groups
    }

    pub(crate) fn group_c(&self) -> usize {
        self.c / self.groups()
    }

    pub(crate) fn group_o(&self) -> usize {
        self.o / self.groups()
    }

    /// Number of places of the kernel.
    pub(crate) fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Returns the number of places of all outputs.
    pub fn positions(&self) -> usize {
        self.b * self.out[0] * self.out[1]
    }

    /// Returns the number of weights of all channels and taps.
    pub fn weights(&self) -> usize {
        self.o * self.group_c() * self.taps()
    }

    /// Returns true if every channel is convolved with a kernel of its own.
    pub(crate) fn is_depthwise(&self) -> bool {
        self.groups() > 1 && self.group_c() == 1 && self.group_o() == 1
    }

    /// Index in the weight `(o, c/groups, kh, kw)`.
    pub(crate) fn weight_at(&self, o: usize, c: usize, [ky, kx]: [usize; 2]) -> usize {
        ((o * self.group_c() + c) * self.kernel[0] + ky) * self.kernel[1] + kx
    }

    /// Calls `body` with each weight of a product of this call: by groups, taps, channels that are
    /// read, and channels that are written.
    pub(crate) fn for_each_weight(&self, gather: &Gather, mut body: impl FnMut(ProductWeight)) {
        let Channels { group_read, group_written, .. } = Channels::of(self);
        for group in 0..self.groups() {
            for tap in 0..gather.tap_count() {
                let place = gather.kernel_place(gather.tap(tap));
                for read in 0..group_read {
                    for written in 0..group_written {
                        let (c, o) = match self.kind {
                            ConvKind::InputGrad => (written, read),
                            ConvKind::Forward | ConvKind::WeightGrad => (read, written),
                        };
                        let at = self.weight_at(group * self.group_o() + o, c, place);
                        body(ProductWeight { group, tap, read, written, at });
                    }
                }
            }
        }
    }

    /// Calls `body` with the number of each place of an output, the number of a place of `x` that
    /// it reads, and the place of the kernel; not for padding.
    pub(crate) fn for_each_pair(&self, mut body: impl FnMut(usize, usize, [usize; 2])) {
        let gather = Gather::forward(self);
        for at in 0..self.positions() {
            let place = gather.place(at);
            for ky in 0..self.kernel[0] {
                for kx in 0..self.kernel[1] {
                    if let Some(from) = gather.source(place, [ky, kx]) {
                        body(at, from, [ky, kx]);
                    }
                }
            }
        }
    }
}

/// Weight of a gathered product, with the channels of its group.
pub(crate) struct ProductWeight {
    pub group: usize,
    pub tap: usize,
    pub read: usize,
    pub written: usize,
    /// Its index in the weight of the call.
    pub at: usize,
}

/// A product whose rows are gathered from pictures: the forward pass, or the part of the gradient
/// by the input whose places have the same remainder by the stride. Its terms are *taps* (places of
/// the kernel) and channels. In each pair, the height comes first.
#[derive(Clone, Copy, Debug)]
pub struct Gather {
    /// Rows of the product, a grid for each of `b` pictures.
    pub grid: [usize; 2],
    /// Place that the first tap of the first row reads; negative in the padding.
    pub first: [isize; 2],
    /// Distance of the places that a tap reads for neighbouring rows of the grid.
    pub step: [usize; 2],
    /// Distance of the places that neighbouring taps read.
    pub(crate) tap_step: [usize; 2],
    pub(crate) taps: [usize; 2],
    /// Place of the first tap in the kernel.
    pub(crate) kernel_first: [usize; 2],
    /// Distance of neighbouring taps in the kernel.
    pub(crate) kernel_step: [isize; 2],
    /// Size of the pictures that are read.
    pub size: [usize; 2],
    /// Place of the first row in the output.
    pub(crate) out_first: [usize; 2],
    /// Distance of neighbouring rows in the output.
    pub(crate) out_step: [usize; 2],
    pub(crate) out_size: [usize; 2],
}

impl Gather {
    /// Returns the product of the forward pass.
    pub fn forward(geometry: &Geometry) -> Self {
        let Conv2dOptions { stride, padding, dilation, .. } = geometry.options;
        Self {
            grid: geometry.out,
            first: padding.map(|padding| -(padding as isize)),
            step: stride,
            tap_step: dilation,
            taps: geometry.kernel,
            kernel_first: [0; 2],
            kernel_step: [1; 2],
            size: geometry.size,
            out_first: [0; 2],
            out_step: [1; 2],
            out_size: geometry.out,
        }
    }

    /// Returns the product of the gradient by the input for the places of this remainder. Taps are
    /// in falling order of their places in the kernel, so that the places that they read rise.
    pub(crate) fn input_grad(geometry: &Geometry, remainder: [usize; 2]) -> Self {
        let y = Phase::of(geometry, 0, remainder[0]);
        let x = Phase::of(geometry, 1, remainder[1]);
        Self {
            grid: [y.grid, x.grid],
            first: [y.first, x.first],
            step: [1; 2],
            tap_step: [y.tap_step, x.tap_step],
            taps: [y.taps, x.taps],
            kernel_first: [y.kernel_last, x.kernel_last],
            kernel_step: [-(y.kernel_step as isize), -(x.kernel_step as isize)],
            size: geometry.out,
            out_first: remainder,
            out_step: geometry.options.stride,
            out_size: geometry.size,
        }
    }

    /// Returns the products of a call of these sizes, by the remainders of the places of their
    /// outputs, row by row.
    pub fn all(geometry: &Geometry) -> Vec<Self> {
        if geometry.kind != ConvKind::InputGrad {
            return vec![Self::forward(geometry)];
        }
        let stride = geometry.options.stride;
        let mut products = Vec::new();
        for y in 0..stride[0].min(geometry.size[0]) {
            for x in 0..stride[1].min(geometry.size[1]) {
                products.push(Self::input_grad(geometry, [y, x]));
            }
        }
        products
    }

    /// Returns picture, row and column in the grid of a row of the product.
    pub fn place(&self, row: usize) -> [usize; 3] {
        let [down, across] = self.grid;
        [row / (down * across), row / across % down, row % across]
    }

    /// Returns the number of the place that a tap reads, `None` for padding.
    pub fn source(&self, [b, i, j]: [usize; 3], tap: [usize; 2]) -> Option<usize> {
        let y = self.read(0, i, tap[0])?;
        Some((b * self.size[0] + y) * self.size[1] + self.read(1, j, tap[1])?)
    }

    /// Returns the row or column that a tap reads, `None` for padding.
    pub fn read(&self, axis: usize, at: usize, tap: usize) -> Option<usize> {
        let offset = (at * self.step[axis] + tap * self.tap_step[axis]) as isize;
        let place = usize::try_from(self.first[axis] + offset).ok()?;
        if place < self.size[axis] { Some(place) } else { None }
    }

    pub(crate) fn tap_count(&self) -> usize {
        self.taps[0] * self.taps[1]
    }

    pub(crate) fn tap(&self, number: usize) -> [usize; 2] {
        [number / self.taps[1], number % self.taps[1]]
    }

    pub(crate) fn kernel_place(&self, tap: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|axis| {
            self.kernel_first[axis].wrapping_add_signed(tap[axis] as isize * self.kernel_step[axis])
        })
    }

    /// Number of the place in the output of a row of the product.
    pub(crate) fn out_at(&self, [b, i, j]: [usize; 3]) -> usize {
        let y = self.out_first[0] + i * self.out_step[0];
        let x = self.out_first[1] + j * self.out_step[1];
        (b * self.out_size[0] + y) * self.out_size[1] + x
    }

    /// Returns true if the rows of the product are the places of the output, in order.
    pub fn is_whole(&self) -> bool {
        self.grid == self.out_size
    }

    /// Returns true if the rows of the product are the places that are read, in order.
    pub fn is_plain(&self) -> bool {
        let aligned = self.first == [0; 2] && self.step == [1; 2];
        aligned && self.taps == [1; 2] && self.grid == self.size
    }
}

/// One axis of [`Gather::input_grad`].
struct Phase {
    grid: usize,
    first: isize,
    taps: usize,
    tap_step: usize,
    /// Place of the last tap in the kernel.
    kernel_last: usize,
    kernel_step: usize,
}

impl Phase {
    /// Place `i` of x is read by tap `k` of output `(i + padding - k dilation) / stride`, if that
    /// is whole: for every `kernel_step`-th tap.
    fn of(geometry: &Geometry, axis: usize, remainder: usize) -> Self {
        let stride = geometry.options.stride[axis];
        let padding = geometry.options.padding[axis];
        let dilation = geometry.options.dilation[axis];
        let kernel_step = stride / gcd(stride, dilation);
        let strided_output = |k: usize| (remainder + padding) as isize - (k * dilation) as isize;
        let mut taps = 0;
        let mut kernel_last = 0;
        for k in 0..geometry.kernel[axis] {
            if strided_output(k).rem_euclid(stride as isize) == 0 {
                taps += 1;
                kernel_last = k;
            }
        }
        Self {
            grid: geometry.size[axis].saturating_sub(remainder).div_ceil(stride),
            first: strided_output(kernel_last).div_euclid(stride as isize),
            taps,
            tap_step: kernel_step * dilation / stride,
            kernel_last,
            kernel_step,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The gradient by the input pairs the same places with the same taps as the forward pass.
    #[test]
    fn gathers_of_the_input_gradient_have_the_pairs_of_the_forward_pass() {
        let sizes = [[7, 9], [5, 4]];
        for (stride, padding, dilation) in [(1, 0, 1), (2, 1, 1), (3, 2, 2), (2, 0, 2), (4, 1, 3)] {
            let options = Conv2dOptions::default()
                .with_stride(stride)
                .with_padding(padding)
                .with_dilation(dilation);
            for (size, kernel) in sizes.into_iter().zip([[3, 2], [2, 1]]) {
                let Ok(out) = options.output_size(size, kernel) else { continue };
                let kind = ConvKind::InputGrad;
                let geometry = Geometry { kind, b: 2, size, c: 1, out, o: 1, kernel, options };
                let mut wanted = BTreeSet::new();
                geometry.for_each_pair(|y, x, tap| assert!(wanted.insert((x, y, tap))));
                let (mut found, mut places) = (BTreeSet::new(), BTreeSet::new());
                for gather in Gather::all(&geometry) {
                    for row in 0..2 * gather.grid[0] * gather.grid[1] {
                        let place = gather.place(row);
                        let at = gather.out_at(place);
                        assert!(places.insert(at));
                        for tap in (0..gather.tap_count()).map(|tap| gather.tap(tap)) {
                            let from = gather.source(place, tap);
                            found.extend(from.map(|from| (at, from, gather.kernel_place(tap))));
                        }
                    }
                }
                assert_eq!(found, wanted, "{options} of {size:?} by {kernel:?}");
                assert_eq!(places.len(), 2 * size[0] * size[1]);
            }
        }
    }
}
