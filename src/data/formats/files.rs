//! Files of data sets: found, read whole, and hashed.

use std::path::{Component, Path, PathBuf};
use std::{fs, io};

use super::{DataError, DataFile, FileSet};
use potluck_core::Wording;

/// Sets of samples at a path.
#[derive(Debug, PartialEq)]
pub(super) struct FileSets {
    /// The set to train on, or the only one.
    pub first: FileSet,
    pub held_out: Option<FileSet>,
}

impl FileSets {
    /// Creates one set, without held-out samples.
    pub fn only(first: FileSet) -> Self {
        Self { first, held_out: None }
    }

    /// Creates the sets from those that were found; `None` if there are none.
    pub fn new(train: Option<FileSet>, held_out: Option<FileSet>) -> Option<Self> {
        match (train, held_out) {
            (Some(first), held_out) => Some(Self { first, held_out }),
            (None, Some(first)) => Some(Self::only(first)),
            (None, None) => None,
        }
    }
}

/// Directory to which the names of files are relative.
pub(super) struct Base(PathBuf);

impl Base {
    /// Returns the base of a path to data: itself, or the directory of a file.
    pub fn of(path: &Path) -> Self {
        if path.is_dir() { Self(path.into()) } else { Self::above(path) }
    }

    fn above(path: &Path) -> Self {
        Self(path.parent().unwrap_or(Path::new("")).into())
    }

    /// Base of a path to held-out samples: this directory if they lie below it, or else the parent
    /// of their directory, whose name then begins their names.
    pub(crate) fn of_held_out(&self, path: &Path) -> Self {
        if path.starts_with(&self.0) && self.0 != Path::new("") {
            return Self(self.0.clone());
        }
        let directory = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        Self::above(directory)
    }

    /// Returns the name of a file below this directory, with `/` on every system.
    pub fn name(&self, path: &Path) -> String {
        let below = path.strip_prefix(&self.0).unwrap_or(path);
        let parts = below.components().filter(|part| *part != Component::CurDir);
        let parts = parts.map(|part| part.as_os_str().to_string_lossy());
        parts.collect::<Vec<_>>().join("/")
    }
}

/// Returns the error of a file's content; `place` is empty for the whole file.
pub(super) fn invalid(name: &str, place: impl Into<String>, why: impl Into<Wording>) -> DataError {
    DataError::Invalid { name: name.into(), place: place.into(), why: why.into() }
}

/// Returns up to ten names, for a message.
pub(super) fn listed(names: &[String]) -> String {
    const MOST: usize = 10;
    let rest = match names.len() {
        0..=MOST => String::new(),
        count => format!(", .. ({count} in all)"),
    };
    format!("{}{rest}", names[..names.len().min(MOST)].join(", "))
}

/// Reads a file whole.
///
/// # Errors
/// Returns `DataError` if it cannot be read, is not a regular file (which might never end), or is
/// empty.
pub(super) fn read(path: &Path, base: &Base) -> Result<(Vec<u8>, DataFile), DataError> {
    let name = path.display().to_string();
    let bytes = read_regular(path).map_err(|why| DataError::Read { name: name.clone(), why })?;
    if bytes.is_empty() {
        return Err(DataError::Empty { name });
    }
    let file = DataFile::of(&base.name(path), &bytes);
    Ok((bytes, file))
}

fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    if !path.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    fs::read(path)
}

/// Returns the entries of a directory, sorted by name, without names that begin with a dot.
///
/// # Errors
/// Returns `DataError` if the directory cannot be listed.
pub(super) fn entries(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let unread = |why| DataError::Read { name: directory.display().to_string(), why };
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).map_err(unread)? {
        let path = entry.map_err(unread)?.path();
        if !file_name(&path).starts_with('.') {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

pub(super) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns true if a file has one of some extensions, ignoring case.
pub(super) fn has_ending(path: &Path, endings: &[&str]) -> bool {
    let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    endings.contains(&ending.as_str())
}
