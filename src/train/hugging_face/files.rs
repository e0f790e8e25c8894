//! Tensors of a model directory: `model.safetensors`, or shards named by an index, read tensor by
//! tensor and converted to f32.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::HuggingFaceError;
use crate::checkpoint::{NamedTensor, transposed_hint};
use potluck_core::arithmetic::transpose;
use potluck_graph::Graph;
use potluck_graph::model::names::{FileName, their_name};

/// File of a model without shards.
pub const SINGLE: &str = "model.safetensors";
/// Tensor of the head, whose name is the same in this program and in their files.
const HEAD: &str = "lm_head.weight";
/// Index of a model in shards.
pub const INDEX: &str = "model.safetensors.index.json";
/// Files that contain a program instead of tensors.
const PICKLED: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
const PICKLED_ENDINGS: [&str; 4] = ["bin", "ckpt", "pt", "pth"];
/// Largest header of a file, as in the safetensors crate.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Largest index, far above real ones, even with thousands of layers.
const INDEX_BYTES_MAX: u64 = 100_000_000;

/// Tensor in one of the files.
struct StoredTensor {
    file: PathBuf,
    dtype: Dtype,
    shape: Vec<usize>,
    /// First byte in the file, and number of bytes.
    start: u64,
    bytes: usize,
}

#[derive(serde::Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// Returns the file of a directory, or the path itself, that contains a program, judged by its
/// name.
pub fn pickled(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return PICKLED.into_iter().map(|name| path.join(name)).find(|path| path.exists());
    }
    let ending = path.extension()?;
    PICKLED_ENDINGS.iter().any(|known| ending == *known).then(|| path.into())
}

/// Prefixes of the names in a `state_dict()` of a PyTorch model that is compiled, or in a wrapper
/// of data parallelism.
const WRAPPERS: [&str; 2] = ["_orig_mod.", "module."];

/// Names and layouts of the tensors in files.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TensorNames {
    /// Those of transformers, by the table of a family.
    HuggingFace,
    /// Those of the graph, as in `state_dict()` of the same model in PyTorch.
    Graph,
}

/// Tensors of a model directory or of one file by name; only the headers are read.
pub struct StoredTensors {
    directory: PathBuf,
    tensors: BTreeMap<String, StoredTensor>,
}

impl StoredTensors {
    /// Reads the headers of the files of a model directory, or of a single file.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] if there is no such file, or if one is damaged or missing.
    pub fn open(directory: &Path) -> Result<Self, HuggingFaceError> {
        if !directory.is_dir() {
            if let Some(path) = pickled(directory) {
                return Err(HuggingFaceError::Pickled { path });
            }
            return Ok(Self { directory: directory.into(), tensors: header(directory)? });
        }
        let mut tensors = BTreeMap::new();
        let [single, index] = [SINGLE, INDEX].map(|name| directory.join(name));
        if single.exists() {
            tensors = header(&single)?;
        } else if index.exists() {
            let ShardIndex { weight_map } = read_json(&index, INDEX_BYTES_MAX)?;
            let mut shards: BTreeMap<&str, BTreeMap<String, StoredTensor>> = BTreeMap::new();
            for (name, shard) in &weight_map {
                let refused = |why: String| damaged(&index, why);
                if !is_file_name(shard) {
                    return Err(refused(format!("'{shard}' is no name of a file beside it")));
                }
                if !shards.contains_key(shard.as_str()) {
                    shards.insert(shard, header(&directory.join(shard))?);
                }
                // Always found: inserted above at the latest.
                let Some(of_shard) = shards.get_mut(shard.as_str()) else { continue };
                let Some(tensor) = of_shard.remove(name) else {
                    return Err(refused(format!("{shard} has no tensor '{name}'")));
                };
                tensors.insert(name.clone(), tensor);
            }
        } else if let Some(path) = pickled(directory) {
            return Err(HuggingFaceError::Pickled { path });
        } else {
            return Err(HuggingFaceError::NoTensors { directory: directory.into() });
        }
        Ok(Self { directory: directory.into(), tensors })
    }

    /// Returns the number of rows of the table of tokens of a family with these names; `None` if
    /// the files have none.
    pub fn tokens(&self, names: &[FileName]) -> Option<usize> {
        let FileName { ours, theirs, .. } = names.first()?;
        let short = theirs.strip_prefix("transformer.").unwrap_or(theirs);
        let prefixed = format!("transformer.{ours}");
        for name in [*theirs, short, *ours, prefixed.as_str(), HEAD] {
            if let Some(stored) = self.tensors.get(name) {
                return stored.shape.first().copied();
            }
        }
        None
    }

    /// Returns a clause on a tensor of the same module as a missing one, under another prefix.
    fn alike(&self, missing: &str) -> String {
        let mut modules = missing.rsplitn(3, '.');
        let (Some(leaf), Some(module)) = (modules.next(), modules.next()) else {
            return String::new();
        };
        let end = format!("{module}.{leaf}");
        for name in self.tensors.keys().filter(|name| !is_computed(name)) {
            if let Some(prefix) = name.strip_suffix(end.as_str())
                && (prefix.is_empty() || prefix.ends_with('.'))
            {
                return format!("; there is '{name}'");
            }
        }
        if leaf == "bias" {
            "; for a model without biases, zeros do the same".into()
        } else {
            String::new()
        }
    }

    /// Removes the prefixes that all names have from wrappers of the model.
    pub fn unwrapped(mut self) -> Self {
        while let Some(first) = self.tensors.keys().next()
            && let Some(wrapper) = WRAPPERS.into_iter().find(|wrapper| first.starts_with(wrapper))
            && self.tensors.keys().all(|name| name.starts_with(wrapper))
        {
            let mut inner = BTreeMap::new();
            for (name, stored) in self.tensors {
                inner.insert(name[wrapper.len()..].to_owned(), stored);
            }
            self.tensors = inner;
        }
        self
    }

    /// Finds the parameters of a graph of a family with this table of names. The files may also
    /// contain masks and tables of angles, which are computed here, and the head of a model whose
    /// head is the embedding; a file of GPT-2 may omit the prefix `transformer.`. If `tokens` is
    /// given, it overrides the graph's number of rows in tables of tokens.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] for the first tensor that is missing, has another shape, or
    /// does not belong to the model.
    pub fn of_model(
        self,
        graph: &Graph,
        names: &[FileName],
        layout: TensorNames,
        tokens: Option<usize>,
    ) -> Result<ModelTensors, HuggingFaceError> {
        self.found(graph, names, layout, tokens).map_err(|stop| stop.why)
    }

    fn found(
        mut self,
        graph: &Graph,
        names: &[FileName],
        layout: TensorNames,
        tokens: Option<usize>,
    ) -> Result<ModelTensors, NotOfModel> {
        let mut found = Vec::with_capacity(graph.parameters.len());
        let has_head = graph.parameters.iter().any(|parameter| parameter.whole.name == HEAD);
        for parameter in &graph.parameters {
            let ours = &parameter.whole.name;
            let mut shape = parameter.slice.whole_dims().to_vec();
            if let Some(tokens) = tokens
                && is_table_of_tokens(names, ours)
            {
                shape[0] = tokens;
            }
            let named = match layout {
                TensorNames::HuggingFace => their_name(names, ours),
                TensorNames::Graph => None,
            };
            let (theirs, is_transposed) = named.unwrap_or_else(|| (ours.clone(), false));
            // A head that is the embedding may be stored instead of it.
            let is_table = names.first().is_some_and(|table| table.ours == ours);
            let stored = self.take(&theirs, layout, is_table && !has_head);
            let fits = stored.and_then(|stored| {
                stored.require(&self.directory, &theirs, &shape, is_transposed)?;
                Ok(stored)
            });
            match fits {
                Ok(stored) => {
                    let ours = ours.clone();
                    found.push(FoundTensor { ours, theirs, shape, is_transposed, stored });
                }
                Err(why) => return Err(NotOfModel { found: found.len(), why }),
            }
        }
        // A user's own graph has no names in Hugging Face's files, and no head that may be an
        // embedding.
        let is_language_model = !names.is_empty();
        let head = if is_language_model { self.tensors.remove(HEAD) } else { None };
        let is_left_out = |name: &String| {
            // PyTorch counts the batches of a batch norm, for the case that it has no momentum.
            name.ends_with(".num_batches_tracked") || is_language_model && is_computed(name)
        };
        match self.tensors.keys().find(|name| !is_left_out(name)) {
            Some(other) => {
                let why = refused(&self.directory, other, "is none of the model".into());
                Err(NotOfModel { found: found.len(), why })
            }
            None => Ok(ModelTensors { directory: self.directory, tensors: found, head }),
        }
    }

    /// Takes the tensor of a name, with or without the prefix `transformer.`; or else the head, if
    /// it `may_be_head`.
    fn take(
        &mut self,
        theirs: &str,
        layout: TensorNames,
        may_be_head: bool,
    ) -> Result<StoredTensor, HuggingFaceError> {
        let short = theirs.strip_prefix("transformer.").unwrap_or(theirs);
        let mut stored = self.tensors.remove(theirs).or_else(|| self.tensors.remove(short));
        // As in nanoGPT.
        if stored.is_none() && layout == TensorNames::Graph {
            stored = self.tensors.remove(&format!("transformer.{theirs}"));
        }
        if stored.is_none() && may_be_head {
            stored = self.tensors.remove(HEAD);
        }
        stored.ok_or_else(|| HuggingFaceError::Missing {
            directory: self.directory.clone(),
            tensor: theirs.into(),
            there: self.alike(theirs),
        })
    }
}

/// Files that do not have the tensors of a model.
struct NotOfModel {
    /// Number of parameters found before the one that is missing or another.
    found: usize,
    why: HuggingFaceError,
}

/// Finds the parameters of a graph in weights without a configuration: a file, or a directory with
/// `model.safetensors`. Their names and layouts are those of transformers, or those of the graph:
/// of GPT-2's matrices those of queries, keys and values are never square, so that only one of the
/// layouts fits.
///
/// # Errors
/// Returns the errors of [`StoredTensors::open`] and [`StoredTensors::of_model`], of the layout of
/// which more parameters are found.
pub fn tensors_of_weights(
    path: &Path,
    graph: &Graph,
    names: &[FileName],
    tokens: Option<usize>,
) -> Result<ModelTensors, HuggingFaceError> {
    let found = |layout| {
        let stored = StoredTensors::open(path)?.unwrapped();
        Ok(stored.found(graph, names, layout, tokens))
    };
    let of_graph: NotOfModel = match found(TensorNames::Graph)? {
        Ok(tensors) => return Ok(tensors),
        Err(refusal) => refusal,
    };
    match found(TensorNames::HuggingFace)? {
        Ok(tensors) => Ok(tensors),
        Err(of_transformers) if of_transformers.found > of_graph.found => Err(of_transformers.why),
        Err(_) => Err(of_graph.why),
    }
}

/// Returns true for a parameter with a row for every token: the embedding, which is the first entry
/// of a family's table, or a separate head.
pub fn is_table_of_tokens(names: &[FileName], ours: &str) -> bool {
    names.first().is_some_and(|table| table.ours == ours || ours == HEAD)
}

struct FoundTensor {
    ours: String,
    theirs: String,
    /// Shape in the graph; reversed in the files if `is_transposed`.
    shape: Vec<usize>,
    is_transposed: bool,
    stored: StoredTensor,
}

/// Parameters of a model in its files.
pub struct ModelTensors {
    directory: PathBuf,
    tensors: Vec<FoundTensor>,
    /// Head of a model whose head is the embedding, if the files contain it too.
    head: Option<StoredTensor>,
}

impl ModelTensors {
    /// Reads all parameters, in the order of the graph and under the graph's names, converted to
    /// f32. Besides the result, memory holds one tensor in its stored form.
    ///
    /// # Errors
    /// Returns [`HuggingFaceError`] if a file cannot be read, or if a value is not finite.
    pub fn read(&self) -> Result<Vec<NamedTensor>, HuggingFaceError> {
        let mut read = Vec::with_capacity(self.tensors.len());
        for FoundTensor { ours, theirs, shape, is_transposed, stored } in &self.tensors {
            let mut values = stored.read()?;
            if values.iter().any(|value| !value.is_finite()) {
                let why = "has values that are not finite";
                return Err(refused(&self.directory, theirs, why.into()));
            }
            if let ([rows, columns], true) = (&shape[..], *is_transposed) {
                values = transpose(&values, *columns, *rows);
            }
            read.push(NamedTensor { name: ours.clone(), shape: shape.clone(), values });
        }
        if let Some(head) = &self.head {
            // The embedding comes first in a family's table, and in its graph.
            let is_alike = read.first().is_some_and(|table| table.shape == head.shape)
                && head.is_half_or_float()
                && read.first().map(|table| &table.values) == Some(&head.read()?);
            if !is_alike {
                let why = "differs from the embedding, which is the head by tie_word_embeddings; \
                           set model.tie=false to have both";
                return Err(refused(&self.directory, HEAD, why.into()));
            }
        }
        Ok(read)
    }
}

/// Returns true for a tensor that a file may contain and a model computes.
fn is_computed(name: &str) -> bool {
    let is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    is_mask || name.ends_with(".rotary_emb.inv_freq")
}

impl StoredTensor {
    /// Checks the type, and the shape, which is reversed in the files if it `is_transposed`.
    fn require(
        &self,
        directory: &Path,
        theirs: &str,
        shape: &[usize],
        is_transposed: bool,
    ) -> Result<(), HuggingFaceError> {
        if !self.is_half_or_float() {
            let why = format!("is in {:?}, not F32, F16 or BF16", self.dtype);
            return Err(refused(directory, theirs, why));
        }
        let mut there = shape.to_vec();
        if is_transposed {
            there.reverse();
        }
        if self.shape != there {
            let hint = match transposed_hint(&self.shape, &there) {
                hint if hint.is_empty() || !is_transposed => hint,
                _ => ", its transpose: GPT-2's files have linear weights as (in, out)",
            };
            let why = format!("is {:?}, and the model's is {there:?}{hint}", self.shape);
            return Err(refused(directory, theirs, why));
        }
        Ok(())
    }

    fn is_half_or_float(&self) -> bool {
        matches!(self.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }

    /// Reads the values, converted to f32, which is exact.
    fn read(&self) -> Result<Vec<f32>, HuggingFaceError> {
        let mut bytes = vec![0; self.bytes];
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = File::open(&self.file)?;
            file.seek(SeekFrom::Start(self.start))?;
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        let bytes =
            read().map_err(|why| HuggingFaceError::Read { path: self.file.clone(), why })?;
        Ok(match self.dtype {
            Dtype::BF16 => widened(&bytes, |pair| f32::from_bits(u32::from(pair) << 16)),
            Dtype::F16 => widened(&bytes, |pair| half::f16::from_bits(pair).to_f32()),
            // Other types are never read.
            _ => bytemuck::pod_collect_to_vec(&bytes),
        })
    }
}

fn widened(bytes: &[u8], value: impl Fn(u16) -> f32) -> Vec<f32> {
    bytes.chunks_exact(2).map(|pair| value(u16::from_le_bytes([pair[0], pair[1]]))).collect()
}

fn header(path: &Path) -> Result<BTreeMap<String, StoredTensor>, HuggingFaceError> {
    let unreadable = |why| HuggingFaceError::Read { path: path.into(), why };
    let mut file = File::open(path).map_err(unreadable)?;
    let length = file.metadata().map_err(unreadable)?.len();
    let mut prefix = [0; 8];
    let cut = |_| damaged(path, "is cut off in its header".into());
    file.read_exact(&mut prefix).map_err(cut)?;
    let bytes = u64::from_le_bytes(prefix);
    if bytes > HEADER_BYTES_MAX || bytes > length {
        return Err(damaged(path, "is no safetensors file, or cut off in its header".into()));
    }
    let mut text = vec![0; bytes as usize];
    file.read_exact(&mut text).map_err(cut)?;
    let metadata: Metadata = serde_json::from_slice(&text)
        .map_err(|why| damaged(path, format!("has a header that {why}")))?;
    let first = 8 + bytes;
    let wanted = first + metadata.data_len() as u64;
    if wanted != length {
        let why = format!("has {length} bytes, and its header is of {wanted}");
        return Err(damaged(path, why));
    }
    let mut tensors = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let stored = StoredTensor {
            file: path.into(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            start: first + start as u64,
            bytes: end - start,
        };
        tensors.insert(name, stored);
    }
    Ok(tensors)
}

/// Returns true for a name that does not lead to another directory.
fn is_file_name(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name) && !name.contains(['/', '\\'])
}

pub(super) fn refused(directory: &Path, tensor: &str, why: String) -> HuggingFaceError {
    HuggingFaceError::Tensor { directory: directory.into(), tensor: tensor.into(), why }
}

fn damaged(path: &Path, why: String) -> HuggingFaceError {
    HuggingFaceError::Damaged { path: path.into(), why }
}

/// Reads a JSON file of at most `bytes_max` bytes.
pub fn read_json<T: serde::de::DeserializeOwned>(
    path: &Path,
    bytes_max: u64,
) -> Result<T, HuggingFaceError> {
    let text = read_text(path, bytes_max)?;
    serde_json::from_str(&text)
        .map_err(|why| damaged(path, format!("is not what it should be: {why}")))
}

/// Reads a text file of at most `bytes_max` bytes.
pub fn read_text(path: &Path, bytes_max: u64) -> Result<String, HuggingFaceError> {
    let bytes = read_bytes(path, bytes_max)?;
    String::from_utf8(bytes).map_err(|_| damaged(path, "is no text in UTF-8".into()))
}

/// Reads a file of at most `bytes_max` bytes.
pub fn read_bytes(path: &Path, bytes_max: u64) -> Result<Vec<u8>, HuggingFaceError> {
    let unreadable = |why| HuggingFaceError::Read { path: path.into(), why };
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(damaged(path, "is no file".into()));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > bytes_max {
        return Err(damaged(path, format!("is larger than {bytes_max} bytes")));
    }
    Ok(bytes)
}
