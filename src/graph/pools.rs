//! The builder's poolings and the upsampling of pictures.

use super::Builder;
use super::builder::BuildResult;
use super::op::Op;
use super::pictures::{Pool2dOptions, PoolDivisor, by};
use super::resizing::Interpolation;
use potluck_core::TensorId;

impl Builder {
    /// Computes the maximum of each window of pictures `x (b, h, w, c)`: `(b, oh, ow, c)`, with
    /// `oh = (h + 2 padding - dilation (kernel - 1) - 1) / stride + 1`, rounded down, or up with
    /// `ceil_mode`, and `ow` alike. A window with a NaN has the value NaN. Padding is never the
    /// maximum; for one that differs from side to side, see [`Builder::pad`].
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) if the windows do not fit.
    pub fn max_pool2d(&mut self, x: TensorId, options: Pool2dOptions) -> BuildResult {
        self.apply(Op::MaxPool2d(options), &[x])
    }

    /// Computes the mean of each window of pictures `x (b, h, w, c)`, in which padding counts as
    /// zeros: `(b, oh, ow, c)`, of the size that [`Builder::max_pool2d`] has.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) as [`Builder::max_pool2d`].
    pub fn avg_pool2d(&mut self, x: TensorId, options: Pool2dOptions) -> BuildResult {
        self.avg_pool2d_over(x, options, PoolDivisor::Padded)
    }

    /// Computes the sum of each window of pictures `x (b, h, w, c)` over a divisor: `(b, oh, ow,
    /// c)`, of the size that [`Builder::max_pool2d`] has.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) as [`Builder::max_pool2d`], and for a divisor
    /// that is 0 or not finite.
    pub fn avg_pool2d_over(
        &mut self,
        x: TensorId,
        options: Pool2dOptions,
        divisor: PoolDivisor,
    ) -> BuildResult {
        let mean = self.apply(Op::AvgPool2d(options), &[x])?;
        let places = (options.kernel[0] * options.kernel[1]) as f32;
        let size = [self.shape(x).dims()[1], self.shape(x).dims()[2]];
        let dims = self.shape(mean).dims()[1..].to_vec();
        let counts = [0, 1].map(|axis| options.places(axis, size[axis], dims[axis], divisor));
        if let PoolDivisor::Number(divisor) = divisor {
            if !divisor.is_normal() || !(places / divisor).is_finite() {
                let why = format!("nothing is divided by {divisor}");
                return Err(self.refused("avg_pool2d", &[x], why));
            }
            return self.scale(mean, places / divisor);
        }
        if counts.iter().zip(options.kernel).all(|(at, all)| at.iter().all(|n| *n == all)) {
            return Ok(mean);
        }
        let mut shares = Vec::with_capacity(counts[0].len() * counts[1].len() * dims[2]);
        for rows in &counts[0] {
            for columns in &counts[1] {
                let count = (*rows * *columns) as f32;
                shares.extend(std::iter::repeat_n(places / count, dims[2]));
            }
        }
        let name = format!("avg_pool2d{options} {divisor:?} of {} {}", by(size), dims[2]);
        let shares = self.shared_constant(&name, &dims, shares);
        self.mul(mean, shares)
    }

    /// Computes the maximum of each window of sequences `x (b, t, c)`: `(b, ot, c)`, as
    /// [`Builder::max_pool2d`] of pictures of one row. Of the pairs in the options, the second
    /// entries count.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) if the windows do not fit.
    pub fn max_pool1d(&mut self, x: TensorId, options: Pool2dOptions) -> BuildResult {
        let row = self.row_of_sequence("max_pool1d", x)?;
        let y = self.max_pool2d(row, in_a_row(options))?;
        self.sequence_of_row(y)
    }

    /// Computes the sum of each window of sequences `x (b, t, c)` over a divisor: `(b, ot, c)`, as
    /// [`Builder::avg_pool2d_over`] of pictures of one row. Of the pairs in the options, the second
    /// entries count.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) as [`Builder::avg_pool2d_over`].
    pub fn avg_pool1d(
        &mut self,
        x: TensorId,
        options: Pool2dOptions,
        divisor: PoolDivisor,
    ) -> BuildResult {
        let row = self.row_of_sequence("avg_pool1d", x)?;
        let y = self.avg_pool2d_over(row, in_a_row(options), divisor)?;
        self.sequence_of_row(y)
    }

    /// Computes the means of pictures `x (b, h, w, c)` over a grid of `size` windows:
    /// `(b, size[0], size[1], c)`, as PyTorch's `AdaptiveAvgPool2d`. Where the sizes do not divide
    /// the pictures' sizes, it is a product with matrices: [`Interpolation::Area`].
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) if `x` is not `(b, h, w, c)`, or a size is 0.
    pub fn adaptive_avg_pool2d(&mut self, x: TensorId, size: [usize; 2]) -> BuildResult {
        let [_, h, w, _] = *self.shape(x).dims() else {
            let why = "pictures are (b, h, w, c)".into();
            return Err(self.refused("adaptive_avg_pool2d", &[x], why));
        };
        let are_even = [h, w].iter().zip(size).all(|(all, size)| all.is_multiple_of(size));
        if size.contains(&0) || !are_even {
            return self.interpolate(x, &[1, 2], &size, Interpolation::Area);
        }
        let kernel = [h / size[0], w / size[1]];
        self.avg_pool2d(x, Pool2dOptions { kernel, stride: kernel, ..Pool2dOptions::new(1) })
    }

    /// Repeats each pixel of pictures `x (b, h, w, c)` by a factor down and one across: PyTorch's
    /// `interpolate` with `mode="nearest"` and whole scale factors.
    ///
    /// # Errors
    /// Returns [`ShapeError`](crate::ShapeError) if `x` is not `(b, h, w, c)`, or a factor is 0.
    pub fn upsample_nearest(&mut self, x: TensorId, factors: [usize; 2]) -> BuildResult {
        let [b, h, w, c] = *self.shape(x).dims() else {
            let why = "pictures are (b, h, w, c)".into();
            return Err(self.refused("upsample_nearest", &[x], why));
        };
        let [down, across] = factors;
        let apart = self.reshape(x, &[b, h, 1, w, 1, c])?;
        let repeated = self.broadcast_to(apart, &[b, h, down, w, across, c])?;
        self.reshape(repeated, &[b, h * down, w * across, c])
    }

    /// Computes the mean of each channel over all places of pictures `x (b, h, w, c)`: `(b, c)`.
    pub fn global_avg_pool(&mut self, x: TensorId) -> BuildResult {
        let places: usize = self.shape(x).dims().iter().skip(1).take(2).product();
        let sum = self.apply(Op::Sum { first: 1, last: 2 }, &[x])?;
        self.scale(sum, 1.0 / places as f32)
    }
}

/// Options of a pooling of pictures of one row.
fn in_a_row(options: Pool2dOptions) -> Pool2dOptions {
    let Pool2dOptions { kernel, stride, padding, dilation, ceil_mode } = options;
    Pool2dOptions {
        kernel: [1, kernel[1]],
        stride: [1, stride[1]],
        padding: [0, padding[1]],
        dilation: [1, dilation[1]],
        ceil_mode,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_said() {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 4, 6, 3]);
        let y = b.adaptive_avg_pool2d(x, [2, 4]).unwrap();
        assert_eq!(b.shape(y).to_string(), "(b, 2, 4, 3)");
        assert!(b.adaptive_avg_pool2d(x, [0, 2]).is_err());
        assert!(b.upsample_nearest(x, [2, 0]).is_err());
        let options = Pool2dOptions::new(2);
        let error = b.avg_pool2d_over(x, options, PoolDivisor::Number(0.0)).unwrap_err();
        assert!(error.why.contains("divided by 0"), "{error}");
        let error = b.max_pool1d(x, options).unwrap_err().to_string();
        assert_eq!(error, "max_pool1d of (b, 4, 6, 3): sequences are (b, t, c)");
    }

    /// Whole windows are divided by the kernel, and no constant is made.
    #[test]
    fn whole_windows_need_no_divisors() {
        let plain = Pool2dOptions::new(2);
        let padded = plain.with_padding(1);
        for (options, divisor, constants) in [
            (plain, PoolDivisor::Inside, 0),
            (padded.with_ceil_mode(true), PoolDivisor::Padded, 0),
            (padded, PoolDivisor::Inside, 1),
        ] {
            let mut b = Builder::new();
            let x = b.input("x", &[1, 4, 6, 3]);
            b.avg_pool2d_over(x, options, divisor).unwrap();
            assert_eq!(b.finish().states.len(), constants, "{options:?}");
        }
    }
}
