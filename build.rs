//! Generates two files that sources include: the built-in corpus for `src/data/corpus.rs`, the
//! project's own sources and documents in the order of their paths, as one text; and the list of
//! shaders for `src/kernels/source.rs`.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Directories that are read recursively, and the extensions of the text files in them.
const DIRECTORIES: [&str; 4] = ["examples", "shaders", "src", "tests"];
const EXTENSIONS: [&str; 4] = ["md", "rs", "toml", "wgsl"];

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let mut paths = Vec::new();
    for entry in fs::read_dir(&root)? {
        let path = entry?.path();
        if path.is_file() && path.extension().is_some_and(|extension| extension == "md") {
            println!("cargo::rerun-if-changed={}", path.display());
            paths.push(path);
        }
    }
    for directory in DIRECTORIES.map(|name| root.join(name)) {
        // A published package may lack the tests or the examples. Naming a directory that is
        // not there would run this at every build.
        if directory.is_dir() {
            println!("cargo::rerun-if-changed={}", directory.display());
            collect(&directory, &mut paths)?;
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("corpus.txt"), concatenate(&root, &paths)?)?;
    fs::write(out.join("shaders.rs"), shaders(&root.join("shaders"))?)?;
    Ok(())
}

/// Returns a Rust expression, the list of (stem, text) of the shader files of a directory, sorted
/// by stem.
fn shaders(directory: &Path) -> Result<String, Box<dyn Error>> {
    let mut stems = Vec::new();
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        stems.extend(name.strip_suffix(".wgsl").map(String::from));
    }
    stems.sort();
    let entry = |stem: &String| {
        let path = format!("concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/shaders/{stem}.wgsl\")");
        format!("({stem:?}, include_str!({path})),\n")
    };
    Ok(format!("&[\n{}]\n", stems.iter().map(entry).collect::<String>()))
}

/// Collects the text files below a directory.
fn collect(directory: &Path, paths: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            collect(&path, paths)?;
        } else if extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
            paths.push(path);
        }
    }
    Ok(())
}

/// Concatenates the files to a text that is the same on every platform: slashes in paths, bare
/// newlines, sorted by path.
fn concatenate(root: &Path, paths: &[PathBuf]) -> Result<String, Box<dyn Error>> {
    let mut files = Vec::new();
    for path in paths {
        let name = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
        let text = fs::read_to_string(path).map_err(|why| format!("{}: {why}", path.display()))?;
        files.push((name, text.replace("\r\n", "\n")));
    }
    files.sort();
    Ok(files.iter().map(|(name, text)| format!("==> {name} <==\n{text}\n")).collect())
}
