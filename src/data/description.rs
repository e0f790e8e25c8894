//! Descriptions of data other than text, which checkpoints keep.

use super::Normalization;

/// Targets of samples.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TargetNames {
    /// One of these classes.
    Classes(Vec<String>),
    /// A value for each of these names.
    Values(Vec<String>),
}

/// Description of the samples that a model is trained on, which a checkpoint keeps.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SampleDescription {
    /// Shape of the features of a sample.
    pub shape: Vec<usize>,
    /// Names of the columns of a table; empty for other samples.
    pub columns: Vec<String>,
    /// Names of the columns of a table that are targets; empty for other samples.
    #[serde(default)]
    pub target_columns: Vec<String>,
    pub targets: TargetNames,
    pub normalization: Normalization,
}

impl SampleDescription {
    /// Returns the number of values of a sample's features, the inputs of a model.
    pub fn inputs(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of outputs of a model: one per class, or one per value.
    pub fn outputs(&self) -> usize {
        match &self.targets {
            TargetNames::Classes(names) | TargetNames::Values(names) => names.len(),
        }
    }
}

/// Description of data other than text, which a checkpoint keeps.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataDescription {
    /// Token ids, from 0 to below the size of the vocabulary.
    Tokens {
        vocabulary: usize,
    },
    Samples(SampleDescription),
}
