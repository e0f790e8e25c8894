//! Tokenizers of Hugging Face's `tokenizer.json`, by the crate `tokenizers`, since the format has
//! too many variants to implement.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::config::{StoredToken, TokenizerConfig};
use crate::DataError;
use potluck_core::Setting;
use potluck_core::format::size_text;

/// Largest `tokenizer.json`, in bytes: the largest in use have 40 MB.
const BYTES_MAX: u64 = 256 << 20;

/// Bytes of a part of a text that is encoded as a whole, which takes about 250 times as much
/// memory.
const PART_BYTES: usize = 128 << 10;
/// Parts that are encoded in parallel.
const PARTS_AT_A_TIME: usize = 8;
/// Bytes on each side of a place that are encoded to test if a text can be divided there.
const WINDOW_BYTES: usize = 256;
/// Places that are tested before the search continues further on.
const TRIES: usize = 16;

/// Tokenizer of a `tokenizer.json`. Two are equal if their files are.
///
/// Only its hash and its size are serialized, with the file saved beside them: after
/// deserialization it must be [read](Self::read_from).
#[derive(Clone, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerFile {
    /// BLAKE3 hash of the file, in hexadecimal.
    blake3: String,
    vocabulary: usize,
    /// Token that ends the documents of the data, if they were prepared with one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    end: Option<u32>,
    #[serde(skip)]
    read: Option<Arc<ReadFile>>,
}

/// End of the first part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TextDivision {
    /// After this number of bytes.
    At(usize),
    /// The text cannot be divided.
    Nowhere,
    /// It depends on the text that follows.
    Unknown,
}

/// Kinds of tokenizers that other trainers know by name.
const OTHER_KINDS: [&str; 4] = ["bpe", "gpt2", "tiktoken", "sentencepiece"];

/// Common names of the token that ends a document.
const END_TOKENS: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"];

/// Content of a file, and its tokenizer.
struct ReadFile {
    json: Vec<u8>,
    tokenizer: tokenizers::Tokenizer,
    /// True if characters without a token are left out.
    leaves_out: bool,
}

impl ReadFile {
    /// Returns the ids of a text.
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        if !self.leaves_out {
            let encoded = self.tokenizer.encode_fast(text, false);
            return Ok(encoded.map_err(|why| why.to_string())?.get_ids().to_vec());
        }
        let encoded = self.tokenizer.encode(text, false).map_err(|why| why.to_string())?;
        // Tokens behind a character that was left out may have the places of those before them, and
        // one in front of the text has the place of the first character.
        let first = text.chars().next();
        let is_whole =
            is_whole(text, &encoded) && !first.is_some_and(|char| self.is_left_out(char));
        if !is_whole && let Some(char) = text.chars().find(|char| self.is_left_out(*char)) {
            return Err(format!("it has no token for the character {char:?}"));
        }
        Ok(encoded.get_ids().to_vec())
    }

    /// Returns true for a character that has no token: twice, it has the tokens of once, which are
    /// those that the tokenizer puts in front of every text.
    fn is_left_out(&self, char: char) -> bool {
        let once = self.tokenizer.encode_fast(char.to_string(), false);
        let twice = self.tokenizer.encode_fast(format!("{char}{char}"), false);
        let (Ok(once), Ok(twice)) = (once, twice) else { return false };
        !char.is_whitespace() && once.get_ids() == twice.get_ids()
    }
}

/// Returns true if the tokens of a text are of all of it but spaces.
fn is_whole(text: &str, encoded: &tokenizers::Encoding) -> bool {
    let mut end = 0;
    let mut is_whole = true;
    for &(start, next) in encoded.get_offsets() {
        is_whole &= is_blank(text.get(end..start));
        end = end.max(next);
    }
    is_whole && is_blank(text.get(end..))
}

/// Returns true if a part of a text has spaces only, which a tokenizer may drop.
fn is_blank(part: Option<&str>) -> bool {
    part.unwrap_or_default().trim().is_empty()
}

/// Returns true if a tokenizer leaves out characters that have no token: one of byte pairs with
/// neither an unknown token nor tokens of bytes.
fn leaves_out(tokenizer: &tokenizers::Tokenizer, json: &[u8]) -> bool {
    let tokenizers::ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return false };
    let has_bytes =
        bpe.byte_fallback || str::from_utf8(json).is_ok_and(|t| t.contains("ByteLevel"));
    bpe.unk_token.is_none() && !has_bytes
}

impl TokenizerFile {
    /// Reads a file.
    ///
    /// # Errors
    /// Returns a `DataError` that names the file if it cannot be read or is not a `tokenizer.json`.
    pub fn load(path: &Path) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let read_error = |why: io::Error| {
            if OTHER_KINDS.iter().any(|kind| path == Path::new(kind)) {
                let why = "is no kind of tokenizer here; give the path of a tokenizer.json";
                return DataError::of_file(&name, why);
            }
            let expected = "char, byte, or the path of a tokenizer.json";
            DataError::of_file(
                &name,
                format!("cannot be read ({why}); {} is {expected}", Setting::Tokenizer),
            )
        };
        let found = fs::metadata(path).map_err(read_error)?;
        if found.is_dir() {
            return Err(DataError::of_file(&name, "is a directory; give its tokenizer.json"));
        }
        if !found.is_file() || found.len() > BYTES_MAX {
            let why = format!("is no file of at most {}", size_text(BYTES_MAX as usize));
            return Err(DataError::of_file(&name, why));
        }
        let mut json = Vec::new();
        let file = File::open(path).map_err(read_error)?;
        file.take(BYTES_MAX).read_to_end(&mut json).map_err(read_error)?;
        Self::from_json(&name, json)
    }

    /// Reads the bytes of a file, which error messages call `name`.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` if they are not a `tokenizer.json`.
    pub fn from_json(name: &str, json: Vec<u8>) -> Result<Self, DataError> {
        let read = tokenizers::Tokenizer::from_bytes(&json);
        let mut tokenizer =
            read.map_err(|why| DataError::of_file(name, format!("is no tokenizer.json ({why})")))?;
        if let tokenizers::ModelWrapper::BPE(bpe) = tokenizer.get_model()
            && bpe.dropout.is_some_and(|part| part > 0.0)
        {
            let why = "leaves merges out at random; set its dropout to null";
            return Err(DataError::of_file(name, why));
        }
        // Texts are encoded whole, and special tokens in them are plain text.
        tokenizer.set_encode_special_tokens(true);
        tokenizer.with_padding(None);
        let truncated = tokenizer.with_truncation(None);
        truncated.map_err(|why| {
            DataError::of_file(name, format!("cannot do without truncation ({why})"))
        })?;
        let ids = tokenizer.get_vocab(true);
        let vocabulary = ids.values().max().map_or(0, |last| *last as usize + 1);
        if vocabulary == 0 {
            return Err(DataError::of_file(name, "has no tokens"));
        }
        let blake3 = blake3::hash(&json).to_hex().to_string();
        let leaves_out = leaves_out(&tokenizer, &json);
        let read = ReadFile { json, tokenizer, leaves_out };
        Ok(Self { blake3, vocabulary, end: None, read: Some(Arc::new(read)) })
    }

    /// Returns the tokenizer with the file that was saved beside it.
    ///
    /// # Errors
    /// Returns the errors of [`Self::load`], and `DataError::Invalid` if it is another file.
    pub fn read_from(&self, path: &Path) -> Result<Self, DataError> {
        let found = Self::load(path)?;
        if found != *self {
            let why = format!("is not the file that was saved, which has the hash {}", self.blake3);
            return Err(DataError::of_file(path.display(), why));
        }
        Ok(found.with_end(self.end))
    }

    /// Returns the tokenizer of data whose documents end with this token, if that is known.
    pub(crate) fn with_end(self, end: Option<u32>) -> Self {
        Self { end: end.or(self.end), ..self }
    }

    /// Returns the tokenizer without the template that puts tokens around every text, as texts are
    /// encoded in training. Its `tokenizer.json` is another one.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` if the file was not read.
    pub fn without_template(&self) -> Result<Self, DataError> {
        const NAME: &str = "the tokenizer without a template";
        const TEMPLATES: [&str; 3] = ["TemplateProcessing", "BertProcessing", "RobertaProcessing"];
        let Some([bare, whole]) = self.without_and_with_template() else {
            return Ok(self.clone());
        };
        if bare == whole {
            return Ok(self.clone());
        }
        let refused = |why: serde_json::Error| DataError::of_file(NAME, why.to_string());
        let mut file: serde_json::Value = serde_json::from_slice(self.json()).map_err(refused)?;
        let is_template = |one: &serde_json::Value| {
            one["type"].as_str().is_some_and(|name| TEMPLATES.contains(&name))
        };
        let after = &mut file["post_processor"];
        if is_template(after) {
            *after = serde_json::Value::Null;
        } else if let Some(all) = after.get_mut("processors").and_then(|all| all.as_array_mut()) {
            all.retain(|one| !is_template(one));
        }
        let json = serde_json::to_vec_pretty(&file).map_err(refused)?;
        Ok(Self::from_json(NAME, json)?.with_end(self.end))
    }

    /// Returns false after deserialization, until the file is read.
    pub fn is_read(&self) -> bool {
        self.read.is_some()
    }

    /// Returns the bytes of the file; empty if it was not read.
    pub fn json(&self) -> &[u8] {
        self.read.as_ref().map_or(&[], |read| &read.json)
    }

    /// Returns the BLAKE3 hash of the file, in hexadecimal.
    pub fn blake3(&self) -> &str {
        &self.blake3
    }

    /// Returns the number of ids: one more than the largest. Some may be unused.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Checks that the tokens of another tokenizer have the same ids here, so that a model of the
    /// other tokenizer can take ids of this one.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` with the first token that has another id; `name` is the name of
    /// this tokenizer.
    pub fn require_tokens_of(&self, name: &str, other: &Self) -> Result<(), DataError> {
        let mut tokens: Vec<(u32, String)> = match &other.read {
            Some(read) => {
                let ids = read.tokenizer.get_vocab(true);
                ids.into_iter().map(|(token, id)| (id, token)).collect()
            }
            None => Vec::new(),
        };
        tokens.sort_unstable();
        for (id, token) in tokens {
            let found = self.id_of(&token);
            if found != Some(id) {
                let here = found.map_or("none".to_string(), |found| found.to_string());
                let why = format!(
                    "has other ids than the model's tokenizer: {token:?} has {id} there, and \
                     {here} here"
                );
                return Err(DataError::of_file(name, why));
            }
        }
        Ok(())
    }

    /// Returns the ids of a text, without the ids that a model's template adds around it. To save
    /// memory, a long text is divided at places where the ids do not change, if there are any, and
    /// encoded in parts.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` if the tokenizer refuses the text, which error messages call
    /// `name`, or was not read.
    pub fn encode(&self, name: &str, text: &str) -> Result<Vec<u32>, DataError> {
        self.encode_parts(name, text, PART_BYTES)
    }

    /// Encodes a text in parts of about this number of bytes; see [`Self::encode`].
    fn encode_parts(&self, name: &str, text: &str, bytes: usize) -> Result<Vec<u32>, DataError> {
        let mut ids = Vec::new();
        for parts in self.parts(name, text, bytes)?.chunks(PARTS_AT_A_TIME) {
            for encoded in self.encode_each(name, parts)? {
                ids.extend(encoded);
            }
        }
        Ok(ids)
    }

    /// Divides a text into parts of about this number of bytes, at places where a division does not
    /// change the ids.
    ///
    /// # Errors
    /// Returns the errors of [`Self::encode`].
    pub(crate) fn parts<'a>(
        &self,
        name: &str,
        text: &'a str,
        bytes: usize,
    ) -> Result<Vec<&'a str>, DataError> {
        let mut parts = Vec::new();
        let mut rest = text;
        while rest.len() > bytes {
            let TextDivision::At(end) = self.division(name, rest, bytes, true)? else { break };
            let (part, behind) = rest.split_at(end);
            parts.push(part);
            rest = behind;
        }
        if !rest.is_empty() {
            parts.push(rest);
        }
        Ok(parts)
    }

    /// Ids of each of some texts, which are encoded on all threads.
    fn encode_each(&self, name: &str, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        texts.par_iter().map(|text| self.encode_piece(name, text)).collect()
    }

    /// Returns the ids of a text, encoded as a whole on the calling thread.
    ///
    /// # Errors
    /// Returns the errors of [`Self::encode`].
    pub(crate) fn encode_piece(&self, name: &str, text: &str) -> Result<Vec<u32>, DataError> {
        let refused =
            |why: String| DataError::of_file(name, format!("cannot be tokenized ({why})"));
        let read = self.read.as_ref().ok_or_else(|| refused("no tokenizer was read".into()))?;
        read.encode(text).map_err(refused)
    }

    /// Finds the end of the first part of a text, of at least `bytes` bytes: after a line end, or
    /// before a space between words, where a division does not change the ids of the surrounding
    /// text. After a number of failures, the search continues after twice as many bytes. With a
    /// tokenizer that adds a prefix to every text, hardly any place is suitable. `is_end` is true
    /// if no text follows.
    ///
    /// # Errors
    /// Returns the errors of [`Self::encode`].
    pub(crate) fn division(
        &self,
        name: &str,
        text: &str,
        bytes: usize,
        is_end: bool,
    ) -> Result<TextDivision, DataError> {
        let mut first = bytes;
        let mut tried = 0;
        for end in places(text, bytes) {
            if end < first {
                continue;
            }
            if end == text.len() || !is_end && text.len() < end + WINDOW_BYTES {
                break;
            }
            let before = &text[boundary(text, end.saturating_sub(WINDOW_BYTES))..end];
            let behind = &text[end..boundary(text, text.len().min(end + WINDOW_BYTES))];
            // A longer run of spaces may be one token, which the window would cut.
            if [before, behind].iter().any(|part| part.trim().is_empty()) {
                continue;
            }
            let whole = [before, behind].concat();
            let mut apart = self.encode_piece(name, before)?;
            apart.extend(self.encode_piece(name, behind)?);
            if apart == self.encode_piece(name, &whole)? {
                return Ok(TextDivision::At(end));
            }
            tried += 1;
            if tried == TRIES {
                first = 2 * first.max(1);
                tried = 0;
            }
        }
        Ok(if is_end { TextDivision::Nowhere } else { TextDivision::Unknown })
    }

    /// Returns the id of a token.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.read.as_ref()?.tokenizer.token_to_id(token)
    }

    /// Returns the tokenizer that recognizes special tokens in texts.
    pub fn with_special(&self) -> Self {
        let Some(read) = &self.read else { return self.clone() };
        let mut tokenizer = read.tokenizer.clone();
        tokenizer.set_encode_special_tokens(false);
        let read = ReadFile { json: read.json.clone(), tokenizer, leaves_out: read.leaves_out };
        Self { read: Some(Arc::new(read)), ..self.clone() }
    }

    /// Returns the token that the model's template puts in front of every text, if it puts one
    /// there.
    pub fn begin_token(&self) -> Option<u32> {
        let [bare, whole] = self.without_and_with_template()?;
        let (first, rest) = whole.split_first()?;
        if rest.starts_with(&bare) { Some(*first) } else { None }
    }

    /// Ids of a text without the model's template, and with it; `None` if the file was not read.
    fn without_and_with_template(&self) -> Option<[Vec<u32>; 2]> {
        const TEXT: &str = "a";
        let tokenizer = &self.read.as_ref()?.tokenizer;
        let bare = tokenizer.encode_fast(TEXT, false).ok()?;
        let whole = tokenizer.encode_fast(TEXT, true).ok()?;
        Some([bare, whole].map(|encoded| encoded.get_ids().to_vec()))
    }

    /// Returns the token that ends each document: that of the data, if it is known, else the
    /// `eos_token` of the `tokenizer_config.json` of a directory, or else the first of the common
    /// names that is a token.
    ///
    /// # Errors
    /// Returns a `DataError` that names the file if it is not a configuration, or if its
    /// `eos_token` is not a token.
    pub fn end_token(&self, directory: &Path) -> Result<Option<u32>, DataError> {
        if self.end.is_some() {
            return Ok(self.end);
        }
        if let Some(token) = TokenizerConfig::read(directory)?.eos_token.map(StoredToken::text) {
            let name = TokenizerConfig::path(directory).display().to_string();
            let id = self.id_of(&token).ok_or_else(|| {
                DataError::of_file(&name, format!("has the eos_token {token:?}, which is no token"))
            })?;
            return Ok(Some(id));
        }
        Ok(self.named_end_token())
    }

    /// Returns the token that ends the documents of the data, if that is known.
    pub fn end_of_data(&self) -> Option<u32> {
        self.end
    }

    /// Returns the token that ends the documents of the data, if that is known, or else the first
    /// of the common names for the end of a document that is a token.
    pub fn named_end_token(&self) -> Option<u32> {
        if self.end.is_some() {
            return self.end;
        }
        END_TOKENS.iter().find_map(|token| self.id_of(token))
    }

    /// Returns the text of ids. Unknown ids are left out, and bytes that are not UTF-8 become
    /// U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let Some(read) = &self.read else { return String::new() };
        // Only a decoder that the file does not describe could fail.
        read.tokenizer.decode(ids, false).unwrap_or_default()
    }
}

/// Returns the places at which a text may be divided, after at least `bytes` bytes: after line
/// ends, and before single spaces.
fn places(text: &str, bytes: usize) -> impl Iterator<Item = usize> {
    let start = boundary(text, text.len().min(bytes));
    let mut before = ' ';
    text[start..].char_indices().filter_map(move |(at, char)| {
        let is_after_word = !before.is_whitespace();
        before = char;
        let after = start + at + char.len_utf8();
        match char {
            '\n' => Some(after),
            ' ' if is_after_word && !text[after..].starts_with(char::is_whitespace) => {
                Some(start + at)
            }
            _ => None,
        }
    })
}

/// The last boundary between characters at or before a byte.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

impl PartialEq for TokenizerFile {
    fn eq(&self, other: &Self) -> bool {
        self.blake3 == other.blake3
    }
}

impl Eq for TokenizerFile {}

impl fmt::Debug for TokenizerFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenizerFile({} of {} ids)", self.blake3, self.vocabulary)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::tokenizer::written;

    #[derive(serde::Deserialize)]
    struct Golden {
        lines: Vec<String>,
        files: HashMap<String, GoldenFile>,
    }

    #[derive(serde::Deserialize)]
    struct GoldenFile {
        json: String,
    }

    #[test]
    fn a_kind_that_other_trainers_know_is_no_path() {
        let refused = |name: &str| TokenizerFile::load(Path::new(name)).unwrap_err().to_string();
        assert_eq!(
            refused("gpt2"),
            "gpt2: is no kind of tokenizer here; give the path of a tokenizer.json"
        );
        assert!(refused("not/there.json").ends_with("or the path of a tokenizer.json"));
    }

    #[test]
    fn token_that_the_template_puts_in_front_is_found() {
        let json = |template: &str| {
            format!(
                r#"{{"version": "1.0", "added_tokens": [{{"id": 0, "content": "<s>",
                    "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                    "special": true}}], "normalizer": null,
                    "pre_tokenizer": {{"type": "Whitespace"}}, "post_processor": {template},
                    "decoder": null, "model": {{"type": "WordLevel",
                    "vocab": {{"<s>": 0, "a": 1, "<unk>": 2}}, "unk_token": "<unk>"}}}}"#
            )
        };
        let begins = r#"{"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}"#;
        let around = [
            r#"{"SpecialToken": {"id": "<s>", "type_id": 0}}"#,
            r#"{"Sequence": {"id": "A", "type_id": 0}}"#,
        ];
        let ends = begins.replace(&around.join(", "), &[around[1], around[0]].join(", "));
        assert_ne!(ends, begins);
        let bert = r#"{"type": "BertProcessing", "sep": ["<unk>", 2], "cls": ["<s>", 0]}"#;
        for (template, expected) in
            [(begins, Some(0)), (&ends, None), (bert, Some(0)), ("null", None)]
        {
            let file = TokenizerFile::from_json("t", json(template).into_bytes()).unwrap();
            assert_eq!(file.begin_token(), expected);
            assert_eq!(file.encode("t", "a").unwrap(), [1]);
            // As in training, for other programs.
            let bare = file.without_template().unwrap();
            assert_eq!(bare.without_and_with_template(), Some([vec![1], vec![1]]));
            assert_eq!(bare.encode("t", "a").unwrap(), [1]);
            assert_eq!(bare == file, template == "null");
        }
        let several = format!(r#"{{"type": "Sequence", "processors": [{begins}]}}"#);
        let file = TokenizerFile::from_json("t", json(&several).into_bytes()).unwrap();
        assert_eq!(file.begin_token(), Some(0));
        assert_eq!(file.without_template().unwrap().begin_token(), None);
    }

    #[test]
    fn end_of_documents_is_kept_and_comes_before_common_names() {
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": {"type":
            "WordLevel", "vocab": {"</s>": 0, "<eos>": 1, "end": 2}, "unk_token": "end"}}"#;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokenizer.json");
        fs::write(&path, json).unwrap();
        let file = TokenizerFile::load(&path).unwrap();
        assert_eq!(file.named_end_token(), Some(0));
        let known = file.clone().with_end(Some(2));
        assert_eq!(known.clone().with_end(None).named_end_token(), Some(2));
        fs::write(TokenizerConfig::path(directory.path()), r#"{"eos_token": "<eos>"}"#).unwrap();
        let ends = [&file, &known].map(|file| file.end_token(directory.path()).unwrap());
        assert_eq!(ends, [Some(1), Some(2)]);
        let saved = serde_json::to_string(&known).unwrap();
        let restored: TokenizerFile = serde_json::from_str(&saved).unwrap();
        assert_eq!(restored.read_from(&path).unwrap().named_end_token(), Some(2));
        let earlier: TokenizerFile =
            serde_json::from_str(&serde_json::to_string(&file).unwrap()).unwrap();
        assert_eq!(earlier.read_from(&path).unwrap().named_end_token(), Some(0));
    }

    #[test]
    fn characters_without_a_token_are_refused_and_not_left_out() {
        let characters = written::of_characters(&['a', 'b', '\n']).unwrap();
        assert_eq!(characters.encode("t", "ab\na").unwrap(), [0, 1, 2, 0]);
        for text in ["abéa", "éab", "abé", "é"] {
            let error = characters.encode("t", text).unwrap_err().to_string();
            assert!(error.contains("it has no token for the character 'é'"), "{text}: {error}");
        }
        // The token in front of every text stands for no character.
        let json = r#"{"version": "1.0", "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
            "split": true}, "post_processor": null, "decoder": null, "model": {"type": "BPE",
            "vocab": {"▁": 0, "a": 1}, "merges": []}}"#;
        let prefixed = TokenizerFile::from_json("t", json.into()).unwrap();
        assert_eq!(prefixed.encode("t", "a a").unwrap(), [0, 1, 0, 1]);
        for text in ["aé", "é", "a é a"] {
            let error = prefixed.encode("t", text).unwrap_err().to_string();
            assert!(error.contains("it has no token for the character 'é'"), "{text}: {error}");
        }
        let bytes = written::of_bytes().unwrap();
        assert_eq!(bytes.encode("t", "é").unwrap(), [0xC3, 0xA9]);
    }

    #[test]
    fn parts_of_a_long_text_have_the_ids_of_the_whole() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tokenizers.json.gz");
        let file = flate2::read::GzDecoder::new(fs::File::open(path).unwrap());
        let Golden { lines, files } = serde_json::from_reader(file).unwrap();
        for separator in ["\n", "", " "] {
            let text = lines.join(separator);
            for (name, file) in &files {
                let file = TokenizerFile::from_json(name, file.json.clone().into_bytes()).unwrap();
                let whole = file.encode_parts(name, &text, usize::MAX).unwrap();
                for bytes in [100, 777, 5000] {
                    let parts = file.encode_parts(name, &text, bytes).unwrap();
                    assert!(parts == whole, "{name}, parts of {bytes} bytes, {separator:?}");
                }
                // One that begins every text with a space can divide it hardly anywhere.
                let found = file.division(name, &text, 777, true).unwrap();
                let is_near = matches!(found, TextDivision::At(end) if end < 5000);
                assert!(is_near || name == "llama2", "{name}, {separator:?}: {found:?}");
                // A decision made before the end is known holds after it.
                for bytes in (1000..text.len()).step_by(1500) {
                    let begun = &text[..boundary(&text, bytes)];
                    let early = file.division(name, begun, 777, false).unwrap();
                    let is_same = early == found || early == TextDivision::Unknown;
                    assert!(is_same, "{name}, {bytes} bytes: {early:?}, {found:?}");
                }
            }
        }
    }
}
