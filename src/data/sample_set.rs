//! Data set of samples: features and targets, split, normalized, by index.

use rayon::prelude::*;

use super::class_counts;
use super::formats::Expected;
use super::normalization::Normalization;
use super::sampler::permuted;
use super::samples::{DataFile, Features, LoadedSamples, Samples, Targets};
use super::{
    DataDescription, DataError, Dataset, DatasetInput, NamedInputs, SampleDescription, Split,
    TargetNames,
};
use potluck_core::rng::Key;
use potluck_core::{DType, HostTensor, Setting, Site, Wording};

/// Site of the permutation that selects held-out samples. It does not depend on a run's seed, so
/// that runs with different seeds are evaluated on the same samples.
const HELD_OUT_SITE: Site = Site(u32::MAX - 1);

/// Options of the split and the normalization of samples.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOptions {
    /// Share of the samples that is held out if there are no files of held-out samples.
    pub held_out: f64,
    /// True to normalize by the mean and the standard deviation of the training split.
    pub normalize: bool,
    /// Normalization of the checkpoint from which a run continues.
    pub saved: Option<Normalization>,
}

/// Samples with a training split and a validation split, for the inputs `inputs` and `targets`.
pub struct SampleSet {
    train: Samples,
    /// Samples of the validation split, if they come from separate files.
    validation: Option<Samples>,
    /// Samples of `train` that are trained on; the others are held out.
    training: u64,
    pub description: SampleDescription,
    files: Vec<DataFile>,
}

impl SampleSet {
    /// Splits and normalizes samples. Held-out samples have the classes of the training samples
    /// with the same names.
    ///
    /// # Errors
    /// Returns `DataError` if a split has no sample, if a sample has no target, if there are not as
    /// many features, targets or names as samples, if a class has no name, if the held-out samples
    /// have another shape or other targets, or if a sample cannot be read.
    pub fn new(loaded: LoadedSamples, options: &SampleOptions) -> Result<Self, DataError> {
        let LoadedSamples { train, validation, files } = loaded;
        if !(0.0..1.0).contains(&options.held_out) {
            return Err(DataError::HeldOut { held_out: options.held_out });
        }
        train.check()?;
        if let Some(held_out) = &validation {
            held_out.check()?;
        }
        let mut validation = validation.filter(|samples| !samples.is_empty());
        let targets = target_names(&train)?;
        if let Some(held_out) = &mut validation {
            target_names(held_out)?;
            // A class that only held-out samples have could not be learned.
            Expected::of_training(&train).conform(held_out, false)?;
        }
        if let TargetNames::Classes(names) = &targets
            && let [only] = &names[..]
        {
            let why = format!("all samples have the class {only:?}; a model needs two to choose");
            return Err(DataError::Invalid {
                name: train.name,
                place: String::new(),
                why: why.into(),
            });
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

    fn samples(&self, split: Split) -> &Samples {
        match (split, &self.validation) {
            (Split::Validation, Some(samples)) => samples,
            _ => &self.train,
        }
    }

    /// Samples that contain a split, and the index of a sample of the split among them.
    fn place(&self, split: Split, index: u64) -> (&Samples, usize) {
        let index = match (split, &self.validation) {
            (Split::Train, _) => self.shuffled(index),
            (Split::Validation, Some(_)) => index as usize,
            (Split::Validation, None) => self.shuffled(self.training + index),
        };
        (self.samples(split), index)
    }

    /// Returns the index in `train` of a position in the order in which the last samples are held
    /// out.
    fn shuffled(&self, position: u64) -> usize {
        let count = self.train.len() as u64;
        if self.training == count { position as usize } else { held_out_order(count, position) }
    }

    /// Writes the normalized features of samples of a split, a row each. Rows that are read from
    /// files are read by all cores.
    fn read_rows(
        &self,
        split: Split,
        indices: &[u64],
        features: &mut [f32],
    ) -> Result<(), DataError> {
        let width = self.train.width().max(1);
        if indices.len() < 2 || !matches!(self.samples(split).features, Features::Lazy(_)) {
            for (index, row) in indices.iter().zip(features.chunks_mut(width)) {
                self.read_row(split, *index, row)?;
            }
            return Ok(());
        }
        let rows = indices.par_iter().zip(features.par_chunks_mut(width));
        // Collected, so that the first error in the order of the rows is returned.
        let results: Vec<Result<(), DataError>> =
            rows.map(|(index, row)| self.read_row(split, *index, row)).collect();
        results.into_iter().collect()
    }

    fn read_row(&self, split: Split, index: u64, row: &mut [f32]) -> Result<(), DataError> {
        let (samples, index) = self.place(split, index);
        samples.read(index, row)?;
        self.description.normalization.apply(row);
        Ok(())
    }

    /// Returns the name of a sample of a split, if the samples have names.
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
        let description = serde_json::to_vec(&self.description);
        hasher.update(&description.expect("a description is plain data"));
        hasher.update(&self.training.to_le_bytes());
        let held_out = self.validation.as_ref();
        for (role, samples) in [("\0train ", Some(&self.train)), ("\0held out ", held_out)] {
            hasher.update(role.as_bytes());
            if let Some(samples) = samples {
                hash_samples(samples, !self.files.is_empty(), &mut hasher);
            }
        }
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

    fn warnings(&self) -> Vec<String> {
        let TargetNames::Classes(names) = &self.description.targets else { return Vec::new() };
        let sets = [Some(&self.train), self.validation.as_ref()].into_iter().flatten();
        let classes = sets.flat_map(|samples| match &samples.targets {
            Targets::Classes { ids, .. } => &ids[..],
            _ => &[],
        });
        let column = self.description.target_columns.first();
        // Of the formats, tables and arrays may have either kind of targets.
        let may_be_values =
            column.is_some() || self.files.iter().any(|file| file.name.ends_with(".npy"));
        class_counts::warnings(names, classes, column, may_be_values)
    }

    fn note_on_values(&self) -> Option<String> {
        match &self.train.targets {
            Targets::Values { values, names } if names.len() == 1 => {
                class_counts::note_on_values(values, self.description.target_columns.first())
            }
            _ => None,
        }
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
        for index in indices {
            assert!(*index < self.len(split), "sample {index} is outside the split");
        }
        self.read_rows(split, indices, &mut features)?;
        for index in indices {
            let (samples, index) = self.place(split, *index);
            push_targets(samples, index, &self.description.normalization, &mut targets);
        }
        Ok(vec![("inputs", HostTensor::Float(features)), ("targets", targets)])
    }
}

/// Returns the sample at a position of the order whose first samples are trained on and whose last
/// are held out.
fn held_out_order(samples: u64, position: u64) -> usize {
    permuted(Key::new(0).site(HELD_OUT_SITE), samples, position) as usize
}

fn measured(samples: &Samples, training: u64) -> Result<Normalization, DataError> {
    let all = samples.len() as u64;
    let indices: Vec<usize> = if training == all {
        (0..all as usize).collect()
    } else {
        (0..training).map(|position| held_out_order(all, position)).collect()
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
            for (at, value) in row.iter().enumerate() {
                into.push(match normalization.targets.get(at) {
                    Some(scale) => scale.normalize(*value),
                    None => *value,
                });
            }
        }
        // `SampleSet::new` has compared the kinds of all samples.
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
                why: Wording::new(format_args!(
                    "has no targets to train on; name the column with {}, or put the file of \
                     labels beside it",
                    Setting::Target
                )),
            });
        }
    })
}

/// Hashes samples: their shape, targets and names, and their features, but for lazy ones whose
/// files are hashed separately (`has_files`). A sample that cannot be read is hashed by its error,
/// which a run reports.
fn hash_samples(samples: &Samples, has_files: bool, hasher: &mut blake3::Hasher) {
    let count = samples.len() as u64;
    hasher.update(format!("{count} of {:?}\0", samples.shape).as_bytes());
    match &samples.features {
        Features::Bytes(bytes) => {
            hasher.update(bytes);
        }
        Features::Floats(values) => {
            hasher.update(bytemuck::cast_slice(values));
        }
        Features::Lazy(_) if has_files => {}
        Features::Lazy(lazy) => {
            let mut row = vec![0.0; samples.width()];
            for index in 0..lazy.len() {
                match lazy.read(index, &mut row) {
                    Ok(()) => hasher.update(bytemuck::cast_slice(&row)),
                    Err(why) => hasher.update(why.to_string().as_bytes()),
                };
            }
        }
    }
    match &samples.targets {
        Targets::Classes { ids, .. } => {
            hasher.update(bytemuck::cast_slice(ids));
        }
        Targets::Values { values, .. } => {
            hasher.update(bytemuck::cast_slice(values));
        }
        Targets::Absent => {}
    }
    for id in samples.ids.iter().flatten() {
        hasher.update(format!("{id}\0").as_bytes());
    }
}

#[cfg(test)]
mod tests;
