//! CIFAR-10's binary version: records of a label and the red, the green and the blue values of 32
//! rows of 32 pixels each. Krizhevsky, "The CIFAR-10 dataset",
//! <https://www.cs.toronto.edu/~kriz/cifar.html>.

use std::path::{Path, PathBuf};

use super::files::{self, FileSets, entries, file_name, invalid};
use super::{DataError, FileSet, ReadSet, Request, Samples, Targets};
use crate::Features;

const SHAPE: [usize; 3] = [3, 32, 32];
/// Bytes of a record.
const RECORD: usize = 1 + SHAPE[0] * SHAPE[1] * SHAPE[2];
/// Classes if no file names them.
const CLASSES: usize = 10;

const HELD_OUT: &str = "test_batch.bin";
/// File with the names of the classes, one in a line.
const NAMES: &str = "batches.meta.txt";

/// Returns true if a file is named like one of records.
pub(super) fn is_batch(name: &str) -> bool {
    name == HELD_OUT || (name.starts_with("data_batch_") && name.ends_with(".bin"))
}

/// Finds the batches of a directory, or takes one file.
pub(super) fn find(path: &Path) -> Result<FileSets, DataError> {
    let directory = if path.is_dir() { Some(path) } else { path.parent() };
    let names = directory.map(|directory| directory.join(NAMES)).filter(|path| path.is_file());
    if !path.is_dir() {
        return Ok(FileSets::only(FileSet { inputs: vec![path.into()], targets: names }));
    }
    let batches = entries(path)?.into_iter().filter(|path| is_batch(&file_name(path)));
    let (held_out, train): (Vec<_>, Vec<_>) = batches.partition(|path| file_name(path) == HELD_OUT);
    FileSets::new(set_of(train, &names), set_of(held_out, &names)).ok_or_else(|| {
        let why = "has no files named like data_batch_1.bin or test_batch.bin";
        invalid(&path.display().to_string(), "", why)
    })
}

/// Set of some batches; `None` without any.
fn set_of(inputs: Vec<PathBuf>, names: &Option<PathBuf>) -> Option<FileSet> {
    if inputs.is_empty() {
        return None;
    }
    Some(FileSet { inputs, targets: names.clone() })
}

/// Reads batches, one after the other.
pub(super) fn read(set: &FileSet, request: &Request) -> Result<ReadSet, DataError> {
    let mut files = Vec::new();
    let names = match &set.targets {
        Some(path) => {
            let (bytes, file) = files::read(path, request.base)?;
            files.push(file);
            Some(class_names(&path.display().to_string(), &bytes)?)
        }
        None => None,
    };
    let is_numbered = names.is_none();
    let names = names.unwrap_or_else(|| (0..CLASSES).map(|class| class.to_string()).collect());
    let mut ids = Vec::new();
    let mut features = Vec::new();
    for path in &set.inputs {
        let (bytes, file) = files::read(path, request.base)?;
        files.push(file);
        parse(&path.display().to_string(), &bytes, names.len(), &mut ids, &mut features)?;
    }
    let first = &set.inputs[0];
    let name = if set.inputs.len() > 1 { first.parent().unwrap_or(first) } else { first };
    let samples = Samples {
        name: name.display().to_string(),
        shape: SHAPE.into(),
        columns: Vec::new(),
        target_columns: Vec::new(),
        features: Features::Bytes(features),
        targets: Targets::Classes { ids, names },
        ids: None,
    };
    Ok(ReadSet { samples, files, is_numbered })
}

/// Names of a file with one in each line.
pub(super) fn class_names(name: &str, bytes: &[u8]) -> Result<Vec<String>, DataError> {
    let text = std::str::from_utf8(bytes)
        .map_err(|why| invalid(name, format!("byte {}", why.valid_up_to()), "is not UTF-8"))?;
    let names = text.lines().map(str::trim).filter(|name| !name.is_empty());
    let mut found: Vec<String> = Vec::new();
    for class in names {
        if found.iter().any(|other| other == class) {
            return Err(invalid(name, "", format!("names the class {class:?} twice")));
        }
        if found.len() > usize::from(u8::MAX) {
            return Err(invalid(name, "", "names more than 256 classes, and a label is a byte"));
        }
        found.push(class.into());
    }
    if found.is_empty() {
        return Err(invalid(name, "", "names no class; expected one in each line"));
    }
    Ok(found)
}

/// Appends the labels and the features of a file's records.
///
/// # Errors
/// Returns `DataError` if the file does not consist of whole records, or if a label is not below
/// `classes`.
pub(super) fn parse(
    name: &str,
    bytes: &[u8],
    classes: usize,
    ids: &mut Vec<u32>,
    features: &mut Vec<u8>,
) -> Result<(), DataError> {
    let (records, rest) = bytes.as_chunks::<RECORD>();
    if records.is_empty() || !rest.is_empty() {
        let length = bytes.len();
        let whole = records.len();
        let why = format!(
            "is {length} bytes long, which is no multiple of the {RECORD} of a record; \
             record {} is cut off, or this is not CIFAR-10",
            whole + 1
        );
        return Err(invalid(name, format!("byte {}", whole * RECORD), why));
    }
    features.reserve(records.len() * (RECORD - 1));
    for (index, [label, values @ ..]) in records.iter().enumerate() {
        if usize::from(*label) >= classes {
            let why = format!("the label is {label}; expected 0 to {}", classes - 1);
            return Err(invalid(name, format!("byte {}", index * RECORD), why));
        }
        ids.push(u32::from(*label));
        features.extend_from_slice(values);
    }
    Ok(())
}
