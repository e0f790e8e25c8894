//! Data sets: samples by index. Each sample is a row of one or more named inputs of a model.

use std::sync::Arc;

use super::tokens::NO_TARGET;
use super::{DataDescription, DataError, DataFile, Split, TextData};
use potluck_core::{DType, HostTensor};

/// Input of a model that a data set provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatasetInput {
    pub name: &'static str,
    pub dtype: DType,
    /// Values of one sample.
    pub elements: usize,
}

/// Values of some samples for each input that a data set provides, by name: rows in the order of
/// the samples.
pub type NamedInputs = Vec<(&'static str, HostTensor)>;

/// Samples by index. A data set does not change while it is used, so a sample has the same values
/// every time.
pub trait Dataset: Send + Sync {
    /// Returns the inputs, in the order of [`Dataset::rows`].
    fn inputs(&self) -> Vec<DatasetInput>;

    /// Returns the number of samples of a split that training draws from; samples are
    /// `0..len(split)`.
    fn len(&self, split: Split) -> u64;

    /// Returns true if a split has no sample.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }

    /// Returns the samples of a split for evaluations, which do not overlap.
    fn evaluation_samples(&self, split: Split) -> Vec<u64>;

    /// Returns the distance from a sample to the one that continues it, for data that are a
    /// sequence; `None` for other data. Samples of an evaluation must be at this distance from each
    /// other, so that states can be carried from each to the next.
    fn next_distance(&self) -> Option<u64> {
        None
    }

    /// Returns a hash of all samples, of their preparation and of the boundary of the splits, which
    /// a resumed run compares with the saved one.
    fn fingerprint(&self) -> String;

    /// Returns the description that a checkpoint keeps so that other samples can be prepared in the
    /// same way; `None` for texts.
    fn description(&self) -> Option<DataDescription> {
        None
    }

    /// Returns the files that the data set was read from, in the order of their names.
    fn files(&self) -> Vec<DataFile> {
        Vec::new()
    }

    /// Returns warnings to the user who trains on the data, a sentence each.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns a note for a user who did not choose between values and classes, if the target
    /// values look like the numbers of classes.
    fn note_on_values(&self) -> Option<String> {
        None
    }

    /// Returns the values of the samples `indices` of a split, a row each.
    ///
    /// # Errors
    /// Returns `DataError` if a sample that is only read now cannot be read.
    ///
    /// # Panics
    /// If an index is not below [`Dataset::len`].
    fn rows(&self, split: Split, indices: &[u64]) -> Result<NamedInputs, DataError>;

    fn row_bytes(&self) -> usize {
        self.inputs().iter().map(|input| input.elements * input.dtype.bytes()).sum()
    }
}

/// Windows of a text: a sample is the `context` tokens from its index on, for the input `tokens`,
/// with the token that follows each of them, for the input `targets`.
#[derive(Clone, Debug)]
pub struct TextWindows {
    pub text: Arc<TextData>,
    /// Tokens of a sample.
    pub context: usize,
}

impl Dataset for TextWindows {
    fn inputs(&self) -> Vec<DatasetInput> {
        ["tokens", "targets"]
            .map(|name| DatasetInput { name, dtype: DType::U32, elements: self.context })
            .to_vec()
    }

    fn len(&self, split: Split) -> u64 {
        self.text.window_count(split, self.context)
    }

    fn evaluation_samples(&self, split: Split) -> Vec<u64> {
        self.text.evaluation_windows(split, self.context)
    }

    fn next_distance(&self) -> Option<u64> {
        Some(self.context as u64)
    }

    fn fingerprint(&self) -> String {
        self.text.fingerprint()
    }

    fn files(&self) -> Vec<DataFile> {
        self.text.file().cloned().into_iter().collect()
    }

    fn rows(&self, split: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        let count = indices.len() * self.context;
        let mut tokens = Vec::with_capacity(count);
        let mut targets = Vec::with_capacity(count);
        for start in indices {
            let (window, next) = self.text.sample(split, *start, self.context);
            tokens.extend_from_slice(window);
            targets.extend_from_slice(next);
        }
        Ok(vec![("tokens", HostTensor::Int(tokens)), ("targets", HostTensor::Int(targets))])
    }
}

/// Windows of tokens at a distance of `stride`, which is shorter than a window: each counts only
/// the targets that previous windows have not counted, so that these have more context than in
/// adjacent windows. The last window ends with the data.
#[derive(Clone)]
pub struct StridedWindows {
    windows: Arc<dyn Dataset>,
    stride: u64,
}

impl StridedWindows {
    /// Creates strided windows of `windows`, whose samples are runs of tokens by their first token.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` if the samples are not runs of tokens, or if the stride is not
    /// from 1 to the length of a window.
    pub fn new(windows: Arc<dyn Dataset>, stride: u64) -> Result<Self, DataError> {
        let Some(length) = windows.next_distance() else {
            return Err(DataError::of_file("stride", "is of texts and token ids only"));
        };
        if !(1..=length).contains(&stride) {
            let why = format!("is from 1 to the {length} tokens of a sample, not {stride}");
            return Err(DataError::of_file("stride", why));
        }
        Ok(Self { windows, stride })
    }

    /// Number of counted targets of a window, which are its last.
    fn counted(&self, start: u64, length: usize) -> usize {
        let before = match start.checked_sub(1) {
            None => return length,
            Some(last) => last / self.stride * self.stride,
        };
        (start - before) as usize
    }
}

impl Dataset for StridedWindows {
    fn inputs(&self) -> Vec<DatasetInput> {
        self.windows.inputs()
    }

    fn len(&self, split: Split) -> u64 {
        self.windows.len(split)
    }

    fn evaluation_samples(&self, split: Split) -> Vec<u64> {
        let mut starts: Vec<u64> = (0..self.len(split)).step_by(self.stride as usize).collect();
        if let Some(last) = self.len(split).checked_sub(1)
            && !last.is_multiple_of(self.stride)
        {
            starts.push(last);
        }
        starts
    }

    fn fingerprint(&self) -> String {
        self.windows.fingerprint()
    }

    fn description(&self) -> Option<DataDescription> {
        self.windows.description()
    }

    fn files(&self) -> Vec<DataFile> {
        self.windows.files()
    }

    fn rows(&self, split: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        let mut rows = self.windows.rows(split, indices)?;
        for (name, values) in &mut rows {
            let HostTensor::Int(targets) = values else { continue };
            if *name != "targets" || indices.is_empty() {
                continue;
            }
            let length = targets.len() / indices.len();
            for (start, targets) in indices.iter().zip(targets.chunks_exact_mut(length)) {
                let counted = self.counted(*start, length);
                targets[..length - counted].fill(NO_TARGET);
            }
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerKind;

    #[test]
    fn strided_windows_count_every_target_once() {
        let text = TextData::from_bytes("digits", b"0123456789", TokenizerKind::Char, 0.0, 4);
        let windows: Arc<dyn Dataset> =
            Arc::new(TextWindows { text: Arc::new(text.unwrap()), context: 4 });
        for stride in 1..=4 {
            let strided = StridedWindows::new(windows.clone(), stride).unwrap();
            let samples = strided.evaluation_samples(Split::Train);
            assert_eq!((samples[0], samples.last()), (0, Some(&5)));
            let rows = strided.rows(Split::Train, &samples).unwrap();
            let (_, HostTensor::Int(targets)) = &rows[1] else { panic!("targets are integers") };
            let mut counted: Vec<u32> = targets.clone();
            counted.retain(|target| *target != NO_TARGET);
            assert_eq!(counted, (1..10).collect::<Vec<u32>>(), "{stride}");
            // Each but the first window's has at least the tokens of a window less its stride.
            let all = windows.rows(Split::Train, &samples).unwrap();
            assert_eq!(rows[0], all[0]);
        }
        for stride in [0, 5] {
            let error = StridedWindows::new(windows.clone(), stride).err().unwrap().to_string();
            assert!(error.contains("from 1 to the 4 tokens"), "{error}");
        }
    }

    #[test]
    fn windows_are_rows_of_tokens_and_of_those_that_follow() {
        let text = TextData::from_bytes("digits", b"0123456789", TokenizerKind::Char, 0.3, 2);
        let windows = TextWindows { text: Arc::new(text.unwrap()), context: 2 };
        assert_eq!([Split::Train, Split::Validation].map(|split| windows.len(split)), [5, 1]);
        assert!(!windows.is_empty(Split::Validation));
        assert_eq!(windows.evaluation_samples(Split::Train), [0, 2, 4]);
        let rows = windows.rows(Split::Train, &[4, 0]).unwrap();
        let expected = [("tokens", vec![4, 5, 0, 1]), ("targets", vec![5, 6, 1, 2])];
        assert_eq!(rows, expected.map(|(name, values)| (name, HostTensor::Int(values))));
        let inputs = windows.inputs();
        let names = inputs.iter().map(|input| (input.name, input.elements));
        assert!(names.eq([("tokens", 2), ("targets", 2)]));
        assert_eq!(windows.row_bytes(), 16);
        assert_eq!(windows.fingerprint(), windows.text.fingerprint());
    }
}
