//! Models in Hugging Face's files: a directory with `config.json` and `model.safetensors` or its
//! shards, as written by `save_pretrained` of transformers. Names of tensors are tables beside the
//! families ([`ModelFamily::names`]).

mod config;
mod export;
mod file_type;
pub(crate) mod files;
mod model_files;

use std::io;
use std::path::{Path, PathBuf};

pub use config::{ModelSettings, configuration};
pub use export::{
    ExportedModel, create_parent, export, export_parameters, require_free, vocabulary_of,
    zero_biases,
};
pub use file_type::{BLOCK, FileType};
pub use files::{ModelTensors, is_table_of_tokens};
pub use model_files::{ModelFiles, directory_of_run};

use crate::checkpoint::has_checkpoints;
use crate::families::{ModelFamily, PRESET_CONTEXT};
use crate::keys::Value;
use files::{StoredTensors, TensorNames};
use potluck_graph::Graph;

const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// Branch of a repository in the cache whose files are used.
const REVISION: &str = "main";

/// Reason why a model cannot be read from Hugging Face's files, or written to them.
#[derive(Debug, thiserror::Error)]
pub enum HuggingFaceError {
    #[error("{}: cannot be read: {why}", path.display())]
    Read { path: PathBuf, why: io::Error },
    #[error("{}: {why}", path.display())]
    Damaged { path: PathBuf, why: String },
    /// Key that the model does not support.
    #[error("{}: {why}", path.display())]
    Config { path: PathBuf, why: String },
    #[error("{}: the tensor '{tensor}' {why}", directory.display())]
    Tensor { directory: PathBuf, tensor: String, why: String },
    #[error("{}: the tensor '{tensor}' is missing{there}", directory.display())]
    Missing {
        directory: PathBuf,
        tensor: String,
        /// Clause on a tensor of another name, or what else to do; it may be empty.
        there: String,
    },
    /// Weights that are not those of the configured model.
    #[error(
        "{why}; weights without a config.json are those of the configured model: give its keys, \
         such as model.kind and model.width, by a configuration or with --set"
    )]
    OtherModel { why: Box<Self> },
    #[error(
        "{}: has no model.safetensors and no model.safetensors.index.json",
        directory.display()
    )]
    NoTensors { directory: PathBuf },
    #[error(
        "{}: is a Python pickle, which can run code, so it is not read; where you trust it, \
         convert it with transformers: \
         AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), or any other model with \
         safetensors.torch.save_model(model, \"model.safetensors\"), for --init \
         model.safetensors",
        path.display()
    )]
    Pickled { path: PathBuf },
    #[error(
        "{name}: is no directory, and not in the cache at {}; download it with: hf download {name}",
        cache.display()
    )]
    NotInCache { name: String, cache: PathBuf },
    #[error("{name}: there is no such directory")]
    NoDirectory { name: String },
    /// Parameters without a configuration that identifies their model.
    #[error(
        "{}: has weights but no configuration; give a run, a checkpoint, or a directory with \
         config.json and model.safetensors, or begin a run with them: potluck train --init FILE, \
         with the keys of their model",
        path.display()
    )]
    NoConfiguration { path: PathBuf },
    #[error(
        "{}: has no model; give a run, a checkpoint, or a directory with config.json and \
         model.safetensors",
        path.display()
    )]
    NoModel { path: PathBuf },
    #[error(
        "{}: GGUF files are written, not read; give a run, a checkpoint, or a directory with \
         config.json and model.safetensors",
        path.display()
    )]
    Gguf { path: PathBuf },
    /// Weights beside the configuration of their model.
    #[error(
        "{}: is a part of a model; give its directory: {}",
        path.display(),
        directory.display()
    )]
    OfModel { path: PathBuf, directory: PathBuf },
    /// File or directory of a run that is no checkpoint.
    #[error("{}: is a part of a run; give the run: {}", path.display(), run.display())]
    OfRun { path: PathBuf, run: PathBuf },
    #[error("{}: has runs; give one of them, such as {}", path.display(), run.display())]
    HasRuns { path: PathBuf, run: PathBuf },
    /// Model that no file of theirs can hold.
    #[error("the model has no form in Hugging Face's files: {0}")]
    NoForm(String),
    #[error("{}: cannot be written: {why}", path.display())]
    Write { path: PathBuf, why: io::Error },
    #[error("{}: is there already; name another with --out", path.display())]
    Exists { path: PathBuf },
}

/// Directory with a model, whose configuration has been read.
#[derive(Clone, Debug)]
pub struct ModelDirectory {
    path: PathBuf,
    settings: ModelSettings,
}

impl ModelDirectory {
    /// Opens a directory, or if none exists, the directory of `org/name` in the cache of
    /// `hf download`.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] if there is no such directory, or if its configuration cannot
    /// be read or potluck does not support the model.
    pub fn open(name: &str) -> Result<Self, HuggingFaceError> {
        let path = located(name)?;
        let config = path.join("config.json");
        let text = files::read_text(&config, CONFIG_BYTES_MAX)?;
        let mut settings = config::settings(&config, &text)?;
        settings.push(("model.context", context_of(&settings).into()));
        Ok(Self { path, settings })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the keys of the model equivalent to the configuration, `model.kind` first.
    pub fn settings(&self) -> &ModelSettings {
        &self.settings
    }

    /// Returns the number of tokens of the model, by its configuration.
    pub fn vocabulary(&self) -> Option<usize> {
        let known = self.settings.iter().find(|(key, _)| *key == "model.vocabulary");
        match known {
            Some((_, Value::Whole(tokens))) => usize::try_from(*tokens).ok(),
            _ => None,
        }
    }

    /// Finds the parameters of a graph in the files; only the headers are read. If `tokens` is
    /// given, it overrides the graph's number of rows in tables of tokens.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] for the first tensor that is missing, has another shape or
    /// type, or does not belong to the model, and for a damaged file.
    pub fn tensors(
        &self,
        graph: &Graph,
        family: &dyn ModelFamily,
        tokens: Option<usize>,
    ) -> Result<ModelTensors, HuggingFaceError> {
        let stored = StoredTensors::open(&self.path)?;
        stored.of_model(graph, family.names(), TensorNames::HuggingFace, tokens)
    }
}

/// Weights without a configuration: a file of safetensors, or a directory with `model.safetensors`
/// or its shards.
#[derive(Clone, Debug)]
pub struct BareWeights(PathBuf);

impl BareWeights {
    /// Returns the weights at a path; `None` if there is something else, or a part of a run.
    pub fn at(path: &Path) -> Option<Self> {
        if run_around(path).is_some() || directory_with_config(path).is_some() {
            return None;
        }
        let is_weights = if path.is_dir() {
            let has = |name: &&str| path.join(name).exists();
            [files::SINGLE, files::INDEX].iter().any(has) && !path.join("config.json").is_file()
        } else {
            path.is_file() && path.extension().is_some_and(|ending| ending == "safetensors")
        };
        is_weights.then(|| Self(path.into()))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the rows of the family's table of tokens; `None` if the weights have none, or
    /// cannot be read, as [`Self::tensors`] says.
    pub fn tokens(&self, family: &dyn ModelFamily) -> Option<usize> {
        StoredTensors::open(&self.0).ok()?.unwrapped().tokens(family.names())
    }

    /// Finds the parameters of a graph, as [`ModelDirectory::tensors`] does. Their names are those
    /// of transformers, or those of the graph.
    ///
    /// # Errors
    /// Returns the errors of [`ModelDirectory::tensors`].
    pub fn tensors(
        &self,
        graph: &Graph,
        family: &dyn ModelFamily,
        tokens: Option<usize>,
    ) -> Result<ModelTensors, HuggingFaceError> {
        files::tensors_of_weights(&self.0, graph, family.names(), tokens).map_err(|why| match why {
            HuggingFaceError::Missing { .. } | HuggingFaceError::Tensor { .. } => {
                HuggingFaceError::OtherModel { why: Box::new(why) }
            }
            other => other,
        })
    }
}

/// Checks that a path which is neither a run nor a checkpoint may be a model in Hugging Face's
/// files: a directory with a configuration, or the name of one in the cache.
///
/// # Errors
/// Returns [`HuggingFaceError`] for anything else at the path, and says what it is.
pub fn require_model(path: &Path) -> Result<(), HuggingFaceError> {
    if !path.exists() || path.join("config.json").is_file() {
        return Ok(());
    }
    if let Some(run) = run_around(path) {
        return Err(HuggingFaceError::OfRun { path: path.into(), run });
    }
    if let Some(run) = last_run_in(path) {
        return Err(HuggingFaceError::HasRuns { path: path.into(), run });
    }
    if let Some(directory) = directory_with_config(path) {
        return Err(HuggingFaceError::OfModel { path: path.into(), directory });
    }
    if path.extension().is_some_and(|ending| ending == "gguf") {
        return Err(HuggingFaceError::Gguf { path: path.into() });
    }
    if BareWeights::at(path).is_some() {
        return Err(HuggingFaceError::NoConfiguration { path: path.into() });
    }
    match files::pickled(path) {
        Some(path) => Err(HuggingFaceError::Pickled { path }),
        None => Err(HuggingFaceError::NoModel { path: path.into() }),
    }
}

/// Returns the directory of a file of weights of a model, if the configuration of transformers is
/// in it.
fn directory_with_config(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let is_shard = name.strip_prefix("model-").is_some_and(|rest| rest.contains("-of-"));
    if !path.is_file() || (name != files::SINGLE && !is_shard) {
        return None;
    }
    let directory = path.parent()?;
    let config: serde_json::Value =
        files::read_json(&directory.join("config.json"), CONFIG_BYTES_MAX).ok()?;
    config.get("model_type")?;
    Some(if directory.as_os_str().is_empty() { PathBuf::from(".") } else { directory.into() })
}

/// Returns the directory of the run in which a path lies.
fn run_around(path: &Path) -> Option<PathBuf> {
    let run = path.ancestors().skip(1).find(|directory| is_run(directory))?;
    Some(if run.as_os_str().is_empty() { PathBuf::from(".") } else { run.into() })
}

/// Returns the run of a directory of runs whose name is the last.
fn last_run_in(directory: &Path) -> Option<PathBuf> {
    let mut last = None;
    for entry in std::fs::read_dir(directory).ok()?.flatten() {
        let path = entry.path();
        if is_run(&path) && last.as_ref().is_none_or(|last| *last < path) {
            last = Some(path);
        }
    }
    last
}

/// Returns true for the directory of a run, which has its configuration.
fn is_run(path: &Path) -> bool {
    has_checkpoints(path) && path.join("run.toml").is_file()
}

/// Tokens of a model that begin and end a text, by the files of a directory.
#[derive(Debug, Default, serde::Deserialize)]
struct TextTokens {
    #[serde(default)]
    bos_token_id: serde_json::Value,
    #[serde(default)]
    eos_token_id: serde_json::Value,
}

/// Files that name such tokens, in the order of precedence.
const NAMING_TOKENS: [&str; 2] = ["generation_config.json", "config.json"];

/// Returns the tokens that end a text, from the files of a directory: `eos_token_id` of
/// `generation_config.json`, or else of `config.json`.
///
/// # Errors
/// Returns [`HuggingFaceError`] if one of the files is not JSON.
pub fn end_tokens(directory: &Path) -> Result<Vec<u32>, HuggingFaceError> {
    tokens_named(directory, |tokens| &tokens.eos_token_id)
}

/// Returns the token in front of a text, from the files of a directory: `bos_token_id` of
/// `generation_config.json`, or else of `config.json`.
///
/// # Errors
/// Returns [`HuggingFaceError`] if one of the files is not JSON.
pub fn begin_token(directory: &Path) -> Result<Option<u32>, HuggingFaceError> {
    Ok(tokens_named(directory, |tokens| &tokens.bos_token_id)?.first().copied())
}

fn tokens_named(
    directory: &Path,
    of: impl Fn(&TextTokens) -> &serde_json::Value,
) -> Result<Vec<u32>, HuggingFaceError> {
    for name in NAMING_TOKENS {
        let path = directory.join(name);
        if !path.is_file() {
            continue;
        }
        let tokens: TextTokens = files::read_json(&path, CONFIG_BYTES_MAX)?;
        let ids = of(&tokens);
        let ids = ids.as_array().cloned().unwrap_or_else(|| vec![ids.clone()]);
        let ids = ids.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
        let ids: Vec<u32> = ids.collect();
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    Ok(Vec::new())
}

/// Default context of a run: the positions of the model, or its window if shorter, but no more than
/// the default of presets.
fn context_of(settings: &ModelSettings) -> usize {
    let mut context = PRESET_CONTEXT;
    for (name, value) in settings {
        if let ("model.positions" | "model.sliding_window", Value::Whole(count @ 1..)) =
            (*name, value)
        {
            context = context.min(usize::try_from(*count).unwrap_or(context));
        }
    }
    context
}

/// Returns the directory of a model, by its path or its name in the cache.
///
/// # Errors
/// Returns `HuggingFaceError::NoDirectory` if it is neither, and `HuggingFaceError::NotInCache` if
/// it has not been downloaded.
pub fn located(name: &str) -> Result<PathBuf, HuggingFaceError> {
    let path = PathBuf::from(name);
    if path.is_dir() {
        return Ok(path);
    }
    let parts: Vec<&str> = name.split('/').collect();
    let is_part = |part: &&str| {
        let is_plain = part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        !part.is_empty() && is_plain && !part.starts_with('.')
    };
    if parts.len() > 2 || !parts.iter().all(is_part) {
        return Err(HuggingFaceError::NoDirectory { name: name.into() });
    }
    let Some(cache) = cache() else {
        return Err(HuggingFaceError::NoDirectory { name: name.into() });
    };
    let not_there = || HuggingFaceError::NotInCache { name: name.into(), cache: cache.clone() };
    let repository = cache.join(format!("models--{}", parts.join("--")));
    let commit = std::fs::read_to_string(repository.join("refs").join(REVISION));
    let commit = commit.map_err(|_| not_there())?;
    let commit = commit.trim();
    let is_commit = !commit.is_empty() && commit.chars().all(|c| c.is_ascii_hexdigit());
    let snapshot = repository.join("snapshots").join(commit);
    if is_commit && snapshot.is_dir() { Ok(snapshot) } else { Err(not_there()) }
}

/// Directory of the cache: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or else `huggingface/hub` in the
/// user's cache; `None` if the user has no cache.
fn cache() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(cache) = variable("HF_HUB_CACHE") {
        return Some(cache.into());
    }
    if let Some(home) = variable("HF_HOME") {
        return Some(PathBuf::from(home).join("hub"));
    }
    let user = match variable("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(variable("HOME").or_else(|| variable("USERPROFILE"))?).join(".cache"),
    };
    Some(user.join("huggingface").join("hub"))
}

#[cfg(test)]
mod tests;
