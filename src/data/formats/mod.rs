//! Readers of data sets on disk. Each returns samples, or one sentence that names the file, the
//! place in it and the expectation; none reads more into memory than the file justifies.

mod cifar;
mod csv;
mod detect;
mod expected;
mod files;
mod idx;
#[cfg(test)]
mod mutations;
mod npy;
mod pictures;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub(super) use self::expected::Expected;
use self::files::{Base, FileSets};
use super::{
    DataError, DataFile, FileRole, LoadedSamples, SampleDescription, Samples, TargetNames, Targets,
};

pub use detect::detect;

/// Format of samples on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleFormat {
    /// Images and labels of MNIST's format, gzipped or not.
    Idx,
    /// CIFAR-10's binary version.
    Cifar10,
    /// A table with a header line.
    Csv,
    /// NumPy arrays.
    Npy,
    /// A directory of pictures per class.
    Pictures,
}

/// Kind of the targets of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    Classes,
    Values,
}

/// Options of a reader.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// Columns of a table that are targets; if empty, the columns of a known model or known
    /// training samples, or else the last one. Only values may have several.
    pub target: Vec<String>,
    /// Kind of targets of an ambiguous type; `None`: as the type suggests.
    pub kind: Option<TargetKind>,
    /// Height and width to which pictures are resized.
    pub image_size: Option<(usize, usize)>,
    /// Samples on which a model was trained, if samples for that model are read.
    pub known: Option<KnownSamples>,
}

/// Demands of a trained model on its samples.
#[derive(Clone, Debug, Default)]
pub struct KnownSamples {
    /// Shape of a sample; empty if any will do.
    pub shape: Vec<usize>,
    /// Columns of a table, in the model's order.
    pub columns: Vec<String>,
    /// Columns of a table that are targets; empty if they are not known.
    pub target_columns: Vec<String>,
    /// Names of the classes, in the model's order; empty for values.
    pub classes: Vec<String>,
}

impl KnownSamples {
    /// Returns the demands of a model that was trained on samples with this description.
    pub fn of(samples: &SampleDescription) -> Self {
        let SampleDescription { shape, columns, mut target_columns, targets, .. } = samples.clone();
        let classes = match targets {
            TargetNames::Classes(names) => names,
            TargetNames::Values(names) => {
                // Descriptions of tables once named the columns of values here only.
                if target_columns.is_empty() && !columns.is_empty() {
                    target_columns = names;
                }
                Vec::new()
            }
        };
        Self { shape, columns, target_columns, classes }
    }
}

/// Parameters of reading one set of samples.
struct Request<'a> {
    options: &'a ReadOptions,
    /// Demands of the model or of the training samples.
    expected: Option<&'a Expected>,
    /// Directory to which the names of files are relative.
    base: &'a Base,
    /// True if targets are required.
    targets: bool,
}

impl Request<'_> {
    fn kind(&self) -> Option<TargetKind> {
        self.options.kind.or(self.expected.map(|expected| expected.kind))
    }
}

/// Samples of one set, from a reader.
struct ReadSet {
    samples: Samples,
    files: Vec<DataFile>,
    /// True if classes are numbers in the file, not names.
    is_numbered: bool,
}

impl ReadSet {
    /// Sets the role of the files that have none yet.
    fn set_role(&mut self, role: FileRole) {
        for file in &mut self.files {
            file.role.get_or_insert(role);
        }
    }
}

/// Reads training samples from `path`, and held-out samples from `val_path`, or else from the files
/// beside the training samples that the format names for it. If only held-out samples are at
/// `path`, they become the training samples. If `val_path` is a directory with two sets, its
/// held-out set is read.
///
/// | format | held out beside the training samples |
/// |---|---|
/// | IDX | `val-`, `validation-`, `test-` or `t10k-images-idx3-ubyte` beside those of `train-` |
/// | CIFAR-10 | `test_batch.bin` |
/// | NumPy | `val_inputs.npy` and `val_targets.npy` |
/// | pictures | `val/`, `valid/`, `validation/` or `test/` beside `train/` |
///
/// # Errors
/// Returns a `DataError` that names the file and the place in it if a file is missing, damaged, or
/// does not comply with `options` and the format.
pub fn load(
    format: SampleFormat,
    path: &Path,
    val_path: Option<&Path>,
    options: &ReadOptions,
) -> Result<LoadedSamples, DataError> {
    let found = find(format, path)?;
    let base = Base::of(path);
    let known = options.known.as_ref().map(Expected::of_model);
    let request = Request { options, expected: known.as_ref(), base: &base, targets: true };
    let mut train = read(format, &found.first, &request)?;
    train.set_role(FileRole::Training);

    let held_out = match val_path {
        Some(path) => Some((base.of_held_out(path), find_for_evaluation(format, path)?)),
        None => found.held_out.map(|files| (base, files)),
    };
    let mut files = train.files;
    let mut validation = None;
    if let Some((base, set)) = held_out {
        let expected = Expected::of_training(&train.samples);
        let request = Request { options, expected: Some(&expected), base: &base, targets: true };
        let mut read = read(format, &set, &request)?;
        read.set_role(FileRole::HeldOut);
        let taken: HashMap<&str, &str> =
            files.iter().map(|file| (&*file.name, &*file.blake3)).collect();
        for file in &mut read.files {
            if taken.get(&*file.name).is_some_and(|blake3| *blake3 != file.blake3) {
                file.name += " (held out)";
            }
        }
        files.extend(read.files);
        validation = Some(read.samples);
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    // A file of both sets is one of the training set, which is before it.
    files.dedup_by(|b, a| a.name == b.name && a.blake3 == b.blake3);
    Ok(LoadedSamples { train: train.samples, validation, files })
}

/// Reads samples for a trained model, with their targets if the files have them. From two sets in a
/// directory, the held-out one is read.
///
/// # Errors
/// Like [`load`].
pub fn load_for_prediction(
    format: SampleFormat,
    path: &Path,
    options: &ReadOptions,
) -> Result<Samples, DataError> {
    Ok(read_for_prediction(format, path, options)?.0)
}

/// Reads samples like [`load_for_prediction`], with the files that were read.
///
/// # Errors
/// Like [`load`].
pub fn read_for_prediction(
    format: SampleFormat,
    path: &Path,
    options: &ReadOptions,
) -> Result<(Samples, Vec<DataFile>), DataError> {
    let ReadSet { samples, files, .. } = read_for_evaluation(format, path, options, false)?;
    Ok((samples, files))
}

/// Reads samples on which a trained model is evaluated, as the training samples of a set without
/// held-out samples; they must have targets. From two sets in a directory, the held-out one is
/// read.
///
/// # Errors
/// Like [`load`].
pub fn load_for_evaluation(
    format: SampleFormat,
    path: &Path,
    options: &ReadOptions,
) -> Result<LoadedSamples, DataError> {
    let ReadSet { samples, files, .. } = read_for_evaluation(format, path, options, true)?;
    Ok(LoadedSamples { train: samples, validation: None, files })
}

fn read_for_evaluation(
    format: SampleFormat,
    path: &Path,
    options: &ReadOptions,
    targets: bool,
) -> Result<ReadSet, DataError> {
    let set = find_for_evaluation(format, path)?;
    let known = options.known.as_ref().map(Expected::of_model);
    let base = Base::of(path);
    let request = Request { options, expected: known.as_ref(), base: &base, targets };
    let mut read = read(format, &set, &request)?;
    read.files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(read)
}

/// Files of one set of samples.
#[derive(Clone, Debug, PartialEq)]
struct FileSet {
    /// Files with the features, or the directory of pictures.
    inputs: Vec<PathBuf>,
    /// File with the targets, or with the names of classes.
    targets: Option<PathBuf>,
}

fn find(format: SampleFormat, path: &Path) -> Result<FileSets, DataError> {
    if let Err(why) = path.metadata() {
        return Err(DataError::Read { name: path.display().to_string(), why });
    }
    match format {
        SampleFormat::Idx => idx::find(path),
        SampleFormat::Cifar10 => cifar::find(path),
        SampleFormat::Csv => csv::find(path),
        SampleFormat::Npy => npy::find(path),
        SampleFormat::Pictures => pictures::find(path),
    }
}

/// Finds the set at a path on which a model is evaluated: a file, or the held-out set of a
/// directory, if there is one.
fn find_for_evaluation(format: SampleFormat, path: &Path) -> Result<FileSet, DataError> {
    let FileSets { first, held_out } = find(format, path)?;
    match held_out {
        Some(held_out) if path.is_dir() => Ok(held_out),
        _ => Ok(first),
    }
}

/// Reads one set and checks it against the demands. Of its files, those without samples have their
/// role.
fn read(format: SampleFormat, set: &FileSet, request: &Request) -> Result<ReadSet, DataError> {
    let mut read = match format {
        SampleFormat::Idx => idx::read(set, request),
        SampleFormat::Cifar10 => cifar::read(set, request),
        SampleFormat::Csv => csv::read(set, request),
        SampleFormat::Npy => npy::read(set, request),
        SampleFormat::Pictures => pictures::read(set, request),
    }?;
    if let Some(targets) = &set.targets {
        let name = request.base.name(targets);
        for file in &mut read.files {
            if file.name == name {
                file.role = Some(FileRole::Labels);
            }
        }
    }
    if let Some(expected) = request.expected {
        expected.conform(&mut read.samples, read.is_numbered)?;
    }
    Ok(read)
}
