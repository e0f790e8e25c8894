//! A multilayer perceptron.

use crate::{Builder, Graph, ParameterSplit, ShapeError, SplitUnit, Unary, nn};

/// Loss of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpLoss {
    /// Cross-entropy; `targets` (b) are class indices.
    CrossEntropy,
    /// Mean squared error; `targets` (b, out) are values.
    SquaredError,
}

/// Hyperparameters of an MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpConfig {
    /// Widths of the inputs, the hidden layers and the outputs.
    pub widths: Vec<usize>,
    pub activation: Unary,
    /// Probability with which training sets an activation of a hidden layer to zero.
    pub dropout: f32,
    pub loss: MlpLoss,
}

/// Tensor parallelism of an MLP whose last layer has the number `last` (Shoeybi et al. 2019): in
/// each pair of layers, the first is divided by its output columns and the second by its inputs. A
/// last layer without a second one is whole.
fn split(last: usize, name: &str) -> Option<ParameterSplit> {
    let (layer, what) = name.strip_prefix("layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    match (layer % 2, what) {
        (0, _) if layer < last => Some(ParameterSplit::new(0, SplitUnit::Columns)),
        (1, "weight") => Some(ParameterSplit::new(1, SplitUnit::Columns)),
        _ => None,
    }
}

/// Builds the graph of an MLP with inputs `inputs` (b, in) and `targets`, and the output
/// `outputs` (b, out), `in` and `out` being the first and the last width. Parameters are
/// `layers.N.weight` (out, in) and `layers.N.bias` (out) of each layer, initialised uniformly up
/// to `1/sqrt(in)`, as PyTorch's `Linear` is. Each layer is a block, at which pipelines are cut.
///
/// # Errors
/// Returns a `ShapeError` if there are fewer than two widths, or if one is 0.
pub fn mlp(config: &MlpConfig) -> Result<Graph, ShapeError> {
    if config.widths.len() < 2 {
        let inputs = format!("widths {:?}", config.widths);
        let why = "wants at least two: the width of the inputs and that of the outputs";
        return Err(ShapeError { op: "mlp".into(), inputs, why: why.into() });
    }
    let mut b = Builder::new();
    let last = config.widths.len() - 2;
    let mut x = b.input("inputs", &[1, config.widths[0]]);
    for (layer, pair) in config.widths.windows(2).enumerate() {
        b.block(&format!("layers.{layer}"));
        x = nn::linear(&mut b, &format!("layers.{layer}"), x, pair[1])?;
        if layer < last {
            x = b.unary(x, config.activation)?;
            x = b.dropout(x, config.dropout)?;
        }
    }
    b.output("outputs", x);
    b.split_parameters(|name| split(last, name));
    match config.loss {
        MlpLoss::CrossEntropy => {
            let targets = b.input_ids("targets", &[1]);
            b.cross_entropy_loss(x, targets)?;
        }
        MlpLoss::SquaredError => {
            let targets = b.input("targets", &[1, config.widths[last + 1]]);
            b.squared_error_loss(x, targets)?;
        }
    }
    Ok(b.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mlp_of_fewer_than_two_widths_or_of_a_width_of_0_is_refused() {
        for loss in [MlpLoss::CrossEntropy, MlpLoss::SquaredError] {
            let of = |widths: &[usize]| {
                let widths = widths.to_vec();
                mlp(&MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss })
            };
            for widths in [&[][..], &[3]] {
                let told = of(widths).unwrap_err().to_string();
                assert!(told.contains("wants at least two"), "{told}");
            }
            assert!(of(&[3, 0]).is_err() && of(&[0, 2]).is_err());
            assert!(of(&[3, 2]).is_ok());
        }
    }
}
