//! Decoding of messages and values from other processes.

use serde::de::DeserializeOwned;

/// Error of bytes that do not encode the expected value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("{0}")]
    Malformed(String),
    #[error("{bytes} bytes follow behind its end")]
    Trailing { bytes: usize },
}

/// Returns the value that all of these bytes encode (postcard,
/// <https://postcard.jamesmunns.com/wire-format>).
///
/// # Errors
/// Returns [`DecodeError`] for bytes that encode no such value, and for trailing bytes: their
/// sender has encoded another value.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    let (value, rest) = postcard::take_from_bytes(bytes)
        .map_err(|error| DecodeError::Malformed(error.to_string()))?;
    match rest.len() {
        0 => Ok(value),
        bytes => Err(DecodeError::Trailing { bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_the_bytes_are_the_value_or_they_are_refused() {
        let bytes = postcard::to_allocvec(&(7u32, "text")).unwrap();
        assert_eq!(decode::<(u32, String)>(&bytes), Ok((7, "text".into())));
        let longer = [&bytes[..], &[0, 0]].concat();
        let error = decode::<(u32, String)>(&longer).unwrap_err();
        assert_eq!(error.to_string(), "2 bytes follow behind its end");
        let error = decode::<(u32, String)>(&bytes[..3]).unwrap_err();
        assert!(matches!(error, DecodeError::Malformed(_)), "{error}");
    }
}
