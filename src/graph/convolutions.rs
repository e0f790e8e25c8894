//! The builder's convolutions beside [`Builder::conv2d`]: transposed convolutions, convolutions of
//! sequences, and explicit padding, composed of other ops.

use super::Builder;
use super::builder::BuildResult;
use super::op::Op;
use super::pictures::Conv2dOptions;
use potluck_core::TensorId;

impl Builder {
    /// Computes the transposed convolution of pictures `x (b, h, w, c)` with `weight (c, o/groups,
    /// kh, kw)` and an optional `bias (o)`: `(b, oh, ow, o)`, with `oh = (h - 1) stride - 2 padding
    /// + dilation (kh - 1) + output_padding + 1`, and `ow` alike. It is the gradient of a
    /// convolution by its pictures: PyTorch's `ConvTranspose2d`.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) if the weight does not fit, an output padding is
    /// neither smaller than the stride nor than the dilation, or the padding leaves nothing.
    pub fn conv_transpose2d(
        &mut self,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        options: Conv2dOptions,
        output_padding: [usize; 2],
    ) -> BuildResult {
        let why = match (self.shape(x).dims(), self.shape(weight).dims()) {
            ([_, h, w, c], [channels, _, kh, kw]) if c == channels => {
                options.transposed_size([*h, *w], [*kh, *kw], output_padding)
            }
            ([_, _, _, c], _) => Err(format!(
                "wants weight (in, out/groups, kh, kw) with in = {c}, the channels of the pictures"
            )),
            _ => Err("pictures are (b, h, w, c)".into()),
        };
        let size = match why {
            Ok(size) => size,
            Err(why) => return Err(self.refused("conv_transpose2d", &[x, weight], why)),
        };
        // Output padding of a stride or more is an additional row or column of zeros in `x`.
        let mut wide = x;
        for (axis, (more, stride)) in output_padding.iter().zip(options.stride).enumerate() {
            let further = more / stride;
            wide = self.pad(wide, 1 + axis, [0, further], 0.0)?;
        }
        let y = self.apply(Op::Conv2dInputGrad { options, size }, &[wide, weight])?;
        self.with_bias(y, bias)
    }

    /// Computes the convolution of sequences `x (b, t, c)` with `weight (o, c/groups, k)` and an
    /// optional `bias (o)`: `(b, ot, o)`, as [`Builder::conv2d`] of pictures of one row. Of the
    /// pairs in the options, the second entries count.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) as [`Builder::conv2d`].
    pub fn conv1d(
        &mut self,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        options: Conv2dOptions,
    ) -> BuildResult {
        let row = self.row_of_sequence("conv1d", x)?;
        let kernel = self.row_of_kernel("conv1d", "(o, c/groups, k)", weight)?;
        let y = self.conv2d(row, kernel, bias, in_a_row(options))?;
        self.sequence_of_row(y)
    }

    /// Computes the transposed convolution of sequences `x (b, t, c)` with `weight (c, o/groups,
    /// k)` and an optional `bias (o)`: `(b, ot, o)`, as [`Builder::conv_transpose2d`] of pictures
    /// of one row. Of the pairs in the options, the second entries count.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) as [`Builder::conv_transpose2d`].
    pub fn conv_transpose1d(
        &mut self,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        options: Conv2dOptions,
        output_padding: usize,
    ) -> BuildResult {
        let row = self.row_of_sequence("conv_transpose1d", x)?;
        let kernel = self.row_of_kernel("conv_transpose1d", "(in, out/groups, k)", weight)?;
        let y = self.conv_transpose2d(row, kernel, bias, in_a_row(options), [0, output_padding])?;
        self.sequence_of_row(y)
    }

    /// Computes a convolution of pictures as [`Builder::conv2d`], with the padding that keeps their
    /// size: PyTorch's `padding="same"`. An odd number of rows or columns is padded with one more
    /// below or on the right. The padding in the options is ignored.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) with a stride other than 1, and as
    /// [`Builder::conv2d`].
    pub fn conv2d_same(
        &mut self,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        options: Conv2dOptions,
    ) -> BuildResult {
        if options.stride != [1; 2] {
            let why = "pictures keep their size with a stride of 1 only";
            return Err(self.refused("conv2d_same", &[x, weight], why.into()));
        }
        let mut padded = x;
        let mut padding = [0; 2];
        if let [.., kh, kw] = *self.shape(weight).dims() {
            for (axis, kernel) in [kh, kw].into_iter().enumerate() {
                let all = options.dilation[axis].saturating_mul(kernel.saturating_sub(1));
                padding[axis] = all / 2;
                padded = self.pad(padded, 1 + axis, [0, all % 2], 0.0)?;
            }
        }
        self.conv2d(padded, weight, bias, Conv2dOptions { padding, ..options })
    }

    /// Computes a convolution of sequences as [`Builder::conv1d`] that keeps their length, as
    /// [`Builder::conv2d_same`] does the size of pictures.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) as [`Builder::conv2d_same`].
    pub fn conv1d_same(
        &mut self,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        options: Conv2dOptions,
    ) -> BuildResult {
        let row = self.row_of_sequence("conv1d_same", x)?;
        let kernel = self.row_of_kernel("conv1d_same", "(o, c/groups, k)", weight)?;
        let y = self.conv2d_same(row, kernel, bias, in_a_row(options))?;
        self.sequence_of_row(y)
    }

    /// Adds `padding` entries of a value before and behind the entries of an axis: PyTorch's
    /// `F.pad` with a constant. Padded with minus infinity, a window has its maximum inside.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) if there is no such axis, if it is the batch's, or
    /// if the value is NaN.
    pub fn pad(
        &mut self,
        x: TensorId,
        axis: usize,
        padding: [usize; 2],
        value: f32,
    ) -> BuildResult {
        let [before, after] = padding;
        if padding == [0; 2] {
            return Ok(x);
        }
        if value.is_nan() {
            return Err(self.refused(
                "pad",
                &[x],
                "wants a number to pad with, and not NaN".into(),
            ));
        }
        if value == 0.0 {
            return self.apply(Op::Pad { axis, before, after }, &[x]);
        }
        let shape = self.shape(x).clone();
        let name = format!("pad.{value}");
        let scalar = self.shared_constant(&name, &[], vec![value]);
        let mut parts = Vec::new();
        for (length, is_before) in [(before, true), (after, false)] {
            if length > 0 && axis < shape.rank() {
                let mut dims = shape.dims().to_vec();
                dims[axis] = length;
                parts.push(self.repeated(scalar, &shape.with_dims(&dims))?);
            }
            if is_before {
                parts.push(x);
            }
        }
        self.concat(&parts, axis)
    }

    /// Returns sequences `(b, t, c)` as pictures `(b, 1, t, c)`.
    pub(super) fn row_of_sequence(&mut self, op: &str, x: TensorId) -> BuildResult {
        let [b, t, c] = *self.shape(x).dims() else {
            return Err(self.refused(op, &[x], "sequences are (b, t, c)".into()));
        };
        self.reshape(x, &[b, 1, t, c])
    }

    /// Returns pictures `(b, 1, t, c)` as sequences `(b, t, c)`.
    pub(super) fn sequence_of_row(&mut self, y: TensorId) -> BuildResult {
        let dims = self.shape(y).dims().to_vec();
        self.reshape(y, &[dims[0], dims[2], dims[3]])
    }

    fn row_of_kernel(&mut self, op: &str, wanted: &str, weight: TensorId) -> BuildResult {
        let [first, second, k] = *self.shape(weight).dims() else {
            return Err(self.refused(op, &[weight], format!("wants weight {wanted}")));
        };
        self.reshape(weight, &[first, second, 1, k])
    }
}

/// Options of a convolution of pictures of one row.
fn in_a_row(options: Conv2dOptions) -> Conv2dOptions {
    let Conv2dOptions { stride, padding, dilation, groups } = options;
    Conv2dOptions {
        stride: [1, stride[1]],
        padding: [0, padding[1]],
        dilation: [1, dilation[1]],
        groups,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Init;

    #[test]
    fn sizes_are_those_of_pytorch() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 4, 5, 6]);
        let weight = b.parameter("weight", &[6, 2, 3, 2], Init::Zeros);
        let options = Conv2dOptions::default().with_stride(2).with_padding(1).with_groups(2);
        let y = b.conv_transpose2d(x, weight, None, options, [1, 0]).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 8, 8, 4)");
        let dilated = Conv2dOptions::default().with_dilation(3);
        let y = b.conv_transpose2d(x, weight, None, dilated, [2, 1]).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 12, 9, 2)");
        let weight = b.parameter("same", &[4, 6, 2, 3], Init::Zeros);
        let y = b.conv2d_same(x, weight, None, dilated).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 4, 5, 4)");
        let sequence = b.input("sequence", &[1, 9, 6]);
        let kernel = b.parameter("kernel", &[6, 3, 4], Init::Zeros);
        let y = b.conv1d(sequence, kernel, None, options).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 4, 6)");
        let y = b.conv_transpose1d(sequence, kernel, None, options, 1).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 19, 6)");
        let y = b.conv1d_same(sequence, kernel, None, options.with_stride(1)).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 9, 6)");
    }

    #[test]
    fn what_does_not_fit_is_said_in_terms_of_the_layer() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 4, 5, 6]);
        let weight = b.parameter("weight", &[2, 6, 3, 2], Init::Zeros);
        let plain = Conv2dOptions::default();
        let error = b.conv_transpose2d(x, weight, None, plain, [0; 2]).unwrap_err().to_string();
        assert_eq!(
            error,
            "conv_transpose2d of (b, 4, 5, 6), (2, 6, 3, 2): wants weight (in, out/groups, kh, kw) \
             with in = 6, the channels of the pictures"
        );
        let error = b.conv1d(x, weight, None, plain).unwrap_err().to_string();
        assert_eq!(error, "conv1d of (b, 4, 5, 6): sequences are (b, t, c)");
        let sequence = b.input("sequence", &[1, 9, 6]);
        let error = b.conv1d(sequence, weight, None, plain).unwrap_err().to_string();
        assert_eq!(error, "conv1d of (2, 6, 3, 2): wants weight (o, c/groups, k)");
        let error = b.conv2d_same(x, weight, None, plain.with_stride(2)).unwrap_err().to_string();
        assert!(error.contains("with a stride of 1 only"), "{error}");
        assert!(b.pad(x, 0, [1, 0], 2.0).is_err());
        assert!(b.pad(x, 4, [1, 0], 2.0).is_err());
        let y = b.pad(x, 2, [1, 2], f32::NEG_INFINITY).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 4, 8, 6)");
    }
}
