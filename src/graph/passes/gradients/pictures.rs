//! Gradient rules of convolutions and poolings.

use super::backward::Backward;
use crate::Node;
use crate::op::Op;
use crate::pictures::{Conv2dOptions, Pool2dOptions};
use crate::shapes::ShapeError;
use potluck_core::TensorId;

pub fn conv2d(
    b: &mut Backward,
    options: Conv2dOptions,
    x: &[TensorId],
    dy: TensorId,
) -> Result<(), ShapeError> {
    let size = picture_size(b, x[0]);
    let weight = b.graph.tensor(x[1]).shape.dims();
    let kernel = [weight[2], weight[3]];
    b.accumulate_op(x[0], Op::Conv2dInputGrad { options, size }, &[dy, x[1]])?;
    b.accumulate_op(x[1], Op::Conv2dWeightGrad { options, kernel }, &[x[0], dy])
}

/// Adds the gradients of a transposed convolution, which is itself the gradient of a convolution by
/// its pictures: linear in both, with the convolution as its transpose.
pub fn conv2d_input_grad(
    b: &mut Backward,
    options: Conv2dOptions,
    x: &[TensorId],
    dy: TensorId,
) -> Result<(), ShapeError> {
    let weight = b.graph.tensor(x[1]).shape.dims();
    let kernel = [weight[2], weight[3]];
    b.accumulate_op(x[0], Op::Conv2d(options), &[dy, x[1]])?;
    b.accumulate_op(x[1], Op::Conv2dWeightGrad { options, kernel }, &[dy, x[0]])
}

pub fn max_pool2d(
    b: &mut Backward,
    options: Pool2dOptions,
    node: &Node,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let x = node.inputs[0];
    let places = node.outputs[1];
    let size = picture_size(b, x);
    b.accumulate_op(x, Op::MaxPool2dGrad { options, size }, &[places, dy])
}

pub fn avg_pool2d(
    b: &mut Backward,
    options: Pool2dOptions,
    x: TensorId,
    dy: TensorId,
) -> Result<(), ShapeError> {
    let size = picture_size(b, x);
    b.accumulate_op(x, Op::AvgPool2dGrad { options, size }, &[dy])
}

/// Height and width of pictures `(b, h, w, c)`.
fn picture_size(b: &Backward, tensor: TensorId) -> [usize; 2] {
    let dims = b.graph.tensor(tensor).shape.dims();
    [dims[1], dims[2]]
}
