//! Inputs and loss of models of pictures.

use super::MlpLoss;
use crate::ShapeError;
use crate::builder::{BuildResult, Builder};
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
    // With one channel, the order of the elements is the same.
    if c == 1 { b.reshape(x, &[1, h, w, c]) } else { b.permute(x, &[0, 2, 3, 1]) }
}

/// Returns pictures (b, h, w, c) as rows (b, c h w), in PyTorch's order of elements.
pub(super) fn flatten(b: &mut Builder, x: TensorId) -> BuildResult {
    let [_, h, w, c] = *b.shape(x).dims() else { return Ok(x) };
    let planes = if h * w == 1 { x } else { b.permute(x, &[0, 3, 1, 2])? };
    b.reshape(planes, &[1, c * h * w])
}

/// Makes `x` (b, outputs) the output `outputs`, and adds its loss to the graph, with the input
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
