//! Section `[model]` of a configuration: the family of the model, the values of its keys, and the
//! published model that gives their defaults.

use std::ops::Deref;

use super::{DEFAULT, FAMILIES, Family, KINDS, ModelFamily, PRESETS, Preset, family, preset};
use crate::keys::{Constraint, ConstraintError, Key, Section, Value, refused};

/// Default context length of a model with a preset: GPT-2's. Most published models are trained on
/// longer contexts, for which small devices have too little memory.
pub(crate) const PRESET_CONTEXT: usize = 1024;

pub(crate) const KIND: Key = Key {
    full_name: "model.kind",
    section: "model",
    name: "kind",
    doc: "Family of the model, on which its other keys depend.",
    accepts: Constraint::OneOf(KINDS),
    follows: Some("that of model.preset; \"gpt\" for texts and tokens, or else \"mlp\""),
    only: None,
};

/// Key of a published model, whose sizes become the defaults of the family's keys.
pub(crate) const PRESET: Key = Key {
    full_name: "model.preset",
    section: "model",
    name: "preset",
    doc: "Published model: its sizes are the defaults, with a context of 1024.",
    accepts: Constraint::OneOf(PRESETS),
    follows: None,
    only: None,
};

/// Keys of the section with any family, in the order of the help listing. Several families may have
/// a key of the same name.
pub(crate) fn keys_of_all() -> Vec<&'static Key> {
    let mut keys = vec![&KIND, &PRESET];
    for family in FAMILIES {
        keys.extend((family.new)().keys());
    }
    keys
}

/// Section `[model]`: the keys `kind` and `preset`, and the keys of the family selected by `kind`.
#[derive(Clone, Debug)]
pub struct ModelSection {
    pub family: Box<dyn ModelFamily>,
    preset: Option<(&'static Preset, &'static Family)>,
}

impl Default for ModelSection {
    fn default() -> Self {
        Self { family: (DEFAULT.new)(), preset: None }
    }
}

impl PartialEq for ModelSection {
    fn eq(&self, other: &Self) -> bool {
        let name = |section: &Self| section.preset.map(|(preset, _)| preset.name);
        *self.family == *other.family && name(self) == name(other)
    }
}

impl Deref for ModelSection {
    type Target = dyn ModelFamily;

    fn deref(&self) -> &Self::Target {
        &*self.family
    }
}

impl ModelSection {
    /// Section of a model of the same family with default keys.
    pub(crate) fn of_defaults(&self) -> Self {
        Self { family: (self.family.family().new)(), preset: None }
    }

    /// Name of the preset's family, if a preset is set.
    pub(crate) fn kind_of_preset(&self) -> Option<&'static str> {
        self.preset.map(|(_, family)| family.name)
    }

    /// Defaults that the preset gives to keys of the family, by their full names.
    pub(crate) fn preset_values(&self) -> Vec<(&'static str, Value)> {
        let Some((preset, _)) = self.preset else { return Vec::new() };
        let mut values = (preset.values)();
        if self.family.context().is_some() {
            values.push(("model.context", PRESET_CONTEXT.into()));
        }
        values
    }

    pub(crate) fn check_preset(&self) -> Result<(), ConstraintError> {
        let Some((preset, family)) = self.preset else { return Ok(()) };
        let kind = self.family.family().name;
        if family.name == kind {
            return Ok(());
        }
        let why = format!(
            "= \"{}\" is a model of model.kind = \"{}\", not of \"{kind}\"; leave one of them out",
            preset.name, family.name
        );
        refused(&[PRESET.full_name, KIND.full_name], why)
    }
}

impl Section for ModelSection {
    fn keys(&self) -> Vec<&'static Key> {
        let mut keys = vec![&KIND, &PRESET];
        keys.extend(self.family.keys());
        keys
    }

    fn value(&self, name: &str) -> Option<Value> {
        if name == KIND.name {
            Some(self.family.family().name.into())
        } else if name == PRESET.name {
            self.preset.map(|(preset, _)| preset.name.into())
        } else {
            self.family.value(name)
        }
    }

    /// Sets a key. A new kind resets all keys of the family to their defaults; a preset sets none
    /// of them ([`ModelSection::preset_values`]).
    fn set(&mut self, name: &str, value: Value) {
        if name == KIND.name {
            let kind = of_word(&value, family);
            if kind.name != self.family.family().name {
                self.family = (kind.new)();
            }
        } else if name == PRESET.name {
            self.preset = Some(of_word(&value, preset));
        } else {
            self.family.set(name, value);
        }
    }
}

/// Item named by the word of a value; panics if the word is unknown.
fn of_word<T>(value: &Value, named: impl Fn(&str) -> Option<T>) -> T {
    let found = match value {
        Value::Text(word) => named(word),
        _ => None,
    };
    found.unwrap_or_else(|| panic!("{value} was not admitted for this key"))
}
