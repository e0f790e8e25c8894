//! Files that describe how a model is used. A run that starts from the model keeps them, and its
//! exports include them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use super::export::unwritable;
use super::files::{read_bytes, read_json};
use super::{HuggingFaceError, begin_token, end_tokens};
use crate::checkpoint::{is_checkpoint, run_of};
use potluck_core::files;

/// Directory in a run's directory with the files of the initial model.
pub const MODEL_FILES: &str = "model_files";

/// File with the tokens that begin and end a text.
const GENERATION: &str = "generation_config.json";

const NAMES: [&str; 4] =
    [GENERATION, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// Largest file: a configuration of a tokenizer may contain the whole vocabulary.
const BYTES_MAX: u64 = 64 << 20;

/// Files of a model beside its parameters, configuration and tokenizer, unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFiles(Vec<(&'static str, Vec<u8>)>);

impl ModelFiles {
    /// No files.
    pub const NONE: Self = Self(Vec::new());

    /// Reads the files that a directory has; none if the directory does not exist.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] if a file cannot be read, or is too large.
    pub fn read(directory: &Path) -> Result<Self, HuggingFaceError> {
        let mut files = Vec::new();
        for name in NAMES {
            let path = directory.join(name);
            if path.is_file() {
                files.push((name, read_bytes(&path, BYTES_MAX)?));
            }
        }
        Ok(Self(files))
    }

    /// Reads the files of a model directory. If only its `config.json` has the tokens that begin
    /// and end a text, adds them to the `generation_config.json`.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] if a file cannot be read, is too large, or is not JSON.
    pub fn of_model(directory: &Path) -> Result<Self, HuggingFaceError> {
        let mut files = Self::read(directory)?;
        let path = directory.join(GENERATION);
        let mut generation: Map<String, Json> =
            if path.is_file() { read_json(&path, BYTES_MAX)? } else { Map::new() };
        let before = generation.len();
        let (begin, ends) = (begin_token(directory)?, end_tokens(directory)?);
        let ids = [("bos_token_id", begin.map(Json::from)), ("eos_token_id", token_ids(&ends))];
        for (key, ids) in ids {
            if generation.get(key).is_none_or(Json::is_null) {
                generation.extend(ids.map(|ids| (key.to_string(), ids)));
            }
        }
        if generation.len() > before {
            let text = format!("{:#}\n", Json::from(generation));
            files.0.retain(|(name, _)| *name != GENERATION);
            files.0.push((GENERATION, text.into_bytes()));
        }
        Ok(files)
    }

    /// Reads the files kept by a run, by the path of the run or of one of its checkpoints; none if
    /// it keeps none.
    ///
    /// # Errors
    /// Returns the errors of [`Self::read`].
    pub fn of_run(path: &Path) -> Result<Self, HuggingFaceError> {
        match directory_of_run(path) {
            Some(directory) => Self::read(&directory),
            None => Ok(Self::default()),
        }
    }

    /// Writes the files to an existing directory.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] if one cannot be written.
    pub fn write(&self, directory: &Path) -> Result<(), HuggingFaceError> {
        for (name, bytes) in &self.0 {
            let path = directory.join(name);
            fs::write(&path, bytes).map_err(|why| unwritable(&path, why))?;
        }
        Ok(())
    }

    /// Stores the files in the directory of a run. Sets existing files of another run aside.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] if they cannot be written.
    pub fn keep(&self, run: &Path) -> Result<(), HuggingFaceError> {
        let directory = run.join(MODEL_FILES);
        if directory.exists() {
            files::set_aside(&directory).map_err(|why| unwritable(&directory, why))?;
        }
        if self.0.is_empty() {
            return Ok(());
        }
        fs::create_dir_all(&directory).map_err(|why| unwritable(&directory, why))?;
        self.write(&directory)
    }
}

/// Returns ids of tokens in the form of the files: one number, or a list; `None` without ids.
pub fn token_ids(ids: &[u32]) -> Option<Json> {
    match ids {
        [] => None,
        [id] => Some(json!(id)),
        ids => Some(json!(ids)),
    }
}

/// Returns the directory in which a run keeps the files of its model, by the path of the run or of
/// one of its checkpoints; `None` if there is no such directory.
pub fn directory_of_run(path: &Path) -> Option<PathBuf> {
    let run = if is_checkpoint(path) { run_of(path)? } else { path.to_path_buf() };
    Some(run.join(MODEL_FILES)).filter(|directory| directory.is_dir())
}
