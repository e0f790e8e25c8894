//! Parts that models of pictures share: their inputs, their loss, and layers with the initial
//! values of PyTorch's `Conv2d` and `Linear`.

use super::MlpLoss;
use crate::builder::{BuildResult, Builder};
use crate::{Conv2dOptions, Init, ShapeError};
use potluck_core::TensorId;

/// Sizes of the pictures and outputs of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct PictureSizes {
    /// Channels, height and width of a picture.
    pub picture: [usize; 3],
    /// Classes, or values per picture.
    pub outputs: usize,
    pub loss: MlpLoss,
}

/// Adds the input `inputs` (b, c, h, w), in the order of data sets, and returns it with channels
/// last: (b, h, w, c).
pub(super) fn input(b: &mut Builder, sizes: &PictureSizes) -> BuildResult {
    let [c, h, w] = sizes.picture;
    let x = b.input("inputs", &[1, c, h, w]);
    // The elements of pictures of one channel are in the same order.
    if c == 1 { b.reshape(x, &[1, h, w, c]) } else { b.permute(x, &[0, 2, 3, 1]) }
}

/// Returns pictures (b, h, w, c) as rows (b, c h w), in PyTorch's order of elements.
pub(super) fn flatten(b: &mut Builder, x: TensorId) -> BuildResult {
    let [_, h, w, c] = *b.shape(x).dims() else { return Ok(x) };
    let planes = if h * w == 1 { x } else { b.permute(x, &[0, 3, 1, 2])? };
    b.reshape(planes, &[1, c * h * w])
}

/// Makes `x` (b, outputs) the output `outputs`, and its loss that of the graph, with the input
/// `targets`.
pub(super) fn finish(b: &mut Builder, sizes: &PictureSizes, x: TensorId) -> Result<(), ShapeError> {
    b.output("outputs", x);
    match sizes.loss {
        MlpLoss::CrossEntropy => {
            let targets = b.input_ids("targets", &[1]);
            b.cross_entropy_loss(x, targets)?;
        }
        MlpLoss::SquaredError => {
            let targets = b.input("targets", &[1, sizes.outputs]);
            b.squared_error_loss(x, targets)?;
        }
    }
    Ok(())
}

/// Adds a convolution with a bias: `NAME.weight` (o, c, k, k) and `NAME.bias` (o), uniform up to
/// one over the root of the number of inputs of an output.
pub(super) fn conv(
    b: &mut Builder,
    name: &str,
    x: TensorId,
    (outputs, kernel): (usize, usize),
) -> BuildResult {
    let channels = b.shape(x).last();
    let bound = ((channels * kernel * kernel) as f32).sqrt().recip();
    let init = Init::Uniform { bound };
    let dims = [outputs, channels, kernel, kernel];
    let weight = b.parameter(&format!("{name}.weight"), &dims, init);
    let bias = b.parameter(&format!("{name}.bias"), &[outputs], init);
    b.conv2d(x, weight, Some(bias), Conv2dOptions::default().with_padding(kernel / 2))
}

/// Adds a linear layer of rows: `NAME.weight` (o, c) and `NAME.bias` (o), initialized alike.
pub(super) fn linear(b: &mut Builder, name: &str, x: TensorId, outputs: usize) -> BuildResult {
    let inputs = b.shape(x).last();
    let init = Init::Uniform { bound: (inputs as f32).sqrt().recip() };
    let weight = b.parameter(&format!("{name}.weight"), &[outputs, inputs], init);
    let bias = b.parameter(&format!("{name}.bias"), &[outputs], init);
    b.linear(x, weight, Some(bias))
}
