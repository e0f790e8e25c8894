//! Generates the built-in corpus: the project's own sources and documents, in the order of their
//! paths, as one text that `src/data/corpus.rs` includes.

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
    let corpus = PathBuf::from(env::var("OUT_DIR")?).join("corpus.txt");
    fs::write(corpus, concatenate(&root, &paths)?)?;
    Ok(())
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
