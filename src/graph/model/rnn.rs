//! A recurrent language model: an embedding, layers of LSTM or GRU, and a head, with the parameters
//! and initial values of PyTorch's `Embedding`, `LSTM` or `GRU`, and `Linear`.

use super::language;
use crate::builder::{BuildResult, Builder};
use crate::{Cell, Graph, Init, ShapeError};
use potluck_core::TensorId;

/// Hyperparameters of a recurrent language model.
#[derive(Clone, Debug, PartialEq)]
pub struct RnnConfig {
    pub vocabulary: usize,
    /// Time steps of a sample: t.
    pub context: usize,
    pub layers: usize,
    /// Values of the embedding of a token, and hidden values of a layer.
    pub width: usize,
    pub cell: Cell,
    /// Probability with which training sets a hidden value to zero between two layers.
    pub dropout: f32,
    /// True if the state after a sample is carried to the sample in the same slot of the next
    /// step; otherwise each sample starts from a state of zeros.
    pub stateful: bool,
}

/// Builds the graph of a recurrent language model with inputs `tokens` and `targets` (both (b, t)),
/// the output `logits` (b, t, v), and the cross-entropy of the next token as its loss. Parameters
/// are `embedding.weight`, `rnn.weight_ih_lN` and so on of layer N, `head.weight` and `head.bias`.
/// Each layer is a block, at which pipelines are cut. A stateful model carries its inputs `h_l0`
/// (b, width), and `c_l0` of an LSTM, and so on of layer N.
///
/// # Errors
/// Returns no `ShapeError` if all sizes are above 0.
pub fn rnn(config: &RnnConfig) -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    b.block("embed");
    let tokens = b.input_ids("tokens", &[1, config.context]);
    let targets = b.input_ids("targets", &[1, config.context]);
    let x = hidden(&mut b, config, tokens)?;
    let logits = head(&mut b, config, x)?;
    b.output("logits", logits);
    b.cross_entropy_loss(logits, targets)?;
    Ok(b.finish())
}

/// Builds the forward graph of the same model that generation runs: `logits` (b, 1, v) of one
/// position per sample, with the inputs `tokens` (b, t) and `position` (b, 1, t), which is 1 at the
/// position and 0 elsewhere. The graph of a stateful model has one time step, `tokens` (b, 1), and
/// carries its state.
///
/// # Errors
/// Returns no `ShapeError` if all sizes are above 0.
pub fn next_token_rnn(config: &RnnConfig) -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    b.block("embed");
    let steps = if config.stateful { 1 } else { config.context };
    let tokens = b.input_ids("tokens", &[1, steps]);
    let mut x = hidden(&mut b, config, tokens)?;
    if !config.stateful {
        x = language::row_at_position(&mut b, x)?;
    }
    let logits = head(&mut b, config, x)?;
    b.output("logits", logits);
    Ok(b.finish())
}

/// Adds all layers and returns the hidden values `(b, t, width)` of the last, in the block of the
/// head.
fn hidden(b: &mut Builder, config: &RnnConfig, tokens: TensorId) -> BuildResult {
    let c = config.width;
    let columns = config.cell.gates() * c;
    let table = [config.vocabulary, c];
    let table = b.parameter("embedding.weight", &table, Init::Normal { std: 1.0 });
    let mut x = b.embedding(tokens, table)?;
    let init = Init::Uniform { bound: (c as f32).sqrt().recip() };
    for layer in 0..config.layers {
        b.block(&format!("rnn.{layer}"));
        if layer > 0 {
            x = b.dropout(x, config.dropout)?;
        }
        let parameters = [
            b.parameter(&format!("rnn.weight_ih_l{layer}"), &[columns, c], init),
            b.parameter(&format!("rnn.weight_hh_l{layer}"), &[columns, c], init),
            b.parameter(&format!("rnn.bias_ih_l{layer}"), &[columns], init),
            b.parameter(&format!("rnn.bias_hh_l{layer}"), &[columns], init),
        ];
        x = recurrent(b, config, x, parameters, layer)?;
    }
    b.block("head");
    Ok(x)
}

/// Adds a recurrent layer and returns its values `(b, t, width)`.
fn recurrent(
    b: &mut Builder,
    config: &RnnConfig,
    x: TensorId,
    parameters: [TensorId; 4],
    layer: usize,
) -> BuildResult {
    if !config.stateful {
        return Ok(b.recurrent(config.cell, x, parameters, &[])?.0);
    }
    let mut state = Vec::new();
    for name in ["h", "c"].iter().take(config.cell.states()) {
        state.push(b.input(&format!("{name}_l{layer}"), &[1, config.width]));
    }
    let (y, cells) = b.recurrent(config.cell, x, parameters, &state)?;
    for (before, values) in state.into_iter().zip([Some(y), cells].into_iter().flatten()) {
        let after = b.last_step(values)?;
        b.carry(before, after)?;
    }
    Ok(y)
}

fn head(b: &mut Builder, config: &RnnConfig, x: TensorId) -> BuildResult {
    let init = Init::Uniform { bound: (config.width as f32).sqrt().recip() };
    let weight = b.parameter("head.weight", &[config.vocabulary, config.width], init);
    let bias = b.parameter("head.bias", &[config.vocabulary], init);
    b.linear(x, weight, Some(bias))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PyTorch 2: the number of parameters of `Embedding(65, 32)`, `LSTM(32, 32, 2)` or
    /// `GRU(32, 32, 2)`, and `Linear(32, 65)`.
    #[test]
    fn parameter_counts_are_those_of_pytorch() {
        for (cell, expected) in [(Cell::Lstm, 21_121), (Cell::Gru, 16_897)] {
            for stateful in [false, true] {
                let config = config(cell, stateful);
                assert_eq!(rnn(&config).unwrap().parameter_count(), expected);
                assert_eq!(next_token_rnn(&config).unwrap().parameter_count(), expected);
            }
        }
    }

    fn config(cell: Cell, stateful: bool) -> RnnConfig {
        let (vocabulary, context, layers, width) = (65, 8, 2, 32);
        RnnConfig { vocabulary, context, layers, width, cell, dropout: 0.1, stateful }
    }

    #[test]
    fn a_stateful_model_carries_the_state_of_each_layer() {
        let carried = |cell, stateful| {
            let graph = rnn(&config(cell, stateful)).unwrap();
            let name = |id| graph.inputs.iter().find(|(_, input)| *input == id).unwrap().0.clone();
            let names: Vec<_> = graph.carried.iter().map(|carried| name(carried.input)).collect();
            names.join(" ")
        };
        assert_eq!(carried(Cell::Lstm, false), "");
        assert_eq!(carried(Cell::Lstm, true), "h_l0 c_l0 h_l1 c_l1");
        assert_eq!(carried(Cell::Gru, true), "h_l0 h_l1");
    }
}
