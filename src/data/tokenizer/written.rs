//! The tokenizers of characters and of bytes as a `tokenizer.json`: BPE without merges, which
//! leaves the initial tokens unchanged.

use serde_json::{Map, Value, json};

use super::TokenizerFile;
use crate::DataError;

/// Tokenizer whose token `i` is the character `chars[i]`.
pub(super) fn of_characters(chars: &[char]) -> Result<TokenizerFile, DataError> {
    let vocabulary = chars.iter().map(char::to_string).zip(0u32..);
    let joined = json!({ "type": "Fuse" });
    file("the tokenizer of characters", vocabulary, Value::Null, joined)
}

/// Tokenizer whose token `i` is the byte `i`.
pub(super) fn of_bytes() -> Result<TokenizerFile, DataError> {
    let vocabulary = (0u8..=255).map(|byte| (name_of(byte).to_string(), u32::from(byte)));
    let level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    });
    file("the tokenizer of bytes", vocabulary, level.clone(), level)
}

/// Returns the character that stands for a byte in byte-level vocabularies: itself if Latin-1 has a
/// visible one there, else the next free one from U+0100 on (`bytes_to_unicode` of GPT-2's
/// encoder).
fn name_of(byte: u8) -> char {
    let is_visible = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_visible(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|before| !is_visible(*before)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn file(
    name: &str,
    vocabulary: impl Iterator<Item = (String, u32)>,
    pre_tokenizer: Value,
    decoder: Value,
) -> Result<TokenizerFile, DataError> {
    let tokens: Map<String, Value> = vocabulary.map(|(token, id)| (token, id.into())).collect();
    let described = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": tokens,
            "merges": []
        }
    });
    TokenizerFile::from_json(name, format!("{described:#}").into_bytes())
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::{Tokenizer, TokenizerKind};

    /// Texts with spaces, line ends, characters of several bytes and combining ones.
    const TEXTS: [&str; 3] = [
        "First Citizen:\nBefore we proceed",
        "  a\r\n\té e\u{301} €  \u{1F600}.",
        "\0\u{7F}\u{A0}",
    ];

    #[test]
    fn written_files_have_the_ids_and_the_texts_of_their_tokenizers() {
        for kind in [TokenizerKind::Char, TokenizerKind::Byte] {
            let tokenizer = Tokenizer::derive(kind, TEXTS.concat()).unwrap();
            let written = Tokenizer::File(tokenizer.to_file().unwrap());
            assert_eq!(written.vocabulary(), tokenizer.vocabulary(), "{kind}");
            for text in TEXTS {
                let ids = tokenizer.encode(text).unwrap();
                assert_eq!(written.encode(text).unwrap(), ids, "{kind}: {text:?}");
                assert_eq!(written.decode(&ids), text, "{kind}");
            }
            // So that exports of one model have the same hash.
            assert_eq!(tokenizer.to_file().unwrap(), tokenizer.to_file().unwrap());
            assert_eq!(written.to_file().unwrap(), tokenizer.to_file().unwrap());
        }
    }
}
