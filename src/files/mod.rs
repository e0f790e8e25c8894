//! Crash-safe files: replaced whole or not at all, and synced to the disk before they are relied
//! upon.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Replaces the file at `path` with `bytes` atomically: a reader, also after a crash or a loss of
/// power, finds either the old content or the new one.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with(path, |file| file.write_all(bytes))
}

/// Like [`replace`], with the content written by a function.
pub fn replace_with(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = beside(path, ".tmp");
    let written = File::create(&temporary).and_then(|mut file| {
        write(&mut file)?;
        file.sync_all()?;
        // Closed before the rename, which some platforms refuse for open files.
        drop(file);
        fs::rename(&temporary, path)
    });
    if written.is_err() {
        // The first error is reported; a leftover temporary file does no harm.
        let _ = fs::remove_file(&temporary);
        return written;
    }
    sync_directory(parent(path))
}

/// Syncs the entries of a directory (files created, renamed, removed) to the disk.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    // Windows cannot open a directory as a file, and writes its entries in order by itself.
    if cfg!(unix) { File::open(directory)?.sync_all() } else { Ok(()) }
}

/// Returns `path` with `suffix` after its last component: a sibling on the same file system.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

/// Returns the directory that holds `path`.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("best");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");

        let failed = replace_with(&path, |file| {
            file.write_all(b"thr")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_bare_file_name_is_in_the_working_directory() {
        assert_eq!(parent(Path::new("x")), Path::new("."));
        assert_eq!(parent(Path::new("a/x")), Path::new("a"));
        assert_eq!(beside(Path::new("a/x"), ".tmp"), Path::new("a/x.tmp"));
    }
}
