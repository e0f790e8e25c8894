//! The CPU kernels of recurrent layers: each thread takes some samples through all time steps, so
//! that threads wait for each other only at the end.

use std::ops::Range;

use gemm::Parallelism;
use rayon::prelude::*;

use super::time_steps::TimeSteps;
use super::{RecurrentSizes, gru, lstm};
use potluck_core::arithmetic::transpose;
use potluck_graph::Cell;

/// Fewest samples of a thread: a product of fewer reads the weight too often.
const SAMPLES_MIN: usize = 8;

/// Kernel of some samples, with the inputs and outputs of these samples only.
type Compute = fn(&TimeSteps, &[&[f32]], &mut [&mut [f32]]);

/// Computes a layer, or its gradient.
pub fn compute(
    sizes: RecurrentSizes,
    is_forward: bool,
    inputs: &[&[f32]],
    outputs: &mut [&mut [f32]],
) {
    let compute: Compute = match (sizes.cell, is_forward) {
        (Cell::Lstm, true) => lstm::fast,
        (Cell::Lstm, false) => lstm::fast_grad,
        (Cell::Gru, true) => gru::fast,
        (Cell::Gru, false) => gru::fast_grad,
    };
    let mut inputs = inputs.to_vec();
    let transposed;
    // Inputs that all samples share: the weight, and in the forward pass the bias.
    let mut shared = 1..2;
    if is_forward {
        // Once, for all steps: a product packs rows of the weight, which are then contiguous.
        transposed = transpose(inputs[1], sizes.columns(), sizes.h);
        inputs[1] = &transposed;
        shared = 1..3;
    }
    let threads = rayon::current_num_threads();
    let parts = threads.min(sizes.b / SAMPLES_MIN).max(1);
    let parallelism = if parts < threads { Parallelism::Rayon(0) } else { Parallelism::None };
    let mut samples: Vec<Range<usize>> = Vec::new();
    for part in 0..parts {
        samples.push(part * sizes.b / parts..(part + 1) * sizes.b / parts);
    }
    let outputs = divide(outputs, sizes.b, &samples);
    samples.into_par_iter().zip(outputs).for_each(|(samples, mut outputs)| {
        let mut inputs = inputs.clone();
        for (index, input) in inputs.iter_mut().enumerate() {
            if !shared.contains(&index) {
                let per_sample = input.len() / sizes.b;
                *input = &input[samples.start * per_sample..samples.end * per_sample];
            }
        }
        let sizes = RecurrentSizes { b: samples.len(), ..sizes };
        compute(&TimeSteps { sizes, parallelism }, &inputs, &mut outputs);
    });
}

/// Divides outputs of `b` samples between parts with these neighbouring ranges of samples.
fn divide<'a>(
    outputs: &'a mut [&mut [f32]],
    b: usize,
    samples: &[Range<usize>],
) -> Vec<Vec<&'a mut [f32]>> {
    let mut parts: Vec<Vec<&mut [f32]>> = samples.iter().map(|_| Vec::new()).collect();
    for output in outputs {
        let per_sample = output.len() / b;
        let mut rest = &mut **output;
        for (part, samples) in parts.iter_mut().zip(samples) {
            let (own, behind) = rest.split_at_mut(samples.len() * per_sample);
            part.push(own);
            rest = behind;
        }
    }
    parts
}
