//! Shapes whose leading dimension may grow with the batch.

use std::fmt;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    U32,
}

impl DType {
    /// Returns the bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
        }
    }
}

/// Dimensions of a tensor, known except for the number of rows (samples) in the batch.
///
/// A *batched* shape has the batch `b` in its leading dimension: `dims[0]` is then the number of
/// entries of the leading dimension per row. So `(b, 64, 128)` has `dims = [1, 64, 128]`, and
/// reshaped to a matrix, `(b*64, 128)` has `dims = [64, 128]`. The elements of the first `r` rows
/// are always a prefix of the buffer.
#[derive(Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Shape {
    batched: bool,
    dims: Vec<usize>,
}

impl Shape {
    /// Creates a shape that does not depend on the batch.
    pub fn fixed(dims: &[usize]) -> Self {
        Self { batched: false, dims: dims.to_vec() }
    }

    /// Creates a shape whose leading dimension is `rows * dims[0]`.
    pub fn batched(dims: &[usize]) -> Self {
        assert!(!dims.is_empty(), "a batched shape has a leading dimension");
        Self { batched: true, dims: dims.to_vec() }
    }

    /// Returns a shape with the same leading kind (batched or not) and other dimensions.
    pub fn with_dims(&self, dims: &[usize]) -> Self {
        Self { batched: self.batched, dims: dims.to_vec() }
    }

    /// Returns the shape with another last dimension.
    pub fn with_last(&self, last: usize) -> Self {
        let mut shape = self.clone();
        if let Some(dim) = shape.dims.last_mut() {
            *dim = last;
        }
        shape
    }

    /// Returns true if the leading dimension is per row of a batch.
    pub fn is_batched(&self) -> bool {
        self.batched
    }

    /// Returns the dimensions; the leading one is per row if the shape is batched.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Returns the number of dimensions, 0 for a scalar.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Returns the innermost dimension, 1 for a scalar.
    pub fn last(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }

    /// Returns the number of elements in one row (of the whole tensor, if the shape is not
    /// batched).
    pub fn per_row(&self) -> usize {
        self.dims.iter().product()
    }

    /// Returns the number of elements in `rows` rows.
    pub fn elements(&self, rows: usize) -> usize {
        if self.batched { rows * self.per_row() } else { self.per_row() }
    }

    /// Returns the dimensions for a batch of `rows` rows.
    pub fn resolve(&self, rows: usize) -> Vec<usize> {
        let mut dims = self.dims.clone();
        if self.batched {
            dims[0] *= rows;
        }
        dims
    }

    /// Returns true if `self` equals the trailing dimensions of `whole`, so that it can be
    /// broadcast over the leading ones. A batched shape is a suffix only of itself.
    pub fn is_suffix_of(&self, whole: &Shape) -> bool {
        if self.batched {
            return self == whole;
        }
        whole.dims.ends_with(&self.dims) && (!whole.batched || self.rank() < whole.rank())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (axis, dim) in self.dims.iter().enumerate() {
            let comma = if axis > 0 { ", " } else { "" };
            match (axis == 0 && self.batched, *dim) {
                (true, 1) => write!(f, "b")?,
                (true, dim) => write!(f, "b*{dim}")?,
                (false, dim) => write!(f, "{comma}{dim}")?,
            }
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batched_shape_grows_with_rows_only_in_front() {
        let shape = Shape::batched(&[64, 128]);
        assert_eq!(shape.to_string(), "(b*64, 128)");
        assert_eq!(Shape::batched(&[1, 4]).to_string(), "(b, 4)");
        assert_eq!(shape.resolve(3), [192, 128]);
        assert_eq!(shape.elements(3), 3 * 64 * 128);
        assert_eq!(Shape::fixed(&[2, 3]).elements(7), 6);
    }

    #[test]
    fn suffixes_broadcast_over_leading_dimensions_only() {
        let whole = Shape::batched(&[1, 64, 128]);
        assert!(Shape::fixed(&[128]).is_suffix_of(&whole));
        assert!(Shape::fixed(&[64, 128]).is_suffix_of(&whole));
        assert!(!Shape::fixed(&[1, 64, 128]).is_suffix_of(&whole));
        assert!(!Shape::fixed(&[64]).is_suffix_of(&whole));
        assert!(Shape::fixed(&[2, 3]).is_suffix_of(&Shape::fixed(&[2, 3])));
    }
}
