//! Crash-safe files: replaced whole or not at all, and synced to the disk before they are relied
//! upon.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Ending of files and directories that were set aside for the user.
const ASIDE: &str = ".aside";

/// Returns true for the errors of a disk or a quota that is full: the only write errors that may
/// end by themselves, so that the same start may succeed later.
pub fn is_disk_full(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Returns the bytes that this user may still write to the disk of a path, whose last parts may not
/// exist yet; `None` if the system does not report them.
pub fn free_space(path: &Path) -> Option<u64> {
    fs4::available_space(nearest(path)?).ok()
}

/// Returns true if this user may create files at a path, whose last parts may not exist yet, now or
/// when a full disk has room again: not below a file, in a directory of other users, or on a
/// read-only file system.
pub fn may_create(path: &Path) -> bool {
    let Some(existing) = nearest(path) else { return false };
    match tempfile::tempfile_in(existing) {
        Ok(_) => true,
        Err(why) => is_disk_full(&why),
    }
}

/// The longest part of a path that exists.
fn nearest(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    path.ancestors().find(|above| above.exists()).map(PathBuf::from)
}

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
    if let Err(why) = write_and_rename(&temporary, path, write) {
        // The first error is reported; a leftover temporary file does no harm.
        let _ = fs::remove_file(&temporary);
        return Err(why);
    }
    sync_directory(parent(path))
}

fn write_and_rename(
    temporary: &Path,
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = File::create(temporary)?;
    write(&mut file)?;
    file.sync_all()?;
    // Closed before the rename, which some platforms refuse for open files.
    drop(file);
    fs::rename(temporary, path)
}

/// Writes to a path that the user named: replaces a file, or the target of a link, and writes into
/// anything that is no regular file (a pipe, a device).
pub fn replace_or_write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => File::options().write(true).open(path)?.write_all(bytes),
        Ok(_) => replace(&fs::canonicalize(path)?, bytes),
        Err(_) => replace(path, bytes),
    }
}

/// Syncs the entries of a directory (files created, renamed, removed) to the disk.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    // Windows cannot open a directory as a file, and writes its entries in order anyway.
    if cfg!(unix) { File::open(directory)?.sync_all() } else { Ok(()) }
}

/// Creates a directory and the missing ones above it, and syncs their entries to the disk.
pub fn create_directories(path: &Path) -> io::Result<()> {
    let missing = path.ancestors().take_while(|above| !above.as_os_str().is_empty());
    let missing: Vec<&Path> = missing.take_while(|above| !above.exists()).collect();
    fs::create_dir_all(path)?;
    for created in missing {
        match sync_directory(parent(created)) {
            // A directory in which entries may be made, but not listed.
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
    }
    Ok(())
}

/// Returns `path` with `suffix` after its last component: a sibling on the same file system.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

/// Returns `path` with the first ending of `.aside`, `.aside.1`, `.aside.2`, and so on that no file
/// or directory has: the name for keeping a file that is about to be replaced.
fn free_aside(path: &Path) -> PathBuf {
    let mut free = beside(path, ASIDE);
    let mut number = 0;
    while free.symlink_metadata().is_ok() {
        number += 1;
        free = beside(path, &format!("{ASIDE}.{number}"));
    }
    free
}

/// Renames a file or a directory to a free name with the ending `.aside`, which it returns.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let aside = free_aside(path);
    fs::rename(path, &aside)?;
    sync_directory(parent(path))?;
    Ok(aside)
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
    fn directories_are_created_with_those_above_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b/c");
        for _ in 0..2 {
            create_directories(&path).unwrap();
            assert!(path.is_dir());
        }
        fs::write(directory.path().join("file"), "").unwrap();
        create_directories(&directory.path().join("file/below")).unwrap_err();
    }

    #[test]
    fn what_is_set_aside_takes_the_first_free_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("list.txt");
        for (text, ending) in [("a", ".aside"), ("b", ".aside.1"), ("c", ".aside.2")] {
            fs::write(&path, text).unwrap();
            assert_eq!(set_aside(&path).unwrap(), beside(&path, ending));
            assert_eq!(fs::read_to_string(beside(&path, ending)).unwrap(), text);
        }
        assert!(set_aside(&path).is_err(), "there is nothing to set aside");
    }

    #[test]
    fn a_bare_file_name_is_in_the_working_directory() {
        assert_eq!(parent(Path::new("x")), Path::new("."));
        assert_eq!(parent(Path::new("a/x")), Path::new("a"));
        assert_eq!(beside(Path::new("a/x"), ".tmp"), Path::new("a/x.tmp"));
    }

    #[test]
    #[cfg(unix)]
    fn links_are_followed_and_what_is_no_file_is_written_to() {
        let directory = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| directory.path().join(name));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        replace_or_write(&link, b"new").unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        let pipe = directory.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        replace_or_write(&pipe, b"through").unwrap();
        assert_eq!(reader.join().unwrap(), b"through");
        replace_or_write(&directory.path().join("fresh"), b"x").unwrap();
    }
}
