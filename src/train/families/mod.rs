//! Families of models: a file each, with the keys of the family, their defaults, and the graph that
//! they mean; and the registry of them. [`ModelFamily`] says how another one is added.

mod cnn;
mod data_shape;
mod gpt;
mod language;
mod llama;
mod mlp;
mod resnet;
mod rnn;
mod section;

use std::fmt;

pub use data_shape::DataShape;
pub use section::ModelSection;
pub(crate) use section::{KIND, PRESET, PRESET_CONTEXT, keys_of_all};

use crate::keys::{ConstraintError, Section, Value, config_enum, refused};
use potluck_graph::model::names::FileName;
use potluck_graph::{Graph, RotaryAngles, ShapeError, Unary};

/// Families of models, in the order of the help listing.
pub const FAMILIES: &[Family] =
    &[gpt::FAMILY, llama::FAMILY, rnn::FAMILY, mlp::FAMILY, cnn::FAMILY, resnet::FAMILY];
/// Family of a configuration that says nothing of its model and its data.
const DEFAULT: Family = gpt::FAMILY;
/// Family of data of samples, unless another one is set.
pub(crate) const OF_SAMPLES: &str = mlp::FAMILY.name;

/// Words of `model.kind`.
pub(crate) const KINDS: &[&str] = &names::<{ count(ANY_DATA) }>(ANY_DATA);
/// Those of models of texts and tokens.
pub(crate) const OF_TOKENS: &[&str] = &names::<{ count(TOKENS) }>(TOKENS);

/// Words of `model.preset`.
const PRESETS: &[&str] = &preset_names::<{ preset_count() }>();

/// Largest width of a layer.
const WIDTH_MAX: u64 = 65_536;
/// The most layers in a list of their widths.
const LISTED_MAX: usize = 1024;

/// Kind of the data that a model is trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainedOn {
    /// Texts and tokens.
    Tokens,
    /// Samples of any shape.
    Samples,
    /// Samples that are pictures.
    Pictures,
}

/// Facts that all models of a family have in common: a line of the registry.
#[derive(Debug)]
pub struct Family {
    /// Word of `model.kind`.
    pub name: &'static str,
    /// Description for the help listing: "a transformer".
    pub doc: &'static str,
    /// Defaults of keys of other sections ([`ModelFamily::defaults`]) for the help listing.
    pub defaults: &'static str,
    pub trained_on: TrainedOn,
    /// Published models of the family. No two families have one of the same name.
    pub presets: &'static [Preset],
    /// Makes the model of the family whose keys have their defaults.
    pub new: fn() -> Box<dyn ModelFamily>,
}

/// Published model: values of keys of its family, which are defaults where it is the preset.
#[derive(Debug)]
pub struct Preset {
    /// Word of `model.preset`.
    pub name: &'static str,
    /// Returns the values by the full names of the keys, those behind the others on which it
    /// depends whether they have an effect. `model.context` is none of them, because it is a
    /// choice of the run.
    pub values: fn() -> Vec<(&'static str, Value)>,
}

/// A model of a family: the values of the family's keys, and what they mean.
///
/// Another family is a file beside this one, and its [`Family`] in [`FAMILIES`]. The file has a
/// struct of keys, made by `section!` with the section's name `model`, and the implementation of
/// this trait. Reading, printing, `--explain keys`, checks, refusals of keys of other families and
/// defaults in other sections follow from these. Its presets are a list in [`Family`]; its graph
/// is a function in `graph::model`, which also says how a tensor group divides its parameters.
/// Whatever else depends on the family alone is another method here, with a default for those
/// without it.
pub trait ModelFamily: Section + fmt::Debug + Send + Sync {
    /// Returns what all models of the family have in common.
    fn family(&self) -> &'static Family;

    /// Returns a copy, which `clone` cannot, because its type would not be known.
    fn boxed(&self) -> Box<dyn ModelFamily>;

    /// Returns the sizes of the model, for the user: a few words without a period.
    fn summary(&self) -> String;

    /// Returns a number of parameters below that of the model, without what depends on the data: a
    /// model for which the host has no memory is refused by it before it is built.
    fn parameters_at_least(&self) -> u64;

    /// Builds the forward graph of the model, with its loss, for data of these sizes.
    ///
    /// # Errors
    /// Returns `FamilyError` if the data are none for the model, or its sizes contradict each
    /// other.
    fn graph(&self, data: &DataShape) -> Result<Graph, FamilyError>;

    /// Builds the graph that generation runs, with the logits of one position; with the keys and
    /// values of so many sequences in caches on the device, if that is given and the model has any
    /// to keep; `None` if the model generates no text.
    ///
    /// # Errors
    /// Those of [`ModelFamily::graph`].
    fn next_token_graph(
        &self,
        _data: &DataShape,
        _cached_sequences: Option<usize>,
    ) -> Result<Option<Graph>, FamilyError> {
        Ok(None)
    }

    /// Returns the names that the parameters have in Hugging Face's files; empty if no such file
    /// has a model of the family.
    fn names(&self) -> &'static [FileName] {
        &[]
    }

    /// Returns the angles of rotary positions, if the model has them.
    fn rotary(&self) -> Option<RotaryAngles> {
        None
    }

    /// Returns the number of tokens in a sample; `None` of models of samples.
    fn context(&self) -> Option<usize> {
        None
    }

    /// Returns the fewest samples that a micro-batch should have.
    fn micro_batch_min(&self) -> usize {
        1
    }

    /// Returns keys of other sections, by their full names, with the defaults that they have with
    /// this model.
    fn defaults(&self) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// Checks the constraints between keys of the family; each key by itself is checked before.
    ///
    /// # Errors
    /// Returns `ConstraintError` for the first violation.
    fn check(&self) -> Result<(), ConstraintError> {
        Ok(())
    }
}

impl Clone for Box<dyn ModelFamily> {
    fn clone(&self) -> Self {
        self.boxed()
    }
}

impl PartialEq for dyn ModelFamily {
    fn eq(&self, other: &Self) -> bool {
        self.family().name == other.family().name
            && self.keys().iter().all(|key| self.value(key.name) == other.value(key.name))
    }
}

/// Reason why a model cannot be built for the data of a run.
#[derive(Debug, thiserror::Error)]
pub enum FamilyError {
    /// Sizes contradict each other.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The data are none for the model; the sentence has the next action.
    #[error("{0}")]
    Unfit(String),
}

/// Returns the family of this name.
pub(crate) fn family(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name)
}

/// Returns the preset of this name, with its family.
fn preset(name: &str) -> Option<(&'static Preset, &'static Family)> {
    for family in FAMILIES {
        if let Some(preset) = family.presets.iter().find(|preset| preset.name == name) {
            return Some((preset, family));
        }
    }
    None
}

/// Returns the number of presets of all families.
const fn preset_count() -> usize {
    let mut count = 0;
    let mut family = 0;
    while family < FAMILIES.len() {
        count += FAMILIES[family].presets.len();
        family += 1;
    }
    count
}

/// Returns the names of the presets of all families, which are `N`.
const fn preset_names<const N: usize>() -> [&'static str; N] {
    let mut names = [""; N];
    let mut count = 0;
    let mut family = 0;
    while family < FAMILIES.len() {
        let mut preset = 0;
        while preset < FAMILIES[family].presets.len() {
            names[count] = FAMILIES[family].presets[preset].name;
            count += 1;
            preset += 1;
        }
        family += 1;
    }
    names
}

const TOKENS: &[TrainedOn] = &[TrainedOn::Tokens];
const ANY_DATA: &[TrainedOn] = &[TrainedOn::Tokens, TrainedOn::Samples, TrainedOn::Pictures];

/// Returns the names of the families that are trained on data of these kinds, which are `N`.
const fn names<const N: usize>(kinds: &[TrainedOn]) -> [&'static str; N] {
    let mut names = [""; N];
    let mut count = 0;
    let mut index = 0;
    while index < FAMILIES.len() {
        if is_trained_on(&FAMILIES[index], kinds) {
            names[count] = FAMILIES[index].name;
            count += 1;
        }
        index += 1;
    }
    names
}

/// Returns the number of families that are trained on data of these kinds.
const fn count(kinds: &[TrainedOn]) -> usize {
    let mut count = 0;
    let mut index = 0;
    while index < FAMILIES.len() {
        count += is_trained_on(&FAMILIES[index], kinds) as usize;
        index += 1;
    }
    count
}

/// Returns true if a family is trained on data of one of these kinds.
const fn is_trained_on(family: &Family, kinds: &[TrainedOn]) -> bool {
    let mut index = 0;
    while index < kinds.len() {
        // `==` is no constant function.
        if kinds[index] as u8 == family.trained_on as u8 {
            return true;
        }
        index += 1;
    }
    false
}

/// Checks the widths of layers, which are the value of a key.
fn check_widths(key: &'static str, widths: &[u64]) -> Result<(), ConstraintError> {
    if let Some(width) = widths.iter().find(|width| !(1..=WIDTH_MAX).contains(*width)) {
        return refused(&[key], format!("expects widths from 1 to {WIDTH_MAX}, got {width}"));
    }
    if widths.len() > LISTED_MAX {
        let why = format!("expects at most {LISTED_MAX} layers, got {}", widths.len());
        return refused(&[key], why);
    }
    Ok(())
}

/// Returns a number of parameters below that of layers of these widths, one behind the other.
fn products(widths: &[u64]) -> u64 {
    widths.windows(2).map(|pair| pair[0].saturating_mul(pair[1])).sum()
}

fn lengths(list: &[u64]) -> Vec<usize> {
    list.iter().map(|length| *length as usize).collect()
}

config_enum! {
    // The others are no activations of a model.
    Unary {
        Unary::Gelu => "gelu",
        Unary::GeluTanh => "gelu_tanh",
        Unary::Relu => "relu",
        Unary::Sigmoid => "sigmoid",
        Unary::Silu => "silu",
        Unary::Tanh => "tanh",
        _ => None,
    }
}

#[cfg(test)]
mod tests;
