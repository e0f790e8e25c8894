//! Export of a model as a directory for transformers: `config.json`, `generation_config.json`,
//! `model.safetensors` or its shards, the `tokenizer.json` if the model has one, and files kept
//! from the model that the training started from.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use safetensors::tensor::View;
use safetensors::{Dtype, SafeTensorError, serialize_to_file};
use serde_json::{Value as Json, json};

use super::files::{INDEX, SINGLE, refused};
use super::model_files::token_ids;
use super::{FileType, HuggingFaceError, ModelFiles, config};
use crate::checkpoint::NamedTensor;
use crate::families::ModelFamily;
use crate::keys::Value;
use potluck_core::arithmetic::transpose;
use potluck_core::files;
use potluck_data::TokenizerFile;
use potluck_data::tokenizer::TOKENIZER;
use potluck_graph::model::names::their_name;

/// Parameter to be written; it is converted during writing.
struct WrittenTensor<'a> {
    values: &'a [f32],
    /// Shape in the file.
    shape: Vec<usize>,
    is_transposed: bool,
    kind: FileType,
    dtype: Dtype,
}

impl<'a> WrittenTensor<'a> {
    /// Parameter to be written under a name, if all its values are finite after the conversion.
    fn of(
        out: &Path,
        name: &str,
        tensor: &'a NamedTensor,
        is_transposed: bool,
        kind: FileType,
    ) -> Result<Self, HuggingFaceError> {
        if let Some(value) = tensor.values.iter().find(|value| !kind.holds(**value)) {
            return Err(refused(out, name, kind.why_not(*value)));
        }
        let (_, dtype) = names_of(kind)?;
        let mut shape = tensor.shape.clone();
        if is_transposed {
            shape.reverse();
        }
        Ok(Self { values: &tensor.values, shape, is_transposed, kind, dtype })
    }

    fn bytes(&self) -> usize {
        self.kind.bytes(self.values.len())
    }
}

impl View for &WrittenTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = match (&self.shape[..], self.is_transposed) {
            ([rows, columns], true) => Cow::Owned(transpose(self.values, *columns, *rows)),
            _ => Cow::Borrowed(self.values),
        };
        self.kind.bytes_of(&values).into()
    }

    fn data_len(&self) -> usize {
        self.bytes()
    }
}

/// Model and the files written beside its parameters.
pub struct ExportedModel<'a> {
    pub family: &'a dyn ModelFamily,
    pub parameters: &'a [NamedTensor],
    pub tokenizer: Option<&'a TokenizerFile>,
    /// Token in front of a text, if any.
    pub begin: Option<u32>,
    /// Tokens that end a text.
    pub ends: &'a [u32],
    /// Files of the model that the training started from.
    pub files: &'a ModelFiles,
    pub kind: FileType,
    /// Largest number of bytes of a file of parameters, unless a single parameter is larger.
    pub shard_bytes: u64,
}

/// Writes a model to a new directory, with its tokenizer if it has one, atomically.
///
/// # Errors
/// Returns [`HuggingFaceError`] if the directory exists, if Hugging Face's files do not support the
/// model, if a value is not finite in the type, or if a file cannot be written.
pub fn export(out: &Path, model: &ExportedModel) -> Result<(), HuggingFaceError> {
    // Without a trailing separator, so that a temporary directory beside it is not inside it.
    let out = out.components().collect::<PathBuf>();
    let out = out.as_path();
    require_free(out)?;
    let (torch_name, _) = names_of(model.kind)?;
    let vocabulary = vocabulary_of(model.family, model.parameters);
    let mut settings = config::configuration(model.family, vocabulary)?;
    for key in ["torch_dtype", "dtype"] {
        settings[key] = torch_name.into();
    }
    let ends = json!(token_ids(model.ends));
    let mut generation = json!({ "_from_model_config": true });
    for json in [&mut settings, &mut generation] {
        json["bos_token_id"] = json!(model.begin);
        json["eos_token_id"] = ends.clone();
    }
    let mut written = Vec::with_capacity(model.parameters.len());
    for tensor in model.parameters {
        let named = their_name(model.family.names(), &tensor.name);
        let Some((name, is_transposed)) = named else {
            return Err(HuggingFaceError::NoForm(format!(
                "it has the parameter '{}'",
                tensor.name
            )));
        };
        written.push((
            name.clone(),
            WrittenTensor::of(out, &name, tensor, is_transposed, model.kind)?,
        ));
    }
    let temporary = new_directory_beside(out)?;
    let write = || -> Result<(), HuggingFaceError> {
        write_json(&temporary.join("config.json"), &settings)?;
        write_json(&temporary.join("generation_config.json"), &generation)?;
        if let Some(file) = model.tokenizer {
            write_tokenizer(&temporary, file)?;
        }
        // These overwrite the files above, because the initial model's say more.
        model.files.write(&temporary)?;
        write_shards(&temporary, &written, model.shard_bytes)?;
        fs::rename(&temporary, out).map_err(|why| unwritable(out, why))?;
        files::sync_directory(files::parent(out)).map_err(|why| unwritable(out, why))
    };
    let done = write();
    if done.is_err() {
        // The remains are useless, and a failure to remove them is not worth reporting.
        let _ = fs::remove_dir_all(&temporary);
    }
    done
}

/// Writes the parameters of any model to a new file under their own names, atomically.
///
/// # Errors
/// Returns [`HuggingFaceError`] if the file exists, if a value is not finite in the type, or if the
/// file cannot be written.
pub fn export_parameters(
    out: &Path,
    parameters: &[NamedTensor],
    kind: FileType,
) -> Result<(), HuggingFaceError> {
    require_free(out)?;
    let mut written = Vec::with_capacity(parameters.len());
    for tensor in parameters {
        let name = tensor.name.clone();
        written.push((name.clone(), WrittenTensor::of(out, &name, tensor, false, kind)?));
    }
    let parent = create_parent(out)?;
    let temporary = files::beside(out, ".tmp");
    let all: Vec<&(String, WrittenTensor)> = written.iter().collect();
    let done = write_tensors(&temporary, &all).and_then(|()| {
        fs::rename(&temporary, out).map_err(|why| unwritable(out, why))?;
        files::sync_directory(parent).map_err(|why| unwritable(out, why))
    });
    if done.is_err() {
        // The remains are useless, and a failure to remove them is not worth reporting.
        let _ = fs::remove_file(&temporary);
    }
    done
}

fn names_of(kind: FileType) -> Result<(&'static str, Dtype), HuggingFaceError> {
    match kind {
        FileType::F32 => Ok(("float32", Dtype::F32)),
        FileType::F16 => Ok(("float16", Dtype::F16)),
        FileType::Bf16 => Ok(("bfloat16", Dtype::BF16)),
        FileType::Q8_0 => {
            let why = "q8_0 is a type of GGUF files: use --format gguf, or another --dtype";
            Err(HuggingFaceError::NoForm(why.into()))
        }
    }
}

/// Checks that nothing exists at a path.
///
/// # Errors
/// Returns [`HuggingFaceError::Exists`] otherwise.
pub fn require_free(out: &Path) -> Result<(), HuggingFaceError> {
    if fs::symlink_metadata(out).is_ok() {
        return Err(HuggingFaceError::Exists { path: out.into() });
    }
    Ok(())
}

/// Creates the parent directory of a file that is about to be written, and returns it.
///
/// # Errors
/// Returns [`HuggingFaceError::Write`].
pub fn create_parent(out: &Path) -> Result<&Path, HuggingFaceError> {
    let parent = files::parent(out);
    fs::create_dir_all(parent).map_err(|why| unwritable(parent, why))?;
    Ok(parent)
}

/// Returns the number of tokens of a model: the rows of its embedding, which is the first entry of
/// its family's table.
pub fn vocabulary_of(family: &dyn ModelFamily, parameters: &[NamedTensor]) -> usize {
    let table = family.names().first().map_or("", |name| name.ours);
    let embedding = parameters.iter().find(|tensor| tensor.name == table);
    embedding.map_or(0, |tensor| tensor.shape[0])
}

/// Returns the biases that GPT-2's files have, for a `gpt` that has none: zeros, with which the
/// model computes the same; none for other models.
pub fn zero_biases(family: &dyn ModelFamily, parameters: &[NamedTensor]) -> Vec<NamedTensor> {
    let mut zeros = Vec::new();
    // Of the families with names in these files, only this one has the key.
    if family.value("bias") != Some(Value::Flag(false)) {
        return zeros;
    }
    for tensor in parameters {
        let Some(layer) = tensor.name.strip_suffix(".weight") else { continue };
        let name = format!("{layer}.bias");
        if their_name(family.names(), &name).is_some() {
            let rows = tensor.shape[0];
            zeros.push(NamedTensor { name, shape: vec![rows], values: vec![0.0; rows] });
        }
    }
    zeros
}

fn new_directory_beside(out: &Path) -> Result<PathBuf, HuggingFaceError> {
    create_parent(out)?;
    let mut number = 0u32;
    loop {
        let path = files::beside(out, &format!(".{}-{number}.tmp", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(why) if why.kind() == ErrorKind::AlreadyExists && number < 100 => number += 1,
            Err(why) => return Err(unwritable(&path, why)),
        }
    }
}

/// Writes the file of a tokenizer, and its configuration for transformers.
fn write_tokenizer(directory: &Path, tokenizer: &TokenizerFile) -> Result<(), HuggingFaceError> {
    let path = directory.join(TOKENIZER);
    fs::write(&path, tokenizer.json()).map_err(|why| unwritable(&path, why))?;
    // Decoded texts stay unchanged: transformers 4 would remove spaces before full stops.
    let class = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false
    });
    write_json(&directory.join("tokenizer_config.json"), &class)
}

fn write_json(path: &Path, json: &Json) -> Result<(), HuggingFaceError> {
    fs::write(path, format!("{json:#}\n")).map_err(|why| unwritable(path, why))
}

/// Writes tensors to one file, or if it would be too large, to several with an index.
fn write_shards(
    directory: &Path,
    written: &[(String, WrittenTensor)],
    bytes_max: u64,
) -> Result<(), HuggingFaceError> {
    let mut shards: Vec<Vec<&(String, WrittenTensor)>> = Vec::new();
    let mut bytes = 0;
    for tensor in written {
        let own = tensor.1.bytes() as u64;
        match shards.last_mut() {
            Some(last) if bytes + own <= bytes_max => last.push(tensor),
            _ => {
                bytes = 0;
                shards.push(vec![tensor]);
            }
        }
        bytes += own;
    }
    if let [all] = &shards[..] {
        return write_tensors(&directory.join(SINGLE), all);
    }
    let (mut weight_map, mut total) = (serde_json::Map::new(), 0);
    for (number, shard) in (1..).zip(&shards) {
        let file = format!("model-{number:05}-of-{:05}.safetensors", shards.len());
        for (name, tensor) in shard {
            weight_map.insert(name.clone(), file.clone().into());
            total += tensor.bytes();
        }
        write_tensors(&directory.join(&file), shard)?;
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    write_json(&directory.join(INDEX), &index)
}

fn write_tensors(
    path: &Path,
    tensors: &[&(String, WrittenTensor)],
) -> Result<(), HuggingFaceError> {
    let tensors = tensors.iter().map(|(name, tensor)| (name, tensor));
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    // The crate replaces the file by one that only its owner may read.
    let plain = fs::File::create(path).and_then(|file| file.metadata());
    let permissions = plain.map_err(|why| unwritable(path, why))?.permissions();
    serialize_to_file(tensors, Some(metadata), path).map_err(|error| match error {
        SafeTensorError::IoError(why) => unwritable(path, why),
        other => unwritable(path, std::io::Error::other(other)),
    })?;
    // Some systems synchronize only files that are open for writing.
    let synced = fs::OpenOptions::new().write(true).open(path).and_then(|file| {
        file.set_permissions(permissions)?;
        file.sync_all()
    });
    synced.map_err(|why| unwritable(path, why))
}

pub(super) fn unwritable(path: &Path, why: std::io::Error) -> HuggingFaceError {
    HuggingFaceError::Write { path: PathBuf::from(path), why }
}
