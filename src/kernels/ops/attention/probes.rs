//! Calls of attention on which its kernels are certified, and the inputs of a call.

use crate::call_shapes::{B, C, HEADS, T, calls};
use crate::harness::InputFill;
use crate::twin::{Forward, InputSpec};
use crate::{CallShape, Dims};
use potluck_core::Site;
use potluck_graph::{AttentionOptions, Op};

/// Token counts of probes: fewer than a tile has, and a few more than a tile of each size has.
const TOKENS: [usize; 4] = [5, 37, 67, 131];

/// See [`crate::Twin::inputs`].
pub fn inputs(op: &Op, inputs: &[Dims]) -> InputSpec {
    let spec = InputSpec { samples: Some(inputs[0][0]), ..InputSpec::normal(inputs) };
    if op.is_random() { spec.with(inputs.len() - 1, InputFill::Samples) } else { spec }
}

/// See [`crate::Twin::forward`].
pub fn forward(op: &Op) -> Option<Forward> {
    let &Op::AttentionGrad(options) = op else { return None };
    let tensors = options.tensors();
    let mut inputs: Vec<usize> = (0..tensors).collect();
    if options.dropout > 0.0 {
        inputs.push(tensors + 3);
    }
    let outputs = vec![(0, tensors), (1, tensors + 1)];
    Some(Forward { op: Op::Attention(options), inputs, outputs })
}

/// See [`crate::Twin::probes`].
pub fn probes(op: &Op, inputs: &[Dims]) -> Vec<CallShape> {
    let (Op::Attention(options) | Op::AttentionGrad(options)) = op else {
        panic!("{op} is not an attention");
    };
    calls(op, TOKENS.map(|t| resized(options, inputs, t)))
}

/// Inputs of attention or its gradient for 2 samples of `t` tokens.
fn resized(options: &AttentionOptions, inputs: &[Dims], t: usize) -> Vec<Dims> {
    let lse = options.tensors() + 1;
    let mut resized = Vec::new();
    for (index, dims) in inputs.iter().enumerate() {
        resized.push(match dims.as_slice() {
            // The logarithms of sums are (b, h, t), all others (b, t, ..).
            [_, heads, _] if index == lse => vec![2, *heads, t],
            [_, _, last] => vec![2, t, *last],
            _ => vec![2],
        });
    }
    resized
}

/// See [`crate::Twin::catalog`]: packed as in a GPT, and separate with shared keys as in a Llama.
pub fn catalog() -> Vec<CallShape> {
    let d = C / HEADS;
    let packed = AttentionOptions::packed(HEADS, d);
    let shared = AttentionOptions::separate(HEADS, HEADS / 2, d);
    let mut calls = Vec::new();
    for (options, causal, dropout) in
        [(packed, true, 0.0), (packed, true, 0.1), (packed, false, 0.0), (shared, true, 0.0)]
    {
        let options = AttentionOptions { causal, dropout, site: Site(2), ..options };
        let tensors: Vec<Dims> =
            (0..options.tensors()).map(|input| vec![B, T, options.input_columns(input)]).collect();
        let samples: Vec<Dims> = if dropout > 0.0 { vec![vec![B]] } else { Vec::new() };
        let results = vec![vec![B, T, C], vec![B, HEADS, T], vec![B, T, C]];
        let of_gradient = [tensors.clone(), results, samples.clone()].concat();
        calls.push((Op::Attention(options), [tensors, samples].concat()));
        calls.push((Op::AttentionGrad(options), of_gradient));
    }
    calls
}
