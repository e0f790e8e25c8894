//! Data set of samples: features and targets, split, normalized, by index.

use super::normalization::Normalization;
use super::sampler::permuted;
use super::samples::{DataFile, LoadedSamples, Samples, Targets};
use super::{DataError, Dataset, DatasetInput, NamedInputs, Split};
use crate::base::rng::Key;
use crate::base::{DType, HostTensor, Site};

/// Site of the permutation that holds samples out. It does not depend on a run's seed, so that runs
/// with other seeds are evaluated on the same samples.
const HELD_OUT_SITE: Site = Site(u32::MAX - 1);

/// Targets that a model of samples has.
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
    /// Names of the columns of a table; empty for others.
    pub columns: Vec<String>,
    /// Names of the columns of a table that are targets; empty for others.
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

/// Description of data that are no text, which a checkpoint keeps.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataDescription {
    /// Token ids, from 0 to below the size of the vocabulary.
    Tokens {
        vocabulary: usize,
    },
    Samples(SampleDescription),
}

/// How samples are split and normalized.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOptions {
    /// Share of the samples that is held out if no files of their own are.
    pub held_out: f64,
    /// True to normalize by the mean and the standard deviation of the training split.
    pub normalize: bool,
    /// Normalization of the checkpoint that a run goes on from.
    pub saved: Option<Normalization>,
}

/// Samples with a training split and a validation split, for the inputs `inputs` and `targets`.
pub struct SampleSet {
    train: Samples,
    /// Samples of the validation split, if they come from files of their own.
    validation: Option<Samples>,
    /// Samples of `train` that are trained on; the others are held out.
    training: u64,
    pub description: SampleDescription,
    files: Vec<DataFile>,
}

impl SampleSet {
    /// Splits and normalizes samples.
    ///
    /// # Errors
    /// Returns `DataError` if a split has no sample, if a sample has no target, if the held-out
    /// samples have another shape or other targets, or if a sample cannot be read.
    pub fn new(loaded: LoadedSamples, options: &SampleOptions) -> Result<Self, DataError> {
        let LoadedSamples { train, validation, files } = loaded;
        if !(0.0..1.0).contains(&options.held_out) {
            return Err(DataError::HeldOut { held_out: options.held_out });
        }
        let validation = validation.filter(|samples| !samples.is_empty());
        let targets = target_names(&train)?;
        if let Some(held_out) = &validation {
            check_equal(&train, held_out)?;
        }
        let all = train.len() as u64;
        let held_out = match validation {
            Some(_) => 0,
            None => (options.held_out * all as f64) as u64,
        };
        let empty = |split| DataError::Few { name: train.name.clone(), split, samples: all };
        if all == held_out {
            return Err(empty(Split::Train));
        }
        if held_out == 0 && options.held_out > 0.0 && validation.is_none() {
            return Err(empty(Split::Validation));
        }
        let training = all - held_out;
        let normalization = match (&options.saved, options.normalize) {
            (Some(saved), _) => saved.clone(),
            (None, true) => measured(&train, training)?,
            (None, false) => Normalization::default(),
        };
        let description = SampleDescription {
            shape: train.shape.clone(),
            columns: train.columns.clone(),
            target_columns: train.target_columns.clone(),
            targets,
            normalization,
        };
        Ok(Self { train, validation, training, description, files })
    }

    /// Returns the samples of a split, and the index among them of one of the split.
    fn place(&self, split: Split, index: u64) -> (&Samples, usize) {
        let shuffled = |position: u64| match self.training == self.train.len() as u64 {
            true => position as usize,
            false => held_out_order(self.train.len() as u64, position),
        };
        match (split, &self.validation) {
            (Split::Train, _) => (&self.train, shuffled(index)),
            (Split::Validation, Some(samples)) => (samples, index as usize),
            (Split::Validation, None) => (&self.train, shuffled(self.training + index)),
        }
    }

    /// Returns the names of the samples of a split, if they have names.
    pub fn id(&self, split: Split, index: u64) -> Option<&str> {
        let (samples, index) = self.place(split, index);
        samples.ids.as_ref().map(|ids| &*ids[index])
    }
}

impl Dataset for SampleSet {
    fn inputs(&self) -> Vec<DatasetInput> {
        let elements = self.train.width();
        let features = DatasetInput { name: "inputs", dtype: DType::F32, elements };
        let (dtype, elements) = match &self.description.targets {
            TargetNames::Classes(_) => (DType::U32, 1),
            TargetNames::Values(names) => (DType::F32, names.len()),
        };
        vec![features, DatasetInput { name: "targets", dtype, elements }]
    }

    fn len(&self, split: Split) -> u64 {
        match (split, &self.validation) {
            (Split::Train, _) => self.training,
            (Split::Validation, Some(samples)) => samples.len() as u64,
            (Split::Validation, None) => self.train.len() as u64 - self.training,
        }
    }

    fn evaluation_samples(&self, split: Split) -> Vec<u64> {
        (0..self.len(split)).collect()
    }

    fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.training.to_le_bytes());
        for file in &self.files {
            hasher.update(file.name.as_bytes());
            hasher.update(&[0]);
            hasher.update(file.blake3.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    fn description(&self) -> Option<DataDescription> {
        Some(DataDescription::Samples(self.description.clone()))
    }

    fn files(&self) -> Vec<DataFile> {
        self.files.clone()
    }

    fn rows(&self, split: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        let width = self.train.width();
        let mut features = vec![0.0; indices.len() * width];
        let mut targets = match &self.description.targets {
            TargetNames::Classes(_) => HostTensor::Int(Vec::with_capacity(indices.len())),
            TargetNames::Values(names) => {
                HostTensor::Float(Vec::with_capacity(indices.len() * names.len()))
            }
        };
        for (index, row) in indices.iter().zip(features.chunks_mut(width.max(1))) {
            assert!(*index < self.len(split), "sample {index} is outside the split");
            let (samples, index) = self.place(split, *index);
            samples.read(index, row)?;
            self.description.normalization.apply(row);
            push_targets(samples, index, &self.description.normalization, &mut targets);
        }
        Ok(vec![("inputs", HostTensor::Float(features)), ("targets", targets)])
    }
}

/// Returns the sample at a position of the order in which the first are trained on and the others
/// held out.
fn held_out_order(samples: u64, position: u64) -> usize {
    permuted(Key::new(0).site(HELD_OUT_SITE), samples, position) as usize
}

fn measured(samples: &Samples, training: u64) -> Result<Normalization, DataError> {
    let all = samples.len() as u64;
    let indices: Vec<usize> = match training == all {
        true => (0..all as usize).collect(),
        false => (0..training).map(|position| held_out_order(all, position)).collect(),
    };
    let targets = match &samples.targets {
        Targets::Values { values, names } => {
            Normalization::of_targets(values, names.len(), &indices)
        }
        _ => Vec::new(),
    };
    Ok(Normalization { features: Normalization::of_features(samples, &indices)?, targets })
}

/// Appends the targets of a sample, normalized if they are values.
fn push_targets(
    samples: &Samples,
    index: usize,
    normalization: &Normalization,
    into: &mut HostTensor,
) {
    match (&samples.targets, into) {
        (Targets::Classes { ids, .. }, HostTensor::Int(into)) => into.push(ids[index]),
        (Targets::Values { values, names }, HostTensor::Float(into)) => {
            let row = &values[index * names.len()..(index + 1) * names.len()];
            let scales = normalization.targets.iter().map(Some).chain(std::iter::repeat(None));
            let scaled = |(value, scale): (&f32, Option<&super::MeanStd>)| match scale {
                Some(scale) => scale.normalize(*value),
                None => *value,
            };
            into.extend(row.iter().zip(scales).map(scaled));
        }
        // The kinds of all samples were compared when the set was made.
        _ => unreachable!("targets of another kind"),
    }
}

fn target_names(samples: &Samples) -> Result<TargetNames, DataError> {
    Ok(match &samples.targets {
        Targets::Classes { names, .. } => TargetNames::Classes(names.clone()),
        Targets::Values { names, .. } => TargetNames::Values(names.clone()),
        Targets::Absent => {
            return Err(DataError::Invalid {
                name: samples.name.clone(),
                place: String::new(),
                why: "has no targets to train on; name the column with data.target, or put the \
                      file of labels beside it"
                    .into(),
            });
        }
    })
}

/// Checks that held-out samples are like those for training. A class that only they have is
/// refused: nothing could learn it.
fn check_equal(train: &Samples, held_out: &Samples) -> Result<(), DataError> {
    let invalid = |why: String| {
        Err(DataError::Invalid { name: held_out.name.clone(), place: String::new(), why })
    };
    if train.shape != held_out.shape {
        return invalid(format!(
            "its samples have the shape {:?}, and those of {} have {:?}",
            held_out.shape, train.name, train.shape
        ));
    }
    match (&train.targets, &held_out.targets) {
        (Targets::Classes { names: known, .. }, Targets::Classes { names, .. }) => {
            match names.iter().find(|name| !known.contains(name)) {
                Some(name) => {
                    invalid(format!("it has the class {name}, which {} does not have", train.name))
                }
                // Indices of classes are compared by their names.
                None if !known.starts_with(names) => invalid(format!(
                    "its classes are {names:?}, and those of {} are {known:?}",
                    train.name
                )),
                None => Ok(()),
            }
        }
        (Targets::Values { names: known, .. }, Targets::Values { names, .. })
            if known.len() == names.len() =>
        {
            Ok(())
        }
        _ => invalid(format!("its targets are of another kind than those of {}", train.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Features, MeanStd};

    fn samples(count: usize) -> Samples {
        Samples {
            name: "test".into(),
            shape: vec![1],
            columns: Vec::new(),
            target_columns: Vec::new(),
            features: Features::Floats((0..count).map(|i| i as f32).collect()),
            targets: Targets::Values {
                values: (0..count).map(|i| 10.0 * i as f32).collect(),
                names: vec!["y".into()],
            },
            ids: None,
        }
    }

    fn options(held_out: f64, normalize: bool) -> SampleOptions {
        SampleOptions { held_out, normalize, saved: None }
    }

    fn set(count: usize, validation: Option<usize>, options: &SampleOptions) -> SampleSet {
        let validation = validation.map(samples);
        let loaded = LoadedSamples { train: samples(count), validation, files: Vec::new() };
        SampleSet::new(loaded, options).unwrap()
    }

    fn features(set: &SampleSet, split: Split) -> Vec<f32> {
        let all = set.evaluation_samples(split);
        match &set.rows(split, &all).unwrap()[0].1 {
            HostTensor::Float(values) => values.clone(),
            HostTensor::Int(_) => panic!("features are floats"),
        }
    }

    #[test]
    fn held_out_samples_are_spread_over_all_and_never_trained_on() {
        let set = set(100, None, &options(0.2, false));
        let (train, held_out) = (features(&set, Split::Train), features(&set, Split::Validation));
        assert_eq!((train.len(), held_out.len()), (80, 20));
        let mut all: Vec<f32> = [train, held_out.clone()].concat();
        all.sort_by(f32::total_cmp);
        assert!(all.into_iter().eq((0..100).map(|i| i as f32)));
        let low = held_out.iter().filter(|value| **value < 50.0).count();
        assert!((5..=15).contains(&low), "{held_out:?}");
    }

    #[test]
    fn files_of_their_own_hold_out_and_nothing_else() {
        let set = set(10, Some(3), &options(0.5, false));
        assert_eq!(features(&set, Split::Train).len(), 10);
        assert_eq!(features(&set, Split::Validation), [0.0, 1.0, 2.0]);
    }

    #[test]
    fn the_training_split_alone_is_normalized_to_mean_0_and_deviation_1() {
        let set = set(100, None, &options(0.3, true));
        let values = features(&set, Split::Train);
        let mean = values.iter().sum::<f32>() / 70.0;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 70.0;
        assert!(mean.abs() < 1e-5 && (variance - 1.0).abs() < 1e-5, "{mean} {variance}");
        let saved = set.description.normalization.clone();
        assert!((saved.targets[0].mean / saved.features[0].mean - 10.0).abs() < 1e-4);
        let other = SampleOptions { saved: Some(saved.clone()), ..options(0.3, false) };
        let again = super::tests::set(50, None, &other);
        assert_eq!(again.description.normalization, saved);
        assert_ne!(saved.features[0], MeanStd::IDENTITY);
    }

    #[test]
    fn samples_that_do_not_fit_are_refused() {
        let refused = |train: Samples, validation: Option<Samples>, held_out: f64| {
            let loaded = LoadedSamples { train, validation, files: Vec::new() };
            SampleSet::new(loaded, &options(held_out, false)).err().unwrap().to_string()
        };
        let few = refused(samples(3), None, 0.1);
        assert!(few.contains("held-out part has no sample"), "{few}");
        let absent = refused(Samples { targets: Targets::Absent, ..samples(3) }, None, 0.0);
        assert!(absent.contains("no targets"), "{absent}");
        let wide = Samples { shape: vec![2], ..samples(4) };
        let other = refused(samples(3), Some(wide), 0.0);
        assert!(other.contains("have the shape [2]"), "{other}");
        let classes = |names: &[&str]| Samples {
            targets: Targets::Classes {
                ids: vec![0; 4],
                names: names.iter().map(|name| name.to_string()).collect(),
            },
            ..samples(4)
        };
        let class = refused(classes(&["a", "b"]), Some(classes(&["a", "c"])), 0.0);
        assert!(class.contains("the class c"), "{class}");
        let kind = refused(classes(&["a", "b"]), Some(samples(4)), 0.0);
        assert!(kind.contains("of another kind"), "{kind}");
    }
}
