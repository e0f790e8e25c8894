//! Tests of attention: every implementation against the reference, and the reference against
//! differences.

use super::reference::{Head, reference};
use super::*;
use crate::device::{Gpu, ShaderChecks};
use crate::dispatch::folded;
use crate::harness::InputFill;
use crate::testing::{
    self, adapters, check_mixed_with, check_with, compare, for_each_gpu, for_each_mixed_result,
    for_each_result, on_gpu,
};
use crate::{DeviceClass, OwnedCall, Pipelines, RandomContext};
use potluck_core::{HostTensor, Shape, Site};
use potluck_graph::{Accumulation, AttentionOptions, AttentionPlace};

const SITE: Site = Site(9);

fn ops(c: usize, heads: usize, dropout: f32) -> [Op; 2] {
    ops_of(true, c, heads, dropout)
}

fn ops_of(causal: bool, c: usize, heads: usize, dropout: f32) -> [Op; 2] {
    let packed = AttentionOptions::packed(heads, c / heads);
    both(AttentionOptions { causal, dropout, site: SITE, ..packed })
}

fn both(options: AttentionOptions) -> [Op; 2] {
    [Op::Attention(options), Op::AttentionGrad(options)]
}

/// Returns `qkv [, samples]`.
fn inputs(
    t: usize,
    c: usize,
    dropout: f32,
    rows: usize,
    fill: InputFill,
) -> Vec<(Shape, HostTensor<f64>)> {
    let qkv = Shape::batched(&[1, t, 3 * c]);
    let values = testing::generate(fill, qkv.elements(rows), 0);
    let samples = (Shape::batched(&[1]), testing::generate(InputFill::Samples, rows, 1));
    let qkv = (qkv, values);
    if dropout > 0.0 { vec![qkv, samples] } else { vec![qkv] }
}

/// Returns `tensors [, samples]` of any places.
fn inputs_of(options: &AttentionOptions, t: usize, rows: usize) -> Vec<(Shape, HostTensor<f64>)> {
    let mut inputs = Vec::new();
    for input in 0..options.tensors() {
        let shape = Shape::batched(&[1, t, options.input_columns(input)]);
        let values = testing::generate(InputFill::Normal, shape.elements(rows), 10 + input);
        inputs.push((shape, values));
    }
    if options.dropout > 0.0 {
        let ids = testing::generate(InputFill::Samples, rows, 1);
        inputs.push((Shape::batched(&[1]), ids));
    }
    inputs
}

/// Returns `tensors, y, lse, dy [, samples]` for a random `dy`.
fn grad_inputs(
    op: &Op,
    forward: &[(Shape, HostTensor<f64>)],
    rows: usize,
) -> Vec<(Shape, HostTensor<f64>)> {
    let Op::Attention(options) = op else { panic!("{op} is not forward") };
    let [_, t, _] = *forward[0].0.dims() else { panic!("queries are (b, t, ..)") };
    let [y, lse] = testing::reference(op, forward, rows).try_into().expect("two outputs");
    let y_shape = Shape::batched(&[1, t, options.columns()[0]]);
    let dy = testing::generate(InputFill::Normal, y_shape.elements(rows), 2);
    let (tensors, samples) = forward.split_at(options.tensors());
    let results = [
        (y_shape.clone(), HostTensor::Float(y)),
        (Shape::batched(&[1, options.heads, t]), HostTensor::Float(lse)),
        (y_shape, dy),
    ];
    [tensors, &results, samples].concat()
}

/// Checks both ops on random input of `rows` samples.
fn agree(t: usize, c: usize, heads: usize, dropout: f32, rows: usize, fill: InputFill) {
    let inputs = inputs(t, c, dropout, rows, fill);
    both_agree(ops(c, heads, dropout), &inputs, rows);
}

fn both_agree([forward, grad]: [Op; 2], inputs: &[(Shape, HostTensor<f64>)], rows: usize) {
    check_with(forward.clone(), inputs, rows);
    check_with(grad, &grad_inputs(&forward, inputs, rows), rows);
}

/// Fewer tokens than a block has and more, heads of one slab and of two.
#[test]
fn full_attention_agrees() {
    for (t, c, heads, dropout, rows) in
        [(5, 12, 2, 0.3, 3), (67, 20, 1, 0.0, 2), (6, 66, 1, 0.0, 2)]
    {
        let inputs = inputs(t, c, dropout, rows, InputFill::Normal);
        both_agree(ops_of(false, c, heads, dropout), &inputs, rows);
    }
}

/// Without a causal mask, the last query has the same result as with one, and the first query has
/// the mean of all values if its scores are equal.
#[test]
fn every_query_sees_all_keys_unless_it_is_causal() {
    let (t, c) = (5, 4);
    let mut given = inputs(t, c, 0.0, 1, InputFill::Normal);
    let HostTensor::Float(values) = &mut given[0].1 else { panic!("qkv is of floats") };
    values[..c].fill(0.0);
    let values = values.clone();
    let [causal, full] = [true, false].map(|causal| {
        let [forward, _] = ops_of(causal, c, 2, 0.0);
        testing::reference(&forward, &given, 1).remove(0)
    });
    for column in 0..c {
        let of_keys = (0..t).map(|j| values[j * 3 * c + 2 * c + column]);
        let mean = of_keys.sum::<f64>() / t as f64;
        assert!((full[column] - mean).abs() < 1e-12);
        assert!((causal[column] - values[2 * c + column]).abs() < 1e-12);
        let last = (t - 1) * c + column;
        assert!((full[last] - causal[last]).abs() < 1e-12);
    }
}

#[test]
fn every_shape_agrees() {
    for (t, c, heads, rows) in
        [(1, 1, 1, 2), (5, 12, 2, 3), (33, 6, 1, 2), (67, 30, 3, 2), (64, 32, 4, 2)]
    {
        agree(t, c, heads, 0.0, rows, InputFill::Normal);
    }
}

/// Heads wider than 64 columns, which several invocations of the shader share.
#[test]
fn wide_heads_agree() {
    agree(9, 256, 1, 0.0, 1, InputFill::Normal);
    agree(6, 66, 1, 0.0, 2, InputFill::Normal);
}

#[test]
fn every_device_drops_the_same() {
    for (t, c, heads, rows) in [(7, 10, 2, 3), (37, 16, 4, 2)] {
        agree(t, c, heads, 0.3, rows, InputFill::Normal);
    }
}

/// At 65,536 tokens a head has as many pairs as a counter of 32 bits counts.
#[test]
fn heads_draw_different_masks_at_any_length() {
    let key = Key::new(3).site(SITE);
    let drop = Some(Dropout { key, threshold: drop_threshold(0.5), factor: 2.0 });
    for t in [64, 65_536, 100_000] {
        let [op, _] = ops(4, 4, 0.0);
        let random = RandomContext { step_key: Key::new(3), training: true };
        let owned_call = OwnedCall::new(op, vec![vec![1, t, 12]], random).expect("it fits");
        let sizes = AttentionSizes { drop, ..AttentionSizes::of(&owned_call.call()) };
        let mask = |h: usize| -> Vec<bool> {
            let head = Head { sizes, sample: 0, id: 7, h };
            (0..64).map(|j| head.kept::<f64>(t - 1, j) > 0.0).collect()
        };
        let masks: Vec<Vec<bool>> = (0..4).map(mask).collect();
        for (h, mask) in masks.iter().enumerate() {
            assert!(!masks[..h].contains(mask), "head {h} of {t} tokens");
        }
    }
}

#[test]
fn dropout_of_all_probabilities_gives_zeros() {
    let [forward, grad] = ops(8, 2, 1.0);
    let inputs = inputs(7, 8, 1.0, 2, InputFill::Normal);
    for_each_result(&forward, &inputs, 2, |who, outputs| {
        assert!(outputs[0].iter().all(|y| *y == 0.0), "y by {who}: {:?}", outputs[0]);
        assert!(outputs[1].iter().all(|lse| lse.is_finite()), "lse by {who}");
    });
    let inputs = grad_inputs(&forward, &inputs, 2);
    for_each_result(&grad, &inputs, 2, |who, outputs| {
        assert!(outputs[0].iter().all(|dx| *dx == 0.0), "dqkv by {who}: {:?}", outputs[0]);
    });
}

#[test]
fn sharp_scores_neither_overflow_nor_vanish() {
    agree(19, 16, 2, 0.0, 2, InputFill::Scaled(12.0, 0.0));
}

#[test]
fn nothing_is_dropped_outside_of_training() {
    let inputs = inputs(6, 8, 0.5, 2, InputFill::Normal);
    let [(qkv, HostTensor::Float(values)), (_, HostTensor::Int(samples))] = &inputs[..] else {
        panic!("floats and sample ids")
    };
    let run = |dropout: f32, training: bool| {
        let [op, _] = ops(8, 2, dropout);
        let random = RandomContext { step_key: Key::new(1), training };
        let outputs = vec![vec![2, 6, 8], vec![2, 2, 6]];
        let dims = vec![qkv.resolve(2), vec![2]];
        let call = OpCall {
            op: &op,
            inputs: dims,
            outputs,
            accumulate: Accumulation::NONE,
            precision: Precision::F32,
            loss_scale: 1.0,
            random,
        };
        let (mut y, mut lse) = (vec![0.0; 96], vec![0.0; 24]);
        let args = [HostTensorView::Float(values.as_slice()), HostTensorView::Int(samples)];
        reference(&call, &args, &mut [&mut y, &mut lse]);
        let constants = plain(&call)[0].shader.header.clone();
        (y, constants.contains("DROPOUT: u32 = 1u"))
    };
    assert_eq!(run(0.5, false), run(0.0, true));
    assert_ne!(run(0.5, true), run(0.0, true));
}

/// Keys and values that several heads of queries share, and every arrangement of the three in
/// tensors: separate, keys and values in one, in another order, at columns that are no vectors.
fn arrangements() -> Vec<AttentionOptions> {
    let place = AttentionPlace::new;
    let grouped = AttentionOptions::separate(6, 2, 4);
    let of_scalars = AttentionOptions::separate(3, 1, 3);
    vec![
        AttentionOptions { dropout: 0.3, site: SITE, ..grouped },
        AttentionOptions { places: [place(0, 0), place(1, 0), place(1, 8)], ..grouped },
        AttentionOptions {
            causal: false,
            places: [place(0, 16), place(0, 0), place(0, 8)],
            ..grouped
        },
        AttentionOptions { places: [place(0, 3), place(0, 0), place(1, 0)], ..of_scalars },
    ]
}

#[test]
fn every_arrangement_agrees() {
    for options in arrangements() {
        both_agree(both(options), &inputs_of(&options, 11, 3), 3);
    }
}

/// Packed and separate tensors have the same values in other places, and so have their results.
#[test]
fn places_change_no_bit() {
    let (t, d, heads, rows) = (37, 4, 3, 2);
    let packed = AttentionOptions::packed(heads, d);
    let given = inputs_of(&packed, t, rows);
    let HostTensor::Float(values) = &given[0].1 else { panic!("floats") };
    let c = heads * d;
    let column = |which: usize| {
        let rows = values.chunks_exact(3 * c).flat_map(|row| &row[which * c..(which + 1) * c]);
        (Shape::batched(&[1, t, c]), HostTensor::Float(rows.copied().collect()))
    };
    let apart = [0, 1, 2].map(column);
    let [forward, grad] = both(packed);
    let [forward_apart, grad_apart] = both(AttentionOptions::separate(heads, heads, d));
    let of_grad = grad_inputs(&forward, &given, rows);
    let of_grad_apart = [&apart[..], &of_grad[1..]].concat();
    let joined = |outputs: &[Vec<f32>]| -> Vec<u32> {
        let mut bits = Vec::new();
        for row in 0..rows * t {
            let of_row = |output: &Vec<f32>| {
                output[row * output.len() / (rows * t)..][..output.len() / (rows * t)].to_vec()
            };
            bits.extend(outputs.iter().flat_map(of_row).map(f32::to_bits));
        }
        bits
    };
    for (op, given, op_apart, apart) in [
        (&forward, &given[..], &forward_apart, &apart[..]),
        (&grad, &of_grad, &grad_apart, &of_grad_apart),
    ] {
        let mut of_packed = Vec::new();
        for_each_result(op, given, rows, |who, outputs| {
            of_packed.push((who.to_string(), joined(outputs)));
        });
        let mut of_apart = Vec::new();
        for_each_result(op_apart, apart, rows, |who, outputs| {
            of_apart.push((who.to_string(), joined(outputs)));
        });
        assert_eq!(of_packed, of_apart);
    }
}

#[test]
fn gradients_are_finite_differences() {
    for (causal, dropout) in [(true, 0.0), (true, 0.4), (false, 0.0), (false, 0.4)] {
        let inputs = inputs(5, 6, dropout, 2, InputFill::Normal);
        are_finite_differences(ops_of(causal, 6, 2, dropout), &inputs, 2);
    }
}

#[test]
fn gradients_of_shared_keys_are_finite_differences() {
    for options in arrangements() {
        are_finite_differences(both(options), &inputs_of(&options, 4, 2), 2);
    }
}

/// Checks every element of the gradients of the reference.
fn are_finite_differences(
    [forward, grad]: [Op; 2],
    inputs: &[(Shape, HostTensor<f64>)],
    rows: usize,
) {
    let Op::Attention(options) = &forward else { panic!("{forward} is not forward") };
    let given = grad_inputs(&forward, inputs, rows);
    let HostTensor::Float(dy) = &given[options.tensors() + 2].1 else { panic!("dy is of floats") };
    let gradients = testing::reference(&grad, &given, rows);
    for (input, gradient) in gradients.iter().enumerate() {
        let scale = gradient.iter().fold(0.0f64, |a, g| a.max(g.abs()));
        for (at, exact) in gradient.iter().enumerate() {
            let value = |step: f64| {
                let mut moved = inputs.to_vec();
                if let HostTensor::Float(values) = &mut moved[input].1 {
                    values[at] += step;
                }
                let y = testing::reference(&forward, &moved, rows).remove(0);
                y.iter().zip(dy).map(|(y, dy)| y * dy).sum::<f64>()
            };
            let slope = (value(1e-6) - value(-1e-6)) / 2e-6;
            let error = (slope - exact).abs() / scale;
            assert!(error < 1e-5, "{options:?}, input {input}, {at}: {slope} and {exact}");
        }
    }
}

/// Checks the tiles of both ops on a device: against the reference, twice, with equal bits, and in
/// a folded grid.
fn tiles_agree(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    part: &str,
    (d, dropout, causal): (usize, f32, bool),
    t: usize,
) {
    let [forward, grad] = ops_of(causal, 2 * d, 2, dropout);
    let given = inputs(t, 2 * d, dropout, 1, InputFill::Normal);
    let grad_given = grad_inputs(&forward, &given, 1);
    for (op, given) in [(forward, given), (grad, grad_given)] {
        let expected = testing::reference(&op, &given, 1);
        let dims = given.iter().map(|(shape, _)| shape.resolve(1)).collect();
        let random = RandomContext { step_key: Key::new(3).step(5), training: true };
        let owned_call = OwnedCall::new(op, dims, random).expect("the shapes fit");
        let call = owned_call.call();
        let all = variants(&call, &Caps::of(gpu).with_all_that_run());
        let tiled: Vec<Variant> = all.into_iter().filter(|way| way.name.contains(part)).collect();
        assert!(!tiled.is_empty(), "no {part} of {t} tokens");
        for Variant { name, dispatches } in tiled {
            let mut run = |dispatches: &[Dispatch]| {
                on_gpu(gpu, pipelines, &call, dispatches, &given, f32::NAN)
            };
            let got = run(&dispatches);
            let wide = got.iter().map(|out| out.iter().map(|v| f64::from(*v)).collect());
            let what = format!("{name} of {} {:?} on {}", call.op, call.inputs, gpu.name);
            compare(&what, &wide.collect::<Vec<Vec<f64>>>(), &expected);
            let bits = |outputs: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
                outputs.into_iter().map(|out| out.into_iter().map(f32::to_bits).collect()).collect()
            };
            let (got, folded) = (bits(got), folded(&dispatches).expect("several workgroups"));
            assert_eq!(bits(run(&dispatches)), got, "{what}, again");
            assert_eq!(bits(run(&folded)), got, "{what}, folded");
        }
    }
}

/// Head widths of one slice and of two, of whole stages and of parts of one, with the dropout and
/// the tiles with which they are checked.
const WIDTHS: [((usize, f32, bool), &str); 9] = [
    ((8, 0.3, true), "tiles_64"),
    ((20, 0.0, true), "tiles_32"),
    ((32, 0.3, true), "tiles"),
    ((64, 0.3, true), "tiles"),
    ((80, 0.0, true), "tiles_64"),
    ((128, 0.0, true), "tiles_32"),
    ((20, 0.3, false), "tiles_32"),
    ((64, 0.0, false), "tiles"),
    ((80, 0.0, false), "tiles_32"),
];

#[test]
fn tiles_agree_at_every_head_width() {
    for_each_gpu(|gpu, pipelines| {
        // With checks they take long to compile; the tests of certification cover them.
        if gpu.checks == ShaderChecks::Disabled {
            for (width, part) in WIDTHS {
                tiles_agree(gpu, pipelines, part, width, 71);
            }
        }
    });
}

/// Tiles that need more memory than the portable limits, with which the other tests open devices.
#[test]
fn tiles_agree_that_need_more_memory() {
    for adapter in adapters() {
        let gpu =
            Gpu::open(&adapter, ShaderChecks::Disabled, Precision::F32).expect("the adapter opens");
        let largest = tiles::TILES[tiles::TILES.len() - 1];
        if gpu.limits.workgroup_bytes >= largest.workgroup_bytes {
            for width in [(20, 0.3, true), (64, 0.0, true), (64, 0.0, false)] {
                tiles_agree(&gpu, &mut Pipelines::default(), largest.name, width, 150);
            }
        }
    }
}

/// Largest NMSE of results in mixed precision: kernels round weights and slopes at different
/// scales, and the reference does not round them.
const MIXED_NMSE_MAX: f64 = 1e-7;

#[test]
fn attention_in_mixed_precision_multiplies_rounded_operands() {
    for (t, c, heads, dropout, causal) in
        [(5, 12, 2, 0.3, true), (37, 6, 1, 0.0, false), (67, 40, 2, 0.0, true)]
    {
        let inputs = inputs(t, c, dropout, 2, InputFill::Normal);
        let [forward, grad] = ops_of(causal, c, heads, dropout);
        check_mixed_with(&forward, &inputs, 2, MIXED_NMSE_MAX);
        check_mixed_with(&grad, &grad_inputs(&forward, &inputs, 2), 2, MIXED_NMSE_MAX);
    }
}

/// With an operand that is NaN or beyond the range of f16, results are not finite wherever the
/// reference is not finite, so that a run notices an overflow.
#[test]
fn overflow_in_mixed_precision_is_noticed() {
    let (t, d) = (37, 8);
    let [forward, grad] = ops(d, 1, 0.0);
    // The row of a query, key or value that other rows see, and one of the gradient.
    for (input, at) in [(0, 3 * d * 20 + 1), (0, 3 * d * 5 + d), (0, 3 * d * 9 + 2 * d), (3, 99)] {
        for planted in [7e4, f64::NAN] {
            let mut given = inputs(t, d, 0.0, 1, InputFill::Normal);
            let plant = |given: &mut [(Shape, HostTensor<f64>)]| {
                let HostTensor::Float(values) = &mut given[input].1 else { panic!("floats") };
                values[at] = planted;
            };
            if input == 0 {
                plant(&mut given);
            }
            let mut of_grad = grad_inputs(&forward, &given, 1);
            if input > 0 {
                plant(&mut of_grad);
            }
            let of_both = [(&forward, &given), (&grad, &of_grad)];
            for (op, given) in of_both.into_iter().skip(usize::from(input > 0)) {
                for_each_mixed_result(op, given, 1, |who, outputs, expected| {
                    assert!(expected.iter().flatten().any(|value| !value.is_finite()));
                    for (got, expected) in outputs.iter().flatten().zip(expected.iter().flatten()) {
                        let is_noticed = expected.is_finite() || !got.is_finite();
                        let what = format!("{op} by {who}: {planted} in input {input} at {at}");
                        assert!(is_noticed, "{what} gives {got}, not {expected}");
                    }
                });
            }
        }
    }
}

/// Options of attention by cooperative matrices, with the number of tokens: any places; heads of
/// one unit across and of several, of whole matrices and of less; a part of a block and many.
fn cooperative_calls() -> Vec<(AttentionOptions, usize)> {
    let packed = |heads, d| AttentionOptions { site: SITE, ..AttentionOptions::packed(heads, d) };
    let shared = AttentionOptions { site: SITE, ..AttentionOptions::separate(4, 2, 64) };
    let mut calls = vec![
        (packed(2, 64), 131),
        (AttentionOptions { causal: false, dropout: 0.3, ..packed(1, 20) }, 67),
        (AttentionOptions { dropout: 0.1, ..packed(1, 128) }, 71),
        (packed(1, 3), 5),
        (AttentionOptions { dropout: 0.3, ..shared }, 70),
    ];
    calls.extend(arrangements().into_iter().map(|options| (options, 37)));
    calls
}

/// On devices with all their memory, because the portable limits leave no room for some.
#[test]
fn cooperative_matrices_agree_at_every_head_width() {
    for adapter in adapters() {
        let gpu = Gpu::open(&adapter, ShaderChecks::Disabled, Precision::Mixed)
            .unwrap_or_else(|error| panic!("{error}"));
        if gpu.cooperative.is_none() {
            continue;
        }
        let mut pipelines = Pipelines::default();
        for (options, t) in cooperative_calls() {
            let given = inputs_of(&options, t, 2);
            both_cooperative_agree(&gpu, &mut pipelines, both(options), &given);
        }
        // With sharp scores, the maxima rise repeatedly.
        let sharp = inputs(150, 64, 0.0, 2, InputFill::Scaled(6.0, 0.0));
        both_cooperative_agree(&gpu, &mut pipelines, ops(64, 1, 0.0), &sharp);
    }
}

fn both_cooperative_agree(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    [forward, grad]: [Op; 2],
    given: &[(Shape, HostTensor<f64>)],
) {
    cooperative_agree(gpu, pipelines, &forward, given);
    cooperative_agree(gpu, pipelines, &grad, &grad_inputs(&forward, given, 2));
}

fn cooperative_agree(
    gpu: &Gpu,
    pipelines: &mut Pipelines,
    op: &Op,
    given: &[(Shape, HostTensor<f64>)],
) {
    let dims = given.iter().map(|(shape, _)| shape.resolve(2)).collect();
    let random = RandomContext { step_key: Key::new(3).step(5), training: true };
    let owned_call = OwnedCall::new(op.clone(), dims, random).expect("the shapes fit");
    let owned_call = OwnedCall { precision: Precision::Mixed, ..owned_call };
    let call = owned_call.call();
    let values: Vec<HostTensor<f64>> = given.iter().map(|(_, values)| values.clone()).collect();
    let expected = owned_call.expected(&values);
    let every = variants(&call, &Caps::of(gpu)).into_iter();
    let cooperative = Vec::from_iter(every.filter(|one| one.name.contains("_coop")));
    assert!(!cooperative.is_empty(), "{op}");
    for Variant { name, dispatches } in cooperative {
        let got = on_gpu(gpu, pipelines, &call, &dispatches, given, f32::NAN);
        for (output, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let wide = got.iter().map(|value| f64::from(*value));
            let nmse = crate::harness::nmse(wide, expected);
            let what = format!("{name} of {op} {:?} on {}", call.inputs, gpu.name);
            assert!(nmse < MIXED_NMSE_MAX, "{what}: NMSE {nmse:.2e} of output {output}");
        }
        if let Some(folded) = folded(&dispatches) {
            let again = on_gpu(gpu, pipelines, &call, &folded, given, f32::NAN);
            assert_eq!(again, got, "{name} of {op}, folded");
        }
    }
}

/// With equal scores and unit vectors as values, y shows which pairs were kept.
#[test]
fn every_implementation_drops_the_same_pairs() {
    let (t, d, dropout) = (64, 64, 0.3);
    let [forward, _] = ops(d, 1, dropout);
    let mut given = inputs(t, d, dropout, 1, InputFill::Normal);
    let HostTensor::Float(values) = &mut given[0].1 else { panic!("qkv is of floats") };
    for (at, value) in values.iter_mut().enumerate() {
        *value = f64::from(u8::from(at % (3 * d) == 2 * d + at / (3 * d)));
    }
    let expected = testing::reference(&forward, &given, 1).remove(0);
    let kept: Vec<bool> = expected.iter().map(|y| *y > 0.0).collect();
    assert!(kept.iter().filter(|kept| **kept).count() > t * t / 4);
    for_each_result(&forward, &given, 1, |who, outputs| {
        let got: Vec<bool> = outputs[0].iter().map(|y| *y > 0.0).collect();
        assert!(got == kept, "by {who}");
    });
}

#[test]
fn tiles_are_candidates_where_they_may_win() {
    let names = |t: usize, caps: Caps| -> Vec<String> {
        let [op, _] = ops(16, 2, 0.0);
        let random = RandomContext { step_key: Key::new(1), training: true };
        let owned_call = OwnedCall::new(op, vec![vec![2, t, 3 * 16]], random).expect("it fits");
        variants(&owned_call.call(), &caps).into_iter().map(|way| way.name).collect()
    };
    let (plain, all) = ("attention", ["attention_tiles_32", "attention_tiles_64"]);
    assert_eq!(names(31, Caps::EVERY), [plain, all[0]]);
    assert_eq!(names(63, Caps::EVERY), [plain, all[0], all[1]]);
    assert_eq!(names(64, Caps::EVERY), [plain, all[0], all[1], "attention_tiles_128"]);
    let portable = Caps { workgroup_bytes: 16 * 1024, ..Caps::EVERY };
    assert_eq!(names(1024, portable), [plain, all[0], all[1]]);
    let card = Caps { class: DeviceClass::Hardware, ..portable };
    assert_eq!(names(1024, card), all, "the plain one is not compiled on cards");
    let software = Caps { class: DeviceClass::Software, ..Caps::EVERY };
    assert_eq!(names(1024, software), [plain]);
    assert_eq!(names(1024, software.with_all_that_run()), names(1024, Caps::EVERY));
}
