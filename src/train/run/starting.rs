//! Models from which new runs start, in place of random parameters.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, NamedTensor};
use crate::error::TrainError;
use crate::families::ModelFamily;
use crate::hugging_face::{ModelDirectory, ModelFiles, ModelTensors};
use crate::run_data::SavedData;
use potluck_data::Tokenizer;
use potluck_data::tokenizer::TOKENIZER;
use potluck_graph::Graph;

/// Model from which a new run starts.
#[derive(Clone, Debug)]
pub enum StartingModel {
    /// One in Hugging Face's files.
    Files(ModelDirectory),
    /// That of a checkpoint, without its moments, at this path.
    Checkpoint { path: PathBuf, checkpoint: Arc<Checkpoint> },
}

impl StartingModel {
    pub fn path(&self) -> &Path {
        match self {
            Self::Files(directory) => directory.path(),
            Self::Checkpoint { path, .. } => path,
        }
    }

    /// Returns what a checkpoint knows of the data that the model was trained on; nothing is known
    /// of files.
    pub fn saved(&self) -> SavedData {
        match self {
            Self::Files(_) => SavedData::default(),
            Self::Checkpoint { checkpoint, .. } => SavedData::of(&checkpoint.meta),
        }
    }

    /// Reads the files that say how the model is used.
    ///
    /// # Errors
    /// Returns `TrainError` if one cannot be read.
    pub fn files(&self) -> Result<ModelFiles, TrainError> {
        Ok(match self {
            Self::Files(directory) => ModelFiles::of_model(directory.path())?,
            Self::Checkpoint { path, .. } => ModelFiles::of_run(path)?,
        })
    }

    /// Returns true if the model has this tokenizer, or both have none.
    ///
    /// # Errors
    /// Returns `TrainError` if that of the model cannot be read.
    pub(super) fn has_tokenizer(&self, tokenizer: Option<&Tokenizer>) -> Result<bool, TrainError> {
        let Self::Files(directory) = self else {
            return Ok(self.saved().tokenizer.as_ref() == tokenizer);
        };
        // By its hash: a file that cannot be parsed is no obstacle to a run with another tokenizer.
        let path = directory.path().join(TOKENIZER);
        let own = match fs::read(&path) {
            Ok(json) => Some(blake3::hash(&json).to_hex().to_string()),
            Err(why) if why.kind() == io::ErrorKind::NotFound => None,
            Err(why) => return Err(TrainError::Io { path, why }),
        };
        Ok(match tokenizer {
            Some(Tokenizer::File(file)) => own.as_deref() == Some(file.blake3()),
            Some(_) => false,
            None => own.is_none(),
        })
    }

    /// Finds the parameters of a graph.
    ///
    /// # Errors
    /// Returns `TrainError` for the first one that is missing or has another shape.
    pub(super) fn parameters(
        &self,
        graph: &Graph,
        family: &dyn ModelFamily,
    ) -> Result<StartingParameters, TrainError> {
        match self {
            Self::Files(directory) => {
                Ok(StartingParameters::Files(directory.tensors(graph, family)?))
            }
            Self::Checkpoint { checkpoint, .. } => {
                for parameter in &graph.parameters {
                    let wanted = parameter.slice.whole_dims();
                    NamedTensor::find(&checkpoint.parameters, &parameter.whole.name, wanted)?;
                }
                Ok(StartingParameters::Checkpoint(checkpoint.clone()))
            }
        }
    }
}

/// Parameters from which a run starts, which fit its model.
pub(super) enum StartingParameters {
    Files(ModelTensors),
    Checkpoint(Arc<Checkpoint>),
}

impl StartingParameters {
    /// Returns the parameters with the names that the model gives them.
    ///
    /// # Errors
    /// Returns `TrainError` if a file cannot be read, or has a value that is not finite.
    pub(super) fn read(self) -> Result<Vec<NamedTensor>, TrainError> {
        Ok(match self {
            Self::Files(tensors) => tensors.read()?,
            Self::Checkpoint(checkpoint) => checkpoint.parameters.clone(),
        })
    }
}
