//! The CPU kernels of recurrent layers: each thread takes some samples through all time steps, so
//! that threads wait for each other at the end only.

use gemm::Parallelism;
use rayon::prelude::*;

use super::time_steps::TimeSteps;
use super::{RecurrentSizes, gru, lstm};
use potluck_core::arithmetic::transpose;
use potluck_graph::Cell;

/// Fewest samples of a thread: a product of fewer reads the weight too often.
const SAMPLES_MIN: usize = 8;

/// Kernel of some samples: inputs and outputs are theirs.
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
    // The weight, and the bias.
    let mut shared = 1..2;
    if is_forward {
        // Once, for all steps: a product packs rows of the weight, which are then in one piece.
        transposed = transpose(inputs[1], sizes.columns(), sizes.h);
        inputs[1] = &transposed;
        shared = 1..3;
    }
    let threads = rayon::current_num_threads();
    let parts = threads.min(sizes.b / SAMPLES_MIN).max(1);
    let parallelism = if parts < threads { Parallelism::Rayon(0) } else { Parallelism::None };
    let bound = |part: usize| part * sizes.b / parts;
    let of_parts = divide(outputs, sizes.b, (0..parts).map(|part| bound(part + 1) - bound(part)));
    of_parts.into_par_iter().enumerate().for_each(|(part, mut outputs)| {
        let (from, to) = (bound(part), bound(part + 1));
        let of_part = |index: usize| {
            if shared.contains(&index) {
                inputs[index]
            } else {
                let per_sample = inputs[index].len() / sizes.b;
                &inputs[index][from * per_sample..to * per_sample]
            }
        };
        let inputs: Vec<&[f32]> = (0..inputs.len()).map(of_part).collect();
        let sizes = RecurrentSizes { b: to - from, ..sizes };
        compute(&TimeSteps { sizes, parallelism }, &inputs, &mut outputs);
    });
}

/// Divides outputs of `b` samples into those of parts with these numbers of samples.
fn divide<'a>(
    outputs: &'a mut [&mut [f32]],
    b: usize,
    samples: impl Iterator<Item = usize>,
) -> Vec<Vec<&'a mut [f32]>> {
    let mut rests: Vec<&mut [f32]> = outputs.iter_mut().map(|output| &mut **output).collect();
    let per_sample: Vec<usize> = rests.iter().map(|rest| rest.len() / b).collect();
    let of_part = |samples: usize| {
        let take = |(rest, per_sample): (&mut &'a mut [f32], &usize)| {
            let (part, behind) = std::mem::take(rest).split_at_mut(samples * per_sample);
            *rest = behind;
            part
        };
        rests.iter_mut().zip(&per_sample).map(take).collect()
    };
    samples.map(of_part).collect()
}
