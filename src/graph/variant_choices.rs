//! Kernel variants that the calls of a plan run.

use std::collections::BTreeMap;

/// Selected variant of each call that has several, by the key of the call at full capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VariantChoices(BTreeMap<String, String>);

impl VariantChoices {
    pub fn get(&self, call_key: &str) -> Option<&str> {
        self.0.get(call_key).map(String::as_str)
    }

    pub fn insert(&mut self, call_key: String, name: String) {
        self.0.insert(call_key, name);
    }

    /// Returns call keys and variant names, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(call_key, name)| (call_key.as_str(), name.as_str()))
    }
}

impl FromIterator<(String, String)> for VariantChoices {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(choices: I) -> Self {
        Self(choices.into_iter().collect())
    }
}
