//! Figures of kernels that were compiled before: a kernel whose words, driver and reader of its
//! assembly are the same has the same figures, and is not compiled again.

use std::fs;
use std::path::Path;

use super::radv::Compiler;
use super::{Figures, Kernel};
use potluck_core::files::replace;

/// Returns the figures of a kernel: those that were kept, or those that are made and then kept. A
/// file that cannot be read or written costs the time to make them.
pub fn or_made(compiler: &Compiler, kernel: &Kernel, make: impl FnOnce() -> Figures) -> Figures {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compiler");
    let path = directory.join(format!("{}.json", key(compiler, kernel)));
    let kept = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    kept.unwrap_or_else(|| {
        let made = make();
        let bytes = serde_json::to_vec(&made).unwrap();
        let _ = fs::create_dir_all(&directory).and_then(|()| replace(&path, &bytes));
        made
    })
}

fn key(compiler: &Compiler, kernel: &Kernel) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in [include_str!("assembly.rs"), include_str!("radv.rs"), &compiler.name] {
        hasher.update(part.as_bytes()).update(&[0]);
    }
    hasher.update(&compiler.build).update(kernel.entry_point.as_bytes()).update(&[0]);
    kernel.words.iter().for_each(|word| {
        hasher.update(&word.to_le_bytes());
    });
    hasher.finalize().to_string()
}
