//! A convolutional network like LeNet-5 (LeCun et al. 1998): convolutions with poolings between
//! them, then linear layers.

use super::pictures::{PictureSizes, finish, flatten, input};
use crate::nn::{conv2d, linear};
use crate::{Builder, Conv2dOptions, Graph, Pool2dOptions, ShapeError, Unary};

/// Rows and columns of the kernel of each convolution.
const KERNEL: usize = 5;

/// Hyperparameters of a convolutional network.
#[derive(Clone, Debug, PartialEq)]
pub struct CnnConfig {
    pub sizes: PictureSizes,
    /// Output channels of each convolution, after which a pooling halves height and width.
    pub channels: Vec<usize>,
    /// Widths of the hidden linear layers.
    pub hidden: Vec<usize>,
    pub activation: Unary,
    /// Probability with which training sets an activation of a hidden linear layer to zero.
    pub dropout: f32,
}

/// Builds the graph of a convolutional network with inputs `inputs` (b, c, h, w) and `targets`, and
/// the output `outputs` (b, o). Parameters are `convN.weight` (o, c, 5, 5) and `convN.bias`, and
/// `fcN.weight` (o, i) and `fcN.bias`, N from 1, initialized as PyTorch's `Conv2d` and `Linear`.
/// Convolutions keep the size of pictures, and poolings halve it. Each layer is a block, at which
/// pipelines are cut.
///
/// # Errors
/// Returns a `ShapeError` if a picture is halved to nothing.
pub fn cnn(config: &CnnConfig) -> Result<Graph, ShapeError> {
    let mut b = Builder::new();
    b.block("inputs");
    let mut x = input(&mut b, &config.sizes)?;
    for (index, channels) in config.channels.iter().enumerate() {
        let name = format!("conv{}", index + 1);
        b.block(&name);
        let options = Conv2dOptions::default().with_padding(KERNEL / 2);
        x = conv2d(&mut b, &name, x, [*channels, KERNEL], options)?;
        x = b.unary(x, config.activation)?;
        x = b.max_pool2d(x, Pool2dOptions::new(2))?;
    }
    x = flatten(&mut b, x)?;
    for (index, width) in config.hidden.iter().enumerate() {
        let name = format!("fc{}", index + 1);
        b.block(&name);
        x = linear(&mut b, &name, x, *width)?;
        x = b.unary(x, config.activation)?;
        x = b.dropout(x, config.dropout)?;
    }
    let name = format!("fc{}", config.hidden.len() + 1);
    b.block(&name);
    x = linear(&mut b, &name, x, config.sizes.outputs)?;
    finish(&mut b, &config.sizes, x)?;
    Ok(b.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::MlpLoss;
    use crate::{ActivationFormat, ModelGraph, PassKind};

    /// PyTorch 2: the sum of `p.numel()` of `Conv2d(1, 6, 5)`, `Conv2d(6, 16, 5)`,
    /// `Linear(784, 120)`, `Linear(120, 84)` and `Linear(84, 10)`.
    #[test]
    fn parameter_counts_are_those_of_pytorch() {
        let sizes = PictureSizes { picture: [1, 28, 28], outputs: 10, loss: MlpLoss::CrossEntropy };
        let config = CnnConfig {
            sizes,
            channels: vec![6, 16],
            hidden: vec![120, 84],
            activation: Unary::Relu,
            dropout: 0.0,
        };
        let count = 6 * 26 + 16 * 151 + 120 * 785 + 84 * 121 + 10 * 85;
        assert_eq!(cnn(&config).unwrap().parameter_count(), count);
        let small = PictureSizes { picture: [1, 3, 3], ..config.sizes.clone() };
        assert!(cnn(&CnnConfig { sizes: small, ..config }).is_err());
    }

    /// With activations in bf16: places of the second pool depend on the result of the first block,
    /// which therefore goes on in f32, and the second block packs its own copy. What is behind the
    /// last pool goes on in words.
    #[test]
    fn what_places_are_computed_from_is_exact_between_blocks() {
        let config = CnnConfig {
            sizes: PictureSizes { picture: [1, 8, 8], outputs: 4, loss: MlpLoss::CrossEntropy },
            channels: vec![2, 4],
            hidden: vec![6],
            activation: Unary::Relu,
            dropout: 0.0,
        };
        let model = ModelGraph::training(cnn(&config).unwrap(), true).unwrap();
        let model = model.with_activations(ActivationFormat::Bf16);
        for model in [model.clone(), model.with_merged_backward()] {
            let graph = model.whole();
            let mut forward = Vec::new();
            for node in graph.nodes.iter().filter(|node| node.phase == PassKind::Forward) {
                if node.op.converts_format() {
                    let source = &graph.tensor(node.inputs[0]).name;
                    forward.push(format!("{} {} {source}", node.block, node.op));
                }
            }
            // What is in front of each ReLU, the input of block 2, and what goes on.
            let expected = [
                "1 pack_bf16 conv1.add",
                "2 pack_bf16 conv1.max_pool2d",
                "2 pack_bf16 conv2.add",
                "2 pack_bf16 conv2.permute",
                "3 unpack_bf16 conv2.permute in bf16",
                "3 pack_bf16 fc1.add",
                "3 pack_bf16 fc1.relu",
                "4 unpack_bf16 fc1.relu in bf16",
            ];
            assert_eq!(forward, expected);
        }
    }
}
