//! The hash by which nodes tell that they have the same build: of sources and of the crates that
//! count, and of nothing else.

use std::fs;
use std::path::Path;

#[allow(dead_code, reason = "its main is that of the build")]
#[path = "../../build.rs"]
mod script;

fn rooms(directory: &Path) -> Vec<(String, String)> {
    let rooms = script::hash_rooms("src", directory).unwrap();
    rooms.into_iter().map(|(name, hash)| (name, hash.to_hex().to_string())).collect()
}

#[test]
fn build_hash_counts_sources_only() {
    let there = tempfile::tempdir().unwrap();
    let path = |name: &str| there.path().join(name);
    fs::create_dir_all(path("net/cluster")).unwrap();
    fs::create_dir(path("core")).unwrap();
    fs::write(path("main.rs"), "fn main() {\n}\n").unwrap();
    fs::write(path("core/lib.rs"), "//! Core.\n").unwrap();
    fs::write(path("net/cluster/mod.rs"), "//! Cluster.\n").unwrap();
    let before = rooms(there.path());
    let names: Vec<&str> = before.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["core", "net", "src"]);
    // What editors, file managers and checkouts on Windows leave.
    for dropping in [".DS_Store", "main.rs~", ".main.rs.swp", "main.rs.orig", ".#main.rs"] {
        fs::write(path("net").join(dropping), "dropping").unwrap();
        fs::write(path(dropping), "dropping").unwrap();
    }
    fs::write(path("main.rs"), "fn main() {\r\n}\r\n").unwrap();
    assert_eq!(rooms(there.path()), before);
    fs::write(path("net/cluster/mod.rs"), "//! A cluster.\n").unwrap();
    let after = rooms(there.path());
    let differing: Vec<&str> =
        after.iter().filter(|room| !before.contains(room)).map(|(name, _)| &**name).collect();
    assert_eq!(differing, ["net"]);
}

#[test]
fn build_hash_counts_versions_of_crates() {
    let lock = |wgpu: &str, tests: &str| {
        format!(
            "[[package]]\nname = \"wgpu\"\nversion = \"{wgpu}\"\n\n\
             [[package]]\nname = \"proptest\"\nversion = \"{tests}\"\n"
        )
    };
    let hash = |wgpu, tests| script::hash_versions(&lock(wgpu, tests));
    assert_eq!(hash("30.0.0", "1.0.0"), hash("30.0.0", "1.1.0"));
    assert_ne!(hash("30.0.0", "1.0.0"), hash("30.0.1", "1.0.0"));
}

#[test]
fn build_hash_names_its_rooms() {
    let mut words = env!("POTLUCK_BUILD").split(' ');
    assert_eq!(words.next().unwrap().len(), 16);
    let rooms: Vec<&str> = words.map(|word| word.split_once('=').unwrap().0).collect();
    for room in ["core", "net", "kernels", "src", "shaders", "dependencies"] {
        assert!(rooms.contains(&room), "{rooms:?}");
    }
}
