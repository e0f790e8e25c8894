//! A small GPT, and steps on a sequence that it can learn.

use potluck_core::HostTensor;
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::{Graph, Unary};
use potluck_train::Trainer;

pub const VOCABULARY: usize = 33;
pub const CONTEXT: usize = 6;

/// Returns the forward graph of a GPT of this width, whose packed queries, keys and values are cut
/// in three ranges of columns in a tensor group.
pub fn model(width: usize) -> Graph {
    gpt(&config(width)).unwrap()
}

pub fn config(width: usize) -> GptConfig {
    GptConfig {
        vocabulary: VOCABULARY,
        context: CONTEXT,
        positions: CONTEXT,
        layers: 2,
        heads: 2,
        width,
        bias: true,
        dropout: 0.0,
        tie: true,
        activation: Unary::GeluTanh,
    }
}

/// Runs steps of so many samples up to `last`, and returns their losses.
pub fn train(trainer: &mut Trainer, samples: usize, rate: f64, last: usize) -> Vec<f64> {
    let mut losses = Vec::new();
    for step in trainer.steps() as usize..last {
        let id = |at: usize| ((7 * at + 11 * (step % 5)) % VOCABULARY) as u32;
        let ids =
            |first: usize| HostTensor::Int((first..first + samples * CONTEXT).map(id).collect());
        let batch = [("tokens", ids(0)), ("targets", ids(1))];
        losses.push(trainer.step(&batch, rate).unwrap().loss);
    }
    losses
}

/// Returns the bits of all parameters.
pub fn bits(trainer: &Trainer) -> Vec<u32> {
    let tensors = trainer.parameters().unwrap();
    tensors.iter().flat_map(|tensor| &tensor.values).map(|value| value.to_bits()).collect()
}
