//! Entries along an axis by their places, and their gradient: sums of entries by their places. Twin
//! of `shaders/gather.wgsl`, which has the formulas.

use std::ops::Range;

use rayon::prelude::*;

use super::dispatch_parts::as_words;
use crate::cpu_kernel::TASK;
use crate::dispatch::{ITERATIONS_MAX, grid};
use crate::harness::InputFill;
use crate::twin::{IndependentAxis, InputSpec, no_forward, short_loops};
use crate::{
    CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant, source,
};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Twin of [`Op::Gather`] and [`Op::ScatterAdd`].
pub static TWIN: Twin = Twin {
    name: "gather",
    reference_f32: reference::<f32>,
    reference_f64: reference::<f64>,
    fast,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs,
    forward: no_forward,
    independent_axes,
    probes,
    catalog,
};

/// Shape of the tensor of places: one for each entry along the axis, also for each entry of the
/// outer axes, or for each element.
#[derive(Clone, Copy, PartialEq)]
enum PlacesForm {
    /// `(m)`
    Shared,
    /// `(outer, m)`
    Outer,
    /// `(outer, m, inner)`
    Each,
}

/// Sizes of a gather of `x (outer, n, inner)` to `y (outer, m, inner)`, or of its gradient.
#[derive(Clone, Copy)]
struct GatherSizes {
    outer: usize,
    n: usize,
    m: usize,
    inner: usize,
    form: PlacesForm,
}

impl GatherSizes {
    fn of(call: &OpCall) -> Self {
        let output = &call.outputs[0];
        let (axis, x, places, y) = match *call.op {
            Op::Gather { axis } => (axis, &call.inputs[0], &call.inputs[1], output),
            Op::ScatterAdd { axis, .. } => (axis, output, &call.inputs[0], &call.inputs[1]),
            ref other => panic!("{other} is no gather"),
        };
        let form = match places.len() {
            1 => PlacesForm::Shared,
            rank if rank == axis + 1 => PlacesForm::Outer,
            _ => PlacesForm::Each,
        };
        Self {
            outer: x[..axis].iter().product(),
            n: x[axis],
            m: y[axis],
            inner: x[axis + 1..].iter().product(),
            form,
        }
    }

    /// Returns the strides of the tensor of places along the outer axes, the axis and the inner
    /// axes.
    fn strides(&self) -> [usize; 3] {
        match self.form {
            PlacesForm::Shared => [0, 1, 0],
            PlacesForm::Outer => [self.m, 1, 0],
            PlacesForm::Each => [self.m * self.inner, self.inner, 1],
        }
    }

    /// Calls `body` for each element of entry `(o, j)` of `y`, with the index of the element of `x`
    /// at its place, if it names a place, and its own index.
    fn for_each_element<T: Float>(
        &self,
        places: &[T],
        [o, j]: [usize; 2],
        mut body: impl FnMut(Option<usize>, usize),
    ) {
        let [outer_stride, stride, inner_stride] = self.strides();
        for i in 0..self.inner {
            let number = places[o * outer_stride + j * stride + i * inner_stride];
            let place = place_of(number, self.n).map(|place| (o * self.n + place) * self.inner + i);
            body(place, (o * self.m + j) * self.inner + i);
        }
    }

    /// Floats of a value of the shader: 4 where 4 adjacent elements share their place.
    fn lanes(&self) -> usize {
        if self.form != PlacesForm::Each && self.inner.is_multiple_of(4) { 4 } else { 1 }
    }
}

/// Place that a number names, if it is one of `n` places.
#[inline(always)]
fn place_of<T: Float>(number: T, n: usize) -> Option<usize> {
    if number >= T::zero() { number.to_usize().filter(|place| *place < n) } else { None }
}

/// Reference: entries in their order.
pub fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let sizes = GatherSizes::of(call);
    let is_gather = matches!(call.op, Op::Gather { .. });
    let [first, second] = [inputs[0].floats(), inputs[1].floats()];
    let result = &mut outputs[0];
    result.fill(T::zero());
    for o in 0..sizes.outer {
        for j in 0..sizes.m {
            let places = if is_gather { second } else { first };
            sizes.for_each_element(places, [o, j], |x, y| match x {
                Some(x) if is_gather => result[y] = first[x],
                Some(x) => result[x] += second[y],
                None => {}
            });
        }
    }
}

/// CPU kernel: a gather is parallel over entries, and sums over the outer axes.
pub fn fast(call: &OpCall, inputs: &[HostTensorView<'_, f32>], outputs: &mut [&mut [f32]]) {
    let sizes = GatherSizes::of(call);
    let GatherSizes { n, m, inner, .. } = sizes;
    let [first, second] = [inputs[0].floats(), inputs[1].floats()];
    if matches!(call.op, Op::Gather { .. }) {
        let entries = (TASK / inner).max(1);
        let tasks = outputs[0].par_chunks_mut(entries * inner).enumerate();
        tasks.for_each(|(task, y)| {
            for (row, y) in (task * entries..).zip(y.chunks_exact_mut(inner)) {
                gather_entry(&sizes, [row / m, row % m], [first, second], y);
            }
        });
        return;
    }
    let tasks = outputs[0].par_chunks_mut(n * inner).enumerate();
    tasks.for_each(|(o, dx)| {
        dx.fill(0.0);
        for j in 0..m {
            sizes.for_each_element(first, [o, j], |x, y| {
                if let Some(x) = x {
                    dx[x - o * n * inner] += second[y];
                }
            });
        }
    });
}

/// Computes entry `(o, j)` of `y` from `x` and the places.
fn gather_entry(sizes: &GatherSizes, [o, j]: [usize; 2], [x, places]: [&[f32]; 2], y: &mut [f32]) {
    if sizes.form == PlacesForm::Each {
        let first = (o * sizes.m + j) * sizes.inner;
        sizes.for_each_element(places, [o, j], |from, to| {
            y[to - first] = if let Some(from) = from { x[from] } else { 0.0 };
        });
        return;
    }
    let [outer_stride, ..] = sizes.strides();
    match place_of(places[o * outer_stride + j], sizes.n) {
        Some(place) => y.copy_from_slice(&x[(o * sizes.n + place) * sizes.inner..][..y.len()]),
        None => y.fill(0.0),
    }
}

/// Static choice: vectors of 4 where 4 adjacent elements share their place.
pub fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    kernel(call, GatherSizes::of(call).lanes())
}

/// Returns the GPU kernel variants of the call.
pub fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let name = if matches!(call.op, Op::Gather { .. }) { "gather" } else { "scatter" };
    let mut variants = vec![Variant::new(name, kernel(call, 1))];
    if GatherSizes::of(call).lanes() == 4 {
        variants.push(Variant::new(format!("{name}4"), kernel(call, 4)));
    }
    variants
}

/// Returns the dispatches with `lanes` floats per value. A gradient clears the sums first, and then
/// has a dispatch for as many entries as the iteration limit of an invocation allows.
fn kernel(call: &OpCall, lanes: usize) -> Vec<Dispatch> {
    let sizes = GatherSizes::of(call);
    let all = [Operand::Input(0), Operand::Input(1), Operand::Output(0)];
    let count = call.output_len(0) / lanes;
    if matches!(call.op, Op::Gather { .. }) {
        return vec![one(&sizes, "gather", lanes, &all, count, 0..0)];
    }
    let mut dispatches = vec![one(&sizes, "clear", lanes, &[Operand::Output(0)], count, 0..0)];
    let columns = sizes.outer * sizes.inner / lanes;
    for first in (0..sizes.m).step_by(ITERATIONS_MAX) {
        let entries = first..sizes.m.min(first + ITERATIONS_MAX);
        dispatches.push(one(&sizes, "scatter", lanes, &all, columns, entries));
    }
    dispatches
}

/// Returns the dispatch of an entry point with `count` invocations, for these entries along the
/// axis.
fn one(
    sizes: &GatherSizes,
    entry: &'static str,
    lanes: usize,
    operands: &[Operand],
    count: usize,
    entries: Range<usize>,
) -> Dispatch {
    let GatherSizes { n, m, inner, .. } = *sizes;
    let [outer_stride, stride, inner_stride] = sizes.strides();
    let Range { start, end } = entries;
    let params =
        as_words(&[count, n, m, inner / lanes, outer_stride, stride, inner_stride, start, end]);
    Dispatch {
        shader: Shader::new("gather", entry).with_text(source::values_of(lanes)),
        operands: operands.to_vec(),
        params,
        groups: grid(count, 64),
    }
}

/// Returns the cost: entries are read and written once, and sums three times.
pub fn cost(call: &OpCall) -> Cost {
    let results = call.output_len(0) as f64;
    if matches!(call.op, Op::Gather { .. }) {
        return Cost { flops: 0.0, bytes: 4.0 * (call.input_len(1) as f64 + 2.0 * results) };
    }
    let entries = call.input_len(1) as f64;
    let moved = call.input_len(0) as f64 + 3.0 * entries + results;
    Cost { flops: entries, bytes: 4.0 * moved }
}

/// See [`Twin::inputs`]: places, and numbers that name none.
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let spec = InputSpec::normal(inputs);
    match *op {
        Op::ScatterAdd { length, .. } => spec.with(0, InputFill::Whole(length as u32 + 1)),
        Op::Gather { axis } => spec.with(1, InputFill::Whole(inputs[0][axis] as u32 + 1)),
        ref other => panic!("{other} is no gather"),
    }
}

/// See [`Twin::independent_axes`]: the first axis, or the entries of a table.
fn independent_axes(call: &OpCall) -> Vec<IndependentAxis> {
    let own = if GatherSizes::of(call).form == PlacesForm::Shared { None } else { Some(0) };
    let axis = match *call.op {
        Op::Gather { axis: 0 } => IndependentAxis::of(call, vec![None, Some(0)], vec![Some(0)]),
        Op::Gather { .. } => IndependentAxis::of(call, vec![Some(0), own], vec![Some(0)]),
        Op::ScatterAdd { axis: 0, .. } => None,
        _ => IndependentAxis::of(call, vec![own, Some(0)], vec![Some(0)]),
    };
    axis.into_iter().collect()
}

/// See [`Twin::probes`]: places of the same form, in tensors of three axes.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let (axis, places, x) = match *op {
        Op::Gather { axis } => (axis, &inputs[1], &inputs[0]),
        Op::ScatterAdd { axis, .. } => (axis, &inputs[0], &inputs[1]),
        ref other => panic!("{other} is no gather"),
    };
    let inner = match x[axis + 1..].iter().product::<usize>() {
        1 => 1,
        inner if inner.is_multiple_of(4) => 12,
        _ => 7,
    };
    let mut probes = Vec::new();
    for [n, m] in [[3, 2], [29, 67], [67, 29]] {
        let places = match places.len() {
            1 => vec![m],
            rank if rank == axis + 1 => vec![5, m],
            _ => vec![5, m, inner],
        };
        probes.push(match op {
            Op::Gather { .. } => (Op::Gather { axis: 1 }, vec![vec![5, n, inner], places]),
            _ => (Op::ScatterAdd { axis: 1, length: n }, vec![places, vec![5, m, inner]]),
        });
    }
    probes
}

/// See [`Twin::catalog`].
fn catalog() -> Vec<CallShape> {
    let x = vec![32, 96, 64];
    let y = vec![32, 80, 64];
    let mut calls = Vec::new();
    for places in [vec![80], vec![32, 80], y.clone()] {
        calls.push((Op::Gather { axis: 1 }, vec![x.clone(), places.clone()]));
        calls.push((Op::ScatterAdd { axis: 1, length: 96 }, vec![places, y.clone()]));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_with, reference as expected};
    use potluck_core::{HostTensor, Shape};

    #[test]
    fn places_of_every_form_are_found_and_their_sums_added() {
        for (n, m, inner) in [(5, 7, 3), (1, 1, 1), (70, 65, 8), (9, 300, 4)] {
            let dims = |entries: usize| Shape::batched(&[1, 4, entries, inner]);
            let forms =
                [Shape::fixed(&[m]), Shape::batched(&[1, 4, m]), Shape::batched(&[1, 4, m, inner])];
            for places in forms {
                let places = (places, InputFill::Whole(n as u32 + 1));
                let x = (dims(n), InputFill::Normal);
                check(Op::Gather { axis: 2 }, &[x, places.clone()], 3);
                let y = (dims(m), InputFill::Normal);
                check(Op::ScatterAdd { axis: 2, length: n }, &[places, y], 3);
            }
        }
    }

    #[test]
    fn entries_of_a_table_are_named_by_a_batch() {
        for c in [3, 8] {
            let places = (Shape::batched(&[5]), InputFill::Whole(11));
            let table = (Shape::fixed(&[11, c]), InputFill::Normal);
            check(Op::Gather { axis: 0 }, &[table, places.clone()], 4);
            let y = (Shape::batched(&[5, c]), InputFill::Normal);
            check(Op::ScatterAdd { axis: 0, length: 11 }, &[places, y], 4);
        }
    }

    /// More entries of one place than the loops of an invocation may have iterations.
    #[test]
    fn one_place_may_be_everywhere() {
        let places = (Shape::batched(&[70_001]), InputFill::Whole(1));
        let y = (Shape::batched(&[70_001, 4]), InputFill::Scaled(1.0, 0.5));
        check(Op::ScatterAdd { axis: 0, length: 2 }, &[places, y], 1);
    }

    #[test]
    fn numbers_that_are_no_place_mean_zeros_and_add_nothing() {
        let odd = [f64::INFINITY, -f64::INFINITY, f64::NAN];
        let numbers = [&[0.0, 2.0, 3.0, -1.0, -0.5, 2.75, 1e30][..], &odd].concat();
        let count = numbers.len();
        let places = (Shape::fixed(&[count]), HostTensor::Float(numbers));
        let x = (Shape::fixed(&[3]), HostTensor::Float(vec![5.0, 6.0, 7.0]));
        let op = Op::Gather { axis: 0 };
        let y = expected(&op, &[x.clone(), places.clone()], 1).remove(0);
        assert_eq!(y, [5.0, 7.0, 0.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0, 0.0]);
        check_with(op, &[x, places.clone()], 1);
        let ones = (Shape::fixed(&[count]), HostTensor::Float(vec![1.0; count]));
        let op = Op::ScatterAdd { axis: 0, length: 3 };
        assert_eq!(expected(&op, &[places.clone(), ones.clone()], 1)[0], [1.0, 0.0, 2.0]);
        check_with(op, &[places, ones], 1);
    }
}
