//! Models from which new runs start, instead of random parameters.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, NamedTensor};
use crate::error::TrainError;
use crate::families::ModelFamily;
use crate::hugging_face::{self, BareWeights, ModelDirectory, ModelFiles, ModelTensors};
use crate::run_data::SavedData;
use potluck_data::Tokenizer;
use potluck_data::tokenizer::TOKENIZER;
use potluck_graph::Graph;

/// Model from which a new run starts.
#[derive(Clone, Debug)]
pub enum StartingModel {
    /// Model in Hugging Face's files.
    Files(ModelDirectory),
    /// Weights of the configured model.
    Weights(BareWeights),
    /// Model of a checkpoint at this path, without its moments.
    Checkpoint { path: PathBuf, checkpoint: Arc<Checkpoint> },
}

impl StartingModel {
    pub fn path(&self) -> &Path {
        match self {
            Self::Files(directory) => directory.path(),
            Self::Weights(weights) => weights.path(),
            Self::Checkpoint { path, .. } => path,
        }
    }

    /// Returns the description of the model's training data in a checkpoint; other files have none.
    pub fn saved(&self) -> SavedData {
        match self {
            Self::Files(_) | Self::Weights(_) => SavedData::default(),
            Self::Checkpoint { checkpoint, .. } => SavedData::of(&checkpoint.meta),
        }
    }

    /// Reads the files that describe how the model is used.
    ///
    /// # Errors
    /// Returns `TrainError` if one cannot be read.
    pub fn files(&self) -> Result<ModelFiles, TrainError> {
        Ok(match self {
            Self::Files(directory) => ModelFiles::of_model(directory.path())?,
            Self::Weights(weights) => ModelFiles::read(weights.path())?,
            Self::Checkpoint { path, .. } => ModelFiles::of_run(path)?,
        })
    }

    /// Returns true if the model has this tokenizer, or neither has one.
    ///
    /// # Errors
    /// Returns `TrainError` if the model's tokenizer cannot be read.
    pub(super) fn has_tokenizer(&self, tokenizer: Option<&Tokenizer>) -> Result<bool, TrainError> {
        if let Self::Checkpoint { .. } = self {
            return Ok(self.saved().tokenizer.as_ref() == tokenizer);
        }
        // By its hash: an invalid file must not prevent a run with another tokenizer.
        let path = self.path().join(TOKENIZER);
        let own = match fs::read(&path) {
            Ok(json) => Some(blake3::hash(&json).to_hex().to_string()),
            Err(_) if !path.exists() => None,
            Err(why) => return Err(TrainError::Io { path, why }),
        };
        Ok(match tokenizer {
            Some(Tokenizer::File(file)) => own.as_deref() == Some(file.blake3()),
            Some(_) => false,
            None => own.is_none(),
        })
    }

    /// Returns a warning if the characters of a text may have other ids than the model's tokens:
    /// without the model's tokenizer, their order gives their ids.
    pub(super) fn other_characters(
        &self,
        tokenizer: Option<&Tokenizer>,
        family: &dyn ModelFamily,
    ) -> Option<String> {
        let (Self::Files(_) | Self::Weights(_), Some(tokenizer @ Tokenizer::Char { .. })) =
            (self, tokenizer)
        else {
            return None;
        };
        let (characters, tokens) = (tokenizer.vocabulary(), self.tokens(family)?);
        let named = self.path().display();
        (characters != tokens).then(|| {
            format!(
                "the text has {characters} different characters, and {named} has {tokens} tokens: \
                 if it was trained on other characters, their ids differ; train on its text, or \
                 set data.tokenizer to its tokenizer.json"
            )
        })
    }

    /// Returns the number of tokens of the model, of this family: the rows of its embedding; `None`
    /// for a family without such a table.
    pub fn tokens(&self, family: &dyn ModelFamily) -> Option<usize> {
        match self {
            Self::Files(directory) => directory.vocabulary(),
            Self::Weights(weights) => weights.tokens(family),
            Self::Checkpoint { checkpoint, .. } => {
                let tokens = hugging_face::vocabulary_of(family, &checkpoint.parameters);
                (tokens > 0).then_some(tokens)
            }
        }
    }

    /// Finds the parameters of a graph. If `tokens` is given, the model has this many tokens, and
    /// the graph's additional ones are added.
    ///
    /// # Errors
    /// Returns `TrainError` for the first parameter that is missing or has another shape.
    pub(super) fn parameters(
        &self,
        graph: &Graph,
        family: &dyn ModelFamily,
        tokens: Option<usize>,
    ) -> Result<StartingParameters, TrainError> {
        let mut tables = Vec::new();
        for parameter in &graph.parameters {
            let name = &parameter.whole.name;
            if tokens.is_some() && hugging_face::is_table_of_tokens(family.names(), name) {
                tables.push((name.clone(), parameter.slice.whole_dims()[0]));
            }
        }
        let source = match self {
            Self::Files(directory) => {
                ParameterSource::Files(directory.tensors(graph, family, tokens)?)
            }
            Self::Weights(weights) => {
                ParameterSource::Files(weights.tensors(graph, family, tokens)?)
            }
            Self::Checkpoint { checkpoint, .. } => {
                for parameter in &graph.parameters {
                    let name = &parameter.whole.name;
                    let mut wanted = parameter.slice.whole_dims().to_vec();
                    if let Some(tokens) = tokens
                        && tables.iter().any(|(table, _)| table == name)
                    {
                        wanted[0] = tokens;
                    }
                    NamedTensor::find(&checkpoint.parameters, name, &wanted)?;
                }
                ParameterSource::Checkpoint(checkpoint.clone())
            }
        };
        Ok(StartingParameters { source, tables })
    }
}

/// Parameters from which a run starts, which match its model.
pub(super) struct StartingParameters {
    source: ParameterSource,
    /// Names of token tables to which rows are added, with their new numbers of rows.
    tables: Vec<(String, usize)>,
}

enum ParameterSource {
    Files(ModelTensors),
    Checkpoint(Arc<Checkpoint>),
}

impl StartingParameters {
    /// Reads the parameters under their names in the model.
    ///
    /// # Errors
    /// Returns `TrainError` if a file cannot be read, or has a non-finite value.
    pub(super) fn read(self) -> Result<Vec<NamedTensor>, TrainError> {
        let mut read = match self.source {
            ParameterSource::Files(tensors) => tensors.read()?,
            ParameterSource::Checkpoint(checkpoint) => checkpoint.parameters.clone(),
        };
        for (name, rows) in &self.tables {
            if let Some(table) = read.iter_mut().find(|tensor| tensor.name == *name) {
                add_rows(table, *rows);
            }
        }
        Ok(read)
    }
}

/// Adds rows to a matrix until it has `rows`, each the mean of the existing ones: a token that the
/// model does not know is then initially no more likely than the average one (Hewitt 2021,
/// "Initializing New Word Embeddings for Pretrained Language Models").
fn add_rows(table: &mut NamedTensor, rows: usize) {
    let [known, columns] = table.shape[..] else { return };
    if known == 0 || known >= rows {
        return;
    }
    let mut sums = vec![0.0; columns];
    for row in table.values.chunks_exact(columns) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += f64::from(*value);
        }
    }
    let mean: Vec<f32> = sums.iter().map(|sum| (sum / known as f64) as f32).collect();
    table.values.reserve_exact((rows - known) * columns);
    for _ in known..rows {
        table.values.extend_from_slice(&mean);
    }
    table.shape[0] = rows;
}
