//! Loading of the data that a specification names.

use std::path::Path;
use std::sync::Arc;

use super::config::schema::TokenizerSource;
use super::error::TrainError;
use super::run_data::{RunData, SavedData, require_there};
use super::spec::{DataSource, DataSpec, RunSpec};
use potluck_data::formats::{self, KnownSamples, ReadOptions};
use potluck_data::tokens::{TokenFile, TokenWindows};
use potluck_data::{
    Augmentation, DataDescription, DataError, LoadedSamples, SampleDescription, SampleOptions,
    SampleSet, TextData, Tokenizer, TokenizerChoice, TokenizerFile, world,
};

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
        let context = self.context();
        Ok(match source {
            DataSource::Builtin => {
                let corpus = world::corpus();
                let bytes = corpus.as_bytes();
                let tokenizer = self.tokenizer_choice(saved.tokenizer.clone())?;
                let text = TextData::from_bytes(world::NAME, bytes, tokenizer, *held_out, context)?;
                RunData::of_text(text, context, true)
            }
            DataSource::Text(path) => {
                let tokenizer = self.tokenizer_choice(saved.tokenizer.clone())?;
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
        let mut data = RunData::described(Arc::new(set), description);
        data.augmentation = augmentation;
        Ok(data)
    }

    /// Returns the options of readers of samples, for a model that was trained on others if these
    /// are given.
    pub fn read_options(&self, trained_on: Option<&SampleDescription>) -> ReadOptions {
        ReadOptions { known: trained_on.map(KnownSamples::of), ..self.data.reading.clone() }
    }

    fn tokenizer_choice(&self, given: Option<Tokenizer>) -> Result<TokenizerChoice, DataError> {
        Ok(match (given, &self.data.tokenizer) {
            // Another node has said which file it is; as the data, it is on every machine.
            (Some(Tokenizer::File(file)), TokenizerSource::File(path)) if !file.is_read() => {
                TokenizerChoice::Given(Tokenizer::File(file.read_from(path)?))
            }
            (Some(tokenizer), _) => TokenizerChoice::Given(tokenizer),
            (None, TokenizerSource::Kind(kind)) => TokenizerChoice::Derived(*kind),
            (None, TokenizerSource::File(path)) => {
                TokenizerChoice::Given(Tokenizer::File(TokenizerFile::load(path)?))
            }
        })
    }
}
