//! Data-movement ops: permute, slice, pad and concat. Twin of `shaders/copy.wgsl`.

use rayon::prelude::*;

use super::dispatch_parts::as_words;
use crate::call_shapes::{B, C, HEADS, KEPT, T, calls, shrunk, shrunk_around};
use crate::cpu_kernel::TASK;
use crate::dispatch::{Runs, grid};
use crate::twin::{IndependentAxis, no_forward, normal_inputs, short_loops};
use crate::{CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::Permute`], [`Op::Slice`], [`Op::Pad`] and [`Op::Concat`].
pub static TWIN: Twin = Twin {
    name: "copy",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs: normal_inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Reference: plain loops over the elements of the output (permute) or over (outer, axis, inner).
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let x = inputs[0].floats();
    let y = &mut *outputs[0];
    match call.op {
        Op::Permute { axes } => {
            let dims = &call.outputs[0];
            let strides = strides(&call.inputs[0]);
            for (index, y) in y.iter_mut().enumerate() {
                let mut rest = index;
                let mut from = 0;
                for axis in (0..dims.len()).rev() {
                    from += rest % dims[axis] * strides[axes[axis]];
                    rest /= dims[axis];
                }
                *y = x[from];
            }
        }
        Op::Slice { axis, start, length } => {
            let (outer, whole, inner) = around(&call.inputs[0], *axis);
            for (o, i, j) in triples(outer, *length, inner) {
                y[(o * length + i) * inner + j] = x[(o * whole + start + i) * inner + j];
            }
        }
        Op::Pad { axis, before, .. } => {
            let (outer, length, inner) = around(&call.inputs[0], *axis);
            let whole = call.outputs[0][*axis];
            y.fill(T::zero());
            for (o, i, j) in triples(outer, length, inner) {
                y[(o * whole + before + i) * inner + j] = x[(o * length + i) * inner + j];
            }
        }
        Op::Concat { axis } => {
            let whole = call.outputs[0][*axis];
            let mut start = 0;
            for (x, dims) in inputs.iter().zip(&call.inputs) {
                let (outer, length, inner) = around(dims, *axis);
                for (o, i, j) in triples(outer, length, inner) {
                    y[(o * whole + start + i) * inner + j] =
                        x.floats()[(o * length + i) * inner + j];
                }
                start += length;
            }
        }
        other => panic!("{other} does not only move elements"),
    }
}

/// Returns all triples of numbers below these bounds, the last one counting fastest.
fn triples(a: usize, b: usize, c: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..a * b * c).map(move |index| (index / (b * c), index / c % b, index % c))
}

/// Returns the product of the dimensions before an axis, the axis, and the product of the
/// dimensions after it.
fn around(dims: &[usize], axis: usize) -> (usize, usize, usize) {
    (dims[..axis].iter().product(), dims[axis], dims[axis + 1..].iter().product())
}

fn strides(dims: &[usize]) -> Vec<usize> {
    (0..dims.len()).map(|axis| dims[axis + 1..].iter().product()).collect()
}

/// A strided copy of one input; the head of the shader has the formula.
struct Move {
    outer: [usize; 4],
    x_outer_strides: [usize; 4],
    y_outer_strides: [usize; 4],
    last: usize,
    x_stride: usize,
    x_base: usize,
    y_base: usize,
    begin: usize,
    end: usize,
}

impl Move {
    /// Creates a copy of `rows` runs of `last` elements each, which begin `x_row` elements apart in
    /// the input and `y_row` in the output.
    fn rows(rows: usize, last: usize, x_row: usize, y_row: usize) -> Self {
        Self {
            outer: [1, 1, 1, rows],
            x_outer_strides: [0, 0, 0, x_row],
            y_outer_strides: [0, 0, 0, y_row],
            last,
            x_stride: 1,
            x_base: 0,
            y_base: 0,
            begin: 0,
            end: last,
        }
    }

    fn permute(axes: &[usize], from: &[usize]) -> Self {
        let x_strides = strides(from);
        let dims = merged(axes.iter().map(|&axis| (from[axis], x_strides[axis])));
        let (last, x_stride) = dims.last().copied().unwrap_or((1, 1));
        let mut copy = Self::rows(1, last, 0, 0);
        copy.x_stride = x_stride;

        let shift = 5 - dims.len().max(1);
        let mut y_stride = last;
        for axis in (0..dims.len().saturating_sub(1)).rev() {
            let (dim, x_stride) = dims[axis];
            copy.outer[axis + shift] = dim;
            copy.x_outer_strides[axis + shift] = x_stride;
            copy.y_outer_strides[axis + shift] = y_stride;
            y_stride *= dim;
        }
        copy
    }

    /// Number of invocations per run, and in total.
    fn invocations(&self) -> (usize, usize) {
        let across = Runs::new(self.last).across;
        (across, across * self.outer.iter().product::<usize>())
    }

    /// Offset of run `row` in the input.
    fn x_start(&self, row: usize) -> usize {
        let mut rest = row;
        let mut start = self.x_base;
        for axis in (0..4).rev() {
            start += rest % self.outer[axis] * self.x_outer_strides[axis];
            rest /= self.outer[axis];
        }
        start
    }

    /// Fills run `row` of the output.
    fn fill(&self, row: usize, x: &[f32], y: &mut [f32]) {
        let start = self.x_start(row);
        y[..self.begin].fill(0.0);
        y[self.end..].fill(0.0);
        let y = &mut y[self.begin..self.end];
        if self.x_stride == 1 {
            y.copy_from_slice(&x[start..start + y.len()]);
            return;
        }
        let x = x[start..].iter().step_by(self.x_stride);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = *x);
    }

    /// The same copy on vectors of 4 elements; `None` if it is not aligned to them.
    fn vectors(&self) -> Option<Self> {
        let scalars = [self.last, self.x_base, self.y_base, self.begin, self.end];
        let numbers = [&self.x_outer_strides[..], &self.y_outer_strides, &scalars].concat();
        if self.x_stride != 1 || !numbers.iter().all(|number| number.is_multiple_of(4)) {
            return None;
        }
        Some(Self {
            outer: self.outer,
            x_outer_strides: self.x_outer_strides.map(|stride| stride / 4),
            y_outer_strides: self.y_outer_strides.map(|stride| stride / 4),
            last: self.last / 4,
            x_stride: 1,
            x_base: self.x_base / 4,
            y_base: self.y_base / 4,
            begin: self.begin / 4,
            end: self.end / 4,
        })
    }

    /// Dispatch that copies input `input`; `None` if it has no elements.
    fn dispatch(&self, input: usize, entry: &'static str) -> Option<Dispatch> {
        let (_, count) = self.invocations();
        if count == 0 {
            return None;
        }
        Some(Dispatch {
            shader: Shader::new("copy", entry),
            operands: vec![Operand::Input(input), Operand::Output(0)],
            params: self.params(),
            groups: grid(count, 64),
        })
    }

    fn params(&self) -> Vec<u32> {
        let (_, count) = self.invocations();
        let Runs { across, step } = Runs::new(self.last);
        let lists = [self.outer, self.x_outer_strides, self.y_outer_strides];
        let scalars = [count, across, self.last, self.x_stride, self.x_base, self.y_base];
        let rest = [self.begin, self.end, step];
        as_words(&[lists.as_flattened(), &scalars, &rest].concat())
    }
}

/// Merges adjacent (dimension, stride) pairs that one longer dimension can replace, so that runs
/// are as long as possible. Dimensions of 1 are left out.
fn merged(dims: impl Iterator<Item = (usize, usize)>) -> Vec<(usize, usize)> {
    let mut joined: Vec<(usize, usize)> = Vec::new();
    for (dim, stride) in dims {
        if dim == 1 {
            continue;
        }
        match joined.last_mut() {
            Some((before, outer)) if *outer == dim * stride => {
                *before *= dim;
                *outer = stride;
            }
            _ => joined.push((dim, stride)),
        }
    }
    joined
}

/// Copies that make up a call, one per input.
fn moves(call: &OpCall) -> Vec<Move> {
    match call.op {
        Op::Permute { axes } => vec![Move::permute(axes, &call.inputs[0])],
        Op::Slice { axis, start, length } => {
            let (outer, whole, inner) = around(&call.inputs[0], *axis);
            let rows = Move::rows(outer, length * inner, whole * inner, length * inner);
            vec![Move { x_base: start * inner, ..rows }]
        }
        Op::Pad { axis, before, .. } => {
            let (outer, length, inner) = around(&call.inputs[0], *axis);
            let run = call.outputs[0][*axis] * inner;
            let rows = Move::rows(outer, run, length * inner, run);
            vec![Move { begin: before * inner, end: (before + length) * inner, ..rows }]
        }
        Op::Concat { axis } => {
            let mut moves = Vec::new();
            let mut y_base = 0;
            for dims in &call.inputs {
                let (outer, length, inner) = around(dims, *axis);
                let run = length * inner;
                let rows = Move::rows(outer, run, run, call.outputs[0][*axis] * inner);
                moves.push(Move { y_base, ..rows });
                y_base += run;
            }
            moves
        }
        other => panic!("{other} does not only move elements"),
    }
}

/// CPU kernel: parallel over rows of the output, run by run.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let moves = moves(call);
    // A row of the output takes one run of each move, one after the other.
    let row: usize = moves.iter().map(|copy| copy.last).sum();
    if outputs[0].is_empty() {
        return;
    }
    let rows = outputs[0].par_chunks_mut(row).enumerate();
    rows.with_min_len((TASK / row).max(1)).for_each(|(index, mut y)| {
        for (copy, x) in moves.iter().zip(inputs) {
            let (run, rest) = y.split_at_mut(copy.last);
            copy.fill(index, x.floats(), run);
            y = rest;
        }
    });
}

/// Static choice: one dispatch per input, on vectors of 4 where they fit.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    let mut dispatches = Vec::new();
    for (input, copy) in moves(call).into_iter().enumerate() {
        dispatches.extend(match copy.vectors() {
            Some(vectors) => vectors.dispatch(input, "strided4"),
            None => copy.dispatch(input, "strided"),
        });
    }
    dispatches
}

/// Returns all GPU kernel variants of the call.
pub fn variants(call: &OpCall, caps: &Caps) -> Vec<Variant> {
    let mut plain = Vec::new();
    for (input, copy) in moves(call).into_iter().enumerate() {
        plain.extend(copy.dispatch(input, "strided"));
    }
    let best = dispatch(call, caps);
    let has_vectors = best != plain;
    let mut variants = vec![Variant::new("copy", plain)];
    if has_vectors {
        variants.push(Variant::new("copy_vectors", best));
    }
    variants
}

/// Returns the cost: no FLOPs, and all operands moved once.
pub fn cost(call: &OpCall) -> Cost {
    Cost::elementwise(call, 0.0)
}

/// See [`Twin::independent_axes`]: the first axis of the input that is copied as a whole.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let (input, output) = match call.op {
        Op::Permute { axes } => (0, axes.iter().position(|axis| *axis == 0)),
        Op::Slice { axis: 0, .. } | Op::Pad { axis: 0, .. } | Op::Concat { axis: 0 } => {
            (1, Some(1))
        }
        _ => (0, Some(0)),
    };
    let inputs = vec![Some(input); call.inputs.len()];
    IndependentAxis::of(call, inputs, vec![output]).into_iter().collect()
}

/// See [`Twin::probes`]. Attributes shrink with the dimensions.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let x = &inputs[0];
    match op {
        Op::Permute { .. } => calls(op, [vec![shrunk(x)]]),
        Op::Slice { axis, .. } | Op::Pad { axis, .. } if x[*axis] <= KEPT => {
            calls(op, [vec![shrunk_around(x, *axis..=*axis)]])
        }
        &Op::Slice { axis, .. } => {
            calls(&Op::Slice { axis, start: 5, length: 11 }, [vec![shrunk_to(x, axis, 37)]])
        }
        &Op::Pad { axis, .. } => {
            calls(&Op::Pad { axis, before: 3, after: 5 }, [vec![shrunk_to(x, axis, 7)]])
        }
        Op::Concat { axis } => {
            calls(op, [inputs.iter().map(|x| shrunk_around(x, *axis..=*axis)).collect()])
        }
        other => panic!("{other} does not move elements"),
    }
}

/// Dimensions of a tensor with all of them made small, and one of them this length.
fn shrunk_to(dims: &Dims, axis: usize, length: usize) -> Dims {
    let mut dims = shrunk_around(dims, axis..=axis);
    dims[axis] = length;
    dims
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    vec![
        (Op::Permute { axes: vec![0, 2, 1, 3] }, vec![vec![B, T, HEADS, C / HEADS]]),
        (Op::Slice { axis: 2, start: C, length: C }, vec![vec![B, T, 3 * C]]),
        (Op::Pad { axis: 2, before: C, after: C }, vec![vec![B, T, C]]),
        (Op::Concat { axis: 2 }, vec![vec![B, T, C]; 3]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::InputFill;
    use crate::testing::check;
    use potluck_core::Shape;

    fn check_one(op: Op, shape: Shape, rows: usize) {
        check(op, &[(shape, InputFill::Normal)], rows);
    }

    #[test]
    fn every_permutation_of_up_to_four_dimensions() {
        let dims = [3, 2, 5, 4];
        for rank in 1..=4 {
            for axes in permutations(rank) {
                check_one(Op::Permute { axes }, Shape::fixed(&dims[..rank]), 1);
            }
        }
    }

    fn permutations(rank: usize) -> Vec<Vec<usize>> {
        if rank == 0 {
            return vec![vec![]];
        }
        let shorter = permutations(rank - 1).into_iter();
        let put = |axes: Vec<usize>, at: usize| [&axes[..at], &[rank - 1], &axes[at..]].concat();
        shorter.flat_map(|axes| (0..rank).map(move |at| put(axes.clone(), at))).collect()
    }

    #[test]
    fn permutations_of_five_dimensions_and_ones() {
        for axes in [[4, 3, 2, 1, 0], [1, 0, 3, 2, 4], [2, 4, 1, 3, 0], [0, 1, 2, 3, 4]] {
            let axes = axes.to_vec();
            check_one(Op::Permute { axes: axes.clone() }, Shape::fixed(&[3, 2, 4, 5, 7]), 1);
            check_one(Op::Permute { axes }, Shape::fixed(&[1, 3, 1, 5, 2]), 1);
        }
        check_one(Op::Permute { axes: vec![0, 1] }, Shape::fixed(&[1, 1]), 1);
    }

    #[test]
    fn heads_move_in_front_for_any_rows() {
        for rows in 1..=7 {
            let shape = Shape::batched(&[1, 9, 4, 33]);
            check_one(Op::Permute { axes: vec![0, 2, 1, 3] }, shape.clone(), rows);
            check_one(Op::Permute { axes: vec![0, 3, 2, 1] }, shape, rows);
        }
    }

    #[test]
    fn slices_and_pads_along_every_axis() {
        for (axis, dim) in [(1, 5), (2, 7), (3, 6)] {
            for rows in [1, 3, 7] {
                let shape = Shape::batched(&[2, 5, 7, 6]);
                for (start, length) in [(0, dim), (0, 1), (2, 3), (dim - 1, 1)] {
                    check_one(Op::Slice { axis, start, length }, shape.clone(), rows);
                }
                for (before, after) in [(0, 0), (3, 0), (0, 2), (1, 4)] {
                    check_one(Op::Pad { axis, before, after }, shape.clone(), rows);
                }
            }
        }
        check_one(Op::Slice { axis: 0, start: 3, length: 4 }, Shape::fixed(&[9, 11]), 1);
        check_one(Op::Pad { axis: 0, before: 1, after: 2 }, Shape::fixed(&[9]), 1);
    }

    #[test]
    fn up_to_seven_tensors_stand_one_after_the_other() {
        for rows in [1, 2, 7] {
            for count in 1..=7 {
                let part = |i: usize| (Shape::batched(&[3, 1 + i % 3, 5]), InputFill::Normal);
                let parts: Vec<_> = (0..count).map(part).collect();
                check(Op::Concat { axis: 1 }, &parts, rows);
            }
            let last = [
                (Shape::batched(&[3, 4]), InputFill::Normal),
                (Shape::batched(&[3, 1]), InputFill::Normal),
            ];
            check(Op::Concat { axis: 1 }, &last, rows);
        }
        let first = [
            (Shape::fixed(&[2, 65]), InputFill::Normal),
            (Shape::fixed(&[7, 65]), InputFill::Normal),
        ];
        check(Op::Concat { axis: 0 }, &first, 1);
    }

    /// All sizes are multiples of 4, or all but one.
    #[test]
    fn vectors_of_four_move_alike() {
        for (width, start) in [(8, 4), (8, 3), (7, 4), (6, 4)] {
            let shape = Shape::batched(&[12, width, 4]);
            check_one(Op::Permute { axes: vec![0, 2, 1, 3] }, Shape::batched(&[3, 5, 7, 8]), 2);
            check_one(Op::Slice { axis: 1, start, length: 4 }, Shape::batched(&[12, 12, width]), 2);
            check_one(Op::Pad { axis: 2, before: start, after: 2 }, shape.clone(), 2);
            let parts = [(shape.clone(), InputFill::Normal), (shape.clone(), InputFill::Normal)];
            check(Op::Concat { axis: 2 }, &parts, 2);
            check_one(
                Op::Slice { axis: 0, start: 4 * start, length: 5000 + width },
                Shape::fixed(&[6000]),
                1,
            );
            check_one(Op::Slice { axis: 0, start, length: width }, Shape::fixed(&[16]), 1);
        }
    }

    #[test]
    fn long_runs_and_many_short_ones() {
        check_one(Op::Permute { axes: vec![1, 0] }, Shape::fixed(&[301, 217]), 1);
        check_one(Op::Slice { axis: 1, start: 1, length: 2 }, Shape::fixed(&[40_001, 4]), 1);
    }
}
