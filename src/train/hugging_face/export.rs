//! Export of a model as a directory that transformers reads: `config.json`,
//! `generation_config.json`, `model.safetensors`, and the `tokenizer.json` of a model that has one.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use safetensors::tensor::View;
use safetensors::{Dtype, SafeTensorError, serialize_to_file};
use serde_json::{Value as Json, json};

use super::files::{SINGLE, refused};
use super::{HuggingFaceError, config};
use crate::checkpoint::NamedTensor;
use crate::families::ModelFamily;
use potluck_core::arithmetic::transpose;
use potluck_core::files;
use potluck_data::TokenizerFile;
use potluck_data::tokenizer::TOKENIZER;
use potluck_graph::model::names::their_name;

/// Type of the values in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    F32,
    F16,
    Bf16,
}

impl FileType {
    /// Names of all types, as flags have them.
    pub const NAMES: [(&str, Self); 3] =
        [("f32", Self::F32), ("f16", Self::F16), ("bf16", Self::Bf16)];

    /// Returns the name that transformers has for the type.
    fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// Returns a value as it is in this type.
    fn rounded(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => half::f16::from_f32(value).to_f32(),
            Self::Bf16 => half::bf16::from_f32(value).to_f32(),
        }
    }

    /// Returns why a value cannot be written in this type.
    fn why_not(self, value: f32) -> String {
        if value.is_finite() {
            format!("has {value:e}, too large for {}; use --dtype f32", self.torch_name())
        } else {
            format!("has {value}, with which no model is of use")
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns the values in this type, rounded to nearest, ties to even.
    fn bytes_of(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => bytemuck::cast_slice(values).to_vec(),
            Self::F16 => halves(values, |value| half::f16::from_f32(value).to_bits()),
            Self::Bf16 => halves(values, |value| half::bf16::from_f32(value).to_bits()),
        }
    }
}

fn halves(values: &[f32], bits: impl Fn(f32) -> u16) -> Vec<u8> {
    values.iter().flat_map(|value| bits(*value).to_le_bytes()).collect()
}

/// Parameter as it is written, converted when it is.
struct WrittenTensor<'a> {
    values: &'a [f32],
    /// Shape in the file.
    shape: Vec<usize>,
    is_transposed: bool,
    kind: FileType,
}

impl View for &WrittenTensor<'_> {
    fn dtype(&self) -> Dtype {
        match self.kind {
            FileType::F32 => Dtype::F32,
            FileType::F16 => Dtype::F16,
            FileType::Bf16 => Dtype::BF16,
        }
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
        self.values.len() * self.kind.bytes()
    }
}

/// Writes a model to a new directory, with its tokenizer if that is a file; it is there as a whole
/// or not at all.
///
/// # Errors
/// Returns [`HuggingFaceError`] if the directory is there already, if the model has no form in
/// Hugging Face's files, if a value is not finite in the type, or if a file cannot be written.
pub fn export(
    out: &Path,
    family: &dyn ModelFamily,
    parameters: &[NamedTensor],
    tokenizer: Option<&TokenizerFile>,
    kind: FileType,
) -> Result<(), HuggingFaceError> {
    // Without a separator at the end, so that what is beside it is not in it.
    let out = out.components().collect::<PathBuf>();
    let out = out.as_path();
    if fs::symlink_metadata(out).is_ok() {
        return Err(HuggingFaceError::Exists { path: out.into() });
    }
    // The first of a family's table is its embedding.
    let table = family.names().first().map_or("", |name| name.ours);
    let embedding = parameters.iter().find(|tensor| tensor.name == table);
    let vocabulary = embedding.map_or(0, |tensor| tensor.shape[0]);
    let mut settings = config::exported(family, vocabulary).map_err(HuggingFaceError::NoForm)?;
    for key in ["torch_dtype", "dtype"] {
        settings[key] = kind.torch_name().into();
    }
    let mut written = Vec::with_capacity(parameters.len());
    for tensor in parameters {
        let named = their_name(family.names(), &tensor.name);
        let Some((name, is_transposed)) = named else {
            return Err(HuggingFaceError::NoForm(format!(
                "it has the parameter '{}'",
                tensor.name
            )));
        };
        if let Some(value) = tensor.values.iter().find(|value| !kind.rounded(**value).is_finite()) {
            return Err(refused(out, &name, kind.why_not(*value)));
        }
        let mut shape = tensor.shape.clone();
        if is_transposed {
            shape.reverse();
        }
        written.push((name, WrittenTensor { values: &tensor.values, shape, is_transposed, kind }));
    }
    let temporary = new_directory_beside(out)?;
    let done = write_files(&temporary, &settings, &written)
        .and_then(|()| tokenizer.map_or(Ok(()), |file| write_tokenizer(&temporary, file)))
        .and_then(|()| fs::rename(&temporary, out).map_err(|why| unwritable(out, why)));
    if done.is_err() {
        // What is left of it is of no use; that it cannot be removed is no news.
        let _ = fs::remove_dir_all(&temporary);
    }
    done
}

/// Creates a directory of a new name beside another.
fn new_directory_beside(out: &Path) -> Result<PathBuf, HuggingFaceError> {
    let parent = files::parent(out);
    fs::create_dir_all(parent).map_err(|why| unwritable(parent, why))?;
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

/// Writes the file of a tokenizer, and how transformers is to read it.
fn write_tokenizer(directory: &Path, tokenizer: &TokenizerFile) -> Result<(), HuggingFaceError> {
    let path = directory.join(TOKENIZER);
    fs::write(&path, tokenizer.json()).map_err(|why| unwritable(&path, why))?;
    let class = json!({ "tokenizer_class": "PreTrainedTokenizerFast" });
    let path = directory.join("tokenizer_config.json");
    fs::write(&path, format!("{class:#}\n")).map_err(|why| unwritable(&path, why))
}

fn write_files(
    directory: &Path,
    settings: &Json,
    written: &[(String, WrittenTensor)],
) -> Result<(), HuggingFaceError> {
    let generation = json!({ "_from_model_config": true });
    for (name, json) in [("config.json", settings), ("generation_config.json", &generation)] {
        let path = directory.join(name);
        let text = format!("{json:#}\n");
        fs::write(&path, text).map_err(|why| unwritable(&path, why))?;
    }
    let path = directory.join(SINGLE);
    let tensors = written.iter().map(|(name, tensor)| (name, tensor));
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    serialize_to_file(tensors, Some(metadata), &path).map_err(|error| match error {
        SafeTensorError::IoError(why) => unwritable(&path, why),
        other => unwritable(&path, std::io::Error::other(other)),
    })?;
    let file = fs::File::open(&path).and_then(|file| file.sync_all());
    file.map_err(|why| unwritable(&path, why))
}

fn unwritable(path: &Path, why: std::io::Error) -> HuggingFaceError {
    HuggingFaceError::Write { path: PathBuf::from(path), why }
}
