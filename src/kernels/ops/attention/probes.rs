//! Calls of attention on which its kernels are certified, and the inputs of a call.

use crate::call_shapes::{B, C, HEADS, T, calls};
use crate::harness::InputFill;
use crate::twin::{Forward, InputSpec};
use crate::{CallShape, Dims};
use potluck_core::Site;
use potluck_graph::{AttentionOptions, Op};

/// Token counts of probes: fewer than a tile has, and a little more than one tile of each size
/// has.
const TOKENS: [usize; 4] = [5, 37, 67, 131];

/// See [`crate::Twin::inputs`].
pub fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let spec = InputSpec { samples: Some(inputs[0][0]), ..InputSpec::normal(inputs) };
    if op.is_random() { spec.with(inputs.len() - 1, InputFill::Samples) } else { spec }
}

/// See [`crate::Twin::forward`].
pub fn forward(op: &Op) -> Option<Forward> {
    let &Op::AttentionGrad(options) = op else { return None };
    let mut inputs = vec![0];
    inputs.extend((options.dropout > 0.0).then_some(4));
    let op = Op::Attention(options);
    Some(Forward { op, inputs, outputs: vec![(0, 1), (1, 2)] })
}

/// See [`crate::Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    calls(op, TOKENS.map(|t| resized(inputs, t)))
}

/// Returns the inputs of attention or its gradient for 2 samples of `t` tokens.
fn resized(inputs: &[Dims], t: usize) -> Vec<Dims> {
    let resized = |(index, dims): (usize, &Dims)| match dims.as_slice() {
        // The logarithms of sums, input 2 of the gradient, are (b, h, t); qkv, y, dy (b, t, ..).
        [_, heads, _] if index == 2 => vec![2, *heads, t],
        [_, _, last] => vec![2, t, *last],
        _ => vec![2],
    };
    inputs.iter().enumerate().map(resized).collect()
}

/// See [`crate::Twin::catalog`].
pub fn catalog() -> Vec<CallShape> {
    let (qkv, y, lse) = (vec![B, T, 3 * C], vec![B, T, C], vec![B, HEADS, T]);
    let mut calls = Vec::new();
    for (causal, dropout) in [(true, 0.0), (true, 0.1), (false, 0.0)] {
        let (heads, first_head, site) = (HEADS, 0, Site(2));
        let options = AttentionOptions { heads, first_head, causal, dropout, site };
        let samples = (dropout > 0.0).then_some(vec![B]);
        let with_samples =
            |inputs: &[Dims]| inputs.iter().cloned().chain(samples.clone()).collect::<Vec<Dims>>();
        let inputs = with_samples(std::slice::from_ref(&qkv));
        calls.push((Op::Attention(options), inputs));
        let inputs = with_samples(&[qkv.clone(), y.clone(), lse.clone(), y.clone()]);
        calls.push((Op::AttentionGrad(options), inputs));
    }
    calls
}
