//! Text data set: the tokens of a text, divided into a training split and a validation split, the
//! held-out tail.

use std::fs;
use std::io::{self, BufRead, Read};
use std::path::Path;

use super::{DataError, DataFile, FileRole, Split, Tokenizer, TokenizerKind, tokens};

/// U+FEFF in UTF-8.
pub(crate) const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Tokenizer for a text: derived from the text, or given (by a checkpoint, say).
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizerChoice {
    Derived(TokenizerKind),
    Given(Tokenizer),
}

impl TokenizerChoice {
    /// Returns true if the byte order mark in front of `rest` has tokens: each byte of a file is
    /// one, and the characters of a run may have it, as those of files that were joined do.
    fn has_mark(&self, rest: &[u8]) -> bool {
        match self {
            Self::Derived(TokenizerKind::Byte) => true,
            Self::Derived(TokenizerKind::Char) => {
                rest.windows(BYTE_ORDER_MARK.len()).any(|bytes| bytes == BYTE_ORDER_MARK)
            }
            Self::Given(Tokenizer::Byte) => true,
            Self::Given(Tokenizer::Char { chars }) => chars.contains(&'\u{FEFF}'),
            Self::Given(Tokenizer::File(_)) => false,
        }
    }
}

impl From<TokenizerKind> for TokenizerChoice {
    fn from(kind: TokenizerKind) -> Self {
        Self::Derived(kind)
    }
}

impl From<Tokenizer> for TokenizerChoice {
    fn from(tokenizer: Tokenizer) -> Self {
        Self::Given(tokenizer)
    }
}

/// Tokens of a text, with their tokenizer and the boundary of the splits.
#[derive(Clone, Debug, PartialEq)]
pub struct TextData {
    tokenizer: Tokenizer,
    tokens: Vec<u32>,
    /// Number of tokens in the training split.
    training: usize,
    /// File of the text; `None` for a text in memory.
    file: Option<DataFile>,
}

/// Longest first line of JSON lines that is recognized, in bytes.
const JSON_LINE_MAX: u64 = 1 << 20;

/// Returns true if a file is named as one of JSON lines and begins with an object: its text has
/// keys and escapes that no reader of the documents wants to learn.
pub fn is_json_lines(path: &Path) -> bool {
    let ending = path.extension().unwrap_or_default();
    if ending != "jsonl" && ending != "ndjson" {
        return false;
    }
    let Ok(file) = fs::File::open(path) else { return false };
    let mut line = Vec::new();
    let read = io::BufReader::new(file.take(JSON_LINE_MAX)).read_until(b'\n', &mut line);
    read.is_ok() && serde_json::from_slice::<serde_json::Map<_, _>>(&line).is_ok()
}

/// Returns a text in UTF-8 without the byte order mark that programs of Windows put in front of it,
/// which is no character of the text.
pub(crate) fn without_byte_order_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

impl TextData {
    /// Reads a text file. `held_out` is the share of its tokens, at the end, that is not trained
    /// on (0 = none); `context` is the number of tokens in a sample.
    ///
    /// # Errors
    /// Returns a `DataError` that names the file and the place in it if the file is missing, a
    /// directory, empty, or not UTF-8 although a character tokenizer is used, if it has a
    /// character outside a given vocabulary, if a split has fewer than `context + 1` tokens, if
    /// there are more than `u32::MAX` tokens, or if `held_out` is not in `0.0..1.0`.
    pub fn load(
        path: &Path,
        tokenizer: impl Into<TokenizerChoice>,
        held_out: f64,
        context: usize,
    ) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(why) if why.kind() == io::ErrorKind::IsADirectory || path.is_dir() => {
                return Err(DataError::Directory { name });
            }
            Err(why) => return Err(DataError::Read { name, why }),
        };
        let file_name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        let mut file = DataFile::of(&file_name, &bytes);
        file.role = Some(FileRole::Training);
        Ok(Self {
            file: Some(file),
            ..Self::from_bytes(&name, &bytes, tokenizer, held_out, context)?
        })
    }

    /// Like [`TextData::load`], for a text in memory; error messages call it `name`.
    pub fn from_bytes(
        name: &str,
        bytes: &[u8],
        tokenizer: impl Into<TokenizerChoice>,
        held_out: f64,
        context: usize,
    ) -> Result<Self, DataError> {
        if !(0.0..1.0).contains(&held_out) {
            return Err(DataError::HeldOut { held_out });
        }
        if bytes.is_empty() {
            return Err(DataError::Empty { name: name.into() });
        }
        let tokenizer = tokenizer.into();
        let rest = without_byte_order_mark(bytes);
        let has_mark = rest.len() < bytes.len() && tokenizer.has_mark(rest);
        let bytes = if has_mark { bytes } else { rest };
        let tokenizer = match tokenizer {
            TokenizerChoice::Derived(kind) => Tokenizer::derive_named(kind, name, bytes)?,
            TokenizerChoice::Given(tokenizer) => tokenizer,
        };
        let tokens = tokenizer.encode_named(name, bytes)?;
        // Positions of tokens fit the 32-bit integers of the shaders.
        if tokens.len() > u32::MAX as usize {
            return Err(DataError::Long { name: name.into(), tokens: tokens.len() });
        }
        let training = ((1.0 - held_out) * tokens.len() as f64) as usize;
        let data = Self { tokenizer, tokens, training, file: None };
        for split in [Split::Train, Split::Validation] {
            let tokens = data.tokens(split).len();
            let used = split == Split::Train || held_out > 0.0;
            if used && tokens < context + 1 {
                return Err(DataError::Short { name: name.into(), split, tokens, context });
            }
        }
        Ok(data)
    }

    /// Returns the file that the text was read from; `None` for a text in memory.
    pub fn file(&self) -> Option<&DataFile> {
        self.file.as_ref()
    }

    /// Returns the tokenizer, given or derived from the text.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns a hash of the tokens and of the boundary of the splits, which a resumed run
    /// compares with the saved one.
    pub fn fingerprint(&self) -> String {
        if let Tokenizer::File(file) = &self.tokenizer {
            return tokens::fingerprint_of(&self.tokens, file.vocabulary(), self.training);
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.training as u64).to_le_bytes());
        // Hashed as laid out in memory, which is little-endian wherever checkpoints can be
        // written.
        hasher.update(bytemuck::cast_slice(&self.tokens));
        hasher.finalize().to_hex().to_string()
    }

    /// Returns the tokens of a split; the validation split is empty if nothing is held out.
    pub fn tokens(&self, split: Split) -> &[u32] {
        let (training, held_out) = self.tokens.split_at(self.training);
        match split {
            Split::Train => training,
            Split::Validation => held_out,
        }
    }

    /// Returns the sample that starts at token `start` of a split: `(t)` tokens, and as targets
    /// the `(t)` tokens that follow each of them. Panics if `start` is not below
    /// [`TextData::window_count`].
    pub fn sample(&self, split: Split, start: u64, context: usize) -> (&[u32], &[u32]) {
        let start = start as usize;
        let window = &self.tokens(split)[start..start + context + 1];
        (&window[..context], &window[1..])
    }

    /// Returns the number of samples in a split if they may overlap: every token but the last
    /// `context` can start one.
    pub fn window_count(&self, split: Split, context: usize) -> u64 {
        self.tokens(split).len().saturating_sub(context) as u64
    }

    /// Returns the starts of the samples that cover a split once without overlap, for evaluation;
    /// a remainder at the end that does not fill a sample is left out.
    pub fn evaluation_windows(&self, split: Split, context: usize) -> Vec<u64> {
        (0..self.window_count(split, context)).step_by(context.max(1)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PrepareOptions, TokenFile, TokenizerFile, prepare};
    use potluck_core::setting::as_fields;

    fn digits(held_out: f64, context: usize) -> Result<TextData, DataError> {
        let text = b"01234567890123456789";
        TextData::from_bytes("digits", text, TokenizerKind::Char, held_out, context)
    }

    #[test]
    fn targets_are_the_tokens_that_follow() {
        let data = digits(0.25, 4).unwrap();
        assert_eq!(data.tokens(Split::Train).len(), 15);
        assert_eq!(data.tokens(Split::Validation), [5, 6, 7, 8, 9]);
        assert_eq!(data.sample(Split::Train, 2, 4), (&[2, 3, 4, 5][..], &[3, 4, 5, 6][..]));
        assert_eq!(data.sample(Split::Validation, 0, 4), (&[5, 6, 7, 8][..], &[6, 7, 8, 9][..]));
        let last = data.window_count(Split::Train, 4) - 1;
        assert_eq!(data.sample(Split::Train, last, 4), (&[0, 1, 2, 3][..], &[1, 2, 3, 4][..]));
        assert_eq!(data.window_count(Split::Validation, 4), 1);
    }

    #[test]
    fn windows_do_not_overlap_and_fit() {
        let data = digits(0.0, 4).unwrap();
        assert_eq!(data.evaluation_windows(Split::Train, 4), [0, 4, 8, 12]);
        assert_eq!(data.evaluation_windows(Split::Train, 3), [0, 3, 6, 9, 12, 15]);
        assert_eq!(data.evaluation_windows(Split::Train, 19), [0]);
        assert!(data.evaluation_windows(Split::Validation, 4).is_empty());
        assert_eq!(data.window_count(Split::Validation, 4), 0);
    }

    #[test]
    fn the_held_out_tenth_is_cut_where_nano_gpt_cuts_it() {
        let text = vec![b'a'; 1_115_394];
        let data = TextData::from_bytes("text", &text, TokenizerKind::Byte, 0.1, 64).unwrap();
        assert_eq!(data.tokens(Split::Train).len(), 1_003_854);
        assert_eq!(data.evaluation_windows(Split::Validation, 64).len(), 1742);
    }

    #[test]
    fn parts_that_are_too_short_are_named() {
        assert!(digits(0.0, 19).is_ok());
        let error = digits(0.0, 20).unwrap_err();
        assert!(matches!(error, DataError::Short { split: Split::Train, tokens: 20, .. }));
        let error = digits(0.1, 4).unwrap_err();
        assert!(matches!(error, DataError::Short { split: Split::Validation, tokens: 2, .. }));
        assert_eq!(
            error.to_string(),
            "digits: its held-out part has 2 tokens, and a context of 4 needs at least 5; \
             give more text, lower model.context or change data.held_out"
        );
        let fields = as_fields(|| error.to_string());
        assert!(fields.ends_with("lower the context or change held_out"), "{fields}");
        for held_out in [1.0, -0.1, f64::NAN] {
            assert!(matches!(digits(held_out, 4), Err(DataError::HeldOut { .. })));
        }
    }

    #[test]
    fn byte_order_mark_is_a_token_of_bytes_only() {
        let text = "\u{FEFF}abab".as_bytes();
        let of =
            |choice: TokenizerChoice| TextData::from_bytes("text", text, choice, 0.0, 2).unwrap();
        let characters = of(TokenizerKind::Char.into());
        assert_eq!(characters.tokenizer(), &Tokenizer::Char { chars: vec!['a', 'b'] });
        assert_eq!(characters.tokens(Split::Train), [0, 1, 0, 1]);
        let given = of(Tokenizer::Char { chars: vec!['b', 'a'] }.into());
        assert_eq!(given.tokens(Split::Train), [1, 0, 1, 0]);
        let marked = of(Tokenizer::Char { chars: vec!['a', 'b', '\u{FEFF}'] }.into());
        assert_eq!(marked.tokens(Split::Train), [2, 0, 1, 0, 1]);
        assert_eq!(of(TokenizerKind::Byte.into()).tokens(Split::Train).len(), 7);
        // A resume reads a text of joined files as the run did.
        let joined = "\u{FEFF}ab\u{FEFF}ab".as_bytes();
        let derived = TextData::from_bytes("text", joined, TokenizerKind::Char, 0.0, 2).unwrap();
        let saved = derived.tokenizer().clone();
        let again = TextData::from_bytes("text", joined, saved, 0.0, 2).unwrap();
        assert_eq!(again, derived);
        let mark = TextData::from_bytes("text", BYTE_ORDER_MARK, TokenizerKind::Char, 0.0, 2);
        assert!(matches!(mark, Err(DataError::Short { tokens: 0, .. })), "{mark:?}");
    }

    #[test]
    fn a_given_tokenizer_is_used_as_it_is() {
        let tokenizer = Tokenizer::Char { chars: vec!['b', 'a'] };
        let data = TextData::from_bytes("text", b"abba", tokenizer.clone(), 0.0, 2).unwrap();
        assert_eq!(data.tokens(Split::Train), [1, 0, 0, 1]);
        assert_eq!(data.tokenizer(), &tokenizer);
        let error = TextData::from_bytes("text", b"ab\nc", tokenizer, 0.0, 2).unwrap_err();
        assert!(matches!(error, DataError::Unknown { character: '\n', .. }), "{error}");
    }

    #[test]
    fn errors_name_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let load = |path: &Path| TextData::load(path, TokenizerKind::Char, 0.0, 4).unwrap_err();

        let missing = directory.path().join("missing.txt");
        assert!(matches!(load(&missing), DataError::Read { .. }));
        assert!(load(&missing).to_string().contains("missing.txt"));
        assert!(matches!(load(directory.path()), DataError::Directory { .. }));
        assert!(load(directory.path()).to_string().contains(": is a directory"));

        let file = directory.path().join("file.txt");
        fs::write(&file, b"").unwrap();
        assert!(matches!(load(&file), DataError::Empty { .. }));
        assert!(load(&file).to_string().contains("file.txt: is empty"));
        for (name, bytes, advice) in [
            ("a.txt", &b"\xFF\xFEa\0"[..], "it is UTF-16: save it as UTF-8"),
            ("a.npz", b"PK\x03\x04\xFF", "a directory with inputs.npy and targets.npy"),
            ("a.pt", b"PK\x03\x04\xFF", "files of PyTorch are not read as data"),
            ("a.parquet", b"PAR1\xFF", "write the table as CSV"),
            ("b.txt", b"\xFF", "convert it, or set "),
        ] {
            let file = directory.path().join(name);
            fs::write(&file, bytes).unwrap();
            assert!(load(&file).to_string().contains(advice), "{name}");
        }
        fs::write(&file, b"abc\nde\xC3").unwrap();
        let error = load(&file);
        assert!(matches!(error, DataError::NotUtf8 { offset: 6, line: 2, .. }), "{error}");
        assert!(error.to_string().contains("file.txt"), "{error}");

        fs::write(&file, "abcäef").unwrap();
        let data = TextData::load(&file, TokenizerKind::Byte, 0.0, 4).unwrap();
        assert_eq!(data.tokens(Split::Train).len(), 7);
    }

    #[test]
    fn json_lines_are_recognized_by_name_and_content() {
        let directory = tempfile::tempdir().unwrap();
        let is = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::write(&path, text).unwrap();
            is_json_lines(&path)
        };
        assert!(is("a.jsonl", "{\"text\": \"one\"}\n{"));
        assert!(is("a.ndjson", "{\"text\": \"one\"}"));
        assert!(!is("a.txt", "{\"text\": \"one\"}\n") && !is("b.jsonl", "some text\n"));
        assert!(!is("c.jsonl", "[1]\n") && !is("d.jsonl", ""));
        assert!(!is_json_lines(&directory.path().join("missing.jsonl")));
    }

    /// A run can then be resumed on a machine without the cache that it used.
    #[test]
    fn ids_in_memory_have_the_fingerprint_of_those_on_disk() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tokenizers.json.gz");
        let file = flate2::read::GzDecoder::new(fs::File::open(path).unwrap());
        let golden: serde_json::Value = serde_json::from_reader(file).unwrap();
        let json = golden["files"]["gpt2"]["json"].as_str().unwrap();
        let tokenizer = TokenizerFile::from_json("gpt2", json.into()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (text, out) = (directory.path().join("a.jsonl"), directory.path().join("out"));
        fs::write(&text, "some text, and more of it\n".repeat(400)).unwrap();
        let options = PrepareOptions::of_text(&text, &tokenizer, out);
        let prepared = prepare(&options, &mut |_| {}).unwrap();
        for held_out in [0.0, 0.3] {
            let on_disk = TokenFile::open(&prepared.path, held_out, 4).unwrap();
            let given = Tokenizer::File(tokenizer.clone());
            let in_memory = TextData::load(&text, given, held_out, 4).unwrap();
            assert_eq!(in_memory.fingerprint(), on_disk.fingerprint());
        }
    }
}
