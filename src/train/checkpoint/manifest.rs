//! `manifest.json`: metadata and list of files of a checkpoint, written last.
//!
//! A field that a reader must not ignore adds a name to `needs`. A program that does not know the
//! name refuses the checkpoint, so the format number can stay. Other fields may be added freely: a
//! program that does not know them reads the manifest with a warning. Its runs write unknown fields
//! directly in `meta` again, but not unknown fields of the manifest itself or of objects in `meta`.
//! Fields that must survive an older program therefore belong in `meta`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::{AVERAGES, CheckpointError, FILES, MOMENTS, Meta, OPTIONAL_FILES, PARAMETERS};
use potluck_core::{TensorSlice, files};
use potluck_data::Tokenizer;
use potluck_data::tokenizer::TOKENIZER;

pub const NAME: &str = "manifest.json";

/// Format version written.
const FORMAT: u64 = 5;

/// Oldest format version read: all its tensors are whole, and `needs` is empty. Newer fields count
/// as unknown in it.
const OLDEST: u64 = 4;

const KNOWN_NEEDS: [&str; 2] = [NEEDS_TOKENIZER, NEEDS_AVERAGES];

/// Need of a checkpoint whose tokenizer is a file.
const NEEDS_TOKENIZER: &str = "tokenizer-file";

/// Need of a checkpoint that is evaluated with averages of its parameters.
const NEEDS_AVERAGES: &str = "averages";

/// Former formats, each with the last commit of the program that reads it.
const READERS: [(u64, &str); 1] = [(3, "a3fe4cf")];

/// Start of the only line that the hash does not cover. Lines of nested objects are indented
/// further.
const HASH_LINE: &str = "  \"blake3\": \"";

/// Largest accepted size of a manifest, far above real ones, so that a wrong file is not read into
/// memory.
const BYTES_MAX: u64 = 64 << 20;

#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Manifest {
    format: u64,
    /// Features without which the checkpoint would be misunderstood.
    #[serde(default)]
    needs: Vec<String>,
    pub meta: Meta,
    /// One entry for each of [`FILES`], in that order, except for missing [`OPTIONAL_FILES`]; then
    /// one for [`TOKENIZER`] if the tokenizer is a file.
    pub files: Vec<FileEntry>,
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
    /// BLAKE3 hash of the bytes of the file without the line of this field.
    pub blake3: String,
    /// Names of all fields that this version does not know, such as `meta.best.notes`.
    #[serde(skip)]
    pub(crate) unknown_names: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct FileEntry {
    pub name: String,
    pub bytes: u64,
    pub blake3: String,
    /// Tensors of the file that are slices of a tensor, by their name in the file.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub slices: BTreeMap<String, SavedSlice>,
}

#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct SavedSlice {
    pub tensor: String,
    pub slice: TensorSlice,
}

/// Format version: the only field common to manifests of all versions.
#[derive(serde::Deserialize)]
struct Format {
    format: u64,
}

/// Fields that a reader must know, whatever the other fields of the manifest are.
#[derive(serde::Deserialize)]
struct Needs {
    #[serde(default)]
    needs: Vec<String>,
}

impl Manifest {
    pub fn new(meta: Meta, files: Vec<FileEntry>) -> Self {
        let mut needs = Vec::new();
        if matches!(meta.tokenizer, Some(Tokenizer::File(_))) {
            needs.push(NEEDS_TOKENIZER.into());
        }
        if files.iter().any(|file| file.name == AVERAGES) {
            needs.push(NEEDS_AVERAGES.into());
        }
        let mut manifest = Self {
            format: FORMAT,
            needs,
            meta,
            files,
            unknown: BTreeMap::new(),
            blake3: String::new(),
            unknown_names: Vec::new(),
        };
        manifest.blake3 = digest(&manifest.json());
        manifest
    }

    /// Writes the manifest into a checkpoint directory, synced to the disk on return.
    pub fn write(&self, directory: &Path) -> Result<(), CheckpointError> {
        let path = directory.join(NAME);
        files::replace(&path, &self.json())
            .map_err(|why| CheckpointError::Write { path: path.clone(), why })
    }

    /// Reads and checks the manifest of a checkpoint directory, but not the files it names.
    pub fn read(directory: &Path) -> Result<Self, CheckpointError> {
        let path = directory.join(NAME);
        let damaged = |why: String| CheckpointError::Damaged { path: path.clone(), why };
        let read_error = |why| CheckpointError::Read { path: path.clone(), why };
        let found = fs::symlink_metadata(&path).map_err(read_error)?;
        if !found.is_file() || found.len() > BYTES_MAX {
            return Err(damaged("it is not a manifest".into()));
        }
        let mut bytes = Vec::new();
        let file = File::open(&path).map_err(read_error)?;
        file.take(BYTES_MAX).read_to_end(&mut bytes).map_err(read_error)?;

        let Format { format } =
            serde_json::from_slice(&bytes).map_err(|why| damaged(why.to_string()))?;
        if !(OLDEST..=FORMAT).contains(&format) {
            let reader = READERS.iter().find(|(former, _)| *former == format);
            let reader = reader.map(|(_, commit)| *commit);
            let (oldest, newest) = (OLDEST, FORMAT);
            return Err(CheckpointError::Format { path, found: format, oldest, newest, reader });
        }
        let found: Value =
            serde_json::from_slice(&bytes).map_err(|why| damaged(why.to_string()))?;
        if !has_digest_of(&found, &bytes) {
            return Err(damaged("its content does not have its BLAKE3 hash".into()));
        }
        let mut own = found.clone();
        if format == OLDEST {
            remove_later_fields(&mut own);
        }
        // Checked first: a need of a later version may concern any other field.
        let Needs { needs } =
            Needs::deserialize(&own).map_err(|why| damaged(format!("its needs: {why}")))?;
        let is_unknown = |name: &String| !KNOWN_NEEDS.contains(&name.as_str());
        let unknown: Vec<String> = needs.into_iter().filter(is_unknown).collect();
        if !unknown.is_empty() {
            return Err(CheckpointError::Needs { path, names: unknown });
        }
        let mut manifest: Self =
            serde_json::from_value(own).map_err(|why| damaged(why.to_string()))?;
        manifest.unknown_names = unknown_names(&found, &manifest.known(), "");
        // Only known names are ever opened, so a path that leads elsewhere is not followed.
        let names: Vec<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
        let tensors = match (names.split_last(), &manifest.meta.tokenizer) {
            (Some((&TOKENIZER, others)), Some(Tokenizer::File(_))) => others,
            _ => &names[..],
        };
        let optional = tensors.strip_prefix(&[PARAMETERS, MOMENTS][..]);
        let mut left = OPTIONAL_FILES.iter();
        if !optional.is_some_and(|names| names.iter().all(|name| left.any(|known| known == name))) {
            return Err(damaged(format!("it names the files {names:?}, of {FILES:?}")));
        }
        let has_tokenizer = tensors.len() < names.len();
        if has_tokenizer != matches!(manifest.meta.tokenizer, Some(Tokenizer::File(_))) {
            return Err(damaged(format!("its tokenizer is a file, and it lists no {TOKENIZER}")));
        }
        if let (Some(Tokenizer::File(file)), Some(entry)) =
            (&manifest.meta.tokenizer, manifest.file(TOKENIZER))
            && file.blake3() != entry.blake3
        {
            return Err(damaged(format!("it has two hashes of {TOKENIZER}")));
        }
        if step_of(directory).is_some_and(|step| step != manifest.meta.step) {
            return Err(damaged(format!("it is that of step {}", manifest.meta.step)));
        }
        Ok(manifest)
    }

    /// Returns the entry of a file; `None` if it is missing.
    pub fn file(&self, name: &str) -> Option<&FileEntry> {
        self.files.iter().find(|file| file.name == name)
    }

    /// Names of the unknown fields that a run does not write again.
    pub(crate) fn lost_names(&self) -> Vec<&str> {
        let names = self.unknown_names.iter().map(String::as_str);
        let is_kept = |name: &str| {
            name.strip_prefix("meta.").is_some_and(|name| self.meta.unknown.contains_key(name))
        };
        names.filter(|name| !is_kept(name)).collect()
    }

    /// Returns true if `self` and `other` have the same state and description, except for the best
    /// evaluation and the number of evaluations since it.
    pub(crate) fn equals_but_for_best(&self, other: &Self) -> bool {
        self.meta.equals_but_for_best(&other.meta) && self.files == other.files
    }

    /// Returns true if nothing is lost when a checkpoint is replaced by one with the manifest
    /// `other`. What is beside the tensors of a trainer of the library is in its user's code, and
    /// changes with the devices.
    pub(crate) fn is_replaced_by(&self, other: &Self) -> bool {
        let is_of_library = self.meta.is_of_library() && other.meta.is_of_library();
        self.equals_but_for_best(other)
            || is_of_library && self.meta.step == other.meta.step && self.files == other.files
    }

    /// The manifest as JSON, without the fields that are unknown in its format.
    fn known(&self) -> Value {
        let meta = Meta { unknown: BTreeMap::new(), ..self.meta.clone() };
        let known = Self { meta, unknown: BTreeMap::new(), ..self.clone() };
        let mut json = serde_json::to_value(known).expect("a manifest is plain data");
        if self.format == OLDEST {
            remove_later_fields(&mut json);
        }
        json
    }

    fn json(&self) -> Vec<u8> {
        // Serialization fails only for maps with non-string keys and types that refuse it; a
        // manifest has neither.
        let mut json = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        json.push(b'\n');
        json
    }
}

/// Returns true if the file has exactly one line with a hash, and this is the hash of all other
/// lines.
fn has_digest_of(manifest: &Value, bytes: &[u8]) -> bool {
    let Some(hash) = manifest.get("blake3").and_then(Value::as_str) else { return false };
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').filter(|line| is_hash(line));
    let line = format!("{HASH_LINE}{hash}\"\n");
    let is_only = lines.next() == Some(line.as_bytes()) && lines.next().is_none();
    is_only && hash == digest(bytes)
}

/// Removes the fields that only formats after [`OLDEST`] have.
fn remove_later_fields(manifest: &mut Value) {
    if let Some(fields) = manifest.as_object_mut() {
        fields.remove("needs");
    }
    let files = manifest.get_mut("files").and_then(Value::as_array_mut);
    for file in files.into_iter().flatten() {
        if let Some(entry) = file.as_object_mut() {
            entry.remove("slices");
        }
    }
}

fn is_hash(line: &[u8]) -> bool {
    line.starts_with(HASH_LINE.as_bytes())
}

/// BLAKE3 hash of the bytes of a manifest without the hash line.
fn digest(bytes: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').filter(|line| !is_hash(line));
    for line in lines {
        hasher.update(line);
    }
    hasher.finalize().to_hex().to_string()
}

/// Dotted names of the fields of `found`, below `place`, that `known` does not have.
fn unknown_names(found: &Value, known: &Value, place: &str) -> Vec<String> {
    match (found, known) {
        (Value::Object(found), Value::Object(known)) => found
            .iter()
            .flat_map(|(name, value)| {
                let place = if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
                match known.get(name) {
                    Some(known) => unknown_names(value, known, &place),
                    None => vec![place],
                }
            })
            .collect(),
        (Value::Array(found), Value::Array(known)) => {
            let pairs = found.iter().zip(known);
            pairs.flat_map(|(found, known)| unknown_names(found, known, place)).collect()
        }
        _ => Vec::new(),
    }
}

pub(super) fn step_of(path: &Path) -> Option<u64> {
    let found = path.file_name()?.to_str()?;
    let step = found.strip_prefix("step-")?.parse().ok()?;
    // Only the canonical name of a step is accepted.
    (directory_name(step) == found).then_some(step)
}

pub(super) fn directory_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Serialization of floats as decimal text, which reads back bit by bit. JSON readers may round
/// numbers, and JSON has no non-finite ones.
pub(crate) mod exact {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|_| serde::de::Error::custom(format!("'{text}' is not a number")))
    }
}
