//! Samples of supervised learning, as the readers of [`formats`](super::formats) return them:
//! features of one shape, each with a target.

use std::sync::Arc;

use super::DataError;
use potluck_core::format::{counted, dims_text};

/// Largest number of files that a run records one by one.
const RECORDED_MAX: usize = 100;

/// Part that a file has in the data of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileRole {
    /// Samples to train on; a share of them may be held out.
    Training,
    /// Samples of a held-out set of its own.
    HeldOut,
    /// No samples: labels, names of classes, or a description of another file.
    Labels,
}

/// File that a data set was read from.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DataFile {
    /// Path below the directory of the data, or the name of the file; with `/` on every system.
    pub name: String,
    pub bytes: u64,
    /// BLAKE3 hash of the content, in hexadecimal.
    pub blake3: String,
    /// `None` in checkpoints of earlier versions, and for samples that a model is used on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<FileRole>,
}

impl DataFile {
    /// Returns the entry of a file with this content.
    pub fn of(name: &str, content: &[u8]) -> Self {
        let blake3 = blake3::hash(content).to_hex().to_string();
        Self { name: name.into(), bytes: content.len() as u64, blake3, role: None }
    }

    /// Returns the list of files that a run records: for a large number, one entry with the sum of
    /// their sizes, a hash of their names and hashes, and the role that all of them have.
    pub fn recorded(files: Vec<Self>) -> Vec<Self> {
        if files.len() <= RECORDED_MAX {
            return files;
        }
        let mut hasher = blake3::Hasher::new();
        for Self { name, blake3, .. } in &files {
            hasher.update(format!("{name}\0{blake3}\0").as_bytes());
        }
        let bytes = files.iter().map(|file| file.bytes).sum();
        let name = format!("{} files", files.len());
        let is_one_role = files.iter().all(|file| file.role == files[0].role);
        let role = if is_one_role { files[0].role } else { None };
        vec![Self { name, bytes, blake3: hasher.finalize().to_hex().to_string(), role }]
    }
}

/// Samples that are read from their files during training.
pub trait LazyFeatures: Send + Sync {
    /// Returns the number of samples.
    fn len(&self) -> usize;

    /// Returns true if there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the features of a sample, each from 0 to 1.
    ///
    /// # Errors
    /// Returns `DataError` if the sample can no longer be read.
    fn read(&self, index: usize, into: &mut [f32]) -> Result<(), DataError>;
}

/// Features of samples, one sample after the other.
#[derive(Clone)]
pub enum Features {
    /// Bytes for the values `byte / 255`.
    Bytes(Vec<u8>),
    Floats(Vec<f32>),
    Lazy(Arc<dyn LazyFeatures>),
}

/// Targets of samples.
#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// A class of each sample: its index in `names`.
    Classes { ids: Vec<u32>, names: Vec<String> },
    /// `names.len()` values of each sample.
    Values { values: Vec<f32>, names: Vec<String> },
    /// None: the samples are for prediction.
    Absent,
}

/// Samples with their targets.
#[derive(Clone)]
pub struct Samples {
    /// Path of the samples, for messages.
    pub name: String,
    /// Shape of the features of a sample: `[channels, height, width]` of a picture, `[columns]` of
    /// a row of a table.
    pub shape: Vec<usize>,
    /// Names of the columns of a table; empty for other samples.
    pub columns: Vec<String>,
    /// Names of the columns of a table that are targets; empty for other samples and without
    /// targets.
    pub target_columns: Vec<String>,
    pub features: Features,
    pub targets: Targets,
    /// Name of each sample, if samples have names, such as files of pictures.
    pub ids: Option<Vec<String>>,
}

impl Samples {
    /// Returns the number of values of a sample's features.
    pub fn width(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        match &self.features {
            Features::Bytes(bytes) => bytes.len() / self.width().max(1),
            Features::Floats(values) => values.len() / self.width().max(1),
            Features::Lazy(lazy) => lazy.len(),
        }
    }

    /// Returns true if there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the features of a sample.
    ///
    /// # Errors
    /// Returns `DataError` if a sample can no longer be read from its file.
    ///
    /// # Panics
    /// If `index` is not below [`Samples::len`], or `into` does not have [`Samples::width`] values.
    pub fn read(&self, index: usize, into: &mut [f32]) -> Result<(), DataError> {
        let width = self.width();
        let range = index * width..(index + 1) * width;
        match &self.features {
            Features::Bytes(bytes) => {
                for (to, byte) in into.iter_mut().zip(&bytes[range]) {
                    *to = f32::from(*byte) / 255.0;
                }
            }
            Features::Floats(values) => into.copy_from_slice(&values[range]),
            Features::Lazy(lazy) => return lazy.read(index, into),
        }
        Ok(())
    }

    /// Checks that there are as many features, targets and names as the samples have together, and
    /// that each class has a name.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` with both numbers.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        self.check_features()?;
        self.check_targets()?;
        let samples = self.len();
        if let Some(ids) = &self.ids
            && ids.len() != samples
        {
            let ids = counted(ids.len(), "sample", "samples");
            let why = format!("has names of {ids}, and the features of {samples}");
            return Err(DataError::of_file(&self.name, why));
        }
        Ok(())
    }

    fn check_features(&self) -> Result<(), DataError> {
        let values = match &self.features {
            Features::Bytes(bytes) => bytes.len(),
            Features::Floats(values) => values.len(),
            Features::Lazy(_) => return Ok(()),
        };
        let width = self.width();
        if values == self.len() * width {
            return Ok(());
        }
        let values = counted(values, "value", "values");
        let shape = dims_text(&self.shape);
        let why = format!(
            "has {values} of features, which are no whole number of samples of {shape}, {width} \
             values each"
        );
        Err(DataError::of_file(&self.name, why))
    }

    fn check_targets(&self) -> Result<(), DataError> {
        let (targets, per_sample) = match &self.targets {
            Targets::Classes { ids, .. } => (ids.len(), 1),
            Targets::Values { values, names } => (values.len(), names.len()),
            Targets::Absent => return Ok(()),
        };
        let samples = self.len();
        if targets != samples * per_sample {
            let wanted = samples * per_sample;
            let samples = counted(samples, "sample", "samples");
            let targets = counted(targets, "target", "targets");
            let why = format!("has {targets}, and its {samples} have {wanted}");
            return Err(DataError::of_file(&self.name, why));
        }
        let Targets::Classes { ids, names } = &self.targets else { return Ok(()) };
        let Some(index) = ids.iter().position(|id| *id as usize >= names.len()) else {
            return Ok(());
        };
        let classes = counted(names.len(), "class has a name", "classes have names");
        Err(DataError::Invalid {
            name: self.name.clone(),
            place: format!("sample at index {index}"),
            why: format!("has class {}, counted from 0, and {classes}", ids[index]).into(),
        })
    }
}

/// Training samples, and held-out samples from separate files.
#[derive(Clone)]
pub struct LoadedSamples {
    pub train: Samples,
    pub validation: Option<Samples>,
    /// Files that were read, in the order of their names.
    pub files: Vec<DataFile>,
}
