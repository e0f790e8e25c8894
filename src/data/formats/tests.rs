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

use super::{LoadedSamples, ReadOptions, SampleFormat, load, read_for_prediction};
use crate::{DataError, DataFile, Features, FileRole, Samples, Targets};

/// Files of a directory that cannot be read, and the sentence with which it is refused.
type BadFiles<'a> = (&'a [(&'a str, &'a [u8])], &'a str);

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

/// Returns the roles of files, by their names.
fn roles(files: &[DataFile]) -> Vec<(&str, Option<FileRole>)> {
    files.iter().map(|file| (&*file.name, file.role)).collect()
}

#[test]
fn files_have_the_role_of_their_set_whatever_their_names() {
    use FileRole::{HeldOut, Labels, Training};
    let batch = cifar::records(&[1]);
    let files: [(&str, &[u8]); 3] = [
        ("data_batch_1.bin", &batch),
        ("test_batch.bin", &cifar::records(&[2])),
        ("batches.meta.txt", b"a\nb\nc\n"),
    ];
    let cifar = loaded(SampleFormat::Cifar10, &files, "");
    let expected = [
        ("batches.meta.txt", Some(Labels)),
        ("data_batch_1.bin", Some(Training)),
        ("test_batch.bin", Some(HeldOut)),
    ];
    assert_eq!(roles(&cifar.files), expected);

    let set = directory(&files);
    let options = ReadOptions::default();
    let read = read_for_prediction(SampleFormat::Cifar10, set.path(), &options);
    let (_, evaluated) = read.unwrap();
    let expected = [("batches.meta.txt", Some(Labels)), ("test_batch.bin", None)];
    assert_eq!(roles(&evaluated), expected);

    let tables = directory(&[
        ("one/data.csv", b"a,y\n1,x\n2,y\n"),
        ("two/data.csv", b"a,y\n3,x\n4,y\n"),
        ("two/test.csv", b"a,y\n5,x\n6,y\n"),
    ]);
    let [one, two, test] =
        ["one/data.csv", "two/data.csv", "two/test.csv"].map(|name| tables.path().join(name));
    let of = |path: &Path, val_path: Option<&Path>| {
        load(SampleFormat::Csv, path, val_path, &options).unwrap().files
    };
    let expected = [("data.csv", Some(Training)), ("two/data.csv", Some(HeldOut))];
    assert_eq!(roles(&of(&one, Some(&two))), expected);
    assert_eq!(roles(&of(&one, Some(&one))), [("data.csv", Some(Training))]);
    assert_eq!(roles(&of(&test, None)), [("test.csv", Some(Training))]);
}

#[test]
fn many_files_are_recorded_as_one_with_their_role() {
    let mut files = Vec::new();
    for number in 0..101 {
        let mut file = DataFile::of(&number.to_string(), b"x");
        file.role = Some(FileRole::Training);
        files.push(file);
    }
    assert_eq!(roles(&DataFile::recorded(files.clone())), [("101 files", files[0].role)]);
    files[7].role = Some(FileRole::HeldOut);
    assert_eq!(roles(&DataFile::recorded(files)), [("101 files", None)]);
}

#[test]
fn entries_of_earlier_versions_have_no_role() {
    let entry = r#"{"name":"t.csv","bytes":1,"blake3":"a"}"#;
    let file: DataFile = serde_json::from_str(entry).unwrap();
    assert_eq!(file.role, None);
    assert_eq!(serde_json::to_string(&file).unwrap(), entry);
}
