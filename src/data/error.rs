//! Errors of data sets: each message is one sentence that names the file, or the text, and the
//! place in it.

use std::fmt;
use std::io;

use super::Split;
use potluck_core::format::counted;
use potluck_core::{Setting, Wording};

/// Files that are taken for a text and are none in UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotText {
    /// Text in UTF-16, as some programs of Windows write it.
    Utf16,
    /// Arrays of NumPy.
    Arrays,
    /// File of PyTorch.
    PyTorch,
    /// Table in a format of columns.
    Table,
    Other,
}

impl NotText {
    /// Returns the kind of a file by its first bytes and the end of its name.
    pub fn of(name: &str, bytes: &[u8]) -> Self {
        if bytes.starts_with(&[0xFF, 0xFE]) || bytes.starts_with(&[0xFE, 0xFF]) {
            return Self::Utf16;
        }
        match name.rsplit_once('.').map_or("", |(_, ending)| ending) {
            "npy" | "npz" => Self::Arrays,
            "pt" | "pth" | "ckpt" => Self::PyTorch,
            "parquet" | "arrow" | "feather" => Self::Table,
            _ => Self::Other,
        }
    }

    fn advice(self) -> String {
        match self {
            Self::Utf16 => "it is UTF-16: save it as UTF-8".into(),
            Self::Arrays => "arrays are read from a directory with inputs.npy and targets.npy, \
                             as numpy.save writes them"
                .into(),
            Self::PyTorch => "files of PyTorch are not read as data: write the arrays with \
                              numpy.save, as inputs.npy and targets.npy of a directory"
                .into(),
            Self::Table => "write the table as CSV, or its texts as .txt or .jsonl".into(),
            Self::Other => {
                format!("convert it, or set {}", Setting::Tokenizer.given("byte"))
            }
        }
    }
}

/// Data that cannot be read or used. `name` is the path of a file, or a description of a text in
/// memory.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("{name}: cannot be read ({why}); give the path of a data set{}", Setting::AsData)]
    Read { name: String, why: io::Error },
    #[error(
        "{name}: is a directory, and neither of token ids, MNIST's or CIFAR-10's files, \
         inputs.npy and targets.npy, nor of pictures in a directory per class; give the path of \
         one text file{}, or such a directory",
        Setting::AsData
    )]
    Directory { name: String },
    #[error("{name}: is empty; give a file with data in it{}", Setting::AsData)]
    Empty { name: String },
    #[error("{name}: is not UTF-8 at byte {offset} (line {line}); {}", .kind.advice())]
    NotUtf8 { name: String, offset: usize, line: usize, kind: NotText },
    #[error(
        "{name}: the character {character:?} at byte {offset} (line {line}) is not in the \
         vocabulary of {vocabulary} characters; remove it, or train with a text that has it"
    )]
    Unknown { name: String, character: char, offset: usize, line: usize, vocabulary: usize },
    #[error(
        "{name}: its {split} part has {}, and a context of {context} needs at least {}; give more \
         text, lower {} or change {}",
        counted(*tokens, "token", "tokens"),
        context + 1,
        Setting::Context,
        Setting::HeldOut
    )]
    Short { name: String, split: Split, tokens: usize, context: usize },
    #[error("{name}: has {tokens} tokens, more than {}; split it", u32::MAX)]
    Long { name: String, tokens: usize },
    #[error(
        "{name}: its {split} part has no sample; there are {samples} in all: give more, or change \
         {}",
        Setting::HeldOut
    )]
    Few { name: String, split: Split, samples: u64 },
    /// Content that its format does not allow; `place` is "byte 4", "line 12, column 3", or empty
    /// for the whole file, and `why` names the content and the expectation.
    #[error("{name}: {}{why}", if place.is_empty() { String::new() } else { format!("{place}: ") })]
    Invalid { name: String, place: String, why: Wording },
    #[error(
        "{} = {held_out} is not a part of the data; use 0 or more, and less than 1",
        Setting::HeldOut
    )]
    HeldOut { held_out: f64 },
}

impl DataError {
    /// Returns the error of a file whose content as a whole is not allowed.
    pub(crate) fn of_file(name: impl fmt::Display, why: impl Into<Wording>) -> Self {
        Self::Invalid { name: name.to_string(), place: String::new(), why: why.into() }
    }
}
