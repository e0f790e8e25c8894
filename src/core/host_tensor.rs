//! Values of a tensor in host memory, owned and borrowed.

use bytemuck::Pod;
use serde::{Deserialize, Serialize};

use super::{DType, raw};

/// Values of a tensor in host memory, in row-major order. Floats are of type `T`: f32 as devices
/// hold them, f64 in tests and in the certification of kernels. On the wire they are bytes, as in
/// memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound(serialize = "T: Pod", deserialize = "T: Pod"))]
pub enum HostTensor<T = f32> {
    Float(#[serde(with = "raw")] Vec<T>),
    Int(#[serde(with = "raw")] Vec<u32>),
}

impl HostTensor {
    /// Returns a tensor of zeros.
    pub fn zeros(dtype: DType, elements: usize) -> Self {
        match dtype {
            DType::F32 => Self::Float(vec![0.0; elements]),
            DType::U32 => Self::Int(vec![0; elements]),
        }
    }
}

impl<T> HostTensor<T> {
    /// Returns a view of the values.
    pub fn as_view(&self) -> HostTensorView<'_, T> {
        match self {
            Self::Float(values) => HostTensorView::Float(values),
            Self::Int(values) => HostTensorView::Int(values),
        }
    }

    /// Returns the tensor with each float replaced by `function` of it.
    pub fn map<U>(&self, function: impl FnMut(T) -> U) -> HostTensor<U>
    where
        T: Copy,
    {
        match self {
            Self::Float(values) => {
                HostTensor::Float(values.iter().copied().map(function).collect())
            }
            Self::Int(values) => HostTensor::Int(values.clone()),
        }
    }
}

/// Copies the elements in the order of the dimensions, for any memory layout of the array.
impl<D: ndarray::Dimension> From<ndarray::Array<f32, D>> for HostTensor {
    fn from(array: ndarray::Array<f32, D>) -> Self {
        Self::Float(array.iter().copied().collect())
    }
}

/// Copies the elements in the order of the dimensions, for any memory layout of the array.
impl<D: ndarray::Dimension> From<ndarray::Array<u32, D>> for HostTensor {
    fn from(array: ndarray::Array<u32, D>) -> Self {
        Self::Int(array.iter().copied().collect())
    }
}

/// Borrowed values of a [`HostTensor`], or of a part of one.
#[derive(Clone, Copy, Debug)]
pub enum HostTensorView<'a, T = f32> {
    Float(&'a [T]),
    Int(&'a [u32]),
}

impl<'a, T> HostTensorView<'a, T> {
    /// Returns the element type of the tensor on a device.
    pub fn dtype(self) -> DType {
        match self {
            Self::Float(_) => DType::F32,
            Self::Int(_) => DType::U32,
        }
    }

    /// Returns the values of a float tensor. Panics on an integer tensor, which is a bug: the
    /// shape rules have checked the type.
    pub fn floats(self) -> &'a [T] {
        match self {
            Self::Float(values) => values,
            Self::Int(_) => panic!("an integer tensor where the shape rule wants floats"),
        }
    }

    /// Returns the values of an integer tensor. Panics on a float tensor, which is a bug.
    pub fn ints(self) -> &'a [u32] {
        match self {
            Self::Int(values) => values,
            Self::Float(_) => panic!("a float tensor where the shape rule wants integers"),
        }
    }
}

impl<'a> HostTensorView<'a> {
    /// Returns the values as bytes, as a device holds them.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Self::Float(values) => bytemuck::cast_slice(values),
            Self::Int(values) => bytemuck::cast_slice(values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TensorId, decode};

    #[test]
    fn values_come_back_to_the_bit_and_cut_ones_are_refused() {
        let floats = vec![1.5, -0.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE / 2.0];
        let inputs: Vec<(TensorId, HostTensor)> = vec![
            (TensorId(3), HostTensor::Float(floats.clone())),
            (TensorId(9), HostTensor::Int(vec![7, u32::MAX])),
        ];
        let bytes = postcard::to_allocvec(&inputs).unwrap();
        assert!(bytes.len() < 4 * 7 + 10, "{}", bytes.len());
        let back: Vec<(TensorId, HostTensor)> = decode(&bytes).unwrap();
        let HostTensor::Float(found) = &back[0].1 else { panic!("{back:?}") };
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!((back[0].0, bits(found)), (TensorId(3), bits(&floats)));
        assert_eq!(back[1], (TensorId(9), HostTensor::Int(vec![7, u32::MAX])));
        // Of a float tensor, the tag and the length come before the bytes.
        assert!(decode::<HostTensor>(&[0, 4, 0, 0, 128, 63]).is_ok());
        assert!(decode::<HostTensor>(&[0, 3, 0, 0, 128]).is_err());
    }

    #[test]
    fn an_array_is_copied_in_the_order_of_its_dimensions() {
        let array = ndarray::array![[1.0f32, 2.0], [3.0, 4.0]].reversed_axes();
        assert_eq!(HostTensor::from(array), HostTensor::Float(vec![1.0, 3.0, 2.0, 4.0]));
    }

    #[test]
    fn floats_are_mapped_and_integers_kept() {
        let (floats, ints) = (HostTensor::Float(vec![0.5f64]), HostTensor::<f64>::Int(vec![7]));
        let half = |value: f64| value as f32 / 2.0;
        assert_eq!(floats.map(half).as_view().bytes(), 0.25f32.to_le_bytes());
        assert_eq!(ints.map(half).as_view().bytes(), 7u32.to_le_bytes());
        assert_eq!(ints.as_view().dtype(), DType::U32);
    }
}
