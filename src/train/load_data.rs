//! Loading of the data named by a specification.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::config::schema::TokenizerSource;
use super::error::TrainError;
use super::run_data::{RunData, SavedData, require_there};
use super::spec::{DataSource, DataSpec, RunSpec};
use potluck_data::formats::{self, KnownSamples, ReadOptions};
use potluck_data::tokens::{TokenFile, TokenWindows};
use potluck_data::{
    Augmentation, DataDescription, DataError, LoadedSamples, PrepareOptions, SampleDescription,
    SampleOptions, SampleSet, TextData, Tokenizer, TokenizerChoice, TokenizerFile, TokenizerKind,
    builtin, is_token_file, prepare,
};
use potluck_kernels::autotune::cache;

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
    /// Loads the data, with the tokenizer, classes and normalization of a checkpoint if it has
    /// them.
    ///
    /// # Errors
    /// Returns `TrainError::Data` if the data cannot be read, tokenized or split.
    pub fn load_data(&self, saved: &SavedData) -> Result<RunData, TrainError> {
        let DataSpec { source, held_out, .. } = &self.data;
        let context = self.context();
        Ok(match source {
            DataSource::Builtin => {
                let corpus = builtin::corpus();
                let bytes = corpus.as_bytes();
                let tokenizer = self.tokenizer_choice(saved.tokenizer.clone())?;
                let text =
                    TextData::from_bytes(builtin::NAME, bytes, tokenizer, *held_out, context)?;
                RunData::of_text(text, context, true)
            }
            DataSource::Text(path) => {
                let tokenizer = self.tokenizer_choice(saved.tokenizer.clone())?;
                if let TokenizerChoice::Given(Tokenizer::File(tokenizer)) = &tokenizer
                    && let Some(file) = cached(path, tokenizer, *held_out, context)
                {
                    let windows = TokenWindows { file: Arc::new(file), context };
                    return Ok(RunData::of_tokens(windows, Tokenizer::File(tokenizer.clone())));
                }
                let text = TextData::load(path, tokenizer, *held_out, context)?;
                RunData::of_text(text, context, false)
            }
            DataSource::Tokens(path) => {
                let file = Arc::new(TokenFile::open(path, *held_out, context)?);
                let tokenizer = self.tokenizer_of(&file, path, saved)?;
                let windows = TokenWindows { file: Arc::clone(&file), context };
                match tokenizer {
                    Some(tokenizer) => {
                        let tokenizer = file.with_end_token(tokenizer);
                        RunData::of_tokens(windows, Tokenizer::File(tokenizer))
                    }
                    None => {
                        let vocabulary = self.vocabulary_of(&file, path, saved)?;
                        let description = DataDescription::Tokens { vocabulary };
                        RunData::described(Arc::new(windows), description)
                    }
                }
            }
            DataSource::Samples { .. } => self.load_samples(saved)?,
        })
    }

    /// Selects the part of the initial model's data description that applies to the run: its
    /// tokenizer is dropped if the configuration names another.
    pub fn known_data(&self, of_model: SavedData) -> SavedData {
        let tokenizer = of_model.tokenizer.filter(|tokenizer| match tokenizer {
            Tokenizer::Char { .. } => {
                self.data.tokenizer == TokenizerSource::Kind(TokenizerKind::Char)
            }
            Tokenizer::Byte => self.data.tokenizer == TokenizerSource::Kind(TokenizerKind::Byte),
            // The configuration names the file, whether the model's or another one.
            Tokenizer::File(_) => false,
        });
        SavedData { tokenizer, ..of_model }
    }

    /// Loads data other than the run's as a single training split, without held-out samples. If the
    /// data have a training set and a held-out set of samples, only the held-out set is loaded.
    ///
    /// # Errors
    /// See [`RunSpec::load_data`].
    pub fn load_other(&self, path: &Path, saved: &SavedData) -> Result<RunData, TrainError> {
        let path = path.to_path_buf();
        let mut spec = self.clone();
        spec.data.held_out = 0.0;
        spec.data.source = match &self.data.source {
            DataSource::Builtin | DataSource::Text(_) | DataSource::Tokens(_) => {
                match saved.tokenizer {
                    // The same tokenizer may have encoded another text before.
                    Some(Tokenizer::File(_)) if !is_token_file(&path) => DataSource::Text(path),
                    Some(Tokenizer::File(_)) | None => DataSource::Tokens(path),
                    Some(_) => DataSource::Text(path),
                }
            }
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

    /// Creates a data set of samples, normalized like the data that the model was trained on
    /// before.
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

    /// Returns the options for reading samples; `trained_on` describes the data that the model was
    /// trained on, if it was trained on others.
    pub fn read_options(&self, trained_on: Option<&SampleDescription>) -> ReadOptions {
        ReadOptions { known: trained_on.map(KnownSamples::of), ..self.data.reading.clone() }
    }

    /// Tokenizer of token ids: the checkpoint's, the configured one, or the one beside the ids;
    /// `None` if none of these exists.
    fn tokenizer_of(
        &self,
        file: &TokenFile,
        path: &Path,
        saved: &SavedData,
    ) -> Result<Option<TokenizerFile>, DataError> {
        let refuse = |why: String| {
            let (name, place) = (path.display().to_string(), String::new());
            Err(DataError::Invalid { name, place, why: why.into() })
        };
        let (tokenizer, whose) = match (&saved.tokenizer, &self.data.tokenizer) {
            (Some(Tokenizer::File(tokenizer)), _) if tokenizer.is_read() => {
                (tokenizer.clone(), "the model's".to_string())
            }
            (Some(Tokenizer::File(tokenizer)), TokenizerSource::File(named)) => {
                (tokenizer.read_from(named)?, named.display().to_string())
            }
            (Some(Tokenizer::File(tokenizer)), TokenizerSource::Kind(_)) => {
                return match beside_as(file, tokenizer)? {
                    Some(beside) => Ok(Some(beside)),
                    None => refuse("has no tokenizer.json beside it that is the model's".into()),
                };
            }
            (Some(_), _) => return refuse("is of token ids, and the model of characters".into()),
            (None, TokenizerSource::File(named)) => {
                (TokenizerFile::load(named)?, named.display().to_string())
            }
            (None, TokenizerSource::Kind(_)) => return file.tokenizer(),
        };
        if file.vocabulary() > tokenizer.vocabulary() {
            return refuse(format!(
                "has ids of a vocabulary of {}, and {whose} has {}",
                file.vocabulary(),
                tokenizer.vocabulary()
            ));
        }
        if let Some(hash) = file.tokenizer_hash()
            && !hash.eq_ignore_ascii_case(tokenizer.blake3())
            && beside_as(file, &tokenizer).ok().flatten().is_none()
        {
            return refuse(format!(
                "has ids of another tokenizer (hash {hash}) than {whose} ({}); prepare the text \
                 with that",
                tokenizer.blake3()
            ));
        }
        Ok(Some(tokenizer))
    }

    /// Returns the vocabulary of token ids without a tokenizer: that of the data on which the model
    /// was trained, if there is one, or more for further ids of the model.
    fn vocabulary_of(
        &self,
        file: &TokenFile,
        path: &Path,
        saved: &SavedData,
    ) -> Result<usize, DataError> {
        let of_file = file.vocabulary();
        let Some(DataDescription::Tokens { vocabulary }) = saved.description else {
            return Ok(of_file);
        };
        let most = vocabulary.max(self.model_vocabulary().unwrap_or(0));
        if of_file > most {
            let why = format!("has ids of a vocabulary of {of_file}, and the model has {most}");
            let (name, place) = (path.display().to_string(), String::new());
            return Err(DataError::Invalid { name, place, why: why.into() });
        }
        Ok(vocabulary.max(of_file))
    }

    fn tokenizer_choice(&self, given: Option<Tokenizer>) -> Result<TokenizerChoice, DataError> {
        Ok(match (given, &self.data.tokenizer) {
            // Another node has named the file, which, like the data, is on every machine.
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

/// Returns the tokenizer beside token ids as a model has it: exports of runs leave out the
/// template, with which no text of the ids was encoded. `None` if it is another one.
fn beside_as(
    file: &TokenFile,
    of_model: &TokenizerFile,
) -> Result<Option<TokenizerFile>, DataError> {
    let Some(beside) = file.tokenizer()? else { return Ok(None) };
    if beside == *of_model {
        return Ok(Some(beside));
    }
    Ok(Some(beside.without_template()?).filter(|bare| bare == of_model))
}

const CACHED_MAX: usize = 8;

/// Ids of a text under a tokenizer, from the cache, where they are stored at first use. `None` if
/// they cannot be stored there: the caller then encodes in memory, which also reports faults of the
/// text.
fn cached(
    path: &Path,
    tokenizer: &TokenizerFile,
    held_out: f64,
    context: usize,
) -> Option<TokenFile> {
    let found = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    let directory = cache::directory()?.join("tokens");
    let changed = (found.len(), found.modified().ok()?);
    let told = format!("{:?} {changed:?} {}", fs::canonicalize(path), tokenizer.blake3());
    let name = blake3::hash(told.as_bytes()).to_hex();
    let out = directory.join(&name[..32]);
    let options = PrepareOptions::of_text(path, tokenizer, out.clone());
    let opened = prepare(&options, &mut |_| {})
        .ok()
        .and_then(|prepared| TokenFile::open(&prepared.path, held_out, context).ok());
    if opened.is_none() {
        // A partial or damaged directory would be in the way; failing to remove it is harmless.
        let _ = fs::remove_dir_all(&out);
    }
    remove_oldest(&directory);
    opened
}

/// Removes all but the most recently prepared texts from the cache. A directory that a process has
/// open stays readable there, or stays if the system refuses to remove it.
fn remove_oldest(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut known = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if let Ok(changed) = fs::metadata(&path).and_then(|found| found.modified()) {
            known.push((changed, path));
        }
    }
    known.sort();
    let surplus = known.len().saturating_sub(CACHED_MAX);
    for (_, path) in known.into_iter().take(surplus) {
        let _ = fs::remove_dir_all(path);
    }
}
