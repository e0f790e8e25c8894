//! IDX files, the format of MNIST: a head of two zero bytes, the type of the values, the number of
//! dimensions, and each dimension as a big-endian `u32`; then the values, the last dimension
//! fastest. LeCun, Cortes, Burges, "The MNIST database of handwritten digits",
//! <http://yann.lecun.com/exdb/mnist/>. Also gzipped (RFC 1952), detected by the first bytes.

use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::files::{self, FileSets, entries, file_name, invalid};
use super::{DataError, FileSet, ReadSet, Request, Samples, Targets};
use crate::Features;
use potluck_core::format::dims_text;

/// First bytes of a file of unsigned bytes.
pub(super) const MAGIC: &[u8] = &[0, 0, 8];
/// First bytes of a gzipped file.
pub(super) const GZIP: &[u8] = &[0x1f, 0x8b];

/// Prefixes of held-out samples; if there are several, the first one is taken.
const HELD_OUT: [&str; 4] = ["val", "validation", "test", "t10k"];

/// Largest compression factor of gzip: 258 bytes in two bits.
const GZIP_FACTOR_MAX: usize = 1032;

/// Meaning of the name of an IDX file, as in `PREFIX-images-idx3-ubyte.gz`.
#[derive(Debug, PartialEq)]
pub(super) struct IdxRole {
    pub(crate) is_images: bool,
    prefix: String,
}

impl IdxRole {
    /// Returns the prefix without the word that names the set (`emnist-` of `emnist-train`), and
    /// that word.
    fn set(&self) -> (&str, &str) {
        for word in ["train"].into_iter().chain(HELD_OUT) {
            if let Some(base) = self.prefix.strip_suffix(word) {
                return (base, word);
            }
        }
        (&self.prefix, "")
    }
}

/// Meaning of the name of an IDX file; `None` if it is not named like one.
pub(super) fn role_of(name: &str) -> Option<IdxRole> {
    let name = name.strip_suffix(".gz").unwrap_or(name);
    for (word, is_images) in [("images", true), ("labels", false)] {
        for separator in ["-", "."] {
            let Some((prefix, rest)) = name.split_once(&format!("{word}{separator}idx")) else {
                continue;
            };
            let endings: &[&str] = if is_images { &["3-ubyte", "4-ubyte"] } else { &["1-ubyte"] };
            if endings.contains(&rest) {
                let prefix = prefix.trim_end_matches(['-', '_', '.']).into();
                return Some(IdxRole { is_images, prefix });
            }
        }
    }
    None
}

/// Finds images and labels in a directory, or those that belong to a file.
pub(super) fn find(path: &Path) -> Result<FileSets, DataError> {
    let mut directory = path;
    let mut wanted = None;
    if !path.is_dir() {
        match role_of(&file_name(path)) {
            Some(role) if role.is_images => wanted = Some(role),
            // A file of labels is refused when it is read.
            _ => return Ok(FileSets::only(FileSet { inputs: vec![path.into()], targets: None })),
        }
        directory = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
    }

    let mut images: Vec<IdxFile> = Vec::new();
    let mut labels: Vec<IdxFile> = Vec::new();
    for path in entries(directory)? {
        match role_of(&file_name(&path)) {
            Some(role) if role.is_images => images.push(IdxFile { role, path }),
            Some(role) => labels.push(IdxFile { role, path }),
            None => {}
        }
    }
    // Unpacked files come before gzipped ones of the same name.
    images.dedup_by(|b, a| a.role.prefix == b.role.prefix);
    if let Some(role) = wanted {
        let (base, word) = role.set();
        images.retain(|other| other.role.set().0 == base && word == "train");
        return Ok(FileSets {
            first: set_of(path, &role, &labels),
            held_out: held_out(&images).map(|file| set_of(&file.path, &file.role, &labels)),
        });
    }

    let trains: Vec<&IdxFile> =
        images.iter().filter(|file| !HELD_OUT.contains(&file.role.set().1)).collect();
    let has_bases = images.iter().any(|file| file.role.set().0 != images[0].role.set().0);
    if trains.len() > 1 || has_bases {
        let names: Vec<String> = images.iter().map(|file| file_name(&file.path)).collect();
        let why = format!("has several sets of images ({}); give one file", names.join(", "));
        return Err(invalid(&path.display().to_string(), "", why));
    }
    let train = trains.first().map(|file| set_of(&file.path, &file.role, &labels));
    let held_out = held_out(&images).map(|file| set_of(&file.path, &file.role, &labels));
    FileSets::new(train, held_out).ok_or_else(|| {
        let why = "has no images named like train-images-idx3-ubyte or train-images-idx3-ubyte.gz";
        invalid(&path.display().to_string(), "", why)
    })
}

/// IDX file of a directory.
struct IdxFile {
    role: IdxRole,
    path: PathBuf,
}

/// Set of images with their labels, if there are any.
fn set_of(images: &Path, role: &IdxRole, labels: &[IdxFile]) -> FileSet {
    let labels = labels.iter().find(|file| file.role.prefix == role.prefix);
    FileSet { inputs: vec![images.into()], targets: labels.map(|file| file.path.clone()) }
}

fn held_out(images: &[IdxFile]) -> Option<&IdxFile> {
    for word in HELD_OUT {
        if let Some(found) = images.iter().find(|file| file.role.set().1 == word) {
            return Some(found);
        }
    }
    None
}

/// Reads images and their labels.
pub(super) fn read(set: &FileSet, request: &Request) -> Result<ReadSet, DataError> {
    let path = &set.inputs[0];
    let name = path.display().to_string();
    let (bytes, file) = files::read(path, request.base)?;
    let images = parse(&name, bytes)?;
    let mut files = vec![file];
    let mut labels = None;
    if let Some(path) = &set.targets {
        let name = path.display().to_string();
        let (bytes, file) = files::read(path, request.base)?;
        files.push(file);
        labels = Some((parse(&name, bytes)?, name));
    } else if request.targets && images.dims.len() > 1 {
        let expected = file_name(path).trim_end_matches(".gz").replace("images", "labels");
        let expected = expected.replace("idx3", "idx1").replace("idx4", "idx1");
        let why = format!("has no labels beside it; expected {expected}, gzipped or not");
        return Err(invalid(&name, "", why));
    }
    let samples = join(name, images, labels)?;
    Ok(ReadSet { samples, files, is_numbered: true })
}

/// Content of an IDX file.
#[derive(Debug)]
pub(super) struct IdxArray {
    pub dims: Vec<usize>,
    pub values: Vec<u8>,
}

/// Makes samples of images and labels.
pub(super) fn join(
    name: String,
    images: IdxArray,
    labels: Option<(IdxArray, String)>,
) -> Result<Samples, DataError> {
    let shape = match images.dims[..] {
        [_, height, width] => vec![1, height, width],
        [_, channels, height, width] => vec![channels, height, width],
        _ => {
            let why = "holds labels (1 dimension); give the images, with 3 or 4 dimensions";
            return Err(invalid(&name, "byte 3", why));
        }
    };
    let targets = match labels {
        None => Targets::Absent,
        Some((labels, labels_name)) => {
            let [count] = labels.dims[..] else {
                let dims = labels.dims.len();
                let why = format!("has {dims} dimensions; expected 1, a label of each image");
                return Err(invalid(&labels_name, "byte 3", why));
            };
            if count != images.dims[0] {
                let why = format!("has {count} labels for the {} images of {name}", images.dims[0]);
                return Err(invalid(&labels_name, "byte 4", why));
            }
            let ids: Vec<u32> = labels.values.into_iter().map(u32::from).collect();
            let classes = ids.iter().max().map_or(0, |highest| highest + 1);
            Targets::Classes { ids, names: (0..classes).map(|class| class.to_string()).collect() }
        }
    };
    let features = Features::Bytes(images.values);
    Ok(Samples {
        name,
        shape,
        columns: Vec::new(),
        target_columns: Vec::new(),
        features,
        targets,
        ids: None,
    })
}

/// Reads an IDX file of unsigned bytes, gzipped or not.
///
/// # Errors
/// Returns `DataError` if it is not an IDX file of 1, 3 or 4 dimensions, or not as long as its
/// dimensions say.
pub(super) fn parse(name: &str, bytes: Vec<u8>) -> Result<IdxArray, DataError> {
    let mut bytes = if bytes.starts_with(GZIP) { unpack(name, &bytes)? } else { bytes };
    let IdxHead { dims, start, end } = IdxHead::parse(name, &bytes)?;
    if bytes.len() != end {
        let found = if bytes.len() < end {
            format!("only {} are there", bytes.len())
        } else {
            "more are there".into()
        };
        let why = format!("should be {end} bytes long for {}, and {found}", dims_text(&dims));
        return Err(invalid(name, "", why));
    }
    bytes.drain(..start);
    Ok(IdxArray { dims, values: bytes })
}

/// Unpacks a gzipped IDX file, up to one byte more than its head declares.
fn unpack(name: &str, packed: &[u8]) -> Result<Vec<u8>, DataError> {
    let mut decoder = MultiGzDecoder::new(packed);
    let mut bytes = Vec::new();
    unpack_more(name, &mut decoder, 4, &mut bytes)?;
    let dims = bytes.get(3).map_or(0, |dims| 4 * usize::from((*dims).min(4)));
    unpack_more(name, &mut decoder, dims, &mut bytes)?;
    let IdxHead { dims, start, end } = IdxHead::parse(name, &bytes)?;
    if end > packed.len().saturating_mul(GZIP_FACTOR_MAX) {
        let dims = dims_text(&dims);
        let packed = packed.len();
        let why = format!("declares {dims} values, more than {packed} bytes of gzip can hold");
        return Err(invalid(name, "byte 4 unpacked", why));
    }
    // Reading one byte more finds trailing bytes, and otherwise the checksum at the end.
    unpack_more(name, &mut decoder, (end - start).saturating_add(1), &mut bytes)?;
    Ok(bytes)
}

/// Appends up to `length` unpacked bytes.
fn unpack_more(
    name: &str,
    decoder: &mut MultiGzDecoder<&[u8]>,
    length: usize,
    bytes: &mut Vec<u8>,
) -> Result<(), DataError> {
    match decoder.by_ref().take(length as u64).read_to_end(bytes) {
        Ok(_) => Ok(()),
        Err(why) => {
            let at = format!("byte {} unpacked", bytes.len());
            Err(invalid(name, at, format!("its gzip data is damaged or cut off ({why})")))
        }
    }
}

/// Length of a file with values of one byte from `start` on; `None` on overflow.
fn file_length(dims: &[usize], start: usize) -> Option<usize> {
    let mut count = 1usize;
    for size in dims {
        count = count.checked_mul(*size)?;
    }
    count.checked_add(start)
}

/// Head of an IDX file.
struct IdxHead {
    dims: Vec<usize>,
    /// Offset of the values.
    start: usize,
    /// Length of the file.
    end: usize,
}

impl IdxHead {
    fn parse(name: &str, bytes: &[u8]) -> Result<Self, DataError> {
        let cut = |what: &str| {
            let why = format!("ends within {what}, after {} bytes", bytes.len());
            invalid(name, "", why)
        };
        let magic = bytes.first_chunk::<4>().ok_or_else(|| cut("the first 4 bytes of IDX"))?;
        let [zero, zero_too, kind, rank] = *magic;
        if [zero, zero_too] != [0, 0] {
            let why = format!("begins with {zero:02x} {zero_too:02x}; an IDX file with 00 00");
            return Err(invalid(name, "byte 0", why));
        }
        if kind != MAGIC[2] {
            let why = format!("the type is 0x{kind:02x}; only unsigned bytes, 0x08, are read");
            return Err(invalid(name, "byte 2", why));
        }
        if ![1, 3, 4].contains(&rank) {
            let why = format!("has {rank} dimensions; expected 3 or 4 for images, 1 for labels");
            return Err(invalid(name, "byte 3", why));
        }
        let start = 4 + 4 * usize::from(rank);
        let sizes = bytes.get(4..start).ok_or_else(|| cut("its dimensions"))?;
        let (sizes, _) = sizes.as_chunks::<4>();
        let dims: Vec<usize> =
            sizes.iter().map(|size| u32::from_be_bytes(*size) as usize).collect();
        if dims.contains(&0) {
            let why = format!("is empty: its dimensions are {}", dims_text(&dims));
            return Err(invalid(name, "byte 4", why));
        }
        let Some(end) = file_length(&dims, start) else {
            let why = format!("its dimensions {} are too large", dims_text(&dims));
            return Err(invalid(name, "byte 4", why));
        };
        Ok(Self { dims, start, end })
    }
}
