//! Errors of data sets: each message is one sentence that names the file, or the text, and the
//! place in it.

use std::io;

use super::Split;

/// Data that cannot be read or used. `name` is the path of a file, or a description of a text in
/// memory.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("{name}: cannot be read ({why}); give the path of a data set as --data or data.path")]
    Read { name: String, why: io::Error },
    #[error("{name}: is a directory; give the path of one text file as --data or data.path")]
    Directory { name: String },
    #[error("{name}: is empty; give a file with data in it as --data or data.path")]
    Empty { name: String },
    #[error(
        "{name}: is not UTF-8 at byte {offset} (line {line}); \
         convert it, or set data.tokenizer = \"byte\""
    )]
    NotUtf8 { name: String, offset: usize, line: usize },
    #[error(
        "{name}: the character {character:?} at byte {offset} (line {line}) is not in the \
         vocabulary of {vocabulary} characters; remove it, or train with a text that has it"
    )]
    Unknown { name: String, character: char, offset: usize, line: usize, vocabulary: usize },
    #[error(
        "{name}: its {split} part has {tokens} tokens, and a context of {context} needs at least \
         {}; give more text, lower model.context or change data.held_out", context + 1
    )]
    Short { name: String, split: Split, tokens: usize, context: usize },
    #[error("{name}: has {tokens} tokens, more than {}; split it", u32::MAX)]
    Long { name: String, tokens: usize },
    #[error(
        "{name}: its {split} part has no sample; there are {samples} in all: give more, or change \
         data.held_out"
    )]
    Few { name: String, split: Split, samples: u64 },
    /// Content that its format does not allow; `place` is "byte 4", "line 12, column 3", or empty
    /// for the whole file, and `why` says what is there and what was expected.
    #[error("{name}: {}{why}", if place.is_empty() { String::new() } else { format!("{place}: ") })]
    Invalid { name: String, place: String, why: String },
    #[error("data.held_out = {held_out} is not a part of the data; use 0 or more, and less than 1")]
    HeldOut { held_out: f64 },
}
