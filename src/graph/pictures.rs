//! Options of the ops on pictures, which are channels last `(b, h, w, c)`: strides, padding and the
//! sizes that follow from them.

use std::fmt;

/// Upper bound of a size, stride, padding or dilation: kernels count places in 32 bits.
pub(crate) const PICTURE_SIDE_MAX: usize = 1 << 16;

/// Largest number of places of a window or an axis whose index is a float, exact in f32.
pub(crate) const PLACES_MAX: usize = 1 << 24;

/// Options of a convolution, height first in each pair, with the meaning that they have in
/// PyTorch's `Conv2d`; by default stride and dilation 1, no padding, one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Conv2dOptions {
    /// Rows and columns from one window to the next.
    pub stride: [usize; 2],
    /// Rows of zeros above and below, columns of zeros on the left and the right.
    pub padding: [usize; 2],
    /// Rows and columns from one place of the kernel to the next.
    pub dilation: [usize; 2],
    /// Parts of the channels: output channels of a part see the input channels of that part.
    pub groups: usize,
}

impl Default for Conv2dOptions {
    fn default() -> Self {
        Self { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 }
    }
}

impl Conv2dOptions {
    /// Returns these options with a stride, the same in both directions.
    #[must_use]
    pub fn with_stride(self, stride: usize) -> Self {
        Self { stride: [stride; 2], ..self }
    }

    /// Returns these options with a padding, the same on all sides.
    #[must_use]
    pub fn with_padding(self, padding: usize) -> Self {
        Self { padding: [padding; 2], ..self }
    }

    /// Returns these options with a dilation, the same in both directions.
    #[must_use]
    pub fn with_dilation(self, dilation: usize) -> Self {
        Self { dilation: [dilation; 2], ..self }
    }

    /// Returns these options with a number of groups.
    #[must_use]
    pub fn with_groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// Returns the height and the width of the output for inputs of this size.
    ///
    /// # Errors
    /// Returns the reason if no output fits.
    pub fn output_size(&self, size: [usize; 2], kernel: [usize; 2]) -> Result<[usize; 2], String> {
        self.windows(kernel).count(size)
    }

    /// Returns the height and the width of the pictures of a transposed convolution of inputs of
    /// this size, with additional rows and columns at the end, as PyTorch's `ConvTranspose2d`.
    ///
    /// # Errors
    /// Returns the reason if no output fits.
    pub fn transposed_size(
        &self,
        size: [usize; 2],
        kernel: [usize; 2],
        output_padding: [usize; 2],
    ) -> Result<[usize; 2], String> {
        let windows = self.windows(kernel);
        windows.check(size)?;
        let most = [0, 1].map(|axis| self.stride[axis].max(self.dilation[axis]));
        if (0..2).any(|axis| output_padding[axis] >= most[axis]) {
            return Err(format!(
                "an output padding of {} must be smaller than the stride or the dilation, {}",
                by(output_padding),
                by(most)
            ));
        }
        let span = windows.span();
        let padded = [0, 1].map(|axis| {
            size[axis].saturating_sub(1) * self.stride[axis] + span[axis] + output_padding[axis]
        });
        if (0..2).any(|axis| padded[axis] <= 2 * self.padding[axis]) {
            let (padding, padded) = (by(self.padding), by(padded));
            return Err(format!("a padding of {padding} leaves nothing of pictures of {padded}"));
        }
        Ok([0, 1].map(|axis| padded[axis] - 2 * self.padding[axis]))
    }

    fn windows(&self, kernel: [usize; 2]) -> Windows {
        let Self { stride, padding, dilation, .. } = *self;
        Windows { kernel, stride, padding, dilation, ceil_mode: false }
    }
}

/// Options of a pooling, height first in each pair, with the meaning that they have in PyTorch's
/// `MaxPool2d` and `AvgPool2d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pool2dOptions {
    /// Rows and columns of a window.
    pub kernel: [usize; 2],
    /// Rows and columns from one window to the next.
    pub stride: [usize; 2],
    /// Rows and columns of padding on each side: at most half of a window.
    pub padding: [usize; 2],
    /// Rows and columns from one place of a window to the next.
    pub dilation: [usize; 2],
    /// True if a last window may reach beyond the padding, as long as it begins before.
    pub ceil_mode: bool,
}

impl Pool2dOptions {
    /// Creates the options of square windows side by side.
    pub fn new(kernel: usize) -> Self {
        Self {
            kernel: [kernel; 2],
            stride: [kernel; 2],
            padding: [0; 2],
            dilation: [1; 2],
            ceil_mode: false,
        }
    }

    /// Returns these options with a stride, the same in both directions.
    #[must_use]
    pub fn with_stride(self, stride: usize) -> Self {
        Self { stride: [stride; 2], ..self }
    }

    /// Returns these options with a padding, the same on all sides.
    #[must_use]
    pub fn with_padding(self, padding: usize) -> Self {
        Self { padding: [padding; 2], ..self }
    }

    /// Returns these options with a dilation, the same in both directions.
    #[must_use]
    pub fn with_dilation(self, dilation: usize) -> Self {
        Self { dilation: [dilation; 2], ..self }
    }

    /// Returns these options with windows that may reach beyond the padding, or not.
    #[must_use]
    pub fn with_ceil_mode(self, ceil_mode: bool) -> Self {
        Self { ceil_mode, ..self }
    }

    /// Returns the height and the width of the output for inputs of this size.
    ///
    /// # Errors
    /// Returns the reason if no output fits.
    pub fn output_size(&self, size: [usize; 2]) -> Result<[usize; 2], String> {
        let Self { kernel, stride, padding, dilation, ceil_mode } = *self;
        let windows = Windows { kernel, stride, padding, dilation, ceil_mode };
        windows.check(size)?;
        let span = windows.span();
        if (0..2).any(|axis| padding[axis] > span[axis] / 2) {
            let (padding, span) = (by(padding), by(span));
            return Err(format!("a padding of {padding} is more than half of {span} windows"));
        }
        if kernel[0].saturating_mul(kernel[1]) > PLACES_MAX {
            return Err(format!("windows of {} have more than {PLACES_MAX} places", by(kernel)));
        }
        let count = windows.count(size)?;
        if let Some(axis) = (0..2).find(|axis| windows.has_empty_one(*axis, size, count)) {
            let side = ["rows", "columns"][axis];
            return Err(format!("a window of {} {side} has none in the picture", kernel[axis]));
        }
        Ok(count)
    }

    /// Returns the number of rows or columns that a divisor counts in each of `count` windows over
    /// a picture of this size.
    pub(super) fn places(
        &self,
        axis: usize,
        size: usize,
        count: usize,
        divisor: PoolDivisor,
    ) -> Vec<usize> {
        let padding = self.padding[axis];
        let counted = match divisor {
            PoolDivisor::Inside => padding..padding + size,
            PoolDivisor::Padded | PoolDivisor::Number(_) => 0..2 * padding + size,
        };
        let mut counts = vec![0; count];
        for (window, count) in counts.iter_mut().enumerate() {
            let first = window * self.stride[axis];
            for tap in 0..self.kernel[axis] {
                if counted.contains(&(first + tap * self.dilation[axis])) {
                    *count += 1;
                }
            }
        }
        counts
    }

    /// Returns the rows or columns from the first to the last one of a window.
    pub fn span(&self) -> [usize; 2] {
        [0, 1].map(|axis| self.dilation[axis] * (self.kernel[axis] - 1) + 1)
    }
}

/// Number by which a pooling divides the sum of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PoolDivisor {
    /// Places of the window in the picture and its padding: PyTorch's `count_include_pad=True`.
    Padded,
    /// Places of the window in the picture: PyTorch's `count_include_pad=False`.
    Inside,
    /// The same for all windows: PyTorch's `divisor_override`.
    Number(f32),
}

/// Windows over a padded picture.
struct Windows {
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    ceil_mode: bool,
}

impl Windows {
    /// Checks that no size is 0, and that sums and products of the sizes do not overflow.
    fn check(&self, size: [usize; 2]) -> Result<(), String> {
        let Self { kernel, stride, padding, dilation, .. } = *self;
        let given = [("kernel", kernel), ("stride", stride), ("dilation", dilation)];
        if let Some((what, value)) = given.iter().find(|(_, value)| value.contains(&0)) {
            return Err(format!("a {what} of {} does not exist", by(*value)));
        }
        let all = [kernel, stride, padding, dilation, size];
        if let Some(large) = all.iter().flatten().find(|value| **value > PICTURE_SIDE_MAX) {
            return Err(format!(
                "{large} is more than {PICTURE_SIDE_MAX}, the most rows or columns"
            ));
        }
        Ok(())
    }

    /// Rows or columns from the first to the last one of a window.
    fn span(&self) -> [usize; 2] {
        [0, 1].map(|axis| self.dilation[axis] * (self.kernel[axis] - 1) + 1)
    }

    /// Number of windows down and across a picture.
    fn count(&self, size: [usize; 2]) -> Result<[usize; 2], String> {
        self.check(size)?;
        let Self { stride, padding, .. } = *self;
        let span = self.span();
        let padded = [0, 1].map(|axis| size[axis] + 2 * padding[axis]);
        let more = [0, 1].map(|axis| if self.ceil_mode { stride[axis] - 1 } else { 0 });
        if (0..2).any(|axis| span[axis] > padded[axis] + more[axis]) {
            return Err(format!(
                "windows of {} are larger than the padded picture of {}",
                by(span),
                by(padded)
            ));
        }
        Ok([0, 1].map(|axis| {
            let count = (padded[axis] + more[axis] - span[axis]) / stride[axis] + 1;
            let last = (count - 1) * stride[axis];
            // A window may not begin in the padding after the picture.
            if self.ceil_mode && count > 1 && last >= size[axis] + padding[axis] {
                return count - 1;
            }
            count
        }))
    }

    /// Returns true if all rows or columns of a dilated window are padding.
    fn has_empty_one(&self, axis: usize, size: [usize; 2], count: [usize; 2]) -> bool {
        let dilation = self.dilation[axis];
        if dilation <= 1 {
            return false;
        }
        let inside = self.padding[axis]..self.padding[axis] + size[axis];
        for window in 0..count[axis] {
            let first = window * self.stride[axis];
            if !(0..self.kernel[axis]).any(|tap| inside.contains(&(first + tap * dilation))) {
                return true;
            }
        }
        false
    }
}

/// Returns a height and a width as text: `3x5`.
pub(super) fn by([height, width]: [usize; 2]) -> String {
    format!("{height}x{width}")
}

/// Writes the options that differ from the default, each after a space.
impl fmt::Display for Conv2dOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let pairs = [
            ("stride", self.stride, default.stride),
            ("padding", self.padding, default.padding),
            ("dilation", self.dilation, default.dilation),
        ];
        for (name, value, default) in pairs {
            if value != default {
                write!(f, " {name} {}", by(value))?;
            }
        }
        if self.groups == 1 { Ok(()) } else { write!(f, " groups {}", self.groups) }
    }
}

/// Writes the window, and the options that differ from adjacent windows, each after a space.
impl fmt::Display for Pool2dOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " {}", by(self.kernel))?;
        if self.stride != self.kernel {
            write!(f, " stride {}", by(self.stride))?;
        }
        if self.padding != [0; 2] {
            write!(f, " padding {}", by(self.padding))?;
        }
        if self.dilation != [1; 2] {
            write!(f, " dilation {}", by(self.dilation))?;
        }
        f.write_str(if self.ceil_mode { " ceil" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_pytorch() {
        let conv = Conv2dOptions::default();
        assert_eq!(conv.output_size([28, 28], [5, 5]), Ok([24, 24]));
        assert_eq!(conv.with_padding(1).with_stride(2).output_size([56, 57], [3, 3]), Ok([28, 29]));
        assert_eq!(conv.with_dilation(2).output_size([7, 5], [3, 3]), Ok([3, 1]));
        let pool = Pool2dOptions::new(3).with_stride(2).with_padding(1);
        assert_eq!(pool.output_size([112, 113]), Ok([56, 57]));
        assert_eq!(Pool2dOptions::new(2).output_size([7, 7]), Ok([3, 3]));
        let ceil = Pool2dOptions { ceil_mode: true, ..Pool2dOptions::new(2) };
        assert_eq!(ceil.output_size([7, 7]), Ok([4, 4]));
        assert_eq!(ceil.output_size([1, 2]), Ok([1, 1]));
        // The last window would begin in the padding.
        let padded = Pool2dOptions { stride: [3, 3], padding: [1, 1], ..ceil };
        assert_eq!(padded.output_size([5, 6]), Ok([2, 3]));
        let dilated = Pool2dOptions { dilation: [2, 3], ..Pool2dOptions::new(3) };
        assert_eq!(dilated.output_size([8, 8]), Ok([2, 1]));
    }

    #[test]
    fn sizes_of_transposed_convolutions_are_those_of_pytorch() {
        let conv = Conv2dOptions::default().with_stride(2).with_padding(1);
        assert_eq!(conv.transposed_size([4, 5], [3, 3], [0, 1]), Ok([7, 10]));
        let dilated = Conv2dOptions::default().with_dilation(3);
        assert_eq!(dilated.transposed_size([4, 5], [2, 1], [2, 0]), Ok([9, 5]));
        let error = conv.transposed_size([4, 5], [3, 3], [2, 0]).unwrap_err();
        assert!(error.starts_with("an output padding of 2x0 must be smaller"), "{error}");
        let error = conv.with_padding(5).transposed_size([4, 5], [3, 3], [0, 0]).unwrap_err();
        assert_eq!(error, "a padding of 5x5 leaves nothing of pictures of 9x11");
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let conv = Conv2dOptions::default();
        let error = conv.with_padding(1).output_size([4, 4], [7, 3]).unwrap_err();
        assert_eq!(error, "windows of 7x3 are larger than the padded picture of 6x6");
        let error = conv.with_stride(0).output_size([4, 4], [3, 3]).unwrap_err();
        assert_eq!(error, "a stride of 0x0 does not exist");
        assert!(conv.with_padding(usize::MAX).output_size([4, 4], [3, 3]).is_err());
        let apart = Pool2dOptions { dilation: [2, 1], padding: [1, 0], ..Pool2dOptions::new(2) };
        let error = apart.output_size([1, 4]).unwrap_err();
        assert_eq!(error, "a window of 2 rows has none in the picture");
        let error = Pool2dOptions::new(2).with_padding(2).output_size([4, 4]).unwrap_err();
        assert_eq!(error, "a padding of 2x2 is more than half of 2x2 windows");
    }

    #[test]
    fn only_what_is_not_the_default_is_shown() {
        let conv = Conv2dOptions::default();
        assert_eq!(conv.to_string(), "");
        let conv = conv.with_stride(2).with_groups(4);
        assert_eq!(
            Conv2dOptions { padding: [1, 0], ..conv }.to_string(),
            " stride 2x2 padding 1x0 groups 4"
        );
        let pool = Pool2dOptions::new(3).with_stride(2);
        assert_eq!(pool.to_string(), " 3x3 stride 2x2");
        let pool = Pool2dOptions { dilation: [2, 1], ceil_mode: true, ..pool };
        assert_eq!(pool.to_string(), " 3x3 stride 2x2 dilation 2x1 ceil");
    }
}
