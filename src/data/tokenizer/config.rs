//! Configuration beside a `tokenizer.json`, in `tokenizer_config.json`: the tokens that begin and
//! end a text, and the template of conversations.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::DataError;
use potluck_core::format::size_text;

/// Largest file: a configuration may contain the whole vocabulary.
const BYTES_MAX: u64 = 64 << 20;

/// Content of a `tokenizer_config.json`.
#[derive(Debug, Default, serde::Deserialize)]
pub(crate) struct TokenizerConfig {
    pub chat_template: Option<StoredTemplate>,
    pub bos_token: Option<StoredToken>,
    pub eos_token: Option<StoredToken>,
}

/// Templates of a configuration.
#[derive(Debug, serde::Deserialize)]
#[serde(untagged)]
pub(crate) enum StoredTemplate {
    One(String),
    Named(Vec<NamedTemplate>),
}

/// Template for a purpose.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct NamedTemplate {
    pub name: String,
    pub template: String,
}

/// Token of a configuration, as its text or with options of its matching.
#[derive(Debug, serde::Deserialize)]
#[serde(untagged)]
pub(crate) enum StoredToken {
    Text(String),
    Added { content: String },
}

impl StoredToken {
    pub fn text(self) -> String {
        match self {
            Self::Text(content) | Self::Added { content } => content,
        }
    }
}

impl TokenizerConfig {
    /// Returns the path of the configuration in a directory.
    pub fn path(directory: &Path) -> PathBuf {
        directory.join("tokenizer_config.json")
    }

    /// Reads the configuration in a directory; an empty one without the file.
    ///
    /// # Errors
    /// Returns a `DataError` that names the file if it cannot be read or is not a configuration.
    pub fn read(directory: &Path) -> Result<Self, DataError> {
        let path = Self::path(directory);
        let Some(text) = read_text(&path)? else { return Ok(Self::default()) };
        serde_json::from_str(&text).map_err(|why| {
            DataError::of_file(
                path.display(),
                format!("is no configuration of a tokenizer ({why})"),
            )
        })
    }
}

/// Reads a text file; `None` if it does not exist.
///
/// # Errors
/// Returns a `DataError` that names the file if it cannot be read or is too large.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, DataError> {
    let unreadable =
        |why: io::Error| DataError::of_file(path.display(), format!("cannot be read ({why})"));
    match fs::metadata(path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(why) => return Err(unreadable(why)),
        Ok(found) if found.len() > BYTES_MAX => {
            return Err(DataError::of_file(
                path.display(),
                format!("has more than {}", size_text(BYTES_MAX as usize)),
            ));
        }
        Ok(_) => {}
    }
    Ok(Some(fs::read_to_string(path).map_err(unreadable)?))
}
