//! Demands on samples that a model can take: the shape, and the classes by name.

use std::collections::HashMap;

use super::files::{invalid, listed};
use super::{DataError, KnownSamples, Samples, TargetKind, Targets};
use potluck_core::format::dims_text;

/// Demands on samples.
#[derive(Debug)]
pub(crate) struct Expected {
    /// Name of whoever expects it, for messages.
    pub whose: &'static str,
    /// Empty if any will do.
    pub shape: Vec<usize>,
    /// Columns of features, in their order; empty if any will do.
    pub columns: Vec<String>,
    /// Columns of a table that are targets, in their order; empty if any will do.
    pub target_columns: Vec<String>,
    pub kind: TargetKind,
    /// Names of the classes, or of the values; empty for values of any name.
    pub names: Vec<String>,
}

impl Expected {
    /// Returns what a trained model expects.
    pub fn of_model(known: &KnownSamples) -> Self {
        let is_values = known.classes.is_empty();
        Self {
            whose: "the model",
            shape: known.shape.clone(),
            columns: known.columns.clone(),
            target_columns: known.target_columns.clone(),
            kind: if is_values { TargetKind::Values } else { TargetKind::Classes },
            names: known.classes.clone(),
        }
    }

    /// Returns what held-out samples must be like beside training samples.
    pub(crate) fn of_training(train: &Samples) -> Self {
        let (kind, names) = match &train.targets {
            Targets::Classes { names, .. } => (TargetKind::Classes, names.clone()),
            Targets::Values { names, .. } => (TargetKind::Values, names.clone()),
            Targets::Absent => (TargetKind::Values, Vec::new()),
        };
        Self {
            whose: "the training samples",
            shape: train.shape.clone(),
            columns: train.columns.clone(),
            target_columns: train.target_columns.clone(),
            kind,
            names,
        }
    }

    /// Checks samples, and gives their classes the indices and names that are expected. Numbered
    /// classes keep their numbers.
    ///
    /// # Errors
    /// Returns `DataError` if the shape, the columns or the kind of the targets, or a class is
    /// another one.
    pub(crate) fn conform(
        &self,
        samples: &mut Samples,
        is_numbered: bool,
    ) -> Result<(), DataError> {
        let Self { whose, shape, kind, names, .. } = self;
        let name = &samples.name;
        if !shape.is_empty() && samples.shape != *shape {
            let [found, expected] = [&samples.shape, shape].map(|shape| dims_text(shape));
            let why = format!("its samples are {found}, and those of {whose} are {expected}");
            return Err(invalid(name, "", why));
        }
        let [found, expected] = [&samples.target_columns, &self.target_columns];
        if !found.is_empty() && !expected.is_empty() && found != expected {
            let [found, expected] = [listed(found), listed(expected)];
            let why = format!("its target is {found}, and that of {whose} is {expected}");
            return Err(invalid(name, "", why));
        }
        match (&mut samples.targets, kind) {
            (Targets::Absent, _) => Ok(()),
            (Targets::Classes { ids, names: found }, TargetKind::Classes) => {
                self.rename(name, ids, found, is_numbered)
            }
            (Targets::Values { names: found, .. }, TargetKind::Values) => {
                if names.is_empty() || found.len() == names.len() {
                    return Ok(());
                }
                let (found, expected) = (found.len(), names.len());
                let why = format!("has {found} values per sample, and {whose} {expected}");
                Err(invalid(name, "", why))
            }
            (Targets::Classes { .. }, TargetKind::Values) => {
                let why = format!("its targets are classes, and those of {whose} are values");
                Err(invalid(name, "", why))
            }
            (Targets::Values { .. }, TargetKind::Classes) => {
                let why = format!("its targets are values, and those of {whose} are classes");
                Err(invalid(name, "", why))
            }
        }
    }

    /// Gives classes the expected indices and names.
    fn rename(
        &self,
        name: &str,
        ids: &mut [u32],
        found: &mut Vec<String>,
        is_numbered: bool,
    ) -> Result<(), DataError> {
        let known = |index: usize| (index < self.names.len()).then_some(index as u32);
        let by_name: HashMap<&String, u32> = self.names.iter().zip(0..).collect();
        let new: Vec<Option<u32>> = if is_numbered {
            (0..found.len()).map(known).collect()
        } else {
            found.iter().map(|name| by_name.get(name).copied()).collect()
        };
        for (index, id) in ids.iter_mut().enumerate() {
            *id = new[*id as usize].ok_or_else(|| {
                let (class, whose) = (&found[*id as usize], self.whose);
                let names = listed(&self.names);
                let why = format!("its class {class:?} is none of those of {whose}: {names}");
                invalid(name, format!("sample at index {index}"), why)
            })?;
        }
        found.clone_from(&self.names);
        Ok(())
    }
}
