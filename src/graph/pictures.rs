//! Options of the ops on pictures, which are channels last `(b, h, w, c)`: strides, padding and the
//! sizes that follow from them.

use std::fmt;

/// The most of a size, stride, padding or dilation: kernels count places in 32 bits.
const MOST: usize = 1 << 16;

/// The most places of a window: those that an f32 holds exactly.
const PLACES_MAX: usize = 1 << 24;

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
    pub fn with_stride(self, stride: usize) -> Self {
        Self { stride: [stride; 2], ..self }
    }

    /// Returns these options with a padding, the same on all sides.
    pub fn with_padding(self, padding: usize) -> Self {
        Self { padding: [padding; 2], ..self }
    }

    /// Returns these options with a dilation, the same in both directions.
    pub fn with_dilation(self, dilation: usize) -> Self {
        Self { dilation: [dilation; 2], ..self }
    }

    /// Returns these options with so many groups.
    pub fn with_groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// Returns the height and the width of the output for inputs of this size.
    ///
    /// # Errors
    /// Returns the reason why there is none.
    pub fn output_size(&self, size: [usize; 2], kernel: [usize; 2]) -> Result<[usize; 2], String> {
        let windows =
            Windows { kernel, stride: self.stride, padding: self.padding, dilation: self.dilation };
        windows.count(size)
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
}

impl Pool2dOptions {
    /// Creates the options of square windows side by side.
    pub fn new(kernel: usize) -> Self {
        Self { kernel: [kernel; 2], stride: [kernel; 2], padding: [0; 2] }
    }

    /// Returns these options with a stride, the same in both directions.
    pub fn with_stride(self, stride: usize) -> Self {
        Self { stride: [stride; 2], ..self }
    }

    /// Returns these options with a padding, the same on all sides.
    pub fn with_padding(self, padding: usize) -> Self {
        Self { padding: [padding; 2], ..self }
    }

    /// Returns the height and the width of the output for inputs of this size.
    ///
    /// # Errors
    /// Returns the reason why there is none.
    pub fn output_size(&self, size: [usize; 2]) -> Result<[usize; 2], String> {
        let Self { kernel, stride, padding } = *self;
        if (0..2).any(|axis| padding[axis] > kernel[axis] / 2) {
            let (padding, kernel) = (by(padding), by(kernel));
            return Err(format!("a padding of {padding} is more than half of {kernel} windows"));
        }
        if kernel[0].saturating_mul(kernel[1]) > PLACES_MAX {
            return Err(format!("windows of {} have more than {PLACES_MAX} places", by(kernel)));
        }
        Windows { kernel, stride, padding, dilation: [1; 2] }.count(size)
    }
}

/// Windows that are laid over a padded picture.
struct Windows {
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

impl Windows {
    /// Returns the number of windows down and across a picture.
    fn count(&self, size: [usize; 2]) -> Result<[usize; 2], String> {
        let Self { kernel, stride, padding, dilation } = *self;
        let given = [("kernel", kernel), ("stride", stride), ("dilation", dilation)];
        if let Some((what, value)) = given.iter().find(|(_, value)| value.contains(&0)) {
            return Err(format!("a {what} of {} does not exist", by(*value)));
        }
        let all = [kernel, stride, padding, dilation, size];
        if let Some(large) = all.iter().flatten().find(|value| **value > MOST) {
            return Err(format!("{large} is more than {MOST}, the most rows or columns"));
        }
        let span = [0, 1].map(|axis| dilation[axis] * (kernel[axis] - 1) + 1);
        let padded = [0, 1].map(|axis| size[axis] + 2 * padding[axis]);
        if (0..2).any(|axis| span[axis] > padded[axis]) {
            return Err(format!(
                "windows of {} are larger than the padded picture of {}",
                by(span),
                by(padded)
            ));
        }
        Ok([0, 1].map(|axis| (padded[axis] - span[axis]) / stride[axis] + 1))
    }
}

/// Returns a height and a width as text: `3x5`.
pub(super) fn by([height, width]: [usize; 2]) -> String {
    format!("{height}x{width}")
}

/// Writes what differs from the default, each behind a space.
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

/// Writes the window, and what differs from windows side by side, each behind a space.
impl fmt::Display for Pool2dOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " {}", by(self.kernel))?;
        if self.stride != self.kernel {
            write!(f, " stride {}", by(self.stride))?;
        }
        if self.padding == [0; 2] { Ok(()) } else { write!(f, " padding {}", by(self.padding)) }
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
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let conv = Conv2dOptions::default();
        let error = conv.with_padding(1).output_size([4, 4], [7, 3]).unwrap_err();
        assert_eq!(error, "windows of 7x3 are larger than the padded picture of 6x6");
        let error = conv.with_stride(0).output_size([4, 4], [3, 3]).unwrap_err();
        assert_eq!(error, "a stride of 0x0 does not exist");
        assert!(conv.with_padding(usize::MAX).output_size([4, 4], [3, 3]).is_err());
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
        assert_eq!(Pool2dOptions::new(3).with_stride(2).to_string(), " 3x3 stride 2x2");
    }
}
