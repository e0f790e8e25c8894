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

/// Least height and width of samples of three sizes that count as pictures with channels last.
const PICTURE_SIDE_MIN: usize = 8;
/// Most times as high as wide, or as wide as high, of those with one or two channels: a series of
/// many steps may also have a last size of 1.
const PICTURE_ASPECT_MAX: usize = 2;

/// Returns true if samples of this shape look like pictures whose channels come last, which are not
/// read as pictures.
pub fn has_channels_last(shape: &[usize]) -> bool {
    let [height, width, channels] = *shape else { return false };
    let (least, most) = (height.min(width), height.max(width));
    match channels {
        1 | 2 => least >= PICTURE_SIDE_MIN && most <= PICTURE_ASPECT_MAX * least,
        3 | 4 => least >= PICTURE_SIDE_MIN,
        _ => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_with_channels_last_are_told_from_series_and_from_channels_first() {
        for shape in [[28, 28, 1], [32, 24, 2], [32, 400, 3], [8, 8, 4]] {
            assert!(has_channels_last(&shape), "{shape:?}");
        }
        for shape in [[1, 28, 28], [3, 8, 8], [64, 1000, 1], [16, 64, 1], [4, 28, 1], [8, 8, 5]] {
            assert!(!has_channels_last(&shape), "{shape:?}");
        }
        assert!(!has_channels_last(&[28, 28]) && !has_channels_last(&[28, 28, 1, 1]));
    }
}
