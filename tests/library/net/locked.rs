//! Versions of other crates in use: those behind the links are known to be without a hole, and
//! that of wgpu is a part of certificates.

use std::fs;

use potluck_kernels::autotune::certify::WGPU;

/// Returns the version of a crate in a lock file, as three numbers.
fn locked(lock: &toml::Table, name: &str) -> Option<Vec<u32>> {
    let packages = lock["package"].as_array()?.iter();
    let mut found = packages.filter(|package| package["name"].as_str() == Some(name));
    let version = found.next()?["version"].as_str()?;
    assert!(found.next().is_none(), "{name} is locked in two versions");
    Some(version.split('.').map(|part| part.parse().expect("a number")).collect())
}

fn lock() -> toml::Table {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock");
    fs::read_to_string(path).unwrap().parse().unwrap()
}

#[test]
fn wgpu_release_is_the_one_in_use() {
    let version: Vec<u32> = WGPU.split('.').map(|part| part.parse().unwrap()).collect();
    assert_eq!(locked(&lock(), "wgpu"), Some(version));
}

#[test]
fn crates_of_links_have_no_known_hole() {
    let lock = lock();
    // Before 0.11.14 one packet of a stranger made the endpoint panic (CVE-2026-31812).
    assert!(locked(&lock, "quinn-proto").unwrap() >= vec![0, 11, 14]);
    assert!(locked(&lock, "quinn").unwrap() >= vec![0, 11, 12]);
    // One provider of cryptography: a second one would be compiled for nothing.
    assert_eq!(locked(&lock, "aws-lc-rs"), None);
    assert!(locked(&lock, "ring").is_some());
}
