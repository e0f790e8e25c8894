//! The list of what the library offers: a change of it is a change of `api.txt`, to be seen in a
//! review.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Files whose public items the library offers, and the module that they are.
const FILES: [(&str, &str); 2] = [("src/lib.rs", ""), ("src/gantt/mod.rs", "gantt::")];

/// Returns the names that a file declares or re-exports, with their modules; the indentation is
/// that of rustfmt.
fn items(text: &str, module: &str) -> Vec<String> {
    let (mut names, mut path, mut indent) = (Vec::new(), module.to_string(), "");
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line == "}" {
            (path, indent) = (module.to_string(), "");
        }
        let Some(item) = line.strip_prefix(indent).and_then(|line| line.strip_prefix("pub "))
        else {
            continue;
        };
        if let Some(name) = item.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(" {")) {
            (path, indent) = (format!("{module}{name}::"), "    ");
        } else if let Some(used) = item.strip_prefix("use ") {
            let mut used = used.to_string();
            while !used.ends_with(';') {
                used.push_str(lines.next().expect("a declaration ends").trim());
            }
            let list = used.trim_end_matches(['}', ';']).rsplit(['{', ':']).next().unwrap();
            for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
                names.push(format!("{path}{name}"));
            }
        } else {
            for kind in ["fn ", "struct ", "enum ", "trait "] {
                if let Some(rest) = item.strip_prefix(kind) {
                    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap();
                    names.push(format!("{path}{}", &rest[..end]));
                }
            }
        }
    }
    names
}

#[test]
fn library_names_are_those_of_list() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut offered = BTreeSet::new();
    for (file, module) in FILES {
        let text = fs::read_to_string(root.join(file)).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        assert!(!code.contains("::*"), "{file} offers what it does not name");
        // The program in the guide is a documentation test.
        offered.extend(items(code, module).into_iter().filter(|name| !name.ends_with("Guide")));
    }
    let listed = fs::read_to_string(root.join("tests/library/api.txt")).unwrap();
    let listed: BTreeSet<String> = listed.lines().map(String::from).collect();
    let added: Vec<_> = offered.difference(&listed).collect();
    let removed: Vec<_> = listed.difference(&offered).collect();
    assert!(
        added.is_empty() && removed.is_empty(),
        "tests/library/api.txt lacks {added:#?} and has {removed:#?} too many"
    );
}

#[test]
fn items_of_a_source_are_found() {
    let text = "pub use a::B;\npub mod m {\n    pub use e::f::{\n        G, h,\n    };\n    pub fn \
                i(x: u8) {}\n}\nimpl B {\n    pub fn j() {}\n}\npub use a::{C, d};\n";
    assert_eq!(items(text, ""), ["B", "m::G", "m::h", "m::i", "C", "d"]);
}
