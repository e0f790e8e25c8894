//! Tests of attention: every implementation against the reference, and the reference against
//! differences.

use super::*;
use crate::device::{Gpu, ShaderChecks};
use crate::dispatch::folded;
use crate::harness::InputFill;
use crate::testing::{self, adapters, check_with, compare, for_each_gpu, for_each_result, on_gpu};
use crate::{DeviceClass, OwnedCall, Pipelines, RandomContext};
use potluck_core::{HostTensor, Shape, Site};

const SITE: Site = Site(9);

fn ops(heads: usize, dropout: f32) -> [Op; 2] {
    ops_of(true, heads, dropout)
}

fn ops_of(causal: bool, heads: usize, dropout: f32) -> [Op; 2] {
    let (first_head, site) = (0, SITE);
    let options = AttentionOptions { heads, first_head, causal, dropout, site };
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

/// Returns `qkv, y, lse, dy [, samples]` for a random `dy`.
fn grad_inputs(
    op: &Op,
    forward: &[(Shape, HostTensor<f64>)],
    rows: usize,
) -> Vec<(Shape, HostTensor<f64>)> {
    let Op::Attention(AttentionOptions { heads, .. }) = op else { panic!("{op} is not forward") };
    let [_, t, width] = *forward[0].0.dims() else { panic!("qkv is (b, t, 3c)") };
    let [y, lse] = testing::reference(op, forward, rows).try_into().expect("two outputs");
    let y_shape = Shape::batched(&[1, t, width / 3]);
    let dy = testing::generate(InputFill::Normal, y_shape.elements(rows), 2);
    let mut inputs = vec![
        forward[0].clone(),
        (y_shape.clone(), HostTensor::Float(y)),
        (Shape::batched(&[1, *heads, t]), HostTensor::Float(lse)),
        (y_shape, dy),
    ];
    inputs.extend_from_slice(&forward[1..]);
    inputs
}

/// Checks both ops on random input of `rows` samples.
fn agree(t: usize, c: usize, heads: usize, dropout: f32, rows: usize, fill: InputFill) {
    let inputs = inputs(t, c, dropout, rows, fill);
    both_agree(ops(heads, dropout), &inputs, rows);
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
        both_agree(ops_of(false, heads, dropout), &inputs, rows);
    }
}

/// The last query sees what a causal one does, and the first one the mean of all values if its
/// scores are equal.
#[test]
fn every_query_sees_all_keys_unless_it_is_causal() {
    let (t, c) = (5, 4);
    let mut given = inputs(t, c, 0.0, 1, InputFill::Normal);
    let HostTensor::Float(values) = &mut given[0].1 else { panic!("qkv is of floats") };
    values[..c].fill(0.0);
    let values = values.clone();
    let [causal, full] = [true, false].map(|causal| {
        let [forward, _] = ops_of(causal, 2, 0.0);
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
        let sizes =
            AttentionSizes { b: 1, t, c: 4, heads: 4, d: 1, scale: 1.0, causal: true, drop };
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
    let [forward, grad] = ops(2, 1.0);
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
        let [op, _] = ops(2, dropout);
        let random = RandomContext { step_key: Key::new(1), training };
        let outputs = vec![vec![2, 6, 8], vec![2, 2, 6]];
        let dims = vec![qkv.resolve(2), vec![2]];
        let call = OpCall { op: &op, inputs: dims, outputs, accumulate: false, random };
        let (mut y, mut lse) = (vec![0.0; 96], vec![0.0; 24]);
        let args = [HostTensorView::Float(values.as_slice()), HostTensorView::Int(samples)];
        reference(&call, &args, &mut [&mut y, &mut lse]);
        let constants = plain(&call)[0].shader.header.clone();
        (y, constants.contains("DROPOUT: u32 = 1u"))
    };
    assert_eq!(run(0.5, false), run(0.0, true));
    assert_ne!(run(0.5, true), run(0.0, true));
}

#[test]
fn gradients_are_finite_differences() {
    for (causal, dropout) in [(true, 0.0), (true, 0.4), (false, 0.0), (false, 0.4)] {
        let rows = 2;
        let [forward, grad] = ops_of(causal, 2, dropout);
        let inputs = inputs(5, 6, dropout, rows, InputFill::Normal);
        let given = grad_inputs(&forward, &inputs, rows);
        let HostTensor::Float(dy) = &given[3].1 else { panic!("dy is of floats") };
        let dqkv = testing::reference(&grad, &given, rows).remove(0);
        let scale = dqkv.iter().fold(0.0f64, |a, g| a.max(g.abs()));
        for (at, exact) in dqkv.iter().enumerate() {
            let value = |step: f64| {
                let mut moved = inputs.clone();
                if let HostTensor::Float(values) = &mut moved[0].1 {
                    values[at] += step;
                }
                let y = testing::reference(&forward, &moved, rows).remove(0);
                y.iter().zip(dy).map(|(y, dy)| y * dy).sum::<f64>()
            };
            let slope = (value(1e-6) - value(-1e-6)) / 2e-6;
            let error = (slope - exact).abs() / scale;
            assert!(error < 1e-5, "dropout {dropout}, element {at}: {slope} and {exact}");
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
    let [forward, grad] = ops_of(causal, 2, dropout);
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
        // With checks they take long to compile; the tests of certification do that.
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
        let gpu = Gpu::open(&adapter, ShaderChecks::Disabled).expect("the adapter opens");
        let largest = tiles::TILES[tiles::TILES.len() - 1];
        if gpu.limits.workgroup_bytes >= largest.workgroup_bytes {
            for width in [(20, 0.3, true), (64, 0.0, true), (64, 0.0, false)] {
                tiles_agree(&gpu, &mut Pipelines::default(), largest.name, width, 150);
            }
        }
    }
}

/// With equal scores and unit vectors as values, y shows which pairs were kept.
#[test]
fn every_implementation_drops_the_same_pairs() {
    let (t, d, dropout) = (64, 64, 0.3);
    let [forward, _] = ops(1, dropout);
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
        let [op, _] = ops(2, 0.0);
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
    let software = Caps { class: DeviceClass::Software, ..Caps::EVERY };
    assert_eq!(names(1024, software), [plain]);
    assert_eq!(names(1024, software.with_all_that_run()), names(1024, Caps::EVERY));
}
