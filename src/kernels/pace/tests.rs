//! Simulated devices that run the calls of a GPT-2: no submission of a first step, of a later one
//! or of timing is long, whatever the kernels make of the device.

use super::*;
use crate::dispatch::{part_end, workgroups};
use crate::{CallShape, Caps, OwnedCall, RandomContext, twin};
use potluck_core::rng::Key;
use potluck_graph::{AttentionOptions, LossClasses, Op};

/// The longest submission that counts as short: an eighth of the time that watchdogs allow.
const SECONDS_MAX: f64 = 0.25;

/// A device that runs `lanes` workgroups concurrently, all of them together at a share of a
/// teraflop per second and of 100 GB/s.
struct Device {
    share: f64,
    lanes: usize,
    /// Overhead of a submission in seconds.
    latency: f64,
}

impl Device {
    /// Seconds of a submission of workgroups with these shares of a call.
    fn seconds(&self, cost: Cost, work: &[f64]) -> f64 {
        let whole = (cost.flops / 1e12).max(cost.bytes / 1e11) / self.share;
        let rounds = work.chunks(self.lanes).map(|round| round.iter().copied().fold(0.0, f64::max));
        self.latency + whole * rounds.sum::<f64>() * self.lanes as f64
    }
}

/// The long calls of a step of a GPT-2 with 8 sequences of 1024 tokens.
fn calls() -> Vec<OwnedCall> {
    let product = |transpose_a, transpose_b| Op::MatMul { transpose_a, transpose_b };
    let (n, c, v, heads) = (8192, 768, 50_257, 12);
    let (qkv, y) = (vec![8, 1024, 3 * c], vec![8, 1024, c]);
    let options = AttentionOptions::packed(heads, c / heads);
    let shapes: Vec<CallShape> = vec![
        (product(false, true), vec![vec![n, c], vec![v, c]]),
        (product(true, false), vec![vec![n, v], vec![n, c]]),
        (product(true, false), vec![vec![n, c], vec![n, c]]),
        (Op::Attention(options), vec![qkv.clone()]),
        (Op::AttentionGrad(options), vec![qkv, y.clone(), vec![8, heads, 1024], y]),
        (Op::CrossEntropy(LossClasses::whole(v)), vec![vec![n, v], vec![n]]),
        (Op::CrossEntropyGrad(LossClasses::whole(v)), vec![vec![n, v], vec![n], vec![n]]),
        (Op::LayerNorm { eps: 1e-5 }, vec![vec![n, c], vec![c], vec![c]]),
        (Op::EmbeddingGrad { first: 0, rows: v }, vec![vec![n], vec![n, c]]),
        (Op::Sum { first: 0, last: 0 }, vec![vec![n, 4 * c]]),
    ];
    let random = RandomContext { step_key: Key::new(1), training: true };
    let owned = |(op, inputs)| OwnedCall::new(op, inputs, random).unwrap();
    shapes.into_iter().map(owned).collect()
}

/// Returns the shares of the workgroups in a call: equal ones, or rising over each sixteenth of
/// the grid from almost none, as in causal attention.
fn work(count: u32, is_rising: bool) -> Vec<f64> {
    let row = (count / 16).max(1);
    let one = |i: u32| if is_rising { f64::from(1 + i % row) } else { 1.0 };
    let total: f64 = (0..count).map(one).sum();
    (0..count).map(|i| one(i) / total).collect()
}

/// Runs a trial; returns the pace, and the longest part and their number.
fn run_trial(
    groups: [u32; 3],
    cost: Cost,
    mut seconds: impl FnMut(&Range<u32>) -> f64,
) -> (f64, f64, usize) {
    let mut trial = PaceTrial::new(workgroups(groups), nominal_seconds(cost), SUBMISSION_SECONDS);
    let (mut longest, mut parts) = (0.0, 0);
    while let Some((first, most)) = trial.next_part() {
        let part = first..part_end(groups, first, most);
        let taken = seconds(&part);
        (longest, parts) = (f64::max(longest, taken), parts + 1);
        trial.note(&part, taken);
    }
    (trial.pace().unwrap(), longest, parts)
}

/// Calls `check` with the name, the cost and the grid of every long dispatch of every variant.
fn for_each_dispatch(mut check: impl FnMut(&str, Cost, [u32; 3], &[f64])) {
    for owned_call in calls() {
        let call = owned_call.call();
        let twin = twin(call.op).unwrap();
        let cost = (twin.cost)(&call);
        let is_rising = matches!(call.op, Op::Attention(_) | Op::AttentionGrad(_));
        for variant in (twin.variants)(&call, &Caps::EVERY) {
            for dispatch in &variant.dispatches {
                let work = work(workgroups(dispatch.groups), is_rising);
                check(&format!("{} of {}", variant.name, call.op), cost, dispatch.groups, &work);
            }
        }
    }
}

#[test]
fn no_submission_is_long_on_a_slow_device() {
    let (mut longest, mut at) = (0.0, String::new());
    for_each_dispatch(|name, cost, groups, work| {
        for share in [1.0, 0.3, 0.1, 0.03] {
            for (lanes, latency) in [(1, 1e-4), (16, 1e-4), (16, 2e-3), (128, 1e-3)] {
                let device = Device { share, lanes, latency };
                let seconds = |part: &Range<u32>| {
                    device.seconds(cost, &work[part.start as usize..part.end as usize])
                };
                // Nothing cuts a workgroup.
                let alone = device.seconds(cost, &[work.iter().copied().fold(0.0, f64::max)]);
                let (pace, mut own, _) = run_trial(groups, cost, seconds);
                let mut first = 0;
                while first < workgroups(groups) {
                    let part = first..part_end(groups, first, fitting(PART_SECONDS, pace));
                    own = f64::max(own, seconds(&part));
                    first = part.end;
                }
                if own > longest && alone < SUBMISSION_SECONDS {
                    longest = own;
                    at = format!("{name} at {share} on {lanes} lanes, alone {alone:.3} s");
                }
            }
        }
    });
    println!("the longest submission takes {longest:.3} s: {at}");
    assert!(longest <= SECONDS_MAX, "{longest} s: {at}");
}

/// The first step of a GPT-2 has about 150 long dispatches.
#[test]
fn a_fast_device_runs_in_few_parts() {
    let device = Device { share: 40.0, lanes: 128, latency: 1e-4 };
    let (mut most, mut total, mut beside) = (0, 0, 0.0);
    for_each_dispatch(|name, cost, groups, work| {
        let seconds =
            |part: &Range<u32>| device.seconds(cost, &work[part.start as usize..part.end as usize]);
        let mut taken = 0.0;
        let (pace, _, parts) = run_trial(groups, cost, |part| {
            taken += seconds(part);
            seconds(part)
        });
        let whole = seconds(&(0..workgroups(groups)));
        assert!(workgroups(groups) <= fitting(PART_SECONDS, pace), "{name} is cut again");
        (most, total) = (parts.max(most), total + 1);
        beside += taken - whole;
    });
    let mean = 1e3 * beside / f64::from(total);
    println!("at most {most} parts; {mean:.2} ms beside the work of a dispatch");
    assert!(most <= 12 && mean < 5.0, "{most} parts, {mean} ms");
}
