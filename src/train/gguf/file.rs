//! Format of a GGUF file, version 3: keys with values, then the names and shapes of tensors, then
//! their values (ggml-org/ggml, docs/gguf.md). All numbers are little-endian.

use std::borrow::Cow;
use std::io::{self, Write};

use crate::hugging_face::FileType;

const MAGIC: &[u8] = b"GGUF";
const VERSION: u32 = 3;
/// Alignment of tensors in bytes, from the start of all values.
const ALIGNMENT: usize = 32;

/// Value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    Whole(u32),
    Real(f32),
    Flag(bool),
    Text(String),
    Wholes(Vec<i32>),
    Reals(Vec<f32>),
    Texts(Vec<String>),
}

/// Codes of value types in the format.
const WHOLE: u32 = 4;
const INTEGER: u32 = 5;
const REAL: u32 = 6;
const FLAG: u32 = 7;
const TEXT: u32 = 8;
const LIST: u32 = 9;

impl GgufValue {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Whole(value) => put(out, &[WHOLE, *value]),
            Self::Real(value) => put(out, &[REAL, value.to_bits()]),
            Self::Flag(value) => {
                put(out, &[FLAG])?;
                out.write_all(&[u8::from(*value)])
            }
            Self::Text(text) => {
                put(out, &[TEXT])?;
                put_text(out, text)
            }
            Self::Wholes(values) => {
                put_list(out, INTEGER, values.len())?;
                values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
            }
            Self::Reals(values) => {
                put_list(out, REAL, values.len())?;
                values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
            }
            Self::Texts(texts) => {
                put_list(out, TEXT, texts.len())?;
                texts.iter().try_for_each(|text| put_text(out, text))
            }
        }
    }
}

fn put(out: &mut impl Write, words: &[u32]) -> io::Result<()> {
    words.iter().try_for_each(|word| out.write_all(&word.to_le_bytes()))
}

fn put_length(out: &mut impl Write, length: usize) -> io::Result<()> {
    out.write_all(&(length as u64).to_le_bytes())
}

fn put_text(out: &mut impl Write, text: &str) -> io::Result<()> {
    put_length(out, text.len())?;
    out.write_all(text.as_bytes())
}

fn put_list(out: &mut impl Write, kind: u32, length: usize) -> io::Result<()> {
    put(out, &[LIST, kind])?;
    put_length(out, length)
}

fn code_of(kind: FileType) -> u32 {
    match kind {
        FileType::F32 => 0,
        FileType::F16 => 1,
        FileType::Q8_0 => 8,
        FileType::Bf16 => 30,
    }
}

/// Tensor of a file.
pub struct GgufTensor<'a> {
    pub name: String,
    /// Dimensions, the innermost (contiguous) one last; a file has the reverse order.
    pub shape: Vec<usize>,
    pub kind: FileType,
    /// Returns the values, row by row.
    pub values: Box<dyn Fn() -> Cow<'a, [f32]> + 'a>,
}

/// Writes a file of keys with values and tensors.
///
/// # Errors
/// Returns the error of the writer.
pub fn write(
    out: &mut impl Write,
    keys: &[(String, GgufValue)],
    tensors: &[GgufTensor],
) -> io::Result<()> {
    let mut head = Vec::new();
    head.write_all(MAGIC)?;
    put(&mut head, &[VERSION])?;
    put_length(&mut head, tensors.len())?;
    put_length(&mut head, keys.len())?;
    for (key, value) in keys {
        put_text(&mut head, key)?;
        value.write(&mut head)?;
    }
    let mut offset = 0;
    for tensor in tensors {
        put_text(&mut head, &tensor.name)?;
        put(&mut head, &[tensor.shape.len() as u32])?;
        for dimension in tensor.shape.iter().rev() {
            put_length(&mut head, *dimension)?;
        }
        put(&mut head, &[code_of(tensor.kind)])?;
        put_length(&mut head, offset)?;
        offset += tensor.kind.bytes(tensor.shape.iter().product()).next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
    out.write_all(&head)?;
    for tensor in tensors {
        let mut bytes = tensor.kind.bytes_of(&(tensor.values)());
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        out.write_all(&bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of one key and one tensor, byte by byte.
    #[test]
    fn files_have_the_form_of_version_3() {
        let values = || Cow::Owned(vec![1.0, -2.0, 0.5]);
        let tensor = GgufTensor {
            name: "t".into(),
            shape: vec![1, 3],
            kind: FileType::F16,
            values: Box::new(values),
        };
        let mut bytes = Vec::new();
        write(&mut bytes, &[("k".into(), GgufValue::Texts(vec!["ab".into()]))], &[tensor]).unwrap();
        let mut expected = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
        expected.extend(b"\x01\0\0\0\0\0\0\0k\x09\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0");
        expected.extend(b"\x02\0\0\0\0\0\0\0ab");
        // The innermost dimension of the tensor comes first.
        expected.extend(b"\x01\0\0\0\0\0\0\0t\x02\0\0\0\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0");
        expected.extend(b"\x01\0\0\0\0\0\0\0\0\0\0\0");
        expected.resize(expected.len().next_multiple_of(32), 0);
        expected.extend(b"\0\x3c\0\xc0\0\x38");
        expected.resize(expected.len().next_multiple_of(32), 0);
        assert_eq!(bytes, expected);
    }
}
