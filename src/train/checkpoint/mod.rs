//! Checkpoints: the complete state from which a run resumes as if it had never stopped.
//!
//! A checkpoint is a directory, `DIR/checkpoints/step-00001234/`, with two safetensors files, one
//! more if averages of the parameters are kept, another if the model carries its state from step to
//! step, and `manifest.json`, which is written last and has the length and the BLAKE3 hash of each
//! file and of itself. The directory is written under a temporary name, synced to the disk and then
//! renamed, so that a crash at any moment leaves the earlier checkpoints intact. Tensors are stored
//! by name and never by rank, so that a run with other devices can load them. They are written
//! whole, under their names in the model. A file may also have slices of a tensor, which the
//! manifest lists and readers join.
//!
//! The manifest has the number of its format, 5; format 4 is read too, and all others are refused.
//! A later version that writes something an earlier one would misunderstand adds a name to the list
//! `needs`; a program that does not know a name refuses the checkpoint. Other fields may be added
//! freely: programs that do not know a field warn about it, and their runs keep it if it is
//! directly in `meta`.

pub mod error;
mod lock;
mod manifest;
pub(crate) mod store;
mod tensors;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use error::CheckpointError;
pub use store::Store;

use manifest::Manifest;
use potluck_data::tokenizer::TOKENIZER;
use potluck_data::{DataDescription, DataFile, Tokenizer};
use potluck_parallel::Placement;

/// Names of the tensor files, in writing order.
const PARAMETERS: &str = "parameters.safetensors";
const MOMENTS: &str = "moments.safetensors";
const AVERAGES: &str = "averages.safetensors";
const CARRIED: &str = "carried.safetensors";
const FILES: [&str; 4] = [PARAMETERS, MOMENTS, AVERAGES, CARRIED];

/// Files that are omitted if they would contain no tensors.
const OPTIONAL_FILES: [&str; 2] = [AVERAGES, CARRIED];

/// State of a training run between two steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    pub meta: Meta,
    /// Parameters, by their names in the model.
    pub parameters: Vec<NamedTensor>,
    /// Optimizer state of parameter `NAME`, as `NAME.0`, `NAME.1`.
    pub moments: Vec<NamedTensor>,
    /// Exponential averages of the trained parameters, by their names; empty if none are kept.
    pub averages: Vec<NamedTensor>,
    /// States that the slots of the batch carry into the next step, by the names of their inputs;
    /// the first dimension is the batch.
    pub carried: Vec<NamedTensor>,
}

/// Metadata of a run: its state and description, without the tensors.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Meta {
    /// Steps done.
    pub step: u64,
    /// Updates done: steps that were not skipped.
    pub optimizer_step: u64,
    /// Meaning of the moments ([`Optimizer::kind_of_moments`]); `None` in checkpoints of earlier
    /// versions.
    ///
    /// [`Optimizer::kind_of_moments`]: potluck_graph::optim::Optimizer::kind_of_moments
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moments: Option<String>,
    /// Loss scale of the next step, in mixed precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    pub seed: u64,
    /// Samples consumed: the position in the data.
    pub samples: u64,
    /// The model's configuration, as TOML.
    pub model: String,
    /// Resolved configuration of the run, as TOML; empty for a trainer of the library, whose model
    /// and options are code.
    pub run: String,
    /// Names of the keys that the user has set; all others have their defaults.
    pub typed: Vec<String>,
    /// Tokenizer, for a model of text.
    pub tokenizer: Option<Tokenizer>,
    /// Description of the data, if they are not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<DataDescription>,
    /// Files of the data.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<DataFile>,
    /// Best evaluation so far.
    pub best: Option<Best>,
    /// Evaluations since the best one.
    #[serde(default)]
    pub evaluations_since_best: u64,
    /// Devices of the run, and the measured choices that can affect bits of the result.
    pub placement: Placement,
    /// Fingerprint of the data.
    pub data: String,
    /// Version of potluck that wrote the checkpoint.
    pub version: String,
    /// Fields unknown to this version of potluck, which it writes again.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

impl Meta {
    /// Returns true for a checkpoint of a trainer of the library, not of a run.
    pub fn is_of_library(&self) -> bool {
        self.run.is_empty()
    }

    /// Returns true if `self` and `other` are equal but for the best evaluation and the number of
    /// evaluations since it.
    fn equals_but_for_best(&self, other: &Self) -> bool {
        let Self { best, evaluations_since_best, .. } = *other;
        Self { best, evaluations_since_best, ..self.clone() } == *other
    }
}

/// Loss scale between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LossScale {
    /// Logarithm of the scale, which is a power of two.
    pub log2: i32,
    /// Steps in a row without an overflow since the scale last changed.
    pub clean_steps: u64,
}

/// Best evaluation so far.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Best {
    pub step: u64,
    #[serde(with = "manifest::exact")]
    pub val_loss: f64,
    /// Samples evaluated; losses on other numbers of samples are not comparable.
    pub samples: u64,
    /// Runs of consecutive samples through which the states of a model were carried; 0 for a model
    /// that carries none.
    #[serde(default)]
    pub runs: u64,
}

/// A tensor with its name.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// Values; their number is the product of `shape`, which is 1 for a scalar.
    pub values: Vec<f32>,
}

impl Checkpoint {
    /// Reads a checkpoint directory and verifies every length and hash.
    ///
    /// # Errors
    /// Returns a `CheckpointError` that names the faulty file.
    pub fn load(directory: &Path) -> Result<Self, CheckpointError> {
        Ok(Self::load_with_warnings(directory)?.0)
    }

    /// Like [`Checkpoint::load`], with a warning if the manifest has unknown fields.
    fn load_with_warnings(directory: &Path) -> Result<(Self, Vec<String>), CheckpointError> {
        Self::load_files(directory, true)
    }

    /// Like [`Checkpoint::load`] for use without training: without the moments, and with averages
    /// instead of the parameters that have one, as in evaluations. Warns if the manifest has
    /// unknown fields.
    fn load_parameters(directory: &Path) -> Result<(Self, Vec<String>), CheckpointError> {
        let (mut checkpoint, warnings) = Self::load_files(directory, false)?;
        let averages = std::mem::take(&mut checkpoint.averages);
        put_averages(&mut checkpoint.parameters, averages);
        Ok((checkpoint, warnings))
    }

    fn load_files(
        directory: &Path,
        with_moments: bool,
    ) -> Result<(Self, Vec<String>), CheckpointError> {
        let manifest = Manifest::read(directory)?;
        let read = |name| match manifest.file(name) {
            Some(entry) => tensors::read(&directory.join(name), entry),
            None => Ok(Vec::new()),
        };
        let parameters = read(PARAMETERS)?;
        let moments = if with_moments { read(MOMENTS)? } else { Vec::new() };
        let averages = read(AVERAGES)?;
        let carried = read(CARRIED)?;
        let mut meta = manifest.meta.clone();
        if let Some(Tokenizer::File(file)) = &mut meta.tokenizer {
            let path = directory.join(TOKENIZER);
            if let Some(entry) = manifest.file(TOKENIZER) {
                tensors::verify(&path, entry)?;
            }
            let found = file.read_from(&path);
            *file = found.map_err(|why| CheckpointError::Damaged { path, why: why.to_string() })?;
        }
        let mut warnings = Vec::new();
        if !manifest.unknown_names.is_empty() {
            let (place, names) =
                (directory.join(manifest::NAME), manifest.unknown_names.join(", "));
            let lost = match &manifest.lost_names()[..] {
                [] => String::new(),
                lost => format!("; a run from here does not write {} again", lost.join(", ")),
            };
            warnings.push(format!(
                "{}: this version of potluck does not know {names}, and reads the rest{lost}",
                place.display()
            ));
        }
        Ok((Self { meta, parameters, moments, averages, carried }, warnings))
    }

    /// Reads a checkpoint directory, or the newest good checkpoint of a run directory. Warns if
    /// that is the second newest because the newest is damaged.
    ///
    /// # Errors
    /// Returns the errors of [`Checkpoint::load`] and [`Store::load_latest`], and
    /// `CheckpointError::Ambiguous` for a directory that is both.
    pub fn load_path(path: &Path) -> Result<(Self, Vec<String>), CheckpointError> {
        if is_one_checkpoint(path)? {
            Self::load_with_warnings(path)
        } else {
            Store::open_to_read(path).load_latest()
        }
    }

    /// Reads the parameters and states of a checkpoint directory, or of the newest checkpoint of a
    /// run directory, with averages instead of the parameters that have one.
    ///
    /// # Errors
    /// Returns the errors of [`Checkpoint::load`], even if an older checkpoint is good, and
    /// `CheckpointError::Ambiguous` for a directory that is both.
    pub fn parameters_of_path(path: &Path) -> Result<(Self, Vec<String>), CheckpointError> {
        if is_one_checkpoint(path)? {
            Self::load_parameters(path)
        } else {
            Store::open_to_read(path).load_newest_parameters()
        }
    }
}

/// Replaces parameters by their averages, by name.
pub(crate) fn put_averages(parameters: &mut [NamedTensor], averages: Vec<NamedTensor>) {
    let mut by_name: BTreeMap<String, NamedTensor> = BTreeMap::new();
    for average in averages {
        by_name.insert(average.name.clone(), average);
    }
    for parameter in parameters {
        if let Some(average) = by_name.remove(&parameter.name) {
            *parameter = average;
        }
    }
}

/// Returns true for a checkpoint directory, and false for a run directory.
fn is_one_checkpoint(path: &Path) -> Result<bool, CheckpointError> {
    let is_checkpoint = is_checkpoint(path);
    if is_checkpoint && store::directory(path).exists() {
        return Err(CheckpointError::Ambiguous { path: path.into() });
    }
    Ok(is_checkpoint)
}

/// Returns true for a checkpoint directory, good or bad, and false for a run directory.
pub fn is_checkpoint(path: &Path) -> bool {
    path.join(manifest::NAME).exists()
}

/// Hint for a matrix of the transposed shape; empty for other shapes.
pub(crate) fn transposed_hint(found: &[usize], wanted: &[usize]) -> &'static str {
    match (found, wanted) {
        ([a, b], [c, d]) if a != b && (a, b) == (d, c) => {
            ", its transpose: as in PyTorch, the weight of a linear layer is (out, in)"
        }
        _ => "",
    }
}

/// Returns true for a run directory with checkpoints, good or bad.
pub fn has_checkpoints(path: &Path) -> bool {
    store::directory(path).exists()
}

/// Returns the run directory of a checkpoint: `RUN` for `RUN/checkpoints/step-00001234`; `None` for
/// a copy elsewhere or a checkpoint that was set aside. `path` may be relative and shortened, such
/// as `.`.
pub fn run_of(path: &Path) -> Option<PathBuf> {
    let full = dunce::canonicalize(path).ok()?;
    manifest::step_of(&full)?;
    let checkpoints = full.parent().filter(|parent| parent.ends_with(store::DIRECTORY))?;
    // As typed, if the path names these directories.
    let typed = path
        .parent()
        .filter(|parent| path.file_name().is_some() && parent.ends_with(store::DIRECTORY));
    let run = typed.unwrap_or(checkpoints).parent()?;
    Some(if run.as_os_str().is_empty() { PathBuf::from(".") } else { run.into() })
}

impl NamedTensor {
    /// Returns true if no value is NaN or infinite.
    pub fn is_finite(&self) -> bool {
        self.values.iter().all(|value| value.is_finite())
    }

    /// Returns the tensor with this name.
    ///
    /// # Errors
    /// Returns `CheckpointError::NoTensor` if it is missing, and `CheckpointError::Shape` if it has
    /// another shape.
    pub fn find<'a>(
        tensors: &'a [Self],
        name: &str,
        shape: &[usize],
    ) -> Result<&'a Self, CheckpointError> {
        let found = tensors.iter().find(|tensor| tensor.name == name);
        let tensor = found.ok_or_else(|| CheckpointError::NoTensor { name: name.into() })?;
        if tensor.shape == shape {
            return Ok(tensor);
        }
        Err(CheckpointError::Shape {
            name: name.into(),
            found: tensor.shape.clone(),
            wanted: shape.into(),
        })
    }
}
