//! Hashes the sources, so that the nodes of a run know whether they have the same program.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Directories of sources. A published package has them in part, and the other parts by version.
const SOURCES: [&str; 2] = ["src", "shaders"];
/// Crates whose versions count: they write what goes over the network, translate and run kernels,
/// or compute what all nodes must agree on. Others, such as those of tests, may differ.
const DEPENDENCIES: [&str; 18] = [
    "blake3",
    "gemm",
    "half",
    "image",
    "libm",
    "naga",
    "postcard",
    "quinn",
    "quinn-proto",
    "rcgen",
    "ring",
    "rustls",
    "serde",
    "tokenizers",
    "wgpu",
    "wgpu-core",
    "wgpu-hal",
    "wgpu-types",
];
/// Room of the versions of crates.
const DEPENDENCIES_ROOM: &str = "dependencies";
/// Letters of the hash of everything, and of that of a room.
const HASH_LETTERS: usize = 16;
const ROOM_LETTERS: usize = 8;

/// Emits the hash of everything and then that of each room, as in `0123456789abcdef core=01234567`,
/// so that two builds can tell where they begin to differ.
fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let mut rooms = Vec::new();
    for directory in SOURCES {
        println!("cargo::rerun-if-changed={directory}");
        rooms.extend(hash_rooms(directory, &root.join(directory))?);
    }
    println!("cargo::rerun-if-changed=Cargo.lock");
    let lock = root.join("Cargo.lock");
    let lock = if lock.is_file() { fs::read_to_string(lock)? } else { String::new() };
    rooms.push((DEPENDENCIES_ROOM.to_string(), hash_versions(&lock)));
    let mut all = blake3::Hasher::new();
    for (name, hash) in &rooms {
        all.update(name.as_bytes()).update(hash.as_bytes());
    }
    let mut build = all.finalize().to_hex()[..HASH_LETTERS].to_string();
    for (name, hash) in &rooms {
        build += &format!(" {name}={}", &hash.to_hex()[..ROOM_LETTERS]);
    }
    println!("cargo::rustc-env=POTLUCK_BUILD={build}");
    Ok(())
}

/// Returns the hashes of the directories in a directory of sources by their names, before that of
/// its own files by its name.
pub fn hash_rooms(
    name: &str,
    directory: &Path,
) -> Result<Vec<(String, blake3::Hash)>, Box<dyn Error>> {
    let mut rooms = Vec::new();
    let mut files = blake3::Hasher::new();
    for entry in sorted(directory)? {
        if entry.file_type()?.is_dir() {
            let mut hashed = blake3::Hasher::new();
            hash_sources(&entry.path(), &mut hashed)?;
            rooms.push((entry.file_name().to_string_lossy().into_owned(), hashed.finalize()));
        } else {
            hash_source(&entry, &mut files)?;
        }
    }
    rooms.push((name.to_string(), files.finalize()));
    Ok(rooms)
}

/// Returns the entries of a directory by name; none if there is no such directory.
fn sorted(directory: &Path) -> Result<Vec<fs::DirEntry>, Box<dyn Error>> {
    let mut entries = Vec::new();
    if directory.is_dir() {
        for entry in fs::read_dir(directory)? {
            entries.push(entry?);
        }
    }
    entries.sort_by_key(fs::DirEntry::file_name);
    Ok(entries)
}

/// Adds the names and texts of the sources below a directory to a hash.
fn hash_sources(directory: &Path, hashed: &mut blake3::Hasher) -> Result<(), Box<dyn Error>> {
    for entry in sorted(directory)? {
        if entry.file_type()?.is_dir() {
            hashed.update(entry.file_name().to_string_lossy().as_bytes()).update(b"/");
            hash_sources(&entry.path(), hashed)?;
        } else {
            hash_source(&entry, hashed)?;
        }
    }
    Ok(())
}

/// Adds the name and text of a source to a hash. Other files, such as an editor's, and the line
/// ends of a checkout on Windows have no part in it.
fn hash_source(entry: &fs::DirEntry, hashed: &mut blake3::Hasher) -> Result<(), Box<dyn Error>> {
    let name = entry.file_name().to_string_lossy().into_owned();
    let is_hidden = name.starts_with('.');
    if !is_hidden && (name.ends_with(".rs") || name.ends_with(".wgsl")) {
        let mut text = fs::read(entry.path())?;
        text.retain(|byte| *byte != b'\r');
        hashed.update(name.as_bytes()).update(&(text.len() as u64).to_le_bytes()).update(&text);
    }
    Ok(())
}

/// Returns the hash of the versions of [`DEPENDENCIES`] in a lock file.
pub fn hash_versions(lock: &str) -> blake3::Hash {
    let mut hashed = blake3::Hasher::new();
    for package in lock.split("[[package]]") {
        let value = |key: &str| package.lines().find_map(|line| line.strip_prefix(key));
        let (Some(name), Some(version)) = (value("name = "), value("version = ")) else { continue };
        if DEPENDENCIES.contains(&name.trim_matches('"')) {
            hashed.update(name.as_bytes()).update(version.as_bytes());
        }
    }
    hashed.finalize()
}
