//! Tests of the readers: what they read, and the sentence for each kind of bad input.

#[cfg(test)]
pub(super) mod cifar;
#[cfg(test)]
mod csv;
#[cfg(test)]
mod detect;
#[cfg(test)]
mod expected;
#[cfg(test)]
pub(super) mod idx;
#[cfg(test)]
pub(super) mod npy;
#[cfg(test)]
pub(super) mod pictures;

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::{LoadedSamples, ReadOptions, SampleFormat, load};
use crate::{DataError, Features, Samples, Targets};

/// Creates a directory with some files; directories in their names are created.
pub(super) fn directory(files: &[(&str, &[u8])]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    directory
}

/// Text of an error without the directory of its test.
fn message(directory: &Path, error: &DataError) -> String {
    let prefix = format!("{}{}", directory.display(), std::path::MAIN_SEPARATOR);
    let text = error.to_string().replace(&prefix, "");
    text.replace(&directory.display().to_string(), "DIR")
}

/// Message with which files are refused.
fn refusal(format: SampleFormat, files: &[(&str, &[u8])], path: &str) -> String {
    refusal_with(format, files, path, &ReadOptions::default())
}

fn refusal_with(
    format: SampleFormat,
    files: &[(&str, &[u8])],
    path: &str,
    options: &ReadOptions,
) -> String {
    let directory = directory(files);
    let result = load(format, &below(directory.path(), path), None, options);
    message(directory.path(), &result.err().expect("it is refused"))
}

fn loaded(format: SampleFormat, files: &[(&str, &[u8])], path: &str) -> LoadedSamples {
    let directory = directory(files);
    load(format, &below(directory.path(), path), None, &ReadOptions::default()).unwrap()
}

/// Directory itself for an empty path, without a separator at its end.
fn below(directory: &Path, path: &str) -> PathBuf {
    if path.is_empty() { directory.into() } else { directory.join(path) }
}

fn values(samples: &Samples) -> Vec<f32> {
    let mut values = vec![0.0; samples.len() * samples.width()];
    for (index, row) in values.chunks_mut(samples.width()).enumerate() {
        samples.read(index, row).unwrap();
    }
    values
}

fn ids(samples: &Samples) -> &[u32] {
    let Targets::Classes { ids, .. } = &samples.targets else { panic!("no classes") };
    ids
}

fn names(samples: &Samples) -> Vec<&str> {
    match &samples.targets {
        Targets::Classes { names, .. } | Targets::Values { names, .. } => {
            names.iter().map(String::as_str).collect()
        }
        Targets::Absent => Vec::new(),
    }
}

fn file_names(loaded: &LoadedSamples) -> Vec<&str> {
    loaded.files.iter().map(|file| file.name.as_str()).collect()
}

/// Bytes that features hold in memory.
pub(super) fn held_bytes(samples: &Samples) -> usize {
    let features = match &samples.features {
        Features::Bytes(bytes) => bytes.capacity(),
        Features::Floats(values) => 4 * values.capacity(),
        Features::Lazy(_) => 0,
    };
    let text = |names: &[String]| names.iter().map(|name| name.capacity() + 24).sum::<usize>();
    let targets = match &samples.targets {
        Targets::Classes { ids, names } => 4 * ids.capacity() + text(names),
        Targets::Values { values, names } => 4 * values.capacity() + text(names),
        Targets::Absent => 0,
    };
    features + targets + text(&samples.columns)
}
