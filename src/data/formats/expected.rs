//! Demands of a model on its samples: the shape, and the classes by name.

use std::collections::HashMap;

use super::files::{invalid, listed};
use super::{DataError, KnownSamples, Samples, TargetKind, Targets};
use potluck_core::format::dims_text;

/// Demands on samples.
#[derive(Debug)]
pub(crate) struct Expected {
    /// Origin of the demands, for messages.
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
    /// Returns the demands of a trained model.
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

    /// Demands of training samples on held-out samples.
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

    /// Checks samples, and changes the indices and names of their classes to the expected ones.
    /// Numbered classes keep their numbers.
    ///
    /// # Errors
    /// Returns `DataError` if the shape, the columns or the kind of the targets, or a class is not
    /// the expected one.
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
                let found = found.len();
                let expected = names.len();
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

    /// Changes the indices and names of classes to the expected ones.
    fn rename(
        &self,
        name: &str,
        ids: &mut [u32],
        found: &mut Vec<String>,
        is_numbered: bool,
    ) -> Result<(), DataError> {
        let by_name: HashMap<&String, u32> = self.names.iter().zip(0..).collect();
        let mut new = Vec::with_capacity(found.len());
        for (index, class) in found.iter().enumerate() {
            new.push(if !is_numbered {
                by_name.get(class).copied()
            } else if index < self.names.len() {
                Some(index as u32)
            } else {
                None
            });
        }
        for (index, id) in ids.iter_mut().enumerate() {
            let Some(known) = new[*id as usize] else {
                let class = &found[*id as usize];
                let whose = self.whose;
                let names = listed(&self.names);
                let why = format!("its class {class:?} is none of those of {whose}: {names}");
                return Err(invalid(name, format!("sample at index {index}"), why));
            };
            *id = known;
        }
        found.clone_from(&self.names);
        Ok(())
    }
}
