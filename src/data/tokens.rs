//! Token files: the tokens of a corpus as integers on disk, which may be larger than memory.
//!
//! `NAME.bin` holds the tokens as little-endian `u16` or `u32`; `NAME.json` beside it describes
//! them:
//!
//! ```json
//! {"version": 2, "vocabulary": 50257, "dtype": "u16", "count": 1000, "blake3": "..",
//!  "tokenizer": "..", "documents": [0, 700], "mask": ".."}
//! ```
//!
//! `blake3` is the hash of the tokens' bytes, `tokenizer` the hash of the `tokenizer.json` whose
//! ids they are, and `documents` are the positions of the first tokens of the documents. With a
//! `mask`, the hash of `NAME.mask`, only those tokens are targets whose byte there is 1. These
//! three are optional, and missing in version 1. Without `NAME.json`, the tokens are `u16`, as
//! nanoGPT writes them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use super::dataset::{Dataset, DatasetInput, NamedInputs};
use super::prepare::is_begun;
use super::tokenizer::TOKENIZER;
use super::{DataDescription, DataError, DataFile, FileRole, Split, TokenizerFile};
use potluck_core::format::counted;
use potluck_core::{DType, HostTensor};

/// Bytes of a chunk that is hashed and checked, a multiple of every token's size.
const CHUNK: usize = 1 << 20;

/// Name of the tokens in the output directory of a preparation.
pub(crate) const TOKENS: &str = "tokens.bin";

/// Ignored target: it is not a class.
pub(crate) const NO_TARGET: u32 = u32::MAX;

/// Type of the tokens in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TokenType {
    U16,
    U32,
}

impl TokenType {
    /// Returns the smallest type of the tokens of a vocabulary.
    pub fn of(vocabulary: usize) -> Self {
        if vocabulary <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// Writes a token, which must be of a vocabulary of this type.
    pub fn write(self, file: &mut impl Write, token: u32) -> io::Result<()> {
        file.write_all(&token.to_le_bytes()[..self.size()])
    }

    /// Returns the bytes of a token.
    pub fn size(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    fn tokens(self, bytes: &[u8]) -> impl Iterator<Item = u32> {
        bytes.chunks_exact(self.size()).map(move |bytes| match *bytes {
            [a, b] => u32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            _ => 0,
        })
    }
}

/// Description of a token file.
#[derive(Clone, Debug, serde::Deserialize, serde::Serialize)]
pub(crate) struct TokenFileInfo {
    #[serde(default = "first_version")]
    pub version: u32,
    /// Size of the vocabulary; all tokens are below it.
    pub vocabulary: usize,
    pub dtype: TokenType,
    /// Number of tokens.
    pub count: u64,
    /// Hash of the tokens' bytes, in hexadecimal.
    pub blake3: String,
    /// Hash of the `tokenizer.json`, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// First tokens of the documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<Vec<u64>>,
    /// Hash of the mask of targets, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<String>,
    /// Token that ends the documents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_token: Option<u32>,
    /// Hash of the inputs of the preparation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inputs: Option<String>,
}

fn first_version() -> u32 {
    1
}

impl TokenFileInfo {
    /// Newest version, which is written.
    pub const VERSION: u32 = 2;

    /// Describes tokens without a description file, as nanoGPT writes them: 16 bits each.
    fn of_bare(bytes: &[u8]) -> Self {
        let dtype = TokenType::U16;
        Self {
            version: 1,
            vocabulary: dtype.tokens(bytes).max().map_or(1, |highest| highest as usize + 1),
            dtype,
            count: (bytes.len() / dtype.size()) as u64,
            blake3: blake3::hash(bytes).to_hex().to_string(),
            tokenizer: None,
            documents: None,
            mask: None,
            end_token: None,
            inputs: None,
        }
    }

    /// Reads a description.
    ///
    /// # Errors
    /// Returns `DataError` with the place if it is not JSON of this form, or contradicts itself.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, DataError> {
        let refuse = |place: &str, why: String| {
            Err(DataError::Invalid { name: name.into(), place: place.into(), why: why.into() })
        };
        let info: Self = match serde_json::from_slice(bytes) {
            Ok(info) => info,
            Err(why) => return refuse("", format!("does not describe tokens ({why})")),
        };
        if info.version == 0 || info.version > Self::VERSION {
            let why = format!("is {}; this version reads up to {}", info.version, Self::VERSION);
            return refuse("version", why);
        }
        if info.vocabulary == 0 {
            return refuse("vocabulary", "is 0; expected the number of different tokens".into());
        }
        if let Some(end) = info.end_token
            && end as usize >= info.vocabulary
        {
            let why = format!("{end} is not less than the vocabulary of {}", info.vocabulary);
            return refuse("end_token", why);
        }
        let hashes = [
            ("blake3", Some(&info.blake3)),
            ("tokenizer", info.tokenizer.as_ref()),
            ("mask", info.mask.as_ref()),
        ];
        for (place, hash) in hashes {
            if let Some(hash) = hash
                && blake3::Hash::from_hex(hash.as_str()).is_err()
            {
                return refuse(place, format!("{hash:?} is not a hash of 64 hexadecimal digits"));
            }
        }
        let Some(documents) = &info.documents else { return Ok(info) };
        if documents.first() != Some(&0) {
            return refuse("documents", "does not begin with 0".into());
        }
        if let Some(at) = documents.windows(2).position(|two| two[0] >= two[1]) {
            let (a, b) = (documents[at], documents[at + 1]);
            return refuse("documents", format!("{b} follows {a}; expected ascending starts"));
        }
        if let Some(last) = documents.last().filter(|last| **last >= info.count) {
            let count = info.count;
            return refuse("documents", format!("{last} is behind the end of {count} tokens"));
        }
        Ok(info)
    }

    /// Returns the number of training tokens: those before the held-out tail. It begins with the
    /// first document behind the share of the training tokens, or else with the one before; if that
    /// holds out less than half or more than twice of what is asked for, it begins within a
    /// document.
    fn training(&self, held_out: f64) -> u64 {
        let share = ((1.0 - held_out) * self.count as f64) as u64;
        let Some(documents) = &self.documents else { return share };
        let wanted = self.count - share;
        let next = documents.partition_point(|start| *start < share);
        if let Some(start) = documents.get(next)
            && self.count - start >= wanted / 2
        {
            return *start;
        }
        let before = documents[..next].last().filter(|start| **start > 0 && share < self.count);
        match before {
            Some(start) if (self.count - start) / 2 <= wanted => *start,
            _ => share,
        }
    }
}

/// Returns true if a path has the name of a token file: a file ending in `.bin`, or the output
/// directory of a preparation.
pub fn is_token_file(path: &Path) -> bool {
    is_bare(path) || is_described(path)
}

/// Returns true if a path is a token file with a description: the output directory of a
/// preparation, or a `.bin` with its `.json` beside it.
pub fn is_described(path: &Path) -> bool {
    let tokens = tokens_of(path);
    let is_named = tokens.extension().is_some_and(|ending| ending == "bin");
    is_named && tokens.is_file() && tokens.with_extension("json").is_file()
}

/// File of the tokens at a path: itself, or the one in a directory.
fn tokens_of(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(TOKENS) } else { path.to_path_buf() }
}

/// Returns true if a path is a `.bin`, whose ids have 16 bits unless described otherwise.
fn is_bare(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "bin") && path.is_file()
}

/// Tokens on disk, mapped into memory, with the boundary of the splits.
pub struct TokenFile {
    bytes: Mmap,
    /// 1 for each token that is a target, else 0; `None` if all are.
    mask: Option<Mmap>,
    info: TokenFileInfo,
    /// The `tokenizer.json` beside it.
    tokenizer: PathBuf,
    /// Number of tokens in the training split.
    training: usize,
    files: Vec<DataFile>,
}

impl TokenFile {
    /// Opens a `.bin` file with its description beside it, or those in the output directory of a
    /// preparation, and checks all of it once. `held_out` is the share of the tokens, at the end,
    /// that is not trained on (0 = none); it begins with a document if one begins near. `context`
    /// is the number of tokens in a sample. The file must not be changed while it is open.
    ///
    /// # Errors
    /// Returns a `DataError` if a file cannot be read, if length, hash or a token contradicts the
    /// description, if a split has fewer than `context + 1` tokens, or if `held_out` is not in
    /// `0.0..1.0`.
    pub fn open(path: &Path, held_out: f64, context: usize) -> Result<Self, DataError> {
        if !(0.0..1.0).contains(&held_out) {
            return Err(DataError::HeldOut { held_out });
        }
        let path = &tokens_of(path);
        let name = path.display().to_string();
        let info_path = path.with_extension("json");
        let info_name = info_path.display().to_string();
        let bytes = map(path).map_err(|why| DataError::Read { name: name.clone(), why })?;
        let mut files = Vec::new();
        let info = match fs::read(&info_path) {
            Ok(text) => {
                let hash = blake3::hash(&text).to_string();
                files.push(described(&info_path, text.len(), hash, FileRole::Labels));
                TokenFileInfo::parse(&info_name, &text)?
            }
            Err(why) if why.kind() == io::ErrorKind::NotFound => {
                if is_begun(path) {
                    let why = "is of a preparation that has not ended; type its line again";
                    return Err(DataError::of_file(name, why));
                }
                TokenFileInfo::of_bare(&bytes)
            }
            Err(why) => return Err(DataError::Read { name: info_name, why }),
        };
        check(&name, &bytes, &info)?;
        let hash = info.blake3.to_lowercase();
        files.push(described(path, bytes.len(), hash, FileRole::Training));
        let mut mask = None;
        if let Some(hash) = &info.mask {
            let mask_path = path.with_extension("mask");
            let of_tokens = checked_mask(&mask_path, info.count, hash)?;
            let hash = hash.to_lowercase();
            files.push(described(&mask_path, of_tokens.len(), hash, FileRole::Labels));
            mask = Some(of_tokens);
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));

        let training = info.training(held_out) as usize;
        let tokenizer = path.with_file_name(TOKENIZER);
        let file = Self { bytes, mask, info, tokenizer, training, files };
        for split in [Split::Train, Split::Validation] {
            let tokens = file.len(split);
            let used = split == Split::Train || held_out > 0.0;
            if used && tokens < context + 1 {
                return Err(DataError::Short { name, split, tokens, context });
            }
        }
        Ok(file)
    }

    /// Returns the number of different tokens.
    pub fn vocabulary(&self) -> usize {
        self.info.vocabulary
    }

    /// Returns the hash of the `tokenizer.json` whose ids these are, in hexadecimal; `None` if it
    /// is not known.
    pub fn tokenizer_hash(&self) -> Option<&str> {
        self.info.tokenizer.as_deref()
    }

    /// Returns the tokenizer whose ids these are, from the file beside the tokens; `None` if it is
    /// unknown, or the file does not exist.
    ///
    /// # Errors
    /// Returns a `DataError` that names the file if it cannot be read, or has another hash.
    pub fn tokenizer(&self) -> Result<Option<TokenizerFile>, DataError> {
        let Some(hash) = self.tokenizer_hash() else { return Ok(None) };
        if !self.tokenizer.is_file() {
            return Ok(None);
        }
        let found = TokenizerFile::load(&self.tokenizer)?;
        if !found.blake3().eq_ignore_ascii_case(hash) {
            let why = format!("is not the tokenizer of the tokens beside it, whose hash is {hash}");
            return Err(DataError::of_file(self.tokenizer.display(), why));
        }
        Ok(Some(found))
    }

    /// Returns a tokenizer of these tokens, which knows the token that ends their documents.
    pub fn with_end_token(&self, tokenizer: TokenizerFile) -> TokenizerFile {
        tokenizer.with_end(self.info.end_token)
    }

    /// Returns the path of the tokenizer beside the tokens, which need not exist.
    pub fn tokenizer_path(&self) -> &Path {
        &self.tokenizer
    }

    /// Returns the files, by their names.
    pub fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// Returns the number of tokens of a split.
    pub fn len(&self, split: Split) -> usize {
        self.range(split).len()
    }

    /// Returns true if a split has no token.
    pub fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }

    /// Returns some tokens of a split.
    ///
    /// # Panics
    /// If the range does not lie within [`TokenFile::len`].
    pub fn tokens(&self, split: Split, range: Range<usize>) -> Vec<u32> {
        let within = self.range(split);
        assert!(range.end <= within.len(), "{range:?} is outside the {} tokens", within.len());
        let size = self.info.dtype.size();
        let bytes = (within.start + range.start) * size..(within.start + range.end) * size;
        self.info.dtype.tokens(&self.bytes[bytes]).collect()
    }

    /// Replaces masked tokens of a split from `start` on by the ignored target.
    fn mask_targets(&self, split: Split, start: usize, targets: &mut [u32]) {
        let Some(mask) = &self.mask else { return };
        let first = self.range(split).start + start;
        for (target, is_target) in targets.iter_mut().zip(&mask[first..]) {
            if *is_target == 0 {
                *target = NO_TARGET;
            }
        }
    }

    /// Returns a hash of the tokens, of the places of targets, and of the boundary of the splits.
    pub fn fingerprint(&self) -> String {
        let mut hasher = hasher_of(self.training, &self.info.blake3);
        if let Some(mask) = &self.info.mask {
            hasher.update(mask.to_lowercase().as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Tokens of a split, by their places in the file.
    fn range(&self, split: Split) -> Range<usize> {
        match split {
            Split::Train => 0..self.training,
            Split::Validation => self.training..self.bytes.len() / self.info.dtype.size(),
        }
    }
}

/// Fingerprint of tokens in memory with the ids of a tokenizer's file: a token file with these
/// tokens has the same one.
pub(crate) fn fingerprint_of(tokens: &[u32], vocabulary: usize, training: usize) -> String {
    let dtype = TokenType::of(vocabulary);
    let mut hasher = blake3::Hasher::new();
    for chunk in tokens.chunks(CHUNK) {
        let mut bytes = Vec::with_capacity(chunk.len() * dtype.size());
        for token in chunk {
            bytes.extend_from_slice(&token.to_le_bytes()[..dtype.size()]);
        }
        hasher.update(&bytes);
    }
    let hash = hasher.finalize().to_hex();
    hasher_of(training, &hash).finalize().to_hex().to_string()
}

fn hasher_of(training: usize, blake3: &str) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(training as u64).to_le_bytes());
    hasher.update(blake3.to_lowercase().as_bytes());
    hasher
}

/// Maps a regular file into memory.
fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    // SAFETY: the file must not be changed while it is open, as `TokenFile::open` documents;
    // potluck does not change it.
    unsafe { Mmap::map(&file) }
}

/// Maps a mask of targets, and checks it.
fn checked_mask(path: &Path, count: u64, hash: &str) -> Result<Mmap, DataError> {
    let name = path.display().to_string();
    let mask = map(path).map_err(|why| DataError::Read { name: name.clone(), why })?;
    let refuse = |place: String, why: String| {
        Err(DataError::Invalid { name: name.clone(), place, why: why.into() })
    };
    if mask.len() as u64 != count {
        let why =
            format!("is {} bytes long; one for each of {count} tokens was expected", mask.len());
        return refuse(String::new(), why);
    }
    if let Some(at) = mask.iter().position(|byte| *byte > 1) {
        return refuse(format!("byte {at}"), format!("is {}; expected 0 or 1", mask[at]));
    }
    require_hash(&name, blake3::hash(&mask), hash)?;
    Ok(mask)
}

/// Checks the hash of a file.
fn require_hash(name: &str, found: blake3::Hash, expected: &str) -> Result<(), DataError> {
    let found = found.to_hex();
    if !found.eq_ignore_ascii_case(expected) {
        let why = format!("its BLAKE3 hash is {found}, and {expected} was expected; write it anew");
        return Err(DataError::of_file(name, why));
    }
    Ok(())
}

/// Checks length, tokens and hash of a token file.
fn check(name: &str, bytes: &[u8], info: &TokenFileInfo) -> Result<(), DataError> {
    let refuse = |place: String, why: String| {
        Err(DataError::Invalid { name: name.into(), place, why: why.into() })
    };
    if bytes.is_empty() {
        return Err(DataError::Empty { name: name.into() });
    }
    let size = info.dtype.size();
    let count = info.count;
    let length = bytes.len();
    if count.checked_mul(size as u64) != Some(length as u64) {
        let tokens = counted(count as usize, "token", "tokens");
        let why = format!("is {length} bytes long; {tokens} of {size} bytes were expected");
        return refuse(String::new(), why);
    }
    let mut hasher = blake3::Hasher::new();
    for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
        hasher.update(chunk);
        let highest = info.dtype.tokens(chunk).max().unwrap_or(0);
        if highest as usize >= info.vocabulary {
            let at = info.dtype.tokens(chunk).position(|token| token == highest).unwrap_or(0);
            let place = format!("token {}", index * (CHUNK / size) + at);
            let why = format!("is {highest}, not below the vocabulary of {}", info.vocabulary);
            return refuse(place, why);
        }
    }
    require_hash(name, hasher.finalize(), &info.blake3)
}

fn described(path: &Path, bytes: usize, blake3: String, role: FileRole) -> DataFile {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    DataFile { name, bytes: bytes as u64, blake3, role: Some(role) }
}

/// Windows of a token file: a sample is the `context` tokens from its index on, for the input
/// `tokens`, with the token that follows each of them, for the input `targets`.
#[derive(Clone)]
pub struct TokenWindows {
    pub file: Arc<TokenFile>,
    /// Tokens of a sample.
    pub context: usize,
}

impl Dataset for TokenWindows {
    fn inputs(&self) -> Vec<DatasetInput> {
        ["tokens", "targets"]
            .map(|name| DatasetInput { name, dtype: DType::U32, elements: self.context })
            .to_vec()
    }

    fn len(&self, split: Split) -> u64 {
        self.file.len(split).saturating_sub(self.context) as u64
    }

    fn evaluation_samples(&self, split: Split) -> Vec<u64> {
        (0..self.len(split)).step_by(self.context.max(1)).collect()
    }

    fn next_distance(&self) -> Option<u64> {
        Some(self.context as u64)
    }

    fn fingerprint(&self) -> String {
        self.file.fingerprint()
    }

    fn description(&self) -> Option<DataDescription> {
        Some(DataDescription::Tokens { vocabulary: self.file.vocabulary() })
    }

    fn files(&self) -> Vec<DataFile> {
        self.file.files().to_vec()
    }

    fn rows(&self, split: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        let count = indices.len() * self.context;
        let mut tokens = Vec::with_capacity(count);
        let mut targets = Vec::with_capacity(count);
        for start in indices {
            let start = *start as usize;
            let mut window = self.file.tokens(split, start..start + self.context + 1);
            tokens.extend_from_slice(&window[..self.context]);
            self.file.mask_targets(split, start + 1, &mut window[1..]);
            targets.extend_from_slice(&window[1..]);
        }
        Ok(vec![("tokens", HostTensor::Int(tokens)), ("targets", HostTensor::Int(targets))])
    }
}

#[cfg(test)]
mod tests;
