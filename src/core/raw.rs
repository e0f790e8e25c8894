//! Values on the wire: numbers as they are in memory, little-endian, without a tag per element.
//! For fields: `#[serde(with = "raw")]`.

use std::fmt;
use std::marker::PhantomData;

use bytemuck::Pod;
use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

/// Writes numbers as bytes.
///
/// # Errors
/// Returns the error of the serializer.
pub fn serialize<T: Pod, S: Serializer>(values: &[T], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytemuck::cast_slice(values))
}

/// Reads numbers from bytes.
///
/// # Errors
/// Returns the error of the deserializer, or one for bytes that end within a number.
pub fn deserialize<'de, T: Pod, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Bytes<T>(PhantomData<T>);
    impl<T: Pod> Visitor<'_> for Bytes<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "a multiple of {} bytes", size_of::<T>())
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<T>, E> {
            if !bytes.len().is_multiple_of(size_of::<T>()) {
                return Err(E::invalid_length(bytes.len(), &self));
            }
            // The length of the received bytes, not a claim of the sender.
            Ok(bytemuck::pod_collect_to_vec(bytes))
        }
    }
    deserializer.deserialize_bytes(Bytes(PhantomData))
}
