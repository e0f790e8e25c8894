//! Preparation of token files: texts, directories of them and JSON Lines become the ids of a
//! `tokenizer.json`, in parallel and with little memory. An interrupted preparation continues where
//! it was, with the same bytes as result.
//!
//! The output directory has `tokens.bin` with `tokens.json` beside it ([`super::tokens`]) and the
//! `tokenizer.json`. Until they are complete, the ids are in `tokens.bin.part`, the positions of
//! the first ids of the documents in `documents.part`, and the progress in `prepare.json`.

mod documents;
mod inputs;

use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::tokenizer::TOKENIZER;
use super::tokens::{TOKENS, TokenFileInfo, TokenType};
use super::{DataError, TokenizerFile};
use documents::{Piece, PieceSource, Pieces, ReadPlace};
use inputs::InputFiles;
use potluck_core::Setting;
use potluck_core::files::{self, is_disk_full};

const PART: &str = "tokens.bin.part";
const DOCUMENTS: &str = "documents.part";
const STATE: &str = "prepare.json";
const LOCK: &str = "prepare.lock";

/// Version of the preparation: changes whenever the same inputs would become other ids.
const FORMAT: u32 = 2;

/// Sizes of the units of work.
#[derive(Clone, Copy, Debug)]
struct Granularity {
    /// Bytes of a piece of a long document.
    piece_bytes: usize,
    /// Pieces in a batch, per thread.
    pieces: usize,
    /// Time between saves of the state.
    save_interval: Duration,
}

const GRANULARITY: Granularity =
    Granularity { piece_bytes: 64 << 10, pieces: 8, save_interval: Duration::from_secs(2) };

/// Inputs of a preparation, and its settings.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// Texts, files of JSON Lines (also with `.gz`), and directories of them.
    pub inputs: Vec<PathBuf>,
    pub tokenizer: TokenizerFile,
    /// Token after every document; none if `None`.
    pub end_token: Option<u32>,
    /// Key of the text in a line of JSON.
    pub key: String,
    /// True to recognize special tokens in texts.
    pub allow_special: bool,
    /// True to read every file as a plain text, regardless of its name.
    pub plain: bool,
    /// Directory to write.
    pub out: PathBuf,
    /// True to wait for another process that prepares the same directory, false for an error.
    pub wait: bool,
}

impl PrepareOptions {
    /// Returns the options for the ids of one text file as a whole.
    pub fn of_text(path: &Path, tokenizer: &TokenizerFile, out: PathBuf) -> Self {
        Self {
            inputs: vec![path.into()],
            tokenizer: tokenizer.clone(),
            end_token: None,
            key: String::new(),
            allow_special: false,
            plain: true,
            out,
            wait: true,
        }
    }
}

/// Progress of a preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrepareProgress {
    /// Bytes read of the files on disk.
    pub bytes: u64,
    /// Bytes of all files on disk.
    pub total: u64,
    pub tokens: u64,
    pub documents: u64,
}

/// Result of a preparation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// The token file.
    pub path: PathBuf,
    pub tokens: u64,
    pub documents: u64,
    pub vocabulary: usize,
    /// Tokens of an earlier preparation, complete or interrupted.
    pub before: u64,
    /// Number of files in the directories that were left out because of their format.
    pub left_out: usize,
}

/// Error of a preparation.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(
        "{}: {why}; {}choose another {}",
        path.display(),
        if is_disk_full(why) { "free space there or " } else { "" },
        Setting::Out
    )]
    Write { path: PathBuf, why: io::Error },
    /// The directory cannot be used; `why` ends in an imperative.
    #[error("{}: {why} another {}", path.display(), Setting::Out)]
    Occupied { path: PathBuf, why: &'static str },
}

/// Progress of an unfinished preparation, the content of `prepare.json`.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct PrepareState {
    /// Hash of the inputs and the options.
    inputs: String,
    place: ReadPlace,
    tokens: u64,
    documents: u64,
    /// True if the next id is the first one of its document.
    is_at_start: bool,
}

/// Prepares token files; calls `report` with the progress.
///
/// # Errors
/// Returns `PrepareError` if an input cannot be read or does not have the format of its name, if
/// the directory has other tokens or is in use, or if it cannot be written.
pub fn prepare(
    options: &PrepareOptions,
    report: &mut dyn FnMut(PrepareProgress),
) -> Result<Prepared, PrepareError> {
    prepare_by(GRANULARITY, options, report)
}

fn prepare_by(
    granularity: Granularity,
    options: &PrepareOptions,
    report: &mut dyn FnMut(PrepareProgress),
) -> Result<Prepared, PrepareError> {
    let inputs = InputFiles::find(&options.inputs, options.plain)?;
    let hash = hash_of(options, &inputs);
    let out = &options.out;
    if let Some(before) = finished(out, &hash)? {
        return Ok(Prepared { left_out: inputs.left_out, ..before });
    }
    let write_error = |why| PrepareError::Write { path: out.clone(), why };
    fs::create_dir_all(out).map_err(write_error)?;
    let lock = File::create(out.join(LOCK)).map_err(write_error)?;
    if options.wait {
        // Without support for file locks, two processes are not kept apart.
        let _ = lock.lock();
    } else if let Err(TryLockError::WouldBlock) = lock.try_lock() {
        let why = "another process prepares tokens there; wait for its end, or choose";
        return Err(PrepareError::Occupied { path: out.clone(), why });
    }
    // Another process may have finished meanwhile.
    if let Some(before) = finished(out, &hash)? {
        return Ok(Prepared { left_out: inputs.left_out, ..before });
    }
    match fs::read(out.join(TOKENIZER)) {
        Ok(json) if json != options.tokenizer.json() => {
            let why = "has another tokenizer.json; choose";
            return Err(PrepareError::Occupied { path: out.clone(), why });
        }
        _ => {}
    }
    let state = begun(out, &hash)?;
    let before = state.tokens;
    let mut output =
        TokenOutput::open(options, state, granularity.save_interval).map_err(write_error)?;
    let read = Arc::new(AtomicU64::new(0));
    let tokenizer =
        if options.allow_special { &options.tokenizer.with_special() } else { &options.tokenizer };
    let source = PieceSource {
        files: &inputs.files,
        tokenizer,
        key: &options.key,
        piece_bytes: granularity.piece_bytes,
        read: read.clone(),
    };
    let pieces = Pieces::new(source, output.state.place);
    let batch_bytes = granularity.piece_bytes * granularity.pieces * rayon::current_num_threads();
    let skipped: u64 = inputs.files.iter().take(output.state.place.file).map(|f| f.bytes).sum();
    let total = inputs.bytes();
    thread::scope(|scope| -> Result<(), PrepareError> {
        let (sender, receiver) = sync_channel(1);
        scope.spawn(move || send_batches(pieces, batch_bytes, &sender));
        encode_batches(tokenizer, receiver, &mut output, &mut |tokens, documents| {
            let bytes = (skipped + read.load(Ordering::Relaxed)).min(total);
            report(PrepareProgress { bytes, total, tokens, documents });
        })
    })?;
    let PrepareState { tokens, documents, .. } = output.state;
    if tokens == 0 {
        let name = options.inputs.first().unwrap_or(out).display().to_string();
        return Err(DataError::Empty { name }.into());
    }
    let path = output.finish(options).map_err(write_error)?;
    Ok(Prepared {
        path,
        tokens,
        documents,
        vocabulary: options.tokenizer.vocabulary(),
        before,
        left_out: inputs.left_out,
    })
}

fn hash_of(options: &PrepareOptions, inputs: &InputFiles) -> String {
    let mut hasher = blake3::Hasher::new();
    let PrepareOptions { tokenizer, end_token, key, allow_special, .. } = options;
    let blake3 = tokenizer.blake3();
    let told = format!("{FORMAT}\n{blake3}\n{end_token:?}\n{key:?}\n{allow_special}\n");
    hasher.update(told.as_bytes());
    inputs.hash(&mut hasher);
    hasher.finalize().to_hex().to_string()
}

/// Returns true if a preparation of the tokens at a path is unfinished.
pub(super) fn is_begun(tokens: &Path) -> bool {
    tokens.with_file_name(STATE).exists()
}

/// Returns an earlier preparation of the same inputs; `None` without one, or if its tokens are
/// gone.
fn finished(out: &Path, hash: &str) -> Result<Option<Prepared>, PrepareError> {
    let path = out.join(TOKENS);
    let info_path = path.with_extension("json");
    let Some(bytes) = read_if_there(&info_path)? else { return Ok(None) };
    let info = TokenFileInfo::parse(&info_path.display().to_string(), &bytes)?;
    if info.inputs.as_deref() != Some(hash) {
        let why = "has other tokens, or the inputs changed since; choose";
        return Err(PrepareError::Occupied { path: out.into(), why });
    }
    let length = fs::metadata(&path).map_or(0, |found| found.len());
    if length != info.count * info.dtype.size() as u64 {
        return Ok(None);
    }
    // An interrupted process may have left them.
    for name in [STATE, DOCUMENTS] {
        let _ = fs::remove_file(out.join(name));
    }
    let documents = info.documents.as_ref().map_or(0, |starts| starts.len() as u64);
    Ok(Some(Prepared {
        path,
        tokens: info.count,
        documents,
        vocabulary: info.vocabulary,
        before: info.count,
        left_out: 0,
    }))
}

/// Content of a file; `None` if it does not exist.
fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, DataError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(why) => Err(DataError::Read { name: path.display().to_string(), why }),
    }
}

/// State of an interrupted preparation, or of a new one.
fn begun(out: &Path, hash: &str) -> Result<PrepareState, PrepareError> {
    let new = PrepareState {
        inputs: hash.into(),
        place: ReadPlace::default(),
        tokens: 0,
        documents: 0,
        is_at_start: false,
    };
    let Some(bytes) = read_if_there(&out.join(STATE))? else {
        let is_ours = out.join(TOKENS).with_extension("json").exists();
        if out.join(TOKENS).exists() && !is_ours {
            let why = "has tokens that are not of a preparation; choose";
            return Err(PrepareError::Occupied { path: out.into(), why });
        }
        return Ok(new);
    };
    match serde_json::from_slice::<PrepareState>(&bytes) {
        Ok(state) if state.inputs == hash => Ok(state),
        Ok(state) if state.tokens == 0 => Ok(new),
        _ => {
            let why = "has the beginning of other tokens, or the inputs changed since; remove it \
                       or choose";
            Err(PrepareError::Occupied { path: out.into(), why })
        }
    }
}

/// Reads the pieces of all documents, and sends them in batches of `batch_bytes` until the receiver
/// is closed.
fn send_batches(
    mut pieces: Pieces,
    batch_bytes: usize,
    sender: &SyncSender<Result<Vec<Piece>, DataError>>,
) {
    let mut batch = Vec::new();
    let mut bytes = 0;
    loop {
        match pieces.piece() {
            Ok(Some(piece)) => {
                bytes += piece.text.len() + size_of::<Piece>();
                batch.push(piece);
            }
            Ok(None) => {
                // The receiver is closed if an earlier batch failed.
                let _ = sender.send(Ok(batch));
                return;
            }
            Err(why) => {
                let _ = sender.send(Err(why));
                return;
            }
        }
        if bytes >= batch_bytes {
            bytes = 0;
            if sender.send(Ok(mem::take(&mut batch))).is_err() {
                return;
            }
        }
    }
}

/// Encodes batches, and writes their ids.
fn encode_batches(
    tokenizer: &TokenizerFile,
    batches: Receiver<Result<Vec<Piece>, DataError>>,
    output: &mut TokenOutput,
    report: &mut dyn FnMut(u64, u64),
) -> Result<(), PrepareError> {
    let path = output.out.clone();
    let write_error = |why| PrepareError::Write { path: path.clone(), why };
    for batch in batches {
        let batch = batch?;
        let encoded: Result<Vec<Vec<u32>>, DataError> = batch
            .par_iter()
            .map(|piece| tokenizer.encode_piece("a document", &piece.text))
            .collect();
        for (piece, ids) in batch.iter().zip(encoded?) {
            output.write(piece, &ids).map_err(write_error)?;
        }
        output.save_at_times().map_err(write_error)?;
        report(output.tokens, output.documents);
    }
    output.save().map_err(write_error)
}

/// Output files and their progress.
struct TokenOutput {
    out: PathBuf,
    dtype: TokenType,
    end_token: Option<u32>,
    /// True if the next id is the first one of its document.
    is_at_start: bool,
    ids: BufWriter<File>,
    starts: BufWriter<File>,
    tokens: u64,
    documents: u64,
    /// State after the last piece from which reading can continue.
    state: PrepareState,
    saved_at: Instant,
    save_interval: Duration,
}

impl TokenOutput {
    /// Opens the files, cut to the lengths of a state.
    fn open(
        options: &PrepareOptions,
        state: PrepareState,
        save_interval: Duration,
    ) -> io::Result<Self> {
        let out = &options.out;
        let dtype = TokenType::of(options.tokenizer.vocabulary());
        let part = out.join(PART);
        let whole = out.join(TOKENS);
        // The tokens were complete, but not described yet.
        if !part.exists() && whole.exists() {
            fs::rename(&whole, &part)?;
        }
        let ids = cut(&part, state.tokens * dtype.size() as u64)?;
        let starts = cut(&out.join(DOCUMENTS), state.documents * size_of::<u64>() as u64)?;
        Ok(Self {
            out: out.clone(),
            dtype,
            end_token: options.end_token,
            is_at_start: state.is_at_start,
            ids,
            starts,
            tokens: state.tokens,
            documents: state.documents,
            state,
            saved_at: Instant::now(),
            save_interval,
        })
    }

    fn write(&mut self, piece: &Piece, ids: &[u32]) -> io::Result<()> {
        self.is_at_start |= piece.begins;
        for id in ids.iter().copied().chain(self.end_token.filter(|_| piece.ends)) {
            // A document without ids does not count.
            if mem::take(&mut self.is_at_start) {
                self.starts.write_all(&self.tokens.to_le_bytes())?;
                self.documents += 1;
            }
            self.dtype.write(&mut self.ids, id)?;
            self.tokens += 1;
        }
        if let Some(place) = piece.place {
            self.state.place = place;
            self.state.tokens = self.tokens;
            self.state.documents = self.documents;
            self.state.is_at_start = self.is_at_start;
        }
        Ok(())
    }

    fn save_at_times(&mut self) -> io::Result<()> {
        if self.saved_at.elapsed() >= self.save_interval { self.save() } else { Ok(()) }
    }

    /// Writes the state, after the files that it describes.
    fn save(&mut self) -> io::Result<()> {
        for file in [&mut self.ids, &mut self.starts] {
            file.flush()?;
            file.get_ref().sync_data()?;
        }
        let text = serde_json::to_vec(&self.state).map_err(io::Error::other)?;
        files::replace(&self.out.join(STATE), &text)?;
        self.saved_at = Instant::now();
        Ok(())
    }

    /// Renames the files, writes the description last, and returns the path of the tokens.
    fn finish(self, options: &PrepareOptions) -> io::Result<PathBuf> {
        let Self { out, dtype, .. } = self;
        let part = out.join(PART);
        let path = out.join(TOKENS);
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(&part)?)?;
        let mut starts = Vec::new();
        File::open(out.join(DOCUMENTS))?.read_to_end(&mut starts)?;
        let starts = starts.chunks_exact(size_of::<u64>());
        let info = TokenFileInfo {
            version: TokenFileInfo::VERSION,
            vocabulary: options.tokenizer.vocabulary(),
            dtype,
            count: self.state.tokens,
            blake3: hasher.finalize().to_hex().to_string(),
            tokenizer: Some(options.tokenizer.blake3().into()),
            documents: Some(starts.map(bytemuck::pod_read_unaligned).collect()),
            mask: None,
            end_token: options.end_token,
            inputs: Some(self.state.inputs),
        };
        files::replace(&out.join(TOKENIZER), options.tokenizer.json())?;
        fs::rename(&part, &path)?;
        let text = serde_json::to_vec(&info).map_err(io::Error::other)?;
        files::replace(&path.with_extension("json"), &text)?;
        // These files are obsolete, so errors do not matter.
        for name in [STATE, DOCUMENTS, LOCK] {
            let _ = fs::remove_file(out.join(name));
        }
        Ok(path)
    }
}

/// Opens a file for writing after its first `bytes` bytes.
fn cut(path: &Path, bytes: u64) -> io::Result<BufWriter<File>> {
    let mut file = File::options().create(true).write(true).truncate(false).open(path)?;
    if file.metadata()?.len() < bytes {
        let why = format!("{} is shorter than it was; remove the directory", path.display());
        return Err(io::Error::other(why));
    }
    file.set_len(bytes)?;
    file.seek(SeekFrom::End(0))?;
    Ok(BufWriter::with_capacity(1 << 20, file))
}

#[cfg(test)]
mod tests;
