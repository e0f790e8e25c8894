//! The archive of a report, small enough for a message: only the ends of logs are included.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::report::{self, HEADER, SCRATCH, SUMMARY};
use flate2::Compression;
use flate2::write::GzEncoder;
use potluck_core::files;

/// Upper bound of the archive, in bytes.
const BYTES_MAX: usize = 5_000_000;
/// Bytes kept of the end of a log; halved until the archive is small enough.
const TAIL: usize = 1 << 20;
/// Extensions of files in the archive.
const ENDINGS: [&str; 3] = ["md", "json", "log"];

/// Path of the archive of a report, beside its folder.
pub fn path(folder: &Path) -> PathBuf {
    files::beside(folder, ".tar.gz")
}

/// Writes the archive of a report.
pub fn write(folder: &Path) -> io::Result<()> {
    let name = folder.file_name().unwrap_or_default();
    let mut tail = TAIL;
    let bytes = loop {
        let bytes = packed(folder, Path::new(name), tail)?;
        if bytes.len() < BYTES_MAX || tail <= 1 {
            break bytes;
        }
        tail /= 2;
    };
    files::replace(&path(folder), &bytes)
}

/// Archive, with at most `tail` bytes of the end of each log.
fn packed(folder: &Path, name: &Path, tail: usize) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for path in contents(folder)? {
        let bytes = fs::read(&path)?;
        let is_log = path.extension().is_some_and(|ending| ending == "log");
        let kept = if is_log { ended(&bytes, tail) } else { bytes };
        let inside = name.join(path.strip_prefix(folder).map_err(io::Error::other)?);
        let mut header = tar::Header::new_gnu();
        header.set_size(kept.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, inside, &kept[..])?;
    }
    let mut encoder = archive.into_inner()?;
    encoder.flush()?;
    encoder.finish()
}

/// Files of a report that belong to the archive, sorted by name. The folder may have other files,
/// which are not for others to read.
fn contents(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let common = [HEADER, SUMMARY].map(|name| folder.join(name));
    let mut found: Vec<PathBuf> = common.into_iter().filter(|path| path.is_file()).collect();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if report::is_place(&entry.file_name()) && entry.file_type()?.is_dir() {
            add_files(&entry.path(), &mut found)?;
        }
    }
    found.sort();
    Ok(found)
}

/// Adds the files of the folder of an adapter, without those behind links.
fn add_files(folder: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() && entry.file_name() != SCRATCH {
            add_files(&path, found)?;
        } else if kind.is_file()
            && path.extension().is_some_and(|ending| ENDINGS.iter().any(|one| ending == *one))
        {
            found.push(path);
        }
    }
    Ok(())
}

/// The end of a text, after a line with the number of bytes that are left out, if any.
fn ended(bytes: &[u8], most: usize) -> Vec<u8> {
    if bytes.len() <= most {
        return bytes.to_vec();
    }
    let cut = bytes.len() - most;
    let mut kept = format!("[{cut} bytes before this are left out]\n").into_bytes();
    kept.extend_from_slice(&bytes[cut..]);
    kept
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;
    use potluck_core::rng::Key;

    fn unpacked(path: &Path) -> BTreeMap<String, Vec<u8>> {
        let bytes = fs::read(path).unwrap();
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
        let mut files = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().to_string_lossy().into_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(name, content);
        }
        files
    }

    #[test]
    fn long_logs_are_cut_until_the_archive_is_small() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join("report");
        fs::create_dir_all(folder.join("adapter-0").join(SCRATCH)).unwrap();
        fs::write(folder.join("SUMMARY.md"), "# all").unwrap();
        fs::write(folder.join("adapter-0/facts.json"), "{}").unwrap();
        fs::write(folder.join("adapter-0").join(SCRATCH).join("big.json"), "{}").unwrap();
        // What others have put there is not for the archive.
        fs::create_dir_all(folder.join("adapter-of-mine")).unwrap();
        for mine in ["credentials.json", "adapter-of-mine/notes.md", "adapter-0/key.pem"] {
            fs::write(folder.join(mine), "secret").unwrap();
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(directory.path(), folder.join("adapter-0/link")).unwrap();
        fs::write(directory.path().join("outside.json"), "secret").unwrap();
        // Random bytes do not shrink: twelve logs of a MiB are too long.
        let key = Key::new(1);
        let noise: Vec<u8> = (0..1 << 20).map(|at| key.words([at, 0])[0] as u8).collect();
        for log in 0..12 {
            fs::write(folder.join(format!("adapter-0/{log}.log")), &noise).unwrap();
        }
        write(&folder).unwrap();
        let path = directory.path().join("report.tar.gz");
        assert!(fs::metadata(&path).unwrap().len() < BYTES_MAX as u64);
        let files = unpacked(&path);
        assert_eq!(files["report/SUMMARY.md"], b"# all");
        assert_eq!(files["report/adapter-0/facts.json"], b"{}");
        assert_eq!(files.len(), 14, "{:?}", files.keys());
        let log = &files["report/adapter-0/3.log"];
        assert!(log.starts_with(b"[") && log.len() < noise.len() && noise.ends_with(&log[99..]));
    }
}
