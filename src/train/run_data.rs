//! Data of a run: the data set, and its description for models, tasks and checkpoints.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use super::error::TrainError;
use super::language_model::language_model;
use super::task::{Task, TextTask, TokenTask, task_of_samples};
use crate::checkpoint::Meta;
use crate::families::DataShape;
use potluck_data::{
    Augmentation, DataDescription, DataError, Dataset, SampleDescription, Split, TextData,
    TextWindows, TokenWindows, Tokenizer,
};
use potluck_graph::Graph;

/// Description of a run's data in a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SavedData {
    /// Tokenizer, for text.
    pub tokenizer: Option<Tokenizer>,
    /// Description, for any other data.
    pub description: Option<DataDescription>,
}

impl SavedData {
    /// Returns the description in a checkpoint.
    pub fn of(meta: &Meta) -> Self {
        Self { tokenizer: meta.tokenizer.clone(), description: meta.description.clone() }
    }

    pub(super) fn samples(&self) -> Option<&SampleDescription> {
        match &self.description {
            Some(DataDescription::Samples(samples)) => Some(samples),
            _ => None,
        }
    }

    /// Returns the sizes of the data; `None` for a new run.
    pub fn shape(&self) -> Option<DataShape> {
        match (&self.tokenizer, &self.description) {
            (Some(tokenizer), _) => Some(DataShape::Tokens { vocabulary: tokenizer.vocabulary() }),
            (None, Some(description)) => Some(DataShape::of(description)),
            (None, None) => None,
        }
    }
}

/// Data of a run.
#[derive(Clone)]
pub struct RunData {
    pub dataset: Arc<dyn Dataset>,
    pub shape: DataShape,
    pub augmentation: Option<Augmentation>,
    /// Tokenizer, if the data are text, or token ids of a text.
    tokenizer: Option<Tokenizer>,
    description: Option<DataDescription>,
    is_builtin: bool,
}

impl RunData {
    pub(super) fn of_text(text: TextData, context: usize, is_builtin: bool) -> Self {
        let tokenizer = text.tokenizer().clone();
        let dataset = Arc::new(TextWindows { text: Arc::new(text), context });
        Self { is_builtin, ..Self::tokenized(dataset, tokenizer) }
    }

    pub(super) fn of_tokens(windows: TokenWindows, tokenizer: Tokenizer) -> Self {
        Self::tokenized(Arc::new(windows), tokenizer)
    }

    fn tokenized(dataset: Arc<dyn Dataset>, tokenizer: Tokenizer) -> Self {
        Self {
            dataset,
            shape: DataShape::Tokens { vocabulary: tokenizer.vocabulary() },
            augmentation: None,
            tokenizer: Some(tokenizer),
            description: None,
            is_builtin: false,
        }
    }

    pub(super) fn described(dataset: Arc<dyn Dataset>, description: DataDescription) -> Self {
        let shape = DataShape::of(&description);
        let description = Some(description);
        Self { dataset, shape, augmentation: None, tokenizer: None, description, is_builtin: false }
    }

    /// Returns the description for a checkpoint.
    pub fn saved(&self) -> SavedData {
        SavedData { tokenizer: self.tokenizer.clone(), description: self.description.clone() }
    }

    /// Returns the number of samples to train on; `None` for texts and tokens.
    pub fn samples(&self) -> Option<u64> {
        let is_samples = matches!(self.description, Some(DataDescription::Samples(_)));
        is_samples.then(|| self.dataset.len(Split::Train))
    }

    /// Returns the task of a model of these data.
    ///
    /// # Errors
    /// Returns `TrainError::Defect` if the data are text and the graph is not a language model.
    pub fn task(&self, graph: &Graph) -> Result<Arc<dyn Task>, TrainError> {
        Ok(match (&self.tokenizer, &self.description) {
            (Some(tokenizer), _) => {
                let model = language_model(graph)?;
                let is_builtin = self.is_builtin;
                Arc::new(TextTask { tokenizer: tokenizer.clone(), model, is_builtin })
            }
            (None, Some(DataDescription::Tokens { vocabulary })) => {
                Arc::new(TokenTask { vocabulary: *vocabulary })
            }
            (None, Some(DataDescription::Samples(samples))) => task_of_samples(samples),
            (None, None) => return Err(TrainError::Defect("data of no kind".into())),
        })
    }
}

/// Checks that a file or directory of data can be read.
///
/// # Errors
/// Returns `DataError::Read` if it cannot.
pub fn require_there(path: &Path) -> Result<(), DataError> {
    let opened =
        if path.is_dir() { fs::read_dir(path).map(drop) } else { File::open(path).map(drop) };
    opened.map_err(|why| DataError::Read { name: path.display().to_string(), why })
}
