//! Keys of a configuration (names, accepted values, defaults and documentation), and the sections
//! whose fields they are. Reading, validation, printing and the help listing are loops over keys.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::path::PathBuf;

/// One key of a configuration.
#[derive(Debug)]
pub struct Key {
    /// Full name `section.key_name`, as used in flags and messages.
    pub full_name: &'static str,
    pub section: &'static str,
    pub name: &'static str,
    /// Help text: one or more sentences, printed by `--explain keys`.
    pub doc: &'static str,
    pub accepts: Constraint,
    /// Derivation of a default that is not constant, for the help listing: "as train.batch".
    pub follows: Option<&'static str>,
    /// Name of another key, and its values with which this key has an effect; `None`: always.
    pub only: Option<(&'static str, &'static [&'static str])>,
}

/// Section of a configuration: a struct whose fields are the values of its keys, see [`section`].
pub trait Section {
    /// Returns the keys, in printing order.
    fn keys(&self) -> Vec<&'static Key>;

    /// Returns the value of the key with this name (without the section's); `None` if there is no
    /// such key, or if it has no value because it is unset or a path that is not Unicode.
    fn value(&self, name: &str) -> Option<Value>;

    /// Sets the key with this name to a value that [`Key::accepts`] has checked.
    ///
    /// # Panics
    /// Panics on a value of another type, and if there is no such key.
    fn set(&mut self, name: &str, value: Value);
}

/// Generates the struct of a section, its defaults and its keys from one entry per key: doc, name,
/// type, default and accepted values; optionally the other key that the default follows; and
/// optionally the key and its values with which this key has an effect.
macro_rules! section {
    (
        $(#[doc = $section_doc:literal])*
        $section:ident: $Section:ident {
            $(
                $(#[doc = $doc:literal])*
                $key:ident: $ty:ty = $default:expr, $accepts:expr $(, $follows:literal)?
                    $(, if $other:ident = $words:expr)?;
            )*
        }
    ) => {
        $(#[doc = $section_doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $Section {
            $($(#[doc = $doc])* pub $key: $ty,)*
        }

        impl Default for $Section {
            fn default() -> Self {
                Self { $($key: $default,)* }
            }
        }

        impl $Section {
            /// Keys of the section, in printing order.
            pub const KEYS: &'static [$crate::keys::Key] = &[$($crate::keys::Key {
                full_name: concat!(stringify!($section), ".", stringify!($key)),
                section: stringify!($section),
                name: stringify!($key),
                doc: concat!($($doc),*),
                accepts: $accepts,
                follows: [$(Some($follows),)? None][0],
                only: [$(Some(($other, $words as &[&str])),)? None][0],
            },)*];
        }

        impl $crate::keys::Section for $Section {
            fn keys(&self) -> Vec<&'static $crate::keys::Key> {
                Self::KEYS.iter().collect()
            }

            fn value(&self, name: &str) -> Option<$crate::keys::Value> {
                match name {
                    $(stringify!($key) => $crate::keys::ConfigValue::value(&self.$key),)*
                    _ => None,
                }
            }

            fn set(&mut self, name: &str, value: $crate::keys::Value) {
                match name {
                    $(stringify!($key) => {
                        $crate::keys::ConfigValue::replace(&mut self.$key, value);
                    })*
                    _ => panic!("[{}] has no key {name}", stringify!($section)),
                }
            }
        }
    };
}
pub(crate) use section;

/// Value of a key, in one of the types common to TOML and keys.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Whole(i128),
    Real(f64),
    Flag(bool),
    Text(String),
    /// A list of whole numbers.
    IntList(Vec<u64>),
    /// A list of numbers.
    RealList(Vec<f64>),
    /// A list of strings.
    TextList(Vec<String>),
}

/// Values that a key accepts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Constraint {
    /// Whole numbers from the first bound to the last, both included.
    Whole(i64, i64),
    /// Whole numbers as in `Whole`, or this word.
    WholeOr(i64, i64, &'static str),
    /// Finite numbers between two bounds.
    Real(Bound<f64>, Bound<f64>),
    /// `true` or `false`.
    Flag,
    /// One word of the list.
    OneOf(&'static [&'static str]),
    /// Any string that is not empty.
    Text,
    /// A list of whole numbers of at least 1; may be empty.
    IntList,
    /// A list of finite numbers of at least 0; may be empty.
    RealList,
    /// A list of strings that are not empty and have no comma; may be empty.
    TextList,
}

/// Fractions from 0 to below 1, for probabilities and decaying averages.
pub(crate) const FRACTION: Constraint =
    Constraint::Real(Bound::Included(0.0), Bound::Excluded(1.0));

impl Constraint {
    pub(crate) fn is_list(&self) -> bool {
        matches!(self, Self::IntList | Self::RealList | Self::TextList)
    }

    /// Returns the value converted to the key's type (a whole number becomes a real one for
    /// `Real`), or `None` if it has another type or is out of range.
    pub fn check(&self, value: Value) -> Option<Value> {
        match (self, value) {
            (Constraint::Whole(first, last), Value::Whole(v))
                if (i128::from(*first)..=i128::from(*last)).contains(&v) =>
            {
                Some(Value::Whole(v))
            }
            (Constraint::WholeOr(_, _, word), Value::Text(v)) if v == *word => Some(Value::Text(v)),
            (Constraint::WholeOr(first, last, _), value) => {
                Constraint::Whole(*first, *last).check(value)
            }
            (Constraint::Real(..), Value::Whole(v)) => self.check(Value::Real(v as f64)),
            (Constraint::Real(from, to), Value::Real(v))
                if v.is_finite()
                    && (*from, *to).contains(&v)
                    && !is_excluded(*from, v)
                    && !is_excluded(*to, v) =>
            {
                // Adding zero turns -0.0 into 0.0, so that a value has only one spelling.
                Some(Value::Real(v + 0.0))
            }
            (Constraint::Flag, Value::Flag(v)) => Some(Value::Flag(v)),
            (Constraint::OneOf(words), Value::Text(v)) if words.contains(&v.as_str()) => {
                Some(Value::Text(v))
            }
            (Constraint::IntList, Value::IntList(v)) if v.iter().all(|count| *count > 0) => {
                Some(Value::IntList(v))
            }
            (Constraint::RealList, Value::RealList(v))
                if v.iter().all(|real| real.is_finite() && *real >= 0.0) =>
            {
                Some(Value::RealList(v.into_iter().map(|real| real + 0.0).collect()))
            }
            (Constraint::Text, Value::Text(v)) if !v.is_empty() => Some(Value::Text(v)),
            (Constraint::TextList, Value::TextList(v))
                if v.iter().all(|text| !text.trim().is_empty() && !text.contains(',')) =>
            {
                Some(Value::TextList(v))
            }
            _ => None,
        }
    }
}

/// Returns true for a value that rounds to an excluded bound in f32, the type used on devices.
fn is_excluded(bound: Bound<f64>, value: f64) -> bool {
    matches!(bound, Bound::Excluded(bound) if bound as f32 == value as f32)
}

/// Formats the accepted values as a phrase after "expects" in messages.
impl fmt::Display for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Constraint::Whole(first, last) => write!(f, "a whole number from {first} to {last}"),
            Constraint::WholeOr(first, last, word) => {
                write!(f, "\"{word}\" or a whole number from {first} to {last}")
            }
            Constraint::Real(from, to) => {
                let up_to = match from {
                    Bound::Included(v) => {
                        write!(f, "a number from {}", short(*v))?;
                        "to"
                    }
                    Bound::Excluded(v) => {
                        write!(f, "a number above {},", short(*v))?;
                        "at most"
                    }
                    Bound::Unbounded => {
                        f.write_str("a number")?;
                        "up to"
                    }
                };
                match to {
                    Bound::Included(v) => write!(f, " {up_to} {}", short(*v)),
                    Bound::Excluded(v) => write!(f, " to below {}", short(*v)),
                    Bound::Unbounded => Ok(()),
                }
            }
            Constraint::Flag => f.write_str("true or false"),
            Constraint::OneOf(words) => f.write_str(&one_of(words)),
            Constraint::IntList => {
                f.write_str("a list of whole numbers from 1 on, such as [32, 32]")
            }
            Constraint::RealList => f.write_str("a list of numbers from 0 on, such as [1.0, 2.5]"),
            Constraint::Text => f.write_str("a string that is not empty"),
            Constraint::TextList => f.write_str("a list of strings without commas"),
        }
    }
}

/// Formats words as alternatives: `"a", "b" or "c"`.
pub(crate) fn one_of(words: &[&str]) -> String {
    let mut text = String::new();
    for (i, word) in words.iter().enumerate() {
        text += match i {
            0 => "",
            i if i + 1 == words.len() => " or ",
            _ => ", ",
        };
        text += &format!("\"{word}\"");
    }
    text
}

/// Formats a number in its shortest form: 1, 0.5, 1e-20.
fn short(value: f64) -> String {
    let text = format!("{value:?}");
    text.strip_suffix(".0").unwrap_or(&text).to_owned()
}

/// Formats the value as TOML, which reads back bit by bit.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Whole(v) => write!(f, "{v}"),
            // Shortest digits that read back bit by bit, always with a point or exponent.
            Value::Real(v) => write!(f, "{v:?}"),
            Value::Flag(v) => write!(f, "{v}"),
            Value::IntList(v) => write!(f, "{v:?}"),
            Value::RealList(v) => write!(f, "{v:?}"),
            Value::Text(v) => write!(f, "{}", toml::Value::String(v.clone())),
            Value::TextList(v) => write!(f, "{}", toml::Value::from(v.clone())),
        }
    }
}

impl From<usize> for Value {
    fn from(whole: usize) -> Self {
        Self::Whole(whole as i128)
    }
}

impl From<f64> for Value {
    fn from(real: f64) -> Self {
        Self::Real(real)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

/// Violated constraint: a value out of range, or contradictory keys.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{} {why}", keys[0])]
pub struct ConstraintError {
    /// Conflicting keys; the first is the subject of the message.
    pub keys: Vec<&'static str>,
    /// Predicate of the message, after the first key's name, with the accepted values.
    pub why: String,
}

/// Error that refuses the first of several keys for a reason that involves all of them.
pub(crate) fn refused(keys: &[&'static str], why: String) -> Result<(), ConstraintError> {
    Err(ConstraintError { keys: keys.to_vec(), why })
}

/// Rust type of a configuration field, convertible to and from a key's `Value`.
pub(crate) trait ConfigValue {
    fn value(&self) -> Option<Value>;
    fn replace(&mut self, value: Value);
}

macro_rules! fields {
    ($($ty:ty, $kind:ident, $out:expr, $in:expr;)*) => {$(
        impl ConfigValue for $ty {
            fn value(&self) -> Option<Value> {
                let out: fn(&$ty) -> _ = $out;
                Some(Value::$kind(out(self)))
            }
            fn replace(&mut self, value: Value) {
                match value {
                    Value::$kind(v) => *self = $in(v),
                    other => panic!("{other} was not admitted for this key"),
                }
            }
        }
    )*};
}

// Every accepted range starts at 0 or more and ends within `i64`, so no conversion is lossy.
fields! {
    usize, Whole, |v| *v as i128, |v| v as usize;
    u64, Whole, |v| i128::from(*v), |v| v as u64;
    f64, Real, |v| *v, |v| v;
    bool, Flag, |v| *v, |v| v;
    Vec<u64>, IntList, |v| v.clone(), |v| v;
    Vec<f64>, RealList, |v| v.clone(), |v| v;
    Vec<String>, TextList, |v| v.clone(), |v| v;
    String, Text, |v| v.clone(), |v| v;
}

/// Optional number, without a value if unset.
impl ConfigValue for Option<usize> {
    fn value(&self) -> Option<Value> {
        self.map(Value::from)
    }

    fn replace(&mut self, value: Value) {
        match value {
            Value::Whole(number) => *self = Some(number as usize),
            other => panic!("{other} was not admitted for this key"),
        }
    }
}

/// Optional path, without a value if unset or not Unicode, which TOML cannot represent.
impl ConfigValue for Option<PathBuf> {
    fn value(&self) -> Option<Value> {
        let path = self.as_ref()?;
        path.to_str().map(|path| Value::Text(path.to_owned()))
    }

    fn replace(&mut self, value: Value) {
        match value {
            Value::Text(path) => *self = Some(PathBuf::from(path)),
            other => panic!("{other} was not admitted for this key"),
        }
    }
}

/// Optional text, without a value if unset.
impl ConfigValue for Option<String> {
    fn value(&self) -> Option<Value> {
        self.clone().map(Value::Text)
    }

    fn replace(&mut self, value: Value) {
        match value {
            Value::Text(text) => *self = Some(text),
            other => panic!("{other} was not admitted for this key"),
        }
    }
}

/// Type whose values are words of the configuration. Implemented for the types that the rest of the
/// program uses, so that no duplicate types are needed here.
pub trait ConfigEnum: Copy + fmt::Debug + 'static {
    /// Words in the order of the help listing.
    const WORDS: &'static [&'static str];
    /// Values in the order of [`ConfigEnum::WORDS`].
    const VALUES: &'static [Self];

    /// Returns the word of this value; `None` for a value that the configuration does not offer.
    fn word(self) -> Option<&'static str>;

    /// Returns the value of a word.
    fn from_word(word: &str) -> Option<Self> {
        let index = Self::WORDS.iter().position(|known| *known == word)?;
        Self::VALUES.get(index).copied()
    }
}

impl<T: ConfigEnum> ConfigValue for T {
    /// A value without a word yields its debug text, which no key accepts.
    fn value(&self) -> Option<Value> {
        Some(Value::Text(match self.word() {
            Some(word) => word.to_owned(),
            None => format!("{self:?}"),
        }))
    }

    fn replace(&mut self, value: Value) {
        let word = match &value {
            Value::Text(word) => Self::from_word(word),
            _ => None,
        };
        *self = word.unwrap_or_else(|| panic!("{value} was not admitted for this key"));
    }
}

/// Implements [`ConfigEnum`] for types, with a word for each value. A value without a word does not
/// compile, unless the type's last line is `_ => None,`.
macro_rules! config_enum {
    ($($ty:ty {
        $($name:ident $(::$variant:ident)? $(($($of:tt)*))? => $word:expr,)*
        $(_ => $none:ident,)?
    })*) => {$(
        impl $crate::keys::ConfigEnum for $ty {
            const WORDS: &'static [&'static str] = &[$($word),*];
            const VALUES: &'static [Self] = &[$($name $(::$variant)? $(($($of)*))?),*];

            fn word(self) -> Option<&'static str> {
                match self {
                    $($name $(::$variant)? $(($($of)*))? => Some($word),)*
                    $(_ => $none,)?
                }
            }
        }
    )*};
}
pub(crate) use config_enum;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_accepted_reads_as_a_sentence() {
        let real = |from, to| Constraint::Real(from, to).to_string();
        assert_eq!(Constraint::Whole(1, 9).to_string(), "a whole number from 1 to 9");
        assert_eq!(real(Bound::Excluded(0.0), Bound::Included(1.0)), "a number above 0, at most 1");
        assert_eq!(real(Bound::Included(0.0), Bound::Excluded(1.0)), "a number from 0 to below 1");
        assert_eq!(
            real(Bound::Included(1e-20), Bound::Included(0.5)),
            "a number from 1e-20 to 0.5"
        );
        assert_eq!(Constraint::OneOf(&["a", "b", "c"]).to_string(), "\"a\", \"b\" or \"c\"");
    }

    #[test]
    fn values_out_of_range_or_of_another_type_are_not_admitted() {
        let unit = Constraint::Real(Bound::Included(0.0), Bound::Excluded(1.0));
        assert_eq!(unit.check(Value::Whole(0)), Some(Value::Real(0.0)));
        assert_eq!(unit.check(Value::Real(1.0)), None);
        assert_eq!(unit.check(Value::Real(0.999_999_999)), None, "it is 1 in f32");
        assert!(unit.check(Value::Real(0.999_999)).is_some());
        assert_eq!(unit.check(Value::Real(f64::NAN)), None);
        assert_eq!(unit.check(Value::Text("0.5".into())), None);
        assert_eq!(unit.check(Value::Real(-0.0)).unwrap().to_string(), "0.0");
        assert_eq!(Constraint::Whole(0, 9).check(Value::Whole(-1)), None);
        assert_eq!(Constraint::Whole(0, 9).check(Value::Real(1.0)), None);
        assert_eq!(Constraint::Text.check(Value::Text(String::new())), None);
        assert_eq!(Constraint::OneOf(&["a"]).check(Value::Text("A".into())), None);
    }
}
