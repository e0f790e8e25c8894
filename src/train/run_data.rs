//! Data of a run: the data set, and what a model, a task and a checkpoint must know about it.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use super::error::TrainError;
use super::spec::{DataSource, DataSpec, RunSpec, language_model};
use super::task::{Task, TextTask, TokenTask, task_of_samples};
use crate::checkpoint::Meta;
use potluck_data::formats::{self, KnownSamples, ReadOptions};
use potluck_data::tokens::{TokenFile, TokenWindows};
use potluck_data::{
    Augmentation, DataDescription, DataError, Dataset, LoadedSamples, SampleDescription,
    SampleOptions, SampleSet, TargetNames, TextData, TextWindows, Tokenizer, TokenizerChoice,
    world,
};
use potluck_graph::Graph;

/// What a checkpoint knows about the data of its run.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SavedData {
    /// Tokenizer, of a text.
    pub tokenizer: Option<Tokenizer>,
    /// Description, of anything else.
    pub description: Option<DataDescription>,
}

impl SavedData {
    /// Returns what a checkpoint knows.
    pub fn of(meta: &Meta) -> Self {
        Self { tokenizer: meta.tokenizer.clone(), description: meta.description.clone() }
    }

    /// Returns the description of samples, if the data are samples.
    fn samples(&self) -> Option<&SampleDescription> {
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

/// Sizes of the data, to which the inputs and outputs of a model must be built.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum DataShape {
    Tokens {
        vocabulary: usize,
    },
    Samples {
        /// Shape of the features of a sample.
        shape: Vec<usize>,
        /// Outputs of a model: one per class, or one per value.
        outputs: usize,
        /// True if the targets are classes.
        has_classes: bool,
    },
}

impl DataShape {
    fn of(description: &DataDescription) -> Self {
        match description {
            DataDescription::Tokens { vocabulary } => Self::Tokens { vocabulary: *vocabulary },
            DataDescription::Samples(samples) => Self::Samples {
                shape: samples.shape.clone(),
                outputs: samples.outputs(),
                has_classes: matches!(samples.targets, TargetNames::Classes(_)),
            },
        }
    }
}

/// Data of a run.
#[derive(Clone)]
pub struct RunData {
    pub dataset: Arc<dyn Dataset>,
    pub shape: DataShape,
    pub augmentation: Option<Augmentation>,
    /// Text with its tokenizer, if the data are text.
    text: Option<Arc<TextData>>,
    description: Option<DataDescription>,
    is_builtin: bool,
}

impl RunData {
    fn of_text(text: TextData, context: usize, is_builtin: bool) -> Self {
        let text = Arc::new(text);
        Self {
            dataset: Arc::new(TextWindows { text: text.clone(), context }),
            shape: DataShape::Tokens { vocabulary: text.tokenizer().vocabulary() },
            augmentation: None,
            text: Some(text),
            description: None,
            is_builtin,
        }
    }

    fn described(dataset: Arc<dyn Dataset>, description: DataDescription) -> Self {
        let shape = DataShape::of(&description);
        let description = Some(description);
        Self { dataset, shape, augmentation: None, text: None, description, is_builtin: false }
    }

    /// Returns what a checkpoint is to know.
    pub fn saved(&self) -> SavedData {
        let tokenizer = self.text.as_ref().map(|text| text.tokenizer().clone());
        SavedData { tokenizer, description: self.description.clone() }
    }

    /// Returns the task of a model of this data.
    ///
    /// # Errors
    /// Returns `TrainError::Defect` if the graph is not that of a model of text, and the data are.
    pub fn task(&self, graph: &Graph) -> Result<Arc<dyn Task>, TrainError> {
        Ok(match (&self.text, &self.description) {
            (Some(text), _) => {
                let model = language_model(graph)?;
                let is_builtin = self.is_builtin;
                Arc::new(TextTask { text: text.clone(), model, is_builtin })
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

impl DataSource {
    /// Checks that the data can be read, without reading them.
    ///
    /// # Errors
    /// Returns `DataError::Read` for a path that cannot be read.
    pub fn require_there(&self) -> Result<(), DataError> {
        let mut source = self.clone();
        for path in source.paths_mut() {
            require_there(path)?;
        }
        Ok(())
    }
}

impl RunSpec {
    /// Loads the data, with the tokenizer, the classes and the normalization of a checkpoint if it
    /// has them.
    ///
    /// # Errors
    /// Returns `TrainError::Data` if the data cannot be read, tokenized or split.
    pub fn load_data(&self, saved: &SavedData) -> Result<RunData, TrainError> {
        let DataSpec { source, held_out, .. } = &self.data;
        let context = self.model.context;
        Ok(match source {
            DataSource::Builtin => {
                let corpus = world::corpus();
                let bytes = corpus.as_bytes();
                let tokenizer = self.tokenizer_choice(saved.tokenizer.clone());
                let text = TextData::from_bytes(world::NAME, bytes, tokenizer, *held_out, context)?;
                RunData::of_text(text, context, true)
            }
            DataSource::Text(path) => {
                let tokenizer = self.tokenizer_choice(saved.tokenizer.clone());
                let text = TextData::load(path, tokenizer, *held_out, context)?;
                RunData::of_text(text, context, false)
            }
            DataSource::Tokens(path) => {
                let file = Arc::new(TokenFile::open(path, *held_out, context)?);
                let vocabulary = file.vocabulary();
                let windows = Arc::new(TokenWindows { file, context });
                RunData::described(windows, DataDescription::Tokens { vocabulary })
            }
            DataSource::Samples { .. } => self.load_samples(saved)?,
        })
    }

    /// Loads other data than the run's, of which nothing is held out: all of it is the training
    /// split. Of samples in two sets, a training and a held-out one, only the held-out one is
    /// loaded.
    ///
    /// # Errors
    /// See [`RunSpec::load_data`].
    pub fn load_other(&self, path: &Path, saved: &SavedData) -> Result<RunData, TrainError> {
        let path = path.to_path_buf();
        let mut spec = self.clone();
        spec.data.held_out = 0.0;
        spec.data.source = match &self.data.source {
            DataSource::Builtin | DataSource::Text(_) => DataSource::Text(path),
            DataSource::Tokens(_) => DataSource::Tokens(path),
            DataSource::Samples { format, .. } => {
                let format = formats::detect(&path).unwrap_or(*format);
                let options = spec.read_options(saved.samples());
                let loaded = formats::load_for_evaluation(format, &path, &options)?;
                return spec.sample_data(loaded, saved.samples());
            }
        };
        spec.load_data(saved)
    }

    fn load_samples(&self, saved: &SavedData) -> Result<RunData, TrainError> {
        let DataSource::Samples { format, path, val_path } = &self.data.source else {
            return Err(TrainError::Defect("data without samples".into()));
        };
        let options = self.read_options(saved.samples());
        let loaded = formats::load(*format, path, val_path.as_deref(), &options)?;
        self.sample_data(loaded, saved.samples())
    }

    /// Makes a data set of samples, normalized as those that a model was trained on before.
    fn sample_data(
        &self,
        loaded: LoadedSamples,
        before: Option<&SampleDescription>,
    ) -> Result<RunData, TrainError> {
        let DataSpec { held_out, normalize, crop, flip, .. } = &self.data;
        let normalization = before.map(|samples| samples.normalization.clone());
        let options =
            SampleOptions { held_out: *held_out, normalize: *normalize, saved: normalization };
        let set = SampleSet::new(loaded, &options)?;
        let mut augmentation = None;
        if *crop > 0 || *flip {
            augmentation = Some(Augmentation::new(&set.description, *crop, *flip)?);
        }
        let description = DataDescription::Samples(set.description.clone());
        let data = RunData::described(Arc::new(set), description);
        Ok(RunData { augmentation, ..data })
    }

    /// Returns the options of readers of samples, for a model that was trained on others if these
    /// are given.
    pub fn read_options(&self, trained_on: Option<&SampleDescription>) -> ReadOptions {
        ReadOptions { known: trained_on.map(KnownSamples::of), ..self.data.reading.clone() }
    }

    fn tokenizer_choice(&self, given: Option<Tokenizer>) -> TokenizerChoice {
        match given {
            Some(tokenizer) => TokenizerChoice::Given(tokenizer),
            None => TokenizerChoice::Derived(self.data.tokenizer),
        }
    }
}
