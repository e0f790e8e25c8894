//! Sizes of data, which determine the inputs and outputs of a model.

use super::FamilyError;
use potluck_data::{DataDescription, TargetNames, has_channels_last};
use potluck_graph::model::{MlpLoss, PictureSizes};

/// Sizes of the data, which determine the inputs and outputs of a model.
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
    pub(crate) fn of(description: &DataDescription) -> Self {
        match description {
            DataDescription::Tokens { vocabulary } => Self::Tokens { vocabulary: *vocabulary },
            DataDescription::Samples(samples) => Self::Samples {
                shape: samples.shape.clone(),
                outputs: samples.outputs(),
                has_classes: matches!(samples.targets, TargetNames::Classes(_)),
            },
        }
    }

    /// Vocabulary of the data of a token model. `model` names it for messages: "a gpt".
    ///
    /// # Errors
    /// Returns `FamilyError::Unfit` for samples.
    pub(super) fn vocabulary(&self, model: &str) -> Result<usize, FamilyError> {
        let Self::Tokens { vocabulary } = *self else {
            let other = "set model.kind = \"mlp\" for samples";
            let why = format!("{model} is trained on texts or tokens; {other}");
            return Err(FamilyError::Unfit(why));
        };
        Ok(vocabulary)
    }

    /// Picture sizes of the data of a model. `model` names it for messages: "a cnn".
    ///
    /// # Errors
    /// Returns `FamilyError::Unfit` for texts, tokens and samples that are not pictures.
    pub(super) fn pictures(&self, model: &str) -> Result<PictureSizes, FamilyError> {
        let Self::Samples { shape, outputs, has_classes } = self else {
            let other = "set model.kind = \"gpt\" for texts and tokens";
            let why = format!("{model} is trained on pictures; {other}");
            return Err(FamilyError::Unfit(why));
        };
        let picture = match shape[..] {
            _ if has_channels_last(shape) => {
                return Err(FamilyError::Unfit(format!(
                    "{model} is trained on pictures of channels, height and width, and those of \
                     {shape:?} have their channels last; save them as by \
                     numpy.transpose(pictures, (0, 3, 1, 2))"
                )));
            }
            [channels, height, width] => [channels, height, width],
            [height, width] => [1, height, width],
            _ => {
                return Err(FamilyError::Unfit(format!(
                    "{model} is trained on pictures of channels, height and width, not on samples \
                     of {shape:?}; set model.kind = \"mlp\""
                )));
            }
        };
        Ok(PictureSizes { picture, outputs: *outputs, loss: loss_of(*has_classes) })
    }
}

pub(super) fn loss_of(has_classes: bool) -> MlpLoss {
    if has_classes { MlpLoss::CrossEntropy } else { MlpLoss::SquaredError }
}
