//! Hashes the sources, so that the nodes of a run know whether they have the same program.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Directories of sources. A published package has them in part, and the other parts by version.
const SOURCES: [&str; 2] = ["src", "shaders"];

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let mut hashed = blake3::Hasher::new();
    for directory in SOURCES {
        println!("cargo::rerun-if-changed={directory}");
        hash_sources(&root.join(directory), &mut hashed)?;
    }
    let lock = root.join("Cargo.lock");
    println!("cargo::rerun-if-changed=Cargo.lock");
    let lock = if lock.is_file() { fs::read_to_string(lock)? } else { String::new() };
    for line in lock.lines().filter(|line| is_of_version(line)) {
        hashed.update(line.as_bytes()).update(b"\n");
    }
    println!("cargo::rustc-env=POTLUCK_BUILD={}", &hashed.finalize().to_hex()[..16]);
    Ok(())
}

/// Adds the names and texts of the sources below a directory to a hash. Other files, such as an
/// editor's, and the line ends of a checkout on Windows have no part in it.
fn hash_sources(directory: &Path, hashed: &mut blake3::Hasher) -> Result<(), Box<dyn Error>> {
    if !directory.is_dir() {
        return Ok(());
    }
    let mut entries = Vec::new();
    for entry in fs::read_dir(directory)? {
        entries.push(entry?);
    }
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if entry.file_type()?.is_dir() {
            hashed.update(name.as_bytes()).update(b"/");
            hash_sources(&path, hashed)?;
        } else if name.ends_with(".rs") || name.ends_with(".wgsl") {
            let mut text = fs::read(&path)?;
            text.retain(|byte| *byte != b'\r');
            hashed.update(name.as_bytes()).update(&(text.len() as u64).to_le_bytes()).update(&text);
        }
    }
    Ok(())
}

/// Returns true for the lines of a lock file that say which version of which package is used.
fn is_of_version(line: &str) -> bool {
    ["name = ", "version = ", "checksum = "].iter().any(|key| line.starts_with(key))
}
