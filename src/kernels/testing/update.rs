//! Test fixture of the optimizer updates: runs several steps over a range in the middle of a
//! bucket, on the CPU and on every adapter, and compares them with the f64 reference.

use super::{for_each_gpu, run_dispatches};
use crate::bucket_probe::{normals, update_state, widen};
use crate::harness::NMSE_MAX;
use crate::{UpdateKernel, UpdateTwin};
use potluck_graph::{Update, UpdateRange};

/// The parameters and the moments of a bucket, which an update changes.
type UpdateState<T> = Vec<Vec<T>>;

/// Runs `steps` in sequence over `range` of a bucket of `elements` elements in every
/// implementation. Compares the change of each value with that of the f64 reference, and asserts
/// that values outside the range keep their bits.
pub(crate) fn check_update(
    elements: usize,
    range: &UpdateRange,
    steps: &[Update],
    twin: &UpdateTwin,
) {
    let start = update_state(elements, steps[0].moments());
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
        let (mut error, mut scale) = (0.0, 0.0);
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
