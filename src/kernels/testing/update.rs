//! Test fixture of the optimizer updates: runs several steps over a range in the middle of a
//! bucket, on the CPU and on every adapter, and compares them with the f64 reference.

use super::{for_each_gpu, run_dispatches};
use crate::bucket_probe::{normals, rounded_otherwise, update_state, widen};
use crate::harness::NMSE_MAX;
use crate::{UpdateKernel, UpdateTwin};
use crate::{bf16_moments, bf16_words};
use potluck_core::RunSeries;
use potluck_core::rng::Key;
use potluck_graph::{MomentRounding, Update, UpdateRange};

/// The parameters and the moments of a bucket, which an update changes.
type UpdateState<T> = Vec<Vec<T>>;

/// Runs `steps` in sequence over `range` of a bucket of `elements` elements in every
/// implementation. Compares the change of each value with the f64 reference, and asserts that
/// values outside the range keep their bits.
pub(crate) fn check_update(
    elements: usize,
    range: &UpdateRange,
    steps: &[Update],
    twin: &UpdateTwin,
) {
    let start = update_state(elements, &steps[0]);
    let gradients: Vec<Vec<f32>> =
        (0..steps.len()).map(|step| normals(elements, 50 + step as u32)).collect();
    let wide: UpdateState<f64> = start.iter().map(|v| widen(v)).collect();
    let wide_gradients: Vec<Vec<f64>> = gradients.iter().map(|v| widen(v)).collect();
    let expected = host(twin.reference_f64, steps, range, wide, &wide_gradients);
    let same = |who: &str, got: UpdateState<f32>| compare(who, range, &start, &got, &expected);
    same("the reference in f32", host(twin.reference_f32, steps, range, start.clone(), &gradients));
    same("the fast version", host(twin.fast, steps, range, start.clone(), &gradients));
    for_each_gpu(|gpu, pipelines| {
        let who = format!("{} ({:?})", gpu.name, gpu.checks);
        let mut state = start.clone();
        for (update, gradients) in steps.iter().zip(&gradients) {
            let dispatches = [(twin.dispatch)(update, range)];
            let inputs = [bytemuck::cast_slice(gradients)];
            state = run_dispatches(gpu, pipelines, "an update", &dispatches, &inputs, &state);
        }
        same(&who, state);
    });
}

/// Runs `steps` over ranges whose moments are rounded: from one element to several workgroups, at
/// odd starts, of a whole tensor and of a slice of columns.
pub(crate) fn check_rounded_updates(steps: &[Update], twin: &UpdateTwin) {
    let elements = 40_000;
    let whole = RunSeries { start: 0, elements, place: 0, run: elements, distance: elements };
    let columns = RunSeries { place: 3, run: 7, distance: 33, ..whole };
    for (start, length, decay_end, series, number) in [
        (0, 1, 0, whole, 0),
        (64, 4096, 2001, whole, 64),
        (5, 20_001, 17_000, whole, 0),
        (131, 700, 400, columns, 11),
    ] {
        let rounding = Some(MomentRounding { key: Key::new(7).step(3), series, number });
        let range = UpdateRange { start, length, decay_end, gradient_scale: 0.3, rounding };
        check_rounded_update(start + length + 77, &range, steps, twin);
    }
}

/// Runs `steps` in sequence over `range`, whose moments are rounded, of a bucket of `elements`
/// elements in every implementation, each step from the state of the f64 reference. Compares the
/// parameters as [`check_update`] does; moments must have the same bits, with few exceptions.
fn check_rounded_update(elements: usize, range: &UpdateRange, steps: &[Update], twin: &UpdateTwin) {
    let state = update_state(elements, &steps[0]);
    let (parameters, moments) = state.split_first().expect("parameters come first");
    let mut moments: Vec<Vec<u32>> = moments.iter().map(|v| bf16_words::to_nearest(v)).collect();
    let mut parameters = parameters.clone();
    for (step, update) in steps.iter().enumerate() {
        let gradients = normals(elements, 50 + step as u32);
        let mut moved = widen(&parameters);
        let mut expected = moments.clone();
        let kernel = twin.reference_f64;
        let wide = widen(&gradients);
        bf16_moments::update(kernel, update, range, &mut moved, &wide, &mut expected);
        let same = |who: &str, got: &[f32], words: &[Vec<u32>]| {
            for (words, expected) in words.iter().zip(&expected) {
                let part = rounded_otherwise(range, words, expected);
                assert!(part < 0.001, "{who}: {part} of the moments are rounded otherwise");
            }
            let start = vec![parameters.clone()];
            compare(who, range, &start, &vec![got.to_vec()], &vec![moved.clone()]);
        };
        for (who, kernel) in
            [("the reference in f32", twin.reference_f32), ("the fast version", twin.fast)]
        {
            let mut got = parameters.clone();
            let mut words = moments.clone();
            bf16_moments::update(kernel, update, range, &mut got, &gradients, &mut words);
            same(who, &got, &words);
        }
        for_each_gpu(|gpu, pipelines| {
            let mut starts: Vec<Vec<f32>> = vec![parameters.clone()];
            for words in &moments {
                starts.push(bytemuck::cast_slice(words).to_vec());
            }
            let dispatches = [(twin.dispatch)(update, range)];
            let inputs = [bytemuck::cast_slice(&gradients)];
            let got = run_dispatches(gpu, pipelines, "an update", &dispatches, &inputs, &starts);
            let words: Vec<Vec<u32>> =
                got[1..].iter().map(|list| bytemuck::cast_slice(list).to_vec()).collect();
            same(&format!("{} ({:?})", gpu.name, gpu.checks), &got[0], &words);
        });
        parameters = moved.iter().map(|value| *value as f32).collect();
        moments = expected;
    }
}

fn host<T: Clone>(
    update: UpdateKernel<T>,
    steps: &[Update],
    range: &UpdateRange,
    mut state: UpdateState<T>,
    gradients: &[Vec<T>],
) -> UpdateState<T> {
    for (step, gradients) in steps.iter().zip(gradients) {
        let (parameters, moments) = state.split_first_mut().expect("parameters come first");
        let mut moments: Vec<&mut [T]> = moments.iter_mut().map(Vec::as_mut_slice).collect();
        update(step, range, parameters, gradients, &mut moments);
    }
    state
}

fn compare(
    who: &str,
    range: &UpdateRange,
    start: &UpdateState<f32>,
    got: &UpdateState<f32>,
    expected: &UpdateState<f64>,
) {
    let covered = range.start..range.start + range.length;
    for (list, (got, expected)) in got.iter().zip(expected).enumerate() {
        let mut error = 0.0;
        let mut scale = 0.0;
        for (i, &before) in start[list].iter().enumerate() {
            if !covered.contains(&i) {
                assert_eq!(got[i].to_bits(), before.to_bits(), "{who}: element {i} of {list}");
                continue;
            }
            let moved = expected[i] - f64::from(before);
            error += (f64::from(got[i]) - expected[i]).powi(2);
            scale += moved * moved;
        }
        assert!(scale > 0.0, "{who}: the reference moves list {list}");
        let nmse = error / scale;
        assert!(nmse <= NMSE_MAX, "{who}: list {list} moved otherwise, NMSE {nmse:.2e}");
    }
}
