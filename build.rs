//! Generates the list of shaders for `src/kernels/source.rs`.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let shaders = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("shaders");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", shaders.display());
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("shaders.rs"), list(&shaders)?)?;
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let mut hashed = blake3::Hasher::new();
    for part in ["src", "shaders", "Cargo.lock"] {
        let path = root.join(part);
        println!("cargo::rerun-if-changed={}", path.display());
        hash(&path, &mut hashed)?;
    }
    println!("cargo::rustc-env=POTLUCK_BUILD={}", &hashed.finalize().to_hex()[..16]);
    Ok(())
}

/// Adds the names and contents of the files of a directory, or a file that exists, to the hash by
/// which the nodes of a run know that they have the same program.
fn hash(path: &Path, hashed: &mut blake3::Hasher) -> Result<(), Box<dyn Error>> {
    if path.is_dir() {
        let entries: Result<Vec<_>, _> = fs::read_dir(path)?.collect();
        let mut names: Vec<_> = entries?.into_iter().map(|entry| entry.file_name()).collect();
        names.sort();
        for name in names {
            hashed.update(name.to_string_lossy().as_bytes());
            hash(&path.join(name), hashed)?;
        }
    } else if path.is_file() {
        let text = fs::read(path)?;
        hashed.update(&(text.len() as u64).to_le_bytes()).update(&text);
    }
    Ok(())
}

/// Returns a Rust expression, the list of (stem, text) of the shader files of a directory, sorted
/// by stem.
fn list(directory: &Path) -> Result<String, Box<dyn Error>> {
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
