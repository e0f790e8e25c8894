//! Hashes of the sources of the program and of its crates.

use std::sync::OnceLock;

static HASH: OnceLock<&str> = OnceLock::new();

/// Sets the hash, at the start of a program: the package `potluck` knows it, whose build script
/// sees all sources. The first one counts.
pub fn set_build_hash(hash: &'static str) {
    // A second call has the same one: there is one package `potluck` in a program.
    let _ = HASH.set(hash);
}

/// Returns the hash of everything, the first word of what [`build_hash`] returns here or on another
/// node.
pub fn whole_hash(build: &str) -> &str {
    build.split(' ').next().unwrap_or_default()
}

/// Returns the hash, by which the nodes of a run recognize the same program, followed by the hashes
/// of the crates, which show the difference between two programs; `unknown` if none was set.
pub fn build_hash() -> &'static str {
    HASH.get().copied().unwrap_or("unknown")
}
