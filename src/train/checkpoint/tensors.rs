//! Tensors in a safetensors file: a header of JSON with names, shapes and offsets, then the
//! values, little-endian, in the order of the header.
//! <https://github.com/huggingface/safetensors#format>

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::manifest::{FileEntry, SavedSlice};
use super::{CheckpointError, NamedTensor};
use potluck_core::DType;

/// Size in bytes of the prefix that holds the header's length.
const PREFIX_BYTES: usize = size_of::<u64>();

// Values are written and read as laid out in memory.
const _: () = assert!(cfg!(target_endian = "little"), "safetensors are little-endian");

/// Checks that the tensors can be written and read back.
///
/// # Errors
/// Returns `CheckpointError::Unsavable` for the first tensor with a reserved or repeated name, or
/// with a number of values that does not match its shape.
pub fn check(tensors: &[NamedTensor]) -> Result<(), CheckpointError> {
    let mut names = HashSet::new();
    for NamedTensor { name, shape, values } in tensors {
        let unsavable = |why| Err(CheckpointError::Unsavable { name: name.clone(), why });
        if name == "__metadata__" {
            return unsavable("the file format keeps this name for itself");
        }
        if !names.insert(name) {
            return unsavable("another one has the same name");
        }
        if shape.iter().product::<usize>() != values.len() {
            return unsavable("the number of its values does not match its shape");
        }
    }
    Ok(())
}

/// Writes tensors that passed `check` to a new file, which is synced to the disk on return.
/// Calls `middle` after the first half of the tensors.
pub fn write(
    path: &Path,
    tensors: &[NamedTensor],
    middle: impl FnOnce() -> io::Result<()>,
) -> io::Result<FileEntry> {
    let header = header(tensors)?;
    let mut file = File::create_new(path)?;
    let mut hasher = blake3::Hasher::new();
    let mut bytes = 0;
    let mut put = |part: &[u8]| {
        hasher.update(part);
        bytes += part.len() as u64;
        file.write_all(part)
    };
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    let (first, second) = tensors.split_at(tensors.len() / 2);
    first.iter().try_for_each(|tensor| put(bytemuck::cast_slice(&tensor.values)))?;
    middle()?;
    second.iter().try_for_each(|tensor| put(bytemuck::cast_slice(&tensor.values)))?;
    file.sync_all()?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let blake3 = hasher.finalize().to_hex().to_string();
    Ok(FileEntry { name, bytes, blake3, slices: BTreeMap::new() })
}

/// Reads a file and verifies its length and hash against its entry.
pub fn read(path: &Path, entry: &FileEntry) -> Result<Vec<NamedTensor>, CheckpointError> {
    let mut bytes = Vec::new();
    let mut file = open(path, entry)?;
    file.read_to_end(&mut bytes).map_err(|why| CheckpointError::Read { path: path.into(), why })?;
    compare(path, entry, blake3::hash(&bytes))?;
    let tensors = parse(&bytes).and_then(|tensors| joined(tensors, &entry.slices));
    tensors.map_err(|why| CheckpointError::Damaged { path: path.into(), why })
}

/// Joins the slices of tensors, each tensor at the position of its first slice.
///
/// # Errors
/// Returns a sentence if a slice is missing, if its dimensions do not match its ranges, or if the
/// slices of a tensor do not cover each element exactly once.
fn joined(
    tensors: Vec<NamedTensor>,
    slices: &BTreeMap<String, SavedSlice>,
) -> Result<Vec<NamedTensor>, String> {
    if slices.is_empty() {
        return Ok(tensors);
    }
    // All are checked before any allocation, so that no tensor exceeds the size of the file.
    for (name, SavedSlice { slice, .. }) in slices {
        let Some(part) = tensors.iter().find(|tensor| tensor.name == *name) else {
            return Err(format!("it has no slice '{name}'"));
        };
        let (found, wanted) = (&part.shape, slice.dims());
        if *found != wanted {
            return Err(format!("its slice '{name}' is {found:?} instead of {wanted:?}"));
        }
    }
    let mut whole: Vec<NamedTensor> = Vec::new();
    // By name: its index in `whole`, and which of its elements the slices so far cover.
    let mut open: BTreeMap<&str, (usize, Vec<bool>)> = BTreeMap::new();
    for part in tensors {
        let Some(SavedSlice { tensor, slice }) = slices.get(&part.name) else {
            if whole.iter().any(|other| other.name == part.name) {
                return Err(format!("it has the tensor '{}' whole and in slices", part.name));
            }
            whole.push(part);
            continue;
        };
        if !open.contains_key(tensor.as_str()) {
            if whole.iter().any(|other| other.name == *tensor) {
                return Err(format!("it has the tensor '{tensor}' whole and in slices"));
            }
            let of_tensor = slices.values().filter(|other| other.tensor == *tensor);
            let elements = of_tensor.map(|other| other.slice.elements()).sum();
            let shape = slice.whole_dims().to_vec();
            // The product does not overflow: a slice that was read belongs to a tensor with a
            // countable number of elements.
            if shape.iter().product::<usize>() != elements {
                return Err(format!("its slices of '{tensor}' are not all of it"));
            }
            open.insert(tensor, (whole.len(), vec![false; elements]));
            let values = vec![0.0; elements];
            whole.push(NamedTensor { name: tensor.clone(), shape, values });
        }
        // Always found: inserted above at the latest.
        let Some((at, is_known)) = open.get_mut(tensor.as_str()) else { continue };
        let tensor = &mut whole[*at];
        if tensor.shape != slice.whole_dims() || slice.cut(is_known).contains(&true) {
            return Err(format!("its slices of '{}' contradict each other", tensor.name));
        }
        slice.put(&vec![true; part.values.len()], is_known);
        slice.put(&part.values, &mut tensor.values);
    }
    Ok(whole)
}

/// Verifies the length and hash of a file against its entry, without holding it in memory.
pub(crate) fn verify(path: &Path, entry: &FileEntry) -> Result<(), CheckpointError> {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update_reader(open(path, entry)?)
        .map_err(|why| CheckpointError::Read { path: path.into(), why })?;
    compare(path, entry, hasher.finalize())
}

/// Opens a file after comparing its length with its entry.
fn open(path: &Path, entry: &FileEntry) -> Result<io::Take<File>, CheckpointError> {
    let damaged = |why| Err(CheckpointError::Damaged { path: path.into(), why });
    let read_error = |why| CheckpointError::Read { path: path.into(), why };
    let found = fs::symlink_metadata(path).map_err(read_error)?;
    if !found.is_file() {
        return damaged("it is not a regular file".into());
    }
    if found.len() != entry.bytes {
        return damaged(format!("it has {} bytes instead of {}", found.len(), entry.bytes));
    }
    Ok(File::open(path).map_err(read_error)?.take(entry.bytes))
}

fn compare(path: &Path, entry: &FileEntry, hash: blake3::Hash) -> Result<(), CheckpointError> {
    if hash.to_hex().as_str() == entry.blake3 {
        return Ok(());
    }
    let why = "its content does not have the BLAKE3 hash of the manifest".into();
    Err(CheckpointError::Damaged { path: path.into(), why })
}

/// JSON header, padded to a multiple of 8 bytes.
fn header(tensors: &[NamedTensor]) -> io::Result<Vec<u8>> {
    let mut offset = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let end = offset + tensor.values.len() * DType::F32.bytes();
        let info = TensorInfo {
            dtype: Dtype::F32,
            shape: tensor.shape.clone(),
            data_offsets: (offset, end),
        };
        infos.push((tensor.name.clone(), info));
        offset = end;
    }
    let metadata = Metadata::new(None, infos).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(PREFIX_BYTES), b' ');
    Ok(header)
}

/// Parses the tensors of a file, in file order. Never panics, and allocates no more than the size
/// of the bytes requires.
///
/// # Errors
/// Returns a description of the first fault in the bytes.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<NamedTensor>, String> {
    let (prefix, rest) =
        bytes.split_first_chunk::<PREFIX_BYTES>().ok_or("it is too short for its header")?;
    let length = usize::try_from(u64::from_le_bytes(*prefix))
        .ok()
        .filter(|length| *length <= rest.len())
        .ok_or("it is too short for its header")?;
    let (header, values) = rest.split_at(length);
    // This checks that tensors are contiguous and that offsets match shapes.
    let metadata: Metadata =
        serde_json::from_slice(header).map_err(|why| format!("its header is wrong: {why}"))?;
    if metadata.data_len() != values.len() {
        return Err("its tensors do not fill it".into());
    }
    metadata.offset_keys().into_iter().map(|name| tensor(name, &metadata, values)).collect()
}

fn tensor(name: String, metadata: &Metadata, values: &[u8]) -> Result<NamedTensor, String> {
    let info = metadata.info(&name).ok_or("its header is wrong")?;
    if info.dtype != Dtype::F32 {
        return Err(format!("its tensor '{name}' is {:?} instead of F32", info.dtype));
    }
    // In range: offsets rise to the length of `values`, as the caller and `Metadata` checked.
    let bytes = &values[info.data_offsets.0..info.data_offsets.1];
    let values = bytemuck::pod_collect_to_vec(bytes);
    Ok(NamedTensor { name, shape: info.shape.clone(), values })
}
