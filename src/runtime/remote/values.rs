//! Values on the wire: numbers as they are in memory, little-endian, without a tag per element.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::base::{HostTensor, TensorId};
use crate::runtime::step::Inputs;

/// Floats or words as bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct RawValues<T>(pub Vec<T>);

impl<T: bytemuck::Pod> Serialize for RawValues<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytemuck::cast_slice(&self.0))
    }
}

impl<'de, T: bytemuck::Pod> Deserialize<'de> for RawValues<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes<T>(std::marker::PhantomData<T>);
        impl<T: bytemuck::Pod> Visitor<'_> for Bytes<T> {
            type Value = RawValues<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                write!(f, "a multiple of {} bytes", size_of::<T>())
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
                if !bytes.len().is_multiple_of(size_of::<T>()) {
                    return Err(E::invalid_length(bytes.len(), &self));
                }
                // The length is that of what has arrived, so it is no claim of the sender.
                Ok(RawValues(bytemuck::pod_collect_to_vec(bytes)))
            }
        }
        deserializer.deserialize_bytes(Bytes(std::marker::PhantomData))
    }
}

/// Values of a tensor as they are sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RawTensor {
    Float(RawValues<f32>),
    Int(RawValues<u32>),
}

/// Inputs of a micro-batch as they are sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RawInputs(Vec<(TensorId, RawTensor)>);

impl From<HostTensor> for RawTensor {
    fn from(tensor: HostTensor) -> Self {
        match tensor {
            HostTensor::Float(values) => Self::Float(RawValues(values)),
            HostTensor::Int(values) => Self::Int(RawValues(values)),
        }
    }
}

impl From<RawTensor> for HostTensor {
    fn from(tensor: RawTensor) -> Self {
        match tensor {
            RawTensor::Float(RawValues(values)) => Self::Float(values),
            RawTensor::Int(RawValues(values)) => Self::Int(values),
        }
    }
}

impl From<Inputs> for RawInputs {
    fn from(inputs: Inputs) -> Self {
        Self(inputs.into_iter().map(|(id, values)| (id, values.into())).collect())
    }
}

impl From<RawInputs> for Inputs {
    fn from(RawInputs(inputs): RawInputs) -> Self {
        inputs.into_iter().map(|(id, values)| (id, values.into())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::decode;

    #[test]
    fn values_come_back_to_the_bit_and_cut_ones_are_refused() {
        let floats = vec![1.5, -0.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE / 2.0];
        let inputs: Inputs = vec![
            (TensorId(3), HostTensor::Float(floats.clone())),
            (TensorId(9), HostTensor::Int(vec![7, u32::MAX])),
        ];
        let bytes = postcard::to_allocvec(&RawInputs::from(inputs)).unwrap();
        assert!(bytes.len() < 4 * 7 + 10, "{}", bytes.len());
        let back: Inputs = decode::<RawInputs>(&bytes).unwrap().into();
        let HostTensor::Float(found) = &back[0].1 else { panic!("{back:?}") };
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!((back[0].0, bits(found)), (TensorId(3), bits(&floats)));
        assert_eq!(back[1], (TensorId(9), HostTensor::Int(vec![7, u32::MAX])));
        let cut = postcard::to_allocvec(&RawValues(vec![1u8, 2, 3])).unwrap();
        assert!(decode::<RawValues<f32>>(&cut).is_err());
    }
}
