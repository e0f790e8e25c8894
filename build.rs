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
