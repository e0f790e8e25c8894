//! Input files: their order, their formats, and the formats that are refused by name.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use flate2::read::MultiGzDecoder;

use crate::DataError;

/// Extensions of the texts in a directory. A file that is given by name is read as a text with any
/// extension.
const TEXTS: [&str; 2] = ["txt", "text"];

/// Extensions of files with one JSON value per line.
const LINES: [&str; 2] = ["jsonl", "ndjson"];

/// Largest depth of directories below a given one.
const DEPTH_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct InputFile {
    pub path: PathBuf,
    /// Its size on disk.
    pub bytes: u64,
    /// Time of its last change, in nanoseconds since 1970; 0 if the system does not provide it.
    modified: u128,
    /// True if each line is a document in JSON, false for a text.
    pub is_lines: bool,
    is_compressed: bool,
}

/// Files of some paths.
#[derive(Debug, Default)]
pub(super) struct InputFiles {
    pub files: Vec<InputFile>,
    /// Number of files in directories that are of other formats.
    pub left_out: usize,
}

impl InputFiles {
    /// Finds the given files, and the files below given directories, in the order of their names
    /// and without hidden ones. With `plain`, all paths are texts, and none is a directory.
    ///
    /// # Errors
    /// Returns a `DataError` that names the path if one cannot be read, or is of a format that is
    /// not read, or if there is no file.
    pub fn find(paths: &[PathBuf], plain: bool) -> Result<Self, DataError> {
        let mut found = Self::default();
        for path in paths {
            if plain {
                found.add_as(path, "", false)?;
            } else if path.is_dir() {
                let before = found.files.len();
                found.walk(path, 0)?;
                if found.files.len() == before {
                    let why = "has no text (.txt, .text) and no JSON Lines (.jsonl, .ndjson), \
                               also with .gz behind that; name files to read them as texts";
                    return Err(DataError::of_file(path.display(), why));
                }
            } else {
                found.add(path)?;
            }
        }
        Ok(found)
    }

    fn walk(&mut self, directory: &Path, depth: usize) -> Result<(), DataError> {
        let unread = |why| unreadable(directory, why);
        let mut paths = Vec::new();
        for entry in fs::read_dir(directory).map_err(unread)? {
            let entry = entry.map_err(unread)?;
            let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
            // A link to a directory may lead back here.
            let is_link = entry.file_type().map_err(unread)?.is_symlink();
            let may_lead_back = is_link && entry.path().is_dir();
            if !is_hidden && !may_lead_back {
                paths.push(entry.path());
            }
        }
        paths.sort();
        for path in paths {
            if path.is_dir() {
                if depth == DEPTH_MAX {
                    return Err(DataError::of_file(path.display(), "is too deep in directories"));
                }
                self.walk(&path, depth + 1)?;
            } else if is_taken(&path) || is_table(&path) {
                // A table is refused, and not left out: it is probably the main part of the data
                // set.
                self.add(&path)?;
            } else {
                self.left_out += 1;
            }
        }
        Ok(())
    }

    fn add(&mut self, path: &Path) -> Result<(), DataError> {
        let (ending, is_compressed) = ending(path);
        if let Some(why) = refusal(path, &ending) {
            return Err(DataError::of_file(path.display(), why));
        }
        self.add_as(path, &ending, is_compressed)
    }

    fn add_as(&mut self, path: &Path, ending: &str, is_compressed: bool) -> Result<(), DataError> {
        let found = fs::metadata(path).map_err(|why| unreadable(path, why))?;
        if !found.is_file() {
            return Err(DataError::of_file(path.display(), "is no regular file"));
        }
        let mut modified = 0;
        if let Ok(at) = found.modified()
            && let Ok(since) = at.duration_since(UNIX_EPOCH)
        {
            modified = since.as_nanos();
        }
        self.files.push(InputFile {
            path: path.into(),
            bytes: found.len(),
            modified,
            is_lines: LINES.contains(&ending),
            is_compressed,
        });
        Ok(())
    }

    /// Returns the bytes of all files on disk.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Adds the identity of the files to a hash: paths, sizes and times.
    pub fn hash(&self, hasher: &mut blake3::Hasher) {
        for file in &self.files {
            let path = fs::canonicalize(&file.path).unwrap_or_else(|_| file.path.clone());
            let told = format!("{}\n{} {}\n", path.display(), file.bytes, file.modified);
            hasher.update(told.as_bytes());
        }
    }
}

impl InputFile {
    /// Opens the file, unpacked, from an offset on; `read` counts the bytes on disk.
    pub fn open(&self, offset: u64, read: &Arc<AtomicU64>) -> io::Result<Box<dyn BufRead + Send>> {
        let mut file = Counting { file: File::open(&self.path)?, read: read.clone() };
        if !self.is_compressed {
            file.file.seek(SeekFrom::Start(offset))?;
            read.fetch_add(offset, Ordering::Relaxed);
            return Ok(Box::new(BufReader::new(file)));
        }
        let mut unpacked = BufReader::new(MultiGzDecoder::new(BufReader::new(file)));
        io::copy(&mut (&mut unpacked).take(offset), &mut io::sink())?;
        Ok(Box::new(unpacked))
    }
}

/// A file that counts the bytes read from it.
struct Counting {
    file: File,
    read: Arc<AtomicU64>,
}

impl Read for Counting {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// Extension of a name in lower case, without a final `.gz`, and true with a `.gz`.
fn ending(path: &Path) -> (String, bool) {
    let last = extension(path);
    if last == "gz" {
        return (extension(&path.with_extension("")), true);
    }
    (last, false)
}

fn extension(path: &Path) -> String {
    path.extension().unwrap_or_default().to_string_lossy().to_lowercase()
}

fn is_taken(path: &Path) -> bool {
    let (ending, _) = ending(path);
    TEXTS.contains(&&*ending) || LINES.contains(&&*ending)
}

/// Returns true for the formats of tables in which data sets are distributed.
fn is_table(path: &Path) -> bool {
    ["parquet", "arrow", "feather"].contains(&&*ending(path).0)
}

/// Reason why a file with this extension is not read, with a command to convert it.
fn refusal(path: &Path, ending: &str) -> Option<String> {
    let name = path.display();
    let lines = path.with_extension("jsonl");
    let lines = lines.display();
    Some(match ending {
        "parquet" => format!(
            "is Parquet, which is not read; convert it: python3 -c \"import pandas; \
             pandas.read_parquet('{name}').to_json('{lines}', orient='records', lines=True)\""
        ),
        "arrow" | "feather" => format!(
            "is an Arrow file, which is not read; convert it: python3 -c \"import pandas; \
             pandas.read_feather('{name}').to_json('{lines}', orient='records', lines=True)\""
        ),
        "json" => format!(
            "is JSON, and not a document per line; convert it: jq -c '.[]' '{name}' > '{lines}'"
        ),
        "zst" | "xz" | "bz2" | "zip" | "tar" | "7z" => {
            "is packed in a way that is not read; unpack it, or pack it with gzip".into()
        }
        _ => return None,
    })
}

pub(super) fn unreadable(path: &Path, why: io::Error) -> DataError {
    DataError::Read { name: path.display().to_string(), why }
}
