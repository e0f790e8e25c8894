//! Tokenizers: encode text to tokens and decode tokens to text, by character, by byte, or by a
//! `tokenizer.json`.

pub(crate) mod config;
mod file;
mod written;

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use super::DataError;
use super::error::NotText;
pub(crate) use file::TextDivision;
pub use file::TokenizerFile;

/// Name of the file of a tokenizer in the directory of a model, a checkpoint or tokens.
pub const TOKENIZER: &str = "tokenizer.json";

/// Replacement of a token that is not in the vocabulary, or of bytes that are not UTF-8.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Kind of tokenizer, before its vocabulary is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenizerKind {
    /// A token per character; the text defines the vocabulary.
    Char,
    /// A token per byte of UTF-8 (or of anything else); the vocabulary is 256.
    Byte,
}

impl fmt::Display for TokenizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Char => "char",
            Self::Byte => "byte",
        })
    }
}

/// Tokenizer with its vocabulary, as stored in checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Tokenizer {
    /// Token `i` is `chars[i]`.
    Char { chars: Vec<char> },
    /// Token `i` is the byte `i`.
    Byte,
    /// As a file describes it.
    File(TokenizerFile),
}

impl Tokenizer {
    /// Derives the tokenizer of a text: for characters, the vocabulary is the sorted set of the
    /// characters in it.
    ///
    /// # Errors
    /// Returns `DataError::NotUtf8` if characters are requested and the text is not UTF-8.
    pub fn derive(kind: TokenizerKind, text: impl AsRef<[u8]>) -> Result<Self, DataError> {
        Self::derive_named(kind, "the text", text.as_ref())
    }

    /// Returns the size of the vocabulary, `v`.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Char { chars } => chars.len(),
            Self::Byte => 256,
            Self::File(file) => file.vocabulary(),
        }
    }

    /// Returns the file of the tokenizer, if it has one.
    pub fn file(&self) -> Option<&TokenizerFile> {
        match self {
            Self::File(file) => Some(file),
            Self::Char { .. } | Self::Byte => None,
        }
    }

    /// Returns the tokenizer as a `tokenizer.json`: its own, or one with the same ids for other
    /// programs. The latter drops characters that are not in the vocabulary, which are an error
    /// here.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` if the characters cannot be a `tokenizer.json`.
    pub fn to_file(&self) -> Result<TokenizerFile, DataError> {
        match self {
            Self::File(file) => Ok(file.clone()),
            Self::Char { chars } => written::of_characters(chars),
            Self::Byte => written::of_bytes(),
        }
    }

    /// Returns the tokens of a text.
    ///
    /// # Errors
    /// Returns a `DataError` if the text is not UTF-8, except for a tokenizer of bytes, if a
    /// character is not in the vocabulary of characters, or if the tokenizer of a file refuses the
    /// text.
    pub fn encode(&self, text: impl AsRef<[u8]>) -> Result<Vec<u32>, DataError> {
        self.encode_named("the text", text.as_ref())
    }

    /// Returns the text of tokens. A token outside the vocabulary and bytes that are not UTF-8
    /// become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut decoder = Decoder::new(self);
        let mut text: String = tokens.iter().map(|token| decoder.push(*token)).collect();
        text.push_str(&decoder.finish());
        text
    }

    pub(super) fn derive_named(
        kind: TokenizerKind,
        name: &str,
        bytes: &[u8],
    ) -> Result<Self, DataError> {
        Ok(match kind {
            TokenizerKind::Byte => Self::Byte,
            TokenizerKind::Char => {
                let chars: BTreeSet<char> = utf8(name, bytes)?.chars().collect();
                Self::Char { chars: chars.into_iter().collect() }
            }
        })
    }

    pub(super) fn encode_named(&self, name: &str, bytes: &[u8]) -> Result<Vec<u32>, DataError> {
        let chars = match self {
            Self::Byte => return Ok(bytes.iter().map(|byte| u32::from(*byte)).collect()),
            Self::File(file) => return file.encode(name, utf8(name, bytes)?),
            Self::Char { chars } => chars,
        };
        let tokens: HashMap<char, u32> = chars.iter().copied().zip(0..).collect();
        let mut encoded = Vec::with_capacity(bytes.len());
        for (offset, character) in utf8(name, bytes)?.char_indices() {
            let Some(token) = tokens.get(&character) else {
                return Err(DataError::Unknown {
                    name: name.into(),
                    character,
                    offset,
                    line: line(bytes, offset),
                    vocabulary: chars.len(),
                });
            };
            encoded.push(*token);
        }
        Ok(encoded)
    }
}

/// Streaming decoder, for text that is printed while it is generated: bytes that begin a
/// character are held back until the character is complete.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    held: Vec<u8>,
    /// For the tokenizer of a file: tokens from the beginning of the last returned text on.
    tokens: Vec<u32>,
    /// Number of these tokens whose text was returned.
    returned: usize,
}

/// Largest number of tokens that are held back because their text ends with an incomplete
/// character; no character has more.
const PENDING_MAX: usize = 16;

impl<'a> Decoder<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, held: Vec::new(), tokens: Vec::new(), returned: 0 }
    }

    /// Creates a decoder for the tokens after some others, whose text is known: the tokenizer of a
    /// file may put a space in front of a token only after other tokens.
    pub fn after(tokenizer: &'a Tokenizer, tokens: &[u32]) -> Self {
        Self { tokens: tokens.to_vec(), returned: tokens.len(), ..Self::new(tokenizer) }
    }

    /// Decodes a token and returns the text that it completes; empty if it only begins a
    /// character.
    pub fn push(&mut self, token: u32) -> String {
        match self.tokenizer {
            Tokenizer::Char { chars } => {
                chars.get(token as usize).copied().unwrap_or(REPLACEMENT).into()
            }
            Tokenizer::Byte => match u8::try_from(token) {
                Ok(byte) => {
                    self.held.push(byte);
                    self.take(false)
                }
                Err(_) => {
                    let mut text = self.take(true);
                    text.push(REPLACEMENT);
                    text
                }
            },
            Tokenizer::File(file) => {
                self.tokens.push(token);
                self.take_decoded(file, false)
            }
        }
    }

    /// Takes the text that was not returned yet, unless it ends with an incomplete character and
    /// `all` is false. Its tokens are decoded together with the previous text's, which begins with
    /// a whole character.
    fn take_decoded(&mut self, file: &TokenizerFile, all: bool) -> String {
        let pending = self.tokens.len() - self.returned;
        let text = file.decode(&self.tokens);
        let is_complete = !text.ends_with(REPLACEMENT) || pending > PENDING_MAX;
        if pending == 0 || !(is_complete || all) {
            return String::new();
        }
        let before = file.decode(&self.tokens[..self.returned]).chars().count();
        let new: String = text.chars().skip(before).collect();
        if !new.is_empty() || pending > PENDING_MAX {
            self.tokens.drain(..self.returned);
            self.returned = self.tokens.len();
        }
        new
    }

    /// Returns the bytes that are still held back: an incomplete character, as U+FFFD.
    pub fn finish(&mut self) -> String {
        match self.tokenizer {
            Tokenizer::File(file) => self.take_decoded(file, true),
            Tokenizer::Char { .. } | Tokenizer::Byte => self.take(true),
        }
    }

    /// Takes the held bytes as text, including the incomplete character at their end only if
    /// `all`.
    fn take(&mut self, all: bool) -> String {
        let mut text = String::new();
        while let Err(error) = std::str::from_utf8(&self.held) {
            let invalid = self.held.split_off(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(&self.held));
            match error.error_len() {
                Some(length) => self.held = invalid[length..].to_vec(),
                // Only the last character of the input can lack bytes.
                None if all => self.held.clear(),
                None => {
                    self.held = invalid;
                    return text;
                }
            }
            text.push(REPLACEMENT);
        }
        text.push_str(&String::from_utf8_lossy(&self.held));
        self.held.clear();
        text
    }
}

fn utf8<'a>(name: &str, bytes: &'a [u8]) -> Result<&'a str, DataError> {
    std::str::from_utf8(bytes).map_err(|error| {
        let offset = error.valid_up_to();
        let kind = NotText::of(name, bytes);
        DataError::NotUtf8 { name: name.into(), offset, line: line(bytes, offset), kind }
    })
}

/// Line of the byte at an offset, counted from 1.
fn line(bytes: &[u8], offset: usize) -> usize {
    1 + bytes[..offset].iter().filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn characters_are_the_sorted_set_of_the_text() {
        let tokenizer = Tokenizer::derive(TokenizerKind::Char, "hello wörld").unwrap();
        assert_eq!(tokenizer, Tokenizer::Char { chars: " dehlorwö".chars().collect() });
        assert_eq!(tokenizer.vocabulary(), 9);
        assert_eq!(tokenizer.encode("hö d").unwrap(), [3, 8, 0, 1]);
        assert_eq!(tokenizer.decode(&[3, 8, 0, 1]), "hö d");
        assert_eq!(tokenizer.decode(&[3, 9]), "h\u{FFFD}");
    }

    #[test]
    fn an_unknown_character_is_named_with_its_place() {
        let tokenizer = Tokenizer::derive(TokenizerKind::Char, "ab\n").unwrap();
        let error = tokenizer.encode("ab\nba\nazb").unwrap_err();
        assert!(matches!(error, DataError::Unknown { character: 'z', offset: 7, line: 3, .. }));
        assert!(error.to_string().contains("'z' at byte 7 (line 3)"), "{error}");
    }

    #[test]
    fn characters_need_utf8_and_bytes_do_not() {
        let bytes = b"ab\nc\xFFd";
        let error = Tokenizer::derive(TokenizerKind::Char, bytes).unwrap_err();
        assert!(matches!(error, DataError::NotUtf8 { offset: 4, line: 2, .. }), "{error}");
        let tokens = Tokenizer::Byte.encode(bytes).unwrap();
        assert_eq!(tokens, [97, 98, 10, 99, 255, 100]);
        assert_eq!(Tokenizer::Byte.decode(&tokens), "ab\nc\u{FFFD}d");
    }

    #[test]
    fn streaming_holds_incomplete_characters_back() {
        let mut decoder = Decoder::new(&Tokenizer::Byte);
        let parts: Vec<String> = "aö€".bytes().map(|byte| decoder.push(u32::from(byte))).collect();
        assert_eq!(parts, ["a", "", "ö", "", "", "€"]);
        assert_eq!(decoder.push(0xE2), "");
        // The letter implies that the character before it will never be completed.
        assert_eq!(decoder.push(u32::from(b'x')), "\u{FFFD}x");
        assert_eq!(decoder.push(0xC3), "");
        assert_eq!(decoder.push(256), "\u{FFFD}\u{FFFD}");
        assert_eq!(decoder.push(0xC3), "");
        assert_eq!(decoder.finish(), "\u{FFFD}");
    }

    #[test]
    fn tokenizers_survive_json() {
        let chars = Tokenizer::derive(TokenizerKind::Char, "\"\\\n\u{1F600}").unwrap();
        for tokenizer in [chars, Tokenizer::Byte] {
            let json = serde_json::to_string(&tokenizer).unwrap();
            assert_eq!(serde_json::from_str::<Tokenizer>(&json).unwrap(), tokenizer);
        }
    }

    proptest! {
        #[test]
        fn texts_round_trip(text in ".{0,40}") {
            for kind in [TokenizerKind::Char, TokenizerKind::Byte] {
                let tokenizer = Tokenizer::derive(kind, &text).unwrap();
                prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text).unwrap()), &text[..]);
            }
        }

        #[test]
        fn bytes_decode_as_the_standard_library_does(
            bytes in proptest::collection::vec(any::<u8>(), 0..40)
        ) {
            let tokens = Tokenizer::Byte.encode(&bytes).unwrap();
            prop_assert_eq!(Tokenizer::Byte.decode(&tokens), String::from_utf8_lossy(&bytes));
        }
    }
}
