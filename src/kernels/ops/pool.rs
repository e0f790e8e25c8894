//! Maximum and mean over windows of pictures in channels-last layout, and their gradients. Twin of
//! `shaders/pool.wgsl`, which has the formulas.

use rayon::prelude::*;

use super::dispatch_parts::{as_words, lanes_of};
use crate::dispatch::grid;
use crate::harness::InputFill;
use crate::simd::{add_elements, vectorized};
use crate::twin::{InputSpec, leading_axis, no_forward};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::{Op, Pool2dOptions};

/// Twin of [`Op::MaxPool2d`], [`Op::AvgPool2d`] and their gradients.
pub static TWIN: Twin = Twin {
    name: "pool",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations,
    inputs,
    forward: no_forward,
    independent_axes: leading_axis,
    probes,
    catalog,
};

/// Maximum number of places of a cell that one invocation writes; with larger cells, there would be
/// few invocations.
const CELL_PLACES_MAX: usize = 64;

/// Kind of a pooling, or of its gradient.
#[derive(Clone, Copy, PartialEq)]
enum PoolKind {
    Max,
    MaxGrad,
    Avg,
    AvgGrad,
}

/// Sizes of a pooling of pictures `x (b, h, w, c)` to `y (b, oh, ow, c)`, or of its gradient.
#[derive(Clone, Copy)]
struct PoolSizes {
    kind: PoolKind,
    b: usize,
    size: [usize; 2],
    out: [usize; 2],
    c: usize,
    options: Pool2dOptions,
}

impl PoolSizes {
    fn of(call: &OpCall) -> Self {
        let first = &call.inputs[0];
        let last = &call.outputs[0];
        let (kind, options, x, y) = match *call.op {
            Op::MaxPool2d(options) => (PoolKind::Max, options, first, last),
            Op::AvgPool2d(options) => (PoolKind::Avg, options, first, last),
            Op::MaxPool2dGrad { options, .. } => (PoolKind::MaxGrad, options, last, first),
            Op::AvgPool2dGrad { options, .. } => (PoolKind::AvgGrad, options, last, first),
            ref other => panic!("{other} is no pooling"),
        };
        Self { kind, b: x[0], size: [x[1], x[2]], out: [y[1], y[2]], c: x[3], options }
    }

    fn is_grad(&self) -> bool {
        matches!(self.kind, PoolKind::MaxGrad | PoolKind::AvgGrad)
    }

    /// Returns true if an invocation may write the gradient of a maximum to all places of its cell,
    /// from its window to the next ones or to the edge: no windows overlap, and cells are small.
    fn has_cells(&self) -> bool {
        let Pool2dOptions { kernel, stride, padding, dilation, .. } = self.options;
        self.kind == PoolKind::MaxGrad
            && (0..2).all(|axis| kernel[axis] <= stride[axis] && padding[axis] == 0)
            && dilation == [1; 2]
            && self.cell(0) * self.cell(1) <= CELL_PLACES_MAX
    }

    /// Rows or columns of the largest cell.
    fn cell(&self, axis: usize) -> usize {
        let stride = self.options.stride[axis];
        stride.max(self.size[axis] - (self.out[axis] - 1) * stride)
    }

    /// Entry point of the shader, for an invocation per result or per cell.
    fn entry(&self, by_cells: bool) -> &'static str {
        match self.kind {
            PoolKind::Max => "max_pool",
            PoolKind::MaxGrad if by_cells => "max_pool_grad_cells",
            PoolKind::MaxGrad => "max_pool_grad",
            PoolKind::Avg => "avg_pool",
            PoolKind::AvgGrad => "avg_pool_grad",
        }
    }

    fn places(&self) -> usize {
        self.options.kernel[0] * self.options.kernel[1]
    }

    fn result(&self) -> [usize; 2] {
        if self.is_grad() { self.size } else { self.out }
    }

    /// Calls `body` for each place that a result at `[picture, row, column]` reads, with its index
    /// among the places of the input, and its place in the window.
    #[inline(always)]
    fn for_each_read(&self, [b, i, j]: [usize; 3], mut body: impl FnMut(usize, usize)) {
        let [down, across] = if self.is_grad() {
            [self.windows(0, i), self.windows(1, j)]
        } else {
            [self.inside(0, i), self.inside(1, j)]
        };
        let [height, width] = if self.is_grad() { self.out } else { self.size };
        for y in down {
            let Some(row) = self.tap(0, i, y) else { continue };
            for x in across.clone() {
                let Some(column) = self.tap(1, j, x) else { continue };
                body((b * height + y) * width + x, row * self.options.kernel[1] + column);
            }
        }
    }

    /// Returns the row or column within a window that connects a result and a place of the input,
    /// if the window has one.
    #[inline(always)]
    fn tap(&self, axis: usize, at: usize, from: usize) -> Option<usize> {
        let (inner, window) = if self.is_grad() { (at, from) } else { (from, at) };
        let apart = inner + self.options.padding[axis] - window * self.options.stride[axis];
        let dilation = self.options.dilation[axis];
        if dilation == 1 {
            return Some(apart);
        }
        if apart.is_multiple_of(dilation) { Some(apart / dilation) } else { None }
    }

    /// Returns the rows or columns of the picture between the first and the last one of a window,
    /// without padding.
    fn inside(&self, axis: usize, window: usize) -> std::ops::Range<usize> {
        let Pool2dOptions { stride, padding, .. } = self.options;
        let first = window * stride[axis];
        let last = first + self.options.span()[axis];
        let end = last.saturating_sub(padding[axis]).min(self.size[axis]);
        first.saturating_sub(padding[axis]).min(end)..end
    }

    /// Windows that reach over a row or column.
    fn windows(&self, axis: usize, at: usize) -> std::ops::Range<usize> {
        let Pool2dOptions { stride, padding, .. } = self.options;
        let place = at + padding[axis];
        let span = self.options.span()[axis];
        let end = (place / stride[axis] + 1).min(self.out[axis]);
        let first = if place < span { 0 } else { (place - span) / stride[axis] + 1 };
        first.min(end)..end
    }
}

/// Reference: the places of a window in their order; of equal values the first is the maximum, and
/// a NaN is larger than all numbers.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let sizes = PoolSizes::of(call);
    let c = sizes.c;
    let [height, width] = sizes.result();
    let x = inputs[0].floats();
    let count = T::from_f64(sizes.places() as f64);
    // A maximum writes its place to a second output.
    let (values, places) = outputs.split_at_mut(1);
    for (at, value) in values[0].iter_mut().enumerate() {
        let row = at / c;
        let channel = at % c;
        let place = [row / (height * width), row / width % height, row % width];
        let mut total = T::zero();
        let mut best: Option<(T, T)> = None;
        sizes.for_each_read(place, |from, place| {
            let from = from * c + channel;
            let place = T::from_f64(place as f64);
            match sizes.kind {
                PoolKind::Max => {
                    let wins = match best {
                        Some((known, _)) => {
                            x[from] > known || (x[from].is_nan() && !known.is_nan())
                        }
                        None => true,
                    };
                    if wins {
                        best = Some((x[from], place));
                    }
                }
                PoolKind::MaxGrad if x[from] == place => total += inputs[1].floats()[from],
                PoolKind::MaxGrad => {}
                PoolKind::Avg | PoolKind::AvgGrad => total += x[from] / count,
            }
        });
        *value = total;
        if let Some((largest, place)) = best {
            *value = largest;
            places[0][at] = place;
        }
    }
}

/// CPU kernel: parallel over rows of pictures, in vectorized loops over channels.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let sizes = PoolSizes::of(call);
    let c = sizes.c;
    let [height, width] = sizes.result();
    let x = inputs[0].floats();
    if let [y, places] = outputs {
        let lines = (y.par_chunks_mut(width * c), places.par_chunks_mut(width * c));
        lines.into_par_iter().enumerate().for_each(|(row, (y, places))| {
            let each = y.chunks_exact_mut(c).zip(places.chunks_exact_mut(c));
            for (at, (y, places)) in each.enumerate() {
                let mut is_first = true;
                sizes.for_each_read([row / height, row % height, at], |from, place| {
                    take_larger(&x[from * c..][..c], place as f32, is_first, y, places);
                    is_first = false;
                });
            }
        });
        return;
    }
    outputs[0].par_chunks_mut(width * c).enumerate().for_each(|(row, y)| {
        let [picture, row] = [row / height, row % height];
        if sizes.kind != PoolKind::MaxGrad {
            average_row(&sizes, [picture, row, 0], x, y);
            return;
        }
        for (at, y) in y.chunks_exact_mut(c).enumerate() {
            y.fill(0.0);
            sizes.for_each_read([picture, row, at], |from, place| {
                let dy = &inputs[1].floats()[from * c..][..c];
                add_where(dy, &x[from * c..][..c], place as f32, y);
            });
        }
    });
}

vectorized! {
    /// Computes a row of a picture, which begins at this place, of average pooling or its gradient.
    fn average_row<S>(sizes: &PoolSizes, place: [usize; 3], x: &[f32], y: &mut [f32]) {
        let share = 1.0 / sizes.places() as f32;
        let [picture, row, first] = place;
        for (column, y) in (first..).zip(y.chunks_exact_mut(sizes.c)) {
            y.fill(0.0);
            sizes.for_each_read([picture, row, column], |from, _| {
                add_elements(y, &x[from * sizes.c..][..sizes.c]);
            });
            for y in y {
                *y *= share;
            }
        }
    }

    /// Replaces the values that are smaller than in `x`, and their places by `place`.
    fn take_larger<S>(x: &[f32], place: f32, is_first: bool, y: &mut [f32], places: &mut [f32]) {
        if is_first {
            y.copy_from_slice(x);
            return places.fill(place);
        }
        for ((x, y), known) in x.iter().zip(y).zip(places) {
            let wins = (*x > *y) | (x.is_nan() & !y.is_nan());
            *y = if wins { *x } else { *y };
            *known = if wins { place } else { *known };
        }
    }

    /// Adds the elements of `dy` whose maximum is known to be at this place.
    fn add_where<S>(dy: &[f32], known: &[f32], place: f32, dx: &mut [f32]) {
        for ((dy, known), dx) in dy.iter().zip(known).zip(dx) {
            *dx += if *known == place { *dy } else { 0.0 };
        }
    }
}

/// Static choice: vectors of 4 channels where their number allows them, and an invocation per cell
/// of a gradient whose windows do not overlap.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    let sizes = PoolSizes::of(call);
    vec![kernel(call, lanes_of(sizes.c), sizes.has_cells())]
}

/// Returns the GPU kernel variants of the call.
pub fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let sizes = PoolSizes::of(call);
    let mut variants = Vec::new();
    for by_cells in [false, true] {
        if by_cells && !sizes.has_cells() {
            continue;
        }
        let name = sizes.entry(by_cells);
        variants.push(Variant::new(name, vec![kernel(call, 1, by_cells)]));
        if sizes.c.is_multiple_of(4) {
            variants.push(Variant::new(format!("{name}4"), vec![kernel(call, 4, by_cells)]));
        }
    }
    variants
}

/// Dispatch with 1 or 4 channels per invocation.
fn kernel(call: &OpCall, lanes: usize, by_cells: bool) -> Dispatch {
    let sizes = PoolSizes::of(call);
    let PoolSizes { kind, size: [h, w], out: [oh, ow], c, options, .. } = sizes;
    let Pool2dOptions { kernel: [kh, kw], stride: [sh, sw], padding: [ph, pw], .. } = options;
    let [dh, dw] = options.dilation;
    let operands = match kind {
        PoolKind::Max => vec![Operand::Input(0), Operand::Output(0), Operand::Output(1)],
        PoolKind::MaxGrad => vec![Operand::Input(0), Operand::Input(1), Operand::Output(0)],
        PoolKind::Avg | PoolKind::AvgGrad => vec![Operand::Input(0), Operand::Output(0)],
    };
    let types = match lanes {
        4 => "alias Value = vec4f;\nalias Bits = vec4u;\n",
        _ => "alias Value = f32;\nalias Bits = u32;\n",
    };
    let count = if by_cells { call.input_len(1) } else { call.output_len(0) } / lanes;
    Dispatch {
        shader: Shader::new("pool", sizes.entry(by_cells)).with_text(types),
        operands,
        params: as_words(&[count, h, w, c / lanes, oh, ow, kh, kw, sh, sw, ph, pw, dh, dw]),
        groups: grid(count, 64),
    }
}

/// Returns the cost: one operation per place of each window.
pub fn cost(call: &OpCall) -> Cost {
    let sizes = PoolSizes::of(call);
    let windows = sizes.b * sizes.out[0] * sizes.out[1] * sizes.c;
    Cost { flops: windows as f64 * sizes.places() as f64, bytes: Cost::moved(call) }
}

/// See [`Twin::iterations`]: the places of a window or of a cell, or the windows with a place.
pub(crate) fn iterations(call: &OpCall) -> usize {
    let sizes = PoolSizes::of(call);
    let Pool2dOptions { kernel, stride, .. } = sizes.options;
    let [rows, columns] = [0, 1].map(|axis| {
        if !sizes.is_grad() {
            kernel[axis]
        } else if sizes.has_cells() {
            sizes.cell(axis)
        } else {
            sizes.options.span()[axis].div_ceil(stride[axis])
        }
    });
    rows * (1 + columns)
}

/// See [`Twin::inputs`]: the places of maxima are whole numbers.
pub fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let spec = InputSpec::normal(inputs);
    match op {
        Op::MaxPool2dGrad { options: Pool2dOptions { kernel, .. }, .. } => {
            spec.with(0, InputFill::Whole((kernel[0] * kernel[1]) as u32))
        }
        _ => spec,
    }
}

/// See [`Twin::probes`]: one window and several, with a few channels; the second probe also has
/// rows and columns behind the last window.
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let Some(c) = inputs[0].last() else { return Vec::new() };
    let c = if c.is_multiple_of(4) { 12 } else { 7 };
    let (Op::MaxPool2d(options)
    | Op::AvgPool2d(options)
    | Op::MaxPool2dGrad { options, .. }
    | Op::AvgPool2dGrad { options, .. }) = *op
    else {
        return Vec::new();
    };
    let mut probes = Vec::new();
    for (windows, has_rest) in [([1, 1], false), ([3, 4], true), ([9, 5], false)] {
        let size = [0, 1].map(|axis| side(&options, axis, windows[axis], has_rest));
        // There may be more windows over the end, and in the padding.
        let out = options.output_size(size).unwrap_or(windows);
        let x = vec![2, size[0], size[1], c];
        let y = vec![2, out[0], out[1], c];
        probes.push(match op {
            Op::MaxPool2dGrad { .. } => (Op::MaxPool2dGrad { options, size }, vec![y.clone(), y]),
            Op::AvgPool2dGrad { .. } => (Op::AvgPool2dGrad { options, size }, vec![y]),
            _ => (op.clone(), vec![x]),
        });
    }
    probes
}

/// Returns the rows or columns of a picture with this many windows, and with places behind the last
/// window if `has_rest`.
fn side(options: &Pool2dOptions, axis: usize, windows: usize, has_rest: bool) -> usize {
    let span = options.span()[axis];
    let covered = (windows - 1) * options.stride[axis] + span;
    let rest = if has_rest { options.stride[axis] - 1 } else { 0 };
    // A window that is wider than the picture may have no place in it.
    let least = if options.dilation[axis] > 1 { span } else { 1 };
    covered.saturating_sub(2 * options.padding[axis]).max(least) + rest
}

/// See [`Twin::catalog`].
pub fn catalog() -> Vec<CallShape> {
    let options = Pool2dOptions::new(3).with_stride(2).with_padding(1);
    let size = [15, 15];
    let x = vec![4, 15, 15, 64];
    let y = vec![4, 8, 8, 64];
    let dilated = options.with_dilation(2).with_ceil_mode(true);
    vec![
        (Op::MaxPool2d(options), vec![x.clone()]),
        (Op::MaxPool2dGrad { options, size }, vec![y.clone(), y.clone()]),
        (Op::AvgPool2d(options), vec![x]),
        (Op::AvgPool2dGrad { options, size }, vec![y.clone()]),
        (
            Op::MaxPool2dGrad { options: Pool2dOptions::new(2), size: [17, 16] },
            vec![y.clone(), y.clone()],
        ),
        (Op::MaxPool2d(dilated), vec![vec![4, 17, 16, 64]]),
        (Op::MaxPool2dGrad { options: dilated, size: [17, 16] }, vec![y.clone(), y]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_with, for_each_result, reference as expected};
    use potluck_core::{HostTensor, Shape};

    fn options() -> [Pool2dOptions; 10] {
        let new = Pool2dOptions::new;
        let apart = Pool2dOptions { kernel: [1, 2], stride: [2, 3], ..new(1) };
        let uneven = Pool2dOptions { kernel: [2, 5], stride: [3, 1], padding: [1, 2], ..new(1) };
        let dilated = Pool2dOptions { dilation: [2, 3], padding: [1, 1], ..new(2) };
        [
            new(2),
            new(3).with_stride(2).with_padding(1),
            new(3).with_stride(1),
            new(1),
            apart,
            uneven,
            dilated.with_stride(1),
            Pool2dOptions { dilation: [2, 1], ..uneven },
            new(2).with_ceil_mode(true),
            new(3).with_stride(2).with_padding(1).with_ceil_mode(true),
        ]
    }

    #[test]
    fn windows_of_every_kind_agree() {
        for options in options() {
            for (size, c) in [([7, 6], 3), ([5, 9], 8), ([8, 8], 40)] {
                let [oh, ow] = options.output_size(size).unwrap();
                let x = (Shape::batched(&[1, size[0], size[1], c]), InputFill::Normal);
                let dy = (Shape::batched(&[1, oh, ow, c]), InputFill::Normal);
                check(Op::MaxPool2d(options), std::slice::from_ref(&x), 2);
                check(Op::AvgPool2d(options), std::slice::from_ref(&x), 2);
                check(Op::AvgPool2dGrad { options, size }, std::slice::from_ref(&dy), 2);
                let count = (options.kernel[0] * options.kernel[1]) as u32;
                let places = (dy.0.clone(), InputFill::Whole(count));
                check(Op::MaxPool2dGrad { options, size }, &[places, dy], 2);
            }
        }
    }

    /// The values that PyTorch 2 computes from these, of means times 9.
    #[test]
    fn values_are_those_of_pytorch() {
        let options = Pool2dOptions::new(3).with_stride(2).with_padding(1);
        let (size, small) = ([4, 4], Shape::fixed(&[1, 2, 2, 2]));
        let values = (0..32).map(|i| f64::from(i * 5 % 11) - 4.0).collect();
        let x = [(Shape::fixed(&[1, 4, 4, 2]), HostTensor::Float(values))];
        let dy = (small.clone(), HostTensor::Float((1..9).map(f64::from).collect()));
        let mut maxima = expected(&Op::MaxPool2d(options), &x, 1);
        let places = (small, HostTensor::Float(maxima.remove(1)));
        assert_eq!(maxima[0], [6, 1, 6, 6, 6, 4, 5, 6].map(f64::from));
        let dx = expected(&Op::MaxPool2dGrad { options, size }, &[places, dy.clone()], 1);
        let wanted = [(1, 2.0), (2, 4.0), (13, 12.0), (17, 6.0), (24, 5.0), (26, 7.0)];
        let found: Vec<(usize, f64)> =
            dx[0].iter().copied().enumerate().filter(|(_, value)| *value != 0.0).collect();
        assert_eq!(found, wanted);
        let nine = |values: Vec<f64>| values.into_iter().map(|v| (9.0 * v).round()).collect();
        let means: Vec<f64> = nine(expected(&Op::AvgPool2d(options), &x, 1).remove(0));
        assert_eq!(means, [7, -6, 18, 4, 13, -1, 6, 7].map(f64::from));
        let op = Op::AvgPool2dGrad { options, size };
        let dx: Vec<f64> = nine(expected(&op, &[dy], 1).remove(0));
        let wanted = [
            1, 2, 4, 6, 3, 4, 3, 4, 6, 8, 16, 20, 10, 12, 10, 12, 5, 6, 12, 14, 7, 8, 7, 8, 5, 6,
            12, 14, 7, 8, 7, 8,
        ];
        assert_eq!(dx, wanted.map(f64::from));
    }

    /// Of equal values, the first is the maximum, in every window and on every device; a rectified
    /// picture has many zeros.
    #[test]
    fn the_first_of_equal_values_is_the_maximum() {
        let values: Vec<f64> = (0..2 * 6 * 6 * 4).map(|i| f64::from(i % 7 == 0)).collect();
        let signed = |(i, v): (usize, &f64)| if i % 3 == 0 && *v == 0.0 { -0.0 } else { *v };
        let values: Vec<f64> = values.iter().enumerate().map(signed).collect();
        for options in options() {
            let shape = Shape::batched(&[1, 6, 6, 4]);
            let x = [(shape, HostTensor::Float(values.clone()))];
            let places = expected(&Op::MaxPool2d(options), &x, 2).remove(1);
            for_each_result(&Op::MaxPool2d(options), &x, 2, |who, outputs| {
                let got = outputs[1].iter().map(|place| f64::from(*place));
                assert!(got.eq(places.iter().copied()), "{options:?} by {who}");
            });
        }
    }

    /// Padding is lower than minus infinity: a window of that alone has its first place.
    #[test]
    fn windows_of_minus_infinity_have_a_place_in_the_picture() {
        let options = Pool2dOptions::new(3).with_padding(1).with_stride(1);
        let x = (Shape::batched(&[1, 3, 3, 4]), HostTensor::Float(vec![f64::NEG_INFINITY; 36]));
        for_each_result(&Op::MaxPool2d(options), &[x], 1, |who, outputs| {
            assert!(outputs[0].iter().all(|y| *y == f32::NEG_INFINITY), "{who}");
            assert_eq!(outputs[1][0], 4.0, "{who}");
            assert_eq!(outputs[1][4], 3.0, "{who}");
            assert_eq!(outputs[1][16], 0.0, "{who}");
        });
    }

    #[test]
    fn gradients_go_where_the_maxima_were() {
        let options = Pool2dOptions::new(2);
        let x = vec![1.0, 5.0, 2.0, 3.0, 4.0, 6.0, 9.0, 7.0];
        let x = (Shape::batched(&[1, 2, 4, 1]), HostTensor::Float(x));
        let places = expected(&Op::MaxPool2d(options), &[x], 1).remove(1);
        let shape = Shape::batched(&[1, 1, 2, 1]);
        let inputs = [
            (shape.clone(), HostTensor::Float(places)),
            (shape, HostTensor::Float(vec![10.0, 20.0])),
        ];
        let op = Op::MaxPool2dGrad { options, size: [2, 4] };
        assert_eq!(expected(&op, &inputs, 1)[0], [0.0, 0.0, 0.0, 0.0, 0.0, 10.0, 20.0, 0.0]);
        check_with(op, &inputs, 1);
    }
}
