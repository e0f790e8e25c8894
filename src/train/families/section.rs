//! Section `[model]` of a configuration: the family of the model, with the values of its keys.

use std::ops::Deref;

use super::{DEFAULT, FAMILIES, KINDS, ModelFamily, family};
use crate::keys::{Constraint, Key, Section, Value};

/// Key that selects the family.
pub(crate) const KIND: Key = Key {
    full_name: "model.kind",
    section: "model",
    name: "kind",
    doc: "Family of the model, on which its other keys depend.",
    accepts: Constraint::OneOf(KINDS),
    follows: Some("\"gpt\" for texts and tokens, or else \"mlp\""),
    only: None,
};

/// Returns the keys of the section with any family, in the order of the help listing. Several
/// families may have a key of the same name.
pub(crate) fn keys_of_all() -> Vec<&'static Key> {
    let mut keys = vec![&KIND];
    for family in FAMILIES {
        keys.extend((family.new)().keys());
    }
    keys
}

/// Section `[model]`. It has the key `kind`, and those of the family that this selects.
#[derive(Clone, Debug)]
pub struct ModelSection {
    pub family: Box<dyn ModelFamily>,
}

impl Default for ModelSection {
    fn default() -> Self {
        Self { family: (DEFAULT.new)() }
    }
}

impl PartialEq for ModelSection {
    fn eq(&self, other: &Self) -> bool {
        *self.family == *other.family
    }
}

impl Deref for ModelSection {
    type Target = dyn ModelFamily;

    fn deref(&self) -> &Self::Target {
        &*self.family
    }
}

impl ModelSection {
    /// Returns the section of a model of the same family whose keys have their defaults.
    pub(crate) fn of_defaults(&self) -> Self {
        Self { family: (self.family.family().new)() }
    }
}

impl Section for ModelSection {
    fn keys(&self) -> Vec<&'static Key> {
        let mut keys = vec![&KIND];
        keys.extend(self.family.keys());
        keys
    }

    fn value(&self, name: &str) -> Option<Value> {
        if name == KIND.name {
            return Some(self.family.family().name.into());
        }
        self.family.value(name)
    }

    /// Sets a key. Another kind than before gives all keys of the family their defaults.
    fn set(&mut self, name: &str, value: Value) {
        if name != KIND.name {
            return self.family.set(name, value);
        }
        let kind = match &value {
            Value::Text(word) => family(word),
            _ => None,
        };
        let kind = kind.unwrap_or_else(|| panic!("{value} was not admitted for this key"));
        if kind.name != self.family.family().name {
            self.family = (kind.new)();
        }
    }
}
