//! Configuration reader: merges a TOML file and command-line flags into a checked [`RunConfig`].
//! Every error names its place (file and line, or the flag), the key, and the accepted values.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use potluck_core::format::shell_word;
use toml::de::{DeTable, DeValue};

use super::RunConfig;
use super::schema::{DataKind, DecayKind, SECTIONS, TypedKeys, is_of_placement, known_key};
use super::unknown::{unknown_key, unknown_section, value_of_other_trainers, with_section};
use crate::families::{FAMILIES, KIND, PRESET};
use crate::keys::{ConfigEnum, Constraint, ConstraintError, Key, Value};

/// A configuration that cannot be run: exit code 78.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    #[error("{}: cannot be read: {why}", path.display())]
    Unreadable { path: PathBuf, why: String },
    #[error("{origin}: {why}")]
    Syntax { origin: Origin, why: String },
    #[error("{origin}: there is no {name}; {hint}")]
    Unknown { origin: Origin, name: String, hint: String },
    #[error("{origin}: {name} {why}")]
    Value { origin: Origin, name: String, why: String },
}

/// Place where a value was set, in the order of precedence: later variants win.
#[derive(Clone, Debug, PartialEq, PartialOrd)]
pub enum Origin {
    /// Not set anywhere: a constant default, or derived from other keys.
    Default,
    /// The configuration stored in a checkpoint.
    Saved,
    /// The model of this name from which the run starts.
    Model(String),
    /// A file and its line, counted from 1.
    File(PathBuf, usize),
    /// The nth override flag, as it was typed.
    Flag(usize, String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("the defaults"),
            Origin::Saved => f.write_str("the saved configuration"),
            Origin::Model(name) => f.write_str(name),
            Origin::File(path, line) => write!(f, "{}:{line}", path.display()),
            Origin::Flag(_, flag) => f.write_str(flag),
        }
    }
}

/// Command-line flag that sets a key.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// The flag as it was typed, for messages: `--steps 500`.
    pub flag: String,
    /// Full name of the key, `section.key_name`.
    pub key: String,
    /// Value in TOML, or a bare word, which is read as a string.
    pub value: String,
}

impl Override {
    /// Parses the argument of `--set key=value`.
    pub fn set(typed: &str) -> Result<Self, ConfigError> {
        let flag = format!("--set {typed}");
        match typed.split_once('=') {
            Some((key, value)) => {
                Ok(Self { flag, key: key.trim().into(), value: value.trim().into() })
            }
            None => {
                let why = "expects key=value, such as --set train.steps=500".into();
                Err(ConfigError::Syntax { origin: Origin::Flag(0, flag), why })
            }
        }
    }

    /// Override by a dedicated flag, such as `--steps 500` for `train.steps`.
    pub fn named(flag: &str, key: &str, value: impl fmt::Display) -> Self {
        Self { flag: format!("{flag} {value}"), key: key.into(), value: value.to_string() }
    }

    /// Overrides of `--data PATH`: `data.path`, taken literally, and `data.kind = "text"`.
    pub fn data(path: &Path) -> Result<[Self; 2], ConfigError> {
        let flag = format!("--data {}", path.display());
        let Some(literal) = path.to_str() else {
            let why = "expects a path in Unicode; rename the file".into();
            return Err(ConfigError::Syntax { origin: Origin::Flag(0, flag), why });
        };
        let kind = DataKind::of(path).word().expect("every kind of data has a word");
        Ok([Self::literal(&flag, "data.path", literal), Self::literal(&flag, "data.kind", kind)])
    }

    /// Override of `--devices SELECTOR`: `parallel.devices`, taken literally.
    pub fn devices(selector: &str) -> Self {
        Self::literal(&format!("--devices {selector}"), "parallel.devices", selector)
    }

    fn literal(flag: &str, key: &str, value: &str) -> Self {
        Self { flag: flag.into(), key: key.into(), value: Value::Text(value.into()).to_string() }
    }
}

/// Resolved configuration, and the keys that were set.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    pub config: RunConfig,
    pub typed: TypedKeys,
    /// At a resume: the key set to another value than the run had, because of which the placement
    /// is decided anew.
    pub other_placement: Option<&'static str>,
}

impl Resolved {
    /// Reads a configuration that a checkpoint stores as [`RunConfig::to_toml`], with the names of
    /// the keys that were set. Names of unknown keys are ignored, and so are values without an
    /// effect, which earlier versions saved.
    ///
    /// # Errors
    /// Returns `ConfigError` for an unknown key or a value that is not accepted.
    pub fn saved(text: &str, typed: &[String]) -> Result<Self, ConfigError> {
        let place = Path::new("the checkpoint's configuration");
        let config = resolve(None, None, Some((place, text)), &[], Ineffective::Reset)?.0.config;
        let mut now = BTreeSet::new();
        for name in typed {
            // A key that has lost its effect since is derived again when it has one.
            if let Some(key) = known_key(name)
                && config.has_effect(key)
            {
                now.insert(key.full_name);
            }
        }
        Ok(Self { config, typed: TypedKeys { now, before: None }, other_placement: None })
    }

    /// Returns the keys that are now set to other values than in `saved`, with the values in TOML.
    pub fn changes(&self, saved: &RunConfig) -> Vec<(&'static str, String)> {
        let mut changes = Vec::new();
        for key in self.config.keys() {
            let value = self.config.value(key.full_name);
            if self.typed.now.contains(key.full_name)
                && value != saved.value(key.full_name)
                && let Some(value) = value
            {
                changes.push((key.full_name, value.to_string()));
            }
        }
        changes
    }
}

/// Keys given by a model from which a run starts, with the model's name for messages.
#[derive(Clone, Debug, PartialEq)]
pub struct InitialModel {
    pub name: String,
    pub settings: Vec<(&'static str, Value)>,
    /// Its `data.tokenizer`, if it has a tokenizer.
    pub tokenizer: Option<String>,
}

impl InitialModel {
    /// Resolves a configuration with the training defaults for the model: its own tokenizer for
    /// text, a tenth of the learning rate of a new model, and a warm-up of 3 % of the steps.
    ///
    /// # Errors
    /// Returns the errors of [`read`] for the configuration without these defaults.
    pub fn with_defaults(
        mut self,
        file: Option<(&Path, &str)>,
        overrides: &[Override],
    ) -> Result<Self, ConfigError> {
        let resolved = read_from(&self, file, overrides)?;
        let (config, now) = (resolved.config, resolved.typed.now);
        if let Some(tokenizer) = &self.tokenizer
            && matches!(config.data.kind, DataKind::Text | DataKind::Builtin | DataKind::Tokens)
            && !now.contains("data.tokenizer")
        {
            self.settings.push(("data.tokenizer", Value::Text(tokenizer.clone())));
        }
        if !now.contains("optim.lr") {
            self.settings.push(("optim.lr", (config.optim.lr / 10.0).into()));
        }
        // A run of 0 steps has an open schedule; the schedule of a run in epochs follows from the
        // data.
        let has_steps = config.train.epochs == 0 && config.train.steps > 0;
        let has_warmup = config.schedule.kind != DecayKind::OneCycle;
        if !now.contains("schedule.warmup") && has_steps && has_warmup {
            let steps = (config.train.steps as f64 * 0.03).ceil() as usize;
            self.settings.push(("schedule.warmup", steps.into()));
        }
        Ok(self)
    }
}

/// Resolves the configuration of a new run that starts from a model. The model's keys are defaults:
/// keys of the file and the flags win.
///
/// # Errors
/// Returns the errors of [`read`].
pub fn read_from(
    model: &InitialModel,
    file: Option<(&Path, &str)>,
    overrides: &[Override],
) -> Result<Resolved, ConfigError> {
    let (resolved, reader) = resolve(None, Some(model), file, overrides, Ineffective::Refused)?;
    reader.require_one_length(resolved)
}

/// Resolves a configuration, in rising precedence: the saved one of a checkpoint (or the defaults),
/// the keys of the file, the keys of the flags; later ones win. Keys that are not set are derived
/// from the keys they depend on, see [`RunConfig::apply_derived_defaults`]. If a key of the
/// placement is set to another value than the saved one, the saved values of the other keys of the
/// placement are ignored, except for the devices.
pub fn read(
    saved: Option<&Resolved>,
    file: Option<(&Path, &str)>,
    overrides: &[Override],
) -> Result<Resolved, ConfigError> {
    let (resolved, reader) = resolve(saved, None, file, overrides, Ineffective::Refused)?;
    reader.require_one_length(resolved)
}

/// Resolves the complete configuration of a run like [`read`]: with both the epochs and the steps
/// computed from them.
pub(crate) fn read_complete(
    path: &Path,
    text: &str,
    overrides: &[Override],
) -> Result<Resolved, ConfigError> {
    Ok(resolve(None, None, Some((path, text)), overrides, Ineffective::Refused)?.0)
}

/// Treatment of keys that are set and have no effect with the values of other keys.
#[derive(Clone, Copy, PartialEq)]
enum Ineffective {
    Refused,
    /// They get their defaults.
    Reset,
}

fn resolve(
    saved: Option<&Resolved>,
    model: Option<&InitialModel>,
    file: Option<(&Path, &str)>,
    overrides: &[Override],
    ineffective: Ineffective,
) -> Result<(Resolved, ConfigReader), ConfigError> {
    let mut reader = ConfigReader {
        config: saved.map(|saved| saved.config.clone()).unwrap_or_default(),
        origins: BTreeMap::new(),
        before: saved.map(|saved| saved.typed.all()),
    };
    let table = match file {
        Some((path, text)) => Some(parsed(path, text)?),
        None => None,
    };
    let mut assignments = Vec::new();
    let of_model: Vec<(&InitialModel, &'static str, String)> = match model {
        Some(model) => {
            model.settings.iter().map(|(name, value)| (model, *name, value.to_string())).collect()
        }
        None => Vec::new(),
    };
    let model_values: Vec<_> =
        of_model.iter().map(|(_, _, text)| DeValue::parse(text).ok()).collect();
    for ((model, name, written), value) in of_model.iter().zip(&model_values) {
        assignments.push(Assignment {
            origin: Origin::Model(model.name.clone()),
            name: (*name).to_owned(),
            value: value.as_ref().map(|value| value.get_ref()),
            written: written.clone(),
        });
    }
    if let (Some((path, text)), Some(table)) = (file, &table) {
        assignments.extend(of_file(path, text, table)?);
    }
    let values: Vec<_> = overrides.iter().map(|one| DeValue::parse(&one.value).ok()).collect();
    for (index, (one, value)) in overrides.iter().zip(&values).enumerate() {
        assignments.push(of_flag(index, one, value.as_ref().map(|value| value.get_ref()))?);
    }
    reader.apply(assignments)?;
    let typed = reader.typed();
    let other_placement = match saved {
        Some(saved) => reader.config.other_placement(&saved.config, &typed),
        None => None,
    };
    if other_placement.is_some() {
        reader.config.forget_placement(&typed);
    }
    reader.config.apply_derived_defaults(&typed);
    if ineffective == Ineffective::Reset {
        reader.config.reset_ineffective(&TypedKeys::default());
    }
    if let Err(mut invalid) = reader.config.check() {
        let is_forgotten = |key: &&str| is_of_placement(key) && !typed.now.contains(*key);
        if let Some(set) = other_placement
            && invalid.keys.iter().any(is_forgotten)
        {
            let _ = write!(
                invalid.why,
                "; {set} decides the placement anew, so that its other keys are those of a new run"
            );
        }
        return Err(reader.attribute(invalid));
    }
    Ok((Resolved { config: reader.config.clone(), typed, other_placement }, reader))
}

/// Reads a configuration file.
pub fn load(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| {
        let is_there = path.is_dir() || error.kind() == std::io::ErrorKind::InvalidData;
        let advice = if is_there { what_to_type(path) } else { None };
        let why = advice.unwrap_or_else(|| error.to_string());
        ConfigError::Unreadable { path: path.into(), why }
    })
}

/// Returns the listing of all keys with their accepted values, defaults and meanings.
pub fn keys_help() -> String {
    let defaults = RunConfig::default();
    let mut text = String::new();
    for (section, doc) in SECTIONS {
        let gap = if text.is_empty() { "" } else { "\n" };
        text.push_str(&format!("{gap}[{section}]  {}\n", doc.trim()));
        if *section == KIND.section {
            text.push_str(&model_help());
            continue;
        }
        for key in defaults.keys().into_iter().filter(|key| key.section == *section) {
            text.push_str(&key_help(key, defaults.value(key.full_name)));
        }
    }
    text
}

fn model_help() -> String {
    let mut text = key_help(&KIND, None) + &key_help(&PRESET, None);
    for family in FAMILIES {
        let kind = KIND.full_name;
        text.push_str(&format!(
            "\n{kind} = \"{}\"  {};\n{:20}{} by default\n",
            family.name, family.doc, "", family.defaults
        ));
        let model = (family.new)();
        for key in model.keys() {
            text.push_str(&key_help(key, model.value(key.name)));
        }
    }
    text
}

/// Lines of the listing on a key with this default.
fn key_help(key: &Key, default: Option<Value>) -> String {
    let default = match (key.follows, default) {
        (Some(follows), _) => follows.to_owned(),
        (None, Some(value)) => value.to_string(),
        (None, None) => "none".to_owned(),
    };
    let accepts = in_lines(&key.accepts.to_string(), 78);
    // A long list of words leaves no room for the default on its line.
    let gap = if accepts.len() + default.len() < 68 { " " } else { "\n                    " };
    let mut text = format!(
        "  {:<17} {}\n{:20}{accepts};{gap}default: {default}\n",
        key.name,
        key.doc.trim(),
        ""
    );
    if let Some((other, words)) = key.only {
        let words = Constraint::OneOf(words);
        text.push_str(&format!("{:20}only with {other} = {words}\n", ""));
    }
    text
}

/// Breaks a text into lines of at most `columns` characters; all but the first are indented like
/// the listing.
fn in_lines(text: &str, columns: usize) -> String {
    let (mut lines, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > columns {
            let _ = write!(lines, "\n{:20}", "");
            column = 0;
        } else if column > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += width;
    }
    lines
}

/// Value that a file or a flag assigns to a name, which may not be a key.
struct Assignment<'a> {
    origin: Origin,
    /// Full name of the key.
    name: String,
    /// Value in TOML; `None` if it is the bare word `written`.
    value: Option<&'a DeValue<'a>>,
    /// Start of the value as written, for messages.
    written: String,
}

/// Keys that determine which other keys exist. They are applied first, regardless of their
/// position.
const SELECTING: [&str; 4] = ["data.path", "data.kind", KIND.full_name, PRESET.full_name];

/// Configuration under construction, with the origin of the last value of each key that was set.
struct ConfigReader {
    config: RunConfig,
    origins: BTreeMap<&'static str, Origin>,
    /// Keys set by earlier starts of a resumed run.
    before: Option<BTreeSet<&'static str>>,
}

impl ConfigReader {
    /// Sets keys; later assignments win.
    fn apply(&mut self, assignments: Vec<Assignment>) -> Result<(), ConfigError> {
        let is_of_model = |one: &&Assignment| matches!(one.origin, Origin::Model(_));
        let (model, others): (Vec<_>, Vec<_>) = assignments.iter().partition(is_of_model);
        if !model.is_empty() {
            require_kind_of_model(&model, &others)?;
        }
        let (selecting, others): (Vec<_>, Vec<_>) =
            assignments.into_iter().partition(|one| SELECTING.contains(&one.name.as_str()));
        for one in selecting {
            self.put(one)?;
        }
        let typed = self.typed();
        self.config.select_kinds(&typed);
        self.config.model.check_preset().map_err(|invalid| self.attribute(invalid))?;
        for one in others {
            self.put(one)?;
        }
        self.drop_ineffective();
        Ok(())
    }

    /// Resets keys of the initial model to their defaults if they have no effect with the other
    /// keys.
    fn drop_ineffective(&mut self) {
        let model = self.config.model.of_defaults();
        for key in self.config.keys() {
            let is_of_model = matches!(self.origins.get(key.full_name), Some(Origin::Model(_)));
            if is_of_model
                && !self.config.has_effect(key)
                && let Some(default) = model.value(key.name)
            {
                self.config.set(key.full_name, default);
                self.origins.remove(key.full_name);
            }
        }
    }

    fn put(&mut self, one: Assignment) -> Result<(), ConfigError> {
        let Assignment { origin, name, value, written } = one;
        let Some(key) = self.config.keys().into_iter().find(|key| key.full_name == name) else {
            return Err(self.no_key(origin, &name));
        };
        match accepted_value(key, value, &written) {
            Some(value) => {
                self.config.set(key.full_name, value);
                self.origins.insert(key.full_name, origin);
                Ok(())
            }
            None => {
                let got = match value {
                    Some(DeValue::Table(_)) => "a table",
                    Some(DeValue::Array(_)) if key.accepts.is_list() => &written,
                    Some(DeValue::Array(_)) => "an array",
                    _ if written.is_empty() => "nothing",
                    _ => &written,
                };
                let mut why = format!("expects {}, got {got}", key.accepts);
                if let Some(answer) = value_of_other_trainers(key.full_name, &written) {
                    let _ = write!(why, "; {answer}");
                }
                Err(ConfigError::Value { origin, name: key.full_name.into(), why })
            }
        }
    }

    /// Error on a key that this configuration does not have: it belongs to other families of
    /// models, or to none.
    fn no_key(&mut self, origin: Origin, name: &str) -> ConfigError {
        let Some(key) = known_key(name) else { return unknown_key(origin, name) };
        let mut kinds = Vec::new();
        for family in FAMILIES {
            if (family.new)().keys().iter().any(|known| known.full_name == name) {
                kinds.push(family.name);
            }
        }
        self.origins.insert(key.full_name, origin);
        self.attribute(self.config.without_effect(key.full_name, KIND.full_name, &kinds))
    }

    /// Returns `resolved`, unless it has two lengths.
    fn require_one_length(&self, resolved: Resolved) -> Result<Resolved, ConfigError> {
        let now = &resolved.typed.now;
        let epochs = resolved.config.train.epochs;
        if epochs > 0 && now.contains("train.epochs") && now.contains("train.steps") {
            return Err(self.attribute(ConstraintError {
                keys: vec!["train.epochs", "train.steps"],
                why: format!(
                    "= {epochs} and train.steps = {} are two lengths of the run; set one of them",
                    resolved.config.train.steps
                ),
            }));
        }
        Ok(resolved)
    }

    fn typed(&self) -> TypedKeys {
        TypedKeys { now: self.origins.keys().copied().collect(), before: self.before.clone() }
    }

    fn origin(&self, key: &str) -> Origin {
        let untyped = if self.before.is_some() { Origin::Saved } else { Origin::Default };
        self.origins.get(key).cloned().unwrap_or(untyped)
    }

    /// Attributes a contradiction to the place of the conflicting key that was set last, and names
    /// the contradicted lines of a file.
    fn attribute(&self, invalid: ConstraintError) -> ConfigError {
        let mut origin = self.origin(invalid.keys[0]);
        for key in &invalid.keys[1..] {
            let other = self.origin(key);
            origin = if other > origin { other } else { origin };
        }
        let mut why = invalid.why;
        for key in &invalid.keys {
            let other = self.origin(key);
            if matches!((&origin, &other), (Origin::Flag(..), Origin::File(..))) {
                let _ = write!(why, " ({key} is set in {other})");
            }
        }
        ConfigError::Value { origin, name: invalid.keys[0].into(), why }
    }
}

/// Refuses a kind of model other than the initial model's.
fn require_kind_of_model(model: &[&Assignment], others: &[&Assignment]) -> Result<(), ConfigError> {
    for key in [KIND, PRESET] {
        let value_of = |one: &Assignment| accepted_value(&key, one.value, &one.written);
        let of_model = model.iter().find(|one| one.name == key.full_name);
        let there = of_model.and_then(|one| value_of(one));
        for one in others.iter().filter(|one| one.name == key.full_name) {
            if there.is_some() && value_of(one) == there {
                continue;
            }
            let is = of_model.map_or("not set", |one| &one.written);
            let why = format!("is {is} in the model from which the run starts; leave it out");
            let (origin, name) = (one.origin.clone(), one.name.clone());
            return Err(ConfigError::Value { origin, name, why });
        }
    }
    Ok(())
}

fn parsed<'a>(path: &Path, text: &'a str) -> Result<toml::Spanned<DeTable<'a>>, ConfigError> {
    DeTable::parse(text).map_err(|error| {
        let span = error.span().unwrap_or(0..0);
        let what = excerpt(text, &span);
        let at = if what.is_empty() { String::new() } else { format!(" at {what}") };
        let origin = line(path, text, span.start);
        let mut why = format!("{}{at}", error.message());
        if let Some(advice) = what_to_type(path) {
            let _ = write!(why, "; {advice}");
        }
        ConfigError::Syntax { origin, why }
    })
}

/// Endings of files that are meant as configurations, whatever is wrong with them.
const CONFIGURATIONS: [&str; 4] = ["toml", "conf", "cfg", "ini"];
/// Endings of configurations of other programs.
const OTHER_CONFIGURATIONS: [&str; 3] = ["yaml", "yml", "json"];

/// Returns what to type for a path that is no configuration, by what it is: a run, a model, or else
/// data; `None` if it is meant as a configuration.
fn what_to_type(path: &Path) -> Option<String> {
    let typed = shell_word(&path.to_string_lossy());
    let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    // A checkpoint, or a run with some.
    let advice = if path.join("manifest.json").exists() || path.join("checkpoints").is_dir() {
        format!(
            "; to continue this run, type --resume {typed}, and to start another from its model, \
             --init {typed}"
        )
    } else if path.join("config.json").is_file() {
        format!("; to start from this model, type --init {typed}")
    } else if path.is_dir() {
        format!("; to use this directory as data, type --data {typed}")
    } else if CONFIGURATIONS.contains(&ending.as_str()) {
        return None;
    } else if OTHER_CONFIGURATIONS.contains(&ending.as_str()) {
        String::new()
    } else {
        format!("; to use this file as data, type --data {typed}")
    };
    Some(format!("a configuration is a TOML file{advice}"))
}

/// Assignments of a file, in the order of its text.
fn of_file<'a>(
    path: &Path,
    text: &str,
    root: &'a toml::Spanned<DeTable<'a>>,
) -> Result<Vec<Assignment<'a>>, ConfigError> {
    let mut assignments = Vec::new();
    for (name, section) in in_order(root.get_ref()) {
        let origin = line(path, text, name.span().start);
        let section_name = name.get_ref().as_ref();
        let known = SECTIONS.iter().any(|(known, _)| *known == section_name);
        let table = match section.get_ref() {
            DeValue::Table(table) if known => table,
            DeValue::Table(_) => return Err(unknown_section(origin, section_name)),
            _ => return Err(unknown_key(origin, section_name)),
        };
        for (key_name, value) in in_order(table) {
            assignments.push(Assignment {
                origin: line(path, text, key_name.span().start),
                name: format!("{section_name}.{}", key_name.get_ref()),
                value: Some(value.get_ref()),
                written: excerpt(text, &value.span()),
            });
        }
    }
    Ok(assignments)
}

/// Assignment of the nth flag. `value` is its value in TOML, if it parses as such.
fn of_flag<'a>(
    index: usize,
    one: &Override,
    value: Option<&'a DeValue<'a>>,
) -> Result<Assignment<'a>, ConfigError> {
    let origin = Origin::Flag(index, one.flag.clone());
    let name = with_section(&origin, &one.key)?.to_owned();
    let is_text = known_key(&name).is_some_and(|key| key.accepts == Constraint::Text);
    // A text key takes a value that is not a TOML string as a bare word, such as the index of a
    // device.
    let value = value.filter(|value| !is_text || matches!(value, DeValue::String(_)));
    Ok(Assignment { origin, name, value, written: one.value.clone() })
}

fn line(path: &Path, text: &str, offset: usize) -> Origin {
    let before = &text.as_bytes()[..offset.min(text.len())];
    Origin::File(path.into(), 1 + before.iter().filter(|byte| **byte == b'\n').count())
}

/// Entries of a table in the order of the text, so that the first error is reported.
fn in_order<'t, 'i>(
    table: &'t DeTable<'i>,
) -> Vec<(&'t toml::Spanned<toml::de::DeString<'i>>, &'t toml::Spanned<DeValue<'i>>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    entries
}

fn real(value: &DeValue) -> Option<f64> {
    match value {
        DeValue::Float(number) => number.as_str().parse().ok(),
        DeValue::Integer(number) => Some(whole(number)? as f64),
        _ => None,
    }
}

/// Converts a written value to the type of the key; `None` if the key does not accept it.
fn accepted_value(key: &Key, value: Option<&DeValue>, written: &str) -> Option<Value> {
    let value = match value {
        // Without brackets, as in a flag: 4,4,4.
        None if key.accepts == Constraint::IntList => {
            let mut counts = Vec::new();
            for count in written.split(',') {
                counts.push(count.trim().parse().ok()?);
            }
            Value::IntList(counts)
        }
        Some(DeValue::Integer(count)) if key.accepts == Constraint::IntList => {
            Value::IntList(vec![whole(count)?.try_into().ok()?])
        }
        Some(DeValue::Array(items)) if key.accepts == Constraint::IntList => {
            let mut counts = Vec::new();
            for item in items.iter() {
                let DeValue::Integer(count) = item.get_ref() else { return None };
                counts.push(whole(count)?.try_into().ok()?);
            }
            Value::IntList(counts)
        }
        None if key.accepts == Constraint::RealList => {
            let mut reals = Vec::new();
            for real in written.split(',') {
                reals.push(real.trim().parse().ok()?);
            }
            Value::RealList(reals)
        }
        Some(one @ (DeValue::Integer(_) | DeValue::Float(_)))
            if key.accepts == Constraint::RealList =>
        {
            Value::RealList(vec![real(one)?])
        }
        Some(DeValue::Array(items)) if key.accepts == Constraint::RealList => {
            let mut reals = Vec::new();
            for item in items.iter() {
                reals.push(real(item.get_ref())?);
            }
            Value::RealList(reals)
        }
        None if key.accepts == Constraint::TextList => {
            Value::TextList(written.split(',').map(|text| text.trim().to_owned()).collect())
        }
        Some(DeValue::String(text)) if key.accepts == Constraint::TextList => {
            Value::TextList(vec![text.clone().into_owned()])
        }
        Some(DeValue::Array(items)) if key.accepts == Constraint::TextList => {
            let mut texts = Vec::new();
            for item in items.iter() {
                let DeValue::String(text) = item.get_ref() else { return None };
                texts.push(text.clone().into_owned());
            }
            Value::TextList(texts)
        }
        None => Value::Text(written.to_owned()),
        Some(DeValue::String(text)) => Value::Text(text.clone().into_owned()),
        Some(DeValue::Boolean(flag)) => Value::Flag(*flag),
        Some(DeValue::Integer(number)) => Value::Whole(whole(number)?),
        Some(number @ DeValue::Float(_)) => Value::Real(real(number)?),
        Some(DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_)) => return None,
    };
    key.accepts.check(value)
}

fn whole(number: &toml::de::DeInteger) -> Option<i128> {
    i128::from_str_radix(number.as_str(), number.radix()).ok()
}

/// First line of a span of the text, cut to 40 characters.
fn excerpt(text: &str, span: &Range<usize>) -> String {
    let line = text.get(span.clone()).unwrap_or_default().lines().next().unwrap_or_default();
    match line.char_indices().nth(40) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod resumed;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::schema::{Balance, MicroBatchSize, OptimKind};
    use crate::config::schema::{RENAMED, TokenizerSource, known_keys};
    use crate::families::TrainedOn;
    use potluck_data::TokenizerKind;
    use potluck_parallel::PipelineSchedule;
    use proptest::prelude::*;

    fn overrides(sets: &[&str]) -> Vec<Override> {
        sets.iter().map(|set| Override::set(set).unwrap()).collect()
    }

    /// Resolves a file, called `run.toml`, and `--set` flags.
    fn typed(text: &str, sets: &[&str]) -> Result<Resolved, ConfigError> {
        read(None, Some((Path::new("run.toml"), text)), &overrides(sets))
    }

    fn config(text: &str, sets: &[&str]) -> RunConfig {
        typed(text, sets).unwrap_or_else(|error| panic!("{error}")).config
    }

    fn refused(text: &str, sets: &[&str], expected: &str) {
        match typed(text, sets) {
            Err(error) => assert_eq!(error.to_string(), expected),
            Ok(_) => panic!("accepted, but expected: {expected}"),
        }
    }

    #[test]
    fn nothing_typed_gives_the_defaults() {
        let resolved = read(None, None, &[]).unwrap();
        assert_eq!(resolved.config, RunConfig::default());
        assert_eq!(resolved.typed, TypedKeys::default());
        assert_eq!(config("", &[]), RunConfig::default());
    }

    #[test]
    fn files_set_keys_and_flags_override_them() {
        let text = "[model]\nwidth = 64 # comment\n[optim]\nlr = 1\n[train]\nsteps = 1_000";
        let sets = ["train.steps=20", "train.steps = 30", "model.activation=relu"];
        let resolved = typed(text, &sets).unwrap();
        assert_eq!(resolved.config.value("model.width"), Some(64.into()));
        assert_eq!(resolved.config.optim.lr, 1.0);
        assert_eq!(resolved.config.train.steps, 30);
        assert_eq!(resolved.config.value("model.activation"), Some("relu".into()));
        let keys = ["model.activation", "model.width", "optim.lr", "train.steps"];
        assert_eq!(resolved.typed.now, keys.into());
    }

    #[test]
    fn former_names_are_refused_with_the_present_one() {
        for (before, now) in RENAMED {
            assert!(known_key(before).is_none(), "{before}");
            assert!(known_key(now).is_some(), "{now}");
            let hint = format!("there is no key {before}; it is called {now} now");
            refused("", &[&format!("{before}=1")], &format!("--set {before}=1: {hint}"));
            let (section, name) = before.split_once('.').unwrap();
            refused(&format!("[{section}]\n{name} = 1"), &[], &format!("run.toml:2: {hint}"));
        }
        // A short name that is still a key now belongs to another section.
        assert_eq!(config("", &["hash_every=7"]).faults.hash_every, 7);
        refused(
            "",
            &["chunks=2"],
            "--set chunks=2: there is no key chunks; it is called parallel.virtual_stages now",
        );
    }

    #[test]
    fn a_flag_may_leave_out_the_section_where_only_one_has_the_key() {
        assert_eq!(config("", &["lr=0.5", "min_lr=0"]).optim.lr, 0.5);
        assert_eq!(typed("", &["batch = 7"]).unwrap().typed.now, ["train.batch"].into());
        let several = "there are model.kind, data.kind, optim.kind, schedule.kind";
        refused("", &["kind=sgd"], &format!("--set kind=sgd: there is no key kind; {several}"));
        refused(
            "",
            &["lr=x"],
            "--set lr=x: optim.lr expects a number above 0, at most 1000, got x",
        );
        refused("", &["rl=1"], "--set rl=1: there is no key rl; did you mean optim.lr?");
        // Files have sections.
        refused("lr = 1", &[], "run.toml:1: there is no key lr; did you mean optim.lr?");
    }

    #[test]
    fn dotted_and_inline_tables_are_the_same_keys() {
        assert_eq!(config("train.steps = 7\noptim = { kind = \"sgd\" }", &[]).train.steps, 7);
        assert_eq!(config("optim = { kind = \"sgd\" }", &[]).optim.kind, OptimKind::Sgd);
        assert_eq!(config("\u{feff}[train]\r\nsteps = 0x10\r\n", &[]).train.steps, 16);
        assert_eq!(
            config("[data]\n'tokenizer' = 'byte'", &[]).data.tokenizer,
            TokenizerSource::Kind(TokenizerKind::Byte)
        );
    }

    #[test]
    fn syntax_errors_name_the_line() {
        refused("[train]\nsteps 5", &[], "run.toml:2: key with no value, expected `=`");
        refused("[train]\nsteps = 5\nsteps = 6", &[], "run.toml:3: duplicate key at steps");
        refused("[train]\n\n[train]", &[], "run.toml:3: duplicate key at train");
        refused(
            "[optim]\nkind = sgd",
            &[],
            "run.toml:2: string values must be quoted, expected literal string at sgd",
        );
    }

    #[test]
    fn what_is_no_configuration_comes_with_the_flag_that_takes_it() {
        let directory = tempfile::tempdir().unwrap();
        let said = |name: &str, content: &[u8]| {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, content).unwrap();
            let read = load(&path).and_then(|text| read(None, Some((&path, &text)), &[]));
            let said = read.unwrap_err().to_string();
            said.replace(&directory.path().display().to_string(), "DIR")
        };
        let as_data = "a configuration is a TOML file; to use this file as data, type --data DIR/";
        for name in ["text.txt", "t.csv", "names"] {
            let told = said(name, b"to be, or not");
            assert!(told.ends_with(&format!("{as_data}{name}")), "{told}");
        }
        let binary = said("t.npy", b"\x93NUMPY");
        assert_eq!(binary, format!("DIR/t.npy: cannot be read: {as_data}t.npy"));
        let own = said("run.toml", b"\xff");
        assert!(own.contains("UTF-8") && !own.contains("a configuration is"), "{own}");
        for name in ["run.TOML", "run.conf", "run.ini"] {
            let told = said(name, b"to be, or not");
            assert!(!told.contains("a configuration is"), "{told}");
        }
        for name in ["run.yaml", "run.yml", "run.json"] {
            let told = said(name, b"{lr: 1}");
            assert!(told.ends_with("; a configuration is a TOML file"), "{told}");
        }

        said("model/config.json", b"{");
        said("pets/cat/1.png", b"x");
        std::fs::create_dir_all(directory.path().join("run/checkpoints")).unwrap();
        let of = |name: &str| {
            let said = load(&directory.path().join(name)).unwrap_err().to_string();
            said.replace(&directory.path().display().to_string(), "DIR")
        };
        let not = "cannot be read: a configuration is a TOML file;";
        let model = format!("DIR/model: {not} to start from this model, type --init DIR/model");
        assert_eq!(of("model"), model);
        let data = format!("DIR/pets: {not} to use this directory as data, type --data DIR/pets");
        assert_eq!(of("pets"), data);
        assert_eq!(
            of("run"),
            format!(
                "DIR/run: {not} to continue this run, type --resume DIR/run, and to start another \
                 from its model, --init DIR/run"
            )
        );
        assert!(!of("none").contains("a configuration is"));
    }

    #[test]
    fn unknown_names_come_with_the_nearest_known_one() {
        let unknown = |text: &str, rest: &str| {
            refused(text, &[], &format!("run.toml:2: there is no {rest}"));
        };
        unknown("\ntrain.stpes = 5", "key train.stpes; did you mean train.steps?");
        unknown(
            "\ntrain.micro-batch = 5",
            "key train.micro-batch; it is called train.micro_batch_size now",
        );
        unknown("\ntrain.lr = 5", "key train.lr; did you mean optim.lr?");
        unknown("\nlr = 5", "key lr; did you mean optim.lr?");
    }

    #[test]
    fn unknown_names_far_from_all_list_the_nearest() {
        refused("[tarin]", &[], "run.toml:1: there is no section [tarin]; did you mean [train]?");
        refused(
            "[wandb]",
            &[],
            "run.toml:1: there is no section [wandb]; \
             there are [model], [data], [train], [parallel], [faults], [optim], [schedule], \
             [metrics]",
        );
        refused(
            "[data]\nseparator = 1",
            &[],
            "run.toml:2: there is no key data.separator; the nearest are data.target, data.path, \
             data.val_path; `potluck train --explain keys` lists all",
        );
        refused(
            "",
            &["accumulate=4"],
            "--set accumulate=4: there is no key accumulate; gradients accumulate over \
             train.batch / train.micro_batch_size passes: set train.batch (--batch) to the \
             samples of a step, and train.micro_batch_size (--micro-batch) to those that run at \
             once",
        );
        refused(
            "[train]\nprecision = \"bf16\"",
            &[],
            "run.toml:2: train.precision expects \"f32\" or \"mixed\", got \"bf16\"; \"mixed\" \
             multiplies in f16 and sums in f32",
        );
        refused("train = 5", &[], "run.toml:1: there is no key train; train is a section: [train]");
        refused(
            "",
            &["train=5"],
            "--set train=5: there is no key train; train is a section: [train]",
        );
        refused(
            "[[train]]\nsteps = 5",
            &[],
            "run.toml:1: there is no key train; train is a section: [train]",
        );
    }

    #[test]
    fn wrong_types_and_values_out_of_range_say_what_is_accepted() {
        let value = |text: &str, rest: &str| refused(text, &[], &format!("run.toml:2: {rest}"));
        let layers = "model.layers expects a whole number from 1 to 1024, got";
        value("\nmodel.layers = \"12\"", &format!("{layers} \"12\""));
        value("\nmodel.layers = 1.5", &format!("{layers} 1.5"));
        value("\nmodel.layers = -4", &format!("{layers} -4"));
        value("\nmodel.layers = 0", &format!("{layers} 0"));
        value("\nmodel.layers = 1_000_000_000_000", &format!("{layers} 1_000_000_000_000"));
        let digits = "9".repeat(60);
        value(&format!("\nmodel.layers = {digits}"), &format!("{layers} {}...", &digits[..40]));
        value("\nmodel.layers = [1]", &format!("{layers} an array"));
        value("\n[model.layers]", &format!("{layers} a table"));
        value("\nmodel.layers = 2001-01-01", &format!("{layers} 2001-01-01"));
        let dropout = "model.dropout expects a number from 0 to below 1, got";
        value("\nmodel.dropout = 1", &format!("{dropout} 1"));
        value("\nmodel.dropout = nan", &format!("{dropout} nan"));
        let kinds = "model.kind expects \"gpt\", \"llama\", \"rnn\", \"mlp\", \"cnn\" or \
                     \"resnet\", got \"vae\"";
        value("\nmodel.kind = \"vae\"", kinds);
        let kinds = "optim.kind expects \"adamw\", \"sgd\", \"adam\", \"rmsprop\" or \"lion\", got";
        value("\noptim.kind = \"adamax\"", &format!("{kinds} \"adamax\""));
        let batch = "train.batch expects a whole number from 1 to 1048576, got 0";
        value("\ntrain.batch = 0", batch);
        value("\nmodel.bias = 1", "model.bias expects true or false, got 1");
        let path = "data.path expects a string that is not empty, got \"\"";
        value("\ndata.path = \"\"", path);
        let keep = "train.checkpoint_keep expects a whole number from 2 to 1000000, got 1";
        value("\ntrain.checkpoint_keep = 1", keep);
    }

    #[test]
    fn errors_of_flags_name_the_flag() {
        let steps = "train.steps expects a whole number from 0 to 1000000000, got";
        refused("", &["train.steps=x"], &format!("--set train.steps=x: {steps} x"));
        let dropout = "model.dropout expects a number from 0 to below 1, got 1";
        refused("", &["model.dropout=1"], &format!("--set model.dropout=1: {dropout}"));
        refused("", &["train.steps="], &format!("--set train.steps=: {steps} nothing"));
        refused("", &["train.steps=5\ny=3"], &format!("--set train.steps=5\ny=3: {steps} 5\ny=3"));
        let named = read(None, None, &[Override::named("--steps", "train.steps", "-1")]);
        assert_eq!(named.unwrap_err().to_string(), format!("--steps -1: {steps} -1"));
        let key = "--set train.stpes=5: there is no key train.stpes; did you mean train.steps?";
        refused("", &["train.stpes=5"], key);
        let shape = "--set steps: expects key=value, such as --set train.steps=500";
        assert_eq!(Override::set("steps").unwrap_err().to_string(), shape);
    }

    #[test]
    fn contradictions_name_the_place_that_was_typed_last_and_the_line_that_it_contradicts() {
        let heads = "model.heads expects a number that divides model.width = 130, got 4";
        refused("[model]\nheads = 4\nwidth = 130", &[], &format!("run.toml:3: {heads}"));
        let of_flag = format!("--set model.heads=4: {heads} (model.width is set in run.toml:1)");
        refused("model.width = 130", &["model.heads=4"], &of_flag);
        let micro = "train.micro_batch_size expects at most train.batch = 4, got 8";
        let sets = ["train.batch=4"];
        let line = "(train.micro_batch_size is set in run.toml:1)";
        let both = format!("--set train.batch=4: {micro} {line}");
        refused("train.micro_batch_size = 8", &sets, &both);
    }

    #[test]
    fn keys_that_follow_others_do_so_until_they_are_typed() {
        let follow = config("", &["train.batch=7", "train.steps=30", "optim.lr=0.5"]);
        assert_eq!(follow.train.micro_batch_size, MicroBatchSize::Auto);
        assert_eq!(follow.schedule.decay_steps, 30);
        assert_eq!(follow.schedule.warmup, 3);
        assert_eq!(follow.schedule.min_lr, 0.05);
        let typed =
            "[train]\nbatch = 7\nmicro_batch_size = 3\n[schedule]\ndecay_steps = 9\nwarmup = 90";
        let typed = config(typed, &["train.steps=30"]);
        assert_eq!(typed.train.micro_batch_size, MicroBatchSize::Samples(3));
        assert_eq!(typed.schedule.decay_steps, 9);
        assert_eq!(typed.schedule.warmup, 90);
        let momentum = |set: &[&str]| config("", set).optim.momentum;
        assert_eq!((momentum(&["optim.kind=rmsprop"]), momentum(&["optim.kind=lion"])), (0.0, 0.9));
        assert_eq!(momentum(&["optim.kind=rmsprop", "momentum=0.5"]), 0.5);
        let gamma = |kind: &str| config("", &[&format!("schedule.kind={kind}")]).schedule.gamma;
        assert_eq!((gamma("step"), gamma("exponential")), (0.1, 0.999));
    }

    #[test]
    fn keys_of_other_optimizers_and_schedules_are_refused() {
        for (kind, key, only) in [
            ("optim.kind=adamw", "optim.momentum=0.5", "only with \"sgd\" or \"rmsprop\""),
            ("optim.kind=lion", "optim.momentum=0.5", "only with \"sgd\" or \"rmsprop\""),
            ("optim.kind=sgd", "optim.beta1=0.5", "only with \"adamw\", \"adam\" or \"lion\""),
            ("optim.kind=rmsprop", "optim.beta2=0.5", "only with \"adamw\", \"adam\" or \"lion\""),
            ("optim.kind=lion", "optim.eps=1e-6", "only with \"adamw\", \"adam\" or \"rmsprop\""),
            ("schedule.kind=constant", "schedule.min_lr=1e-6", "only with \"cosine\", \"linear\""),
            ("schedule.kind=one-cycle", "schedule.min_lr=1e-6", "or \"wsd\""),
            ("schedule.kind=cosine", "schedule.cooldown_steps=9", "only with \"wsd\""),
            ("schedule.kind=one-cycle", "schedule.warmup=9", "whose rise is schedule.pct_start"),
        ] {
            let error = typed("", &[kind, key]).expect_err(key).to_string();
            let (name, _) = key.split_once('=').unwrap();
            let (of, word) = kind.split_once('=').unwrap();
            assert!(error.starts_with(&format!("--set {key}: {name} ")), "{error}");
            let no_effect = format!("has no effect with {of} = \"{word}\"");
            assert!(error.contains(&no_effect) && error.contains(only), "{error}");
            assert!(error.contains("; leave it out"), "{error}");
        }
        let cycle = config("", &["schedule.kind=one-cycle", "schedule.warmup=0"]);
        assert_eq!(cycle, config("", &["schedule.kind=one-cycle"]));
        assert_eq!(config("", &["schedule.kind=one-cycle", "train.epochs=2"]).schedule.warmup, 0);
        let constant = config("", &["schedule.kind=constant", "optim.lr=1e-5"]);
        assert_eq!(constant.schedule.min_lr, RunConfig::default().schedule.min_lr);
    }

    #[test]
    fn a_path_means_text_and_the_builtin_corpus_has_none() {
        assert_eq!(config("data.path = 'a.txt'", &[]).data.kind, DataKind::Text);
        let data = |path: &str| Override::data(Path::new(path)).unwrap();
        let file = Some((Path::new("run.toml"), "data.kind = 'builtin'"));
        for path in ["a b.txt", "12", "true", "\"quoted\"", "C:\\new\\table.txt"] {
            let read = read(None, file, &data(path)).unwrap().config;
            assert_eq!((read.data.kind, read.data.path), (DataKind::Text, Some(path.into())));
        }
        let both = "data.path conflicts with data.kind = \"builtin\"; leave one of them out";
        let text = "[data]\npath = 'a'\nkind = 'builtin'";
        refused(text, &[], &format!("run.toml:3: {both}"));
        let flag = "data.kind=builtin";
        let line = "(data.path is set in run.toml:1)";
        refused("data.path = 'a.txt'", &[flag], &format!("--set {flag}: {both} {line}"));
        let none = "run.toml:1: data.kind = \"text\" expects a data.path; give --data PATH";
        refused("data.kind = 'text'", &[], none);
    }

    #[test]
    fn shares_are_a_list_and_mean_a_fixed_balance() {
        let shares = |text: &str, sets: &[&str]| {
            let parallel = config(text, sets).parallel;
            (parallel.balance == Balance::Fixed).then_some(parallel.shares)
        };
        let file = "[parallel]\nshares = [4, # two\n 0x4, 4]";
        assert_eq!(shares(file, &[]), Some(vec![4, 4, 4]));
        for set in ["shares=[2,2,8]", "shares=2,2,8", "shares = 2, 2,8"] {
            assert_eq!(shares(file, &[&format!("parallel.{set}")]), Some(vec![2, 2, 8]), "{set}");
        }
        assert_eq!(shares("", &["parallel.shares=12"]), Some(vec![12]));
        assert_eq!(shares(file, &["parallel.shares=[]"]), Some(vec![]), "evenly");
        assert_eq!(shares("", &[]), None);
    }

    #[test]
    fn shares_that_cannot_be_are_refused_with_line_and_key() {
        let list = "expects a list of whole numbers from 1 on, such as [32, 32], got";
        for (value, got) in [
            ("[4, 0, 8]", "[4, 0, 8]"),
            ("[4, 4.0, 4]", "[4, 4.0, 4]"),
            ("[[4], 8]", "[[4], 8]"),
            ("'4,4,4'", "'4,4,4'"),
            ("{ a = 4 }", "a table"),
            ("-12", "-12"),
        ] {
            let text = format!("[parallel]\nshares = {value}");
            refused(&text, &[], &format!("run.toml:2: parallel.shares {list} {got}"));
        }
        for set in ["parallel.shares=4,,8", "parallel.shares=4,x", "parallel.shares=4,"] {
            let got = set.split_once('=').unwrap().1;
            refused("", &[set], &format!("--set {set}: parallel.shares {list} {got}"));
        }
        let empty = format!("--set parallel.shares=: parallel.shares {list} nothing");
        refused("", &["parallel.shares="], &empty);
        let sum = "parallel.shares expects numbers with the sum train.batch = 12, got [4, 4], \
                   whose sum is 8";
        refused("\n[parallel]\nshares = [4, 4]", &[], &format!("run.toml:3: {sum}"));
        let set = ["train.batch=12"];
        let line = "(parallel.shares is set in run.toml:1)";
        let of_flag = format!("--set train.batch=12: {sum} {line}");
        refused("parallel.shares = [4, 4]", &set, &of_flag);
        let both = "parallel.shares conflicts with parallel.balance = \"measured\"; leave one of \
                    them out";
        let text = "[parallel]\nshares = [12]\nbalance = 'measured'";
        refused(text, &[], &format!("run.toml:3: {both}"));
        let flag = "parallel.balance=measured";
        refused("parallel.shares = [12]", &[flag], &format!("--set {flag}: {both} {line}"));
    }

    #[test]
    fn pipelines_that_cannot_be_are_refused_with_line_flag_and_key() {
        let file = |stages: &str, why: &str| {
            let text = format!("[parallel]\npipeline_stages = 2\n\nblocks_per_stage = {stages}");
            refused(&text, &[], &format!("run.toml:4: parallel.blocks_per_stage expects {why}"));
        };
        let count = "2 numbers of blocks, one for each stage of parallel.pipeline_stages = 2, got";
        file("[1, 1, 1]", &format!("{count} [1, 1, 1]"));
        file("[3, 0]", "a list of whole numbers from 1 on, such as [32, 32], got [3, 0]");

        let flags = |typed: &[(&'static str, &'static str, &str)], sets: &[&str], why: &str| {
            let named = typed.iter().map(|(flag, key, value)| Override::named(flag, key, *value));
            let all: Vec<Override> = named.chain(overrides(sets)).collect();
            let error = read(None, None, &all).unwrap_err().to_string();
            assert!(error.starts_with(why), "'{why}' is not the beginning of: {error}");
        };
        let pipeline = |value| ("--pipeline", "parallel.pipeline_stages", value);
        let schedule = |value| ("--schedule", "parallel.schedule", value);
        let each = "--set blocks_per_stage=1,2: parallel.blocks_per_stage expects 4 numbers of \
                    blocks, one for each model chunk of parallel.pipeline_stages = 2 and \
                    parallel.virtual_stages = 2, got [1, 2]";
        let interleaved = [pipeline("2"), schedule("interleaved")];
        flags(&interleaved, &["virtual_stages=2", "blocks_per_stage=1,2"], each);
        let chunks = "--set virtual_stages=2: parallel.virtual_stages expects 1 with \
                      parallel.schedule = \"1f1b\", got 2; set parallel.schedule to \
                      \"interleaved\"";
        flags(&[pipeline("2")], &["virtual_stages=2"], chunks);
        let several = "--set virtual_stages=1: parallel.schedule = \"interleaved\" needs several \
                       model chunks per device, got parallel.virtual_stages = 1; set \
                       parallel.virtual_stages to 2 or more, or leave it out";
        flags(&interleaved, &["virtual_stages=1"], several);
        let words = "--schedule pipedream: parallel.schedule expects \"1f1b\", \"gpipe\", \
                     \"interleaved\" or \"zero-bubble\", got pipedream";
        flags(&[pipeline("2"), schedule("pipedream")], &[], words);
        for value in ["0", "65"] {
            let range = "parallel.pipeline_stages expects a whole number from 1 to 64, got";
            flags(&[pipeline(value)], &[], &format!("--pipeline {value}: {range} {value}"));
        }
        let alone = "has no effect without a pipeline; set parallel.pipeline_stages to 2 or more";
        let gpipe = format!("--schedule gpipe: parallel.schedule = \"gpipe\" {alone}");
        flags(&[schedule("gpipe")], &[], &gpipe);
        for (set, given) in [
            ("virtual_stages=2", "parallel.virtual_stages = 2"),
            ("blocks_per_stage=3", "parallel.blocks_per_stage = [3]"),
        ] {
            flags(&[], &[set], &format!("--set {set}: {given} {alone}"));
        }
    }

    #[test]
    fn the_listing_names_every_key_within_the_columns() {
        let help = keys_help();
        for key in known_keys() {
            assert!(help.contains(&format!("\n  {} ", key.name)), "{} is missing", key.full_name);
        }
        for line in help.lines() {
            assert!(line.chars().count() <= 100, "too long: {line}");
        }
        assert!(help.contains("default: as train.steps"));
    }

    #[test]
    fn the_examples_are_read() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/configs");
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let text = load(&path).unwrap();
            read(None, Some((&path, &text)), &[]).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    #[test]
    fn the_examples_of_language_models_have_the_published_sizes_and_half_a_million_tokens() {
        let gpt2 = include_str!("../../../examples/configs/gpt2-124m.toml");
        let llama = include_str!("../../../examples/configs/llama-135m.toml");
        for (text, kind, parameters) in [(gpt2, "gpt", 124_439_808), (llama, "llama", 134_515_008)]
        {
            let config = config(text, &[]);
            assert_eq!(config.value(KIND.full_name), Some(kind.into()));
            let data = crate::families::DataShape::Tokens { vocabulary: 40_000 };
            assert_eq!(config.model.graph(&data).unwrap().parameter_count(), parameters);
            let tokens = config.train.batch * config.model.context().unwrap();
            assert_eq!((tokens, config.schedule.warmup), (1 << 19, 2000));
            assert_eq!(config.schedule.decay_steps, config.train.steps);
            assert_eq!((config.optim.beta2, config.optim.weight_decay), (0.95, 0.1));
        }
    }

    #[test]
    fn the_example_of_the_page_on_language_models_is_read() {
        let page = include_str!("../../../docs/language-models.md");
        let text =
            page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let config = config(text, &[]);
        assert_eq!(config.value("model.kv_heads"), Some(2.into()));
        assert_eq!(config.optim.lr, 8.4e-4, "as the page says");
    }

    #[test]
    fn keys_of_models_are_those_of_the_kind_wherever_it_is_set() {
        let value = |text: &str, sets: &[&str], key: &str| config(text, sets).value(key);
        // Also if the kind follows the key, or is set by a flag.
        let file = "[model]\ncell = 'gru'\nkind = 'rnn'";
        assert_eq!(value(file, &[], "model.cell"), Some("gru".into()));
        assert_eq!(
            value("model.cell = 'gru'", &["model.kind=rnn"], "model.width"),
            Some(128.into())
        );
        assert_eq!(
            value("model.kind = 'rnn'", &["model.kind=gpt"], "model.width"),
            Some(64.into())
        );
        let samples = "[model]\nhidden = [7]\n[data]\npath = 'a'\nkind = 'npy'";
        assert_eq!(value(samples, &[], "model.kind"), Some("mlp".into()));
        assert_eq!(
            value(samples, &["model.kind=cnn"], "model.hidden"),
            Some(Value::IntList(vec![7]))
        );
    }

    #[test]
    fn a_preset_selects_its_kind_and_gives_defaults_to_its_keys() {
        let gpt2 = config("", &["preset=gpt2"]);
        for (key, value) in [
            ("model.kind", "\"gpt\""),
            ("model.preset", "\"gpt2\""),
            ("model.layers", "12"),
            ("model.width", "768"),
            ("model.context", "1024"),
            ("model.positions", "1024"),
            ("model.vocabulary", "50257"),
            ("model.bias", "true"),
            ("model.activation", "\"gelu_tanh\""),
            ("optim.lr", "0.00062"),
            ("train.eval_samples", "64"),
        ] {
            assert_eq!(gpt2.value(key).unwrap().to_string(), value, "{key}");
        }
        let text = "[model]\nlayers = 2\npreset = 'gpt2-medium'\ncontext = 32";
        let changed = config(text, &["model.bias=false"]);
        let value = |key: &str| changed.value(key).unwrap().to_string();
        assert_eq!([value("model.layers"), value("model.heads")], ["2", "16"]);
        assert_eq!([value("model.context"), value("model.bias")], ["32", "false"]);
        // The last one wins.
        let xl = config(text, &["preset=gpt2-xl"]);
        assert_eq!(xl.value("model.width"), Some(1600.into()));
    }

    #[test]
    fn a_preset_that_contradicts_other_keys_is_refused() {
        let kind = "model.preset = \"gpt2\" is a model of model.kind = \"gpt\", not of \"rnn\"; \
                    leave one of them out";
        let text = "[model]\nkind = 'rnn'\npreset = 'gpt2'\ncell = 'gru'";
        refused(text, &[], &format!("run.toml:3: {kind}"));
        let flag = format!("--set model.kind=rnn: {kind} (model.preset is set in run.toml:1)");
        refused("model.preset = 'gpt2'", &["model.kind=rnn"], &flag);
        let names = PRESET.accepts.to_string();
        let unknown = format!("run.toml:1: model.preset expects {names}, got \"gpt3\"");
        refused("model.preset = \"gpt3\"", &[], &unknown);
        let heads =
            "--set heads=7: model.heads expects a number that divides model.width = 768, got 7";
        refused("", &["preset=gpt2", "heads=7"], heads);
        let positions = "model.positions expects at least model.context = 2000, got 1024";
        let flag = format!("--set context=2000: {positions}");
        refused("", &["preset=gpt2", "context=2000"], &flag);
        let samples = "[data]\npath = 'a'\nkind = 'npy'";
        let data = "model.kind expects \"mlp\", \"cnn\" or \"resnet\" for samples (data.kind = \
                    \"npy\")";
        let flag = format!("run.toml:3: {data}");
        refused(samples, &["preset=gpt2"], &flag);
    }

    #[test]
    fn scalings_of_rotary_positions_have_keys_of_their_own() {
        let supported = "\"none\", \"linear\" or \"llama3\"";
        for scaling in ["yarn", "dynamic", "longrope"] {
            let set = format!("rope_scaling={scaling}");
            let got = format!("--set {set}: model.rope_scaling expects {supported}, got {scaling}");
            refused("model.kind = 'llama'", &[&set], &got);
        }
        let llama = ["model.kind=llama", "rope_scaling=linear", "rope_factor=2"];
        assert_eq!(config("", &llama).value("model.rope_factor"), Some(2.0.into()));
        let low = "model.rope_low_freq has no effect with model.rope_scaling = \"linear\", only \
                   with \"llama3\"; leave it out";
        let sets = ["rope_scaling=linear", "rope_low_freq=2"];
        refused("model.kind = 'llama'", &sets, &format!("--set rope_low_freq=2: {low}"));
        let low = low.replace("linear", "none");
        refused("model.kind = 'llama'", &sets[1..], &format!("--set rope_low_freq=2: {low}"));
        // Values of a preset without an effect are not refused, since the user did not set them.
        let plain = config("", &["preset=llama-3.2-1b", "rope_scaling=none"]);
        assert!(!plain.to_toml().contains("rope_factor"), "{}", plain.to_toml());
        let text = config("", &["preset=llama-3.2-1b"]).to_toml();
        assert!(text.contains("\nrope_factor = 32.0\n"), "{text}");
    }

    #[test]
    fn keys_of_other_kinds_of_models_are_refused() {
        let of = |kind: &str, kinds: &str| {
            format!("has no effect with model.kind = \"{kind}\", only with {kinds}; leave it out")
        };
        let hidden = format!("model.hidden {}", of("gpt", "\"mlp\" or \"cnn\""));
        refused("[model]\nlayers = 2\nhidden = [8]", &[], &format!("run.toml:3: {hidden}"));
        refused("", &["hidden=8"], &format!("--set hidden=8: {hidden}"));
        // Also with its default value.
        let heads = format!("model.heads {}", of("rnn", "\"gpt\" or \"llama\""));
        refused("[model]\nheads = 4\nkind = 'rnn'", &[], &format!("run.toml:3: {heads}"));
        let line = "(model.heads is set in run.toml:1)";
        let flag = format!("--set model.kind=rnn: {heads} {line}");
        refused("model.heads = 4", &["model.kind=rnn"], &flag);
        // For any value.
        refused(
            "",
            &["model.cell=2"],
            &format!("--set model.cell=2: model.cell {}", of("gpt", "\"rnn\"")),
        );
        let near = "run.toml:1: there is no key model.hiden; did you mean model.hidden?";
        refused("model.hiden = [8]", &[], near);
    }

    /// The keys of the initial model count as set neither by a file nor by a flag.
    #[test]
    fn files_and_flags_win_over_the_model_that_a_run_starts_from() {
        let settings = vec![
            ("model.kind", "llama".into()),
            ("model.width", 64usize.into()),
            ("model.rope_scaling", "linear".into()),
            ("model.rope_factor", 2.0.into()),
            ("model.context", 32usize.into()),
        ];
        let model = InitialModel { name: "--init m".into(), settings, tokenizer: None };
        let from = |text: &str, sets: &[&str]| {
            let (file, overrides) = (Some((Path::new("run.toml"), text)), overrides(sets));
            let model = model.clone().with_defaults(file, &overrides)?;
            read_from(&model, file, &overrides).map(|resolved| resolved.config)
        };
        let plain = from("", &["steps=200"]).unwrap();
        assert_eq!(plain.value("model.rope_factor"), Some(Value::Real(2.0)));
        // 4e-3 for a width of 64, and 3 % of the steps.
        assert_eq!((plain.optim.lr, plain.schedule.warmup), (4e-4, 6));
        let set =
            from("[model]\ncontext = 16", &["lr=0.1", "warmup=1", "rope_scaling=none"]).unwrap();
        assert_eq!(set.value("model.context"), Some(Value::Whole(16)));
        assert_eq!((set.optim.lr, set.schedule.warmup), (0.1, 1));
        let refused = |text: &str, sets: &[&str]| from(text, sets).unwrap_err().to_string();
        let there = "in the model from which the run starts; leave it out";
        assert_eq!(
            refused("", &["model.kind=gpt"]),
            format!("--set model.kind=gpt: model.kind is \"llama\" {there}")
        );
        let preset = format!("run.toml:2: model.preset is not set {there}");
        assert_eq!(refused("[model]\npreset = 'gpt2'", &[]), preset);
        let equal = from("[model]\nkind = 'llama'", &["model.kind=llama", "model.width=64"]);
        assert_eq!(equal.unwrap().value("model.rope_factor"), Some(Value::Real(2.0)));
        let open = from("", &["steps=0"]).unwrap();
        assert!(!open.to_toml().contains("warmup = 0\n"), "{}", open.to_toml());
    }

    /// Picks a value of a key; `fraction`, from 0 to 1, is its position in the accepted range.
    fn pick(key: &Key, fraction: f64) -> Option<Value> {
        use std::ops::Bound::{Excluded, Included};
        let value = match key.accepts {
            Constraint::Whole(first, last) => {
                Value::Whole(i128::from(first) + ((last - first) as f64 * fraction.powi(8)) as i128)
            }
            Constraint::WholeOr(_, _, word) if fraction < 0.5 => Value::Text(word.into()),
            Constraint::WholeOr(first, ..) => {
                Value::Whole(i128::from(first) + (100.0 * (fraction - 0.5)) as i128)
            }
            Constraint::Real(Included(from) | Excluded(from), Included(to) | Excluded(to)) => {
                Value::Real(from + (to - from) * fraction)
            }
            Constraint::Real(..) => panic!("{} has no bound", key.full_name),
            Constraint::Flag => Value::Flag(fraction < 0.5),
            Constraint::OneOf(words) => {
                Value::Text(words[(fraction * words.len() as f64) as usize].into())
            }
            Constraint::IntList => Value::IntList(vec![1 + (fraction * 9.0) as u64; 3]),
            Constraint::RealList => Value::RealList(vec![fraction * 9.0, 0.5]),
            Constraint::Text => Value::Text(format!("a \"{fraction}\"\\\n'ü'")),
            Constraint::TextList => {
                let scale = format!("*.\"{fraction}\" lr_scale={}", 1.0 + fraction);
                Value::TextList(vec![scale, "'ü' frozen".into()])
            }
        };
        key.accepts.check(value)
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back_the_same(
            kind in 0..FAMILIES.len(),
            fractions in proptest::collection::vec(0.0..1.0f64, 110)
        ) {
            let family = &FAMILIES[kind];
            let mut config = RunConfig::default();
            config.set(KIND.full_name, family.name.into());
            if family.trained_on != TrainedOn::Tokens {
                (config.data.kind, config.data.path) = (DataKind::Npy, Some("samples".into()));
            }
            let keys = config.keys();
            prop_assert!(keys.len() <= fractions.len());
            for (key, fraction) in keys.into_iter().zip(fractions) {
                let Some(value) = pick(key, fraction).filter(|_| key.name != "kind") else {
                    continue
                };
                let mut changed = config.clone();
                changed.set(key.full_name, value);
                if changed.model.check_preset().is_err() {
                    continue;
                }
                if key.full_name == PRESET.full_name {
                    for (name, value) in changed.model.preset_values() {
                        changed.set(name, value);
                    }
                }
                changed.reset_ineffective(&TypedKeys::default());
                let micro_batch = changed.train.micro_batch_size.of_batch(1);
                changed.train.batch = changed.train.batch.max(micro_batch);
                if !changed.parallel.shares.is_empty() {
                    let batch = changed.parallel.shares.iter().sum::<u64>() as usize;
                    changed.parallel.balance = Balance::Fixed;
                    changed.train.batch = batch;
                    let micro_batch = changed.train.micro_batch_size.of_batch(batch).min(batch);
                    changed.train.micro_batch_size = MicroBatchSize::Samples(micro_batch);
                }
                if !changed.parallel.share_changes.is_empty() {
                    changed.parallel.balance = Balance::Fixed;
                    changed.parallel.share_changes = vec![format!("9: {}", changed.train.batch)];
                }
                let parallel = &mut changed.parallel;
                match parallel.schedule {
                    PipelineSchedule::Interleaved => {
                        parallel.virtual_stages = parallel.virtual_stages.max(2);
                    }
                    _ => parallel.virtual_stages = 1,
                }
                let chunks = parallel.pipeline_stages * parallel.virtual_stages;
                parallel.blocks_per_stage = parallel.blocks_per_stage.repeat(chunks);
                parallel.blocks_per_stage.truncate(chunks);
                if changed.data.path.is_some() && family.trained_on == TrainedOn::Tokens {
                    changed.data.kind = DataKind::Text;
                }
                if changed.check().is_ok() {
                    config = changed;
                }
            }
            prop_assume!(config.schedule.decay_steps > 0);
            let path = Path::new("run.toml");
            let whole = read_complete(path, &config.to_toml(), &[]).unwrap();
            prop_assert_eq!(&whole.config, &config);
            let text = config.to_run_toml(&BTreeSet::new());
            let mut of_run = read(None, Some((path, &text)), &[]).unwrap();
            if config.train.epochs > 0 {
                // The steps are computed with the data.
                of_run.config.set_steps_of_epochs(config.train.steps, &of_run.typed);
            }
            prop_assert_eq!(&of_run.config, &config);
        }
    }
}
