//! Versions of the crates behind the links that are known to be without a hole.

use std::fs;

/// Returns the version of a crate in a lock file, as three numbers.
fn locked(lock: &toml::Table, name: &str) -> Option<Vec<u32>> {
    let packages = lock["package"].as_array()?.iter();
    let mut found = packages.filter(|package| package["name"].as_str() == Some(name));
    let version = found.next()?["version"].as_str()?;
    assert!(found.next().is_none(), "{name} is locked in two versions");
    Some(version.split('.').map(|part| part.parse().expect("a number")).collect())
}

#[test]
fn crates_behind_the_links_have_no_known_hole() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock");
    let lock: toml::Table = fs::read_to_string(path).unwrap().parse().unwrap();
    // Before 0.11.14 one packet of a stranger made the endpoint panic (CVE-2026-31812).
    assert!(locked(&lock, "quinn-proto").unwrap() >= vec![0, 11, 14]);
    assert!(locked(&lock, "quinn").unwrap() >= vec![0, 11, 12]);
    // One provider of cryptography: a second one would be compiled for nothing.
    assert_eq!(locked(&lock, "aws-lc-rs"), None);
    assert!(locked(&lock, "ring").is_some());
}
