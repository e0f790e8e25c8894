//! Keys and values of rows written to a cache. Twin of `shaders/cache_update.wgsl`, which has the
//! formula.

use super::dispatch_parts::as_words;
use crate::call_shapes::{C, HEADS, N, PROBE_ROWS, calls};
use crate::dispatch::grid;
use crate::harness::InputFill;
use crate::twin::{InputSpec, no_axes, no_forward, short_loops};
use crate::{
    CallShape, Caps, Cost, Dims, Dispatch, Float, OpCall, Operand, Shader, Twin, Variant, source,
};
use potluck_core::HostTensorView;
use potluck_graph::{AttentionPlace, CacheUpdateOptions, Op};

/// Twin of [`Op::CacheUpdate`].
pub static TWIN: Twin = Twin {
    name: "cache_update",
    reference_f32: update::<f32>,
    reference_f64: update::<f64>,
    fast: update::<f32>,
    dispatch,
    variants,
    cost,
    counts_as_model_flops: false,
    iterations: short_loops,
    inputs,
    forward: no_forward,
    independent_axes: no_axes,
    probes,
    catalog,
};

fn options(op: &Op) -> CacheUpdateOptions {
    let Op::CacheUpdate(options) = *op else { panic!("{op} is no update of a cache") };
    options
}

/// Reference and CPU kernel: `tensors (b, n, ..), places (b, n) -> cache`. Only the entries of the
/// cache at the places of rows change. It copies a few kilobytes per row.
fn update<T: Float>(call: &OpCall, inputs: &[HostTensorView<'_, T>], outputs: &mut [&mut [T]]) {
    let options = options(call.op);
    let CacheUpdateOptions { kv_heads, head_width: d, sequences, context, .. } = options;
    let places = inputs[options.tensors()].ints();
    for (row, place) in places.iter().enumerate() {
        let place = *place as usize;
        if place >= sequences * context {
            continue;
        }
        let of_sequence = place / context * 2 * kv_heads;
        for (which, columns) in options.places.iter().enumerate() {
            let (_, width) = call.rows_and_last(columns.input);
            let values = &inputs[columns.input].floats()[row * width + columns.first..];
            for (head, values) in values[..kv_heads * d].chunks_exact(d).enumerate() {
                let head = of_sequence + which * kv_heads + head;
                let at = (head * context + place % context) * d;
                outputs[0][at..at + d].copy_from_slice(values);
            }
        }
    }
}

/// Static choice: vectors of 4 where lengths and places of columns allow them.
fn dispatch(call: &OpCall, _: &Caps) -> Vec<Dispatch> {
    vec![one(call, lanes(call))]
}

fn variants(call: &OpCall, _: &Caps) -> Vec<Variant> {
    let mut variants = vec![Variant::new("cache_update", vec![one(call, 1)])];
    if lanes(call) == 4 {
        variants.push(Variant::new("cache_update4", vec![one(call, 4)]));
    }
    variants
}

/// Floats of a value: 4 if heads and columns are whole vectors.
fn lanes(call: &OpCall) -> usize {
    let options = options(call.op);
    let mut are_whole = options.head_width.is_multiple_of(4);
    for place in options.places {
        let (_, width) = call.rows_and_last(place.input);
        are_whole &= place.first.is_multiple_of(4) && width.is_multiple_of(4);
    }
    if are_whole { 4 } else { 1 }
}

fn one(call: &OpCall, lanes: usize) -> Dispatch {
    let options = options(call.op);
    let [keys, values] = options.places;
    let (rows, key_width) = call.rows_and_last(keys.input);
    let (_, value_width) = call.rows_and_last(values.input);
    let count = rows * 2 * options.columns() / lanes;
    Dispatch {
        shader: Shader::new("cache_update", "update").with_text(source::values_of(lanes)),
        operands: vec![
            Operand::Input(keys.input),
            Operand::Input(values.input),
            Operand::Input(options.tensors()),
            Operand::Output(0),
        ],
        params: as_words(&[
            count,
            options.kv_heads,
            options.head_width / lanes,
            options.context,
            options.sequences * options.context,
            keys.first / lanes,
            key_width / lanes,
            values.first / lanes,
            value_width / lanes,
        ]),
        groups: grid(count, 64),
    }
}

/// Cost: each element that is copied is read and written once.
fn cost(call: &OpCall) -> Cost {
    let rows = call.rows_and_last(0).0;
    Cost { flops: 0.0, bytes: 16.0 * (rows * options(call.op).columns()) as f64 }
}

/// See [`Twin::inputs`].
fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let options = options(op);
    let places = InputFill::Places((options.sequences * options.context) as u32);
    let spec = InputSpec { samples: Some(inputs[0][0]), ..InputSpec::normal(inputs) };
    spec.with(options.tensors(), places)
}

/// See [`Twin::probes`]: caches of a few sequences.
fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let options = CacheUpdateOptions { sequences: 3, context: 37, ..options(op) };
    calls(&Op::CacheUpdate(options), PROBE_ROWS.map(|rows| resized(inputs, rows)))
}

fn resized(inputs: &[Dims], rows: usize) -> Vec<Dims> {
    inputs.iter().map(|dims| [&[rows, 1], &dims[2..]].concat()).collect()
}

/// See [`Twin::catalog`]: packed as in a GPT, in two tensors with shared keys as in a Llama, and
/// heads that are not whole vectors.
fn catalog() -> Vec<CallShape> {
    let d = C / HEADS;
    let place = AttentionPlace::new;
    let places = vec![N, 1];
    vec![
        (
            update_of([place(0, C), place(0, 2 * C)], HEADS, d),
            vec![vec![N, 1, 3 * C], places.clone()],
        ),
        (
            update_of([place(0, 0), place(1, 0)], HEADS / 2, d),
            vec![vec![N, 1, C / 2], vec![N, 1, C / 2], places.clone()],
        ),
        (update_of([place(0, 6), place(0, 18)], 2, 6), vec![vec![N, 1, 30], places]),
    ]
}

fn update_of(places: [AttentionPlace; 2], kv_heads: usize, head_width: usize) -> Op {
    Op::CacheUpdate(CacheUpdateOptions { places, kv_heads, head_width, sequences: 8, context: 64 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_with, reference};
    use potluck_core::{HostTensor, Shape};
    use potluck_graph::IGNORE_INDEX;

    #[test]
    fn caches_of_all_sizes_agree() {
        for (kv_heads, d, sequences, context, rows) in
            [(1, 1, 1, 1, 1), (2, 6, 3, 7, 11), (3, 8, 2, 33, 40), (4, 64, 5, 130, 300)]
        {
            let columns = kv_heads * d;
            let places = [AttentionPlace::new(0, columns), AttentionPlace::new(0, 2 * columns)];
            let options =
                CacheUpdateOptions { places, kv_heads, head_width: d, sequences, context };
            let dims = vec![vec![rows, 1, 3 * columns], vec![rows, 1]];
            let op = Op::CacheUpdate(options);
            let fills = inputs(&op, &dims).fills;
            let filled: Vec<_> = dims
                .iter()
                .zip(fills)
                .enumerate()
                .map(|(nth, (dims, fill))| {
                    let count = dims.iter().product();
                    (
                        Shape::batched(&[&[1], &dims[1..]].concat()),
                        crate::harness::generate(fill, count, nth),
                    )
                })
                .collect();
            check_with(op, &filled, rows);
        }
    }

    #[test]
    fn rows_go_to_their_places_and_all_others_stay() {
        let options = CacheUpdateOptions {
            places: [AttentionPlace::new(0, 0), AttentionPlace::new(1, 1)],
            kv_heads: 1,
            head_width: 1,
            sequences: 2,
            context: 3,
        };
        let column = |values: &[f64], width| {
            (Shape::batched(&[1, 1, width]), HostTensor::Float(values.to_vec()))
        };
        let places = HostTensor::Int(vec![4, IGNORE_INDEX, 2]);
        let inputs = [
            column(&[1.0, 2.0, 3.0], 1),
            column(&[0.0, 4.0, 0.0, 5.0, 0.0, 6.0], 2),
            (Shape::batched(&[1, 1]), places),
        ];
        let cache = reference(&Op::CacheUpdate(options), &inputs, 3).remove(0);
        // What the harness puts into outputs that are changed in place.
        let o = 0.25;
        assert_eq!(cache, [o, o, 3.0, o, o, 6.0, o, 1.0, o, o, 4.0, o]);
    }
}
